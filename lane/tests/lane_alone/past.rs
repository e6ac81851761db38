//! From the prefix to the ring on one node, beside a sender that goes down: the receiver says `PAST` before it takes anything
//! off the ring, and a sender that has not seen that puts the whole ring on TCP without a frame.

use super::end::*;
use super::leaving::revoke;
use lane::abi::{
    marks, rx, takeover, tx, Cursor, RxFlags, RxWord, Shared, TakeoverPhase, TakeoverWord, TxPhase,
};
use lane::half::leave::{Attempt, Step};
use lane::half::rx::{mode, Revoked};
use lane::half::tx::BeforeFin;
use lane::half::tx::{mode as sends, Adopted};
use lane::half::{Received, Sent, TxState};
use lane::proto::frame::LEN;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

/// On its ring, with 100 bytes unread; the receiver is one that says `PAST`.
fn sending(remote: bool, flags: RxFlags) -> Alone {
    let e = Alone::up(remote);
    e.their_rx().marks.store(marks::PASSES, Relaxed);
    e.send(100);
    e.says(FIRST, is_quiet(remote) | flags);
    e
}

fn record(e: &Alone) -> TakeoverWord {
    e.ours().rx[L].takeover.load(Relaxed)
}

/// A frame only to who may have taken bytes of the ring.
#[test]
fn down_before_the_receiver_is_past() {
    let nothing = rx::READY;
    let e = sending(false, nothing);
    e.tx.down(&e.memory(), &e.tcp).unwrap();
    assert_eq!((e.mode(), e.on_tcp()), (sends::TCP, 100));
    assert_eq!(e.state().phase(), tx::RESUMED);
    assert_eq!(record(&e), TakeoverWord::new(FIRST, takeover::PLAIN));
    assert_eq!(e.tx.again.load(Relaxed), 100);
    for (remote, flags, passes) in [
        (false, rx::PAST, true),
        (false, nothing, false), // (of an older version)
        (true, nothing, true),
        (true, rx::PAST, true),
    ] {
        let e = sending(remote, flags);
        if !passes {
            e.their_rx().marks.store(marks::KEPT, Relaxed);
        }
        e.tx.down(&e.memory(), &e.tcp).unwrap();
        assert_eq!(e.on_tcp(), LEN + 100, "{remote} {flags:?} {passes}");
        assert_eq!(record(&e), TakeoverWord::new(FIRST, takeover::DOWN));
    }
    // What another epoch's word says is nothing.
    let e = sending(false, nothing);
    e.says(SECOND, rx::READY | rx::PAST);
    e.tx.down(&e.memory(), &e.tcp).unwrap();
    assert_eq!(e.on_tcp(), 100);
}

/// TCP does not take all: the receiver finds the rest on the ring, unless it leaves.
#[test]
fn tcp_is_full_before_a_fin() {
    let e = sending(false, rx::READY);
    let m = e.memory();
    e.tcp.room.set(40);
    assert_eq!(e.tx.before_fin(&m, &e.tcp), Poll::Ready(None));
    assert_eq!((e.state().phase(), e.on_tcp()), (tx::DOWNING, 40));
    assert!(!e.tx.must_flush(&m) && !e.tx.holds_fin(&m));
    assert_eq!(e.tx.outstanding(&m), 0);
    e.says(FIRST, rx::READY | rx::REVOKED);
    assert!(e.tx.must_flush(&m) && e.tx.holds_fin(&m));
    assert_eq!(e.tx.outstanding(&m), 60);
    let step = || e.tx.come_to_fin(&m, &e.tcp, || false);
    assert_eq!(step(), Ok(BeforeFin::Room));
    e.tcp.room.set(60);
    assert_eq!(step(), Ok(BeforeFin::OnTcp(None)));
    assert_eq!((e.state().phase(), e.on_tcp()), (tx::RESUMED, 100));

    let e = sending(false, rx::READY);
    e.tcp.room.set(40);
    assert_eq!(e.tx.before_fin(&e.memory(), &e.tcp), Poll::Ready(None));
    e.tx.shut(&e.memory(), &e.tcp, None);
    assert_eq!((e.state().phase(), e.mode()), (tx::BROKEN, sends::TCP));
}

