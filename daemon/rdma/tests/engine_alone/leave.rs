//! Memory that is withdrawn, by the peer or here: nobody frees what a write may still reach.

use crate::bench::*;
use underpass_rdma::engine::{Control, Event};
use underpass_rdma::wire::Body;

const LEAVES: Body = Body::DeleteRkey { reply: false };
const LEFT: Body = Body::DeleteRkey { reply: true };

/// Two links over two rails.
fn two_links() -> (Bench, [u32; 2]) {
    let mut b = Bench::new(config(true), 2);
    let links = [b.link(), b.link()];
    b.peer.heard(links[0]);
    b.peer.heard(links[1]);
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
    b.peer.destroy(one);
    b.says(Control::QpDeadAck { link: one });
    assert_eq!(b.peer.bodies(two), [(9, LEFT)]);
}
