//! Who goes on with what somebody else has begun: a daemon with its end's, an end with its daemon's.

use super::end::*;
use lane::abi::{rx, takeover, tx, Cursor, Landed, Loc, TakeoverWord, TxWord};
use lane::half::tx::{mode, Adopted, TxState};
use lane::half::{Baseline, Progress};
use lane::proto::frame::{Kind, LEN};
use std::sync::atomic::Ordering::Relaxed;

fn revokes(e: &Alone, at: u64) {
    e.their_rx().revoked.store(Cursor::new(at), Relaxed);
    e.says(FIRST, is_quiet(e.remote) | rx::REVOKED);
}

fn phase(e: &Alone) -> TakeoverWord {
    e.daemon().takeover.load(Relaxed)
}

/// A daemon goes on with a frame of its end, whichever it is and wherever it was begun.
#[test]
fn a_frame_that_was_begun() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::up(remote);
        e.send(100);
        e.reads(30);
        e.tcp.room.set(5);
        e.says(FIRST, is_quiet(remote) | rx::WANT_DOWN);
        assert_eq!(e.tx.look(&e.memory(), &e.tcp), Ok(Progress::Blocked));
        let t = e.take();
        // (Across nodes nobody asks; on one node the receiver may count on it.)
        let what = if remote {
            takeover::TAKEN
        } else {
            takeover::DOWN
        };
        assert_eq!(phase(&e), TakeoverWord::new(FIRST, what));
        e.tcp.room.set(1000);
        assert_eq!(t.down(&e.taken(), &e.tcp), Ok(Progress::Done));
        let f = e.frame();
        assert_eq!((f.kind, f.cursor.get(), f.rest), (Kind::Down, 30, 70));
        assert_eq!((f.tag, f.epoch), (TAG, FIRST));
        assert_eq!(e.tcp.out.borrow()[LEN..], bytes(30, 100));
    }
    let e = Alone::up(true);
    e.send(10);
    e.reads(10);
    e.their_rx()
        .landed
        .store(Landed::at_cursor(Cursor::new(10)), Relaxed);
    e.says(FIRST, is_quiet(true) | rx::PAST);
    e.tcp.room.set(5);
    let m = e.memory();
    assert_eq!(e.tx.finish(&m, &e.tcp), Ok(Progress::Blocked));
    assert_eq!(e.mode(), mode::DRAIN);
    let t = e.take();
    e.tcp.room.set(1000);
    assert_eq!(t.down(&e.taken(), &e.tcp), Ok(Progress::Done));
    assert_eq!((e.frame().kind, e.on_tcp()), (Kind::Fin, LEN));
}

/// A daemon takes over whatever can be unread: nothing, a full ring, two of them; with nothing on TCP yet, or something.
#[test]
fn all_that_can_be_unread() {
    for (sends, moves) in [(0, false), (SIZE, false), (SIZE, true)] {
        for begun in [0, 5] {
            for plain in [false, true] {
                let e = Alone::up(false);
                let m = e.memory();
                e.send(sends);
                if moves {
                    e.tx.move_to(&m, Loc { page: 1, ..RING });
                    e.send(SIZE);
                }
                e.tcp.room.set(begun);
                if plain {
                    revokes(&e, 0);
                }
                if begun > 0 && sends > 0 {
                    let _ = e.tx.down(&m, &e.tcp);
                }
                revokes(&e, 0);
                let t = e.take();
                e.tcp.room.set(1 << 20);
                let what = format!("{sends} {moves} {begun} {plain}");
                let went = t.down(&e.taken(), &e.tcp);
                assert_eq!(went, Ok(Progress::Done), "{what}");
                let frame = if begun > 0 && sends > 0 && !plain {
                    LEN
                } else {
                    0
                };
                let all = e.head();
                assert_eq!(e.tcp.out.borrow()[frame..], bytes(0, all), "{what}");
            }
        }
    }
}

/// What a daemon says while it is at it: the end's word stays as it is.
#[test]
fn the_word_of_an_end_whose_direction_is_taken() {
    let e = Alone::up(false);
    e.send(100);
    revokes(&e, 0);
    let t = e.take();
    e.tcp.room.set(5);
    assert_eq!(t.down(&e.taken(), &e.tcp), Ok(Progress::Blocked));
    assert_eq!(e.state(), TxWord::new(FIRST, tx::UP));
    e.tcp.room.set(1000);
    assert_eq!(t.down(&e.taken(), &e.tcp), Ok(Progress::Done));
    assert_eq!(e.state(), TxWord::new(FIRST, tx::RESUMED));
}

/// The daemon is gone, and had claimed only; or had nothing, which on one node changes nothing.
#[test]
fn a_daemon_that_had_done_nothing() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::up(remote);
        e.send(100);
        revokes(&e, 0);
        e.take();
        let back = e.tx.reclaim(&e.memory(), &e.tcp);
        assert_eq!((back, e.mode()), (Ok(Progress::Done), mode::TCP));
        assert_eq!(*e.tcp.out.borrow(), bytes_of(&e, remote));
        let e = Alone::up(remote);
        e.send(100);
        e.tcp.knows.set(false);
        let back = e.tx.reclaim(&e.memory(), &e.tcp);
        assert_eq!(back, Ok(Progress::Done), "no count is needed");
        let now = if remote { mode::TCP } else { mode::RING };
        assert_eq!(e.mode(), now);
    }
}

