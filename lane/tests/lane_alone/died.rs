//! A process dies inside a call, with a direction's lock: whoever has the lock next goes on from what was published
//! and what the kernel has counted. Every point of every way to be in is tried: before each call to the kernel, after
//! its effect, and at each publish.

use super::end::*;
use lane::abi::{rx as said, takeover, tx, Cursor, Landed, RxFlags, TxWord};
use lane::half::tx::mode;
use lane::half::{rx, Progress, Received};
use lane::proto::frame::{Frame, Kind, LEN};
use lane::proto::reason::Reason;
use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering::Relaxed;

/// Bytes on TCP before the switch.
const BEFORE: usize = 7;
/// Bytes on the ring, and how many of them the receiver has read.
const SENT: usize = 100;
const READ: u64 = 30;

/// On its ring, with some bytes on TCP before it.
fn up(remote: bool) -> Alone {
    let e = Alone::new(remote);
    native(&e);
    e.go_up();
    e.send(SENT);
    e.reads(READ);
    e
}

fn native(e: &Alone) {
    assert!(e.tx.enter_native());
    e.tcp.out.borrow_mut().extend([0xff; BEFORE]);
    e.tx.leave_native(BEFORE as u64);
}

fn granted(remote: bool, flags: RxFlags) -> RxFlags {
    match remote {
        true => said::READY | said::ACCEPTED | flags,
        false => said::READY | flags,
    }
}

fn next_holder(e: &Alone) -> Result<(), Reason> {
    e.tx.holder_died(&e.memory(), &e.tcp)
}

/// All bytes are on TCP once from the cursor on that the frame names, or the receiver; and all are counted.
fn whole(e: &Alone, framed: bool, what: &str) {
    let head = e.head();
    let out = e.tcp.out.borrow()[BEFORE..].to_vec();
    assert_eq!(
        e.tx.tcp_pos.load(Relaxed).get() as usize,
        BEFORE + out.len(),
        "{what}"
    );
    assert_eq!(e.tx.again.load(Relaxed) as usize, out.len(), "{what}");
    let plain = match framed {
        true => {
            let f = Frame::decode(out[..LEN].try_into().unwrap()).expect(what);
            assert_eq!((f.kind, f.cursor.get()), (Kind::Down, READ), "{what}");
            assert_eq!(u64::from(f.rest), head - READ, "{what}");
            &out[LEN..]
        }
        false => &out[..],
    };
    let want: Vec<u8> = (READ..head).map(content).collect();
    assert_eq!(plain, want, "{what}");
    let phase = if framed { tx::DOWN } else { tx::RESUMED };
    assert_eq!(e.state(), TxWord::new(FIRST, phase), "{what}");
}

/// It was switching up: what counts is whether it has said so.
#[test]
fn within_a_switch_up() {
    for remote in [false, true] {
        for (epoch, flags) in [
            (FIRST, said::READY),
            (FIRST, said::READY | said::REVOKED),
            (SECOND, said::READY),
        ] {
            let (mut unsaid, mut at) = (0, 0);
            loop {
                let e = Alone::new(remote);
                native(&e);
                e.says(FIRST, said::READY);
                let m = e.memory();
                let died = e.dies(at, || {
                    e.tx.try_up(&m, &e.tcp).unwrap();
                });
                if !died {
                    break;
                }
                let state = e.state();
                let announced = state == TxWord::new(FIRST, tx::UP);
                unsaid += u32::from(!announced);
                assert_eq!(e.mode(), mode::SWITCH, "point {at}");
                e.says(epoch, flags);
                next_holder(&e).unwrap();
                if !announced {
                    assert_eq!(e.state(), state, "the last epoch's word stays: point {at}");
                }
                let now = match () {
                    _ if !announced => mode::TCP,
                    _ if remote => mode::ASK,
                    _ if (epoch, flags) == (FIRST, said::READY) => mode::RING,
                    _ => {
                        assert_eq!(e.state(), TxWord::new(FIRST, tx::RESUMED));
                        mode::TCP
                    }
                };
                assert_eq!(e.mode(), now, "{remote} {flags:?} point {at}");
                if !announced {
                    e.says(FIRST, said::READY);
                    assert_eq!(e.tx.try_up(&m, &e.tcp), Ok(!remote));
                }
                at += 1;
            }
            assert!(unsaid >= 1 && at > unsaid, "{unsaid} of {at} points");
        }
    }
}

