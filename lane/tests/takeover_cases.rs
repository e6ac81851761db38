//! A daemon that brings a direction to TCP on one node, and how its end ends meanwhile: single courses of events that
//! `lane_random` has found, or seldom meets.

#![cfg(not(loom))]

mod sim;

use lane::abi::{takeover, TakeoverWord};
use lane::half::tx::mode;
use sim::{buffers, op, past, recv, send, up, Act, Op, World, ALL, TAKE_OVER};
use std::sync::atomic::Ordering::Relaxed;

/// The daemon's first step for what end 1 sends, in the middle of which this happens.
fn take_over(w: &mut World, inner: Vec<(usize, usize, Act)>) {
    let (end, act) = (1, TAKE_OVER);
    w.run(&Op { end, act, inner });
}

/// How often a takeover came to nothing, or has done something.
fn claims(w: &World) -> u64 {
    let seen = w.seen.borrow();
    let all = ["taken over", "a claim that came to nothing"];
    all.iter().filter_map(|what| seen.get(what)).sum()
}

/// Nobody leaves: the daemon does not touch the direction.
#[test]
fn nobody_has_asked() {
    let mut w = up();
    op(&mut w, 1, send(100));
    for own in [false, true] {
        op(&mut w, 1, Act::TakeOver { own, early: false });
        let word = w.memory(1).daemon().takeover.load(Relaxed);
        assert_eq!((word, claims(&w)), (TakeoverWord::default(), 0));
    }
    op(&mut w, 0, Act::Revoke);
    op(&mut w, 1, TAKE_OVER);
    assert_eq!(claims(&w), 1);
    w.settle([0, 0], false);
}

/// A daemon takes the same direction over in one epoch and in a later one.
#[test]
fn taken_over_twice() {
    let mut w = up();
    for _ in 0..2 {
        op(&mut w, 1, send(100));
        op(&mut w, 0, Act::Revoke);
        op(&mut w, 1, TAKE_OVER);
        op(&mut w, 1, Act::Look);
        op(&mut w, 1, ALL);
        op(&mut w, 0, Act::Revoke);
        op(&mut w, 0, recv(200));
        op(&mut w, 0, Act::Ready);
        op(&mut w, 1, Act::TryUp);
    }
    assert_eq!((w.host[0].got.get(), claims(&w)), (200, 2));
    let moved = ("takeover", "Done".to_owned(), "Taken".to_owned());
    assert!(w.moves.borrow().contains_key(&moved));
}

/// A daemon has died with a direction, and another one takes it over in the slot's next use.
#[test]
fn a_slot_after_its_daemon() {
    for (first, was) in [(Act::Look, "Plain"), (Act::Down, "Down")] {
        let mut w = past();
        op(&mut w, 1, send(100));
        op(&mut w, 1, buffers(40, 1000));
        op(&mut w, 1, first);
        op(&mut w, 0, Act::Revoke);
        op(&mut w, 1, TAKE_OVER);
        op(&mut w, 1, Act::DaemonDies);
        op(&mut w, 0, Act::Reuse { gap: 0 });
        for e in 0..2 {
            op(&mut w, e, Act::Attach { log2: 12 });
        }
        op(&mut w, 0, Act::Ready);
        op(&mut w, 1, Act::TryUp);
        op(&mut w, 1, send(100));
        op(&mut w, 0, Act::Revoke);
        op(&mut w, 1, TAKE_OVER);
        let moved = ("takeover", was.to_owned(), "Taken".to_owned());
        assert!(w.moves.borrow().contains_key(&moved), "{was}");
    }
}

/// An end takes its lock just before the claim, and looks just after it: it finds the direction its own, and brings the
/// ring to TCP itself.
#[test]
fn an_end_that_wakes_beside_a_claim() {
    let mut w = up();
    op(&mut w, 1, send(100));
    op(&mut w, 0, Act::Revoke);
    op(&mut w, 1, Act::Pass { ms: 1000 });
    take_over(&mut w, vec![(0, 1, Act::Wake)]);
    assert_eq!(w.seen.borrow()["a takeover meets an end that wakes"], 1);
    assert_eq!(w.seen.borrow()["a takeover waits for an end at work"], 1);
    let word = w.memory(1).daemon().takeover.load(Relaxed);
    assert_eq!(word.phase(), takeover::NONE);
    assert_eq!(w.host[1].tx.mode.load(Relaxed), mode::TCP);
    w.settle([0, 0], false);
    assert_eq!((w.host[0].got.get(), claims(&w)), (100, 0));
}

