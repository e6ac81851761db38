//! Interleavings that once lost, repeated or held back bytes, or could; each found by the random
//! operations, by a model of the protocol that there was at first, or by reading for it.

#![cfg(not(loom))]

mod sim;

use sim::{buffers, op, past, ready, recv, send, up, up_in, Act, Op, Wire, World, ALL};

/// The receiver finds no switch and an empty queue; then the sender switches, fills the ring and
/// shuts down: the end of file that the receiver finds next lies behind the ring.
#[test]
fn end_of_file_behind_a_switch() {
    let mut w = ready();
    let inner = vec![
        (2, 1, Act::TryUp),
        (0, 1, send(10)),
        (0, 1, Act::ShutWr),
        (0, 1, ALL),
    ];
    w.run(&Op {
        end: 0,
        act: recv(100),
        inner,
    });
    op(&mut w, 0, recv(100));
    assert_eq!(w.host[0].got.get(), 10);
    w.settle([0, 0], false);
    assert!(w.host[0].eof.get());
}

/// A sending thread takes the error that the receiver has just found kept: there is none to tell any more, and no
/// errno 0.
#[test]
fn an_error_that_another_thread_takes() {
    for start in [ready, up] {
        let mut told = 0;
        for at in 0..8 {
            let mut w = start();
            w.hostile.set(true); // (an error that no network has made)
            w.host[0].rx.error.put(libc::ECONNRESET);
            let inner = vec![(at, 0, Act::TakeError)];
            w.run(&Op {
                end: 0,
                act: recv(100),
                inner,
            });
            told += u32::from(w.host[0].failed.get());
        }
        assert!(
            (1..7).contains(&told),
            "taken before it is told, and after: {told}"
        );
    }
}

/// Bytes that arrive while the receiver looks at TCP are received like others: all that a segment
/// brought, not its first byte. (CPython's `test_large_content_length` takes each `recv` for a
/// request.)
#[test]
fn a_segment_that_arrives_during_the_look() {
    let mut full = 0;
    for at in 0..4 {
        let mut w = ready();
        let sent = Act::Send { len: 10, up: false };
        w.run(&Op {
            end: 0,
            act: recv(100),
            inner: vec![(at, 1, sent), (0, 1, ALL)],
        });
        let got = w.host[0].got.get();
        assert!(got == 0 || got == 10, "{got} bytes, after {at} steps");
        full += u32::from(got == 10);
        w.settle([0, 0], false);
        assert_eq!(w.host[0].got.get(), 10);
    }
    assert!((1..4).contains(&full), "seen before and after");
}

/// FIONREAD counts what a receive would find, wherever it lies, and no frame.
#[test]
fn unread_bytes_are_counted() {
    let unread = |w: &mut World| {
        op(w, 0, Act::Unread);
        w.host[0].unread.get()
    };
    let mut w = ready();
    let tcp = Act::Send { len: 10, up: false };
    op(&mut w, 1, tcp);
    op(&mut w, 1, ALL);
    assert_eq!(unread(&mut w), 10);
    op(&mut w, 1, Act::TryUp);
    op(&mut w, 1, send(5));
    assert_eq!(unread(&mut w), 15);
    op(&mut w, 0, recv(8));
    assert_eq!(unread(&mut w), 7);
    op(&mut w, 1, Act::Down);
    op(&mut w, 1, ALL);
    assert_eq!(unread(&mut w), 7, "the frame is in the queue");
    op(&mut w, 0, recv(4));
    assert_eq!(unread(&mut w), 3);
    w.settle([0, 0], false);
    assert_eq!(w.host[0].got.get(), 15);
}

