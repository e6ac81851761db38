//! What a receiver is asked, and asks for; what it makes of an end, an error, or the other end's death.

use super::end::*;
use lane::abi::{marks, rx, takeover, tx, Cursor, Epoch, Landed, RxWord, TakeoverWord, TcpPos};
use lane::half::rx::{mode, Revoked};
use lane::half::Received;
use lane::proto::frame::{Kind, LEN};
use std::sync::atomic::Ordering::Relaxed;

/// On the ring, nothing on TCP before it.
fn on_ring(remote: bool) -> Alone {
    let e = Alone::receiving(remote, 0);
    assert_eq!(recv(&e, 10), Received::Empty);
    assert_eq!(mode_of(&e), mode::RING);
    e
}

/// What asks a sender for something is published, unless there is no lane.
#[test]
fn requests() {
    for remote in LOCAL_AND_REMOTE {
        let e = Alone::new(remote);
        let m = e.memory();
        let n = publishes(&e, || {
            e.rx.want_down(&m, &e.tcp);
            e.rx.unwant_down(&m, &e.tcp);
        });
        assert_eq!((n, word(&e)), (0, RxWord::default()));
        e.rx.declare_ready(&m, &e.tcp);
        let n = publishes(&e, || e.rx.want_down(&m, &e.tcp));
        assert_eq!(n, 1);
        assert!(word(&e).has(rx::WANT_DOWN) && word(&e).has(rx::READY));
        let n = publishes(&e, || e.rx.unwant_down(&m, &e.tcp));
        assert_eq!(n, u32::from(remote), "a daemon forwards it");
        assert_eq!(word(&e), RxWord::new(FIRST, rx::READY));
    }
}

/// Ends and resets are announced to the other end's process, and across nodes to nobody.
#[test]
fn announcements() {
    for remote in LOCAL_AND_REMOTE {
        let (times, e) = (u32::from(!remote), Alone::new(remote));
        let m = e.memory();
        let own = &e.ours().rx[L];
        assert_eq!(own.marks.load(Relaxed), marks::KEPT | marks::PASSES);
        e.rx.mark_client(&m);
        assert!(!e.rx.has_ended(&m) && !e.rx.is_deaf(&m));
        assert_eq!(publishes(&e, || e.rx.announce_reset(&m, &e.tcp)), times);
        assert_eq!(publishes(&e, || e.rx.announce_deaf(&m)), 0);
        assert!(!e.rx.is_deaf(&m), "in one direction");
        assert_eq!(
            publishes(&e, || e.rx.announce_end(&m, &e.tcp, TcpPos::new(77))),
            times
        );
        assert_eq!(
            own.landed.load(Relaxed).tcp_pos().get(),
            if remote { 0 } else { 77 }
        );
        assert!(e.rx.has_ended(&m) && e.rx.is_deaf(&m));
        let first = marks::KEPT | marks::PASSES | marks::SYN;
        let all = first | marks::RESET | marks::DEAF | marks::ENDED;
        assert_eq!(own.marks.load(Relaxed), all);

        // Shut both ways, or closed: the sender must know, if there is a lane.
        let e = Alone::new(remote);
        let m = e.memory();
        e.rx.announce_deaf(&m);
        assert_eq!(publishes(&e, || e.rx.shut(&m, &e.tcp)), 0);
        assert!(e.rx.declare_ready(&m, &e.tcp));
        assert_eq!(
            publishes(&e, || e.rx.shut(&m, &e.tcp)),
            0,
            "in one direction"
        );
        e.rx.announce_end(&m, &e.tcp, TcpPos::new(1));
        assert!(!word(&e).has(rx::CLOSED));
        assert_eq!(publishes(&e, || e.rx.shut(&m, &e.tcp)), 1);
        assert!(word(&e).has(rx::CLOSED));
        let e = Alone::new(remote);
        e.rx.announce_deaf(&e.memory());
        e.rx.announce_end(&e.memory(), &e.tcp, TcpPos::new(1));
        assert_eq!(publishes(&e, || e.rx.shut(&e.memory(), &e.tcp)), 0);
        assert_eq!(word(&e), RxWord::default());

        let e = Alone::new(remote);
        let m = e.memory();
        assert_eq!(
            publishes(&e, || e.rx.close(&m, &e.tcp, TcpPos::new(9))),
            times
        );
        assert!(e.rx.has_ended(&m) && !word(&e).has(rx::CLOSED));
        let e = on_ring(remote);
        let m = e.memory();
        assert_eq!(publishes(&e, || e.rx.close(&m, &e.tcp, TcpPos::new(9))), 1);
        assert!(e.rx.has_ended(&m) && word(&e).has(rx::CLOSED));
    }
}