/// A daemon goes on with what the end has recorded, also if nothing of it is on TCP yet: the receiver may have gone by that.
#[test]
fn a_daemon_goes_on_without_a_frame() {
    for room in [0, 40] {
        let e = sending(false, rx::READY);
        e.tcp.room.set(room);
        e.tx.down(&e.memory(), &e.tcp).unwrap();
        assert_eq!(e.on_tcp(), room);
        e.says(FIRST, rx::READY | rx::PAST);
        e.tcp.room.set(1000);
        e.takeover(FIRST, takeover::TAKEN);
        let (t, m) = (TxState::default(), e.taken());
        let adopted = t.adopt(&m, &e.tcp, TAG);
        assert!(matches!(adopted, Ok(Adopted::Ring)));
        t.down(&m, &e.tcp).unwrap();
        assert_eq!((e.on_tcp(), e.state().phase()), (100, tx::RESUMED));
    }
}

/// Three bytes of a prefix and ten on the ring, and the sender says this.
fn receiving(phase: TxPhase) -> Alone {
    let e = Alone::receiving(false, 3);
    e.arrives(&bytes(0, 3));
    e.puts(0, &bytes(3, 13));
    e.sender_says(FIRST, phase);
    e
}

/// The sender, or a daemon, records how it goes down.
fn records(e: &Alone, what: TakeoverPhase, daemon: bool) {
    let at = match daemon {
        true => &e.theirs().daemon[L].takeover,
        false => &e.their_rx().takeover,
    };
    at.store(TakeoverWord::new(FIRST, what), Relaxed);
}

fn reads(e: &Alone, n: usize) -> (Received, u32) {
    (recv(e, n), mode_of(e))
}

/// It says `PAST` when the prefix is read, not before, and then reads the ring.
#[test]
fn the_sender_stays() {
    let e = receiving(tx::UP);
    assert_eq!(reads(&e, 2), (Received::Bytes(2), mode::PREFIX));
    assert!(!word(&e).has(rx::PAST));
    assert_eq!(reads(&e, 20), (Received::Bytes(11), mode::RING));
    assert!(word(&e).has(rx::PAST));
}

/// It has put everything on TCP.
#[test]
fn the_sender_is_on_tcp() {
    let e = receiving(tx::UP);
    assert_eq!(recv(&e, 2), Received::Bytes(2));
    e.sender_says(FIRST, tx::RESUMED);
    e.arrives(&bytes(3, 13));
    assert_eq!(reads(&e, 20), (Received::Tcp, mode::TCP));
    assert_eq!(e.rx.unread(&e.memory(), &e.tcp), None);
    // (Before it has read anything.)
    let e = receiving(tx::RESUMED);
    assert_eq!(reads(&e, 3), (Received::Tcp, mode::TCP));
}

