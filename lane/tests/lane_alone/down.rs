//! Each way down of a sender: what is on TCP then, and what is said about it.

use super::end::*;
use lane::abi::{marks, rx, tx, Cursor, Landed, Loc, TcpPos, TxWord};
use lane::half::tx::mode;
use lane::half::{is_clear, Progress, Sent};
use lane::proto::frame::{Kind, LEN};
use lane::proto::reason::Reason;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

/// `Cursor::UNSEEN`, among numbers.
const UNSEEN: u64 = Cursor::UNSEEN.get();

/// A receiver that has closed, or shut both directions, is sent nothing that its kernel would answer with a reset.
#[test]
fn down_before_a_receiver_that_is_gone() {
    let both = marks::ENDED | marks::DEAF;
    for remote in LOCAL_AND_REMOTE {
        for (flags, said, gone) in [
            (rx::NONE, marks::ENDED, false),
            (rx::NONE, marks::DEAF, false),
            (rx::NONE, both, true),
            (rx::CLOSED, 0, true),
        ] {
            let e = Alone::up(remote);
            e.send(100);
            e.their_rx().marks.store(said, Relaxed);
            e.says(FIRST, is_quiet(remote) | flags);
            assert_eq!(e.tx.down(&e.memory(), &e.tcp), Ok(Progress::Done));
            assert_eq!(e.mode(), mode::TCP);
            assert_eq!(e.tx.downs.load(Relaxed), 1);
            let (sent, phase) = match gone && !remote {
                true => (0, tx::BROKEN),
                false => (LEN + 100, tx::DOWN),
            };
            assert_eq!(e.on_tcp(), sent, "{remote} {flags:?} {said}");
            assert_eq!(e.state(), TxWord::new(FIRST, phase));
        }
    }
    // Of another epoch: it is not about us.
    let e = Alone::up(false);
    e.send(100);
    e.says(SECOND, rx::READY | rx::CLOSED);
    e.tx.down(&e.memory(), &e.tcp).unwrap();
    assert_eq!(e.on_tcp(), LEN + 100);
}

/// Everything is read: on one node the words suffice. Across nodes only a frame tells where TCP goes on.
#[test]
fn down_with_nothing_unread() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::up(remote);
        e.send(100);
        e.reads(100);
        let pushed = e.tcp.pushed.get();
        assert_eq!(e.tx.down(&e.memory(), &e.tcp), Ok(Progress::Done));
        assert_eq!(e.tx.downs.load(Relaxed), 1);
        if remote {
            let f = e.frame();
            assert_eq!((f.kind, f.cursor.get(), f.rest), (Kind::Down, 100, 0));
            assert_eq!(e.state(), TxWord::new(FIRST, tx::DOWN));
            assert_eq!(e.tcp.pushed.get(), pushed + 1);
        } else {
            assert_eq!(e.on_tcp(), 0);
            assert_eq!(e.state(), TxWord::new(FIRST, tx::RESUMED));
        }
        assert_eq!(e.tx.down(&e.memory(), &e.tcp), Ok(Progress::Done));
        assert_eq!(e.tx.downs.load(Relaxed), 1, "only once");
    }
}

/// A revocation names a cursor: anything from the last one seen to the head, and no more unread than rings hold.
#[test]
fn revoked_at_a_cursor() {
    let revoked = |known, at| {
        let e = Alone::up(false);
        e.send(SIZE);
        e.reads(known);
        e.their_rx().revoked.store(Cursor::new(at), Relaxed);
        e.says(FIRST, rx::READY | rx::REVOKED);
        let r = e.tx.look(&e.memory(), &e.tcp);
        (r, e.on_tcp())
    };
    let all = SIZE as u64;
    assert_eq!(revoked(0, 0), (Ok(Progress::Done), SIZE), "a full ring");
    assert_eq!(revoked(0, UNSEEN), (Ok(Progress::Done), SIZE));
    assert_eq!(revoked(10, 10), (Ok(Progress::Done), SIZE - 10));
    assert_eq!(revoked(10, all - 1), (Ok(Progress::Done), 1));
    assert_eq!(revoked(10, all), (Ok(Progress::Done), 0));
    assert_eq!(revoked(10, 9), (Err(Reason::Hostile), 0));
    assert_eq!(revoked(10, all + 1), (Err(Reason::Hostile), 0));
    assert_eq!(
        revoked(10, UNSEEN),
        (Err(Reason::Hostile), 0),
        "it has read"
    );

    // More than the rings hold, of a sender that has moved and moved again: only a liar says so.
    let e = Alone::up(false);
    let m = e.memory();
    e.send(SIZE);
    e.reads(SIZE as u64);
    assert!(e.tx.can_move(&m));
    e.tx.move_to(&m, Loc { page: 1, ..RING });
    e.send(SIZE);
    e.their_rx()
        .revoked
        .store(Cursor::new(SIZE as u64 - 1), Relaxed);
    e.says(FIRST, rx::READY | rx::REVOKED);
    assert_eq!(e.tx.look(&m, &e.tcp), Err(Reason::Hostile));
}

