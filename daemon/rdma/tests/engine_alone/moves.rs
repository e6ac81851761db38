//! Which link a lane goes over, and what becomes of it when that link dies.

use crate::bench::*;
use crate::sides::*;
use lane::abi::{rx, tx, RxWord};
use underpass_rdma::engine::{Config, Control, Event, LinkId};
use underpass_rdma::wire::{flag, Body};

/// A lane with two links over two rails, and the keys for both.
fn two() -> (Side, [LinkId; 2]) {
    let mut s = Side::new(Bench::new(config(true), 2));
    let links = [s.no, s.b.link()];
    s.tell_key(links[1]);
    links.iter().for_each(|no| drop(s.b.peer.received(*no)));
    (s, links)
}

/// A link dies with bytes in flight: they are sent again over the other one, but only after the peer has said that its
/// end is destroyed, too.
#[test]
fn a_link_dies() {
    let (mut s, [one, other]) = two();
    s.up();
    assert_eq!(s.b.pair.link_of(s.id), Some(one));
    s.put(RING, 0, 10);
    s.say(Body::Landed {
        epoch: e(1),
        head: c(10),
    });
    s.received();
    s.b.world.set_wire(0, false);
    s.put(RING, 10, 500);
    s.b.pair.set_rail(s.b.rails[0], false);
    s.b.settle();
    s.no = other;
    assert_eq!(s.received(), []);
    s.b.peer.destroy(one);
    s.b.says(Control::QpDeadAck { link: one });
    let said = s.last_snapshot().expect("a snapshot");
    assert_eq!((said.head, said.flags), (c(500), flag::VALIDATE));
    assert_eq!(s.b.pair.link_of(s.id), Some(other));
    let all: Vec<u8> = (10..500).map(|i| i as u8).collect();
    assert_eq!(s.arrived(10, 490), all);
    s.put(RING, 500, 510);
    assert_eq!(s.last_snapshot().expect("a snapshot").flags, 0);
}

/// A better link is one with two lanes fewer, or with a key that this one lacks.
#[test]
fn better_links() {
    let mut b = Bench::new(config(true), 2);
    let one = b.link();
    let lanes: Vec<_> = (0..4).map(|slot| b.lane(slot)).collect();
    let on = |b: &Bench, no| {
        lanes
            .iter()
            .filter(|l| b.pair.link_of(**l) == Some(no))
            .count()
    };
    assert_eq!(on(&b, one), 4);
    let two = b.link();
    b.settle();
    assert_eq!((on(&b, one), on(&b, two)), (2, 2));
    let views = b.pair.links();
    assert_eq!((views[0].lanes, views[1].lanes), (2, 2));
}

/// A lane goes over the rail that suits it best, however many others do, over another one while that is down, and back.
#[test]
fn the_rail_that_suits() {
    let mut b = Bench::new(config(true), 2);
    let links = [b.link(), b.link()];
    let lanes: Vec<_> = (0..4).map(|slot| b.lane(slot)).collect();
    let on = |b: &Bench, no| {
        let of = |l: &&u32| b.pair.link_of(**l) == Some(no);
        lanes.iter().filter(of).count()
    };
    b.settle();
    assert_eq!(links.map(|no| on(&b, no)), [2, 2]);
    let rails = links.map(|no| {
        let views = b.pair.links();
        let of = views.iter().find(|v| v.link == no);
        of.expect("a link").rail
    });
    // As long as only the worse one is ranked, that is the better one.
    for (rank, rail, expected) in [(3, rails[0], [4, 0]), (1, rails[1], [0, 4])] {
        lanes.iter().for_each(|l| b.pair.prefer(*l, rail, rank));
        b.settle();
        assert_eq!(links.map(|no| on(&b, no)), expected);
    }
    lanes[..3]
        .iter()
        .for_each(|l| b.pair.prefer(*l, rails[0], 0));
    b.settle();
    assert_eq!(links.map(|no| on(&b, no)), [3, 1]);
    // Equal ranks are balanced, of lanes that have them.
    lanes[..2]
        .iter()
        .for_each(|l| b.pair.prefer(*l, rails[1], 0));
    b.settle();
    assert_eq!(links.map(|no| on(&b, no)), [2, 2]);
    b.pair.set_rail(rails[1], false);
    b.peer.destroy(links[1]);
    b.says(Control::QpDeadAck { link: links[1] });
    b.settle();
    assert_eq!(on(&b, links[0]), 4);
    b.pair.set_rail(rails[1], true);
    let back = b.link();
    b.settle();
    assert_eq!((on(&b, links[0]), on(&b, back)), (2, 2));
}

