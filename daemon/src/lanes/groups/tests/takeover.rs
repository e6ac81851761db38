//! Directions that are taken over.

use super::super::takeover::AGAIN;
use super::*;
use crate::os::system::System;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A slot is not used anew as long as a helper is at work on what one of its ends had sent.
#[test]
fn a_slot_that_is_taken_over() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    let (group, mut out) = (w.offers[0].1, Out::default());
    let ask = |w: &mut World, from, side| {
        w.groups
            .take_over(ClientId(from), (group, 0), (side, 1 - side))
    };
    assert!(
        ask(&mut w, 2, 1).unwrap().is_none(),
        "nothing proves its socket"
    );
    w.groups.proven((group, 0), end(1, 0), (77, None));
    let found = ask(&mut w, 2, 1).unwrap().expect("end 1's");
    assert_eq!(
        (found.cookie, w.groups.owner(group, 1)),
        (77, Some(ClientId(2)))
    );
    let d = found.direction;
    assert_eq!((d.who, d.side, d.uses), (end(1, 0), 0, 0));
    assert_eq!((found.files.len(), found.words.len()), (1, CONTROL_BYTES));
    assert!(ask(&mut w, 2, 1).unwrap().is_none(), "it is under way");
    assert!(ask(&mut w, 2, 0).is_err() && ask(&mut w, 3, 1).is_err());
    assert!(w.groups.take_over(ClientId(2), (group, 1), (1, 0)).is_err());
    w.done(group, 0);
    w.connect([end(1, 1), end(2, 1)]).unwrap();
    assert_eq!((w.groups.lanes(), w.offers.last().unwrap().2), (2, 1));
    w.groups.taken_over(Direction { uses: 7, ..d }, &mut out);
    assert_eq!(w.groups.lanes(), 2, "another use");
    w.groups.taken_over(d, &mut out);
    assert_eq!(w.groups.lanes(), 1);
    w.connect([end(1, 2), end(2, 2)]).unwrap();
    assert_eq!(w.offers.last().map(|o| (o.2, o.3)), Some((0, EPOCHS)));
}

/// An end may ask for what it sends itself. Who asks for the other end's direction again and again does not keep that end
/// from it.
#[test]
fn an_end_hands_its_own_direction_over() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    let (group, mut out) = (w.offers[0].1, Out::default());
    w.groups.proven((group, 0), end(1, 0), (77, None));
    let mut ask = |from, sides| w.groups.take_over(ClientId(from), (group, 0), sides);
    assert!(ask(1, (0, 2)).is_err());
    let theirs = ask(2, (1, 0)).unwrap().expect("end 1's");
    assert!(!theirs.own && ask(1, (0, 0)).unwrap().is_none());
    w.groups.taken_over(theirs.direction, &mut out);
    let mut ask = |from, sides| w.groups.take_over(ClientId(from), (group, 0), sides);
    assert!(ask(2, (1, 0)).unwrap().is_none(), "too soon");
    let ours = ask(1, (0, 0)).unwrap().expect("the same");
    let d = ours.direction;
    assert_eq!((ours.own, d.who, d.side), (true, end(1, 0), 0));
}

/// A clock that a test moves.
struct Stopped(AtomicU64);

impl Stopped {
    fn pass(&self, ns: u128) {
        self.0.fetch_add(u64::try_from(ns).unwrap(), Relaxed);
    }
}

impl System for Stopped {
    fn now(&self) -> u64 {
        self.0.load(Relaxed)
    }
    fn help(&self, job: Box<dyn FnOnce() + std::marker::Send>) {
        job();
    }
    fn random(&self) -> u64 {
        0
    }
    fn lives(&self, _: u32) -> bool {
        true
    }
    fn tcp_send(&self, _: BorrowedFd<'_>, _: &[u8]) -> Result<usize, i32> {
        Err(libc::EPIPE)
    }
    fn tcp_sent(&self, _: BorrowedFd<'_>) -> Option<u64> {
        None
    }
}