/// Across nodes a frame answers a revocation, unless nothing of the epoch was read.
#[test]
fn revoked_across_nodes() {
    for (at, framed) in [(UNSEEN, false), (0, false), (1, true), (60, true)] {
        let e = Alone::up(true);
        e.send(100);
        e.reads(if framed { at } else { 0 });
        e.their_rx().revoked.store(Cursor::new(at), Relaxed);
        e.says(FIRST, is_quiet(true) | rx::REVOKED);
        assert_eq!(e.tx.down(&e.memory(), &e.tcp), Ok(Progress::Done));
        let n = match framed {
            true => LEN + 100 - at as usize,
            false => 100,
        };
        assert_eq!(e.on_tcp(), n, "{at}");
        assert_eq!(e.tx.phase() == tx::DOWN, framed);
    }
}

/// A receiver reads a part of a send and closes: all of it counts as sent, and what is unread is on TCP as well.
#[test]
fn a_receiver_that_closes_within_a_send() {
    for (read, whole) in [(0, false), (1, true), (100, true)] {
        let e = Alone::up(false);
        e.send(50);
        e.reads(50 + read);
        e.says(FIRST, rx::READY | rx::CLOSED);
        // (The cursor moves only when the bytes are there.)
        let before = e.tx.unread(&e.memory());
        assert_eq!(before.is_err(), read > 0);
        let r = e.send(100);
        if whole {
            assert_eq!(r, Sent::Bytes(100));
            assert_eq!(e.on_tcp(), 100 - read as usize);
            assert_eq!(e.head(), 150);
            assert_eq!(e.tx.again.load(Relaxed), 100 - read);
        } else {
            assert_eq!(r, Sent::Tcp);
            assert_eq!((e.on_tcp(), e.head()), (0, 50), "taken back");
        }
        assert_eq!((e.mode(), e.tx.downs.load(Relaxed)), (mode::TCP, 1));
        assert_eq!(e.tx.tcp_pos.load(Relaxed).get() as usize, e.on_tcp());
        assert_eq!(e.state(), TxWord::new(FIRST, tx::BROKEN));
    }
    // TCP takes it in pieces, or not all of it.
    for (room, piece) in [(1 << 20, 7), (50, 7), (50, 100)] {
        let e = Alone::up(false);
        e.reads(1);
        e.says(FIRST, rx::READY | rx::CLOSED);
        e.tcp.room.set(room);
        e.tcp.piece.set(piece);
        assert_eq!(e.send(100), Sent::Bytes(100), "{room} {piece}");
        assert_eq!(*e.tcp.out.borrow(), bytes(1, 1 + room.min(99) as u64));
    }
    // It had revoked before: what TCP does not take was not sent, and nothing is there twice.
    for room in [0, 30, 200] {
        let e = Alone::up(false);
        e.their_rx().revoked.store(Cursor::new(0), Relaxed);
        e.says(FIRST, rx::READY | rx::REVOKED | rx::CLOSED);
        e.tcp.room.set(room);
        let n = room.min(100);
        let r = e.send(100);
        assert_eq!(r, if n > 0 { Sent::Bytes(n) } else { Sent::Blocked });
        assert_eq!((e.on_tcp(), e.head() as usize), (n, n));
        assert_eq!(e.mode() == mode::TCP, room >= 100);
    }
    // Across nodes what was published may be on its way: nothing is, once the receiver has said so.
    let e = Alone::up(true);
    e.says(FIRST, is_quiet(true) | rx::CLOSED);
    assert_eq!(e.send(100), Sent::Tcp);
    assert_eq!((e.on_tcp(), e.head()), (0, 0));
    assert_eq!(e.state(), TxWord::new(FIRST, tx::BROKEN));
}

