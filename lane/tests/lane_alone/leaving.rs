//! How a receiver gives its direction back, in every state that it can be in and for every answer; and how peeks and
//! receives go over the border between TCP and the ring.

use super::end::*;
use lane::abi::{rx, tx, Cursor, RxWord, TcpPos, TxPhase};
use lane::half::rx::{mode, How, Revoked};
use lane::half::{Iov, Received};
use lane::proto::frame::{Kind, LEN};
use lane::proto::reason::Reason;
use std::sync::atomic::Ordering::Relaxed;

/// `Cursor::UNSEEN`, among numbers.
const UNSEEN: u64 = Cursor::UNSEEN.get();

fn revoked_at(e: &Alone) -> u64 {
    e.ours().rx[L].revoked.load(Relaxed).get()
}

pub fn revoke(e: &Alone) -> Revoked {
    e.rx.revoke(&e.memory(), &e.tcp).unwrap()
}

/// On the ring, with 10 bytes of it, of which so many have been read.
fn on_ring(remote: bool, read: usize) -> Alone {
    let e = Alone::receiving(remote, 0);
    assert_eq!(recv(&e, 1), Received::Empty);
    assert_eq!(mode_of(&e), mode::RING);
    e.puts(0, &bytes(0, 10));
    if read > 0 {
        assert_eq!(recv(&e, read), Received::Bytes(read));
    }
    e
}

/// Three bytes of a prefix are on TCP, of which so many have been read; ten bytes on the ring.
fn in_prefix(remote: bool, read: usize) -> Alone {
    let e = Alone::receiving(remote, 3);
    e.arrives(&bytes(0, 3));
    assert_eq!(recv(&e, read), Received::Bytes(read));
    assert_eq!(mode_of(&e), mode::PREFIX);
    e.puts(0, &bytes(3, 13));
    e
}

fn asked_back() -> RxWord {
    RxWord::new(FIRST, rx::READY | rx::REVOKED)
}

/// A readiness that nobody has used, or that was used just now.
#[test]
fn of_a_readiness() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::new(remote);
        assert_eq!((revoke(&e), e.publishes()), (Revoked::Clear, 0), "on TCP");
        assert_eq!(word(&e), RxWord::default());
        assert!(e.rx.declare_ready(&e.memory(), &e.tcp));
        let before = e.publishes();
        assert_eq!(revoke(&e), Revoked::Clear);
        assert_eq!(e.publishes(), before + 1);
        assert_eq!((word(&e), revoked_at(&e)), (asked_back(), UNSEEN));
        assert_eq!(mode_of(&e), mode::TCP);
        // The switch came before the revocation, and was not seen yet.
        for prefix in [0, 3] {
            let e = Alone::receiving(remote, prefix);
            let r = revoke(&e);
            // (Across nodes its bytes may be on their way.)
            assert_eq!(r == Revoked::Clear, !remote);
            assert_eq!((word(&e).has(rx::REVOKED), revoked_at(&e)), (true, 0));
            // And just after it.
            let e = Alone::new(remote);
            assert!(e.rx.declare_ready(&e.memory(), &e.tcp));
            e.their_tx().up_tcp_pos.store(TcpPos::new(prefix), Relaxed);
            e.their_tx().loc[0].store(RING.word(), Relaxed);
            e.switches_then();
            let r = revoke(&e);
            assert_eq!(r == Revoked::Clear, !remote);
            assert_eq!(revoked_at(&e), UNSEEN);
            if remote {
                // Past the prefix it tells so, and can take what arrives.
                assert_eq!(word(&e).has(rx::PAST), prefix == 0);
                e.sender_says(FIRST, tx::RESUMED);
                assert_eq!(revoke(&e), Revoked::Clear);
            }
        }
    }
}