/// A waiting receive has news for what it has to look at in memory, and for nothing else.
#[test]
fn what_wakes_a_receive() {
    let e = Alone::new(false);
    let m = e.memory();
    let has_news = || (e.rx.has_news(&m), e.rx.ready(&m));
    e.sender_says(FIRST, tx::UP);
    assert_eq!(has_news(), (false, None), "on TCP");
    e.rx.declare_ready(&m, &e.tcp);
    e.their_tx().loc[0].store(RING.word(), Relaxed);
    assert_eq!(has_news(), (true, None), "a switch");
    e.sender_says(FIRST, tx::NONE);
    assert_eq!(has_news(), (false, None));
    e.sender_says(SECOND, tx::UP);
    assert_eq!(has_news(), (false, None));
    e.sender_says(FIRST, tx::UP);
    assert_eq!(recv(&e, 1), Received::Empty);
    assert_eq!(has_news(), (false, Some(false)));
    e.rx.error.put(libc::EPIPE);
    assert_eq!(has_news(), (false, Some(true)));
    assert_eq!(e.rx.probe(&m, &e.tcp), Some(true));
    e.rx.error.take();
    assert_eq!(e.rx.probe(&m, &e.tcp), Some(false));
    e.sender_says(FIRST, tx::DOWNING);
    assert_eq!(
        has_news(),
        (false, Some(false)),
        "its frame is TCP's to tell"
    );
    assert!(e.rx.goes_down(&m) && e.rx.awaits_frame(&m));
    e.sender_says(FIRST, tx::RESUMED);
    assert_eq!(has_news(), (true, Some(false)));
    assert!(!e.rx.goes_down(&m) && !e.rx.awaits_frame(&m));
    e.puts(0, &bytes(0, 3));
    assert_eq!(has_news(), (true, Some(true)));
    assert_eq!(e.rx.probe(&m, &e.tcp), Some(true));
    assert_eq!(
        e.ours().cursors[L].load(Relaxed).get(),
        0,
        "nothing was taken"
    );
    assert_eq!(recv(&e, 3), Received::Bytes(3));
    assert_eq!(recv(&e, 3), Received::Tcp);
    assert_eq!(e.rx.probe(&m, &e.tcp), None);
}

/// A receive that waits for a revocation has news of what the sender answers.
#[test]
fn what_wakes_a_revoking_receive() {
    let e = on_ring(false);
    let m = e.memory();
    e.puts(0, &bytes(0, 3));
    assert_eq!(e.rx.revoke(&m, &e.tcp), Ok(Revoked::Pending));
    for (phase, has_news) in [(tx::UP, false), (tx::DOWNING, false), (tx::RESUMED, true)] {
        e.sender_says(FIRST, phase);
        assert_eq!(e.rx.has_news(&m), has_news);
        assert_eq!(e.rx.ready(&m), None);
    }
}

/// After a frame: the ring's bytes, then TCP.
#[test]
fn what_wakes_a_receive_after_a_frame() {
    let e = on_ring(false);
    let m = e.memory();
    e.arrives(&down(0, 3));
    e.puts(0, &bytes(0, 3));
    e.sender_says(FIRST, tx::DOWN);
    assert_eq!(e.recv(1, look()).0, Received::Bytes(1));
    assert_eq!(e.rx.probe(&m, &e.tcp), Some(true));
    assert_eq!(e.rx.unread(&m, &e.tcp), Some(2));
    assert_eq!(mode_of(&e), mode::LAST);
    assert_eq!((e.rx.has_news(&m), e.rx.ready(&m)), (true, Some(true)));
    assert_eq!(recv(&e, 9), Received::Bytes(2));
    assert_ne!(mode_of(&e), mode::RING);
    assert_eq!((e.rx.has_news(&m), e.rx.ready(&m)), (false, None));
}

/// An end that was announced is always ready.
#[test]
fn an_announced_end_is_ready() {
    let e = on_ring(true);
    let m = e.memory();
    e.puts(0, &bytes(0, 3));
    e.theirs().heads[L].store(Cursor::new(0), Relaxed); // (it sees them land before its daemon shows them)
    e.arrives(&frame(Kind::Fin, 3, 0));
    assert_eq!(recv(&e, 1), Received::Bytes(1));
    assert_eq!(mode_of(&e), mode::FIN);
    assert_eq!((e.rx.has_news(&m), e.rx.ready(&m)), (true, Some(true)));
    assert_eq!(e.rx.ring_unread(&m), 2);
    assert_eq!(recv(&e, 9), Received::Bytes(2));
    assert_eq!((e.rx.has_news(&m), e.rx.ready(&m)), (false, Some(true)));
    assert_eq!(recv(&e, 9), Received::Eof);
}

