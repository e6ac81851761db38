//! How links are made, fail and are retired.

use crate::bench::*;
use underpass_rdma::engine::{Config, Control, Event, RoundTrips, ROUND_TRIPS_US};
use underpass_rdma::wire::{Body, LinkEnd};

/// The pair's failure among these, if there is one.
fn failure(b: &mut Bench) -> Option<&'static str> {
    b.settle();
    b.happened().iter().find_map(|e| match e {
        Event::PairFailed(why) => Some(*why),
        _ => None,
    })
}

fn offers(b: &mut Bench) -> usize {
    let all = b.controls();
    let offer = |m: &&Control| matches!(m, Control::QpOffer(_));
    all.iter().filter(offer).count()
}

/// A link that the peer has offered, and the pair's answer.
fn accepted(b: &mut Bench, no: u32) -> Option<LinkEnd> {
    let end = b.peer.end(no, 0);
    b.says(Control::QpOffer(end));
    b.controls().iter().find_map(|m| match m {
        Control::QpAnswer(end) => Some(*end),
        _ => None,
    })
}

/// An offer is repeated until it is answered, and given up after a while; the peer is told so until it has said that it
/// knows. Then there is another one.
#[test]
fn an_offer_that_nobody_answers() {
    let mut b = Bench::new(config(true), 1);
    b.settle();
    assert_eq!(offers(&mut b), 1);
    b.later(MS / 2);
    assert_eq!(offers(&mut b), 0);
    b.later(MS / 2);
    assert_eq!(offers(&mut b), 1);
    b.later(20 * MS);
    let dead = Control::QpDead { link: 1 };
    assert_eq!(b.controls(), [dead]);
    assert_eq!(b.pair.links(), []);
    b.later(MS);
    let all = b.controls();
    assert!(
        matches!(all[..], [Control::QpDead { link: 1 }, Control::QpOffer(end)] if end.link == 2)
    );
    b.says(Control::QpDeadAck { link: 1 });
    b.later(3 * MS);
    let all = b.controls();
    assert!(!all.is_empty() && !all.contains(&dead), "{all:?}");
    assert_eq!(b.pair.stats(b.rails[0]).links_failed, 1);
    assert_eq!(b.happened(), []);
}

/// The time from a question over a quiet link to its answer is counted, once, whatever else comes before that answer; an
/// answer to no question is not.
#[test]
fn round_trips() {
    let mut b = Bench::new(config(true), 1);
    let no = b.link();
    let trips = |b: &Bench| b.pair.stats(b.rails[0]).round_trips;
    let answer = Body::TestLink { reply: true };
    b.peer.say(no, no, answer);
    b.settle();
    assert_eq!(trips(&b), RoundTrips::default());
    // (Nothing is heard for 50 ms.)
    b.later(50 * MS);
    assert!(b
        .peer
        .bodies(no)
        .contains(&(no, Body::TestLink { reply: false })));
    let asked = b.now;
    b.later(3 * MS);
    // Something else is said first.
    b.peer.say(no, no, Body::TestLink { reply: false });
    b.settle();
    assert_eq!(trips(&b), RoundTrips::default());
    b.peer.say(no, no, answer);
    b.settle();
    let least = 3 * MS;
    let most = b.now - asked + 50 * MS;
    let seen = trips(&b);
    assert_eq!(seen.counts.iter().sum::<u64>(), 1, "{seen:?}");
    let part = ROUND_TRIPS_US.iter().position(|us| *us == 5_000).unwrap();
    assert_eq!(seen.counts[part], 1, "{seen:?}");
    assert!(seen.sum_ns >= least && seen.sum_ns <= most, "{seen:?}");
    b.peer.say(no, no, answer);
    b.settle();
    assert_eq!(trips(&b), seen, "an answer to no question");
}

/// A refused offer is made again ten times later than others; a late refusal of a link that works says nothing.
#[test]
fn an_offer_that_is_refused() {
    let mut b = Bench::new(config(true), 1);
    let link = b.offered().link;
    b.says(Control::QpRefuse { link });
    b.says(Control::QpDeadAck { link });
    b.controls();
    b.later(9 * MS);
    assert_eq!(offers(&mut b), 0);
    b.later(MS);
    let link = b.link();
    b.says(Control::QpRefuse { link });
    assert!(b.pair.links()[0].active);
}