/// On the ring of one node: at once if it is empty; otherwise the sender has to answer.
#[test]
fn of_a_ring() {
    let e = on_ring(false, 10);
    assert_eq!(revoke(&e), Revoked::Clear);
    assert_eq!(
        (word(&e), revoked_at(&e)),
        (asked_back().with(rx::PAST), 10)
    );
    for (phase, r) in [
        (tx::UP, Revoked::Pending),
        (tx::DOWNING, Revoked::Pending),
        (tx::RESUMED, Revoked::Clear),
        (TxPhase::from_raw(0), Revoked::Clear),
    ] {
        let e = on_ring(false, 4);
        assert_eq!(revoke(&e), Revoked::Pending);
        assert_eq!((word(&e), revoked_at(&e)), (asked_back().with(rx::PAST), 4));
        let before = e.publishes();
        e.sender_says(FIRST, phase);
        assert_eq!(revoke(&e), r, "{phase:?}");
        assert_eq!(e.publishes(), before, "said once");
        let now = if r == Revoked::Clear {
            mode::TCP
        } else {
            mode::REVOKING
        };
        assert_eq!(mode_of(&e), now);
        assert_eq!(e.ours().cursors[L].load(Relaxed).get(), 4, "frozen");
    }
    // TCP has ended, and the ring has not: it has to be read there.
    for phase in [tx::DOWNING, tx::BROKEN, tx::ENDED] {
        let e = on_ring(false, 4);
        assert_eq!(revoke(&e), Revoked::Pending);
        e.sender_says(FIRST, phase);
        e.tcp.ended.set(true);
        assert_eq!(revoke(&e), Revoked::Impossible, "{phase:?}");
        assert_eq!(mode_of(&e), mode::RING);
        assert_eq!(word(&e), RxWord::new(FIRST, rx::READY | rx::PAST));
        assert_eq!(recv(&e, 20), Received::Bytes(6));
    }
    // A part of the ring as plain bytes, and no more to come: the reason why a sender that meets a revocation puts all of
    // it on TCP before its FIN (`TxState::before_fin`).
    let e = on_ring(false, 4);
    assert_eq!(revoke(&e), Revoked::Pending);
    e.arrives(&bytes(4, 6));
    e.sender_says(FIRST, tx::BROKEN);
    assert_eq!(e.rx.revoke(&e.memory(), &e.tcp), Err(Reason::Foreign));
    // An error, where the ring has no more.
    let e = on_ring(false, 10);
    e.theirs().heads[L].store(Cursor::new(11), Relaxed);
    assert_eq!(revoke(&e), Revoked::Pending);
    e.theirs().heads[L].store(Cursor::new(10), Relaxed);
    e.sender_says(FIRST, tx::DOWNING);
    e.tcp.error.set(libc::ETIMEDOUT);
    assert_eq!(revoke(&e), Revoked::Clear);
    assert_eq!(e.rx.error.get(), libc::ETIMEDOUT);
}

/// The sender goes down at the same time: only a complete frame of ours proves that it has not seen the revocation.
#[test]
fn of_a_ring_that_is_being_left() {
    let begin = || {
        let e = on_ring(false, 4);
        assert_eq!(revoke(&e), Revoked::Pending);
        e.sender_says(FIRST, tx::DOWNING);
        e
    };
    // A part of one, or what only looks like one, stays where it is.
    let mut other = down(2, 8);
    other[24] ^= 1;
    for part in [&down(2, 8)[..LEN - 1], &other[..], &bytes(4, 10)[..]] {
        let e = begin();
        e.arrives(part);
        assert_eq!(revoke(&e), Revoked::Pending);
        assert_eq!(e.tcp.taken.get(), 0);
        assert_eq!(mode_of(&e), mode::REVOKING);
    }
    for last in [tx::DOWN, tx::ENDED, tx::BROKEN] {
        let e = begin();
        e.arrives(&down(2, 8));
        e.arrives(&bytes(2, 3));
        assert_eq!(revoke(&e), Revoked::Pending, "not all of it is on TCP");
        assert_eq!(mode_of(&e), mode::LAST);
        e.sender_says(FIRST, last);
        if last == tx::BROKEN {
            assert_eq!(revoke(&e), Revoked::Impossible);
            assert_eq!(recv(&e, 20), Received::Bytes(6));
            continue;
        }
        assert_eq!(revoke(&e), Revoked::Pending, "one byte to skip");
        assert_eq!(mode_of(&e), mode::SKIP);
        e.arrives(&bytes(3, 10));
        assert_eq!(revoke(&e), Revoked::Clear);
        assert_eq!((mode_of(&e), e.tcp.queue.borrow().len()), (mode::TCP, 6));
    }
    // TCP ends before the bytes that repeat the ring.
    for error in [0, libc::ETIMEDOUT] {
        let e = begin();
        e.arrives(&down(2, 8));
        e.sender_says(FIRST, tx::DOWN);
        assert_eq!(revoke(&e), Revoked::Pending);
        e.tcp.error.set(error);
        e.tcp.ended.set(true);
        assert_eq!(revoke(&e), Revoked::Clear);
        assert_eq!((mode_of(&e), e.rx.error.get()), (mode::TCP, error));
    }
}

