//! What a send finds when its direction is about to change, and what the next use of the slot must not find.

use super::end::*;
use lane::abi::{loc_index, rx, takeover, tx, Cursor, Epoch, Loc, SpaceWord, TakeoverWord, TxWord};
use lane::half::tx::{mode, BeforeFin};
use lane::half::{Progress, Sent};
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

/// On the way down nothing may go to TCP before what is under way there.
#[test]
fn on_the_way_down() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::up(remote);
        e.send(100);
        e.tcp.room.set(5);
        assert_eq!(e.tx.down(&e.memory(), &e.tcp), Ok(Progress::Blocked));
        assert_eq!(e.send(10), Sent::Blocked);
        e.tcp.room.set(1000);
        assert_eq!(e.send(10), Sent::Tcp);
    }
    // Across nodes, to a receiver that has revoked and closed.
    let e = Alone::up(true);
    e.send(100);
    e.their_rx().revoked.store(Cursor::new(0), Relaxed);
    e.says(FIRST, is_quiet(true) | rx::REVOKED | rx::CLOSED);
    e.tcp.room.set(5);
    assert_eq!(e.send(10), Sent::Blocked);
    assert_eq!((e.mode(), e.on_tcp(), e.head()), (mode::DRAIN, 5, 100));
}

/// A switch across nodes is refused: the send is TCP's, and so is a way down.
#[test]
fn a_switch_that_is_refused() {
    let asks = || {
        let e = Alone::new(true);
        e.says(FIRST, rx::READY);
        assert_eq!(e.tx.try_up(&e.memory(), &e.tcp), Ok(false));
        assert!(e.tx.asks());
        e
    };
    let e = asks();
    e.says(FIRST, rx::READY | rx::REVOKED);
    assert_eq!(e.send(10), Sent::Tcp);
    assert!(!e.tx.asks());
    let e = asks();
    e.says(FIRST, rx::READY | rx::REVOKED);
    assert_eq!(e.tx.down(&e.memory(), &e.tcp), Ok(Progress::Done));
    // Granted: down goes by the ring.
    let e = asks();
    e.says(FIRST, is_quiet(true));
    assert_eq!(e.tx.down(&e.memory(), &e.tcp), Ok(Progress::Done));
    assert_eq!((e.tx.ups.load(Relaxed), e.tx.downs.load(Relaxed)), (1, 1));
}

/// Across nodes, a receiver closes while the send is published: it may be on its way, and is sent.
#[test]
fn a_close_across_nodes_within_a_send() {
    let e = Alone::up(true);
    e.says_then(FIRST, is_quiet(true) | rx::CLOSED);
    assert_eq!(e.send(100), Sent::Bytes(100));
    assert_eq!((e.mode(), e.head()), (mode::TCP, 100));
}

/// What a send did not send is not sent later.
#[test]
fn what_was_taken_back() {
    let e = Alone::up(false);
    e.their_rx().revoked.store(Cursor::new(0), Relaxed);
    e.says(FIRST, rx::READY | rx::REVOKED);
    e.tcp.room.set(30);
    assert_eq!(e.send(100), Sent::Bytes(30));
    e.tcp.room.set(1000);
    assert_eq!(e.tx.come_down(&e.memory(), &e.tcp), Ok(Progress::Done));
    assert_eq!((e.on_tcp(), e.head()), (30, 30));
    let e = Alone::up(false);
    e.says(FIRST, rx::READY | rx::CLOSED);
    assert_eq!(e.send(100), Sent::Tcp);
    assert_eq!((e.head(), e.tx.unread(&e.memory())), (0, Ok(0)));
}

/// Whoever has shut down is told so by the next send, so poll says that it may send.
#[test]
fn poll_after_a_shutdown() {
    let e = Alone::up(false);
    assert_eq!(e.send(SIZE), Sent::Bytes(SIZE));
    assert!(!e.tx.writable(&e.memory()));
    e.tx.shut.store(1, Relaxed);
    assert!(e.tx.writable(&e.memory()));
}

/// A new use of the slot has nothing of the last one, whatever that left.
#[test]
fn a_slot_used_anew() {
    let e = Alone::up(false);
    let m = e.memory();
    let base = Epoch::new(10);
    e.send(100);
    e.tcp.room.set(5);
    e.tx.down(&m, &e.tcp).unwrap();
    assert_eq!(e.mode(), mode::DRAIN);
    e.tx.want_space(&m, &e.tcp);
    e.tx.set_sndbuf(&m, 10);
    e.tx.full_since_ms.store(7, Relaxed);
    let words = &e.ours().tx[L];
    words.loc_seq.store(5, Relaxed);
    e.tx.attach(&m, base, RING);
    assert_eq!((e.mode(), e.tx.epoch.load(Relaxed)), (mode::TCP, base));
    assert_eq!(e.tx.full_since_ms.load(Relaxed), 0);
    assert_eq!(words.want_space.load(Relaxed), SpaceWord::NONE);
    assert_eq!(words.loc[loc_index(5)].load(Relaxed), RING.word());
    e.says(base, rx::READY);
    assert!(!e.tx.can_up(&m), "it is the base's");
    e.says(base.next(), rx::READY);
    e.reads(100);
    assert_eq!(e.tx.try_up(&m, &e.tcp), Ok(true));
    let second = Loc { page: 1, ..RING };
    assert!(e.tx.can_move(&m));
    e.tx.move_to(&m, second);
    assert_eq!(words.loc_seq.load(Relaxed), 6, "the reader counts on");
    assert_eq!(words.loc[loc_index(6)].load(Relaxed), second.word());
}

