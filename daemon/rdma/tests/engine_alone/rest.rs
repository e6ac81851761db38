//! What is said once, and what at once.

use crate::bench::*;
use crate::sides::*;
use lane::abi::{rx, tx, Cursor, RxWord, TxWord};
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::engine::{Config, Control, Event, Fault};
use underpass_rdma::wire::{flag, Body};

fn fresh() -> Side {
    Side::new(Bench::new(quiet(true), 1))
}

fn up() -> Side {
    let mut s = fresh();
    s.up();
    s
}

/// Was the doorbell rung since the last call? The application sleeps.
fn rung(s: &mut Side) -> bool {
    s.b.app().sleepers.0.store(1, Relaxed);
    !std::mem::take(&mut s.b.host.rung).is_empty()
}

/// Whatever a reader may wait for rings: a switch, bytes, a phase, a ring. What is said twice does not.
#[test]
fn a_reader_sleeps() {
    let mut s = fresh();
    s.reader(e(1), rx::READY);
    rung(&mut s);
    let (moves, log2, from) = (1, 12, c(0));
    s.say(Body::Ring { moves, log2, from });
    assert!(rung(&mut s), "a ring");
    s.say(Body::Switch {
        epoch: e(1),
        attempt: 1,
        tcp_pos: lane::abi::TcpPos::new(0),
        start: c(0),
    });
    assert!(rung(&mut s), "a switch");
    (s.says.tx_epoch, s.says.tx_phase, s.says.moves) = (e(1), tx::UP, 1);
    s.says.head = c(3);
    s.snapshot_with(b"abc");
    assert!(rung(&mut s), "bytes");
    s.says.tx_phase = tx::DOWNING;
    s.snapshot();
    assert!(rung(&mut s), "a phase");
    s.snapshot();
    assert!(!rung(&mut s));
}

/// Whatever a sender may wait for: an answer, its reader's cursor, what has landed.
#[test]
fn a_sender_sleeps() {
    let mut s = fresh();
    rung(&mut s);
    s.peer_ready(e(1));
    assert!(rung(&mut s), "an invitation");
    s.ask(e(1), RING, 0);
    s.answer_ring(1, 0);
    rung(&mut s);
    s.answer_switch(e(1), 1, true);
    assert!(rung(&mut s), "an answer");
    s.put(RING, 0, 10);
    assert!(!rung(&mut s));
    s.says.cursor = c(5);
    s.snapshot();
    assert!(rung(&mut s), "a cursor");
    s.snapshot();
    assert!(!rung(&mut s));
    let (epoch, head) = (e(1), c(7));
    s.say(Body::Landed { epoch, head });
    assert!(rung(&mut s), "landed");
    s.b.pair.abandon(&mut s.b.host);
    assert!(rung(&mut s), "asked to come down");
    assert!(s.b.pair.is_up(s.id));
}

/// While an application must not be invited it is not, and then at once.
#[test]
fn gated() {
    let mut s = fresh();
    s.b.pair.gate(s.id, true);
    s.peer_ready(e(1));
    let not = RxWord::new(e(1), rx::READY | rx::WANT_DOWN);
    assert_eq!(s.shown(), not);
    s.ask(e(1), RING, 0);
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY | rx::REVOKED));
    s.sender(e(0), tx::NONE);
    assert_eq!(s.shown(), not);
    s.b.pair.gate(s.id, false);
    s.b.settle();
    assert_eq!(s.shown(), RxWord::new(e(1), rx::READY));
    s.b.pair.gate(s.id, true);
    s.b.settle();
    assert_eq!(s.shown(), not);
}

/// The pair is given up: a request to come back without a frame is not passed on, and who could not go up anyhow is told
/// nothing new.
#[test]
fn abandoned() {
    let mut s = up();
    s.says.rx_flags = rx::READY | rx::REVOKED;
    s.snapshot();
    assert!(s.shown().has(rx::REVOKED));
    s.b.pair.abandon(&mut s.b.host);
    assert_eq!(
        s.shown(),
        RxWord::new(e(1), rx::READY | rx::ACCEPTED | rx::WANT_DOWN)
    );
    let mut s = fresh();
    (s.says.rx_epoch, s.says.rx_flags) = (e(1), rx::CLOSED);
    s.snapshot();
    s.b.pair.abandon(&mut s.b.host);
    assert_eq!(s.shown(), RxWord::new(e(1), rx::CLOSED));
    // A lane that has failed does not fail again.
    let mut s = fresh();
    s.peer_ready(e(1));
    s.ask(e(1), RING, 0);
    s.answer_ring(1, 0);
    s.says.flags = flag::ABORT;
    s.snapshot();
    assert!(s.fault().is_some());
    s.b.pair.abandon(&mut s.b.host);
    s.b.take();
    assert_eq!(s.fault(), None);
}

