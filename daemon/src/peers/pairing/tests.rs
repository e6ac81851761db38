//! Two or three nodes on a simulated wire.

use super::super::directory::{FileDirectory, Listed};
use super::*;
use crate::peers::digest::Key;
use crate::peers::msg::Claim;
use crate::proof::{Record, Role};
use crate::socket::Counts;
use proptest::prelude::*;
use std::collections::{HashSet, VecDeque};
use std::time::Instant;

const S: u64 = 1_000_000_000;

struct Node {
    name: Name,
    p: Pairing,
    paired: Vec<Paired>,
    asked: Vec<(Name, Asked)>,
    dead: HashSet<ConnRef>,
}

/// Nodes with the addresses 10.N.0.0/16, where N is 1 for `a`, 2 for `b`, 3 for `c`.
struct Net {
    nodes: Vec<Node>,
    /// In flight, per direction.
    wire: HashMap<(usize, usize), VecDeque<Msg>>,
    now: u64,
    up: HashSet<(usize, usize)>,
}

const NAMES: [&str; 3] = ["a", "b", "c"];

fn directory(own: usize, n: usize) -> FileDirectory {
    let nets: Vec<Vec<String>> = (1..=n).map(|i| vec![format!("10.{i}.0.0/16")]).collect();
    let listed: Vec<Listed<'_>> = (0..n)
        .filter(|i| *i != own)
        .map(|i| Listed {
            name: NAMES[i],
            control: "192.0.2.1",
            addresses: &nets[i],
        })
        .collect();
    FileDirectory::new(NAMES[own], &nets[own], &listed).unwrap()
}

impl Net {
    fn new(n: usize) -> Net {
        let node = |i: usize| Node {
            name: NAMES[i].into(),
            p: Pairing::new(Rc::new(directory(i, n)), Reason::NoDevice.code()),
            paired: Vec::new(),
            asked: Vec::new(),
            dead: HashSet::new(),
        };
        let mut net = Net {
            nodes: (0..n).map(node).collect(),
            wire: HashMap::new(),
            now: 1000 * S,
            up: HashSet::new(),
        };
        for i in 0..n {
            for j in i + 1..n {
                net.join(i, j);
            }
        }
        net
    }

    /// Lets something happen at node `i`.
    fn at<T>(
        &mut self,
        i: usize,
        f: impl FnOnce(&mut Pairing, u64, Alive, &mut Vec<Out>) -> T,
    ) -> T {
        let mut out = Vec::new();
        let n = &mut self.nodes[i];
        let dead = &n.dead;
        let r = f(&mut n.p, self.now, &|w| !dead.contains(w), &mut out);
        for o in out {
            match o {
                Out::Paired(p) => self.nodes[i].paired.push(p),
                Out::Hurry(n, a) => self.nodes[i].asked.push((n, a)),
                Out::Send(to, m) => {
                    let j = NAMES.iter().position(|n| *n == &*to).unwrap();
                    if self.up.contains(&(i.min(j), i.max(j))) {
                        self.wire.entry((i, j)).or_default().push_back(m);
                    }
                }
            }
        }
        r
    }

    fn join(&mut self, i: usize, j: usize) {
        self.up.insert((i, j));
        let key = Key::new(&[(i * 3 + j) as u8; 32]);
        for (x, y) in [(i, j), (j, i)] {
            let (name, key) = (self.nodes[y].name.clone(), key.clone());
            self.at(x, |p, now, alive, out| {
                p.channel_up(&name, key, SEEKS, now, alive, out)
            });
        }
    }

    fn part(&mut self, i: usize, j: usize) {
        self.up.remove(&(i, j));
        for (x, y) in [(i, j), (j, i)] {
            self.wire.remove(&(x, y));
            let name = self.nodes[y].name.clone();
            self.at(x, |p, now, alive, out| {
                p.channel_down(&name, Reason::PeerDaemon, now, alive, out)
            });
        }
    }