/// It had not said so, and the words are those of a switch before: one that was refused, or one whose peer's process is
/// gone. They say nothing about this one.
#[test]
fn within_a_switch_up_that_is_not_the_first() {
    for at in 0..2 {
        let e = Alone::new(true);
        let m = e.memory();
        e.says(FIRST, said::READY);
        assert_eq!(e.tx.try_up(&m, &e.tcp), Ok(false));
        e.says(FIRST, said::READY | said::REVOKED);
        e.tx.look(&m, &e.tcp).unwrap();
        let refused = TxWord::new(FIRST, tx::RESUMED);
        assert_eq!((e.mode(), e.state()), (mode::TCP, refused));
        e.says(FIRST, said::READY);
        assert!(e.dies(at, || {
            e.tx.try_up(&m, &e.tcp).unwrap();
        }));
        let announced = e.state() != refused;
        assert_eq!(announced, at == 1);
        next_holder(&e).unwrap();
        let now = if announced { mode::ASK } else { mode::TCP };
        assert_eq!(e.mode(), now, "point {at}");
        assert!(announced || e.state() == refused);
    }
    for remote in [false, true] {
        for own in [FIRST, SECOND] {
            let e = up(remote);
            e.tx.abandon(&e.memory());
            assert_eq!(e.state(), TxWord::new(FIRST, tx::UP));
            // (On one node the epoch is set before the switch is announced, across nodes after that.)
            if own == SECOND && remote {
                continue;
            }
            e.says(SECOND, said::READY);
            e.tx.epoch.store(own, Relaxed);
            e.tx.mode.store(mode::SWITCH, Relaxed);
            next_holder(&e).unwrap();
            assert_eq!(e.mode(), mode::TCP, "{remote} {own:?}");
        }
    }
}

/// It was going down: by itself, because it was asked, or because the receiver has revoked.
#[test]
fn within_a_way_down() {
    for remote in [false, true] {
        for (flags, framed) in [
            (said::NONE, true),
            (said::WANT_DOWN, true),
            (said::REVOKED, remote),
        ] {
            for piece in [usize::MAX, 20, 7] {
                let mut at = 0;
                loop {
                    let e = up(remote);
                    let m = e.memory();
                    e.tcp.piece.set(piece);
                    e.their_rx().revoked.store(Cursor::new(READ), Relaxed);
                    e.says(FIRST, granted(remote, flags));
                    let died = e.dies(at, || {
                        let r = match flags == said::NONE {
                            true => e.tx.down(&m, &e.tcp),
                            false => e.tx.look(&m, &e.tcp),
                        };
                        assert_eq!(r, Ok(Progress::Done));
                    });
                    let what = format!("{remote} {flags:?} {piece} point {at}");
                    next_holder(&e).expect(&what);
                    if flags == said::NONE || !died {
                        assert_eq!(e.mode(), mode::TCP, "it had said so: {what}");
                    }
                    assert_eq!(e.tx.come_down(&m, &e.tcp), Ok(Progress::Done), "{what}");
                    assert_eq!(e.mode(), mode::TCP);
                    whole(&e, framed, &what);
                    if !died {
                        break;
                    }
                    at += 1;
                }
                assert!(at >= 3, "{at} points");
            }
        }
    }
}