/// It is on its way, and has recorded how; or it has not yet.
#[test]
fn the_sender_goes_down() {
    for daemon in [false, true] {
        let e = receiving(tx::DOWNING);
        records(&e, takeover::PLAIN, daemon);
        assert_eq!(reads(&e, 8), (Received::Bytes(8), mode::LAST));
        assert!(!e.rx.has_news(&e.memory()) || e.rx.has_ring_bytes(&e.memory()));
        e.arrives(&bytes(3, 11));
        assert_eq!(reads(&e, 8), (Received::Bytes(5), mode::SKIP));
        e.arrives(&bytes(11, 13));
        e.sender_says(FIRST, tx::RESUMED);
        e.arrives(&bytes(13, 20));
        assert_eq!(reads(&e, 8), (Received::Tcp, mode::TCP));
        assert_eq!(e.tcp.queue.borrow().len(), 7, "what comes after");
        assert_eq!(e.rx.again.load(Relaxed), 10);

        let e = receiving(tx::DOWNING);
        assert_eq!(reads(&e, 8), (Received::Bytes(3), mode::PREFIX));
        assert!(word(&e).has(rx::PAST));
        assert_eq!(reads(&e, 8), (Received::Empty, mode::PREFIX));
        assert!(!e.rx.has_news(&e.memory()));
        records(&e, takeover::DOWN, daemon);
        assert_eq!(reads(&e, 8), (Received::Bytes(8), mode::RING));
    }
    // Whatever it then says is news.
    for phase in [tx::DOWN, tx::RESUMED, tx::BROKEN, tx::ENDED] {
        let e = receiving(tx::DOWNING);
        assert_eq!(reads(&e, 3), (Received::Bytes(3), mode::PREFIX));
        e.sender_says(FIRST, phase);
        assert!(e.rx.has_news(&e.memory()));
        let now = if phase == tx::RESUMED {
            mode::TCP
        } else {
            mode::RING
        };
        assert_eq!(reads(&e, 1).1, now, "{phase:?}");
        // (Not while bytes come before it.)
        let e = receiving(tx::DOWNING);
        assert_eq!(recv(&e, 2), Received::Bytes(2));
        e.sender_says(FIRST, phase);
        assert!(!e.rx.has_news(&e.memory()));
    }
}

/// It was killed before it had recorded anything: the ring is all there is. An error of TCP comes after it.
#[test]
fn the_sender_is_gone() {
    let e = receiving(tx::DOWNING);
    e.tcp.ended.set(true);
    assert_eq!(reads(&e, 20), (Received::Bytes(13), mode::RING));
    let e = receiving(tx::DOWNING);
    assert_eq!(reads(&e, 3), (Received::Bytes(3), mode::PREFIX));
    e.tcp.error.set(libc::ECONNRESET);
    assert_eq!(reads(&e, 20), (Received::Bytes(10), mode::RING));
    assert_eq!(e.rx.error.get(), libc::ECONNRESET);
    // An error that was kept before: TCP is over.
    let e = receiving(tx::DOWNING);
    assert_eq!(reads(&e, 3), (Received::Bytes(3), mode::PREFIX));
    e.rx.error.put(libc::ECONNRESET);
    assert_eq!(reads(&e, 20), (Received::Bytes(10), mode::RING));
    // After its own SHUT_RD an empty queue says nothing.
    let e = receiving(tx::DOWNING);
    assert_eq!(recv(&e, 3), Received::Bytes(3));
    e.rx.shut.store(1, Relaxed);
    e.tcp.ended.set(true);
    assert_eq!(reads(&e, 20), (Received::Empty, mode::PREFIX));
}

/// It has shut TCP down with a part of the ring there.
#[test]
fn the_sender_ends_with_a_part_on_tcp() {
    let e = receiving(tx::BROKEN);
    records(&e, takeover::PLAIN, false);
    e.arrives(&bytes(3, 7));
    e.tcp.ended.set(true);
    assert_eq!(reads(&e, 20), (Received::Bytes(13), mode::TCP));
    assert!(e.tcp.queue.borrow().is_empty());
    // A receiver that leaves then cannot have the rest, and reads on.
    for read in [2, 3] {
        let e = receiving(tx::UP);
        assert_eq!(recv(&e, 2), Received::Bytes(2));
        assert_eq!(revoke(&e), Revoked::Pending);
        if read == 3 {
            let mut b = [0];
            lane::half::Port::tcp_recv(&e.tcp, b.as_mut_ptr(), 1, false).unwrap();
            e.rx.tcp_pos.add(1, Relaxed);
        }
        e.sender_says(FIRST, tx::BROKEN);
        records(&e, takeover::PLAIN, false);
        e.arrives(&bytes(3, 7));
        e.tcp.ended.set(true);
        assert_eq!(revoke(&e), Revoked::Impossible);
        let left = 13 - read as usize;
        assert_eq!(recv(&e, 20), Received::Bytes(left), "{read}");
    }
}

