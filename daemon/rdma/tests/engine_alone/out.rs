//! The sending direction: what the application says, what the peer's reader says, and what follows.

use crate::bench::*;
use crate::sides::*;
use lane::abi::{rx, tx, Loc, RxFlags, RxWord};
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::engine::Fault;
use underpass_rdma::wire::Body;

fn up() -> Side {
    let mut s = Side::new(Bench::new(config(true), 1));
    s.up();
    s
}

const REFUSED: RxFlags = RxFlags::from_raw(rx::READY.raw() | rx::REVOKED.raw());

/// Few bytes go behind their snapshot, more are written before it; the reader's cursor is shown.
#[test]
fn bytes() {
    let mut s = up();
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY | rx::ACCEPTED));
    s.put(RING, 0, 100);
    let said = s.last_snapshot().expect("a snapshot");
    assert_eq!(
        (said.head, said.tx_epoch, said.tx_phase),
        (c(100), e(1), tx::UP)
    );
    assert_eq!((said.moves, said.flags), (1, 0));
    assert_eq!(s.arrived(0, 100), [0; 100], "they came behind the message");
    s.put(RING, 100, 1100);
    assert_eq!(s.last_snapshot().expect("a snapshot").head, c(1100));
    let all: Vec<u8> = (100..1100).map(|i| i as u8).collect();
    assert_eq!(s.arrived(100, 1000), all);
    s.says.cursor = c(600);
    s.snapshot();
    assert_eq!(s.b.proxy().cursors[0].load(Relaxed), c(600));
    assert_eq!(s.fault(), None);
}

/// A switch is refused, and not asked for, while the peer's reader is not ready, or says more than that it is.
#[test]
fn nobody_is_ready() {
    for flags in [rx::READY | rx::WANT_DOWN, rx::READY | rx::CLOSED, rx::NONE] {
        let mut s = Side::new(Bench::new(config(true), 1));
        (s.says.rx_epoch, s.says.rx_flags) = (e(1), flags);
        s.snapshot();
        assert_eq!(s.shown(), RxWord::new(e(1), flags));
        s.ask(e(1), RING, 0);
        assert_eq!(s.shown(), RxWord::new(e(1), REFUSED));
        assert_eq!(s.received(), []);
        // Once the application has seen it, the reader's own word is shown again.
        s.sender(e(0), tx::NONE);
        assert_eq!(s.shown(), RxWord::new(e(1), flags));
    }
}

/// It is asked for after the ring has a place, and shown as accepted when it is. A late answer changes nothing.
#[test]
fn a_switch() {
    let mut s = Side::new(Bench::new(config(true), 1));
    s.peer_ready(e(1));
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY));
    s.ask(e(1), RING, 0);
    let (moves, log2, from) = (1, 12, c(0));
    assert_eq!(s.received(), [Body::Ring { moves, log2, from }]);
    s.answer_ring(1, 0);
    let said = s.received();
    assert!(
        matches!(said[..], [Body::Switch { epoch, attempt: 1, tcp_pos, start }]
        if epoch == e(1) && tcp_pos.get() == 5 && start == c(0))
    );
    s.answer_switch(e(2), 1, true);
    s.answer_switch(e(1), 2, true);
    assert!(!s.b.pair.is_up(s.id));
    s.answer_switch(e(1), 1, false);
    assert_eq!(s.shown(), RxWord::new(e(1), REFUSED));
    s.answer_switch(e(1), 1, true);
    assert!(!s.b.pair.is_up(s.id));
    s.sender(e(0), tx::NONE);
    s.ask(e(1), RING, 0);
    let said = s.received();
    assert!(
        matches!(said[..], [Body::Switch { attempt: 2, .. }]),
        "{said:?}"
    );
    s.answer_switch(e(1), 2, true);
    assert!(s.b.pair.is_up(s.id));
    assert_eq!(s.fault(), None);
}

