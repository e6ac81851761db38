//! What a switch up needs, and what moves a ring.

use super::end::*;
use lane::abi::{rx, takeover, tx, Cursor, Loc, TcpPos, TxWord};
use lane::half::tx::mode;
use lane::half::{Progress, Sent};
use lane::proto::frame::{Kind, LEN};
use lane::proto::reason::Reason;
use std::sync::atomic::Ordering::Relaxed;

/// A switch: not without a readiness of a later epoch, nor while a native call is running, nor without a ring, nor
/// with bytes that nobody counted.
#[test]
fn what_a_switch_needs() {
    let up = |e: &Alone| e.tx.try_up(&e.memory(), &e.tcp);
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::new(remote);
        assert_eq!(up(&e), Ok(false));
        e.says(FIRST, rx::READY | rx::REVOKED);
        assert!(!e.tx.can_up(&e.memory()));
        e.says(FIRST, rx::READY);
        assert!(e.tx.can_up(&e.memory()));
        assert!(e.tx.enter_native());
        assert_eq!((up(&e), e.mode()), (Ok(false), mode::TCP));
        e.tx.leave_native(0);
        e.tcp.knows.set(false);
        assert_eq!((up(&e), e.mode()), (Ok(false), mode::TCP));
        e.tcp.knows.set(true);
        e.tcp.out.borrow_mut().push(1);
        assert_eq!((up(&e), e.mode()), (Err(Reason::Bypassed), mode::TCP));
        assert!(e.tx.enter_native());
        e.tx.leave_native(1);
        assert_eq!(up(&e), Ok(!remote));
        assert_eq!(up(&e), Ok(false), "it is up, or asks");
        assert_eq!(e.ours().tx[L].up_tcp_pos.load(Relaxed).get(), 1);
    }
    // Of the epoch that is over, or of one long ago.
    let e = Alone::up(false);
    e.tx.down(&e.memory(), &e.tcp).unwrap();
    assert!(!e.tx.can_up(&e.memory()));
    e.says(lane::abi::Epoch::NONE, rx::READY);
    assert!(!e.tx.can_up(&e.memory()));
    e.says(SECOND, rx::READY);
    assert_eq!(up(&e), Ok(true));
    assert_eq!(e.tx.ups.load(Relaxed), 2);
    // Without a ring that is mapped here.
    let e = Alone::beside(false, Loc { chunk: 60, ..RING }, lane::VERSION);
    e.says(FIRST, rx::READY);
    assert_eq!((up(&e), e.mode()), (Ok(false), mode::TCP));
}

/// The receiver withdraws its readiness just when the sender has switched: not up, and nothing is lost.
#[test]
fn a_readiness_withdrawn_within_the_switch() {
    for (epoch, flags) in [(FIRST, rx::READY | rx::REVOKED), (SECOND, rx::READY)] {
        let e = Alone::new(false);
        e.says(FIRST, rx::READY);
        e.says_then(epoch, flags);
        assert_eq!(e.tx.try_up(&e.memory(), &e.tcp), Ok(false));
        assert_eq!(e.mode(), mode::TCP);
        assert_eq!(e.state(), TxWord::new(FIRST, tx::RESUMED));
        assert_eq!(e.tx.ups.load(Relaxed), 0);
    }
}

/// A ring moves when the reader has left the former one, and only if more may be unread than it holds.
#[test]
fn when_a_ring_moves() {
    let e = Alone::up(false);
    let m = e.memory();
    e.send(100);
    let second = Loc { page: 1, ..RING };
    assert!(e.tx.can_move(&m));
    assert_eq!(e.tx.move_to(&m, second), None);
    assert_eq!(e.tx.ring_log2(), 12);
    e.reads(99);
    assert!(!e.tx.can_move(&m), "it may read on there");
    e.reads(100);
    assert!(e.tx.can_move(&m));
    assert_eq!(e.tx.move_to(&m, LARGE), Some(RING));
    assert_eq!(e.tx.ring_log2(), 17);
    // The application has asked for less than the ring holds.
    e.tx.set_sndbuf(&m, 10);
    e.their_rx().room.store(20, Relaxed);
    assert!(e.tx.is_bounded(&m) && !e.tx.can_move(&m));
    e.tx.set_sndbuf(&m, 0);
    assert!(!e.tx.is_bounded(&m) && e.tx.can_move(&m));
    e.reads(101);
    assert!(!e.tx.can_move(&m), "what the reader says is impossible");
    e.reads(100);
    e.tx.abandon(&e.memory());
    assert!(!e.tx.can_move(&m));
    assert_eq!(e.tx.downs.load(Relaxed), 1);
    e.tx.abandon(&e.memory());
    assert_eq!(e.tx.downs.load(Relaxed), 1);
    // Across nodes nobody knows that size, and a daemon may have the direction.
    let e = Alone::up(true);
    let m = e.memory();
    e.tx.set_sndbuf(&m, 10);
    assert!(!e.tx.is_bounded(&m) && e.tx.can_move(&m));
    e.takeover(FIRST, takeover::TAKEN);
    assert!(!e.tx.can_move(&m));
}