/// A call that can do without leaving, beside a sender that was killed on its way: prefix and ring are read.
#[test]
fn the_sender_is_killed_on_its_way() {
    for (read, there) in [(2, 0), (2, 4), (3, 0), (3, 4)] {
        let e = receiving(tx::UP);
        assert_eq!(recv(&e, 2), Received::Bytes(2));
        e.sender_says(FIRST, tx::DOWNING);
        if read == 3 {
            assert_eq!(reads(&e, 1), (Received::Bytes(1), mode::PREFIX));
        }
        records(&e, takeover::PLAIN, false);
        e.arrives(&bytes(3, 3 + there));
        e.tcp.ended.set(true);
        let attempt = Attempt {
            tx_done: true,
            over: true,
            option: true,
            waited: 100,
        };
        let step = attempt.step(&e.rx, &e.memory(), &e.tcp);
        assert_eq!(step, Step::GoesOn, "{read} {there}");
        let left = 13 - read;
        assert_eq!(recv(&e, 20), Received::Bytes(left), "{read} {there}");
        assert!(e.tcp.queue.borrow().is_empty());
    }
}

/// A sender that answers a revocation is UP until it is through. Its answer is not withdrawn, also if the prefix is unread: it
/// brings the ring to TCP.
#[test]
fn an_answer_is_not_withdrawn() {
    for there in [0, 4] {
        let e = receiving(tx::UP);
        assert_eq!(recv(&e, 2), Received::Bytes(2));
        assert_eq!(revoke(&e), Revoked::Pending);
        records(&e, takeover::PLAIN, false);
        e.arrives(&bytes(3, 3 + there));
        assert!(!e.rx.go_on(&e.memory()) && word(&e).has(rx::REVOKED));
        e.arrives(&bytes(3 + there, 13));
        e.sender_says(FIRST, tx::RESUMED);
        assert_eq!(revoke(&e), Revoked::Clear);
        assert_eq!(e.tcp.queue.borrow().len(), 11);
    }
}

/// A daemon goes by the revocation that there is now, and not by what an end had recorded that was killed in its answer to a
/// former one.
#[test]
fn a_daemon_answers_the_present_revocation() {
    let e = sending(false, rx::PAST | rx::REVOKED);
    e.their_rx().revoked.store(Cursor::new(50), Relaxed);
    e.reads(50);
    let own = &e.ours().rx[L];
    own.takeover_at.store(Cursor::new(20), Relaxed);
    let word = TakeoverWord::new(FIRST, takeover::PLAIN);
    own.takeover.store(word, Relaxed);
    e.takeover(FIRST, takeover::TAKEN);
    let (t, m) = (TxState::default(), e.taken());
    assert!(matches!(t.adopt(&m, &e.tcp, TAG), Ok(Adopted::Ring)));
    t.down(&m, &e.tcp).unwrap();
    assert_eq!((e.on_tcp(), e.state().phase()), (50, tx::RESUMED));
}

/// A daemon of an earlier version has no part in this: the end does not say that it says `PAST`. If one goes on with a frame
/// where the end has recorded none, the frame is what counts.
#[test]
fn beside_an_earlier_daemon() {
    let e = Alone::beside(false, RING, 4);
    assert_eq!(e.ours().rx[L].marks.load(Relaxed), marks::KEPT);
    let e = Alone::new(false);
    assert_ne!(e.ours().rx[L].marks.load(Relaxed), marks::KEPT);
    for (phase, daemon) in [(tx::DOWN, false), (tx::ENDED, false), (tx::DOWNING, true)] {
        let e = receiving(phase);
        records(&e, takeover::PLAIN, false);
        if daemon {
            records(&e, takeover::DOWN, true);
        }
        assert_eq!(reads(&e, 8), (Received::Bytes(8), mode::RING), "{phase:?}");
    }
}

/// In the so many-th ring of the doorbell from here.
fn at_ring(tcp: usize, n: u32, f: impl FnOnce() + 'static) {
    // SAFETY: the end outlives its send.
    let then = unsafe { &(*(tcp as *const Tcp)).then };
    *then.borrow_mut() = Some(match n {
        1 => Box::new(f),
        _ => Box::new(move || at_ring(tcp, n - 1, f)) as Box<dyn FnOnce()>,
    });
}

