//! What a receiver takes, believes and says, and what that costs: publishes, looks at TCP.

use super::end::*;
use lane::abi::{rx, tx, Cursor, Epoch, Loc, RxWord, SpaceWord, TcpPos, RING_LOG2_MAX};
use lane::half::rx::{mode, How};
use lane::half::Received;
use lane::proto::frame::Kind;
use lane::proto::reason::Reason;
use std::sync::atomic::Ordering::Relaxed;

/// On the ring, nothing on TCP before it.
fn on_ring(remote: bool) -> Alone {
    let e = Alone::receiving(remote, 0);
    assert_eq!(recv(&e, 10), Received::Empty);
    assert_eq!(mode_of(&e), mode::RING);
    e
}

/// A full ring, and a sender that waits for space or does not.
fn full(remote: bool, wants: u32) -> Alone {
    let e = on_ring(remote);
    e.puts(0, &bytes(0, SIZE as u64));
    e.their_tx()
        .want_space
        .store(SpaceWord::from_raw(wants), Relaxed);
    e
}

/// A sender that waits is woken when half of its ring is free, and not again; nobody else is.
#[test]
fn space_on_one_node() {
    for wants in [0, 1] {
        let e = full(false, wants);
        let takes = |n| publishes(&e, || assert_eq!(recv(&e, n), Received::Bytes(n)));
        assert_eq!(takes(SIZE / 4), 0);
        assert_eq!(takes(SIZE / 4 - 1), 0);
        assert_eq!(takes(1), wants, "one half");
        assert_eq!(takes(10), 0, "it had been told");
        assert_eq!(takes(SIZE / 4), 0);
        assert_eq!(takes(SIZE / 4 - 10), 0);
        // The ring may have been filled after we looked how much is on it: a large take looks in any case.
        e.puts(SIZE as u64, &bytes(0, SIZE as u64 / 2));
        assert_eq!(takes(SIZE / 4), 0);
        assert_eq!(takes(SIZE / 4), 0);
        e.puts(SIZE as u64 * 3 / 2, &bytes(0, SIZE as u64 / 2));
        assert_eq!(takes(SIZE / 4 + 1), wants);
    }
}

/// The same with a send buffer that the sender has asked for: half of what may be unread.
#[test]
fn space_of_a_small_send_buffer() {
    let e = on_ring(false);
    e.rx.set_room(&e.memory(), 200);
    e.their_tx()
        .want_space
        .store(SpaceWord::from_raw(100 << 1 | 1), Relaxed);
    e.puts(0, &bytes(0, 400));
    let takes = |n| publishes(&e, || assert_eq!(recv(&e, n), Received::Bytes(n)));
    assert_eq!(takes(100), 0);
    assert_eq!(takes(99), 0);
    assert_eq!(takes(1), 1);
    assert_eq!(takes(1), 0);
}

/// Across nodes: a quarter of the ring at a time, and when it is empty.
#[test]
fn space_across_nodes() {
    for wants in [0, 1] {
        let e = full(true, wants);
        let quarter = SIZE / 4;
        let takes = |n| publishes(&e, || assert_eq!(recv(&e, n), Received::Bytes(n)));
        assert_eq!(takes(quarter - 1), 0);
        assert_eq!(takes(1), wants);
        assert_eq!(takes(quarter - 1), 0);
        assert_eq!(takes(2), wants);
        assert_eq!(takes(quarter - 1), 0);
        assert_eq!(takes(quarter), wants, "empty");
        e.puts(SIZE as u64, &bytes(0, 10));
        assert_eq!(takes(9), 0);
        assert_eq!(takes(1), wants, "empty");
    }
}

/// A peek leaves everything as it was, and says nothing to anybody.
#[test]
fn a_peek_at_the_ring() {
    for remote in LOCAL_AND_REMOTE {
        let e = full(remote, 1);
        let how = How {
            peek: true,
            ..look()
        };
        let n = publishes(&e, || {
            let (r, b) = e.recv(SIZE, how);
            assert_eq!(r, Received::Bytes(SIZE));
            assert_eq!(b, bytes(0, SIZE as u64));
        });
        assert_eq!(n, 0);
        assert_eq!(e.ours().cursors[L].load(Relaxed).get(), 0);
        assert_eq!(e.rx.ring_bytes.load(Relaxed), 0);
        assert_eq!(recv(&e, 10), Received::Bytes(10));
        assert_eq!(e.rx.ring_bytes.load(Relaxed), 10);
    }
}