/// An epoch whose takeover was ended by the end itself is only that epoch, in that use of the slot.
#[test]
fn a_reclaimed_epoch_of_the_last_use() {
    let e = Alone::up(false);
    let m = e.memory();
    e.send(100);
    e.says(FIRST, rx::READY | rx::REVOKED);
    let t = e.take();
    e.tcp.room.set(30);
    assert_eq!(t.down(&e.taken(), &e.tcp), Ok(Progress::Blocked));
    e.tcp.room.set(1000);
    assert_eq!(e.tx.reclaim(&m, &e.tcp), Ok(Progress::Done));
    e.tx.attach(&m, Epoch::NONE, RING);
    e.tx.tcp_pos
        .store(lane::abi::TcpPos::new(e.on_tcp() as u64), Relaxed);
    e.reads(100);
    e.go_up();
    e.takeover(FIRST, takeover::TAKEN);
    assert!(e.tx.awaits(&m), "another one has it");
}

/// Readinesses count from the last epoch on, half the circle far.
#[test]
fn a_readiness_far_ahead() {
    let e = Alone::new(false);
    for (ahead, up) in [(1, true), (u32::MAX / 2, true), (u32::MAX / 2 + 1, false)] {
        e.says(Epoch::new(ahead), rx::READY);
        assert_eq!(e.tx.can_up(&e.memory()), up, "{ahead}");
    }
}

/// The size that an application has set counts if it is what the ring holds, or less; on one node.
#[test]
fn a_ring_as_large_as_the_send_buffer() {
    for (more, bounded) in [(0, true), (1, false)] {
        let e = Alone::up(false);
        e.their_rx().room.store(2, Relaxed);
        e.tx.set_sndbuf(&e.memory(), SIZE as u32 - 3 + more);
        assert_eq!(e.tx.is_bounded(&e.memory()), bounded);
    }
    let e = Alone::up(true);
    e.their_rx().room.store(2, Relaxed);
    e.tx.set_sndbuf(&e.memory(), 10);
    assert!(!e.tx.is_bounded(&e.memory()));
}

/// Two rings full of unread bytes are no lie.
#[test]
fn revoked_with_two_rings_unread() {
    let e = Alone::up(false);
    let m = e.memory();
    e.send(SIZE);
    assert!(e.tx.can_move(&m));
    e.tx.move_to(&m, Loc { page: 1, ..RING });
    assert_eq!(e.send(SIZE), Sent::Bytes(SIZE));
    e.their_rx().revoked.store(Cursor::new(0), Relaxed);
    e.says(FIRST, rx::READY | rx::REVOKED);
    assert_eq!(e.tx.look(&m, &e.tcp), Ok(Progress::Done));
    assert_eq!(*e.tcp.out.borrow(), bytes(0, 2 * SIZE as u64));
}

/// What an end waits for before its FIN: room, or a daemon that has only claimed; and it asks whether the daemon is there
/// only then.
#[test]
fn what_a_fin_waits_for() {
    let e = Alone::up(false);
    let m = e.memory();
    let there = || unreachable!("nobody is waited for");
    assert_eq!(
        e.tx.come_to_fin(&m, &e.tcp, there),
        Ok(BeforeFin::OnTcp(None))
    );
    e.send(100);
    e.their_rx().revoked.store(Cursor::new(0), Relaxed);
    e.says(FIRST, rx::READY | rx::REVOKED);
    e.tcp.room.set(5);
    assert_eq!(e.tx.come_to_fin(&m, &e.tcp, there), Ok(BeforeFin::Room));
    e.takeover(FIRST, takeover::TAKEN);
    let fin = e.tx.come_to_fin(&m, &e.tcp, || false);
    assert_eq!((fin, e.on_tcp()), (Ok(BeforeFin::Claimed), 5));
    assert_eq!(e.tx.before_fin(&m, &e.tcp), Poll::Pending);
}

/// A shutdown leaves the words to a daemon that has recorded what it does; a claim alone is no promise.
#[test]
fn a_shutdown_beside_a_daemon() {
    for (phase, left) in [
        (takeover::NONE, false),
        (takeover::TAKEN, false),
        (takeover::PLAIN, true),
    ] {
        let e = Alone::up(false);
        e.send(10);
        e.daemon()
            .takeover
            .store(TakeoverWord::new(FIRST, phase), Relaxed);
        e.tx.shut(&e.memory(), &e.tcp, None);
        let now = match left {
            true => (tx::UP, mode::RING, 0),
            false => (tx::BROKEN, mode::TCP, 1),
        };
        let is = (TxWord::new(FIRST, now.0), now.1, now.2);
        let downs = e.tx.downs.load(Relaxed);
        assert_eq!((e.state(), e.mode(), downs), is, "{phase:?}");
    }
}

/// A receiver leaves an epoch that it has read, and is ready for the next one, before the sender has noticed: the sender
/// goes down first. And what the last epoch measured is not the next one's.
#[test]
fn a_readiness_while_it_is_up() {
    let e = Alone::up(false);
    let m = e.memory();
    e.says(SECOND, rx::READY);
    assert_eq!(e.tx.try_up(&m, &e.tcp), Ok(false));
    assert_eq!((e.mode(), e.tx.epoch.load(Relaxed)), (mode::RING, FIRST));
    e.tx.full_since_ms.store(7, Relaxed);
    assert_eq!(e.tx.down(&m, &e.tcp), Ok(Progress::Done));
    assert_eq!(e.tx.try_up(&m, &e.tcp), Ok(true));
    assert_eq!(e.tx.full_since_ms.load(Relaxed), 0);
}
