//! What a sender on its ring does about each word of a receiver, or of a daemon, and what that costs.

use super::end::*;
use lane::abi::{rx, takeover, tx, Cursor, Landed, SpaceWord, TakeoverWord, TcpPos, TxWord};
use lane::half::tx::mode;
use lane::half::{Progress, Sent};
use lane::proto::frame::LEN;
use lane::proto::reason::Reason;
use std::sync::atomic::Ordering::Relaxed;

/// Each 16 KiB are announced at once, so that the receiver copies while the sender does; and nothing is announced
/// where nothing was sent.
#[test]
fn a_send_announces_each_piece() {
    let e = Alone::up_on(false, LARGE);
    // With the first one its bytes can be read.
    let head = std::ptr::from_ref(&e.ours().heads[L]) as usize;
    *e.tcp.then.borrow_mut() = Some(Box::new(move || {
        // SAFETY: the client's memory is never unmapped.
        let head = unsafe { &*(head as *const std::sync::atomic::AtomicU64) };
        assert_eq!(head.load(Relaxed), 16 << 10);
    }));
    let n = publishes(&e, || assert_eq!(e.send(40 << 10), Sent::Bytes(40 << 10)));
    assert_eq!(n, 3);
    let n = publishes(&e, || assert_eq!(e.send(32 << 10), Sent::Bytes(32 << 10)));
    assert_eq!(n, 2, "and no third one of nothing");
    let n = publishes(&e, || assert_eq!(e.send(0), Sent::Bytes(0)));
    assert_eq!(n, 0);

    let e = Alone::up(false);
    assert_eq!(e.send(SIZE + 1), Sent::Bytes(SIZE));
    let n = publishes(&e, || assert_eq!(e.send(1), Sent::Full));
    assert_eq!(n, 0);
}

/// Memory that is not there sends nothing, or what was there before it.
#[test]
fn a_send_from_bad_memory() {
    for (there, sent) in [(0, Sent::Fault), (1, Sent::Bytes(32 << 10))] {
        let e = Alone::up_on(false, LARGE);
        e.tcp.mapped.set(there);
        assert_eq!(e.send(40 << 10), sent);
        assert_eq!(e.head(), if there > 0 { 32 << 10 } else { 0 });
        assert_eq!(e.mode(), mode::RING);
    }
}

/// The time since when a ring has been full ends with the send that finds space, even with one of no bytes.
#[test]
fn a_ring_that_was_full() {
    let e = Alone::up(false);
    let since = &e.tx.full_since_ms;
    e.send(SIZE);
    since.store(77, Relaxed);
    assert_eq!(e.send(1), Sent::Full);
    assert_eq!(since.load(Relaxed), 77);
    assert_eq!(e.send(0), Sent::Bytes(0));
    assert_eq!(since.load(Relaxed), 0);
    since.store(77, Relaxed);
    e.reads(1);
    assert_eq!(e.send(2), Sent::Bytes(1));
    assert_eq!(since.load(Relaxed), 0);
    assert_eq!(e.tx.ring_bytes.load(Relaxed), SIZE as u64 + 1);
}

/// What a sender on the ring does about each word: by [`lane::half::TxState::has_work`] whoever waits learns whether
/// there is anything to do, and a wait that is told so for nothing never sleeps.
#[test]
fn work_on_the_ring() {
    for remote in LOCAL_AND_REMOTE {
        for (epoch, flags, work) in [
            (FIRST, is_quiet(remote), false),
            (FIRST, is_quiet(remote) | rx::PAST, false),
            (FIRST, is_quiet(remote) | rx::WANT_DOWN, true),
            (FIRST, is_quiet(remote) | rx::REVOKED, true),
            (FIRST, is_quiet(remote) | rx::CLOSED, true),
            (SECOND, rx::READY, false),
            (SECOND, rx::READY | rx::WANT_DOWN, false),
            (SECOND, rx::READY | rx::REVOKED, false),
            (SECOND, rx::READY | rx::CLOSED, false),
        ] {
            let e = Alone::up(remote);
            e.send(10);
            e.their_rx().revoked.store(Cursor::new(0), Relaxed);
            e.says(epoch, flags);
            let m = e.memory();
            assert_eq!(e.tx.has_work(&m), work, "{remote} {epoch:?} {flags:?}");
            assert_eq!(e.tx.look(&m, &e.tcp), Ok(Progress::Done));
            assert_eq!(e.mode() == mode::TCP, work, "{remote} {epoch:?} {flags:?}");
            assert!(!e.tx.has_work(&m), "done");
        }
    }
}