/// TCP is asked only by a receive that is told to, and once.
#[test]
fn a_look_at_tcp() {
    let e = on_ring(false);
    let asked = |how| {
        let before = e.tcp.asked.get();
        assert_eq!(e.recv(10, how).0, Received::Empty);
        e.tcp.asked.get() - before
    };
    assert_eq!(asked(How::default()), 0);
    assert_eq!(asked(look()), 1);
    e.puts(0, &bytes(0, 5));
    let before = e.tcp.asked.get();
    assert_eq!(recv(&e, 10), Received::Bytes(5));
    assert_eq!(e.tcp.asked.get(), before, "there were bytes on the ring");
    // An error that was kept is told behind the bytes, and only once TCP has none.
    e.rx.error.put(libc::EPIPE);
    e.puts(5, &bytes(5, 8));
    assert_eq!(e.recv(10, How::default()).0, Received::Bytes(3));
    assert_eq!(e.recv(10, How::default()).0, Received::Error(libc::EPIPE));
    assert_eq!(e.recv(10, How::default()).0, Received::Empty);
}

/// A switch that is there is seen before TCP is asked, which may report an end behind it.
#[test]
fn a_switch_before_the_look_at_tcp() {
    let e = Alone::receiving(false, 0);
    e.puts(0, &bytes(0, 5));
    assert_eq!(recv(&e, 10), Received::Bytes(5));
    assert_eq!(e.tcp.asked.get(), 0);
}

/// TCP has ended, or failed, and the sender published its last bytes before that: they come first.
#[test]
fn bytes_before_the_end_of_tcp() {
    for (error, end) in [
        (0, Received::Eof),
        (libc::ETIMEDOUT, Received::Error(libc::ETIMEDOUT)),
    ] {
        let e = on_ring(false);
        e.tcp.error.set(error);
        e.tcp.once.set(true);
        e.tcp.ended.set(error == 0);
        e.puts_then(0, &bytes(0, 5));
        assert_eq!(recv(&e, 10), Received::Bytes(5));
        assert!(e.tcp.then.borrow().is_none());
        assert_eq!(recv(&e, 10), end);
        assert_eq!(recv(&e, 10), Received::Eof);
    }
}

/// Another use of the slot begins with another ring, also if its sender has not moved since.
#[test]
fn the_ring_of_another_use() {
    let e = Alone::receiving(false, 0);
    e.puts(0, &bytes(0, 5));
    assert_eq!(recv(&e, 10), Received::Bytes(5));
    let base = Epoch::new(1 << 16);
    e.rx.attach(&e.memory(), base, TAG);
    assert!(e.rx.declare_ready(&e.memory(), &e.tcp));
    let t = e.their_tx();
    let ring = Loc { page: 1, ..RING };
    t.loc[0].store(ring.word(), Relaxed);
    t.up_start.store(Cursor::new(5), Relaxed);
    e.sender_says(base.next(), tx::UP);
    e.puts_on(ring, 5, b"new");
    let (r, b) = e.recv(10, look());
    assert_eq!((r, &b[..3]), (Received::Bytes(3), &b"new"[..]));
}

/// A receive into memory that is not there takes nothing; one that discards needs none.
#[test]
fn bad_memory() {
    let e = on_ring(false);
    e.puts(0, &bytes(0, 5));
    e.tcp.mapped.set(0);
    for peek in [false, true] {
        let how = How { peek, ..look() };
        assert_eq!(e.recv(5, how).0, Received::Error(libc::EFAULT));
    }
    assert_eq!(e.ours().cursors[L].load(Relaxed).get(), 0);
    let how = How {
        discard: true,
        ..look()
    };
    assert_eq!(e.recv(2, how).0, Received::Bytes(2));
    e.tcp.mapped.set(u32::MAX);
    let (r, b) = e.recv(5, look());
    assert_eq!((r, &b[..3]), (Received::Bytes(3), &bytes(2, 5)[..]));
}