/// Nothing is offered over a port that is down, or without any way to say so.
#[test]
fn no_offers() {
    let mut b = Bench::new(config(true), 1);
    b.pair.set_control(false);
    b.settle();
    assert_eq!((b.controls(), b.pair.links()), (vec![], vec![]));
    b.pair.set_rail(b.rails[0], false);
    b.pair.set_control(true);
    b.settle();
    assert_eq!(offers(&mut b), 0);
    b.pair.set_rail(b.rails[0], true);
    b.settle();
    assert_eq!(offers(&mut b), 1);
}

/// What is offered is answered, again if the answer was lost; a number that was used before is refused, and so are more
/// links than there may be.
#[test]
fn offers_of_the_peer() {
    let max_links = 2;
    let mut b = Bench::new(
        Config {
            max_links,
            ..config(false)
        },
        1,
    );
    let end = b.peer.end(3, 0);
    b.says(Control::QpOffer(end));
    let all = b.controls();
    assert!(matches!(all[..], [Control::QpAnswer(e)] if e.link == 3 && e.fabric == 0));
    b.says(Control::QpOffer(end));
    assert_eq!(b.controls(), all);
    assert_eq!(b.pair.links().len(), 1);
    assert_eq!(accepted(&mut b, 2), None, "a number below the last one");
    assert!(accepted(&mut b, 4).is_some());
    let end = b.peer.end(5, 0);
    b.says(Control::QpOffer(end));
    assert_eq!(b.controls(), [Control::QpRefuse { link: 5 }]);
}

/// A fabric that is not here, and a port that is down.
#[test]
fn offers_that_fit_nothing() {
    let mut b = Bench::new(config(false), 1);
    let mut end = b.peer.end(1, 0);
    end.fabric = 7;
    b.says(Control::QpOffer(end));
    assert_eq!(b.controls(), [Control::QpRefuse { link: 1 }]);
    b.pair.set_rail(b.rails[0], false);
    let end = b.peer.end(2, 0);
    b.says(Control::QpOffer(end));
    assert_eq!(b.controls(), [Control::QpRefuse { link: 2 }]);
    assert_eq!(b.pair.links(), []);
}

/// An offered link is confirmed by the end that offers it, and replied to.
#[test]
fn confirmed_by_the_peer() {
    let mut b = Bench::new(config(false), 1);
    let end = accepted(&mut b, 1).expect("an answer");
    b.peer.connect(end, 0);
    b.settle();
    assert_eq!(b.happened(), []);
    b.peer.say(1, 1, Body::ConfirmLink { reply: false });
    b.settle();
    let said = b.peer.bodies(1);
    assert_eq!(said[0], (1, Body::ConfirmLink { reply: true }));
    assert!(
        matches!(said[1..], [(_, Body::ConfirmRkey(Some(_)))]),
        "{said:?}"
    );
    let (link, rail) = (1, b.rails[0]);
    assert_eq!(
        b.happened(),
        [Event::LinkUp { link, rail }, Event::RailBack]
    );
}

/// An offered link that is not confirmed in time is given up, and an offer of it that comes late is ignored.
#[test]
fn not_confirmed_in_time() {
    let mut b = Bench::new(config(false), 1);
    let end = b.peer.end(1, 0);
    b.says(Control::QpOffer(end));
    b.controls();
    b.later(19 * MS);
    assert_eq!(b.controls(), []);
    b.later(MS);
    assert_eq!(b.controls(), [Control::QpDead { link: 1 }]);
    b.says(Control::QpOffer(end));
    assert_eq!(b.controls(), []);
    assert_eq!(b.happened(), [], "it never worked");
    b.says(Control::QpDeadAck { link: 1 });
    b.says(Control::QpOffer(end));
    assert_eq!(b.controls(), [Control::QpRefuse { link: 1 }]);
}

/// Whoever hears nothing for a while asks, and gives the link up if there is no answer.
#[test]
fn silence() {
    let mut b = Bench::new(config(true), 1);
    let no = b.link();
    b.peer.received(no);
    b.happened();
    let asks = [(no, Body::TestLink { reply: false })];
    b.later(49 * MS);
    assert_eq!(b.peer.bodies(no), []);
    b.later(2 * MS);
    assert_eq!(b.peer.bodies(no), asks);
    b.later(49 * MS);
    b.peer.say(no, no, Body::TestLink { reply: true });
    b.settle();
    b.later(49 * MS);
    assert_eq!(b.peer.bodies(no), []);
    b.later(2 * MS);
    assert_eq!(b.peer.bodies(no), asks);
    b.later(49 * MS);
    assert_eq!(b.happened(), []);
    b.later(2 * MS);
    let (link, rail, why) = (no, b.rails[0], "the peer is silent");
    let down = Event::LinkDown { link, rail, why };
    assert_eq!(b.happened(), [down, Event::NoRail]);
}