/// An error that was kept is for the next owner of the connection, too, which is on TCP.
#[test]
fn with_an_error() {
    let e = on_ring(false, 10);
    e.arrives(&down(0, 10));
    assert_eq!((recv(&e, 1), mode_of(&e)), (Received::Empty, mode::SKIP));
    e.rx.error.put(libc::EPIPE);
    assert_eq!((revoke(&e), mode_of(&e)), (Revoked::Clear, mode::TCP));
    assert_eq!(e.rx.error.get(), libc::EPIPE);
}

/// TCP fails while a revocation waits for its answer, and says so once: the bytes come first, then the error.
#[test]
fn with_an_error_met() {
    let e = on_ring(false, 4);
    assert_eq!(revoke(&e), Revoked::Pending);
    e.sender_says(FIRST, tx::DOWNING);
    e.tcp.error.set(libc::ETIMEDOUT);
    e.tcp.once.set(true);
    let r = revoke(&e);
    assert_eq!((r, mode_of(&e)), (Revoked::Impossible, mode::RING));
    assert_eq!(recv(&e, 20), Received::Bytes(6));
    assert_eq!(recv(&e, 20), Received::Error(libc::ETIMEDOUT));
}

/// With the prefix unread, a frame cannot be taken out from behind it.
#[test]
fn of_a_prefix() {
    for remote in LOCAL_AND_REMOTE {
        for (phase, r) in [
            (tx::UP, Revoked::Pending),
            (tx::DOWNING, Revoked::Pending),
            (tx::RESUMED, Revoked::Clear),
            (tx::DOWN, Revoked::Impossible),
            (tx::BROKEN, Revoked::Impossible),
            (tx::ENDED, Revoked::Impossible),
        ] {
            let e = in_prefix(remote, 1);
            assert_eq!(revoke(&e), Revoked::Pending);
            assert_eq!((word(&e), revoked_at(&e)), (asked_back(), 0));
            e.sender_says(FIRST, phase);
            e.arrives(&down(0, 10));
            assert_eq!(revoke(&e), r, "{remote} {phase:?}");
            let now = match r {
                Revoked::Pending => mode::REVOKING,
                Revoked::Clear => mode::TCP,
                Revoked::Impossible => mode::PREFIX,
            };
            assert_eq!((mode_of(&e), e.tcp.taken.get()), (now, 1));
            assert_eq!(word(&e).has(rx::REVOKED), r != Revoked::Impossible);
        }
    }
    // With nothing on its ring yet, of one node: nothing will come there.
    let e = Alone::receiving(false, 3);
    assert_eq!(revoke(&e), Revoked::Clear);
}

/// Across nodes, with bytes of this epoch read: only a frame tells where TCP goes on, and the ring is read until then.
#[test]
fn across_nodes() {
    let e = on_ring(true, 4);
    let before = e.publishes();
    assert_eq!(revoke(&e), Revoked::Pending);
    assert_eq!((e.publishes(), revoked_at(&e)), (before + 1, 4));
    assert!(word(&e).has(rx::REVOKED) && word(&e).has(rx::PAST));
    assert_eq!(mode_of(&e), mode::RING);
    assert_eq!(recv(&e, 3), Received::Bytes(3), "it goes on");
    assert_eq!(revoke(&e), Revoked::Pending);
    assert_eq!(
        (e.publishes(), revoked_at(&e)),
        (before + 1, 4),
        "said once"
    );
    // A part of the frame, which is taken; then all.
    e.arrives(&down(4, 6)[..7]);
    assert_eq!(revoke(&e), Revoked::Pending);
    e.arrives(&down(4, 6)[7..]);
    assert_eq!(revoke(&e), Revoked::Pending, "the sender has not said DOWN");
    assert_eq!(mode_of(&e), mode::LAST);
    e.sender_says(FIRST, tx::DOWN);
    assert_eq!(revoke(&e), Revoked::Pending, "three bytes to skip");
    e.arrives(&bytes(4, 9));
    assert_eq!(revoke(&e), Revoked::Clear, "the sender has said DOWN");
    assert_eq!((mode_of(&e), e.tcp.queue.borrow().len()), (mode::TCP, 2));
    // Three lay unread, and the program may know of them.
    let on_its_way = || e.rx.is_on_its_way(&e.memory(), &e.tcp);
    assert!(on_its_way());
    e.arrives(&bytes(9, 10));
    assert!(!on_its_way());

    // The word for that did not arrive: all bytes that were announced have to be there.
    let e = on_ring(true, 10);
    e.arrives(&down(8, 5));
    assert_eq!(revoke(&e), Revoked::Pending);
    assert_eq!(mode_of(&e), mode::SKIP);
    e.arrives(&bytes(8, 12));
    assert_eq!((revoke(&e), mode_of(&e)), (Revoked::Pending, mode::REST));
    e.arrives(&bytes(12, 13));
    assert_eq!((revoke(&e), mode_of(&e)), (Revoked::Clear, mode::TCP));

    // TCP ends before them: a later receive says so, and it does not look like an end.
    let e = on_ring(true, 10);
    e.arrives(&down(8, 5));
    assert_eq!(revoke(&e), Revoked::Pending);
    e.tcp.ended.set(true);
    assert_eq!((revoke(&e), mode_of(&e)), (Revoked::Impossible, mode::SKIP));
    assert_eq!(recv(&e, 9), Received::Error(libc::ECONNRESET));

    // The same, or an error, before the frame.
    for error in [0, libc::ETIMEDOUT] {
        let e = on_ring(true, 10);
        assert_eq!(revoke(&e), Revoked::Pending);
        e.tcp.error.set(error);
        e.tcp.ended.set(true);
        assert_eq!(revoke(&e), Revoked::Impossible);
        let e_told = if error == 0 { libc::ECONNRESET } else { error };
        assert_eq!(e.rx.error.get(), e_told);
    }
}