/// The sender has gone up and down while a receiver read nothing: counts and peeks see through the frame, to what lies
/// behind it, from wherever the receiver has come to.
#[test]
fn unread_bytes_behind_a_frame() {
    let peek = |len| Act::Recv {
        len,
        peek: true,
        discard: false,
        look: true,
    };
    let tcp = |len| Act::Send { len, up: false };
    for (before, ring, read) in [10, 0]
        .into_iter()
        .flat_map(|b| [5, 0].map(|r| (b, r)))
        .flat_map(|(b, r)| (0..18).map(move |n| (b, r, n)))
    {
        let mut w = ready();
        op(&mut w, 1, tcp(before));
        op(&mut w, 1, ALL);
        op(&mut w, 1, Act::TryUp);
        op(&mut w, 1, send(ring));
        op(&mut w, 1, Act::Down);
        op(&mut w, 1, tcp(4));
        op(&mut w, 1, ALL);
        for _ in 0..read.min(before + ring) {
            op(&mut w, 0, recv(1));
        }
        let left = (before + ring + 4 - read.min(before + ring)) as u64;
        op(&mut w, 0, Act::Unread);
        if w.host[0].rx.engaged() {
            assert_eq!(w.host[0].unread.get(), left);
        }
        for len in 1..left as usize + 2 {
            op(&mut w, 0, peek(len));
            assert_eq!(w.host[0].found.get(), left.min(len as u64));
        }
        w.agree(0);
        w.settle([0, 0], false);
        assert_eq!(w.host[0].got.get(), (before + ring + 4) as u64);
    }
}

/// The receiver has not seen a switch and counts what TCP holds; meanwhile the sender switches,
/// goes down again, and its frame arrives: the count includes it.
#[test]
fn a_frame_before_the_count() {
    let mut w = ready();
    let inner = vec![
        (0, 1, Act::TryUp),
        (0, 1, send(10)),
        (0, 1, Act::Down),
        (0, 1, ALL),
    ];
    w.run(&Op {
        end: 0,
        act: recv(1000),
        inner,
    });
    w.settle([0, 10], false);
    assert_eq!(w.host[0].got.get(), 20);
}

/// The receiver takes its readiness back while the sender is switching up, and is soon ready again.
#[test]
fn revocation_during_the_switch() {
    for again in [false, true] {
        for at in 0..3 {
            let mut w = ready();
            let mut inner = vec![(at, 0, Act::Revoke)];
            if again {
                inner.push((0, 0, Act::Ready));
            }
            w.run(&Op {
                end: 1,
                act: Act::TryUp,
                inner,
            });
            op(&mut w, 1, send(10));
            w.settle([0, 100], false);
            assert_eq!(w.host[0].got.get(), 110, "revoked at point {at}");
        }
    }
}

/// A readiness that was never used does not end promotion for good.
#[test]
fn ready_again_after_an_unused_readiness() {
    let mut w = ready();
    for _ in 0..3 {
        op(&mut w, 0, Act::Revoke);
        op(&mut w, 0, Act::Ready);
    }
    op(&mut w, 1, Act::TryUp);
    assert!(w.host[1].tx.is_up());
    w.settle([0, 10_000], false);
}

/// Ready again before the sender has read the revocation: it would never read it.
#[test]
fn not_ready_before_the_revocation_is_read() {
    let mut w = up();
    op(&mut w, 0, recv(1));
    op(&mut w, 0, Act::Revoke);
    op(&mut w, 0, Act::Ready);
    assert!(
        !w.host[0].rx.engaged(),
        "the sender still believes in the old epoch"
    );
    op(&mut w, 1, send(10));
    op(&mut w, 0, Act::Ready);
    assert!(w.host[0].rx.engaged());
    w.settle([0, 100], true);
}

/// While a revocation waits, receives take nothing that will come again on TCP.
#[test]
fn receive_while_a_revocation_waits() {
    let mut w = up();
    op(&mut w, 1, send(100));
    op(&mut w, 0, recv(30));
    op(&mut w, 0, Act::Revoke);
    op(&mut w, 0, recv(50));
    assert_eq!(w.host[0].got.get(), 30);
    op(&mut w, 1, Act::Look);
    op(&mut w, 1, ALL);
    op(&mut w, 0, recv(1000));
    assert_eq!(w.host[0].got.get(), 100);
    assert!(!w.host[0].rx.engaged());
}

