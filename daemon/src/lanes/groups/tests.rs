//! Unit tests of the link groups' state machine, with clients that are numbers.

mod limited;
mod takeover;

use super::area::Stage;
use super::growth::RESEND_AFTER;
use super::*;
use crate::clients::limits::for_tests;
use crate::os::system::Clock;
use lane::abi::{Epoch, CHUNKS, CHUNK_BYTES, CONTROL_BYTES, REMOTE_CHUNK_BYTES};
use underpass_rdma::verbs::Memory as _;

fn end(client: u64, conn: u32) -> ConnRef {
    ConnRef {
        client: ClientId(client),
        conn,
        gen: 1,
    }
}

fn of(cgroups: &[Arc<Cgroup>; 2], sizes: [Size; 2]) -> [(&Arc<Cgroup>, Size); 2] {
    [(&cgroups[0], sizes[0]), (&cgroups[1], sizes[1])]
}

/// Link groups, and shims that map whatever they are given.
struct World {
    groups: LinkGroups,
    cgroups: [Arc<Cgroup>; 2],
    sizes: [Size; 2],
    offers: Vec<(ClientId, u64, u32, u32)>,
    gone: Vec<(ClientId, u8)>,
    failed: Vec<[ConnRef; 2]>,
    ready: Vec<ConnRef>,
}

const AREA: u64 = (CONTROL_BYTES + CHUNK_BYTES) as u64;
const REMOTE_AREA: u64 = (CONTROL_BYTES + REMOTE_CHUNK_BYTES) as u64;

impl World {
    fn new(lanes: u32, memory: u64) -> World {
        World {
            groups: LinkGroups::new(0xabcd, Clock::default()),
            cgroups: [for_tests(lanes, memory), for_tests(lanes, memory)],
            sizes: [Size::Whole; 2],
            offers: vec![],
            gone: vec![],
            failed: vec![],
            ready: vec![],
        }
    }

    fn connect(&mut self, ends: [ConnRef; 2]) -> Result<(), Refused> {
        let mut out = Out::default();
        let of = of(&self.cgroups, self.sizes);
        let r = self.groups.connect(ends, of, 5, &mut out);
        self.help(out);
        r.map(drop)
    }

    /// Makes a chunk of side 0 look as if it had been sent a while ago.
    fn later(&mut self, group: u64, chunk: u32) {
        let side = &mut self.groups.groups.get_mut(&group).unwrap().sides[0];
        let c = side.chunk(chunk).unwrap();
        c.sent = c.sent.checked_sub(RESEND_AFTER).unwrap();
    }

    /// A client maps a chunk of its own, which the daemon seals for it.
    fn map(&mut self, who: ClientId, (group, side): (u64, u8), n: u32, out: &mut Out) {
        let unsealed = self.groups.unsealed(who, (group, side), n);
        if let Some(file) = unsealed.filter(|_| !who.is_remote()) {
            assert!(self.groups.mapped(who, group, side, n, out).is_err());
            memfd::seal(&file).unwrap();
        }
        assert!(self.groups.unsealed(who, (group, side), n).is_none());
        self.groups.mapped(who, group, side, n, out).unwrap();
    }

    fn help(&mut self, mut out: Out) {
        while !out.sends.is_empty() || !out.failed.is_empty() || !out.ready.is_empty() {
            let mut next = Out::default();
            self.ready.append(&mut out.ready);
            for s in out.sends {
                let to = s.to;
                match s.msg {
                    ToShim::GroupNew { group, side, .. } => {
                        self.map(to, (group, side), 0, &mut next)
                    }
                    ToShim::Chunk {
                        group, side, chunk, ..
                    } => self.map(to, (group, side), chunk, &mut next),
                    ToShim::PeerChunk { chunk: 0, .. } => {}
                    ToShim::PeerChunk {
                        group, side, chunk, ..
                    } => self
                        .groups
                        .peer_mapped(to, group, side, chunk, &mut next)
                        .unwrap(),
                    ToShim::Offer {
                        group, lane, epoch, ..
                    } => self.offers.push((to, group, lane, epoch.get())),
                    ToShim::PeerGone { side, .. } => self.gone.push((to, side)),
                    _ => {}
                }
            }
            self.failed.append(&mut out.failed);
            out = next;
        }
    }