/// The same with nothing of this epoch read: the word of the sender tells, or, if that never comes, a frame.
#[test]
fn across_nodes_with_nothing_read() {
    for framed in [false, true] {
        let e = on_ring(true, 0);
        assert_eq!(
            (revoke(&e), mode_of(&e)),
            (Revoked::Pending, mode::REVOKING)
        );
        assert_eq!(recv(&e, 5), Received::Empty);
        if framed {
            e.arrives(&down(0, 10));
            e.arrives(&bytes(0, 9));
            assert_eq!(revoke(&e), Revoked::Pending);
            assert_eq!(mode_of(&e), mode::LAST);
            // The sender's word may never come; all that the frame announced is enough.
            e.arrives(&bytes(9, 10));
        } else {
            e.tcp.ended.set(true);
            assert_eq!(
                revoke(&e),
                Revoked::Pending,
                "the word may come after the end"
            );
            e.sender_says(FIRST, tx::RESUMED);
        }
        assert_eq!((revoke(&e), mode_of(&e)), (Revoked::Clear, mode::TCP));
    }
    // TCP fails, or ends unannounced, with the ring empty.
    for error in [0, libc::ETIMEDOUT] {
        let e = Alone::receiving(true, 0);
        assert_eq!(recv(&e, 1), Received::Empty);
        assert_eq!(revoke(&e), Revoked::Pending);
        e.sender_says(FIRST, tx::DOWN);
        e.tcp.ended.set(true);
        e.tcp.error.set(error);
        assert_eq!(revoke(&e), Revoked::Impossible);
        let told = if error == 0 { libc::ECONNRESET } else { error };
        assert_eq!((mode_of(&e), e.rx.error.get()), (mode::RING, told));
    }
    let e = on_ring(true, 0);
    assert_eq!(revoke(&e), Revoked::Pending);
    e.sender_says(FIRST, tx::DOWN);
    e.tcp.error.set(libc::ETIMEDOUT);
    assert_eq!(revoke(&e), Revoked::Impossible);
    assert_eq!(
        (mode_of(&e), e.rx.error.get()),
        (mode::RING, libc::ETIMEDOUT)
    );

    // An end that was announced: what is on the ring is nowhere else.
    let e = on_ring(true, 10);
    e.arrives(&frame(Kind::Fin, 12, 0));
    assert_eq!(revoke(&e), Revoked::Impossible);
    e.puts(10, &bytes(10, 12));
    assert_eq!(recv(&e, 5), Received::Bytes(2));
    assert_eq!((revoke(&e), mode_of(&e)), (Revoked::Clear, mode::TCP));
}

/// The sender has died and will not answer; the daemon is gone.
#[test]
fn withdrawn() {
    let e = on_ring(false, 4);
    assert!(e.rx.go_on(&e.memory()));
    assert_eq!(
        (mode_of(&e), word(&e)),
        (mode::RING, RxWord::new(FIRST, rx::READY | rx::PAST))
    );
    assert_eq!(revoke(&e), Revoked::Pending);
    assert!(e.rx.go_on(&e.memory()));
    assert_eq!(
        (mode_of(&e), word(&e)),
        (mode::RING, RxWord::new(FIRST, rx::READY | rx::PAST))
    );
    assert_eq!(recv(&e, 20), Received::Bytes(6));
}

