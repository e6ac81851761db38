//! How a lane ends.

use crate::bench::*;
use crate::sides::*;
use lane::abi::{rx, tx, RxWord, TxWord};
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::engine::{Control, Event, Fault};
use underpass_rdma::wire::{flag, Body};

fn fresh() -> Side {
    Side::new(Bench::new(config(true), 1))
}

fn up() -> Side {
    let mut s = fresh();
    s.up();
    s.b.happened();
    s
}

fn close(s: &Side) -> Control {
    let (token, from) = (TOKEN, s.id);
    Control::Close { token, from }
}

/// The end is said until it is acknowledged; the lane is gone when the peer has said the same, and its rings are free.
#[test]
fn both_ends_say_it() {
    let mut s = fresh();
    s.incoming();
    s.b.happened();
    let rings = s.b.host.placed.clone();
    s.b.pair.remove(s.id);
    s.b.settle();
    assert_eq!(s.b.controls(), [close(&s)]);
    s.b.later(MS);
    s.b.later(20 * MS);
    let all = s.b.controls();
    assert!(
        !all.is_empty() && all.iter().all(|m| *m == close(&s)),
        "{all:?}"
    );
    let token = s.id;
    s.b.says(Control::CloseAck { token });
    s.b.later(30 * MS);
    assert_eq!((s.b.controls(), s.b.happened()), (vec![], vec![]));
    assert_eq!(s.b.host.freed, []);
    let from = TOKEN;
    s.b.says(Control::Close { token, from });
    assert_eq!(s.b.controls(), [Control::CloseAck { token: from }]);
    let lane = s.id;
    let closed = Event::PeerClosed { lane, used: true };
    assert_eq!(s.b.happened(), [closed, Event::Removed { lane }]);
    assert_eq!(s.b.host.freed, rings);
    assert_eq!(s.b.pair.links()[0].lanes, 0);
    // It is acknowledged again, if the acknowledgement was lost.
    s.b.says(Control::Close { token, from });
    assert_eq!(s.b.controls(), [Control::CloseAck { token: from }]);
    assert_eq!(s.b.happened(), []);
}

/// The peer says it first: once, whatever it repeats, and not by somebody else.
#[test]
fn the_peer_first() {
    let mut s = fresh();
    let (token, lane) = (s.id, s.id);
    s.b.says(Control::Close {
        token,
        from: TOKEN + 1,
    });
    assert_eq!(
        (s.b.controls(), s.b.happened().len()),
        (vec![], 2),
        "not of this lane"
    );
    for _ in 0..2 {
        s.b.says(Control::Close { token, from: TOKEN });
    }
    let ack = Control::CloseAck { token: TOKEN };
    assert_eq!(s.b.controls(), [ack, ack]);
    assert_eq!(s.b.happened(), [Event::PeerClosed { lane, used: false }]);
    s.b.pair.remove(s.id);
    s.b.settle();
    assert_eq!(s.b.controls(), [close(&s)]);
    s.b.says(Control::CloseAck { token });
    assert_eq!(s.b.happened(), [Event::Removed { lane }]);
}

/// A sender whose peer's reader is gone is told so; who might ask is not invited any more, and who asks is refused.
#[test]
fn the_reader_is_gone() {
    let mut s = up();
    let (token, from, lane) = (s.id, TOKEN, s.id);
    s.b.says(Control::Close { token, from });
    assert_eq!(s.b.happened(), [Event::PeerClosed { lane, used: true }]);
    assert_eq!(
        s.shown(),
        RxWord::new(e(1), rx::READY | rx::ACCEPTED | rx::CLOSED)
    );
    let mut s = fresh();
    s.peer_ready(e(1));
    s.b.says(Control::Close { token: s.id, from });
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY | rx::WANT_DOWN));
    s.ask(e(1), RING, 0);
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY | rx::REVOKED));
    // Nothing more is said of it.
    s.reader(e(1), rx::READY);
    assert_eq!(s.received(), []);
}

/// A lane that the peer does not know is gone at once, without a word.
#[test]
fn never_connected() {
    let mut s = fresh();
    let lane = s.b.pair.open(s.b.clients[0].id, 5).expect("a lane");
    s.b.settle();
    s.b.pair.remove(lane);
    s.b.settle();
    assert_eq!(
        (s.b.controls(), s.b.happened().last()),
        (vec![], Some(&Event::Removed { lane }))
    );
}

