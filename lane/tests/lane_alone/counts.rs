//! A direction counts what its application has sent and received, and notes what it had counted when it came on its ring.
//! Who dies before it has counted something leaves that to the next holder of the lock: the cursor and the position on TCP
//! say what it was.

use super::end::*;
use lane::abi::{rx as said, RxFlags};
use lane::half::{Counted, Received};
use std::sync::atomic::Ordering::Relaxed;

/// Bytes on the ring in the first epoch, and on TCP after it.
const FIRST_SENT: u64 = 100;
const BETWEEN: u64 = 9;
/// More than two pieces, each of which is published.
const SENT: usize = 60_000;

/// On its ring for the second time, in a word of the receiver that says this.
fn up_again(remote: bool, flags: RxFlags) -> Alone {
    let e = Alone::up_on(remote, LARGE);
    let m = e.memory();
    e.send(100);
    e.says(FIRST, is_quiet(remote) | said::WANT_DOWN);
    e.tx.come_down(&m, &e.tcp).unwrap();
    assert!(e.tx.enter_native());
    e.tcp.out.borrow_mut().extend([0xff; BETWEEN as usize]);
    e.tx.leave_native(BETWEEN);
    e.reads(FIRST_SENT);
    e.says(SECOND, said::READY);
    e.tx.try_up(&m, &e.tcp).unwrap();
    e.says(SECOND, is_quiet(remote));
    e.tx.look(&m, &e.tcp).unwrap();
    assert!(e.tx.is_up());
    e.says(SECOND, is_quiet(remote) | flags);
    e
}

/// What its application has sent: on TCP, and on rings.
fn sent(e: &Alone) -> (u64, u64) {
    let on_tcp = e.tx.tcp_pos.load(Relaxed).get() - e.tx.again.load(Relaxed);
    (on_tcp, e.tx.ring_bytes.load(Relaxed))
}

#[test]
fn what_was_counted_before_is_noted() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::up_on(remote, LARGE);
        let none = |epoch| Counted {
            epoch,
            ..Counted::default()
        };
        assert_eq!(e.tx.baseline.load(), none(FIRST));
        let e = up_again(remote, said::NONE);
        let noted = e.tx.baseline.load();
        let again = e.on_tcp() as u64 - BETWEEN;
        assert!(again > FIRST_SENT);
        let wanted = Counted {
            epoch: SECOND,
            again,
            ring: FIRST_SENT,
        };
        assert_eq!(noted, wanted);
        // It stays, whatever is sent and repeated.
        e.send(50);
        e.tx.down(&e.memory(), &e.tcp).unwrap();
        assert_eq!(e.tx.baseline.load(), wanted);
        assert_eq!(sent(&e), (BETWEEN, FIRST_SENT + 50));
        // A receiver notes it when it declares itself ready.
        let e = Alone::receiving(remote, 5);
        assert_eq!(e.rx.baseline.load(), none(FIRST));
    }
}

/// At each point of a send, also of one that meets a receiver that wants it off the ring.
#[test]
fn within_a_send() {
    for remote in LOCAL_AND_REMOTE {
        for flags in [said::NONE, said::WANT_DOWN, said::REVOKED] {
            let mut at = 0;
            loop {
                let e = up_again(remote, flags);
                e.their_rx()
                    .revoked
                    .store(lane::abi::Cursor::new(FIRST_SENT), Relaxed);
                let died = e.dies(at, || {
                    e.send(SENT);
                });
                if !died {
                    break;
                }
                let what = format!("{remote} {flags:?} point {at}");
                assert_eq!(sent(&e).1, FIRST_SENT, "it has counted: {what}");
                e.tx.holder_died(&e.memory(), &e.tcp).expect(&what);
                let there = e.head();
                assert!(there > FIRST_SENT, "{what}");
                assert_eq!(sent(&e), (BETWEEN, there), "{what}");
                // The next one sends on.
                e.says(SECOND, is_quiet(remote));
                e.tx.come_down(&e.memory(), &e.tcp).expect(&what);
                assert_eq!(sent(&e), (BETWEEN, there), "{what}");
                at += 1;
            }
            assert!(at >= 3, "{at} points");
        }
    }
}

/// It had put a frame on TCP, and its position counts that, and nothing else does.
#[test]
fn what_was_repeated_is_counted_once() {
    for remote in LOCAL_AND_REMOTE {
        for room in [1, 40, 50] {
            let e = up_again(remote, said::NONE);
            let before = e.tx.again.load(Relaxed);
            e.send(50);
            e.tcp.room.set(room);
            e.tx.down(&e.memory(), &e.tcp).unwrap();
            assert_eq!(e.tx.again.load(Relaxed), before + room as u64);
            e.tx.again.store(before, Relaxed);
            e.tx.holder_died(&e.memory(), &e.tcp).unwrap();
            assert_eq!(sent(&e).0, BETWEEN, "{remote} {room}");
        }
    }
}

/// The next receiver counts what the dead one had taken off the ring.
#[test]
fn what_was_taken_is_counted_once() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::receiving(remote, 0);
        e.puts(0, &bytes(0, 50));
        assert_eq!(e.recv(30, look()).0, Received::Bytes(30));
        assert_eq!(e.rx.ring_bytes.load(Relaxed), 30);
        e.rx.ring_bytes.store(7, Relaxed);
        e.rx.holder_died(&e.memory(), &e.tcp).unwrap();
        assert_eq!(e.rx.ring_bytes.load(Relaxed), 30, "{remote}");
        assert_eq!(e.recv(30, look()).0, Received::Bytes(20));
        assert_eq!(e.rx.ring_bytes.load(Relaxed), 50);
    }
}