/// The reader stops exactly where the ring has moved, and does not look again until it has moved
/// once more.
#[test]
fn two_moves_without_a_look() {
    let mut w = up();
    for log2 in [13, 14, 12] {
        op(&mut w, 1, send(4096));
        op(&mut w, 1, Act::Move { log2 });
        op(&mut w, 0, recv(4096));
    }
    op(&mut w, 1, send(1000));
    op(&mut w, 1, Act::Move { log2: 12 });
    op(&mut w, 1, send(1000));
    assert_eq!(w.seen.borrow()["moved"], 4);
    // A peek walks over the move and does not take the reader with it.
    op(
        &mut w,
        0,
        Act::Recv {
            len: 2000,
            peek: true,
            discard: false,
            look: false,
        },
    );
    op(&mut w, 0, recv(500));
    op(&mut w, 0, recv(1500));
    assert_eq!(w.host[0].got.get(), 3 * 4096 + 2000);
}

/// Moves before the receiver has seen the switch.
#[test]
fn moves_before_the_switch_is_seen() {
    let mut w = up();
    for log2 in [12, 13, 12] {
        op(&mut w, 1, Act::Move { log2 });
    }
    op(&mut w, 1, send(3000));
    op(&mut w, 1, Act::Move { log2: 14 });
    op(&mut w, 1, send(3000));
    op(&mut w, 0, recv(6000));
    assert_eq!(w.host[0].got.get(), 6000);
}

/// The sender dies in the middle of its frame: everything is on the ring, then comes the end.
#[test]
fn death_within_a_frame() {
    let mut w = up();
    op(&mut w, 1, send(100));
    op(&mut w, 1, buffers(7, 100));
    op(&mut w, 1, Act::Down);
    op(&mut w, 1, ALL);
    op(&mut w, 0, recv(60));
    op(&mut w, 0, recv(60));
    op(&mut w, 0, recv(60));
    op(&mut w, 1, Act::Kill);
    w.settle([0, 0], false);
    assert!(w.host[0].eof.get());
    assert_eq!(w.host[0].got.get(), 100);
}

/// The sender has shut TCP and cannot answer a revocation. What was unread then is on TCP, too; if that did not take it
/// all, the receiver keeps its ring.
#[test]
fn revocation_after_a_shutdown() {
    for room in [0, 20, 32, 60, 1000] {
        let mut w = past();
        op(&mut w, 1, send(100));
        op(&mut w, 1, buffers(room, 1000));
        op(&mut w, 1, Act::ShutWr);
        op(&mut w, 1, ALL);
        op(&mut w, 0, Act::Revoke);
        // At once, and not after the deadline of a hand-over.
        let stays = w.seen.borrow().contains_key("revocation impossible");
        assert_eq!(stays, room < 1000, "room for {room}");
        w.settle([0, 0], false);
        assert_eq!(w.host[0].got.get(), 100);
        assert!(w.host[0].eof.get());
    }
}

/// A receiver that takes all that such a sender has left leaves nothing in its kernel.
#[test]
fn after_a_shutdown_the_last_receive_takes_the_frame() {
    let mut w = up();
    op(&mut w, 1, send(100));
    op(&mut w, 1, Act::ShutWr);
    op(&mut w, 1, ALL);
    op(&mut w, 0, recv(60));
    op(&mut w, 0, recv(40));
    assert_eq!(w.host[0].got.get(), 100);
    assert_eq!(w.net.borrow().unread(0), 0);
}

/// The same when the sender hears of the revocation only when it wants to shut TCP, and TCP is full.
#[test]
fn shutdown_waits_for_revoked_bytes() {
    let mut w = up();
    op(&mut w, 1, send(100));
    op(&mut w, 0, Act::Revoke);
    op(&mut w, 1, buffers(40, 1000));
    op(&mut w, 1, Act::ShutWr);
    assert!(!w.host[1].wr_shut.get(), "60 bytes would be lost");
    for _ in 0..2 {
        op(&mut w, 1, ALL);
        op(&mut w, 1, Act::ShutWr);
    }
    assert!(w.host[1].wr_shut.get());
    w.settle([0, 0], false);
    assert_eq!(w.host[0].got.get(), 100);
    assert!(w.host[0].eof.get());
}