    /// Delivers one message, if there is one.
    fn deliver(&mut self, i: usize, j: usize) -> bool {
        let Some(m) = self.wire.get_mut(&(i, j)).and_then(VecDeque::pop_front) else {
            return false;
        };
        let from = self.nodes[i].name.clone();
        self.at(j, |p, now, alive, out| p.message(&from, m, now, alive, out))
            .unwrap();
        true
    }

    fn settle(&mut self) {
        let n = self.nodes.len();
        while (0..n).any(|i| (0..n).any(|j| self.deliver(i, j))) {}
    }

    fn seek(&mut self, i: usize, who: ConnRef, end: End) {
        self.at(i, |p, now, alive, out| p.seek(who, end, now, alive, out));
    }

    fn shown(&self, i: usize, who: ConnRef) -> Option<(Option<Reason>, Option<Reason>)> {
        let s = self.nodes[i].p.shown(&who)?;
        Some((Reason::from_code(s.local), Reason::from_code(s.peer)))
    }

    /// Does nobody keep anything?
    fn is_clean(&self) -> bool {
        self.nodes.iter().all(|n| {
            n.p.ends.is_empty()
                && n.p.tuples.is_empty()
                && n.p.tables.values().all(|t| {
                    t.expected.is_empty()
                        && t.digests.is_empty()
                        && t.seeks.is_empty()
                        && t.by_proof.is_empty()
                        && t.by_tuple.is_empty()
                        && t.makes.is_empty()
                        && t.sent.is_empty()
                        && t.numbers.is_empty()
                        && t.parked.is_empty()
                })
        })
    }
}

fn who(conn: u32) -> ConnRef {
    ConnRef {
        party: PartyId(1),
        conn,
        gen: 1,
    }
}

fn end(local: &str, peer: &str, record: Option<(u32, u32, Role)>) -> End {
    let t = Instant::now();
    End {
        local: local.parse().unwrap(),
        peer: peer.parse().unwrap(),
        cookie: 1,
        netns_cookie: 1,
        inode: 0,
        record: record.map(|(snd, rcv, role)| Record {
            snd,
            rcv,
            role,
            at_ns: 999 * S,
        }),
        client: None,
        guess: None,
        counts: Counts {
            from: t,
            until: t,
            sent: 0,
            acked: 0,
            received: 0,
        },
    }
}

const A: &str = "10.1.0.1:1000";
const B: &str = "10.2.0.1:80";

fn client(local: &str, peer: &str) -> End {
    end(local, peer, Some((100, 200, Role::Active)))
}

fn server(local: &str, peer: &str) -> End {
    end(local, peer, Some((200, 100, Role::Passive)))
}

fn both_paired(net: &Net) -> bool {
    let one = |i: usize, j: usize, part| {
        let n = &net.nodes[i];
        matches!(&n.paired[..], [p] if p.node == net.nodes[j].name && p.part == part
            && p.refusal == Reason::NoDevice.code())
    };
    one(0, 1, Part::Initiator) && one(1, 0, Part::Responder)
}

/// Addresses as the two ends have them: direct, DNAT, SNAT, both, masqueraded private addresses.
const ROUTES: [[&str; 4]; 6] = [
    [A, B, B, A],
    [A, "10.96.0.1:443", B, A],
    [A, B, B, "192.0.2.7:4000"],
    [A, "10.96.0.1:443", B, "192.0.2.7:4000"],
    [A, "10.96.0.1:443", B, "10.1.0.99:4000"],
    ["172.17.0.2:5", B, B, "10.1.0.99:4000"],
];

#[test]
fn either_end_first_and_through_translation() {
    for [al, ap, bl, bp] in ROUTES {
        for first in [0, 1] {
            for client_at in [0, 1] {
                let mut net = Net::new(3);
                let (c, s) = (client(al, ap), server(bl, bp));
                let mut ends = [c, s];
                if client_at == 1 {
                    // The other way round: the connection was made from b.
                    ends = [
                        end(al, ap, Some((200, 100, Role::Passive))),
                        end(bl, bp, Some((100, 200, Role::Active))),
                    ];
                }
                for i in [first, 1 - first] {
                    net.seek(i, who(i as u32), ends[i].clone());
                    net.settle();
                }
                assert!(both_paired(&net), "{al} {ap} {bl} {bp} first {first}");
                assert!(net.is_clean());
            }
        }
    }
}