/// What must be on TCP before a FIN.
#[test]
fn before_a_fin() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::new(remote);
        assert!(!e.tx.holds_fin(&e.memory()));
        let e = Alone::up(remote);
        let m = e.memory();
        assert_eq!(e.tx.holds_fin(&m), remote);
        e.send(100);
        e.tcp.room.set(5);
        e.tx.down(&m, &e.tcp).unwrap();
        assert_eq!((e.tx.holds_fin(&m), e.tx.must_flush(&m)), (remote, false));
        let e = Alone::up(remote);
        let m = e.memory();
        e.send(100);
        e.their_rx().revoked.store(Cursor::new(0), Relaxed);
        e.says(FIRST, is_quiet(remote) | rx::REVOKED);
        e.tcp.room.set(5);
        e.tx.look(&m, &e.tcp).unwrap();
        assert!(e.tx.holds_fin(&m) && e.tx.must_flush(&m));
    }
    let e = Alone::new(true);
    e.says(FIRST, rx::READY);
    e.tx.try_up(&e.memory(), &e.tcp).unwrap();
    assert!(e.tx.holds_fin(&e.memory()), "asking");
}

/// Before a shutdown on one node, what is unread goes to TCP; only all of it is of use.
#[test]
fn unread_bytes_before_a_fin() {
    let repeat = |e: &Alone| e.tx.before_fin(&e.memory(), &e.tcp);
    assert_eq!(repeat(&Alone::new(false)), Poll::Ready(None));
    let e = Alone::up(false);
    assert_eq!(repeat(&e), Poll::Ready(None), "nothing is unread");
    assert_eq!((e.mode(), e.on_tcp()), (mode::RING, 0));
    for room in [0, LEN + 99, LEN + 100] {
        let e = Alone::up(false);
        e.send(100);
        e.tcp.room.set(room);
        let whole = (room == LEN + 100).then_some(room as u64);
        assert_eq!(repeat(&e), Poll::Ready(whole.map(TcpPos::new)));
        for (sent, inside, ended) in [(0, 1, false), (3, 0, false), (0, 0, true)] {
            // Another thread is sending, or has sent.
            (0..inside * u32::from(whole.is_some())).for_each(|_| assert!(e.tx.enter_native()));
            let tcp_pos = whole.map(|n| TcpPos::new(n + sent));
            e.tx.shut(&e.memory(), &e.tcp, tcp_pos);
            let phase = match (whole, ended) {
                (None, _) => tx::BROKEN,
                (Some(_), true) => tx::ENDED,
                (Some(_), false) => tx::DOWN,
            };
            let what = format!("{room} {sent} {inside}");
            assert_eq!(e.state(), TxWord::new(FIRST, phase), "{what}");
            (0..e.tx.inside()).for_each(|_| e.tx.leave_native(0));
        }
    }
}

/// Bytes of a revoked ring are plain ones, and TCP must have all of them before the FIN, also if the receiver revokes
/// while they are being repeated: it would take the first ones for bytes that bypassed the lane.
#[test]
fn revoked_before_a_fin() {
    for meanwhile in [false, true] {
        let e = Alone::up(false);
        let step = || e.tx.before_fin(&e.memory(), &e.tcp);
        e.send(100);
        e.tcp.room.set(5);
        match meanwhile {
            true => e.says_then(FIRST, rx::READY | rx::REVOKED),
            false => e.says(FIRST, rx::READY | rx::REVOKED),
        }
        for room in [0, 30] {
            assert_eq!(step(), Poll::Pending, "{meanwhile} {room}");
            assert!(e.tcp.then.borrow().is_none() && e.tx.must_flush(&e.memory()));
            e.tcp.room.set(room);
        }
        assert_eq!((step(), e.on_tcp()), (Poll::Pending, 35));
        e.tcp.room.set(65);
        assert_eq!((step(), e.on_tcp()), (Poll::Ready(None), 100));
        e.tx.shut(&e.memory(), &e.tcp, None);
        assert_eq!(e.state(), TxWord::new(FIRST, tx::RESUMED));
        assert_eq!(e.tx.downs.load(Relaxed), 1);
    }
}