/// The pair is given up while an application waits for an answer, of a peer whose reader has closed meanwhile: it gets one.
#[test]
fn abandoned_while_asking() {
    let mut s = fresh();
    s.peer_ready(e(1));
    s.ask(e(1), RING, 0);
    s.says.rx_flags = rx::CLOSED;
    s.snapshot();
    s.b.pair.abandon(&mut s.b.host);
    let shown = s.shown();
    assert!(shown.epoch() == e(1) && shown.has(rx::REVOKED), "{shown:?}");
    assert_eq!(s.fault(), None);
}

/// Of a lane that is being removed nothing is reported but its end.
#[test]
fn removed_while_finishing() {
    for mut s in [up(), fresh()] {
        s.b.happened();
        s.b.pair.finish(s.id);
        s.b.pair.remove(s.id);
        s.b.settle();
        assert_eq!(s.b.happened(), []);
    }
}

/// The end of a lane is not said at every turn, nor again when it is removed again.
#[test]
fn removed_twice() {
    let mut s = fresh();
    s.b.pair.remove(s.id);
    s.b.publish();
    s.b.publish();
    assert_eq!(s.b.controls().len(), 1);
    let token = s.id;
    s.b.says(Control::CloseAck { token });
    s.b.pair.remove(s.id);
    s.b.later(30 * MS);
    assert_eq!(s.b.controls(), []);
}

/// The peer has removed the lane: it does not want to hear how the sender came down.
#[test]
fn no_last_words() {
    let mut s = up();
    let (token, from) = (s.id, TOKEN);
    s.b.says(Control::Close { token, from });
    s.b.controls();
    s.received();
    let down = TxWord::new(e(1), tx::DOWN);
    s.b.app().tx[0].state.store(down, Relaxed);
    s.b.pair.remove(s.id);
    s.b.settle();
    let close = Control::Close {
        token: TOKEN,
        from: s.id,
    };
    assert_eq!((s.received(), s.b.controls()), (vec![], vec![close]));
}

/// A lane whose link died with requests in flight can be removed.
#[test]
fn removed_after_a_link_died() {
    let mut s = up();
    s.b.world.set_wire(0, false);
    s.put(RING, 0, 1000);
    let link = s.no;
    s.b.pair.set_rail(s.b.rails[0], false);
    s.b.pair.remove(s.id);
    s.b.settle();
    let close = Control::Close {
        token: TOKEN,
        from: s.id,
    };
    assert!(
        !s.b.controls().contains(&close),
        "its writes may still land"
    );
    s.b.peer.destroy(link);
    s.b.says(Control::QpDead { link });
    s.b.settle();
    let all = s.b.controls();
    assert!(
        all.contains(&close) && all.contains(&Control::QpDeadAck { link }),
        "{all:?}"
    );
}

/// A link that only the control channel says to be dead.
#[test]
fn dead_by_the_channel() {
    let mut s = fresh();
    let (link, rail, why) = (s.no, s.b.rails[0], "the peer gave the link up");
    s.b.happened();
    s.b.says(Control::QpDead { link });
    assert_eq!(
        s.b.happened(),
        [Event::LinkDown { link, rail, why }, Event::NoRail]
    );
    assert!(s.b.controls().contains(&Control::QpDeadAck { link }));
}