/// TCP ends: cleanly, with an error, or with what tells that the other end is dead.
#[test]
fn the_end_of_tcp() {
    // On the ring of one node: after its bytes, which a FIN may have overtaken.
    let e = on_ring(false);
    e.tcp.ended.set(true);
    assert_eq!(recv(&e, 9), Received::Eof);
    // Across nodes only an announced end is one; our own shutdown announces nothing.
    let e = on_ring(true);
    e.tcp.ended.set(true);
    assert_eq!(recv(&e, 9), Received::Error(libc::ECONNRESET));
    e.rx.shut.store(1, Relaxed);
    assert_eq!(recv(&e, 9), Received::Eof);
    for remote in LOCAL_AND_REMOTE {
        let e = on_ring(remote);
        e.tcp.error.set(libc::ETIMEDOUT);
        assert_eq!(recv(&e, 9), Received::Error(libc::ETIMEDOUT));
    }
}

/// The other end has died with bytes that we sent unread: its kernel would have sent a reset, had it known them.
#[test]
fn a_death_with_bytes_unread() {
    let start = || {
        let e = Alone::up(false);
        assert_eq!(e.send(10), lane::half::Sent::Bytes(10));
        e.their_rx().marks.store(marks::KEPT, Relaxed);
        e
    };
    let died = |e: &Alone, dead| e.rx.died_unread(&e.memory(), dead);
    let e = start();
    assert!(died(&e, false) && died(&e, true));
    assert!(e.rx.notice_death(&e.memory(), false));
    assert!(!e.rx.notice_death(&e.memory(), false), "told once");
    e.reads(9);
    assert!(died(&e, false));
    e.reads(10);
    assert!(!died(&e, false), "it has read everything");
    e.reads(11);
    assert!(!died(&e, false));
    for (said, false_alarm) in [
        (0, true),
        (marks::ENDED, true),
        (marks::KEPT | marks::ENDED, true),
        (marks::KEPT | marks::DEAF, false),
    ] {
        let e = start();
        e.their_rx().marks.store(said, Relaxed);
        assert_eq!(died(&e, false), !false_alarm, "{said}");
        assert_eq!(died(&e, true), said & marks::KEPT != 0, "{said}");
    }
    for flags in [rx::CLOSED, rx::REVOKED] {
        let e = start();
        e.says(FIRST, rx::READY | flags);
        assert!(!died(&e, true));
    }
    let e = start();
    e.says(SECOND, rx::READY);
    assert!(!died(&e, true), "another epoch");
    let e = start();
    e.tx.down(&e.memory(), &e.tcp).unwrap();
    assert!(!died(&e, true), "TCP knows them");
    // Our own shutdown: an end of file is no FIN of the other's.
    let e = start();
    e.rx.shut.store(1, Relaxed);
    assert!(!e.rx.notice_death(&e.memory(), false));
    assert!(e.rx.notice_death(&e.memory(), true));
    let mut e = start();
    e.remote = true;
    assert!(!died(&e, true), "a daemon knows");

    // As receives tell it: once, and the connection is cut.
    for (open, ended, told) in [
        (true, false, true),
        (false, false, false),
        (false, true, true),
    ] {
        let e = start();
        e.tcp.ended.set(true);
        e.tcp.open.set(open);
        if ended {
            e.rx.announce_end(&e.memory(), &e.tcp, TcpPos::new(0));
        }
        assert!(e.rx.declare_ready(&e.memory(), &e.tcp));
        let first = recv(&e, 5);
        assert_eq!(
            first == Received::Error(libc::ECONNRESET),
            told,
            "{first:?}"
        );
        assert_eq!(recv(&e, 5), Received::Eof);
        assert!(!e.tcp.open.get());
    }
}

/// The other end has ended, and says that it has put so many bytes on TCP.
fn ended(e: &Alone, sent: u64) {
    e.their_rx()
        .marks
        .store(marks::KEPT | marks::ENDED, Relaxed);
    e.their_rx()
        .landed
        .store(Landed::at_tcp_pos(TcpPos::new(sent)), Relaxed);
}