#[test]
fn crossing_messages_pair_once() {
    let mut net = Net::new(2);
    net.seek(0, who(0), client(A, B));
    net.seek(1, who(1), server(B, A));
    net.settle();
    assert!(both_paired(&net) && net.is_clean());
}

#[test]
fn ends_of_this_node_are_nobodys_business() {
    let mut net = Net::new(2);
    net.seek(0, who(0), client(A, "10.1.0.2:80"));
    net.seek(0, who(1), client("127.0.0.1:5", "127.0.0.1:6"));
    net.seek(0, who(2), client("172.17.0.2:5", "172.17.0.2:6"));
    assert!(net.is_clean() && net.wire.is_empty());
}

/// The wrong numbers, at the right addresses: the real one comes later and is found.
#[test]
fn a_forged_seek_disturbs_nobody() {
    for forger in [0, 1] {
        let mut net = Net::new(2);
        let real = [client(A, B), server(B, A)];
        let mut forged = real[forger].clone();
        forged.record = Some(Record {
            snd: 7,
            ..forged.record.unwrap()
        });
        let mut bare = real[forger].clone();
        bare.record = None;
        net.seek(forger, who(8), forged);
        net.seek(forger, who(9), bare);
        net.settle();
        net.seek(1 - forger, who(0), real[1 - forger].clone());
        net.settle();
        assert!(net.nodes.iter().all(|n| n.paired.is_empty()));
        net.seek(forger, who(1), real[forger].clone());
        net.settle();
        assert!(both_paired(&net));
        assert_eq!(net.nodes[forger].paired[0].who, who(1));
    }
}

#[test]
fn who_speaks_for_anothers_address_is_refused() {
    // c says that it has a's end, and even knows the numbers.
    let mut net = Net::new(3);
    net.seek(1, who(0), server(B, "192.0.2.9:1000"));
    net.seek(2, who(1), client(A, "10.96.0.1:80"));
    net.settle();
    assert!(net.nodes.iter().all(|n| n.paired.is_empty()));
    let wrong = Some(Reason::WrongNode);
    assert_eq!(net.shown(2, who(1)), Some((wrong, wrong)));
    assert!(net.nodes[1].p.counts("c").1 > 0);
    // The real one comes.
    net.seek(0, who(2), client(A, "10.96.0.1:80"));
    net.settle();
    assert!(both_paired(&net));
}

/// A private address is believed only where our own kernel sees an address of that node.
#[test]
fn an_unlisted_address_needs_a_listed_peer() {
    let mut net = Net::new(2);
    net.seek(0, who(0), client("172.17.0.2:5", B));
    net.seek(1, who(1), server(B, "192.0.2.7:4000"));
    net.settle();
    assert!(net.nodes.iter().all(|n| n.paired.is_empty()));
    assert_eq!(net.shown(1, who(1)).unwrap().0, Some(Reason::WrongNode));
}