/// A sender that died on its way down, and a receiver that leaves; with the frame on TCP or not.
#[test]
fn revocation_after_a_death_on_the_way_down() {
    for room in [0, 10, 32, 50] {
        let mut w = past();
        op(&mut w, 1, send(100));
        op(&mut w, 1, buffers(room, 1000));
        op(&mut w, 1, Act::Down);
        op(&mut w, 1, Act::Kill);
        op(&mut w, 1, ALL);
        for _ in 0..3 {
            op(&mut w, 0, Act::Revoke);
        }
        w.settle([0, 0], false);
        // It may not have been handed over; either way no clean end of file without the bytes.
        assert!(
            w.host[0].failed.get() || w.host[0].got.get() == 100,
            "room {room}"
        );
    }
}

/// A revocation that the sender finds between its announcement and its frame: what follows on TCP
/// is plain, though the announcement still stands.
#[test]
fn revocation_between_announcement_and_frame() {
    let mut w = up();
    op(&mut w, 1, send(2000));
    op(&mut w, 0, recv(100));
    op(&mut w, 1, buffers(300, 300));
    // The first point inside `down` is the ring of the announcement.
    w.run(&Op {
        end: 1,
        act: Act::Down,
        inner: vec![(0, 0, Act::Revoke), (1, 1, ALL)],
    });
    op(&mut w, 1, ALL);
    op(&mut w, 0, Act::Revoke);
    op(&mut w, 0, recv(10));
    w.settle([0, 0], false);
    assert_eq!(w.host[0].got.get(), 2000);
}

/// Bytes that meet a revocation and a full TCP are not called sent: nobody else could send them.
#[test]
fn a_revoked_send_takes_back_what_tcp_refuses() {
    let mut w = up();
    op(&mut w, 0, recv(1));
    op(&mut w, 0, Act::Revoke);
    assert!(!w.host[0].rx.engaged());
    op(&mut w, 1, buffers(40, 1000));
    op(&mut w, 1, send(100));
    assert_eq!(w.host[1].sent.get(), 40);
    op(&mut w, 1, Act::Kill);
    w.settle([0, 0], false);
    assert_eq!(w.host[0].got.get(), 40);
    assert!(w.host[0].eof.get());
}

/// A quick reader takes all that was sent, and closes, before the sender has looked: nothing is left that TCP
/// would have to answer with a reset. (A receive that sleeps, with its number closed by another thread, ends
/// so: the peer's next receive said ECONNRESET instead of the end.)
#[test]
fn a_reader_that_closes_behind_the_last_byte() {
    let mut w = up();
    op(&mut w, 0, recv(100));
    let inner = vec![(0, 0, recv(100)), (0, 0, Act::Close)];
    w.run(&Op {
        end: 1,
        act: send(10),
        inner,
    });
    assert_eq!((w.host[0].got.get(), w.host[1].sent.get()), (10, 10));
    assert!(w.host[0].closed.get() && !w.host[1].tx.is_up());
    assert_eq!(w.net.borrow().pipe[1].accepted, 0);
    op(&mut w, 1, ALL);
    assert!(!w.net.borrow().reset);
}

/// A sender that has asked for a small buffer puts no more on the ring than TCP would have taken, and is woken when
/// half of that is read, long before half of the ring is.
#[test]
fn a_small_send_buffer() {
    let mut w = up_in(14);
    let bumps = |w: &World| {
        let c = w.control(0);
        lane::notify::counter(&c.seq[sim::LANE as usize / lane::abi::LANES_PER_COUNTER].0)
    };
    let sizes = |sndbuf, room| Act::Sizes { sndbuf, room };
    let waits = |w: &World| !w.host[1].tx.want_space(&w.memory(1), &Wire { w, e: 1 });
    op(&mut w, 0, sizes(0, 1000));
    op(&mut w, 1, sizes(500, 0));
    op(&mut w, 1, send(10_000));
    assert_eq!(w.host[1].sent.get(), 2000); // and half of a window
    assert_eq!(w.host[1].tx.outstanding(&w.memory(1)), 1000);
    assert!(waits(&w));
    let before = bumps(&w);
    op(&mut w, 0, recv(900));
    assert_eq!(bumps(&w), before);
    op(&mut w, 0, recv(200));
    assert_ne!(bumps(&w), before, "space, and nobody was told");
    assert!(!waits(&w));
    // A larger one; none; and of the reader's alone nothing is said.
    op(&mut w, 1, sizes(5000, 0));
    op(&mut w, 1, send(10_000));
    assert_eq!(w.host[1].sent.get(), 1100 + 6500);
    op(&mut w, 1, sizes(0, 0));
    op(&mut w, 1, send(40_000));
    assert_eq!(w.host[1].sent.get(), 1100 + (1 << 14));
}