fn has_all(e: &Alone) -> bool {
    e.rx.has_all(&e.memory())
}

/// A sender that has ended: is everything here, whatever TCP has yet to report?
#[test]
fn everything_is_here() {
    // On TCP, and ready: what was sent there.
    for ready in [false, true] {
        let e = Alone::new(false);
        if ready {
            assert!(e.rx.declare_ready(&e.memory(), &e.tcp));
        }
        e.rx.tcp_pos.store(TcpPos::new(10), Relaxed);
        e.their_rx()
            .landed
            .store(Landed::at_tcp_pos(TcpPos::new(10)), Relaxed);
        assert!(!has_all(&e), "it has not ended");
        e.their_rx().marks.fetch_or(marks::EXITED, Relaxed);
        assert!(has_all(&e), "its process has");
        e.their_rx().marks.fetch_and(!marks::EXITED, Relaxed);
        ended(&e, 10);
        assert!(has_all(&e));
        for sent in [9, 11] {
            ended(&e, sent);
            assert!(!has_all(&e), "{sent}");
        }
        ended(&e, 10);
        e.sender_says(Epoch::base(7), tx::NONE);
        assert!(!has_all(&e), "of another use of the slot");
        if ready {
            e.sender_says(FIRST, tx::UP);
            assert!(!has_all(&e), "on a ring that we have not seen");
        }
    }
    // On the ring: when it is empty.
    for (phase, all) in [
        (tx::UP, true),
        (tx::BROKEN, true),
        (tx::ENDED, true),
        (tx::DOWNING, false),
        (tx::DOWN, false),
    ] {
        let e = on_ring(false);
        ended(&e, 999);
        e.sender_says(FIRST, phase);
        assert_eq!(has_all(&e), all, "{phase:?}");
        e.puts(0, &bytes(0, 5));
        assert!(!has_all(&e));
        assert_eq!(recv(&e, 5), Received::Bytes(5));
        assert_eq!(has_all(&e), all);
        // A part of a frame.
        let e = on_ring(false);
        ended(&e, 999);
        e.arrives(&down(0, 0)[..5]);
        assert_eq!(recv(&e, 5), Received::Empty);
        assert!(!has_all(&e));
    }
    // Across nodes nobody can tell.
    let e = on_ring(true);
    ended(&e, 0);
    assert!(!has_all(&e));
    assert_eq!(e.rx.said(&e.memory()), 0);
}

/// The same behind a frame: what has yet to come repeats the ring, and perhaps not all of it.
#[test]
fn everything_is_here_behind_a_frame() {
    let after_frame = |phase| {
        let e = on_ring(false);
        e.puts(0, &bytes(0, 20));
        assert_eq!(recv(&e, 15), Received::Bytes(15));
        e.arrives(&down(5, 15));
        e.sender_says(FIRST, tx::DOWN);
        assert_eq!(e.rx.unread(&e.memory(), &e.tcp), Some(5));
        e.sender_says(FIRST, phase);
        ended(&e, LEN as u64 + 15);
        assert!(!has_all(&e), "the ring has bytes");
        assert_eq!(recv(&e, 5), Received::Bytes(5));
        e
    };
    let sent = LEN as u64 + 15;
    // (BROKEN: not all of them could be put on TCP.)
    for phase in [tx::DOWN, tx::BROKEN] {
        let e = after_frame(phase);
        assert_eq!(mode_of(&e), mode::SKIP);
        for (sent, all) in [(sent - 1, true), (sent, true), (sent + 1, false)] {
            ended(&e, sent);
            assert_eq!(has_all(&e), all, "{sent} {phase:?}");
        }
    }
    // Then nothing repeats anything.
    let e = after_frame(tx::DOWN);
    e.arrives(&bytes(5, 20));
    assert_eq!(recv(&e, 5), Received::Tcp);
    for (sent, all) in [(sent - 1, false), (sent, true), (sent + 1, false)] {
        ended(&e, sent);
        assert_eq!(has_all(&e), all, "{sent}");
    }
}