/// More than TCP is meant to hold goes there if an end leaves: this one, or the other one in this epoch. A sender that goes
/// down by itself takes no more than there is.
#[test]
fn more_than_tcp_is_meant_to_hold() {
    let whole = LEN + 100;
    for (leaves, says, more, there) in [
        (false, rx::READY, 1 << 20, 40),
        (true, rx::READY, 1 << 20, whole),
        (true, rx::READY, 30, 70),
        (false, rx::READY | rx::REVOKED, 1 << 20, 100),
    ] {
        let e = Alone::up(false);
        e.send(100);
        e.says(FIRST, says);
        e.tcp.room.set(40);
        e.tcp.leaves.set(leaves);
        e.tcp.more.set(more);
        let _ = e.tx.down(&e.memory(), &e.tcp);
        assert_eq!(e.on_tcp(), there, "{leaves} {says:?} {more}");
    }
    // A revocation of another epoch is none.
    let e = Alone::up(false);
    e.send(100);
    e.tcp.room.set(40);
    e.tcp.more.set(1 << 20);
    let _ = e.tx.down(&e.memory(), &e.tcp);
    e.says(FIRST.next(), rx::READY | rx::REVOKED);
    let _ = e.tx.look(&e.memory(), &e.tcp);
    assert_eq!(e.on_tcp(), 40);
    e.says(FIRST, rx::READY | rx::REVOKED);
    let _ = e.tx.look(&e.memory(), &e.tcp);
    assert_eq!(e.on_tcp(), whole);
}

/// A shutdown says what the ring's bytes are: on the ring only. It counts as a way down once.
#[test]
fn a_shutdown_on_the_ring() {
    let e = Alone::up(false);
    e.tx.shut(&e.memory(), &e.tcp, None);
    assert_eq!(e.state(), TxWord::new(FIRST, tx::BROKEN));
    assert_eq!((e.mode(), e.tx.downs.load(Relaxed)), (mode::TCP, 1));
    let e = Alone::up(false);
    e.send(100);
    e.tcp.room.set(5);
    e.tx.down(&e.memory(), &e.tcp).unwrap();
    e.tx.shut(&e.memory(), &e.tcp, None);
    assert_eq!(e.state(), TxWord::new(FIRST, tx::BROKEN));
    assert_eq!((e.mode(), e.tx.downs.load(Relaxed)), (mode::TCP, 1));
    let e = Alone::new(false);
    let n = publishes(&e, || e.tx.shut(&e.memory(), &e.tcp, None));
    assert_eq!((n, e.tx.downs.load(Relaxed)), (0, 0));
    assert_eq!(e.state(), TxWord::default());
}

/// The end of the stream is announced when all has landed and is read, and the receiver is past what TCP held.
#[test]
fn a_fin_frame() {
    for (landed, read, flags, finished) in [
        (99, 99, rx::PAST, false),
        (100, 99, rx::PAST, false),
        (100, 100, rx::NONE, false),
        (100, 100, rx::PAST, true),
    ] {
        let e = Alone::up(true);
        e.send(100);
        e.their_rx()
            .landed
            .store(Landed::at_cursor(Cursor::new(landed)), Relaxed);
        assert_eq!(e.tx.has_landed(&e.memory()), landed == 100);
        e.reads(read);
        e.says(FIRST, is_quiet(true) | flags);
        let r = e.tx.finish(&e.memory(), &e.tcp);
        if finished {
            assert_eq!(r, Ok(Progress::Done));
            let f = e.frame();
            assert_eq!((f.kind, f.cursor.get(), f.rest), (Kind::Fin, 100, 0));
            assert_eq!((e.on_tcp(), e.tx.downs.load(Relaxed)), (LEN, 1));
            assert_eq!(e.state(), TxWord::new(FIRST, tx::DOWN));
        } else {
            assert_eq!((r, e.on_tcp()), (Ok(Progress::Blocked), 0));
            // Asked to go down meanwhile, it does.
            e.says(FIRST, is_quiet(true) | flags | rx::WANT_DOWN);
            assert_eq!(e.tx.finish(&e.memory(), &e.tcp), Ok(Progress::Done));
            assert_eq!(e.frame().kind, Kind::Down);
        }
    }
    // On one node there is no such frame.
    let e = Alone::up(false);
    e.says(FIRST, rx::READY | rx::PAST);
    assert_eq!(e.tx.finish(&e.memory(), &e.tcp), Ok(Progress::Done));
    assert_eq!((e.mode(), e.on_tcp()), (mode::RING, 0));
}