/// The bytes of a way down, behind a frame where nobody could tell the receiver that there is none.
fn bytes_of(e: &Alone, framed: bool) -> Vec<u8> {
    let frame = if framed {
        e.frame().encode().to_vec()
    } else {
        vec![]
    };
    [frame, bytes(0, 100)].concat()
}

/// On one node: the daemon had recorded plain bytes, and put none of them there. The receiver has left because of that, and
/// is ready for the next epoch: a frame would be taken for data.
#[test]
fn a_receiver_that_has_left_because_of_a_record() {
    let e = Alone::up(false);
    e.send(100);
    revokes(&e, 0);
    let t = e.take();
    e.tcp.room.set(0);
    assert_eq!(t.down(&e.taken(), &e.tcp), Ok(Progress::Blocked));
    assert_eq!(phase(&e), TakeoverWord::new(FIRST, takeover::PLAIN));
    e.says(SECOND, rx::READY);
    e.tcp.room.set(1000);
    let back = e.tx.reclaim(&e.memory(), &e.tcp);
    assert_eq!(back, Ok(Progress::Done));
    assert_eq!(*e.tcp.out.borrow(), bytes(0, 100));
}

/// Across nodes: the end had not seen that its switch was granted, and the daemon is gone that took the direction over, in
/// the middle of that or just behind it.
#[test]
fn a_grant_that_only_the_daemon_has_seen() {
    for room in [10, 1000] {
        let e = Alone::new(true);
        let m = e.memory();
        e.says(FIRST, rx::READY);
        assert_eq!(e.tx.try_up(&m, &e.tcp), Ok(false));
        e.says(FIRST, is_quiet(true));
        let t = TxState::default();
        assert!(lane::half::tx::claim(&e.taken(), e.state(), || false));
        let adopted = t.adopt(&e.taken(), &e.tcp, TAG);
        assert!(matches!(adopted, Ok(Adopted::Ring)));
        e.tcp.room.set(room);
        let _ = t.down(&e.taken(), &e.tcp);
        e.tcp.room.set(1000);
        let back = e.tx.reclaim(&m, &e.tcp);
        assert_eq!((back, e.mode()), (Ok(Progress::Done), mode::TCP));
        assert_eq!(e.tx.epoch.load(Relaxed), FIRST);
        assert_eq!(e.state(), TxWord::new(FIRST, tx::DOWN));
        assert_eq!((e.frame().kind, e.on_tcp()), (Kind::Down, LEN));
        e.says(FIRST, rx::READY);
        assert!(!e.tx.can_up(&m), "the epoch is used up");
    }
}

/// A shim that noted nothing when the epoch began: what is found on TCP is counted on top.
#[test]
fn an_epoch_without_a_note() {
    let mut e = Alone::up(false);
    e.send(100);
    e.tx.baseline = Baseline::default();
    e.tx.again.store(3, Relaxed);
    revokes(&e, 0);
    let t = e.take();
    assert_eq!(t.down(&e.taken(), &e.tcp), Ok(Progress::Done));
    t.give_back(&e.taken(), FIRST);
    assert_eq!(e.tx.look(&e.memory(), &e.tcp), Ok(Progress::Done));
    assert_eq!(e.tx.again.load(Relaxed), 103);
}

/// The end of a stream in a later epoch, asked for before the switch is known to be granted: its frame announces nothing,
/// whatever the frame before did.
#[test]
fn an_end_right_behind_a_switch() {
    let e = Alone::up(true);
    let m = e.memory();
    e.send(100);
    assert_eq!(e.tx.down(&m, &e.tcp), Ok(Progress::Done));
    assert_eq!(e.frame().rest, 100);
    e.says(SECOND, rx::READY);
    assert_eq!(e.tx.try_up(&m, &e.tcp), Ok(false));
    assert_eq!(e.tx.finish(&m, &e.tcp), Ok(Progress::Blocked));
    e.their_rx()
        .landed
        .store(Landed::at_cursor(Cursor::new(100)), Relaxed);
    e.reads(100);
    e.says(SECOND, is_quiet(true) | rx::PAST);
    e.tcp.out.borrow_mut().drain(..LEN + 100);
    assert_eq!(e.tx.finish(&m, &e.tcp), Ok(Progress::Done));
    let f = e.frame();
    assert_eq!((f.kind, f.cursor.get(), f.rest), (Kind::Fin, 100, 0));
}

/// On one node nothing is ever asked (`undecided` has what is, across nodes): the end goes on.
#[test]
fn a_daemon_that_is_gone_within_the_node() {
    let e = Alone::up(false);
    let m = e.memory();
    e.send(100);
    e.tcp.room.set(5);
    assert_eq!(e.tx.down(&m, &e.tcp), Ok(Progress::Blocked));
    e.take();
    e.tcp.room.set(1000);
    assert_eq!(e.tx.reclaim(&m, &e.tcp), Ok(Progress::Done));
    assert_eq!((e.mode(), e.on_tcp()), (mode::TCP, LEN + 100));
}