/// A peek, and a peek that only counts, over prefix, ring and what follows a frame: each byte once.
#[test]
fn peeks_over_the_border() {
    let peek = |discard| How {
        peek: true,
        discard,
        ..look()
    };
    for discard in [false, true] {
        let how = peek(discard);
        // The ring's bytes behind those of the prefix; the frame behind it repeats them, and more follows.
        for (after, found) in [(0, 13), (9, 13), (10, 13), (12, 15)] {
            for remote in LOCAL_AND_REMOTE {
                let e = in_prefix(remote, 1);
                e.arrives(&down(0, 10));
                e.arrives(&bytes(3, 3 + after));
                let (r, b) = e.recv(100, how);
                let n = found - 1;
                assert_eq!(r, Received::Bytes(n), "{discard} {after}");
                if !discard {
                    assert_eq!(b[..n], bytes(1, found as u64));
                }
                let (r, _) = e.recv(7, how);
                assert_eq!(r, Received::Bytes(7));
                assert_eq!((mode_of(&e), e.tcp.taken.get()), (mode::PREFIX, 1));
            }
        }
        // A part of the prefix only; nothing of it; its end.
        let e = Alone::receiving(false, 5);
        e.arrives(&bytes(0, 3));
        e.puts(0, &bytes(5, 9));
        assert_eq!(e.recv(100, how).0, Received::Bytes(3));
        e.tcp.queue.borrow_mut().clear();
        assert_eq!(e.recv(100, how).0, Received::Empty);
        e.tcp.ended.set(true);
        assert_eq!(e.recv(100, how).0, Received::Eof);
        e.tcp.error.set(libc::ETIMEDOUT);
        assert_eq!(e.recv(100, how).0, Received::Error(libc::ETIMEDOUT));
    }
    // Of no bytes: no end.
    let e = Alone::receiving(false, 5);
    e.arrives(&bytes(0, 3));
    assert_eq!(e.recv(0, peek(false)).0, Received::Bytes(0));
    // What is no frame of ours must not be shown.
    let e = in_prefix(false, 1);
    e.arrives(&[0x55; LEN + 20]);
    assert_eq!(e.recv(100, peek(false)).0, Received::Bytes(12));
}

/// A peek from the ring over a frame: TCP repeats what was read from the ring before, and that is taken off first.
#[test]
fn peeks_behind_a_frame() {
    let how = How {
        peek: true,
        ..look()
    };
    for remote in LOCAL_AND_REMOTE {
        // How many of the two bytes that were read already, and of the ten that follow them, are on TCP.
        for (there, found) in [(0, 8), (1, 8), (2, 8), (9, 8), (10, 8), (14, 12)] {
            let e = on_ring(remote, 2);
            e.sender_says(FIRST, tx::DOWN);
            e.arrives(&down(0, 10));
            e.arrives(&bytes(0, there));
            let (r, b) = e.recv(100, how);
            assert_eq!(r, Received::Bytes(found), "{remote} {there}");
            assert_eq!(b[..found], bytes(2, 2 + found as u64));
            assert_eq!(e.rx.unread(&e.memory(), &e.tcp), Some(found as u64));
            // And all of it is received, and nothing more is waited for.
            // (Behind the ring's bytes there is more, or nothing.)
            let end = if there > 10 { 14 } else { 10 };
            e.arrives(&bytes(there, end));
            let mut got = Vec::<u8>::new();
            loop {
                let (r, b) = e.recv(3, look());
                match r {
                    Received::Bytes(n) => got.extend(&b[..n]),
                    Received::Tcp => break,
                    r => panic!("{r:?}"),
                }
            }
            got.extend(e.tcp.queue.borrow().iter());
            assert_eq!(got, bytes(2, end), "{remote} {there}");
            assert_eq!(e.rx.tcp_pos.load(Relaxed).get(), e.tcp.taken.get());
        }
    }
    // An error behind the ring's bytes is kept.
    let e = on_ring(false, 2);
    e.sender_says(FIRST, tx::DOWN);
    e.tcp.error.set(libc::ETIMEDOUT);
    assert_eq!(e.recv(100, how).0, Received::Bytes(8));
    assert_eq!(e.rx.error.get(), libc::ETIMEDOUT);
}