/// An initiator that lies is refused by the responder, too.
#[test]
fn the_responder_judges_as_well() {
    let mut net = Net::new(3);
    let mut own = server(B, A);
    own.counts.received = 5;
    net.seek(1, who(1), own);
    let Some(Msg::Seek { id, .. }) = net.wire.get_mut(&(1, 0)).unwrap().pop_front() else {
        panic!()
    };
    let key = Key::new(&[1; 32]);
    let good = claim(&"a".into(), &key, &client(A, B), net.now);
    let spoil: [fn(&mut Claim); 6] = [
        |c| c.proof = None,
        |c| c.proof = Some([0; 32]),
        |c| c.local = "10.3.0.1:1000".parse().unwrap(),
        |c| c.local = "10.2.0.9:1000".parse().unwrap(),
        |c| c.age_ms += 90_000,
        |c| c.received = 1000,
    ];
    let make = |claim: Claim| Msg::Make {
        seek: id,
        make: 5,
        claim,
        refusal: 0,
    };
    for (n, f) in spoil.into_iter().enumerate() {
        let mut c = good.clone();
        f(&mut c);
        net.at(1, |p, now, alive, out| {
            p.message(&"a".into(), make(c), now, alive, out).unwrap();
            assert!(
                matches!(&out[..], [Out::Send(_, Msg::Fail { make: 5, .. })]),
                "{n} {out:?}"
            );
        });
    }
    net.at(1, |p, now, alive, out| {
        p.message(&"a".into(), make(good), now, alive, out).unwrap()
    });
    assert_eq!(net.nodes[1].paired.len(), 1);
    assert!(matches!(
        net.wire[&(1, 0)].back(),
        Some(Msg::Made { make: 5, .. })
    ));
}

#[test]
fn what_does_not_go_together_is_no_pair() {
    let t = |f: fn(&mut End)| {
        let mut net = Net::new(2);
        let (mut c, mut s) = (client(A, B), server(B, A));
        (c.counts.received, c.counts.sent, s.counts.sent) = (9, 9, 9);
        f(&mut s);
        net.seek(0, who(0), c);
        net.seek(1, who(1), s);
        net.settle();
        let none = net.nodes.iter().all(|n| n.paired.is_empty());
        (none, net.shown(0, who(0)), net.shown(1, who(1)))
    };
    let unproven = Some(Reason::Unproven);
    let waiting = Some(Reason::None);
    // Both active; a wrap of the clock apart; counts that cannot be.
    let (none, a, b) = t(|e| e.record.as_mut().unwrap().role = Role::Active);
    assert!(none && a.unwrap().0 == unproven && b.unwrap().1 == unproven);
    let (none, ..) = t(|e| e.record.as_mut().unwrap().at_ns -= 275 * S);
    assert!(none);
    // Each has received more than the other ever sent, whichever was looked at first.
    let (none, ..) = t(|e| (e.counts.sent, e.counts.received) = (8, 10));
    assert!(none);
    let (none, ..) = t(|_| ());
    assert!(!none, "nothing is wrong");
    // Without a record on one end: each end says which.
    let (none, a, b) = t(|e| e.record = None);
    assert!(none);
    assert_eq!(a, Some((waiting, unproven)));
    assert_eq!(b, Some((unproven, waiting)));
}

#[test]
fn without_records_both_are_unproven() {
    let mut net = Net::new(2);
    net.seek(0, who(0), end(A, B, None));
    net.seek(1, who(1), end(B, A, None));
    net.settle();
    let u = Some(Reason::Unproven);
    assert_eq!(net.shown(0, who(0)), Some((u, u)));
    assert_eq!(net.shown(1, who(1)), Some((u, u)));
}

#[test]
fn reasons_of_those_who_wait() {
    let mut net = Net::new(2);
    net.seek(0, who(0), client(A, B));
    net.seek(0, who(1), client(A, "192.0.2.1:80"));
    net.settle();
    let none = Some(Reason::None);
    assert_eq!(net.shown(0, who(0)), Some((none, none)));
    assert_eq!(net.shown(0, who(1)).unwrap().0, Some(Reason::UnknownNode));
    net.part(0, 1);
    assert_eq!(net.shown(0, who(0)).unwrap().0, Some(Reason::PeerDaemon));
    net.at(0, |p, now, alive, out| {
        p.channel_down(&"b".into(), Reason::VersionMismatch, now, alive, out)
    });
    assert_eq!(
        net.shown(0, who(0)).unwrap().0,
        Some(Reason::VersionMismatch)
    );
}

/// The channel breaks at every step: afterwards the ends find each other.
fn hurry(net: &mut Net, i: usize, who: ConnRef) -> usize {
    let told = net.at(i, |p, _, _, out| p.hurry(&who, out));
    net.settle();
    told
}