/// The same with a TCP that takes no more just then: its frame, or the rest behind it, is begun.
#[test]
fn within_a_way_down_that_waits() {
    for remote in [false, true] {
        for room in 0..LEN + SENT - READ as usize {
            for at in 0..6 {
                let e = up(remote);
                let m = e.memory();
                e.tcp.room.set(room);
                e.dies(at, || {
                    e.tx.down(&m, &e.tcp).unwrap();
                });
                next_holder(&e).unwrap();
                e.tcp.room.set(1000);
                e.tx.come_down(&m, &e.tcp).unwrap();
                whole(&e, true, &format!("{remote} {room} point {at}"));
            }
        }
    }
}

/// It was about to say where the stream ends.
#[test]
fn within_an_end() {
    for piece in [usize::MAX, 5] {
        let mut at = 0;
        loop {
            let e = up(true);
            let m = e.memory();
            e.tcp.piece.set(piece);
            e.their_rx()
                .landed
                .store(Landed::at_cursor(Cursor::new(SENT as u64)), Relaxed);
            e.reads(SENT as u64);
            e.says(FIRST, granted(true, said::PAST));
            let died = e.dies(at, || {
                assert_eq!(e.tx.finish(&m, &e.tcp), Ok(Progress::Done));
            });
            let begun = e.on_tcp() > BEFORE;
            next_holder(&e).unwrap();
            assert_eq!(e.tx.finish(&m, &e.tcp), Ok(Progress::Done));
            assert_eq!((e.mode(), e.on_tcp()), (mode::TCP, BEFORE + LEN));
            let out = e.tcp.out.borrow()[BEFORE..].to_vec();
            let f = Frame::decode(out[..].try_into().unwrap()).unwrap();
            assert_eq!(
                (f.kind, f.cursor.get()),
                (Kind::Fin, SENT as u64),
                "{at} {begun}"
            );
            assert_eq!(e.tx.tcp_pos.load(Relaxed).get() as usize, e.on_tcp());
            if !died {
                break;
            }
            at += 1;
        }
    }
}

/// The kernel's count does not fit what was recorded: the connection is poisoned. Where it tells nothing, TCP has ended.
#[test]
fn counts_that_do_not_fit() {
    let begun = |change: &dyn Fn(&Alone)| {
        let e = up(false);
        e.tcp.room.set(10);
        e.tx.down(&e.memory(), &e.tcp).unwrap();
        change(&e);
        let r = next_holder(&e);
        (r, e.tx.tcp_pos.load(Relaxed).get() as usize)
    };
    let put = |e: &Alone, n| e.tcp.out.borrow_mut().extend(vec![0; n]);
    let all = LEN + SENT - READ as usize;
    assert_eq!(begun(&|_| ()), (Ok(()), BEFORE + 10));
    assert_eq!(begun(&|e| put(e, all - 10)), (Ok(()), BEFORE + all));
    assert_eq!(begun(&|e| put(e, all - 9)).0, Err(Reason::Foreign));
    let fewer = |e: &Alone| e.tcp.out.borrow_mut().truncate(BEFORE - 1);
    assert_eq!(begun(&fewer).0, Err(Reason::Sync));
    assert_eq!(begun(&|e| e.tcp.knows.set(false)), (Ok(()), BEFORE + 10));
    // The record of another epoch, or none: there is nothing to repair.
    let other = |e: &Alone| {
        let w = lane::abi::TakeoverWord::new(SECOND, takeover::DOWN);
        e.ours().rx[L].takeover.store(w, Relaxed);
        e.tcp.knows.set(true);
        put(e, 1);
    };
    assert_eq!(begun(&other), (Ok(()), BEFORE + 10));
    // What a daemon has is the daemon's.
    let e = up(true);
    e.tcp.room.set(10);
    e.tx.down(&e.memory(), &e.tcp).unwrap();
    put(&e, 5);
    e.takeover(FIRST, takeover::DOWN);
    assert_eq!(next_holder(&e), Ok(()));
    assert_eq!(e.tx.tcp_pos.load(Relaxed).get() as usize, BEFORE + 10);
    // On TCP, and on the ring: nothing happens.
    let e = up(false);
    assert_eq!(next_holder(&e), Ok(()));
    assert_eq!(e.mode(), mode::RING);
    let e = Alone::new(false);
    assert_eq!((next_holder(&e), e.mode()), (Ok(()), mode::TCP));
    assert_eq!(e.state(), TxWord::default());
}