/// What was written and is done is not written again over another link; what came behind a message is, until the peer
/// says that it has it.
#[test]
fn what_is_sent_again() {
    let mut s = Side::new(Bench::new(quiet(true), 2));
    let other = s.b.link();
    s.tell_key(other);
    s.b.peer.received(other);
    s.up();
    s.put(RING, 0, 1000);
    s.put(RING, 1000, 1050);
    s.b.pair.set_rail(s.b.rails[0], false);
    let link = s.no;
    s.b.peer.destroy(link);
    s.b.says(Control::QpDeadAck { link });
    let all = s.b.peer.received(other);
    let (m, data) = all.last().expect("a message");
    let again: Vec<u8> = (1000..1050).map(|i| i as u8).collect();
    assert_eq!(data, &again);
    assert!(matches!(m.body, Body::Cdc(c) if c.head == Cursor::new(1050)));
    let views = s.b.pair.links();
    assert_eq!((views.len(), views[0].lanes), (1, 1));
}

/// The link of one lane is gone at both ends: another lane goes on as it was.
#[test]
fn the_other_lane() {
    let mut s = Side::new(Bench::new(quiet(true), 2));
    s.b.lane(1);
    let other = s.b.link();
    s.b.settle();
    assert_eq!(s.b.pair.links()[1].lanes, 1);
    s.received();
    let stays = s.no;
    let id = s.id;
    let moved = if s.b.pair.link_of(id) == Some(stays) {
        other
    } else {
        stays
    };
    let rail = s.b.rail_of(moved);
    s.no = if moved == stays { other } else { stays };
    s.b.pair.set_rail(s.b.rails[rail], false);
    s.b.peer.destroy(moved);
    s.b.says(Control::QpDeadAck { link: moved });
    s.received();
    s.reader(e(1), rx::READY);
    assert_eq!(s.last_snapshot().expect("a snapshot").flags, 0);
}

/// With the control channel gone, what concerns a link is said over another one, and again only when it is due.
#[test]
fn without_the_channel() {
    let mut b = Bench::new(
        Config {
            retry_ns: 9 * MS,
            ..quiet(true)
        },
        2,
    );
    let [one, two] = [b.link(), b.link()];
    let rails = b.happened().into_iter().filter(|e| *e == Event::RailBack);
    assert_eq!(rails.count(), 1);
    b.peer.received(two);
    b.controls();
    b.pair.set_control(false);
    b.pair.set_rail(b.rails[0], false);
    b.settle();
    let told = [(one, Body::DeleteLink { reply: false })];
    assert_eq!((b.peer.bodies(two), b.controls()), (told.to_vec(), vec![]));
    b.pair.set_control(false);
    b.later(2 * MS);
    assert_eq!(b.peer.bodies(two), []);
    b.pair.set_rail(b.rails[1], true);
    b.settle();
    assert_eq!(b.pair.links().len(), 1);
}

/// An offer is made again over a new control channel; an answer that comes twice, or too late, does no harm.
#[test]
fn answers_to_offers() {
    let mut b = Bench::new(quiet(true), 1);
    let offer = b.offered();
    b.pair.set_control(true);
    assert_eq!(b.offered(), offer);
    let end = b.peer.end(offer.link, 0);
    b.peer.connect(offer, 0);
    b.says(Control::QpAnswer(end));
    b.says(Control::QpAnswer(end));
    assert_eq!(b.pair.links().len(), 1);
    b.later(20 * MS);
    let link = offer.link;
    b.says(Control::QpDeadAck { link });
    b.later(3 * MS);
    b.controls();
    b.says(Control::QpAnswer(end));
    assert!(b.controls().contains(&Control::QpDead { link }));
}

/// A peer that does not say that its ends are destroyed is offered so many links, and no more.
#[test]
fn offers_end() {
    let max_links = 3;
    let mut b = Bench::new(
        Config {
            max_links,
            ..quiet(true)
        },
        1,
    );
    let mut last = 0;
    for _ in 0..40 {
        b.later(11 * MS);
        let offers = b.controls().into_iter().filter_map(|m| match m {
            Control::QpOffer(end) => Some(end.link),
            _ => None,
        });
        if let Some(link) = offers.max() {
            last = link;
            b.says(Control::QpRefuse { link });
        }
    }
    assert_eq!(last, 6);
}