/// How the sender came down is said first, over a link; with requests in flight nothing is said of the end.
#[test]
fn last_words() {
    let mut s = up();
    s.b.world.set_wire(0, false);
    let down = TxWord::new(e(1), tx::DOWN);
    s.b.app().tx[0].state.store(down, Relaxed);
    s.b.pair.remove(s.id);
    s.b.settle();
    assert_eq!((s.received(), s.b.controls()), (vec![], vec![]));
    s.b.world.set_wire(0, true);
    s.b.later(MS / 4);
    assert_eq!(s.last_snapshot().expect("a snapshot").tx_phase, tx::DOWN);
    assert_eq!(s.b.controls(), [close(&s)]);
}

/// Without a link there is nobody to say it to.
#[test]
fn last_words_without_a_link() {
    let mut s = up();
    s.b.pair.set_rail(s.b.rails[0], false);
    let dead = Control::QpDead { link: s.no };
    s.b.peer.destroy(s.no);
    let link = s.no;
    s.b.says(Control::QpDead { link });
    s.b.says(Control::QpDeadAck { link });
    assert!(s.b.controls().contains(&dead));
    let down = TxWord::new(e(1), tx::DOWN);
    s.b.app().tx[0].state.store(down, Relaxed);
    s.b.pair.remove(s.id);
    s.b.settle();
    assert_eq!(s.b.controls(), [close(&s)]);
}

/// A lane that has failed says so, once, and nothing else; it ends like others.
#[test]
fn a_lane_that_has_failed() {
    let mut s = up();
    s.b.app().heads[0].store(c(5000), Relaxed);
    s.b.publish();
    let wanted = Fault::App("a head beyond the ring");
    assert_eq!(s.fault(), Some(wanted));
    let said = s.received();
    assert!(matches!(said[..], [Body::Cdc(c)] if c.flags & flag::ABORT != 0));
    s.sender(e(1), tx::DOWN);
    s.reader(e(1), rx::READY);
    assert_eq!(s.received(), []);
    s.say(Body::Landed {
        epoch: e(1),
        head: c(9999),
    });
    assert_eq!(s.fault(), None, "it is not listened to");
    s.b.pair.remove(s.id);
    s.b.settle();
    assert_eq!((s.received(), s.b.controls()), (vec![], vec![close(&s)]));
}

/// All bytes have landed: said when the peer's daemon says so, which it is asked for, and once. Then they are read, of which
/// it is to tell at once.
#[test]
fn finished() {
    let mut s = up();
    s.put(RING, 0, 10);
    s.received();
    s.b.pair.finish(s.id);
    s.b.settle();
    let said = s.last_snapshot().expect("a snapshot");
    let asks = flag::WANT_LANDED | flag::WANT_SPACE;
    assert_eq!((said.flags, said.head), (asks, c(10)));
    assert_eq!(s.b.happened(), []);
    s.say(Body::Landed {
        epoch: e(1),
        head: c(9),
    });
    assert_eq!(s.b.happened(), []);
    s.say(Body::Landed {
        epoch: e(1),
        head: c(10),
    });
    let (lane, head) = (s.id, c(10));
    assert_eq!(s.b.happened(), [Event::Flushed { lane, head }]);
    s.b.pair.finish(s.id);
    s.b.settle();
    s.b.publish();
    assert_eq!((s.received(), s.b.happened()), (vec![], vec![]));
    for (cursor, happens) in [(9, vec![]), (10, vec![Event::Asked])] {
        s.says.cursor = c(cursor);
        s.snapshot();
        assert_eq!(s.b.happened(), happens);
    }
}