/// What a sender says of its switch is believed within limits.
#[test]
fn a_switch_that_cannot_be() {
    for (limit, ok) in [(9, false), (10, true), (10 + (1 << 32), true)] {
        let e = Alone::receiving(false, limit);
        e.rx.tcp_pos.store(TcpPos::new(10), Relaxed);
        let r = recv(&e, 5);
        assert_eq!(r == Received::Empty, ok, "{r:?}");
        assert_eq!(r == Received::Reset(Reason::Sync), !ok);
    }
    let e = Alone::receiving(false, 11 + (1 << 32));
    e.rx.tcp_pos.store(TcpPos::new(10), Relaxed);
    assert_eq!(recv(&e, 5), Received::Reset(Reason::Sync));
    // Without a prefix the ring comes at once. The sender is told that; across nodes a daemon has to forward it.
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::receiving(remote, 0);
        let n = publishes(&e, || assert_eq!(recv(&e, 5), Received::Empty));
        assert_eq!(n, u32::from(remote));
        assert!(word(&e).has(rx::PAST));
        let e = Alone::receiving(remote, 3);
        e.their_tx().want_space.store(SpaceWord::new(true), Relaxed);
        e.arrives(&bytes(0, 3));
        assert_eq!(recv(&e, 2), Received::Bytes(2));
        assert_eq!(mode_of(&e), mode::PREFIX);
        assert!(!word(&e).has(rx::PAST));
        let n = publishes(&e, || assert_eq!(recv(&e, 2), Received::Bytes(1)));
        assert_eq!((n, mode_of(&e)), (u32::from(remote), mode::RING));
        assert!(word(&e).has(rx::PAST));
    }
}

/// The head: not behind the cursor, nor more than two of the largest rings ahead.
#[test]
fn a_head_that_cannot_be() {
    let most = 2 << RING_LOG2_MAX;
    let e = on_ring(false);
    e.puts(0, &bytes(0, 20));
    assert_eq!(recv(&e, 10), Received::Bytes(10));
    let head = &e.theirs().heads[L];
    for (at, unread) in [(10, 0), (11, 1), (10 + most, most), (11 + most, 0), (9, 0)] {
        head.store(Cursor::new(at), Relaxed);
        assert_eq!(e.rx.ring_unread(&e.memory()), unread, "{at}");
        assert_eq!(e.rx.has_ring_bytes(&e.memory()), at != 10);
        assert_eq!(e.rx.ready(&e.memory()), Some(at != 10));
        assert_eq!(e.rx.has_news(&e.memory()), at != 10);
    }
    for at in [9, 11 + most, 11 + SIZE as u64] {
        head.store(Cursor::new(at), Relaxed);
        assert_eq!(recv(&e, 5), Received::Reset(Reason::Hostile), "{at}");
    }
    head.store(Cursor::new(10 + SIZE as u64), Relaxed);
    assert_eq!(recv(&e, 5), Received::Bytes(5));
}

/// Readiness: on TCP only, with no native call running, not before a sender that was up has read a revocation. Only a
/// daemon has to be told.
#[test]
fn readiness() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::new(remote);
        let ready = || e.rx.declare_ready(&e.memory(), &e.tcp);
        assert!(e.rx.enter_native());
        assert!(!ready() && !e.rx.engaged());
        e.rx.leave_native(0);
        let n = publishes(&e, || assert!(ready() && !ready()));
        assert_eq!(n, u32::from(remote));
        assert_eq!(word(&e), RxWord::new(FIRST, rx::READY));
        assert!(!e.rx.enter_native());
        assert_eq!(e.rx.native_calls.load(Relaxed), 0);
        for (phase, again) in [
            (tx::NONE, true),
            (tx::UP, false),
            (tx::DOWNING, false),
            (tx::DOWN, true),
            (tx::RESUMED, true),
            (tx::BROKEN, true),
        ] {
            let epoch = e.rx.epoch.load(Relaxed);
            e.rx.abandon();
            e.ours().rx[L]
                .word
                .store(RxWord::new(epoch, rx::READY | rx::REVOKED), Relaxed);
            e.sender_says(epoch, phase);
            assert_eq!(ready(), again, "{phase:?}");
            let next = if again { epoch.next() } else { epoch };
            assert_eq!(e.rx.epoch.load(Relaxed), next);
            // Of another epoch, or not revoked: it does not matter.
            e.rx.abandon();
            e.sender_says(Epoch::new(999), phase);
            assert!(ready());
            e.rx.abandon();
            e.sender_says(e.rx.epoch.load(Relaxed), phase);
            assert!(ready(), "nothing was revoked");
        }
    }
}

/// A receive that never came back, and what was received before this process had the connection: no switch until the
/// kernel's count is known.
#[test]
fn receives_that_nobody_counted() {
    let e = Alone::new(false);
    let ready = || e.rx.declare_ready(&e.memory(), &e.tcp);
    assert!(e.rx.enter_native() && e.rx.enter_native());
    assert_eq!((e.rx.inside(), e.rx.uncounted()), (2, false));
    e.rx.leave_uncounted();
    assert_eq!((e.rx.inside(), e.rx.uncounted()), (1, true));
    e.rx.recount(|| unreachable!("one is inside"));
    e.rx.leave_native(3);
    assert!(!ready());
    e.rx.recount(|| None);
    assert!(!ready());
    e.rx.recount(|| Some(TcpPos::new(8)));
    assert_eq!(
        (e.rx.uncounted(), e.rx.tcp_pos.load(Relaxed).get()),
        (false, 8)
    );
    e.rx.begin_uncounted();
    assert!(e.rx.uncounted() && !ready());
    e.rx.forget_uncounted();
    assert!(!e.rx.uncounted() && ready());
}