/// What a daemon has taken over. (The other end's record of its own way down is another word.)
#[test]
fn work_that_is_the_daemons() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::up(remote);
        let m = e.memory();
        e.send(10);
        for (phase, held) in [
            (takeover::NONE, false),
            (takeover::TAKEN, true),
            (takeover::DOWN, true),
            (takeover::FIN, true),
            (takeover::PLAIN, true),
        ] {
            e.says(FIRST, is_quiet(remote));
            e.takeover(FIRST, phase);
            e.theirs().rx[L]
                .takeover
                .store(TakeoverWord::new(FIRST, phase), Relaxed);
            assert_eq!(e.tx.awaits(&m), held);
            assert!(!e.tx.has_work(&m));
            assert_eq!(e.tx.writable(&m), !held);
            e.says(FIRST, is_quiet(remote) | rx::WANT_DOWN);
            assert_eq!(e.tx.has_work(&m), !held, "{remote} {phase:?}");
            // About another epoch: nothing.
            e.takeover(SECOND, phase);
            assert!(e.tx.has_work(&m) && !e.tx.awaits(&m));
        }
        e.says(FIRST, is_quiet(remote));
        e.takeover(FIRST, takeover::DONE);
        assert!(e.tx.has_work(&m), "to take it back");
        assert!(!e.tx.awaits(&m));
        e.takeover(SECOND, takeover::DONE);
        assert!(!e.tx.has_work(&m));
    }
}

/// The same in the middle of a way down: there is always work, except for what a daemon has.
#[test]
fn work_on_the_way_down() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::up(remote);
        let m = e.memory();
        e.send(10);
        e.tcp.room.set(5);
        assert_eq!(e.tx.down(&m, &e.tcp), Ok(Progress::Blocked));
        assert!(e.tx.has_work(&m));
        e.takeover(FIRST, takeover::DOWN);
        assert!(!e.tx.has_work(&m) && e.tx.awaits(&m));
        e.takeover(FIRST, takeover::DONE);
        assert!(e.tx.has_work(&m));
        assert!(!e.tx.is_up() && !e.tx.on_lane());
    }
}

/// The same while the remote node is asked.
#[test]
fn work_while_it_asks() {
    let e = Alone::new(true);
    let m = e.memory();
    assert!(!e.tx.has_work(&m) && !e.tx.on_lane() && !e.tx.awaits(&m));
    e.says(FIRST, rx::READY);
    assert_eq!(e.tx.try_up(&m, &e.tcp), Ok(false));
    assert_eq!(e.mode(), mode::ASK);
    assert!(e.tx.on_lane() && !e.tx.is_up() && e.tx.awaits(&m));
    for (epoch, flags, work) in [
        (FIRST, rx::READY, false),
        (FIRST, rx::READY | rx::WANT_DOWN, false),
        (FIRST, rx::READY | rx::ACCEPTED, true),
        (FIRST, rx::READY | rx::REVOKED, true),
        (SECOND, rx::READY, true),
    ] {
        e.says(epoch, flags);
        e.takeover(FIRST, takeover::NONE);
        assert_eq!(e.tx.has_work(&m), work, "{epoch:?} {flags:?}");
        e.takeover(FIRST, takeover::TAKEN);
        assert!(!e.tx.has_work(&m));
        e.takeover(FIRST, takeover::DONE);
        assert!(e.tx.has_work(&m));
    }
    e.takeover(FIRST, takeover::NONE);
    e.says(FIRST, rx::READY);
    assert_eq!(e.tx.look(&m, &e.tcp), Ok(Progress::Blocked));
    assert_eq!(e.tx.down(&m, &e.tcp), Ok(Progress::Blocked));
    assert_eq!(e.tx.finish(&m, &e.tcp), Ok(Progress::Blocked));
    assert_eq!(e.send(10), Sent::Blocked);
    // Refused, and asked for something at once.
    e.says(FIRST, rx::READY | rx::REVOKED);
    assert_eq!(e.tx.look(&m, &e.tcp), Ok(Progress::Done));
    assert_eq!(e.state(), TxWord::new(FIRST, tx::RESUMED));
    assert_eq!((e.mode(), e.tx.ups.load(Relaxed)), (mode::TCP, 0));
}

/// Granted, and revoked before it was noticed: up, and down again in one look.
#[test]
fn a_grant_that_is_revoked() {
    let e = Alone::new(true);
    let m = e.memory();
    e.says(FIRST, rx::READY);
    assert_eq!(e.tx.try_up(&m, &e.tcp), Ok(false));
    e.their_rx().revoked.store(Cursor::new(0), Relaxed);
    e.says(FIRST, rx::READY | rx::ACCEPTED | rx::REVOKED);
    assert_eq!(e.tx.come_down(&m, &e.tcp), Ok(Progress::Done));
    assert_eq!((e.tx.ups.load(Relaxed), e.tx.downs.load(Relaxed)), (1, 1));
    assert_eq!(e.state(), TxWord::new(FIRST, tx::RESUMED));
}