#[test]
fn an_end_in_a_hurry_is_told_where_its_other_end_may_be() {
    let mut net = Net::new(3);
    net.seek(0, who(1), client("10.1.0.5:1000", "10.2.0.7:80"));
    assert_eq!(
        hurry(&mut net, 0, who(1)),
        1,
        "the node that has the address"
    );
    let asked = |local: &str, certain| -> (Name, Asked) {
        let (local, peer) = (local.parse().unwrap(), "10.1.0.5:1000".parse().unwrap());
        let asked = Asked {
            local,
            peer,
            certain,
        };
        ("a".into(), asked)
    };
    assert_eq!(net.nodes[1].asked, [asked("10.2.0.7:80", true)]);
    assert_eq!(net.nodes[2].asked, []);
    // To a service's address, which is translated on the way.
    net.seek(0, who(1), client("10.1.0.5:1000", "192.0.2.9:80"));
    assert_eq!(hurry(&mut net, 0, who(1)), 2);
    for n in [1, 2] {
        assert_eq!(
            net.nodes[n].asked.last(),
            Some(&asked("192.0.2.9:80", false))
        );
    }
    // Nobody is told of what does not wait, nor whom there is no channel to.
    let none = ConnRef { gen: 7, ..who(1) };
    assert_eq!(hurry(&mut net, 0, none), 0);
    net.part(0, 1);
    net.part(0, 2);
    assert_eq!(hurry(&mut net, 0, who(1)), 0);
}

#[test]
fn a_node_may_ask_about_connections_to_itself_only() {
    let mut net = Net::new(3);
    let ask = |net: &mut Net, local: &str, peer: &str| {
        let msg = Msg::Hurry {
            local: local.parse().unwrap(),
            peer: peer.parse().unwrap(),
        };
        let b = net.nodes[1].name.clone();
        net.at(0, |p, now, alive, out| p.message(&b, msg, now, alive, out))
            .unwrap();
        (net.nodes[0].asked.len(), net.nodes[0].p.counts("b").1)
    };
    assert_eq!(ask(&mut net, "10.1.0.5:80", "10.3.0.1:9"), (0, 1), "c's");
    assert_eq!(ask(&mut net, "10.1.0.5:80", "10.1.0.1:9"), (0, 2), "ours");
    assert_eq!(
        ask(&mut net, "10.1.0.5:80", "192.0.2.1:9"),
        (0, 2),
        "nobody's"
    );
    assert_eq!(
        ask(&mut net, "10.3.0.5:80", "10.2.0.1:9"),
        (0, 2),
        "not here"
    );
    assert_eq!(ask(&mut net, "[::ffff:10.1.0.5]:80", "10.2.0.1:9"), (1, 2));
    assert_eq!(
        net.nodes[0].asked[0].1.local,
        "10.1.0.5:80".parse().unwrap()
    );
}

#[test]
fn what_was_seen_is_shown_until_more_is_known() {
    let mut net = Net::new(3);
    let ours = client("10.1.0.5:1000", "10.2.0.7:80");
    net.seek(0, who(1), ours.clone());
    let seen = |net: &mut Net, from: usize, peer: &str| {
        let msg = Msg::Seen {
            local: "10.2.0.7:80".parse().unwrap(),
            peer: peer.parse().unwrap(),
            reason: Reason::PeerNoShim.code(),
        };
        let from = net.nodes[from].name.clone();
        net.at(0, |p, now, alive, out| {
            p.message(&from, msg, now, alive, out)
        })
        .unwrap();
        net.shown(0, who(1)).unwrap()
    };
    let nothing = (Some(Reason::None), Some(Reason::None));
    assert_eq!(seen(&mut net, 1, "10.1.0.5:1001"), nothing, "another one");
    assert_eq!(
        seen(&mut net, 2, "10.1.0.5:1000"),
        nothing,
        "not c's to say"
    );
    let known = (Some(Reason::None), Some(Reason::PeerNoShim));
    assert_eq!(seen(&mut net, 1, "10.1.0.5:1000"), known);
    // Another connection in its place begins anew.
    net.seek(0, who(1), ours);
    assert_eq!(net.shown(0, who(1)), Some(nothing));
    assert_eq!(seen(&mut net, 1, "10.1.0.5:1000"), known);
    // The other end registers, but has no record: that is about the connection itself.
    net.seek(1, who(2), end("10.2.0.7:80", "10.1.0.5:1000", None));
    net.settle();
    let (_, peer) = net.shown(0, who(1)).unwrap();
    assert_eq!(peer, Some(Reason::Unproven));
}