    fn done(&mut self, group: u64, lane: u32) {
        self.groups
            .lane_done(ClientId(1), group, 0, lane, &mut Out::default())
            .unwrap();
        self.groups
            .lane_done(ClientId(2), group, 1, lane, &mut Out::default())
            .unwrap();
    }
}

#[test]
fn more_lanes_than_a_group_has() {
    let mut w = World::new(5000, u64::MAX);
    for i in 0..LANES as u32 + 1 {
        // Given in any order: the same link group serves both.
        let (a, b) = (end(1, i), end(2, i));
        w.connect(if i % 2 == 0 { [a, b] } else { [b, a] }).unwrap();
    }
    assert_eq!((w.groups.len(), w.groups.lanes()), (2, LANES as u64 + 1));
    assert_eq!(w.offers.len(), 2 * (LANES + 1));
    let first = w.offers[0].1;
    assert_eq!(w.offers.iter().filter(|o| o.1 == first).count(), 2 * LANES);
    // A slot that comes free is preferred to the new link group's.
    w.done(first, 77);
    w.connect([end(1, 9000), end(2, 9000)]).unwrap();
    assert_eq!(
        w.offers.last().map(|o| (o.1, o.2, o.3)),
        Some((first, 77, EPOCHS))
    );
}

#[test]
fn a_slot_retires_with_its_last_epochs() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    let group = w.offers[0].1;
    w.groups.groups.get_mut(&group).unwrap().slots[0].uses = u32::MAX / EPOCHS - 1;
    w.done(group, 0);
    w.connect([end(1, 1), end(2, 1)]).unwrap();
    assert_eq!(w.offers.last().unwrap().2, 1, "not the used-up slot");
    assert!((u32::MAX / EPOCHS - 1)
        .checked_mul(EPOCHS)
        .unwrap()
        .checked_add(EPOCHS - 1)
        .is_some());
}

#[test]
fn limits_of_either_side() {
    let mut w = World::new(2, u64::MAX);
    w.cgroups[1] = for_tests(1, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    assert_eq!(w.connect([end(1, 1), end(2, 1)]), Err(Refused::Limit(1)));
    w.cgroups.swap(0, 1);
    assert_eq!(
        w.connect([end(2, 1), end(1, 1)]),
        Err(Refused::Limit(0)),
        "named as it was given"
    );
    w.cgroups.swap(0, 1);
    let group = w.offers[0].1;
    w.done(group, 0);
    w.connect([end(1, 1), end(2, 1)]).unwrap();
    assert_eq!(w.groups.lanes(), 1);
}

#[test]
fn memory_is_limited_and_given_back() {
    let mut w = World::new(10, AREA);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    assert_eq!(w.connect([end(1, 1), end(3, 1)]), Err(Refused::Limit(0)));
    assert_eq!(w.groups.lanes(), 1, "the refused one holds no lane");
    let (group, mut out) = (w.offers[0].1, Out::default());
    w.groups
        .want_chunk(ClientId(1), group, 0, &mut out)
        .unwrap();
    assert!(out.sends.is_empty(), "no room for another chunk");
    w.groups.client_dead(ClientId(2), &[], &mut out);
    w.help(out);
    assert_eq!(
        w.gone,
        [(ClientId(1), 0)],
        "the survivor is told, about its side"
    );
    w.connect([end(1, 1), end(3, 1)]).unwrap();
    assert_eq!((w.groups.len(), w.groups.lanes()), (1, 1));
}

#[test]
fn one_chunk_at_a_time_and_not_for_ever() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    let group = w.offers[0].1;
    let mut out = Out::default();
    w.groups
        .want_chunk(ClientId(1), group, 0, &mut out)
        .unwrap();
    let mut again = Out::default();
    w.groups
        .want_chunk(ClientId(1), group, 0, &mut again)
        .unwrap();
    assert!(again.sends.is_empty(), "it is on its way");
    w.later(group, 2);
    w.groups
        .want_chunk(ClientId(1), group, 0, &mut out)
        .unwrap();
    let again = out.sends.pop().unwrap();
    assert_eq!(again.msg, out.sends[0].msg, "the first is not ready yet");
    w.help(out);
    // The copy that was only late is mapped once more, without any effect.
    let late = vec![again];
    w.help(Out {
        sends: late,
        ..Out::default()
    });
    assert_eq!(w.groups.groups[&group].sides[0].more.len(), 1);
    for _ in 0..CHUNKS {
        let mut out = Out::default();
        w.groups
            .want_chunk(ClientId(1), group, 0, &mut out)
            .unwrap();
        w.help(out);
    }
    assert_eq!(w.groups.groups[&group].sides[0].more.len(), CHUNKS - 2);
    assert_eq!(w.groups.groups[&group].sides[1].more.len(), 0);
}