/// An urgent byte is the kernel's: it is skipped, and a call that has a part of its bytes stops before it.
#[test]
fn an_urgent_mark() {
    let ready = || {
        let e = Alone::new(false);
        assert!(e.rx.declare_ready(&e.memory(), &e.tcp));
        e
    };
    // Bytes before it, the byte itself, bytes behind it.
    let e = ready();
    e.arrives(&bytes(0, 10));
    e.tcp.mark.set(Some(4));
    assert_eq!(recv(&e, 20), Received::Bytes(4));
    let part = How {
        part: true,
        ..look()
    };
    assert_eq!(e.recv(20, part).0, Received::Empty);
    assert_eq!(
        e.recv(20, look()),
        (Received::Bytes(5), {
            let mut b = bytes(5, 10);
            b.resize(20, 0);
            b
        })
    );
    assert_eq!(e.rx.tcp_pos.load(Relaxed).get(), 9);
    // The sender switches while they are counted: what is behind the switch is a frame, perhaps.
    let e = ready();
    e.arrives(&bytes(0, 3));
    e.arrives(&down(0, 0));
    e.tcp.mark.set(Some(0));
    e.their_tx().up_tcp_pos.store(TcpPos::new(2), Relaxed);
    e.tcp.at_ask.set(Some(4));
    e.switches_then();
    assert_eq!(recv(&e, 20), Received::Bytes(2));
    assert_eq!(mode_of(&e), mode::RING);
    // Nothing behind it: it is skipped all the same, except by a peek or for no room.
    let e = ready();
    e.arrives(&bytes(0, 1));
    e.tcp.mark.set(Some(0));
    let peek = How {
        peek: true,
        ..look()
    };
    assert_eq!(e.recv(20, peek).0, Received::Empty);
    assert_eq!(e.recv(0, look()).0, Received::Empty);
    assert!(e.tcp.mark.get().is_some());
    assert_eq!(recv(&e, 20), Received::Empty);
    assert_eq!((e.tcp.mark.get(), e.tcp.queue.borrow().len()), (None, 0));
}

/// The cursor of a frame: no further from the reader's than two of the largest rings, and on the right side of it. Tag
/// and epoch are the lane's.
#[test]
fn a_frame_that_cannot_be() {
    const START: u64 = 1 << 24;
    let most = 2 << RING_LOG2_MAX;
    let after = |remote, frame: &[u8]| {
        let e = Alone::receiving(remote, 0);
        e.their_tx().up_start.store(Cursor::new(START), Relaxed);
        e.theirs().heads[L].store(Cursor::new(START), Relaxed);
        assert_eq!(recv(&e, 1), Received::Empty);
        assert_eq!(mode_of(&e), mode::RING);
        e.arrives(frame);
        let r = recv(&e, 0);
        (r, mode_of(&e))
    };
    let hostile = (Received::Reset(Reason::Hostile), mode::RING);
    let skip = (Received::Empty, mode::SKIP);
    for remote in LOCAL_AND_REMOTE {
        assert_eq!(after(remote, &down(START - most, most as u32)), skip);
        assert_eq!(after(remote, &down(START - most - 1, 1 << 30)), hostile);
        assert_eq!(after(remote, &down(START + 1, 0)), hostile);
        assert_eq!(after(remote, &down(START, 0)), (Received::Tcp, mode::TCP));
        // It announces less than the reader has of it.
        let r = after(remote, &down(START - 5, 4)).0;
        assert_eq!(r, Received::Reset(Reason::Hostile));
    }
    let end = |cursor| after(true, &frame(Kind::Fin, cursor, 0));
    assert_eq!(end(START), (Received::Eof, mode::FIN));
    assert_eq!(end(START + most + 1), hostile);
    assert_eq!(end(START - 1), hostile);
    assert_eq!(end(START + most).1, mode::FIN);
    for at in [0, 4, 5, 6, 8, 24] {
        let mut other = down(START, 0);
        other[at] ^= 0x40;
        let foreign = (Received::Reset(Reason::Foreign), mode::RING);
        assert_eq!(after(false, &other), foreign, "{at}");
    }
}
