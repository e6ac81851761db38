//! A queue pair that the device does not destroy: writes may still land through it.

use crate::bench::*;
use crate::sides::*;
use lane::abi::{rx, RxWord};
use underpass_rdma::engine::{Control, Event};
use underpass_rdma::wire::Body;

/// The pair fails, says nothing of the link's end, and keeps all memory as it is.
#[test]
fn nothing_is_reported() {
    let mut s = Side::new(Bench::new(quiet(true), 1));
    s.up();
    s.b.controls();
    s.b.happened();
    s.b.world.hold(0);
    s.b.pair.set_rail(s.b.rails[0], false);
    s.b.settle();
    let why = "a queue pair could not be destroyed";
    assert_eq!(s.b.happened(), [Event::NoRail, Event::PairFailed(why)]);
    s.b.later(20_000_000);
    assert_eq!(s.b.happened(), [Event::Asked]);
    assert_eq!(
        s.shown(),
        RxWord::new(e(1), rx::READY | rx::ACCEPTED | rx::WANT_DOWN)
    );
    // Nor is it when the peer says that its own end is destroyed, and asks.
    s.b.peer.destroy(s.no);
    s.b.says(Control::QpDead { link: s.no });
    assert_eq!(s.b.controls(), []);
    // A lane may end in words, but its rings are not free.
    let (token, from) = (s.id, TOKEN);
    s.b.pair.remove(s.id);
    s.b.says(Control::Close { token, from });
    s.b.says(Control::CloseAck { token });
    let (lane, used) = (token, true);
    assert_eq!(s.b.happened(), [Event::PeerClosed { lane, used }]);
    s.b.pair.remove_client(s.b.clients[0].id);
    s.b.later(100_000_000);
    assert_eq!(s.b.happened(), []);
    let before = s.b.world.live();
    s.b.pair.remove_rail(s.b.rails[0]);
    assert_eq!(s.b.world.live().mrs, before.mrs);
    let world = s.b.world.clone();
    drop(s);
    let live = world.live();
    // The queue pair, what it uses, and the chunks of both kinds.
    assert_eq!((live.qps, live.cqs, live.mrs), (1, 1, 3));
}

/// The chunk is not freed, although no lane is left and the peer has no key.
#[test]
fn an_empty_client() {
    let mut b = Bench::new(quiet(true), 1);
    b.offered();
    b.world.hold(0);
    b.pair.set_rail(b.rails[0], false);
    b.pair.remove_client(b.clients[0].id);
    b.later(100_000_000);
    let failed = Event::PairFailed("a queue pair could not be destroyed");
    assert_eq!(b.happened(), [failed]);
}

/// All links are tried.
#[test]
fn two_links() {
    let mut b = Bench::new(quiet(true), 2);
    let [_, two] = [b.link(), b.link()];
    b.peer.say(two, two, Body::TestLink { reply: true });
    b.settle();
    b.happened();
    b.world.hold(0);
    b.pair.set_rail(b.rails[0], false);
    b.settle();
    let why = "a queue pair could not be destroyed";
    let all = b.happened();
    let count = |event| all.iter().filter(|e| **e == event).count();
    let counts = (count(Event::PairFailed(why)), count(Event::NoRail));
    assert_eq!((counts, b.pair.links()), ((1, 1), vec![]), "{all:?}");
}