/// TCP has failed: the end of the connection is told once, to the application; what is not there is on the ring.
#[test]
fn tcp_fails_on_the_way_down() {
    for room in [0, LEN + 50] {
        let e = Alone::up(false);
        e.send(100);
        e.tcp.room.set(room);
        assert_eq!(e.tx.down(&e.memory(), &e.tcp), Ok(Progress::Blocked));
        e.tcp.error.set(libc::EPIPE);
        assert_eq!(e.tx.look(&e.memory(), &e.tcp), Ok(Progress::Done));
        assert_eq!(e.state(), TxWord::new(FIRST, tx::BROKEN));
        assert_eq!(e.tx.error.take(), libc::EPIPE);
        assert_eq!(e.mode(), mode::TCP);
    }
}

/// Who must be on TCP comes down from wherever it is, also from the ring that its look has brought it to.
#[test]
fn come_down() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::up(remote);
        e.send(100);
        assert_eq!(e.tx.come_down(&e.memory(), &e.tcp), Ok(Progress::Done));
        assert_eq!((e.mode(), e.on_tcp()), (mode::TCP, LEN + 100));
        assert_eq!(e.tx.come_down(&e.memory(), &e.tcp), Ok(Progress::Done));
        assert_eq!(e.on_tcp(), LEN + 100);
    }
    let e = Alone::new(true);
    e.says(FIRST, rx::READY);
    assert_eq!(e.tx.try_up(&e.memory(), &e.tcp), Ok(false));
    assert_eq!(e.tx.come_down(&e.memory(), &e.tcp), Ok(Progress::Blocked));
    e.says(FIRST, is_quiet(true));
    assert_eq!(e.tx.come_down(&e.memory(), &e.tcp), Ok(Progress::Done));
    assert_eq!((e.mode(), e.on_tcp()), (mode::TCP, LEN));
}

/// The application has shut down what it left to a daemon: whoever has the connection next cannot send, and the FIN comes
/// after the last byte, not before.
#[test]
fn a_fin_that_was_left_comes_before_the_next_send() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::up(remote);
        e.send(100);
        e.tx.shut.store(1, Relaxed);
        e.tcp.room.set(60);
        assert_eq!(e.tx.come_down(&e.memory(), &e.tcp), Ok(Progress::Blocked));
        assert_eq!(e.tcp.fin.get(), None, "bytes have yet to come");
        e.tcp.room.set(1000);
        assert_eq!(e.tx.come_down(&e.memory(), &e.tcp), Ok(Progress::Done));
        assert_eq!(e.tcp.fin.get(), Some(LEN + 100));
    }
    // The daemon has brought everything to TCP, and has yet to shut down.
    let e = Alone::up(true);
    e.tx.shut.store(1, Relaxed);
    e.tx.mode.store(mode::TCP, Relaxed);
    assert_eq!(e.tx.come_down(&e.memory(), &e.tcp), Ok(Progress::Done));
    assert_eq!(e.tcp.fin.get(), Some(0));
    // Its peer has left, and so does it.
    let e = Alone::up(true);
    e.tx.shut.store(1, Relaxed);
    e.tx.mode.store(mode::TCP, Relaxed);
    assert!(is_clear(&e.tx, &e.rx, &e.memory(), &e.tcp));
    assert_eq!(e.tcp.fin.get(), Some(0));
    // (Who has not shut down goes on.)
    let e = Alone::up(true);
    assert_eq!(e.tx.come_down(&e.memory(), &e.tcp), Ok(Progress::Done));
    assert_eq!(e.tcp.fin.get(), None);
}