/// It had stored that it is on TCP, as its last act, and not set the mode.
#[test]
fn after_the_word_that_it_is_on_tcp() {
    for phase in [tx::DOWN, tx::RESUMED, tx::BROKEN] {
        for before in [mode::RING, mode::DRAIN, mode::ASK] {
            let e = up(false);
            e.ours().tx[L]
                .state
                .store(TxWord::new(FIRST, phase), Relaxed);
            e.tx.mode.store(before, Relaxed);
            assert_eq!(next_holder(&e), Ok(()));
            assert_eq!(e.mode(), mode::TCP, "{phase:?} {before}");
            assert_eq!(e.on_tcp(), BEFORE);
        }
    }
    // It was about to say that it has switched, and has not.
    let e = up(false);
    e.ours().tx[L]
        .state
        .store(TxWord::new(FIRST, tx::DOWN), Relaxed);
    e.tx.mode.store(mode::SWITCH, Relaxed);
    e.tx.epoch.store(SECOND, Relaxed);
    assert_eq!((next_holder(&e), e.mode()), (Ok(()), mode::TCP));
    // The word of an epoch before: this one goes on.
    let e = up(false);
    e.tx.epoch.store(SECOND, Relaxed);
    e.ours().tx[L]
        .state
        .store(TxWord::new(FIRST, tx::DOWN), Relaxed);
    assert_eq!(next_holder(&e), Ok(()));
    assert_eq!(e.mode(), mode::RING);
    e.ours().tx[L]
        .state
        .store(TxWord::new(FIRST, tx::DOWNING), Relaxed);
    assert_eq!(next_holder(&e), Ok(()));
    assert_eq!(e.mode(), mode::RING);
}

/// A receiver is killed at any point of any receive: what that call took from TCP is gone with it, and nothing else.
#[test]
fn within_a_receive() {
    const PREFIX: u64 = 5;
    const ON_RING: u64 = 50;
    const AFTER: u64 = 6;
    let total = PREFIX + ON_RING + AFTER;
    for remote in [false, true] {
        for (cursor, size) in [(0, 8), (0, 100), (20, 3), (20, 30)] {
            let mut at = 0;
            loop {
                let e = Alone::receiving(remote, PREFIX);
                let bytes = |from: u64, to: u64| (from..to).map(content).collect::<Vec<u8>>();
                e.arrives(&bytes(0, PREFIX));
                e.puts(0, &bytes(PREFIX, PREFIX + ON_RING));
                let got = RefCell::new(Vec::<u8>::new());
                let turn = || {
                    let (r, b) = e.recv(size, look());
                    match r {
                        Received::Bytes(n) => got.borrow_mut().extend(&b[..n]),
                        Received::Empty => {}
                        Received::Tcp => {
                            let all = e.tcp.queue.borrow_mut().split_off(0);
                            e.tcp.taken.set(e.tcp.taken.get() + all.len() as u64);
                            e.rx.tcp_pos.add(all.len() as u64, Relaxed);
                            got.borrow_mut().extend(&all);
                        }
                        r => panic!("{r:?}"),
                    }
                };
                // The frame comes when the reader is where it says, or beyond.
                let sent = Cell::new(false);
                let turns = || {
                    for _ in 0..60 {
                        turn();
                        let there = e.ours().cursors[L].load(Relaxed).get() >= cursor;
                        if there && e.rx.is_up() && !sent.replace(true) {
                            e.arrives(&down(cursor, (ON_RING - cursor) as u32));
                            e.arrives(&bytes(PREFIX + cursor, total));
                            e.sender_says(FIRST, tx::DOWN);
                        }
                    }
                };
                let died = e.dies(at, turns);
                assert_eq!(e.rx.holder_died(&e.memory(), &e.tcp), Ok(()));
                assert_eq!(e.rx.tcp_pos.load(Relaxed).get(), e.tcp.taken.get());
                let before = got.borrow().len();
                turns();
                assert!(!e.rx.engaged(), "{remote} {cursor} {size} point {at}");
                assert_eq!(e.rx.tcp_pos.load(Relaxed).get(), e.tcp.taken.get());
                let got = got.into_inner();
                let lost = total as usize - got.len();
                assert!(lost == 0 || died && lost <= size, "{lost} lost");
                let mut want = bytes(0, total);
                want.drain(before..before + lost);
                assert_eq!(got, want, "{remote} {cursor} {size} point {at}");
                if !died {
                    break;
                }
                at += 1;
            }
            assert!(at >= 6, "{at} points");
        }
    }
}

