//! What daemon, receiver and sender tell each other of a takeover on one node, word by word.

use super::end::*;
use lane::abi::{rx, takeover, tx, Cursor, TakeoverWord, TxWord};
use lane::half::rx::{mode as receives, How};
use lane::half::tx::{claim, is_asked, mode, TxState};
use lane::half::{Progress, Received};
use lane::proto::frame::LEN;
use lane::proto::reason::Reason;
use std::sync::atomic::Ordering::Relaxed;

/// A direction is taken over if its receiver has revoked in the sender's epoch, or its end asks while it goes down.
#[test]
fn who_may_be_taken_over() {
    let e = Alone::up(false);
    let m = e.taken();
    for (phase, flags, own, asked) in [
        (tx::UP, rx::READY | rx::REVOKED, false, true),
        (tx::UP, rx::READY, false, false),
        (tx::UP, rx::READY, true, false),
        (tx::DOWNING, rx::READY | rx::REVOKED, false, true),
        (tx::DOWNING, rx::READY, false, false),
        (tx::DOWNING, rx::READY, true, true),
        (tx::NONE, rx::READY | rx::REVOKED, true, false),
        (tx::DOWN, rx::READY | rx::REVOKED, true, false),
        (tx::RESUMED, rx::READY | rx::REVOKED, true, false),
    ] {
        e.says(FIRST, flags);
        let state = TxWord::new(FIRST, phase);
        assert_eq!(is_asked(&m, state, own), asked, "{phase:?} {flags:?} {own}");
        // Of another epoch: only what the end itself asks.
        let state = TxWord::new(SECOND, phase);
        let asks = own && phase == tx::DOWNING;
        assert_eq!(is_asked(&m, state, own), asks, "{phase:?} {flags:?} {own}");
    }
}

/// A claim that meets an end at work, or a state that is another one by now, is withdrawn at once: the end has its
/// direction, whether the daemon comes back or not.
#[test]
fn a_claim_that_comes_to_nothing() {
    for remote in [false, true] {
        for (said, busy) in [
            (TxWord::new(FIRST, tx::UP), true),
            (TxWord::new(FIRST, tx::DOWNING), false),
            (TxWord::new(SECOND, tx::UP), false),
        ] {
            let e = Alone::up(remote);
            e.send(10);
            let word = || e.daemon().takeover.load(Relaxed);
            let epoch = said.epoch();
            let claimed = claim(&e.taken(), said, || {
                assert_eq!(word(), TakeoverWord::new(epoch, takeover::TAKEN));
                busy
            });
            assert!(!claimed, "{remote} {said:?} {busy}");
            assert_eq!(word(), TakeoverWord::new(epoch, takeover::NONE));
            assert!(!e.tx.awaits(&e.memory()));
            e.send(10);
        }
    }
}

/// An end had begun its way down, and a daemon that went on with it is gone: the end counts what the daemon has put on
/// TCP, and goes on behind that.
#[test]
fn what_a_daemon_has_gone_on_with() {
    for remote in [false, true] {
        for begun in [1, LEN - 1, LEN, LEN + 10] {
            for more in [0, 1, LEN, LEN + 30] {
                let e = Alone::up(remote);
                e.send(100);
                e.tcp.room.set(begun);
                e.says(FIRST, rx::READY | rx::WANT_DOWN | rx::ACCEPTED);
                assert_eq!(e.tx.down(&e.memory(), &e.tcp), Ok(Progress::Blocked));
                let t = e.take();
                e.tcp.room.set(more);
                assert_eq!(t.down(&e.taken(), &e.tcp), Ok(Progress::Blocked));
                assert_eq!((e.on_tcp(), e.mode()), (begun + more, mode::DRAIN));
                e.tcp.room.set(1000);
                let back = e.tx.reclaim(&e.memory(), &e.tcp);
                assert_eq!(back, Ok(Progress::Done), "{remote} {begun} {more}");
                assert_eq!((e.on_tcp(), e.mode()), (LEN + 100, mode::TCP));
                assert_eq!(e.tx.tcp_pos.load(Relaxed).get() as usize, LEN + 100);
                assert_eq!(e.tx.downs.load(Relaxed), 1, "it was on its way before");
                assert_eq!((e.frame().cursor.get(), e.frame().rest), (0, 100));
                assert_eq!(e.tcp.out.borrow()[LEN..], bytes(0, 100));
            }
        }
    }
}