/// The reader cannot map a chunk of a link group that is in use (it has no descriptor left): the link group goes
/// on without, and the chunk is offered again.
#[test]
fn a_chunk_that_could_not_be_mapped() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    let group = w.offers[0].1;
    let mut out = Out::default();
    w.groups
        .want_chunk(ClientId(1), group, 0, &mut out)
        .unwrap();
    let mut lost = Out::default();
    w.map(ClientId(1), (group, 0), 2, &mut lost);
    assert_eq!(lost.sends.len(), 1);
    let lost = lost.sends.pop().unwrap();
    w.later(group, 2);
    let mut out = Out::default();
    w.groups
        .want_chunk(ClientId(1), group, 0, &mut out)
        .unwrap();
    assert_eq!((out.sends[0].to, &out.sends[0].msg), (lost.to, &lost.msg));
    w.help(out);
    assert_eq!(
        w.groups.groups[&group].sides[0].more[0].stage,
        Stage::Shared
    );
    assert!(w.gone.is_empty());
}

#[test]
fn a_client_with_itself() {
    let mut w = World::new(10, u64::MAX);
    let g = w.cgroups[0].clone();
    let mut out = Out::default();
    w.groups
        .connect([end(1, 0), end(1, 1)], [(&g, Size::Whole); 2], 5, &mut out)
        .unwrap();
    w.help(out);
    assert_eq!(w.offers.len(), 2);
    let mut out = Out::default();
    w.groups.client_dead(ClientId(1), &[], &mut out);
    assert!(out.sends.is_empty(), "nobody is left to be told");
    assert!(w.groups.is_empty() && w.groups.lanes() == 0);
    assert!(
        w.groups.by_pair.is_empty() && w.groups.by_conn.is_empty() && w.groups.by_client.is_empty()
    );
    assert!(g.take_memory(u64::MAX, false), "all is given back");
}

/// Another process goes on with the dead client's connection: the other end is told only when the link group is over.
#[test]
fn a_group_that_is_inherited() {
    let mut w = World::new(10, u64::MAX);
    for other in [2, 3] {
        w.connect([end(1, other), end(u64::from(other), 0)])
            .unwrap();
    }
    let lanes = w.groups.local_lanes(ClientId(1));
    assert_eq!(
        lanes.iter().map(|l| l.1).collect::<HashSet<_>>(),
        HashSet::from([end(1, 2), end(1, 3)])
    );
    let kept = w.offers[0].1;
    let mut out = Out::default();
    w.groups.client_dead(ClientId(1), &[kept], &mut out);
    w.help(out);
    assert_eq!(w.gone, [(ClientId(3), 1)], "of the other link group");
    assert_eq!((w.groups.len(), w.groups.lanes()), (1, 1));
    // The survivor closes, those who have inherited end, in any order and more than once.
    w.groups
        .lane_done(ClientId(2), kept, 1, 0, &mut Out::default())
        .unwrap();
    for _ in 0..2 {
        let mut out = Out::default();
        w.groups.over(kept, ClientId(1), &mut out);
        w.help(out);
    }
    assert_eq!(w.gone.len(), 2);
    assert!(
        w.groups.by_pair.is_empty() && w.groups.by_conn.is_empty() && w.groups.by_client.is_empty()
    );
}

#[test]
fn forgotten_before_the_offer() {
    let mut w = World::new(10, u64::MAX);
    let mut out = Out::default();
    w.groups
        .connect(
            [end(1, 0), end(2, 0)],
            of(&w.cgroups, [Size::Whole; 2]),
            5,
            &mut out,
        )
        .unwrap();
    let making = out;
    let mut out = Out::default();
    w.groups.forget(end(2, 0), &mut out);
    assert_eq!(out.failed, [[end(1, 0), end(2, 0)]]);
    assert_eq!(out.gave_up, Some(end(2, 0)), "it need not be told");
    assert_eq!(w.groups.lanes(), 0);
    w.help(making);
    assert!(w.offers.is_empty());
    // After the offer the slot waits for the shim's `LaneRefused`; the other end gives it back at once.
    w.connect([end(1, 1), end(2, 1)]).unwrap();
    let group = w.offers[0].1;
    let mut out = Out::default();
    w.groups.forget(end(2, 1), &mut out);
    assert!(out.failed.is_empty());
    let told = &out.sends[0];
    assert_eq!((told.to, out.sends.len()), (ClientId(1), 1));
    assert!(matches!(told.msg, ToShim::LaneGone { conn: 1, .. }));
    assert_eq!(w.groups.lanes(), 1);
    let mut out = Out::default();
    w.groups
        .lane_done(ClientId(1), group, 0, 0, &mut Out::default())
        .unwrap();
    w.groups
        .lane_refused(ClientId(2), group, 1, 0, &mut out)
        .unwrap();
    assert!(out.sends.is_empty());
    assert_eq!(w.groups.lanes(), 0);
}