/// The same before the frame has come, which a packet filter may have dropped: the sender's record says what it and the bytes
/// after it repeat.
#[test]
fn everything_is_here_before_its_frame() {
    let e = on_ring(false);
    e.puts(0, &bytes(0, 20));
    assert_eq!(recv(&e, 15), Received::Bytes(15));
    e.sender_says(FIRST, tx::DOWN);
    let record = |from: u64, epoch| {
        let words = e.their_rx();
        words.takeover_at.store(Cursor::new(from), Relaxed);
        let word = TakeoverWord::new(epoch, takeover::DOWN);
        words.takeover.store(word, Relaxed);
    };
    record(15, FIRST);
    ended(&e, LEN as u64 + 5);
    assert!(!has_all(&e), "the ring has bytes");
    assert_eq!(recv(&e, 5), Received::Bytes(5));
    e.sender_says(FIRST, tx::UP); // perhaps beside a native call, which may send: then nobody knows how much
    for (sent, all) in [(u64::MAX, false), (0, true)] {
        ended(&e, sent);
        assert_eq!(has_all(&e), all, "{sent}");
    }
    for phase in [tx::DOWNING, tx::DOWN] {
        e.sender_says(FIRST, phase);
        // (The last: it has sent more than what the ring had.)
        for (sent, all) in [
            (0, true),
            (5, true),
            (LEN as u64 + 5, true),
            (LEN as u64 + 6, false),
        ] {
            ended(&e, sent);
            assert_eq!(has_all(&e), all, "{sent} {phase:?}");
        }
    }
    ended(&e, 0);
    // A record of another epoch, or of bytes that there are not.
    for (from, epoch) in [(15, Epoch::base(7)), (21, FIRST)] {
        record(from, epoch);
        assert!(!has_all(&e), "{from}");
    }
    e.their_rx().marks.fetch_and(!marks::ENDED, Relaxed);
    record(15, FIRST);
    assert!(!has_all(&e), "it has not ended");
}

/// What a look finds is kept for the receive, which tells it; and a receiver that is not on its ring says so.
#[test]
fn a_probe() {
    let e = on_ring(false);
    assert!(e.rx.is_up());
    e.tcp.error.set(libc::ETIMEDOUT);
    assert_eq!(e.rx.probe(&e.memory(), &e.tcp), Some(true));
    assert_eq!(e.rx.error.get(), libc::ETIMEDOUT);
    let e = Alone::new(false);
    assert!(!e.rx.is_up() && !e.rx.engaged());
    assert!(e.rx.declare_ready(&e.memory(), &e.tcp));
    assert!(!e.rx.is_up() && e.rx.engaged());
    e.puts(0, &bytes(0, 5));
    assert_eq!(e.rx.ring_unread(&e.memory()), 0);
}

/// An error that was kept is told where the stream has come to its end: behind a prefix, a ring and a frame, whichever
/// of them has not been seen yet.
#[test]
fn an_error_behind_everything() {
    for remote in LOCAL_AND_REMOTE {
        for prefix in [0, 3] {
            let e = Alone::receiving(remote, prefix);
            e.arrives(&bytes(0, prefix));
            e.puts(0, &bytes(0, 5));
            e.rx.error.put(libc::EPIPE);
            let mut got = 0;
            loop {
                match recv(&e, 2) {
                    Received::Bytes(n) => got += n as u64,
                    r => break assert_eq!(r, Received::Error(libc::EPIPE)),
                }
            }
            assert_eq!(got, prefix + 5);
            assert_eq!((mode_of(&e), recv(&e, 2)), (mode::RING, Received::Empty));
        }
        // Ready, and nobody has switched.
        let e = Alone::new(remote);
        assert!(e.rx.declare_ready(&e.memory(), &e.tcp));
        e.rx.error.put(libc::EPIPE);
        assert_eq!(recv(&e, 2), Received::Error(libc::EPIPE));
        assert_eq!(mode_of(&e), mode::READY);
        // A frame that is in the queue, and what follows it.
        let e = on_ring(remote);
        e.puts(0, &bytes(0, 5));
        assert_eq!(recv(&e, 5), Received::Bytes(5));
        e.arrives(&down(5, 0));
        e.arrives(&bytes(5, 8));
        e.rx.error.put(libc::EPIPE);
        assert_eq!(recv(&e, 5), Received::Tcp);
        assert_eq!((mode_of(&e), e.rx.error.get()), (mode::TCP, libc::EPIPE));
        // Bytes that repeat the ring come after the error, if they have not come yet.
        let e = on_ring(remote);
        e.puts(0, &bytes(0, 5));
        assert_eq!(recv(&e, 5), Received::Bytes(5));
        e.arrives(&down(0, 5));
        assert_eq!((recv(&e, 5), mode_of(&e)), (Received::Empty, mode::SKIP));
        e.rx.error.put(libc::EPIPE);
        assert_eq!(recv(&e, 5), Received::Error(libc::EPIPE));
        assert_eq!(
            (mode_of(&e), e.rx.tcp_pos.load(Relaxed).get()),
            (mode::SKIP, LEN as u64)
        );
    }
}