/// The peer has no memory for the first ring: refused, and not invited for a while.
#[test]
fn no_place() {
    let mut s = Side::new(Bench::new(config(true), 1));
    s.peer_ready(e(1));
    s.ask(e(1), RING, 0);
    s.received();
    s.say(Body::RingReply {
        moves: 1,
        place: None,
    });
    assert_eq!(s.shown(), RxWord::new(e(1), REFUSED));
    s.sender(e(0), tx::NONE);
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY | rx::WANT_DOWN));
    s.ask(e(1), RING, 0);
    assert_eq!(
        (s.shown(), s.received()),
        (RxWord::new(e(1), REFUSED), vec![])
    );
    s.sender(e(0), tx::NONE);
    s.b.later(1_000_000);
    s.b.publish();
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY));
    s.ask(e(1), RING, 0);
    let said = s.received();
    assert!(
        matches!(said[..], [Body::Ring { moves: 1, .. }]),
        "{said:?}"
    );
    s.answer_ring(1, 0);
    s.answer_switch(e(1), 2, true);
    assert!(s.b.pair.is_up(s.id));
}

/// What no application writes when it asks.
#[test]
fn impossible_requests() {
    let max_start = lane::abi::Cursor::START_MAX.get();
    let all: [Case; 6] = [
        (|s| s.ask(e(1), RING, start_at_max()), None),
        (
            |s| s.ask(e(1), RING, start_at_max() + 1),
            Some("a switch to an impossible place"),
        ),
        (|s| s.ask(e(1), loc(255, 12), 0), None),
        (
            |s| s.ask(e(1), loc(256, 12), 0),
            Some("a ring outside of its memory"),
        ),
        (
            |s| s.ask(e(1), Loc { chunk: 2, ..RING }, 0),
            Some("a ring outside of its memory"),
        ),
        (|s| s.ask(e(1), loc(0, 5), 0), Some("an impossible ring")),
    ];
    assert_eq!(max_start, start_at_max());
    for (asks, wanted) in all {
        let mut s = Side::new(Bench::new(config(true), 1));
        s.peer_ready(e(1));
        asks(&mut s);
        assert_eq!(s.fault(), wanted.map(Fault::App));
    }
}

fn start_at_max() -> u64 {
    lane::abi::Cursor::START_MAX.get()
}

/// A switch that begins before what was sent, or whose ring begins behind it.
#[test]
fn impossible_starts() {
    for (start, from, wanted) in [
        (100, 100, None),
        (99, 0, Some("a switch to an impossible place")),
        (100, 101, Some("a ring begins beyond the head")),
    ] {
        let mut s = up();
        s.put(RING, 0, 100);
        s.says.cursor = c(100);
        s.snapshot();
        s.sender(e(1), tx::RESUMED);
        s.peer_ready(e(2));
        s.ask(e(2), loc(1, 12), start);
        assert_eq!(
            s.fault(),
            None.or(wanted.filter(|_| start == 99)).map(Fault::App)
        );
        if start == 99 {
            continue;
        }
        drop(s);
        let mut s = Side::new(Bench::new(config(true), 1));
        s.peer_ready(e(1));
        s.ring(1, RING, from);
        s.b.app().heads[0].store(c(start), Relaxed);
        s.b.app().tx[0].up_start.store(c(start), Relaxed);
        s.sender(e(1), tx::UP);
        assert_eq!(s.fault(), wanted.map(Fault::App));
    }
}

/// What no peer says of its reader.
#[test]
fn impossible_readers() {
    let all: [Case; 11] = [
        (|s| s.says.cursor = c(100), None),
        (|s| s.says.cursor = c(101), Some("an impossible cursor")),
        (|s| s.says.cursor = c(49), Some("an impossible cursor")),
        (
            |s| s.says.rx_epoch = e(65_536),
            Some("readiness of another use of the lane"),
        ),
        (
            |s| s.says.rx_epoch = e(0),
            Some("readiness of another use of the lane"),
        ),
        (
            |s| s.says.rx_epoch = lane::abi::Epoch::NONE,
            Some("an impossible readiness"),
        ),
        (
            |s| s.says.rx_flags = RxFlags::from_raw(16),
            Some("an impossible readiness"),
        ),
        (
            |s| s.says.rx_flags = RxFlags::from_raw(64),
            Some("an impossible readiness"),
        ),
        (
            |s| s.says.rx_flags = RxFlags::from_raw(1 | 2 | 8 | 32),
            None,
        ),
        (
            |s| s.says.rx_epoch = e(2),
            Some("ready anew in the middle of a ring"),
        ),
        (
            |s| s.says.flags = underpass_rdma::wire::flag::ABORT,
            Some("it has failed the lane"),
        ),
    ];
    for (says, wanted) in all {
        let mut s = up();
        s.put(RING, 0, 100);
        s.says.cursor = c(50);
        s.snapshot();
        assert_eq!(s.fault(), None);
        says(&mut s);
        s.snapshot();
        assert_eq!(s.fault(), wanted.map(Fault::Peer));
    }
}

