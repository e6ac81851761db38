//! Across nodes, nobody is left who could tell a sender whether its switch stands: what it does, and how its receiver finds
//! that out.

use super::end::*;
use super::leaving::revoke;
use lane::abi::{rx, tx, TcpPos, TxWord};
use lane::half::rx::{mode, Received, Revoked};
use lane::half::tx::mode as tx_mode;
use lane::half::Progress;
use lane::proto::frame::{Kind, LEN};
use lane::proto::reason::Reason;
use std::sync::atomic::Ordering::Relaxed;

/// Nothing but the switch has come; `prefix` bytes of TCP lie before it.
fn switched(prefix: u64) -> Alone {
    let e = Alone::receiving(true, prefix);
    assert_eq!(recv(&e, 10), Received::Empty);
    let now = [mode::RING, mode::PREFIX][usize::from(prefix > 0)];
    assert_eq!(mode_of(&e), now);
    e
}

fn orphan(e: &Alone) -> u32 {
    e.rx.orphan(&e.memory()).unwrap();
    mode_of(e)
}

fn orphaned(prefix: u64) -> Alone {
    let e = switched(prefix);
    assert_eq!(orphan(&e), mode::UNDECIDED);
    e
}

/// What the application reads, until there is nothing.
fn reads(e: &Alone) -> (Vec<u8>, Received) {
    let mut all = Vec::new();
    loop {
        let (r, b) = e.recv(7, look());
        match r {
            Received::Bytes(n) => all.extend(&b[..n]),
            r => return (all, r),
        }
    }
}

#[test]
fn a_group_that_is_gone() {
    let e = Alone::new(true);
    assert_eq!(orphan(&e), mode::TCP);
    assert!(e.rx.declare_ready(&e.memory(), &e.tcp));
    assert_eq!(orphan(&e), mode::TCP);
    let e = Alone::receiving(true, 3);
    assert_eq!(orphan(&e), mode::UNDECIDED, "a switch that was shown");
    assert_eq!(orphan(&e), mode::UNDECIDED);
    // What came on the ring came from a sender that had its answer.
    let e = switched(0);
    e.puts(0, &bytes(0, 10));
    assert_eq!(orphan(&e), mode::RING);
    assert_eq!(recv(&e, 20), Received::Bytes(10));
    assert_eq!(orphan(&e), mode::RING);
    let e = switched(3);
    e.puts(0, &bytes(3, 13));
    assert_eq!(orphan(&e), mode::PREFIX);
    // So did a frame.
    let e = switched(0);
    e.arrives(&down(0, 5)[..LEN - 1]);
    assert_eq!(recv(&e, 1), Received::Empty);
    assert_eq!(orphan(&e), mode::RING);
    e.puts(0, &[0xff; 3]);
    assert_eq!(orphan(&e), mode::RING);
}

/// The stream goes on on TCP, or a frame says so; before the switch there may be bytes to read, and all may come in pieces.
#[test]
fn what_follows_decides() {
    for (prefix, framed) in [0, 1, 20].iter().flat_map(|p| [(*p, false), (*p, true)]) {
        let stream = bytes(0, 50);
        let (before, after) = stream.split_at(prefix as usize);
        let mut tcp = before.to_vec();
        if framed {
            tcp.extend(down(0, 30));
        }
        tcp.extend(after);
        for cut in 0..=tcp.len() {
            let e = orphaned(prefix);
            let found = e.rx.ready(&e.memory());
            assert_eq!(found, None, "only the kernel knows");
            e.arrives(&tcp[..cut]);
            let (mut all, r) = reads(&e);
            let plain = mode_of(&e) == mode::TCP;
            assert_eq!(
                r,
                if plain {
                    Received::Tcp
                } else {
                    Received::Empty
                }
            );
            let known = prefix as usize + if framed { LEN + 30 } else { 1 };
            assert!(plain == (cut >= known), "{prefix} {framed} {cut}");
            e.arrives(&tcp[cut..]);
            let (more, r) = reads(&e);
            all.extend(more);
            assert_eq!((r, mode_of(&e)), (Received::Tcp, mode::TCP));
            // (On TCP, the kernel has the rest.)
            all.extend(e.tcp.queue.borrow().iter());
            assert_eq!(all, stream, "{prefix} {framed} {cut}");
        }
    }
}