/// A send meets a wish that its direction goes down, and TCP takes a part: what the receiver may have read by then stays sent,
/// also if it leaves in that very moment.
#[test]
fn a_send_that_goes_down() {
    let e = sending(false, rx::WANT_DOWN);
    e.tcp.room.set(40);
    // (It rings for the bytes, for the intent, and because TCP is full.)
    let (tcp, word) = (
        std::ptr::from_ref(&e.tcp) as usize,
        std::ptr::from_ref(&e.their_rx().word) as usize,
    );
    at_ring(tcp, 3, move || {
        // SAFETY: the client's memory is never unmapped.
        let word = unsafe { &*(word as *const Shared<RxWord>) };
        let leaves = rx::READY | rx::PAST | rx::REVOKED;
        word.store(RxWord::new(FIRST, leaves), Relaxed);
    });
    let sent = e.send(50);
    assert!(e.tcp.then.borrow().is_none());
    assert_eq!((sent, e.head()), (Sent::Bytes(50), 150));
    assert!(e.tx.must_flush(&e.memory()));
}

/// TCP takes nothing: a receiver that waits for the record is told.
#[test]
fn a_blocked_way_down_is_told() {
    for flags in [rx::READY, rx::PAST] {
        let e = sending(false, flags);
        e.tcp.room.set(0);
        let n = publishes(&e, || {
            e.tx.down(&e.memory(), &e.tcp).unwrap();
        });
        assert_eq!(n, 2, "the intent, and the record");
    }
    let e = receiving(tx::DOWNING);
    assert_eq!(reads(&e, 3), (Received::Bytes(3), mode::PREFIX));
    for what in [takeover::PLAIN, takeover::DOWN] {
        records(&e, what, false);
        assert!(e.rx.has_news(&e.memory()));
    }
}

/// An end that has revoked takes a part of a frame, and TCP ends: the ring is read, and the frame's bytes never.
#[test]
fn a_part_of_a_frame_is_no_prefix() {
    let e = receiving(tx::DOWNING);
    assert_eq!(reads(&e, 3), (Received::Bytes(3), mode::PREFIX));
    assert_eq!(revoke(&e), Revoked::Pending);
    e.sender_says(FIRST, tx::BROKEN);
    e.arrives(&down(0, 10)[..20]);
    assert_eq!(revoke(&e), Revoked::Pending);
    assert!(e.tcp.queue.borrow().is_empty());
    e.tcp.ended.set(true);
    assert_eq!(revoke(&e), Revoked::Impossible);
    assert_eq!(reads(&e, 20), (Received::Bytes(10), mode::RING));
}

/// On what stands for a frame, the receiver leaves as on a frame.
#[test]
fn the_receiver_leaves() {
    for (phase, r) in [
        (tx::RESUMED, Revoked::Pending), // (the repeated bytes are on their way)
        (tx::BROKEN, Revoked::Impossible),
        (tx::DOWNING, Revoked::Pending),
    ] {
        let e = receiving(tx::DOWNING);
        records(&e, takeover::PLAIN, false);
        assert_eq!(reads(&e, 8), (Received::Bytes(8), mode::LAST));
        e.sender_says(FIRST, phase);
        assert_eq!(revoke(&e), r, "{phase:?}");
        if phase == tx::RESUMED {
            e.arrives(&bytes(3, 13));
            assert_eq!(revoke(&e), Revoked::Clear);
            assert_eq!(e.tcp.queue.borrow().len(), 5, "for the next owner");
        }
    }
    // `PAST` stays said.
    let e = receiving(tx::UP);
    assert_eq!(recv(&e, 8), Received::Bytes(8));
    assert_eq!(revoke(&e), Revoked::Pending);
    assert!(word(&e).has(rx::PAST));
    assert!(e.rx.go_on(&e.memory()) && word(&e).has(rx::PAST));
    assert_eq!(e.ours().rx[L].revoked.load(Relaxed), Cursor::new(5));
}
