//! Devices whose success means only that they have taken the bytes: what is done, the peer's credits tell.

use crate::bench::*;
use crate::sides::*;
use lane::abi::Loc;
use underpass_rdma::engine::{Config, Control};
use underpass_rdma::sim::Faults;
use underpass_rdma::wire::Body;

const RING: Loc = Loc {
    chunk: 1,
    page: 0,
    log2: 14,
};
const ASKS: Body = Body::TestLink { reply: false };
const SAYS: Body = Body::TestLink { reply: true };

fn bench(config: Config) -> Bench {
    let faults = Faults {
        iwarp: 1,
        ..Faults::default()
    };
    let listens = config.first;
    let mut b = Bench::with(config, 1, faults);
    b.peer.listens = listens;
    b
}

/// A link that works, a lane on a ring of 16 KiB; the peer has heard everything, and nothing of that is told.
fn up(config: Config) -> Side {
    let mut s = Side::waiting(bench(config));
    for _ in 0..20 {
        s.b.later(MS);
        if s.b
            .peer
            .bodies(s.no)
            .contains(&(s.no, Body::ConfirmLink { reply: false }))
        {
            break;
        }
    }
    s.b.peer.say(s.no, s.no, Body::ConfirmLink { reply: true });
    s.b.settle();
    s.tell_key(s.no);
    s.id = s.b.lane(0);
    s.peer_ready(e(1));
    s.ask(e(1), RING, 0);
    s.answer_ring(1, 0);
    s.answer_switch(e(1), 1, true);
    s.b.peer.received(s.no);
    s
}

/// Bytes count as in flight until the peer says that it has taken the message after them. It is asked once, when a lane
/// waits for that.
#[test]
fn the_window() {
    let mut s = up(Config {
        window: 2000,
        ..quiet(true)
    });
    let before = s.b.pair.stats(s.b.rails[0]);
    s.put(RING, 0, 5000);
    s.b.later(MS);
    let said = s.b.peer.bodies(s.no);
    let heads: Vec<u64> = said.iter().filter_map(|m| head(&m.1)).collect();
    let asks = said.iter().filter(|m| m.1 == ASKS).count();
    assert_eq!((heads, asks), (vec![2000], 1), "{said:?}");
    assert_eq!(s.b.pair.stats(s.b.rails[0]).bytes, before.bytes);
    s.b.later(5 * MS);
    assert_eq!(s.b.peer.bodies(s.no), []);
    s.b.peer.say(s.no, s.no, SAYS);
    s.b.later(MS);
    let said = s.b.peer.bodies(s.no);
    let heads: Vec<u64> = said.iter().filter_map(|m| head(&m.1)).collect();
    let asks = said.iter().filter(|m| m.1 == ASKS).count();
    assert_eq!((heads, asks), (vec![4000], 1), "{said:?}");
    let now = s.b.pair.stats(s.b.rails[0]);
    assert_eq!(
        (now.bytes - before.bytes, now.writes - before.writes),
        (2000, 1)
    );
    s.b.peer.say(s.no, s.no, SAYS);
    s.b.later(MS);
    let said = s.b.peer.bodies(s.no);
    assert!(said.iter().any(|m| head(&m.1) == Some(5000)), "{said:?}");
}

/// What was sent a while ago is asked about by itself.
#[test]
fn asked_after_a_while() {
    let mut s = up(quiet(true));
    s.put(RING, 0, 10);
    s.b.peer.received(s.no);
    for _ in 0..3 {
        s.b.later(MS);
    }
    assert_eq!(s.b.peer.bodies(s.no), [(s.no, ASKS)]);
    s.b.peer.say(s.no, s.no, SAYS);
    for _ in 0..5 {
        s.b.later(MS);
    }
    assert_eq!(s.b.peer.bodies(s.no), [], "all is known to be done");
}

/// The end that is offered a link listens, is the first to have it, and the second to speak.
#[test]
fn the_other_end() {
    let mut b = bench(quiet(false));
    let end = b.peer.end(1, 0);
    b.says(Control::QpOffer(end));
    let answer = b.controls().into_iter().find_map(|m| match m {
        Control::QpAnswer(end) => Some(end),
        _ => None,
    });
    let answer = answer.expect("an answer");
    assert_ne!(answer.lid, 0);
    b.peer.connect(answer, 0);
    for _ in 0..20 {
        b.later(MS);
        if b.peer.linked(1) {
            break;
        }
    }
    assert_eq!(b.peer.bodies(1), []);
    b.peer.say(1, 1, Body::ConfirmLink { reply: false });
    b.later(MS);
    b.peer.say(1, 1, ASKS);
    b.later(MS);
    let said = b.peer.bodies(1);
    assert!(
        said.contains(&(1, Body::ConfirmLink { reply: true })),
        "{said:?}"
    );
    assert!(said.contains(&(1, SAYS)), "{said:?}");
    assert_eq!(b.world.violations(), Vec::<String>::new());
}

/// The first message may stay unnoticed until another one comes: there is another one, for each time that an answer is
/// waited for.
#[test]
fn another_one_follows() {
    let mut b = bench(quiet(true));
    let no = b.connected().link;
    let mut said = Vec::new();
    for _ in 0..10 {
        b.later(MS);
        said.extend(b.peer.bodies(no));
    }
    assert_eq!(said[0], (no, Body::ConfirmLink { reply: false }));
    let asks = said.iter().filter(|m| m.1 == ASKS).count();
    assert!(
        (5..12).contains(&asks) && asks == said.len() - 1,
        "{said:?}"
    );
}

/// The peer's queue pair is gone before the handshake is through: the link is given up at once, and the peer is told so.
#[test]
fn a_handshake_that_is_refused() {
    let mut b = bench(quiet(true));
    let link = b.offered().link;
    let end = b.peer.end(link, 0);
    b.says(Control::QpAnswer(end));
    assert_eq!(b.pair.links().len(), 1, "the peer takes its time");
    b.peer.destroy(link);
    b.settle();
    assert_eq!(b.pair.links().len(), 0);
    assert!(b.controls().contains(&Control::QpDead { link }));
}
