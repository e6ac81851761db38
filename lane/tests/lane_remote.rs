//! Lanes across nodes: what each rule is for, one story each. The model of the same protocol (see
//! `tests/src/model/remote.rs`) found most of them.

#![cfg(not(loom))]

mod sim;

use sim::{op, recv, send, Act, Op, World, ALL};
use std::sync::atomic::Ordering::Relaxed;

const CARRY: Act = Act::Carry { n: 1000 };

/// End 1 sends to end 0: attached, ready, asked, and granted. `prefix` bytes go over TCP before,
/// and are not read.
fn up(prefix: usize) -> World {
    let mut w = World::across_nodes();
    for end in 0..2 {
        op(&mut w, end, Act::Attach { log2: 12 });
    }
    op(&mut w, 0, Act::Ready);
    op(&mut w, 0, CARRY);
    if prefix > 0 {
        op(&mut w, 1, send(prefix));
    }
    op(&mut w, 1, Act::TryUp);
    assert!(!w.host[1].tx.is_up(), "nobody has been asked yet");
    op(&mut w, 1, CARRY);
    op(&mut w, 0, CARRY);
    op(&mut w, 1, Act::Look);
    assert!(w.host[1].tx.is_up());
    w
}

/// The sender's node dies in the middle of what its frame announced: TCP ends cleanly there, the
/// stream does not.
#[test]
fn a_down_that_breaks_off_is_no_end() {
    let mut w = up(0);
    op(&mut w, 1, send(1000));
    let little = Act::Buffers {
        snd: 40, // the frame and eight bytes
        rcv: 1 << 16,
        piece: 1 << 16,
    };
    op(&mut w, 1, little);
    op(&mut w, 1, Act::Cut);
    op(&mut w, 1, Act::Down);
    op(&mut w, 1, Act::Kill);
    op(&mut w, 1, ALL);
    for _ in 0..4 {
        op(&mut w, 0, recv(3000));
    }
    assert_eq!(w.host[0].got.get(), 8);
    assert!(!w.host[0].eof.get(), "a clean end after 8 of 1000 bytes");
    assert!(w.host[0].failed.get(), "an error tells");
}

/// The same while the receiver wants to hand its socket over: the error that tells is not used up by
/// the hand-over, and what follows does not look like an end.
#[test]
fn a_hand_over_of_a_stream_that_breaks_off() {
    let mut w = up(0);
    op(&mut w, 1, send(3000));
    op(&mut w, 1, Act::Carry { n: 1 });
    let frame = Act::Buffers {
        snd: lane::proto::frame::LEN,
        rcv: 1 << 16,
        piece: 1 << 16,
    };
    op(&mut w, 1, frame);
    op(&mut w, 1, Act::Down);
    op(&mut w, 1, ALL);
    op(&mut w, 0, Act::Revoke);
    assert!(
        w.host[0].revoking.get(),
        "the frame is there, the bytes are not"
    );
    op(&mut w, 1, Act::Kill);
    op(&mut w, 1, ALL);
    op(&mut w, 0, recv(5000));
    assert_eq!(w.host[0].got.get(), 1500);
    op(&mut w, 0, Act::Revoke);
    assert_eq!(w.seen.borrow()["revocation impossible"], 1);
    op(&mut w, 0, recv(5000));
    assert!(w.host[0].failed.get() && !w.host[0].eof.get());
}

/// A client sends a little before it goes up, and closes; the server has read nothing and hands the
/// socket over. An end announced behind the unread bytes would be in the way of the next owner.
#[test]
fn the_end_is_not_announced_behind_a_prefix() {
    let mut w = up(10);
    op(&mut w, 1, send(100));
    op(&mut w, 1, CARRY);
    op(&mut w, 0, CARRY);
    op(&mut w, 1, Act::ShutWr);
    assert!(
        !w.host[1].wr_shut.get(),
        "everything has landed, but the prefix is unread"
    );
    op(&mut w, 0, Act::Revoke);
    assert!(w.host[0].revoking.get());
    op(&mut w, 0, CARRY);
    op(&mut w, 1, Act::Look);
    op(&mut w, 1, CARRY);
    op(&mut w, 1, ALL);
    op(&mut w, 0, Act::Revoke);
    assert!(!w.host[0].revoking.get() && !w.host[0].rx.engaged());
    op(&mut w, 1, Act::ShutWr);
    assert!(w.host[1].wr_shut.get());
    w.settle([0, 0], false);
    assert_eq!(w.host[0].got.get(), 110);
    assert!(w.host[0].eof.get());
}

/// A revocation meets a send: on one node what TCP does not take of it was never sent. Here a daemon
/// may have sent it on already.
#[test]
fn what_was_published_stays_sent() {
    let mut w = up(0);
    op(&mut w, 0, Act::Revoke);
    op(&mut w, 0, CARRY);
    let none = Act::Buffers {
        snd: 0,
        rcv: 1 << 16,
        piece: 1 << 16,
    };
    op(&mut w, 1, none);
    op(&mut w, 1, send(1000));
    assert_eq!(w.host[1].sent.get(), 1000);
    let head = w.control(1).heads[sim::LANE as usize].load(Relaxed);
    assert_eq!(head.get(), 1000);
    w.settle([0, 0], false);
    assert_eq!(w.host[0].got.get(), 1000);
}

/// The sender has gone down on its own, and the wire fails before its word for that arrives: only
/// the frame can tell a receiver that waits to leave.
#[test]
fn a_frame_answers_when_words_cannot() {
    let mut w = up(0);
    op(&mut w, 1, send(10));
    op(&mut w, 0, Act::Cut);
    op(&mut w, 1, Act::Down);
    op(&mut w, 1, ALL);
    op(&mut w, 0, Act::Revoke);
    assert!(!w.host[0].revoking.get() && !w.host[0].rx.engaged());
    op(&mut w, 0, recv(100));
    assert_eq!(w.host[0].got.get(), 10);
}