#[test]
fn a_broken_channel_loses_nothing() {
    for steps in 0..6 {
        let mut net = Net::new(2);
        net.seek(1, who(1), server(B, A));
        net.seek(0, who(0), client(A, B));
        for _ in 0..steps {
            let _ = net.deliver(1, 0) || net.deliver(0, 1);
        }
        net.part(0, 1);
        let done = [0, 1].map(|i| !net.nodes[i].paired.is_empty());
        net.join(0, 1);
        net.settle();
        match done {
            [false, false] => assert!(both_paired(&net), "{steps}"),
            // The responder had agreed, the initiator never heard of it and goes on waiting; the responder's
            // end is declined and registers again.
            [false, true] => {
                net.seek(1, who(1), server(B, A));
                net.settle();
                assert_eq!(net.nodes[0].paired.len(), 1);
            }
            [true, true] => {}
            [true, false] => panic!("the initiator cannot know before the responder"),
        }
        assert!(net.is_clean());
    }
}

#[test]
fn a_make_without_answer_is_void() {
    let mut net = Net::new(2);
    net.seek(1, who(1), server(B, A));
    net.seek(0, who(0), client(A, B));
    net.deliver(1, 0);
    net.now += MAKE_NS;
    net.at(0, |p, now, alive, out| p.tick(now, alive, out));
    let t = Some(Reason::TimeoutDaemon);
    assert_eq!(net.shown(0, who(0)).unwrap().0, t);
    // The answer comes after all: it is told that nothing came of it.
    net.deliver(0, 1);
    net.deliver(1, 0);
    assert!(net.nodes[0].paired.is_empty());
    assert!(matches!(net.wire[&(0, 1)].back(), Some(Msg::Fail { .. })));
}

#[test]
fn dead_ends_are_not_paired() {
    for dead in [0, 1] {
        let mut net = Net::new(2);
        net.seek(dead, who(5), [client(A, B), server(B, A)][dead].clone());
        net.nodes[dead].dead.insert(who(5));
        net.seek(
            1 - dead,
            who(1),
            [client(A, B), server(B, A)][1 - dead].clone(),
        );
        net.settle();
        assert!(net.nodes.iter().all(|n| n.paired.is_empty()));
        net.at(1 - dead, |p, _, _, out| p.forget(who(1), out));
        net.settle();
        assert!(net.is_clean());
    }
}

#[test]
fn what_a_peer_may_make_us_keep_is_bounded() {
    let mut net = Net::new(2);
    let key = Key::new(&[1; 32]);
    let c = claim(&"b".into(), &key, &server(B, A), net.now);
    let b: Name = "b".into();
    net.at(0, |p, now, alive, out| {
        let mut say = |id| {
            let claim = c.clone();
            p.message(&b, Msg::Seek { id, claim }, now, alive, out)
        };
        for id in 0..SEEKS as u64 {
            say(id).unwrap();
        }
        assert!(say(SEEKS as u64).is_err());
        assert_eq!(out.len(), 0, "and nothing is sent for it");
    });
    let t = &net.nodes[0].p.tables[&b];
    assert_eq!(
        (t.seeks.len(), t.by_proof.len(), t.by_tuple.len()),
        (SEEKS, 1, 1)
    );
    net.part(0, 1);
    net.join(0, 1);
    assert!(net.is_clean());
    net.at(0, |p, now, alive, out| {
        let claim = c.clone();
        p.message(&b, Msg::Seek { id: 1, claim }, now, alive, out)
            .unwrap();
        let claim = c.clone();
        assert!(
            p.message(&b, Msg::Seek { id: 1, claim }, now, alive, out)
                .is_err(),
            "twice"
        );
        for wrong in [
            Msg::Hint { seek: 1, reason: 1 },
            Msg::Make {
                seek: 1,
                make: 1,
                claim: c.clone(),
                refusal: 0,
            },
        ] {
            assert!(p.message(&b, wrong, now, alive, out).is_err());
        }
        // About what there is not: nothing happens.
        for m in [
            Msg::Unseek { id: 99 },
            Msg::Fail {
                make: 99,
                reason: 3,
            },
            Msg::Unknown,
        ] {
            p.message(&b, m, now, alive, out).unwrap();
        }
    });
}