fn stopped() -> (World, Arc<Stopped>) {
    let clock = Arc::new(Stopped(AtomicU64::new(1)));
    let system: Arc<dyn System> = clock.clone();
    let groups = LinkGroups::new(0xabcd, Clock::of(&system));
    let w = World {
        groups,
        ..World::new(10, u64::MAX)
    };
    (w, clock)
}

/// Either side's direction, and after a while once more. What is found is what belongs to that side.
#[test]
fn either_side_and_again() {
    let (mut w, clock) = stopped();
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    let group = w.offers[0].1;
    w.groups.proven((group, 0), end(1, 0), (77, Some(5)));
    w.groups.proven((group, 0), end(2, 0), (88, None));
    let files = w.groups.files(end(1, 0)).unwrap();
    assert_eq!(files.firsts, [Some(5), None]);
    let first = |side: usize| &files.areas[side][0].0;
    for (side, sender, cookie) in [(1, 0, 77), (0, 1, 88)] {
        let ask = |w: &mut World| {
            let from = ClientId(u64::from(side) + 1);
            w.groups.take_over(from, (group, 0), (side, sender))
        };
        let found = ask(&mut w).unwrap().expect("the other end's");
        let (own, peer) = (usize::from(sender), usize::from(side));
        assert_eq!(found.direction.who, end(u64::from(sender) + 1, 0));
        assert_eq!((found.cookie, found.own), (cookie, false));
        assert!(Arc::ptr_eq(&found.files[0].0, first(own)));
        assert!(Arc::ptr_eq(&found.peer, first(peer)));
        let over = |w: &mut World| {
            w.groups.taken_over(found.direction, &mut Out::default());
        };
        over(&mut w);
        clock.pass(AGAIN.as_nanos() - 1);
        assert!(ask(&mut w).unwrap().is_none(), "too soon");
        clock.pass(1);
        assert!(ask(&mut w).unwrap().is_some());
        over(&mut w);
    }
}

/// Before the lane is offered, and when its end is done with it, there is nothing to take over.
#[test]
fn before_and_after_a_lane() {
    let (mut w, clock) = stopped();
    let ask = |w: &mut World, group| w.groups.take_over(ClientId(2), (group, 0), (1, 0));
    let mut out = Out::default();
    let ends = [end(1, 0), end(2, 0)];
    let of = of(&w.cgroups, [Size::Whole; 2]);
    let (group, ..) = w.groups.connect(ends, of, 5, &mut out).unwrap();
    w.groups.proven((group, 0), end(1, 0), (77, None));
    assert!(ask(&mut w, group).unwrap().is_none(), "not offered yet");
    w.help(out);
    let found = ask(&mut w, group).unwrap().expect("end 1's");
    w.groups.taken_over(found.direction, &mut Out::default());
    w.groups
        .lane_done(ClientId(1), group, 0, 0, &mut Out::default())
        .unwrap();
    clock.pass(AGAIN.as_nanos());
    assert!(
        ask(&mut w, group).unwrap().is_none(),
        "it has none any more"
    );
}

/// Across nodes a takeover is not a shim's to ask for.
#[test]
fn across_nodes() {
    let mut w = World::new(10, u64::MAX);
    let remote = ConnRef {
        client: ClientId::remote(3),
        ..end(1, 77)
    };
    let theirs = crate::clients::limits::remote(&Arc::default());
    let of = [(&w.cgroups[0], Size::Remote), (&theirs, Size::Remote)];
    let mut out = Out::default();
    let made = w.groups.connect([end(1, 0), remote], of, 5, &mut out);
    let (group, ..) = made.unwrap();
    w.help(out);
    for sender in [0, 1] {
        let asked = w.groups.take_over(ClientId(1), (group, 0), (0, sender));
        assert!(asked.is_err());
    }
}