/// A question is answered.
#[test]
fn asked() {
    let mut b = Bench::new(config(true), 1);
    let no = b.link();
    b.peer.received(no);
    b.peer.say(no, no, Body::TestLink { reply: false });
    b.settle();
    assert_eq!(b.peer.bodies(no), [(no, Body::TestLink { reply: true })]);
    b.peer.say(no, no, Body::TestLink { reply: true });
    b.settle();
    assert_eq!(b.peer.bodies(no), []);
}

/// A port that goes down ends its links, and no others; the peer is told over one that is left, and over the control
/// channel.
#[test]
fn a_port_goes_down() {
    let mut b = Bench::new(config(true), 2);
    let [one, two] = [b.link(), b.link()];
    b.peer.received(two);
    b.controls();
    b.happened();
    b.pair.set_rail(b.rails[0], false);
    b.settle();
    let (link, rail, why) = (one, b.rails[0], "the port is down");
    assert_eq!(b.happened(), [Event::LinkDown { link, rail, why }]);
    let told = (one, Body::DeleteLink { reply: false });
    assert_eq!(b.peer.bodies(two), [told]);
    assert_eq!(b.controls(), [Control::QpDead { link: one }]);
    assert_eq!(b.pair.links().len(), 1);
    // The peer answers that its end is destroyed, too.
    b.peer.say(two, one, Body::DeleteLink { reply: true });
    b.later(3 * MS);
    assert_eq!((b.peer.bodies(two), b.controls()), (vec![], vec![]));
}

/// The peer gives a link up: it is destroyed here, too, and both ends say so.
#[test]
fn the_peer_gives_a_link_up() {
    let mut b = Bench::new(config(true), 2);
    let [one, two] = [b.link(), b.link()];
    b.peer.received(two);
    b.controls();
    b.happened();
    b.peer.say(two, one, Body::DeleteLink { reply: false });
    b.settle();
    let (link, rail, why) = (one, b.rails[0], "the peer gave the link up");
    assert_eq!(b.happened(), [Event::LinkDown { link, rail, why }]);
    let said = b.peer.bodies(two);
    let deletes = |reply| (one, Body::DeleteLink { reply });
    let both = said.contains(&deletes(true)) && said.contains(&deletes(false));
    assert!(both, "{said:?}");
    // Ours is reported until it is acknowledged, and then no more.
    b.controls();
    b.later(MS);
    assert!(b.peer.bodies(two).contains(&deletes(false)));
    b.controls();
    b.says(Control::QpDead { link: one });
    assert_eq!(b.controls(), [Control::QpDeadAck { link: one }]);
    b.says(Control::QpDeadAck { link: one });
    b.later(3 * MS);
    let all = b.controls();
    assert!(!all.contains(&Control::QpDead { link: one }), "{all:?}");
}

/// An acknowledgement of what was not reported is not believed.
#[test]
fn an_acknowledgement_of_nothing() {
    let mut b = Bench::new(config(true), 1);
    let link = b.link();
    b.says(Control::QpDeadAck { link });
    assert!(b.pair.links()[0].active);
}

/// The device reports a queue pair of it: that link ends.
#[test]
fn a_queue_pair_fails() {
    let mut b = Bench::new(config(true), 2);
    let [one, two] = [b.link(), b.link()];
    let views = b.pair.links();
    b.pair.qp_failed(b.rails[1], views[0].qpn);
    b.pair.qp_failed(b.rails[0], views[0].qpn + 1000);
    assert_eq!(b.pair.links().len(), 2, "not of this rail, and none");
    b.pair.qp_failed(b.rails[0], views[0].qpn);
    let left: Vec<u32> = b.pair.links().iter().map(|l| l.link).collect();
    assert_eq!((one, &left[..]), (1, &[two][..]));
}

/// What the links look like from outside.
#[test]
fn views() {
    let mut b = Bench::new(config(true), 1);
    let offer = b.offered();
    let end = b.peer.end(offer.link, 0);
    b.peer.connect(offer, 0);
    let v = b.pair.links().remove(0);
    assert_eq!(
        (v.link, v.rail, v.active, v.lanes),
        (1, b.rails[0], false, 0)
    );
    assert_eq!((v.qpn, v.peer_qpn, v.gid.0), (offer.qpn, 0, offer.gid));
    assert_eq!((offer.lid, offer.psn), (LID, 2), "24 bits of it");
    assert!(v.peer_gid.is_zero());
    b.says(Control::QpAnswer(end));
    let v = b.pair.links().remove(0);
    assert_eq!((v.peer_qpn, v.peer_gid.0), (end.qpn, end.gid));
    b.peer.say(1, 1, Body::ConfirmLink { reply: true });
    b.settle();
    b.lane(0);
    let v = b.pair.links().remove(0);
    assert_eq!((v.active, v.lanes), (true, 1));
}