/// Who waits for space asks once; the daemon beside it has to pass that on.
#[test]
fn a_request_for_space() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::up(remote);
        let m = e.memory();
        e.send(SIZE);
        let n = publishes(&e, || assert!(!e.tx.want_space(&m, &e.tcp)));
        assert_eq!(n, u32::from(remote));
        let n = publishes(&e, || assert!(!e.tx.want_space(&m, &e.tcp)));
        assert_eq!(n, 0);
        assert_eq!(
            e.ours().tx[L].want_space.load(Relaxed),
            SpaceWord::new(true)
        );
        // There is work, space, or no lane: it must not sleep.
        e.says(FIRST, is_quiet(remote) | rx::WANT_DOWN);
        assert!(e.tx.want_space(&m, &e.tcp));
        e.says(FIRST, is_quiet(remote));
        assert!(!e.tx.want_space(&m, &e.tcp));
        e.reads(SIZE as u64 / 4 - 1);
        assert!(!e.tx.want_space(&m, &e.tcp));
        e.reads(SIZE as u64 / 4);
        assert!(e.tx.want_space(&m, &e.tcp));
        e.send(SIZE / 4);
        assert!(!e.tx.want_space(&m, &e.tcp));
        e.tx.abandon(&e.memory());
        assert!(e.tx.want_space(&m, &e.tcp));
    }
}

/// A cursor that cannot be is the send's to report.
#[test]
fn a_cursor_beyond_the_head() {
    let e = Alone::up(false);
    e.send(SIZE);
    e.reads(SIZE as u64 + 1);
    assert!(e.tx.writable(&e.memory()));
    assert_eq!(e.send(1), Sent::Reset(Reason::Hostile));
    assert_eq!(e.tx.unread(&e.memory()), Err(Reason::Hostile));
    // Behind what it was: a former use of the slot.
    let e = Alone::up(false);
    e.send(SIZE);
    e.reads(10);
    assert_eq!(e.send(5), Sent::Bytes(5));
    e.reads(9);
    assert_eq!(e.tx.unread(&e.memory()), Ok(SIZE as u64 - 5));
    assert_eq!(e.tx.consumed().get(), 10);
}

/// SIOCOUTQ: on the ring, on the way down, on TCP.
#[test]
fn bytes_that_have_not_arrived() {
    let e = Alone::up(false);
    let m = e.memory();
    e.their_rx().room.store(30, Relaxed);
    e.send(100);
    assert_eq!(e.tx.outstanding(&m), 70);
    e.reads(60);
    assert_eq!(e.tx.outstanding(&m), 10);
    e.tcp.room.set(LEN + 5);
    e.tx.down(&m, &e.tcp).unwrap();
    assert_eq!(
        e.tx.outstanding(&m),
        0,
        "the reader finds them on the ring as well"
    );
    // Revoked: these are nowhere else.
    let e = Alone::up(false);
    let m = e.memory();
    e.send(100);
    e.their_rx().revoked.store(Cursor::new(60), Relaxed);
    e.says(FIRST, rx::READY | rx::REVOKED);
    e.tcp.room.set(5);
    assert_eq!(e.tx.look(&m, &e.tcp), Ok(Progress::Blocked));
    assert_eq!(e.tx.outstanding(&m), 35);
    e.tcp.room.set(100);
    assert_eq!(e.tx.look(&m, &e.tcp), Ok(Progress::Done));
    assert_eq!(e.tx.outstanding(&m), 0);
    // Across nodes: what has not landed, and then what TCP does not have.
    let e = Alone::up(true);
    let m = e.memory();
    e.send(100);
    e.their_rx()
        .landed
        .store(Landed::at_cursor(Cursor::new(40)), Relaxed);
    assert_eq!(e.tx.outstanding(&m), 60);
    e.tcp.room.set(LEN + 5);
    e.tx.down(&m, &e.tcp).unwrap();
    assert_eq!(e.tx.outstanding(&m), 95);
}