/// On one node: a daemon that is gone had begun a way down that its end had not; for the end that is one.
#[test]
fn a_way_down_that_only_a_daemon_had_begun() {
    for more in [0, 30] {
        let e = Alone::up(false);
        e.send(100);
        e.says(FIRST, rx::READY | rx::REVOKED);
        let t = e.take();
        e.tcp.room.set(more);
        assert_eq!(t.down(&e.taken(), &e.tcp), Ok(Progress::Blocked));
        assert_eq!((e.on_tcp(), e.tx.downs.load(Relaxed)), (more, 0));
        e.tcp.room.set(1000);
        let back = e.tx.reclaim(&e.memory(), &e.tcp);
        assert_eq!((back, e.mode()), (Ok(Progress::Done), mode::TCP));
        assert_eq!(*e.tcp.out.borrow(), bytes(0, 100));
        assert_eq!(e.tx.tcp_pos.load(Relaxed).get(), 100);
        assert_eq!(e.tx.downs.load(Relaxed), 1, "{more}");
        assert_eq!(e.tx.again.load(Relaxed), 100, "the ring has had it all");
    }
}

/// A daemon that goes on with what its end had begun says so: a receiver that leaves counts on the daemon for the rest.
#[test]
fn what_was_begun_is_recorded() {
    let e = Alone::up(false);
    e.send(100);
    e.reads(30);
    e.tcp.room.set(LEN + 10);
    e.says(FIRST, rx::READY | rx::WANT_DOWN);
    e.tx.look(&e.memory(), &e.tcp).unwrap();
    assert_eq!((e.mode(), e.on_tcp()), (mode::DRAIN, LEN + 10));
    let (m, t) = (e.taken(), TxState::default());
    assert!(claim(&m, e.state(), || false));
    t.adopt(&m, &e.tcp, TAG).unwrap();
    let d = e.daemon();
    let said = TakeoverWord::new(FIRST, takeover::DOWN);
    assert_eq!(d.takeover.load(Relaxed), said);
    assert_eq!(d.at.load(Relaxed), Cursor::new(30));
}

/// The peer's process is gone; what a daemon has taken over comes before the end's own bytes on TCP all the same.
#[test]
fn a_sender_whose_peer_is_gone() {
    for (phase, resets) in [(takeover::TAKEN, false), (takeover::NONE, true)] {
        let e = Alone::up(false);
        e.send(10);
        e.takeover(FIRST, phase);
        e.tx.abandon(&e.memory());
        assert_eq!(e.mode() == mode::TCP, resets, "{phase:?}");
    }
}

/// Does a daemon bring it? By its word for this epoch, from the claim to the end.
#[test]
fn what_is_coming() {
    let e = Alone::receiving(false, 0);
    assert_eq!(recv(&e, 1), Received::Empty);
    assert_eq!(mode_of(&e), receives::RING);
    for (epoch, phase, coming) in [
        (FIRST, takeover::NONE, false),
        (FIRST, takeover::TAKEN, true),
        (FIRST, takeover::DOWN, true),
        (FIRST, takeover::FIN, true),
        (FIRST, takeover::PLAIN, true),
        (FIRST, takeover::DONE, false),
        (SECOND, takeover::TAKEN, false),
        (SECOND, takeover::PLAIN, false),
    ] {
        let word = TakeoverWord::new(epoch, phase);
        e.theirs().daemon[L].takeover.store(word, Relaxed);
        assert_eq!(e.rx.is_coming(&e.memory()), coming, "{epoch:?} {phase:?}");
    }
}

/// A peek that finds enough on the ring does not look behind it. (What lies there is no frame.)
#[test]
fn a_peek_that_finds_enough() {
    let e = Alone::receiving(true, 0);
    assert_eq!(recv(&e, 1), Received::Empty);
    e.puts(0, &bytes(0, 10));
    e.arrives(&[0xee; LEN]);
    let how = How {
        peek: true,
        ..look()
    };
    let peek = |n| e.recv(n, how).0;
    assert_eq!(peek(10), Received::Bytes(10));
    assert_eq!(peek(11), Received::Reset(Reason::Foreign));
}

/// TCP ends before what a frame announced: an error, unless this end has shut receiving down.
#[test]
fn the_rest_does_not_come() {
    for shut in [false, true] {
        let e = Alone::receiving(true, 0);
        assert_eq!(recv(&e, 1), Received::Empty);
        e.puts(0, &bytes(0, 10));
        assert_eq!(recv(&e, 10), Received::Bytes(10));
        e.arrives(&down(10, 5));
        e.sender_says(FIRST, tx::DOWNING);
        e.arrives(&bytes(10, 12));
        assert_eq!(recv(&e, 9), Received::Bytes(2));
        assert_eq!(mode_of(&e), receives::REST);
        e.rx.shut.store(u32::from(shut), Relaxed);
        e.tcp.ended.set(true);
        let told = match shut {
            true => Received::Eof,
            false => Received::Error(libc::ECONNRESET),
        };
        assert_eq!(recv(&e, 9), told);
    }
}