/// A client reports that it cannot map what it was given after lanes were offered on the link group: the other end
/// gives them back, and nobody is offered a lane on that link group again.
#[test]
fn a_group_that_fails_behind_its_offers() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    w.connect([end(1, 1), end(2, 1)]).unwrap();
    let group = w.offers[0].1;
    for again in [false, true] {
        let mut out = Out::default();
        w.groups
            .group_failed(ClientId(2), group, 1, &mut out)
            .unwrap();
        let told: Vec<_> = out.sends.iter().map(|s| (s.to, s.msg)).collect();
        let gone = |lane, conn| {
            let (side, gen) = (0, 1);
            let msg = ToShim::LaneGone {
                group,
                side,
                lane,
                conn,
                gen,
            };
            (ClientId(1), msg)
        };
        match again {
            false => assert_eq!(told, [gone(0, 0), gone(1, 1)]),
            true => assert_eq!(told, [], "told once"),
        }
        assert!(out.failed.is_empty());
    }
    let third = [end(1, 2), end(2, 2)];
    assert_eq!(w.connect(third), Err(Refused::Memory), "not again at once");
    let pair = (ClientId(1), ClientId(2));
    let failed = w.groups.failures.get_mut(&pair).unwrap();
    *failed = failed.checked_sub(FAILED).unwrap();
    w.connect(third).unwrap();
    assert_ne!(w.offers.last().unwrap().1, group, "it takes no more lanes");
    assert_eq!((w.groups.len(), w.groups.lanes()), (2, 3));
    for lane in [1, 0] {
        let mut out = Out::default();
        w.groups
            .lane_done(ClientId(1), group, 0, lane, &mut out)
            .unwrap();
        w.help(out);
        assert_eq!(w.gone.len(), if lane == 0 { 2 } else { 0 });
    }
    assert_eq!((w.groups.len(), w.groups.lanes()), (1, 1));
    // A failure before any offer: the lane is declined, and the link group is removed at once.
    let mut out = Out::default();
    let ends = [end(1, 3), end(5, 3)];
    let of = of(&w.cgroups, [Size::Whole; 2]);
    let (group, ..) = w.groups.connect(ends, of, 5, &mut out).unwrap();
    let mut out = Out::default();
    w.groups
        .group_failed(ClientId(5), group, 1, &mut out)
        .unwrap();
    assert_eq!(out.failed, [ends]);
    assert_eq!(w.groups.len(), 1);
}

/// The other end has given its lane back, and the message about that was lost with a control connection.
#[test]
fn not_offered_again_when_the_other_end_is_done() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    let group = w.offers[0].1;
    w.groups
        .lane_done(ClientId(1), group, 0, 0, &mut Out::default())
        .unwrap();
    let mut out = Out::default();
    assert!(!w.groups.offer_again(end(2, 0), &mut out));
    assert!(out.sends.is_empty());
    assert_eq!(w.groups.lanes(), 0, "free for its next use");
}

#[test]
fn offered_again_to_one_side_only() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    let mut out = Out::default();
    assert!(w.groups.offer_again(end(2, 0), &mut out));
    assert_eq!(out.sends.len(), 1);
    assert_eq!(out.sends[0].to, ClientId(2));
    assert!(!w.groups.offer_again(end(2, 7), &mut out));
    let group = w.offers[0].1;
    w.done(group, 0);
    assert!(!w.groups.offer_again(end(2, 0), &mut out));
}