/// An answer over the control channel to a switch that was not sent; and one for a lane that is being removed.
#[test]
fn answered_over_the_channel() {
    let answer = |s: &Side| Control::SwitchAnswer {
        token: s.id,
        epoch: e(1).get(),
        attempt: 1,
        stands: true,
    };
    let mut s = fresh();
    s.peer_ready(e(1));
    s.ask(e(1), RING, 0);
    let says = answer(&s);
    s.b.says(says);
    let wanted = Fault::Peer("an answer to a switch that was not sent");
    assert_eq!(s.fault(), Some(wanted));
    let mut s = fresh();
    s.peer_ready(e(1));
    s.ask(e(1), RING, 0);
    s.answer_ring(1, 0);
    s.b.pair.remove(s.id);
    s.b.settle();
    s.b.happened();
    let says = answer(&s);
    s.b.says(says);
    assert_eq!(s.b.happened(), []);
}

/// A lane that waits for a key goes on when it comes.
#[test]
fn a_key_comes() {
    let mut s = up();
    s.b.peer
        .say(s.no, REGION, Body::DeleteRkey { reply: false });
    s.b.settle();
    s.put(RING, 0, 1000);
    assert_eq!(s.received(), []);
    s.tell_key(s.no);
    assert_eq!(s.last_snapshot().expect("a snapshot").head, c(1000));
}

/// A switch in doubt is not asked about at every turn.
#[test]
fn asked_once() {
    let mut s = fresh();
    s.peer_ready(e(1));
    s.ask(e(1), RING, 0);
    s.answer_ring(1, 0);
    s.b.pair.set_rail(s.b.rails[0], false);
    s.b.publish();
    s.b.publish();
    let all = s.b.controls();
    let queries = all
        .iter()
        .filter(|m| matches!(m, Control::SwitchQuery { .. }));
    assert_eq!(queries.count(), 1, "{all:?}");
}

/// A slot that was used before is not ready; a reader that is ready before the lane is connected is told of at once.
#[test]
fn a_slot_that_was_used() {
    let mut b = Bench::new(quiet(true), 1);
    let no = b.link();
    b.peer.received(no);
    let old = RxWord::new(e(1), rx::READY);
    b.proxy().rx[0].word.store(old, Relaxed);
    b.app().rx[0].word.store(old, Relaxed);
    let id = b.pair.open(b.clients[0].id, 0).expect("a lane");
    assert_eq!(b.proxy().rx[0].word.load(Relaxed), RxWord::default());
    b.proxy().rx[0].revoked.store(c(5), Relaxed);
    b.settle();
    b.pair.connect(id, TOKEN, BASE);
    b.settle();
    let said = b.peer.bodies(no);
    assert!(
        matches!(said[..], [(TOKEN, Body::Cdc(c))] if c.rx_epoch == e(1)),
        "{said:?}"
    );
    assert_eq!(b.proxy().rx[0].revoked.load(Relaxed), Cursor::UNSEEN);
}

/// What has landed is told once.
#[test]
fn landed_once() {
    let mut s = fresh();
    s.incoming();
    s.says.flags = flag::WANT_LANDED;
    s.says.head = c(3);
    s.snapshot_with(b"abc");
    assert_eq!(s.received().len(), 1);
    s.says.flags = 0;
    s.snapshot();
    assert_eq!(s.received(), []);
}

/// Questions for which there is no room to answer: the peer lies.
#[test]
fn a_flood() {
    let mut b = Bench::new(quiet(true), 1);
    let no = b.link();
    b.happened();
    b.peer.reposts = false;
    for n in 0..4200 {
        b.peer
            .say(no, no + 9 + n % 2, Body::DeleteLink { reply: false });
        b.tick();
        if b.pair.failed() {
            break;
        }
    }
    let why = "more requests than can be answered";
    assert!(b.happened().contains(&Event::PairFailed(why)));
}

/// There is no memory for a queue pair: it is tried again after a while. (Each try takes a number.)
#[test]
fn no_memory_for_links() {
    let faults = |no_memory_in| underpass_rdma::sim::Faults {
        no_memory_in,
        ..Default::default()
    };
    let config = Config {
        retry_ns: 9 * MS,
        ..quiet(true)
    };
    let mut b = Bench::new(config, 1);
    b.world.set_faults(faults(1));
    for _ in 0..20 {
        b.later(MS);
    }
    assert_eq!(b.control, []);
    b.world.set_faults(faults(0));
    b.later(9 * MS);
    assert_eq!(b.offered().psn, 5);
}