/// The application has ended: whether it has left bytes unread, of which its kernel does not know; its peer is told that
/// nobody reads.
#[test]
fn an_application_that_has_ended() {
    let received = |read| {
        let mut s = fresh();
        s.incoming();
        s.says.head = c(10);
        s.snapshot();
        s.read_to(read);
        s.received();
        s
    };
    for (read, left) in [(7, true), (10, false)] {
        let mut s = received(read);
        assert_eq!(s.b.pair.reader_gone(s.id), left);
        s.b.settle();
        let said = s.last_snapshot().expect("a snapshot");
        assert!(said.rx_flags.has(rx::CLOSED) && said.cursor == c(read));
    }
    // What comes on TCP is known there.
    for read in [0, 7] {
        let mut s = received(read);
        s.b.app().rx[0].revoked.store(c(read), Relaxed);
        s.reader(e(1), rx::READY | rx::REVOKED);
        assert!(!s.b.pair.reader_gone(s.id));
    }
    let mut s = received(7);
    s.says.tx_phase = tx::DOWN;
    s.snapshot();
    assert!(!s.b.pair.reader_gone(s.id));
    let mut s = fresh();
    assert!(!s.b.pair.reader_gone(s.id));
}

/// A lane on TCP has nothing on its way; one that asks has to wait for the answer.
#[test]
fn finished_on_tcp() {
    let mut s = fresh();
    s.b.happened();
    s.b.pair.finish(s.id);
    s.b.settle();
    let lane = s.id;
    let flushed = |head| Event::Flushed { lane, head };
    assert_eq!(s.b.happened(), [flushed(c(0))]);
    let mut s = fresh();
    s.peer_ready(e(1));
    s.ask(e(1), RING, 7);
    s.answer_ring(1, 0);
    s.b.happened();
    s.received();
    s.b.pair.finish(s.id);
    s.b.settle();
    assert_eq!(s.b.happened(), []);
    s.answer_switch(e(1), 1, true);
    let said = s.last_snapshot().expect("a snapshot");
    assert_eq!((said.flags, said.head), (flag::WANT_LANDED, c(7)));
    s.say(Body::Landed {
        epoch: e(1),
        head: c(7),
    });
    assert_eq!(s.b.happened(), [flushed(c(7))]);
}

/// The daemon takes a direction down: what the application puts there later is not sent, and how it came down is what
/// the daemon says.
#[test]
fn taken_down() {
    let mut s = up();
    s.put(RING, 0, 10);
    s.says.cursor = c(4);
    s.snapshot();
    s.received();
    assert_eq!(s.b.pair.take_down(s.id, e(2)), None);
    assert_eq!(s.b.pair.take_down(s.id, e(1)), Some((e(1), c(4))));
    s.b.settle();
    assert_eq!(s.last_snapshot().expect("a snapshot").tx_phase, tx::DOWNING);
    assert_eq!(s.b.pair.take_down(s.id, e(1)), None);
    s.put(RING, 10, 20);
    s.sender(e(1), tx::DOWN);
    assert_eq!((s.received(), s.b.pair.is_up(s.id)), (vec![], false));
    s.b.pair.is_down(s.id, e(2), tx::RESUMED);
    s.b.settle();
    assert_eq!(s.received(), []);
    s.b.pair.is_down(s.id, e(1), tx::RESUMED);
    s.b.settle();
    assert_eq!(s.last_snapshot().expect("a snapshot").tx_phase, tx::RESUMED);
    s.b.pair.is_down(s.id, e(1), tx::DOWN);
    s.b.settle();
    assert_eq!(s.received(), []);
}

/// The pair is given up: whoever is on a ring is asked down, who asks is refused, who might ask is not invited; a switch
/// that the peer may have taken is refused as well.
#[test]
fn abandoned() {
    let mut s = up();
    s.b.pair.abandon(&mut s.b.host);
    assert_eq!(
        s.shown(),
        RxWord::new(e(1), rx::READY | rx::ACCEPTED | rx::WANT_DOWN)
    );
    let mut s = fresh();
    s.peer_ready(e(1));
    s.b.pair.abandon(&mut s.b.host);
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY | rx::REVOKED));
    let mut s = fresh();
    s.b.pair.abandon(&mut s.b.host);
    assert_eq!(s.shown(), RxWord::default());
    for placed in [false, true] {
        let mut s = fresh();
        s.peer_ready(e(1));
        s.ask(e(1), RING, 0);
        if placed {
            s.answer_ring(1, 0);
        }
        s.b.happened();
        s.b.pair.abandon(&mut s.b.host);
        s.b.take();
        assert_eq!(s.fault(), None);
        assert_eq!(s.shown(), RxWord::new(e(1), rx::READY | rx::REVOKED));
    }
}