/// The last receive from a ring that is being left takes what TCP has with it, and keeps the error that it meets.
#[test]
fn the_last_receive_from_a_ring() {
    let e = on_ring(false, 4);
    e.sender_says(FIRST, tx::DOWN);
    e.arrives(&down(3, 7));
    e.arrives(&bytes(3, 10));
    assert_eq!(recv(&e, 6), Received::Bytes(6));
    assert_eq!((mode_of(&e), e.tcp.queue.borrow().len()), (mode::TCP, 0));
    let e = on_ring(false, 4);
    e.sender_says(FIRST, tx::DOWN);
    e.tcp.error.set(libc::ETIMEDOUT);
    assert_eq!(recv(&e, 6), Received::Bytes(6));
    assert_eq!(e.rx.error.get(), libc::ETIMEDOUT);
    // Not while it is up, nor before the last byte.
    for (phase, n) in [(tx::UP, 6), (tx::DOWN, 5)] {
        let e = on_ring(false, 4);
        e.sender_says(FIRST, phase);
        let before = e.tcp.asked.get();
        assert_eq!(recv(&e, n), Received::Bytes(n));
        assert_eq!(e.tcp.asked.get(), before);
    }
}

/// A receive that TCP serves in part leaves the buffers where its bytes end.
#[test]
fn where_the_buffers_are_left() {
    for size in [5, 4, 6] {
        let e = Alone::receiving(false, 10);
        e.arrives(&bytes(0, 5));
        let (mut a, mut b) = (vec![0; size], vec![0; 10]);
        let v = [iov_of(&mut a), iov_of(&mut b)];
        let mut iov = Iov::new(&v);
        let r = e.rx.recv(&e.memory(), &e.tcp, &mut iov, look());
        assert_eq!((r, iov.left()), (Received::Bytes(5), size + 5));
        e.arrives(&bytes(5, 10));
        let r = e.rx.recv(&e.memory(), &e.tcp, &mut iov, look());
        assert_eq!((r, iov.left()), (Received::Bytes(5), size));
        a.extend(b);
        assert_eq!(a[..10], bytes(0, 10));
    }
    // One call to TCP is enough to know that there is no more; an error behind the bytes is kept.
    for (size, asked, kept) in [(20, 1, 0), (5, 2, libc::ETIMEDOUT)] {
        let e = Alone::receiving(false, 10);
        e.arrives(&bytes(0, 5));
        e.tcp.error.set(libc::ETIMEDOUT);
        let (mut a, mut b) = (vec![0; size], vec![0; 10]);
        let v = [iov_of(&mut a), iov_of(&mut b)];
        let mut iov = Iov::new(&v);
        let r = e.rx.recv(&e.memory(), &e.tcp, &mut iov, look());
        assert_eq!((r, iov.left()), (Received::Bytes(5), size + 5));
        assert_eq!((e.tcp.asked.get(), e.rx.error.get()), (asked, kept));
    }
    let how = How {
        peek: true,
        ..look()
    };
    // A peek over the border, and behind the frame.
    for (after, found) in [(0, 12), (12, 14)] {
        let e = in_prefix(false, 1);
        e.arrives(&down(0, 10));
        e.arrives(&bytes(3, 3 + after));
        let mut a = vec![0; 20];
        let v = [iov_of(&mut a)];
        let mut iov = Iov::new(&v);
        let r = e.rx.recv(&e.memory(), &e.tcp, &mut iov, how);
        assert_eq!((r, iov.left()), (Received::Bytes(found), 20 - found));
    }
    // A peek at the ring, and at what TCP has behind it.
    for (on_tcp, found) in [(0, 8), (5, 8), (14, 12)] {
        let e = on_ring(false, 2);
        e.sender_says(FIRST, tx::DOWN);
        e.arrives(&down(2, 8));
        e.arrives(&bytes(2, on_tcp.max(2)));
        let mut a = vec![0; 20];
        let v = [iov_of(&mut a)];
        let mut iov = Iov::new(&v);
        let r = e.rx.recv(&e.memory(), &e.tcp, &mut iov, how);
        assert_eq!((r, iov.left()), (Received::Bytes(found), 20 - found));
    }
    // And one that TCP does not serve, where they were.
    let e = Alone::receiving(false, 10);
    let mut a = vec![0; 5];
    let v = [iov_of(&mut a)];
    let mut iov = Iov::new(&v);
    let r = e.rx.recv(&e.memory(), &e.tcp, &mut iov, look());
    assert_eq!((r, iov.left()), (Received::Empty, 5));
}