/// A readiness goes on from one epoch to the next, and not back.
#[test]
fn readiness_goes_back() {
    let mut s = Side::new(Bench::new(config(true), 1));
    s.peer_ready(e(5));
    s.peer_ready(e(7));
    assert_eq!(s.fault(), None);
    s.peer_ready(e(6));
    assert_eq!(s.fault(), Some(Fault::Peer("an impossible readiness")));
}

/// What the peer says of bytes that have landed, of this epoch, is shown; more than was sent is a lie.
#[test]
fn landed() {
    let mut s = up();
    s.put(RING, 0, 100);
    let landed = |s: &Side| s.b.proxy().rx[0].landed.load(Relaxed).cursor();
    let (epoch, head) = (e(2), c(50));
    s.say(Body::Landed { epoch, head });
    assert_eq!(landed(&s), c(0));
    for (head, shown) in [(50, 50), (40, 50), (100, 100)] {
        let (epoch, head) = (e(1), c(head));
        s.say(Body::Landed { epoch, head });
        assert_eq!(landed(&s), c(shown));
    }
    assert_eq!(s.fault(), None);
    let (epoch, head) = (e(1), c(101));
    s.say(Body::Landed { epoch, head });
    let wanted = Fault::Peer("it has been shown more than was sent");
    assert_eq!(s.fault(), Some(wanted));
}

/// An answer to a switch before it was sent.
#[test]
fn answered_before_it_was_asked() {
    let mut s = Side::new(Bench::new(config(true), 1));
    s.peer_ready(e(1));
    s.ask(e(1), RING, 0);
    s.answer_switch(e(1), 1, true);
    let wanted = Fault::Peer("an answer to a switch that was not sent");
    assert_eq!(s.fault(), Some(wanted));
}

/// A ring has one place.
#[test]
fn a_ring_in_two_places() {
    let mut s = up();
    s.answer_ring(1, 0);
    s.answer_ring(7, 4096);
    assert_eq!(s.fault(), None, "told twice, and of no ring");
    s.answer_ring(1, 4096);
    assert_eq!(s.fault(), Some(Fault::Peer("a ring in two places")));
}

/// Whoever comes down says how, once, and what follows is not sent.
#[test]
fn ways_down() {
    let mut s = up();
    s.sender(e(1), tx::DOWNING);
    assert_eq!(s.last_snapshot().expect("a snapshot").tx_phase, tx::DOWNING);
    s.sender(e(1), tx::DOWN);
    assert_eq!(s.last_snapshot().expect("a snapshot").tx_phase, tx::DOWN);
    s.sender(e(1), tx::DOWNING);
    s.put(RING, 0, 100);
    assert_eq!(s.received(), []);
    assert_eq!(s.fault(), None);
}

/// What could not go to TCP stays on the ring, and is sent.
#[test]
fn broken() {
    let mut s = up();
    s.sender(e(1), tx::DOWNING);
    s.put(RING, 0, 50);
    assert!(!s.b.pair.is_up(s.id));
    s.sender(e(1), tx::BROKEN);
    let said = s.last_snapshot().expect("a snapshot");
    assert_eq!((said.tx_phase, said.head), (tx::BROKEN, c(50)));
    assert!(s.b.pair.is_up(s.id));
    // Phases beyond that are nonsense, and so are earlier ones.
    for phase in [tx::ENDED, tx::RESUMED, lane::abi::TxPhase::from_raw(9)] {
        s.sender(e(1), phase);
        assert_eq!(s.received(), []);
    }
}

/// Heads go forwards, as far as the ring reaches behind the reader.
#[test]
fn heads() {
    for (head, wanted) in [
        (4096, None),
        (4097, Some("a head beyond the ring")),
        (9, Some("a head that goes back")),
    ] {
        let mut s = up();
        s.put(RING, 0, 10);
        s.b.app().heads[0].store(c(head), Relaxed);
        s.b.publish();
        assert_eq!(s.fault(), wanted.map(Fault::App));
    }
}