/// An error or an end that a look at TCP finds may have come behind a switch that was not there before the look.
#[test]
fn an_end_behind_a_switch() {
    for at in [1, 2] {
        for error in [0, libc::ETIMEDOUT] {
            let e = Alone::new(false);
            assert!(e.rx.declare_ready(&e.memory(), &e.tcp));
            e.their_tx().loc[0].store(RING.word(), Relaxed);
            e.puts(0, &bytes(0, 5));
            e.tcp.ended.set(true);
            e.tcp.error.set(error);
            e.tcp.at_ask.set(Some(at));
            e.switches_then();
            assert_eq!(recv(&e, 9), Received::Bytes(5));
            // The kernel tells an error once.
            e.tcp.error.set(0);
            let r = match error {
                0 => Received::Eof,
                _ if at == 1 => Received::Eof, // nobody has met it
                e => Received::Error(e),
            };
            assert_eq!(recv(&e, 9), r, "{at} {error}");
        }
    }
}

/// After a frame: bytes that repeat the ring are skipped, those that were announced are waited for, and the direction
/// is on TCP with the last of them.
#[test]
fn behind_a_frame() {
    // This end has shut its direction down: the kernel delivers what comes all the same.
    let e = on_ring(false);
    e.puts(0, &bytes(0, 5));
    assert_eq!(recv(&e, 5), Received::Bytes(5));
    e.arrives(&down(0, 5));
    assert_eq!((recv(&e, 5), mode_of(&e)), (Received::Empty, mode::SKIP));
    e.rx.shut.store(1, Relaxed);
    e.tcp.ended.set(true);
    assert_eq!((recv(&e, 5), mode_of(&e)), (Received::Eof, mode::SKIP));
    e.arrives(&bytes(0, 7));
    assert_eq!((recv(&e, 5), mode_of(&e)), (Received::Tcp, mode::TCP));
    assert_eq!(e.tcp.queue.borrow().len(), 2);
    // The other end has ended in the middle of the repetition: nothing is missing.
    let e = on_ring(false);
    e.puts(0, &bytes(0, 5));
    assert_eq!(recv(&e, 5), Received::Bytes(5));
    e.arrives(&down(0, 5));
    e.arrives(&bytes(0, 2));
    e.tcp.ended.set(true);
    assert_eq!((recv(&e, 5), mode_of(&e)), (Received::Eof, mode::TCP));
    // So have others across nodes, if nothing was announced that is missing.
    let e = on_ring(true);
    e.puts(0, &bytes(0, 5));
    assert_eq!(recv(&e, 5), Received::Bytes(5));
    e.arrives(&down(0, 5));
    e.tcp.ended.set(true);
    assert_eq!((recv(&e, 5), mode_of(&e)), (Received::Eof, mode::TCP));
    // Across nodes bytes were announced that the ring never had.
    for (there, end) in [(3, false), (6, false), (7, true)] {
        let e = on_ring(true);
        e.puts(0, &bytes(0, 5));
        assert_eq!(recv(&e, 5), Received::Bytes(5));
        e.arrives(&down(0, 7));
        e.arrives(&bytes(0, there));
        let r = recv(&e, 5);
        match there {
            3 => assert_eq!((r, mode_of(&e)), (Received::Empty, mode::SKIP)),
            6 => assert_eq!((r, mode_of(&e)), (Received::Bytes(1), mode::REST)),
            _ => assert_eq!((r, mode_of(&e)), (Received::Bytes(2), mode::TCP)),
        }
        e.tcp.ended.set(true);
        let r = recv(&e, 5);
        assert_eq!(r == Received::Error(libc::ECONNRESET), !end, "{there}");
        assert_eq!(r == Received::Tcp, end);
    }
    // A peek has met the frame before the last byte of the ring: then TCP tells what there is to read.
    let e = on_ring(true);
    e.puts(0, &bytes(0, 5));
    e.arrives(&down(0, 5));
    assert_eq!(e.rx.unread(&e.memory(), &e.tcp), Some(5));
    assert_eq!(
        (mode_of(&e), e.rx.ready(&e.memory())),
        (mode::LAST, Some(true))
    );
    assert_eq!(recv(&e, 5), Received::Bytes(5));
    assert_eq!((mode_of(&e), e.rx.ready(&e.memory())), (mode::LAST, None));
}