/// A rail that suits, and whose links fail, gets its lanes back later each time.
#[test]
fn a_rail_that_fails_again_and_again() {
    let mut b = Bench::new(config(true), 2);
    let links = [b.link(), b.link()];
    let lane = b.lane(0);
    let best = b.pair.links()[0].rail;
    b.pair.prefer(lane, best, 0);
    b.settle();
    let mut best_link = links[0];
    assert_eq!(b.pair.link_of(lane), Some(best_link));
    let mut waits = Vec::new();
    for _ in 0..3 {
        b.pair.qp_failed(
            best,
            b.pair
                .links()
                .iter()
                .find(|v| v.link == best_link)
                .expect("a link")
                .qpn,
        );
        b.peer.destroy(best_link);
        b.says(Control::QpDeadAck { link: best_link });
        b.settle();
        assert_eq!(b.pair.link_of(lane), Some(links[1]));
        b.later(MS);
        best_link = b.link();
        let mut waited = 0;
        while b.pair.link_of(lane) != Some(best_link) {
            b.later(MS);
            b.pair.prefer(lane, best, 0); // (as traffic does)
            b.settle();
            waited += 1;
            assert!(waited < 1000);
        }
        waits.push(waited);
    }
    assert!(
        waits[0] > 2 && waits[1] > waits[0] && waits[2] > waits[1],
        "{waits:?}"
    );
}

/// The lane's link has no key for its ring, the other one has.
#[test]
fn a_link_with_a_key() {
    let mut s = Side::new(Bench::new(config(true), 2));
    s.up();
    let other = s.b.link();
    s.b.publish();
    assert_eq!(s.b.pair.link_of(s.id), Some(s.no));
    s.tell_key(other);
    s.b.publish();
    assert_eq!(s.b.pair.link_of(s.id), Some(s.no));
    let leaves = Body::DeleteRkey { reply: false };
    s.b.peer.say(s.no, REGION, leaves);
    s.b.settle();
    s.tell_key(other);
    s.b.publish();
    assert_eq!(s.b.pair.link_of(s.id), Some(other));
    let views = s.b.pair.links();
    assert_eq!((views[0].lanes, views[1].lanes), (0, 1));
}

/// A lane with requests in flight does not move before they are done.
#[test]
fn not_while_requests_are_in_flight() {
    let (mut s, [one, other]) = two();
    s.up();
    s.b.world.set_wire(0, false);
    s.put(RING, 0, 300);
    let region = REGION;
    s.b.peer
        .say(other, region, Body::DeleteRkey { reply: false });
    s.b.settle();
    s.tell_key(other);
    s.b.app().heads[0].store(c(600), std::sync::atomic::Ordering::Relaxed);
    s.b.publish();
    assert_eq!(s.b.pair.link_of(s.id), Some(one));
    assert_eq!(s.b.peer.bodies(other), []);
    s.b.world.set_wire(0, true);
    s.b.later(MS / 4);
    assert_eq!(s.b.pair.link_of(s.id), Some(other));
    s.no = other;
    let said = s.last_snapshot().expect("a snapshot");
    assert_eq!((said.head, said.flags), (c(600), 0));
}

/// There are bytes to send, and no link has a key for them: the application is asked to go down, after a while.
#[test]
fn a_key_that_never_comes() {
    let mut s = Side::new(Bench::new(config(true), 1));
    s.up();
    let region = REGION;
    s.b.peer
        .say(s.no, region, Body::DeleteRkey { reply: false });
    s.b.settle();
    s.put(RING, 0, 1000);
    let word = RxWord::new(e(1), rx::READY | rx::ACCEPTED);
    s.b.later(30 * MS);
    s.b.peer.say(s.no, s.no, Body::TestLink { reply: true });
    s.b.settle();
    assert_eq!((s.shown(), s.received()), (word, vec![]));
    s.b.happened();
    s.b.later(30 * MS);
    assert_eq!(
        s.shown(),
        RxWord::new(e(1), rx::READY | rx::ACCEPTED | rx::WANT_DOWN)
    );
    assert_eq!(s.b.happened(), [Event::Asked]);
    // Few bytes need no key.
    s.put(RING, 1000, 1000);
    s.b.later(MS);
    assert_eq!((s.b.happened(), s.received()), (vec![], vec![]));
}

/// Bytes that fit behind a message need no key.
#[test]
fn few_bytes_need_no_key() {
    let mut s = Side::new(Bench::new(config(true), 1));
    s.up();
    let region = REGION;
    s.b.peer
        .say(s.no, region, Body::DeleteRkey { reply: false });
    s.b.settle();
    s.put(RING, 0, 212);
    assert_eq!(s.last_snapshot().expect("a snapshot").head, c(212));
    s.put(RING, 212, 212 + 213);
    assert_eq!(s.received(), []);
}

/// The last link breaks: who is on a ring is asked to come down. It is not when one of two breaks.
#[test]
fn the_last_link() {
    let (mut s, [one, other]) = two();
    s.up();
    let word = |flags| RxWord::new(e(1), rx::READY | rx::ACCEPTED | flags);
    s.b.pair.set_rail(s.b.rails[1], false);
    s.b.settle();
    assert_eq!(s.shown(), word(rx::NONE));
    s.b.happened();
    s.b.pair.set_rail(s.b.rails[0], false);
    s.b.settle();
    assert_eq!(s.shown(), word(rx::WANT_DOWN));
    let (link, rail, why) = (one, s.b.rails[0], "the port is down");
    let down = Event::LinkDown { link, rail, why };
    assert_eq!(s.b.happened(), [down, Event::NoRail, Event::Asked]);
    // It stays so when there is a link again: the application has been told.
    for link in [one, other] {
        s.b.peer.destroy(link);
        s.b.says(Control::QpDeadAck { link });
    }
    s.b.pair.set_rail(s.b.rails[1], true);
    s.b.controls();
    s.no = s.b.link();
    assert_eq!(s.shown(), word(rx::WANT_DOWN));
    let all = s.b.happened();
    assert!(all.contains(&Event::RailBack), "{all:?}");
}