/// Who offers links, what is said to it, and why the pair fails then.
type Case = (bool, fn(&mut Bench, LinkEnd), &'static str);

/// What no honest peer says fails the pair: here over the control channel.
#[test]
fn impossible_words() {
    let offer = "an impossible offer of a link";
    let answer = "an impossible answer to an offer";
    let all: [Case; 5] = [
        (true, |b, e| b.says(Control::QpOffer(e)), offer),
        (
            false,
            |b, e| b.says(Control::QpOffer(LinkEnd { qpn: 1 << 24, ..e })),
            offer,
        ),
        (false, |b, e| b.says(Control::QpAnswer(e)), answer),
        (
            true,
            |b, e| b.says(Control::QpAnswer(LinkEnd { link: 2, ..e })),
            answer,
        ),
        (
            true,
            |b, e| b.says(Control::QpAnswer(LinkEnd { depth: 3, ..e })),
            answer,
        ),
    ];
    all.into_iter().for_each(fails);
}

/// Here on a link that is not confirmed.
#[test]
fn impossible_words_on_a_link() {
    let turn = "a link was confirmed out of turn";
    let all: [Case; 6] = [
        (true, |b, _| b.peer.say(1, 1, confirms(false)), turn),
        (false, |b, _| b.peer.say(1, 1, confirms(true)), turn),
        (
            true,
            |b, _| b.peer.say(1, 2, confirms(true)),
            "a link was confirmed on another one",
        ),
        (
            true,
            |b, _| b.peer.say(1, 1, Body::ConfirmRkey(None)),
            "a message on a link that is not confirmed",
        ),
        (
            true,
            |b, _| b.peer.say_with_credits(1, 63, HERE),
            "impossible credits",
        ),
        (
            true,
            |b, _| b.peer.say_with_credits(1, 130, HERE),
            "impossible credits",
        ),
    ];
    all.into_iter().for_each(fails);
}

const HERE: Body = Body::TestLink { reply: true };

fn confirms(reply: bool) -> Body {
    Body::ConfirmLink { reply }
}

/// The pair fails for that reason, and says no more.
fn fails((first, says, why): Case) {
    let mut b = Bench::new(config(first), 1);
    let end = match first {
        true => b.connected(),
        false => {
            let end = accepted(&mut b, 1).expect("an answer");
            b.peer.connect(end, 0);
            end
        }
    };
    assert_eq!(failure(&mut b), None);
    says(&mut b, end);
    assert_eq!(failure(&mut b), Some(why));
    assert!(b.pair.failed() && b.pair.links().is_empty());
    b.controls();
    b.later(50 * MS);
    let end = b.peer.end(9, 0);
    b.says(Control::QpOffer(end));
    assert_eq!((b.controls(), b.happened()), (vec![], vec![]));
}

/// The same on a link that works.
#[test]
fn impossible_words_later() {
    type Says = fn(&mut Bench);
    let all: [(Says, &str); 4] = [
        (
            |b| b.peer.say(1, 1, Body::ConfirmLink { reply: true }),
            "a link was confirmed out of turn",
        ),
        (
            |b| b.peer.say(1, 1, Body::DeleteLink { reply: false }),
            "a destroyed link spoke",
        ),
        (
            |b| {
                b.peer.say(
                    1,
                    1,
                    Body::AddLink {
                        reply: false,
                        end: None,
                    },
                )
            },
            "an offer of no link",
        ),
        (
            |b| {
                for region in 0..4097 {
                    b.peer.say(1, region, Body::ConfirmRkey(None));
                    b.tick();
                    b.peer.say(1, 0, Body::ConfirmRkey(None));
                    b.tick();
                    assert!(!b.pair.failed() || region == 4096);
                    if b.pair.failed() {
                        break;
                    }
                }
            },
            "more regions than there can be",
        ),
    ];
    for (says, why) in all {
        let mut b = Bench::new(config(true), 1);
        b.link();
        assert_eq!(failure(&mut b), None);
        says(&mut b);
        assert_eq!(failure(&mut b), Some(why));
    }
}