/// More ends than the peer keeps Seeks for take turns; none waits for ever.
#[test]
fn more_ends_than_room() {
    let mut net = Net::new(2);
    net.part(0, 1);
    net.up.insert((0, 1));
    for (x, y) in [(0, "b"), (1, "a")] {
        net.at(x, |p, now, alive, out| {
            p.channel_up(&y.into(), Key::new(&[1; 32]), 4, now, alive, out)
        });
    }
    let server_n = |n: u32| {
        end(
            B,
            &format!("10.1.0.1:{}", 1000 + n),
            Some((n, n + 500, Role::Passive)),
        )
    };
    for n in 0..10 {
        net.seek(1, who(n), server_n(n));
    }
    net.settle();
    assert_eq!(net.nodes[0].p.tables[&Name::from("b")].seeks.len(), 4);
    // The other end of the last.
    let c = end("10.1.0.1:1009", B, Some((509, 9, Role::Active)));
    net.seek(0, who(0), c);
    for _ in 0..3 {
        net.settle();
        net.now += TURN_NS;
        net.at(1, |p, now, alive, out| p.tick(now, alive, out));
        assert!(net.nodes[1].p.tables[&Name::from("a")].sent.len() <= 4);
    }
    net.settle();
    assert!(both_paired(&net), "{:?}", net.nodes[1].paired);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// Whatever happens in whatever order: an end is paired at most once and only with its own
    /// other end, and nothing is left when all ends are gone.
    #[test]
    fn any_order(steps in proptest::collection::vec((0u8..8, 0u32..4, 0usize..6), 0..60)) {
        let mut net = Net::new(2);
        let ends = |n: u32, i: usize| {
            let [al, ap, bl, bp] = ROUTES[n as usize % ROUTES.len()];
            match i {
                0 => end(al, ap, Some((n, n + 9, Role::Active))),
                _ => end(bl, bp, Some((n + 9, n, Role::Passive))),
            }
        };
        for (what, n, i) in steps {
            let node = i % 2;
            match what {
                0 | 1 => net.seek(node, who(n), ends(n, node)),
                2 => net.at(node, |p, _, _, out| p.forget(who(n), out)),
                3 if net.up.is_empty() => net.join(0, 1),
                3 if i == 0 => net.part(0, 1),
                4 => {
                    net.now += (i as u64) * S;
                    net.at(node, |p, now, alive, out| p.tick(now, alive, out));
                }
                _ => { net.deliver(node, 1 - node); }
            }
        }
        if net.up.is_empty() { net.join(0, 1); }
        net.settle();
        for p in &net.nodes[0].paired {
            // The initiator's number names the pair on both nodes.
            let other = net.nodes[1].paired.iter().find(|q| q.pair == p.pair);
            prop_assert_eq!(other.map(|q| q.who), Some(p.who));
        }
        // Whoever still waits on both nodes has no other end there.
        for n in 0..4 {
            let waits = |i: usize| net.nodes[i].p.ends.contains_key(&(PartyId(1), n));
            prop_assert!(!(waits(0) && waits(1)), "connection {} was not found", n);
        }
        for i in [0, 1] {
            for n in 0..4 { net.at(i, |p, _, _, out| p.forget(who(n), out)); }
        }
        net.settle();
        prop_assert!(net.is_clean());
    }
}