#[test]
fn asks_count_and_peek_no_frame() {
    for framed in [false, true] {
        let e = orphaned(3);
        e.arrives(&bytes(0, 3));
        if framed {
            e.arrives(&down(0, 5));
        }
        e.arrives(&bytes(3, 8));
        let peek = |n| {
            let how = lane::half::rx::How {
                peek: true,
                ..look()
            };
            e.recv(n, how)
        };
        let unread = || e.rx.unread(&e.memory(), &e.tcp);
        assert_eq!(unread(), Some(3));
        assert_eq!(e.rx.probe(&e.memory(), &e.tcp), Some(true));
        assert_eq!(peek(9).0, Received::Bytes(3));
        assert_eq!(recv(&e, 3), Received::Bytes(3));
        let on_tcp = if framed { Some(5) } else { None };
        assert_eq!(unread(), on_tcp);
        assert_eq!(
            e.rx.probe(&e.memory(), &e.tcp),
            if framed { Some(true) } else { None }
        );
    }
}

/// An end that nothing explains may have lost bytes of the ring; so may an error. Neither is a clean end.
#[test]
fn ends_without_a_word() {
    let e = orphaned(0);
    e.tcp.ended.set(true);
    assert_eq!(recv(&e, 5), Received::Error(libc::ECONNRESET));
    let e = orphaned(0);
    e.tcp.error.set(libc::ETIMEDOUT);
    assert_eq!(recv(&e, 5), Received::Error(libc::ETIMEDOUT));
    let e = orphaned(0);
    e.arrives(&frame(Kind::Fin, 0, 0));
    assert_eq!(recv(&e, 5), Received::Eof);
    // Whatever begins like a frame has to be one.
    let e = orphaned(0);
    let mut wrong = down(0, 0);
    wrong[LEN - 1] ^= 1;
    e.arrives(&wrong);
    assert_eq!(recv(&e, 5), Received::Reset(Reason::Foreign));
}

/// Before the socket leaves the process, it has to be known.
#[test]
fn leaves() {
    let e = orphaned(2);
    assert_eq!(revoke(&e), Revoked::Pending);
    e.arrives(&bytes(0, 2));
    assert_eq!(revoke(&e), Revoked::Pending);
    assert_eq!(recv(&e, 2), Received::Bytes(2));
    assert_eq!(revoke(&e), Revoked::Pending);
    e.arrives(&bytes(2, 3));
    assert_eq!((revoke(&e), mode_of(&e)), (Revoked::Clear, mode::TCP));
    let e = orphaned(0);
    e.arrives(&down(0, 2));
    e.arrives(&bytes(0, 2));
    assert_eq!((revoke(&e), mode_of(&e)), (Revoked::Clear, mode::TCP));
    // The same if it has asked for its bytes before.
    for prefix in [0, 2] {
        let e = switched(prefix);
        assert_eq!(revoke(&e), Revoked::Pending);
        assert_eq!(mode_of(&e), mode::REVOKING);
        e.arrives(&bytes(0, prefix + 1));
        assert_eq!(revoke(&e), Revoked::Pending);
        assert_eq!(orphan(&e), mode::UNDECIDED);
        if prefix > 0 {
            assert_eq!(recv(&e, 9), Received::Bytes(prefix as usize));
        }
        assert_eq!((revoke(&e), mode_of(&e)), (Revoked::Clear, mode::TCP));
    }
}