/// A send that never came back, and what was sent before this process had the connection: no switch until the kernel's
/// count is known.
#[test]
fn sends_that_nobody_counted() {
    let e = Alone::new(false);
    let up = || e.tx.try_up(&e.memory(), &e.tcp);
    e.says(FIRST, rx::READY);
    assert!(e.tx.enter_native() && e.tx.enter_native());
    assert_eq!((e.tx.inside(), e.tx.uncounted()), (2, false));
    e.tx.leave_uncounted();
    assert_eq!((e.tx.inside(), e.tx.uncounted()), (1, true));
    e.tx.recount(|| unreachable!("one is inside"));
    e.tx.leave_native(3);
    e.tcp.out.borrow_mut().extend([0; 8]);
    assert_eq!(up(), Ok(false));
    e.tx.recount(|| None);
    assert_eq!(up(), Ok(false));
    e.tx.recount(|| Some(TcpPos::new(8)));
    assert_eq!(
        (e.tx.uncounted(), e.tx.tcp_pos.load(Relaxed).get()),
        (false, 8)
    );
    e.tx.begin_uncounted();
    assert!(e.tx.uncounted());
    assert_eq!(up(), Ok(false));
    e.tx.forget_uncounted();
    assert_eq!((e.tx.uncounted(), up()), (false, Ok(true)));
    assert!(!e.tx.enter_native());
    assert_eq!(e.tx.native_calls.load(Relaxed), 0);
}

/// What one epoch has left behind does not show in the next one: half a frame that nobody waits for any more, or the
/// frame of an end.
#[test]
fn the_next_epoch_begins_anew() {
    let again = |e: &Alone| {
        let m = e.memory();
        e.tcp.out.borrow_mut().clear();
        e.tx.tcp_pos.store(TcpPos::new(0), Relaxed);
        e.tcp.room.set(1 << 20);
        e.says(SECOND, rx::READY);
        assert_eq!(e.tx.try_up(&m, &e.tcp), Ok(!e.remote));
        e.says(SECOND, is_quiet(e.remote));
        assert_eq!(e.send(50), Sent::Bytes(50));
    };
    for revoked in [false, true] {
        let e = Alone::up(false);
        e.send(100);
        e.tcp.room.set(5);
        assert_eq!(e.tx.down(&e.memory(), &e.tcp), Ok(Progress::Blocked));
        e.tx.abandon(&e.memory());
        again(&e);
        if revoked {
            e.their_rx().revoked.store(Cursor::new(100), Relaxed);
            e.says(SECOND, rx::READY | rx::REVOKED);
        } else {
            e.says(SECOND, rx::READY | rx::WANT_DOWN);
        }
        assert_eq!(e.tx.look(&e.memory(), &e.tcp), Ok(Progress::Done));
        assert_eq!(e.on_tcp(), if revoked { 50 } else { LEN + 50 });
    }
    let e = Alone::up(true);
    e.says(FIRST, is_quiet(true) | rx::PAST);
    assert_eq!(e.tx.finish(&e.memory(), &e.tcp), Ok(Progress::Done));
    assert_eq!(e.frame().kind, Kind::Fin);
    again(&e);
    assert_eq!(e.tx.down(&e.memory(), &e.tcp), Ok(Progress::Done));
    assert_eq!((e.frame().kind, e.on_tcp()), (Kind::Down, LEN + 50));
}

/// The connection gets another slot, on which less was ever sent than on the one before.
#[test]
fn another_slot() {
    let e = Alone::up(false);
    let m = e.memory();
    e.send(100);
    e.reads(100);
    e.tx.move_to(&m, Loc { page: 1, ..RING });
    e.tx.abandon(&e.memory());
    e.ours().heads[L].store(Cursor::new(40), Relaxed);
    let base = lane::abi::Epoch::new(10);
    let second = Loc { page: 1, ..RING };
    assert_eq!(e.tx.attach(&m, base, RING), [Some(second), Some(RING)]);
    assert_eq!(
        (e.mode(), e.state()),
        (mode::TCP, TxWord::new(base, tx::NONE))
    );
    e.says(base.next(), rx::READY);
    e.reads(40);
    assert_eq!(e.tx.try_up(&m, &e.tcp), Ok(true));
    assert_eq!(e.send(SIZE), Sent::Bytes(SIZE));
}