#[test]
fn a_silent_client_keeps_what_is_ready() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    let mut making = Out::default();
    w.groups
        .connect(
            [end(2, 5), end(3, 5)],
            of(&w.cgroups, [Size::Whole; 2]),
            5,
            &mut making,
        )
        .unwrap();
    let mut out = Out::default();
    w.groups.client_silent(ClientId(2), &mut out);
    w.help(out);
    assert_eq!((w.groups.len(), w.groups.lanes()), (1, 1));
    assert_eq!(w.failed, [[end(2, 5), end(3, 5)]]);
    assert!(w.gone.contains(&(ClientId(3), 1)));
}

#[test]
fn group_numbers_tell_daemons_apart() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    w.connect([end(1, 0), end(3, 0)]).unwrap();
    assert_eq!(w.offers[0].1 >> 32, 0xabcd);
    assert_ne!(w.offers[0].1, w.offers.last().unwrap().1);
}

#[test]
fn a_refused_lane_is_given_back_by_the_other_end() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 4), end(2, 5)]).unwrap();
    let (group, lane) = (w.offers[0].1, w.offers[0].2);
    let mut out = Out::default();
    w.groups
        .lane_refused(ClientId(2), group, 1, lane, &mut out)
        .unwrap();
    let [s] = &out.sends[..] else {
        panic!("{} messages", out.sends.len())
    };
    assert_eq!(s.to, ClientId(1));
    let gone = ToShim::LaneGone {
        group,
        side: 0,
        lane,
        conn: 4,
        gen: 1,
    };
    assert_eq!(s.msg, gone);
    assert_eq!(w.groups.lanes(), 1, "one end still has it");
    // The other end may have refused as well, or closed: nobody is left to be told.
    let mut out = Out::default();
    w.groups
        .lane_refused(ClientId(1), group, 0, lane, &mut out)
        .unwrap();
    assert!(out.sends.is_empty());
    assert_eq!(w.groups.lanes(), 0);
    // A link group that is gone, and a side that cannot exist.
    w.groups
        .lane_refused(ClientId(1), group + 1, 9, lane, &mut out)
        .unwrap();
    assert!(out.sends.is_empty());
}

/// A lane to another node is offered only when that node has one, to the process alone, which pays
/// for both areas, and with the uses that both nodes count.
#[test]
fn a_remote_lane_waits_for_the_other_node() {
    let mut w = World::new(10, 2 * REMOTE_AREA);
    let remote = ConnRef {
        client: ClientId::remote(3),
        ..end(1, 77)
    };
    let own = crate::clients::limits::remote(&Arc::default());
    let connect = |w: &mut World, local| {
        let mut out = Out::default();
        let of = [(&w.cgroups[0], Size::Remote), (&own, Size::Remote)];
        let made = w.groups.connect([local, remote], of, 5, &mut out);
        w.help(out);
        made
    };
    let (id, slot, uses) = connect(&mut w, end(1, 4)).unwrap();
    assert_eq!((slot, uses), (0, 0));
    assert_eq!(w.groups.remote_client(id), Some(remote.client));
    assert_eq!(w.ready, [end(1, 4)], "set up, and held back");
    assert!(w.offers.is_empty());
    let mut out = Out::default();
    w.groups.release((id, slot), end(1, 3), (9, 1234), &mut out);
    assert!(out.sends.is_empty(), "of another end, which had the slot");
    w.groups.release((id, slot), end(1, 4), (9, 1234), &mut out);
    let [offer] = &out.sends[..] else {
        panic!("one offer, not {}", out.sends.len())
    };
    assert_eq!(offer.to, ClientId(1));
    let told =
        matches!(offer.msg, ToShim::Offer { epoch, tag: 1234, .. } if epoch == Epoch::base(9));
    assert!(told, "{:?}", offer.msg);
    assert_eq!(w.cgroups[0].memory_taken(), 2 * REMOTE_AREA);
    // Abandoning a second lane that will not be made leaves the first one alone.
    let (id2, slot2, _) = connect(&mut w, end(1, 5)).unwrap();
    assert_eq!((id2, slot2), (id, 1));
    w.groups.abandon(id, 1, &mut Out::default());
    w.groups.abandon(id, 0, &mut Out::default());
    assert_eq!(w.groups.lanes(), 1);
    for (client, side) in [(ClientId(1), 0), (remote.client, 1)] {
        w.groups
            .lane_done(client, id, side, 0, &mut Out::default())
            .unwrap();
    }
    assert_eq!(w.groups.lanes(), 0);
    let (_, slot, uses) = connect(&mut w, end(1, 6)).unwrap();
    assert_eq!((slot, uses), (0, 10), "never the same epochs again");
}