/// It has read on on TCP before its daemon shows the switch, whose sender was not told of it.
#[test]
fn shown_late() {
    for leaves in [false, true] {
        let e = Alone::new(true);
        assert!(e.rx.declare_ready(&e.memory(), &e.tcp));
        e.arrives(&bytes(0, 4));
        assert_eq!(recv(&e, 4), Received::Bytes(4));
        e.their_tx().up_tcp_pos.store(TcpPos::new(3), Relaxed);
        e.sender_says(FIRST, tx::UP);
        match leaves {
            true => assert_eq!(revoke(&e), Revoked::Clear),
            false => assert_eq!(recv(&e, 4), Received::Tcp),
        }
        assert_eq!(mode_of(&e), mode::TCP);
    }
}

/// As long as the group is there, bytes that are no frame wait: it is asked whether they are the stream's. Nothing is taken.
#[test]
fn waits_for_the_group_to_go() {
    for n in 1..=5 {
        let e = switched(0);
        let rung = e.tcp.rung.get();
        e.arrives(&bytes(0, n));
        assert_eq!((recv(&e, 9), mode_of(&e)), (Received::Empty, mode::RING));
        assert!(word(&e).has(rx::WANT_DOWN));
        assert_eq!(recv(&e, 9), Received::Empty);
        assert!(e.tcp.rung.get() <= rung + 1, "asked once");
        assert_eq!(e.tcp.queue.borrow().len(), n as usize);
        assert_eq!(orphan(&e), mode::UNDECIDED);
        assert_eq!((recv(&e, 9), mode_of(&e)), (Received::Tcp, mode::TCP));
    }
    // The first bytes of a frame tell nothing yet.
    let e = switched(0);
    e.arrives(&down(0, 0)[..3]);
    assert_eq!(recv(&e, 9), Received::Empty);
    assert!(!word(&e).has(rx::WANT_DOWN));
    assert_eq!(orphan(&e), mode::UNDECIDED);
    assert_eq!(recv(&e, 9), Received::Empty);
    e.arrives(b"x");
    assert_eq!((recv(&e, 9), mode_of(&e)), (Received::Tcp, mode::TCP));
    assert_eq!(e.tcp.queue.borrow().len(), 4);
    // They are somebody else's, if the sender leaves by a frame, or if the ring was used.
    let e = switched(0);
    e.arrives(b"x");
    assert_eq!(recv(&e, 9), Received::Empty);
    e.sender_says(FIRST, tx::DOWN);
    assert_eq!(recv(&e, 9), Received::Reset(Reason::Foreign));
    let e = switched(0);
    e.puts(0, &bytes(0, 4));
    assert_eq!(recv(&e, 4), Received::Bytes(4));
    e.arrives(b"x");
    assert_eq!(recv(&e, 9), Received::Reset(Reason::Foreign));
}

fn asking() -> Alone {
    let e = Alone::new(true);
    e.says(FIRST, rx::READY);
    assert_eq!(e.tx.try_up(&e.memory(), &e.tcp), Ok(false));
    assert_eq!(e.mode(), tx_mode::ASK);
    e
}

/// The sender: its daemon is gone before it had an answer.
#[test]
fn the_sender_goes_on_without_a_frame() {
    let e = asking();
    let sent = e.tcp.out.borrow().len();
    let done = e.tx.leave_group(&e.memory(), &e.tcp, true);
    assert_eq!((done, e.mode()), (Ok(Progress::Done), tx_mode::TCP));
    assert_eq!(e.state(), TxWord::new(FIRST, tx::RESUMED));
    assert_eq!(e.tcp.out.borrow().len(), sent);
    // With one, by that.
    let e = asking();
    e.says(FIRST, rx::READY | rx::REVOKED);
    let done = e.tx.leave_group(&e.memory(), &e.tcp, true);
    assert_eq!((done, e.mode()), (Ok(Progress::Done), tx_mode::TCP));
    assert_eq!(e.tcp.out.borrow().len(), sent);
    let e = asking();
    e.says(FIRST, rx::READY | rx::ACCEPTED);
    let done = e.tx.leave_group(&e.memory(), &e.tcp, true);
    assert_eq!((done, e.mode()), (Ok(Progress::Done), tx_mode::TCP));
    assert_eq!(e.frame().kind, Kind::Down);
}