/// One of two waiters finds space; the other must still be woken.
#[test]
fn a_wish_for_space_survives_another_waiters_send() {
    let mut w = up();
    op(&mut w, 1, send(4096));
    op(&mut w, 1, send(1)); // full
    assert!(!w.host[1].tx.want_space(&w.memory(1), &Wire { w: &w, e: 1 }));
    op(&mut w, 0, recv(600));
    op(&mut w, 1, send(600)); // the other thread
    let bumps = |w: &World| {
        let c = w.control(0);
        lane::notify::counter(&c.seq[sim::LANE as usize / lane::abi::LANES_PER_COUNTER].0)
    };
    let before = bumps(&w);
    op(&mut w, 0, recv(4096));
    assert_ne!(bumps(&w), before, "space, and nobody was told");
}

/// A sender's state is that of the slot's next use, however the last one has ended.
#[test]
fn a_slot_after_its_end() {
    let ends = [
        (0, Act::ShutWr, "Broken"),
        (1000, Act::ShutWr, "Ended"),
        (0, Act::Down, "Downing"),
    ];
    for (room, last, was) in ends {
        let mut w = past();
        op(&mut w, 1, send(100));
        op(&mut w, 1, buffers(room, 1000));
        op(&mut w, 1, last);
        op(&mut w, 0, Act::Reuse { gap: 0 });
        op(&mut w, 1, Act::Attach { log2: 12 });
        let moved = ("state", was.to_owned(), "None".to_owned());
        assert!(w.moves.borrow().contains_key(&moved), "{was}");
    }
}

/// A sender that has shut TCP down may still find a receiver ready. (Nothing is sent on that ring.)
#[test]
fn up_after_the_end() {
    for (room, was) in [(0, "Broken"), (1000, "Ended")] {
        let mut w = past();
        op(&mut w, 1, send(100));
        op(&mut w, 1, buffers(room, 1000));
        op(&mut w, 1, Act::ShutWr);
        op(&mut w, 1, ALL);
        for _ in 0..4 {
            op(&mut w, 0, recv(60));
        }
        op(&mut w, 0, Act::Revoke);
        op(&mut w, 0, Act::Ready);
        op(&mut w, 1, Act::TryUp);
        let moved = ("state", was.to_owned(), "Up".to_owned());
        assert!(w.moves.borrow().contains_key(&moved), "{was}");
    }
}

/// A frame for the lane's former use, or a look-alike, is foreign: nothing is parsed by accident.
#[test]
fn slots_are_used_again() {
    let mut w = up();
    for gap in 0..4 {
        op(&mut w, 1, send(3000));
        op(&mut w, 0, recv(1000));
        op(&mut w, 1, Act::Down);
        op(&mut w, 0, Act::Reuse { gap });
        op(&mut w, 1, send(500));
        op(&mut w, 0, Act::Attach { log2: 13 });
        op(&mut w, 0, Act::Ready);
        op(&mut w, 0, recv(100));
        op(&mut w, 1, Act::Attach { log2: 12 });
        op(&mut w, 1, Act::TryUp);
        assert!(w.host[1].tx.is_up());
        op(&mut w, 1, send(3000));
        op(&mut w, 1, ALL);
        op(&mut w, 0, recv(10_000));
        op(&mut w, 0, recv(10_000));
        assert_eq!(w.host[0].got.get(), 3500);
    }
}