/// While a daemon has the direction its end does nothing; afterwards it takes it back, with what happened meanwhile.
#[test]
fn a_direction_that_is_taken_over() {
    let begin = || {
        let e = Alone::up(true);
        e.send(100);
        e.their_rx()
            .landed
            .store(Landed::at_cursor(Cursor::new(100)), Relaxed);
        e.says(FIRST, is_quiet(true) | rx::PAST);
        e
    };
    for phase in [
        takeover::TAKEN,
        takeover::DOWN,
        takeover::FIN,
        takeover::PLAIN,
    ] {
        let e = begin();
        let m = e.memory();
        e.takeover(FIRST, phase);
        assert_eq!(e.send(10), Sent::Blocked);
        assert_eq!(e.tx.look(&m, &e.tcp), Ok(Progress::Blocked));
        assert_eq!(e.tx.down(&m, &e.tcp), Ok(Progress::Blocked));
        assert_eq!(e.tx.finish(&m, &e.tcp), Ok(Progress::Blocked));
        assert_eq!(e.tx.come_down(&m, &e.tcp), Ok(Progress::Blocked));
        assert!(!e.tx.can_move(&m));
        assert_eq!((e.on_tcp(), e.head(), e.mode()), (0, 100, mode::RING));
        assert_eq!(e.tx.downs.load(Relaxed), 0);
    }
    for call in 0..4 {
        let e = begin();
        let m = e.memory();
        e.takeover(FIRST, takeover::DONE);
        e.daemon().tcp_pos.store(TcpPos::new(132), Relaxed);
        let errno = libc::EPIPE as u32;
        e.daemon().error.store(errno, Relaxed);
        match call {
            0 => assert_eq!(e.send(10), Sent::Tcp),
            1 => assert_eq!(e.tx.look(&m, &e.tcp), Ok(Progress::Done)),
            2 => assert_eq!(e.tx.down(&m, &e.tcp), Ok(Progress::Done)),
            _ => assert_eq!(e.tx.finish(&m, &e.tcp), Ok(Progress::Done)),
        }
        assert_eq!((e.mode(), e.on_tcp()), (mode::TCP, 0));
        assert_eq!(e.tx.tcp_pos.load(Relaxed).get(), 132);
        assert_eq!(e.tx.error.take(), libc::EPIPE);
        assert_eq!(e.tx.downs.load(Relaxed), 1);
        assert_eq!(e.state(), TxWord::new(FIRST, tx::DOWN));
        // Once: the words still stand.
        e.says(SECOND, rx::READY);
        e.tcp.out.borrow_mut().extend([0; 132]);
        assert_eq!(e.tx.try_up(&m, &e.tcp), Ok(false));
        e.says(SECOND, is_quiet(true));
        assert_eq!(e.send(10), Sent::Bytes(10));
        assert_eq!(e.tx.downs.load(Relaxed), 1);
    }
    // Of another epoch: the end's.
    let e = begin();
    e.takeover(SECOND, takeover::TAKEN);
    assert_eq!(e.send(10), Sent::Bytes(10));
}

/// The daemon dies after it has put a part of a frame, and what follows it, on TCP, or none of it. The end goes on
/// there, and all of that is one way down.
#[test]
fn a_daemon_that_dies() {
    let all = LEN + 100;
    for begun in [0, 1, LEN, LEN + 1, all] {
        for own in [false, true] {
            let e = Alone::up(true);
            let m = e.memory();
            e.send(100);
            if own {
                // The end had begun, and the daemon went on.
                e.tcp.room.set(0);
                assert_eq!(e.tx.down(&m, &e.tcp), Ok(Progress::Blocked));
            }
            let t = e.take();
            e.tcp.room.set(begun);
            t.down(&e.taken(), &e.tcp).unwrap();
            assert_eq!((e.on_tcp(), e.mode() == mode::DRAIN), (begun, own));
            e.tcp.room.set(1000);
            assert_eq!(e.tx.reclaim(&m, &e.tcp), Ok(Progress::Done));
            assert_eq!((e.on_tcp(), e.mode()), (all, mode::TCP), "{begun}");
            assert_eq!(e.tx.tcp_pos.load(Relaxed).get() as usize, all);
            assert_eq!(
                e.tx.downs.load(Relaxed),
                if own && begun == all { 2 } else { 1 }
            );
            assert_eq!(e.frame().cursor.get(), 0);
        }
    }
}

/// TCP fails while the daemon has the direction: its end tells the application, once it has it back.
#[test]
fn tcp_fails_during_a_takeover() {
    let e = Alone::up(true);
    let m = e.memory();
    e.send(100);
    let t = e.take();
    e.tcp.room.set(5);
    assert_eq!(t.down(&e.taken(), &e.tcp), Ok(Progress::Blocked));
    assert_eq!(e.tx.look(&m, &e.tcp), Ok(Progress::Blocked));
    e.tcp.error.set(libc::EPIPE);
    assert_eq!(t.down(&e.taken(), &e.tcp), Ok(Progress::Done));
    assert_eq!(e.state(), TxWord::new(FIRST, tx::UP), "the end's own word");
    assert_eq!(e.tx.look(&m, &e.tcp), Ok(Progress::Done));
    assert_eq!((e.mode(), e.tx.error.take()), (mode::TCP, libc::EPIPE));
    assert_eq!(e.tx.tcp_pos.load(Relaxed).get(), 5);
}
