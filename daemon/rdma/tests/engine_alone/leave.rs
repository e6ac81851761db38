//! Memory that is withdrawn, by the peer or here: nobody frees what a write may still reach.

use crate::bench::*;
use crate::sides::*;
use std::sync::Arc;
use underpass_rdma::engine::{Control, Event};
use underpass_rdma::sim::Faults;
use underpass_rdma::verbs::Mapping;
use underpass_rdma::wire::Body;

const LEAVES: Body = Body::DeleteRkey { reply: false };
const LEFT: Body = Body::DeleteRkey { reply: true };

/// Two links over two rails.
fn two_links() -> (Bench, [u32; 2]) {
    let mut b = Bench::new(quiet(true), 2);
    let links = [b.link(), b.link()];
    b.peer.received(links[0]);
    b.peer.received(links[1]);
    b.happened();
    (b, links)
}

/// A region is given up at once if no link is in doubt.
#[test]
fn a_region_leaves() {
    let (mut b, [one, two]) = two_links();
    b.peer.say(two, 9, LEAVES);
    b.settle();
    assert_eq!(b.peer.bodies(one), [(9, LEFT)]);
    assert_eq!(b.peer.bodies(two), []);
}

/// A link is destroyed at this end only: what was written over it may still land at the peer, so it keeps the region.
#[test]
fn a_region_leaves_while_a_link_is_half_destroyed() {
    let (mut b, [one, two]) = two_links();
    b.pair.set_rail(b.rails[0], false);
    b.settle();
    b.controls();
    b.peer.say(two, 9, LEAVES);
    b.settle();
    let told = (one, Body::DeleteLink { reply: false });
    assert_eq!(b.peer.bodies(two), [told]);
    // It may ask twice.
    b.peer.say(two, 9, LEAVES);
    b.settle();
    b.peer.destroy(one);
    b.says(Control::QpDead { link: one });
    assert_eq!(b.peer.bodies(two), [(9, LEFT)]);
}

/// Writes are in flight on a link that works: the region is given up when they are done, whatever was asked meanwhile.
#[test]
fn a_region_leaves_under_way() {
    let mut s = Side::new(Bench::new(quiet(true), 1));
    s.up();
    s.b.world.set_wire(0, false);
    s.put(loc(0, 12), 0, 1000);
    // (The peer's own message passes, because the wire is back before it is sent again.)
    s.b.peer.say(s.no, REGION, LEAVES);
    s.b.world.set_wire(0, true);
    s.b.settle();
    assert_eq!(s.b.peer.bodies(s.no), []);
    s.b.later(MS / 4);
    let said = s.b.peer.bodies(s.no);
    assert_eq!(said.last(), Some(&(REGION, LEFT)), "{said:?}");
    assert_eq!(said.len(), 2);
    // Without the key nothing is written there any more.
    s.put(loc(0, 12), 1000, 2000);
    assert_eq!(s.received(), []);
}

/// The writes are in flight on another link than the one over which the answer goes.
#[test]
fn a_region_leaves_under_way_elsewhere() {
    let mut s = Side::new(Bench::new(quiet(true), 2));
    s.up();
    let one = s.no;
    let two = s.b.link();
    s.b.peer.say(one, REGION, LEAVES);
    s.b.settle();
    s.tell_key(two);
    s.b.publish();
    assert_eq!(s.b.pair.link_of(s.id), Some(two));
    s.b.peer.bodies(one);
    s.b.world.set_wire(1, false);
    s.put(loc(0, 12), 0, 1000);
    s.b.peer.say(one, REGION, LEAVES);
    s.b.settle();
    assert_eq!(s.b.peer.bodies(one), []);
    s.b.world.set_wire(1, true);
    s.b.later(MS / 4);
    assert_eq!(s.b.peer.bodies(one), [(REGION, LEFT)]);
}

/// The peer is asked again after a while, and not whenever there is something to do.
#[test]
fn not_asked_at_every_turn() {
    let retry_ns = 50 * MS;
    let config = underpass_rdma::engine::Config {
        retry_ns,
        ..quiet(true)
    };
    let mut b = Bench::new(config, 1);
    let no = b.link();
    b.peer.received(no);
    b.pair.remove_client(b.clients[0].id);
    b.later(30 * MS);
    assert_eq!(b.peer.bodies(no), [(OWN, LEAVES)]);
    b.later(30 * MS);
    assert_eq!(b.peer.bodies(no), []);
    b.later(30 * MS);
    assert_eq!(b.peer.bodies(no), [(OWN, LEAVES)]);
}