/// The kernel has handed out more than a frame while only a frame could be taken, or nothing that was not counted.
#[test]
fn receives_that_do_not_fit() {
    let on_ring = || {
        let e = Alone::receiving(false, 0);
        assert_eq!(e.recv(10, look()).0, Received::Empty);
        assert_eq!(e.rx.mode.load(Relaxed), rx::mode::RING);
        e
    };
    for (n, r) in [
        (0, Ok(())),
        (LEN as u64 - 1, Ok(())),
        // A whole frame, of which nothing is recorded.
        (LEN as u64, Err(Reason::Foreign)),
        (LEN as u64 + 1, Err(Reason::Foreign)),
    ] {
        let e = on_ring();
        e.tcp.taken.set(n);
        assert_eq!(e.rx.holder_died(&e.memory(), &e.tcp), r, "{n}");
        assert_eq!(e.rx.tcp_pos.load(Relaxed).get(), n);
    }
    for taken in [u64::MAX, (1 << 32) + 1] {
        let e = on_ring();
        e.tcp.taken.set(taken);
        assert_eq!(e.rx.holder_died(&e.memory(), &e.tcp), Ok(()));
        assert_eq!(e.rx.tcp_pos.load(Relaxed).get(), 0, "no such count");
    }
    let e = Alone::receiving(false, 1 << 33);
    assert_eq!(e.rx.holder_died(&e.memory(), &e.tcp), Ok(()));
    e.tcp.taken.set(1 << 32);
    assert_eq!(e.rx.holder_died(&e.memory(), &e.tcp), Ok(()));
    assert_eq!(e.rx.tcp_pos.load(Relaxed).get(), 1 << 32);
    let e = on_ring();
    e.tcp.taken.set(3);
    e.tcp.knows.set(false);
    assert_eq!(e.rx.holder_died(&e.memory(), &e.tcp), Ok(()));
    assert_eq!(e.rx.tcp_pos.load(Relaxed).get(), 0);
    // On TCP calls count for themselves.
    let e = Alone::new(false);
    e.tcp.taken.set(3);
    assert_eq!(e.rx.holder_died(&e.memory(), &e.tcp), Ok(()));
    assert_eq!(e.rx.tcp_pos.load(Relaxed).get(), 0);
    // A `Fin` frame ends a stream across nodes only.
    for remote in [false, true] {
        let e = Alone::receiving(remote, 0);
        assert_eq!(e.recv(10, look()).0, Received::Empty);
        e.arrives(&frame(Kind::Fin, 0, 0));
        let r = e.recv(10, look()).0;
        let want = match remote {
            true => Received::Eof,
            false => Received::Reset(Reason::Hostile),
        };
        assert_eq!(r, want);
    }
}