/// Between the daemon's look at the state and its claim, the end goes down, up again, and is revoked again. A claim of
/// the epoch that was looked at says nothing about the new one: whatever the end does next, every byte is on TCP once.
#[test]
fn another_epoch_before_the_claim() {
    for at in 0..12 {
        let mut w = up();
        op(&mut w, 1, send(100));
        op(&mut w, 0, Act::Revoke);
        let all = [
            (1, Act::Look),
            (0, Act::Revoke),
            (1, ALL),
            (0, recv(200)),
            (0, Act::Ready),
            (1, Act::TryUp),
            (1, send(50)),
            (0, Act::Revoke),
        ];
        let mut inner: Vec<_> = all.into_iter().map(|(end, act)| (0, end, act)).collect();
        inner.push((at, 1, Act::Look));
        take_over(&mut w, inner);
        assert_eq!((w.host[1].tx.ups.load(Relaxed), claims(&w)), (2, 0));
        w.settle([0, 0], false);
        assert_eq!(w.host[0].got.get(), 150, "{at}");
    }
}

/// A FIN that a shutdown has left to the daemon is no sign of a death, though the end has bytes unread on its ring.
#[test]
fn a_shutdown_left_to_the_daemon() {
    for full in [false, true] {
        let mut w = up();
        op(&mut w, 1, Act::Attach { log2: 12 });
        op(&mut w, 1, Act::Ready);
        op(&mut w, 0, Act::TryUp);
        assert!(w.host[0].tx.is_up());
        op(&mut w, 0, send(50));
        op(&mut w, 1, send(100));
        op(&mut w, 1, buffers(40, 1000));
        op(&mut w, 0, Act::Revoke);
        op(&mut w, 1, TAKE_OVER);
        op(&mut w, 1, Act::ShutWr);
        assert_eq!(w.seen.borrow()["a FIN is left to the daemon"], 1);
        if full {
            op(&mut w, 1, Act::DaemonDies);
        }
        for _ in 0..3 {
            op(&mut w, 1, ALL);
            op(&mut w, 1, TAKE_OVER);
            op(&mut w, 1, Act::Reclaim);
            op(&mut w, 1, Act::Look);
        }
        let late = match full {
            true => "an end shuts down late",
            false => "the daemon shuts down for an end",
        };
        assert_eq!(w.seen.borrow()[late], 1);
        // The end that leaves reads it all before the other one has read anything.
        op(&mut w, 1, ALL);
        op(&mut w, 0, Act::Revoke);
        op(&mut w, 0, recv(200));
        op(&mut w, 0, recv(200));
        assert_eq!(w.host[0].got.get(), 100);
        assert!(w.host[0].eof.get() && !w.host[0].failed.get());
        w.settle([0, 0], false);
        assert_eq!(w.host[1].got.get(), 50);
    }
}

/// What an end that closes has left to the daemon is missing until it is on TCP, whatever its words say.
#[test]
fn a_close_left_to_the_daemon() {
    let mut w = up();
    op(&mut w, 1, send(100));
    op(&mut w, 1, buffers(40, 1000));
    op(&mut w, 0, Act::Revoke);
    op(&mut w, 1, TAKE_OVER);
    op(&mut w, 1, Act::Close);
    assert_eq!(w.seen.borrow()["a FIN is left to the daemon"], 1);
    op(&mut w, 0, Act::Revoke);
    assert!(!w.host[0].rx.has_all(&w.memory(0)));
    w.settle([0, 0], false);
    assert_eq!(w.host[0].got.get(), 100);
    assert!(w.host[0].eof.get());
}

/// Somebody sends past the lane while a daemon brings a ring to TCP: the stream is lost, and the connection is reset.
#[test]
fn bytes_of_somebody_else_behind_a_takeover() {
    for others in [false, true] {
        let mut w = up();
        w.hostile.set(others);
        op(&mut w, 1, send(100));
        op(&mut w, 1, buffers(40, 1000));
        op(&mut w, 0, Act::Revoke);
        op(&mut w, 1, TAKE_OVER);
        op(&mut w, 1, ALL);
        if others {
            assert_eq!(w.net.borrow_mut().send(1, b"!", false), Ok(1));
        }
        op(&mut w, 1, TAKE_OVER);
        assert_eq!(w.net.borrow().reset, others);
    }
}
