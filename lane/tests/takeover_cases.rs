//! A daemon that brings a direction to TCP on one node, and how its end ends meanwhile: single courses of events that
//! `lane_random` has found, or seldom meets.

#![cfg(not(loom))]

mod sim;

use sim::{buffers, op, recv, send, up, Act, ALL, TAKE_OVER};

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