/// The frame says how many bytes of the ring come again on TCP. Who leaves with some of them unread needs no word of
/// the sender's for that, which may never come.
#[test]
fn a_frame_is_enough_to_leave_a_ring_that_is_not_read() {
    let mut w = up(0);
    op(&mut w, 1, send(1000));
    op(&mut w, 1, CARRY);
    op(&mut w, 0, recv(300));
    op(&mut w, 0, Act::Cut);
    op(&mut w, 1, Act::Down);
    op(&mut w, 1, Act::Deliver { n: 500 });
    op(&mut w, 0, Act::Revoke);
    assert!(w.host[0].revoking.get(), "not all of it is there");
    op(&mut w, 1, ALL);
    op(&mut w, 0, Act::Revoke);
    assert!(!w.host[0].revoking.get() && !w.host[0].rx.engaged());
    op(&mut w, 0, recv(2000));
    assert_eq!(w.host[0].got.get(), 1000);
}

/// An end that nobody announced, with bytes on their way.
#[test]
fn a_bare_end_is_a_reset() {
    let mut w = up(0);
    op(&mut w, 1, send(10));
    op(&mut w, 1, Act::Kill);
    op(&mut w, 1, ALL);
    op(&mut w, 0, recv(100));
    op(&mut w, 0, recv(100));
    assert!(w.host[0].failed.get() && !w.host[0].eof.get());
}

/// Who inherited a lane goes down, and the frame is quicker than the ring's last bytes, which it has repeated: the
/// head moves behind the reader's back, and nothing of it will ever be read there. The daemon lets go all the same.
#[test]
fn a_frame_that_overtakes_the_ring() {
    let mut w = up(0);
    op(&mut w, 1, send(500));
    op(&mut w, 1, CARRY);
    op(&mut w, 0, recv(500));
    op(&mut w, 1, send(1000));
    op(&mut w, 0, Act::WantDown);
    op(&mut w, 0, CARRY);
    op(&mut w, 1, Act::Look);
    op(&mut w, 1, ALL);
    let left = |w: &World| {
        let h = &w.host[0];
        lane::half::is_left(&w.memory(0), !h.rx.engaged())
    };
    assert!(!left(&w), "it has not seen the frame yet");
    op(&mut w, 0, recv(1200));
    op(&mut w, 0, recv(1200));
    assert_eq!(w.host[0].got.get(), 1500);
    assert!(!w.host[0].rx.engaged(), "all of it has come by TCP");
    op(&mut w, 1, CARRY);
    let c = w.control(0).cursors[sim::LANE as usize].load(Relaxed);
    assert_eq!(c.get(), 500, "and once more, for nobody");
    assert_eq!(w.memory(0).peer_head().load(Relaxed).get(), 1500);
    assert!(left(&w));
}

/// Ready when its owner ends, and never up: nobody will switch to it (`Pair::refuse_switches`).
#[test]
fn a_readiness_that_is_left_over() {
    let mut w = World::across_nodes();
    for end in 0..2 {
        op(&mut w, end, Act::Attach { log2: 12 });
    }
    op(&mut w, 0, Act::Ready);
    op(&mut w, 0, CARRY);
    assert!(w.host[0].rx.engaged());
    assert!(lane::half::is_left(&w.memory(0), false));
    op(&mut w, 1, Act::TryUp);
    op(&mut w, 1, CARRY);
    assert!(!lane::half::is_left(&w.memory(0), false));
    // Its own direction counts as well: asked for, and not answered.
    assert!(!lane::half::is_left(&w.memory(1), true));
}

/// A refused switch leaves the epoch to be offered again.
#[test]
fn a_withdrawn_readiness_refuses_the_switch() {
    let mut w = World::across_nodes();
    for end in 0..2 {
        op(&mut w, end, Act::Attach { log2: 12 });
    }
    op(&mut w, 0, Act::Ready);
    op(&mut w, 0, CARRY);
    op(&mut w, 1, Act::TryUp);
    op(&mut w, 0, Act::Revoke);
    assert!(!w.host[0].rx.engaged(), "nobody had switched: at once");
    op(&mut w, 1, CARRY);
    op(&mut w, 0, CARRY);
    op(&mut w, 1, send(10));
    assert!(!w.host[1].tx.is_up());
    op(&mut w, 1, ALL);
    op(&mut w, 0, recv(100));
    assert_eq!(w.host[0].got.get(), 10);
    op(&mut w, 0, Act::Ready);
    for _ in 0..2 {
        op(&mut w, 0, CARRY);
        op(&mut w, 1, Act::TryUp);
        op(&mut w, 1, CARRY);
    }
    op(&mut w, 0, CARRY);
    op(&mut w, 1, Act::Look);
    assert!(w.host[1].tx.is_up());
}

/// FIONREAD that sees a switch in its middle goes past it: nothing that could be heard comes after.
#[test]
fn a_count_that_meets_a_switch_goes_past_it() {
    for at in 0..8 {
        let mut w = World::across_nodes();
        for end in 0..2 {
            op(&mut w, end, Act::Attach { log2: 12 });
        }
        op(&mut w, 0, Act::Ready);
        op(&mut w, 0, CARRY);
        op(&mut w, 1, Act::TryUp);
        w.run(&Op {
            end: 0,
            act: Act::Unread,
            inner: vec![(at, 1, CARRY)],
        });
        w.settle([0, 100], false);
        assert_eq!(w.host[0].got.get(), 100, "carried at point {at}");
    }
}