/// The client's own chunk as a region: the second one that the pair was given.
const OWN: u32 = 2;

/// A client is gone when the peer no longer writes to its memory, which it is asked for again and again; and not while
/// there are lanes.
#[test]
fn a_client_leaves() {
    let mut b = Bench::new(quiet(true), 1);
    let no = b.link();
    let lane = b.lane(0);
    let client = b.clients[0].id;
    b.peer.received(no);
    b.happened();
    b.pair.remove_client(client);
    b.later(30 * MS);
    assert_eq!((b.peer.bodies(no), b.happened()), (vec![], vec![]));
    b.pair.remove(lane);
    b.settle();
    b.says(Control::Close {
        token: lane,
        from: TOKEN,
    });
    b.says(Control::CloseAck { token: lane });
    assert_eq!(b.peer.bodies(no), [(OWN, LEAVES)]);
    let before = b.world.live().mrs;
    b.later(20 * MS);
    assert_eq!(b.peer.bodies(no), [(OWN, LEAVES)]);
    b.happened();
    // Another region is none of this.
    b.peer.say(no, OWN + 1, LEFT);
    b.later(20 * MS);
    assert_eq!(b.happened(), []);
    b.peer.say(no, OWN, LEFT);
    b.settle();
    assert_eq!(b.happened(), [Event::ClientRemoved { client }]);
    assert_eq!(b.world.live().mrs, before - 2);
    b.later(30 * MS);
    assert_eq!(b.happened(), []);
}

/// No link is left on which the peer has a key.
#[test]
fn a_client_leaves_without_links() {
    let (mut b, [one, two]) = two_links();
    let client = b.clients[0].id;
    b.pair.remove_client(client);
    b.settle();
    assert_eq!(b.peer.bodies(one), [(OWN, LEAVES)]);
    b.pair.set_rail(b.rails[0], false);
    b.later(20 * MS);
    let said = b.peer.bodies(two);
    assert!(said.contains(&(OWN, LEAVES)), "{said:?}");
    b.happened();
    b.pair.set_rail(b.rails[1], false);
    b.later(20 * MS);
    assert!(b.happened().contains(&Event::ClientRemoved { client }));
}

/// Who leaves gets no memory any more, nor does anybody twice.
#[test]
fn memory_for_nobody() {
    let mut b = Bench::new(quiet(true), 1);
    let client = b.clients[0].id;
    let memory = Arc::new(Mapping::anonymous(4096).expect("memory"));
    let mut adds = |client, number| {
        let pair = &mut b.pair;
        [
            pair.add_app_chunk(client, number, memory.clone()),
            pair.add_own_chunk(client, number, memory.clone()),
        ]
    };
    assert_eq!(adds(client, 1), [false, false]);
    assert_eq!(adds(client, 2), [true, true]);
    assert_eq!(adds(client + 1, 3), [false, false]);
    b.pair.remove_client(client);
    let added = b.pair.add_own_chunk(client, 4, memory.clone());
    assert!(!added && !b.pair.add_app_chunk(client, 4, memory));
}

/// Memory that cannot be registered: the peer is told so once, and of the key when there is one.
#[test]
fn no_registration() {
    let mut b = Bench::new(quiet(true), 1);
    let no = b.link();
    b.peer.received(no);
    let client = b.clients[0].id;
    let faults = |no_memory_in| Faults {
        no_memory_in,
        ..Faults::default()
    };
    b.world.set_faults(faults(1));
    let memory = Arc::new(Mapping::anonymous(8192).expect("memory"));
    assert!(b.pair.add_own_chunk(client, 2, memory));
    b.settle();
    assert_eq!(b.peer.bodies(no), [(3, Body::ConfirmRkey(None))]);
    b.later(20 * MS);
    assert_eq!(b.peer.bodies(no), []);
    b.world.set_faults(faults(0));
    b.later(20 * MS);
    let said = b.peer.bodies(no);
    assert!(
        matches!(said[..], [(3, Body::ConfirmRkey(Some(key)))] if key.len == 8192),
        "{said:?}"
    );
    b.later(20 * MS);
    assert_eq!(b.peer.bodies(no), []);
}