/// Without links nobody is invited, and who asks is refused.
#[test]
fn nobody_is_invited() {
    let mut s = Side::new(Bench::new(config(true), 1));
    s.peer_ready(e(1));
    s.b.pair.set_rail(s.b.rails[0], false);
    s.b.settle();
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY | rx::WANT_DOWN));
    s.ask(e(1), RING, 0);
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY | rx::REVOKED));
}

/// A switch was sent and not answered when the last link broke: asked about over the control channel, again and again;
/// the answer settles it.
#[test]
fn in_doubt() {
    for stands in [false, true] {
        let mut s = asking();
        let query = Control::SwitchQuery {
            token: TOKEN,
            from: s.id,
            epoch: e(1).get(),
            attempt: 1,
        };
        let count = |s: &mut Side| s.b.controls().iter().filter(|m| **m == query).count();
        assert_eq!(count(&mut s), 1);
        s.b.later(20 * MS);
        assert_eq!(count(&mut s), 1);
        s.b.happened();
        let answer = |attempt| Control::SwitchAnswer {
            token: s.id,
            epoch: e(1).get(),
            attempt,
            stands,
        };
        let (wrong, right) = (answer(2), answer(1));
        s.b.says(wrong);
        assert_eq!(s.b.happened(), []);
        s.b.says(right);
        let settled = Event::Settled { lane: s.id, stands };
        let all = s.b.happened();
        assert_eq!(all[0], settled);
        assert_eq!(s.b.pair.is_up(s.id), stands);
        let down = rx::READY | rx::ACCEPTED | rx::WANT_DOWN;
        let flags = if stands {
            down
        } else {
            rx::READY | rx::REVOKED
        };
        assert_eq!(s.shown(), RxWord::new(e(1), flags));
        s.b.says(right);
        assert_eq!(s.b.happened(), []);
    }
}

/// A switch that was sent, and the link that it went over is gone.
fn asking() -> Side {
    let mut s = Side::new(Bench::new(config(true), 1));
    s.peer_ready(e(1));
    s.ask(e(1), RING, 0);
    s.answer_ring(1, 0);
    s.b.pair.set_rail(s.b.rails[0], false);
    s.b.settle();
    s
}

/// Nobody answers: it waits, for as long as there may be an answer.
#[test]
fn in_doubt_for_long() {
    let mut s = asking();
    s.b.later(9_000 * MS);
    assert_eq!(s.fault(), None);
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY));
    s.b.pair.abandon(&mut s.b.host);
    s.b.take();
    assert_eq!(s.fault(), None);
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY | rx::REVOKED));
}

/// A switch that was not sent yet is refused when its time is over, or when there is no link.
#[test]
fn not_asked_in_time() {
    let mut s = Side::new(Bench::new(
        Config {
            quiet_ns: 9_000 * MS,
            ..config(true)
        },
        1,
    ));
    s.peer_ready(e(1));
    s.ask(e(1), RING, 0);
    s.b.later(490 * MS);
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY));
    s.b.later(20 * MS);
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY | rx::REVOKED));
    assert_eq!(s.fault(), None);
}

/// What the peer's daemon is told of a switch of its own.
#[test]
fn asked_about() {
    let mut s = Side::new(Bench::new(config(true), 1));
    s.incoming();
    s.b.controls();
    for (token, epoch, attempt, stands) in [
        (s.id, 1, 1, true),
        (s.id, 1, 0, false),
        (s.id + 1, 1, 1, false),
        (s.id, 2, 1, false),
        (s.id, 1, 1, false),
    ] {
        let (from, epoch) = (TOKEN, e(epoch).get());
        s.b.says(Control::SwitchQuery {
            token,
            from,
            epoch,
            attempt,
        });
        let token = TOKEN;
        let answer = Control::SwitchAnswer {
            token,
            epoch,
            attempt,
            stands,
        };
        assert_eq!(s.b.controls(), [answer]);
    }
    // What was said not to stand is refused when it comes.
    s.reader(e(2), rx::READY);
    s.received();
    let (epoch, attempt, ok) = (e(2), 1, false);
    s.say(Body::Switch {
        epoch,
        attempt,
        tcp_pos: lane::abi::TcpPos::new(0),
        start: c(0),
    });
    assert_eq!(s.received(), [Body::SwitchReply { epoch, attempt, ok }]);
    assert_eq!(s.shown_sender().phase(), tx::UP);
}
