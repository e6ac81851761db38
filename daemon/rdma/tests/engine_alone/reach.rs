//! What the peer's device reaches, and what is registered.

use crate::bench::*;
use crate::sides::*;
use underpass_rdma::engine::{Event, LinkId};
use underpass_rdma::verbs::{Memory, Op};
use underpass_rdma::wire::{Body, Key};

/// The key of our memory that the peer was told.
fn told(b: &mut Bench) -> (LinkId, Key) {
    let no = b.connected().link;
    b.peer.say(no, no, Body::ConfirmLink { reply: true });
    b.settle();
    let keys = b
        .peer
        .bodies(no)
        .into_iter()
        .find_map(|(_, body)| match body {
            Body::ConfirmRkey(key) => key,
            _ => None,
        });
    (no, keys.expect("a key"))
}

/// The peer writes there.
fn write(b: &mut Bench, no: LinkId, remote: u64, rkey: u32) {
    assert!(b.peer.memory.write(0, b"written"));
    let local = b.peer.local(0, 7);
    let op = Op::Write {
        local,
        remote,
        rkey,
    };
    b.peer.send(no, op);
    b.settle();
}

fn found(memory: &dyn Memory) -> bool {
    let mut all = [0; 7];
    assert!(memory.read(0, &mut all));
    all == *b"written"
}

/// Our own memory, for as long as it is registered: it is registered once.
#[test]
fn our_memory() {
    let mut b = Bench::new(quiet(true), 1);
    let (no, key) = told(&mut b);
    let live = b.world.live().mrs;
    b.later(30_000_000);
    b.later(30_000_000);
    assert_eq!((b.world.live().mrs, b.peer.bodies(no)), (live, vec![]));
    write(&mut b, no, key.addr, key.rkey);
    assert!(found(&*b.clients[0].own));
    assert_eq!(b.happened().len(), 2, "the link works");
}

/// Never the application's, which was registered just before: the device refuses, and the link ends.
#[test]
fn not_the_applications() {
    let mut b = Bench::new(quiet(true), 1);
    let (no, key) = told(&mut b);
    b.happened();
    let at = b.clients[0].chunk.addr().as_ptr() as u64;
    write(&mut b, no, at, key.rkey - 1);
    assert!(!found(&*b.clients[0].chunk));
    let (link, rail, why) = (no, b.rails[0], "the queue pair failed");
    assert_eq!(b.happened()[0], Event::LinkDown { link, rail, why });
}

/// The peer's device refuses what we write, or does not answer at all: what is said of it.
#[test]
fn refused() {
    for cut in [false, true] {
        let mut s = Side::new(Bench::new(quiet(true), 1));
        s.up();
        let why = match cut {
            true => "no acknowledgement",
            false => "the peer's device refused a write",
        };
        s.b.happened();
        if cut {
            s.b.world.set_wire(0, false);
        } else {
            let key = s.b.peer.key(0);
            let rkey = key.rkey + 99;
            let key = Key { rkey, ..key };
            s.b.peer.say(s.no, REGION, Body::ConfirmRkey(Some(key)));
            s.b.settle();
        }
        s.put(loc(0, 12), 0, 1000);
        for _ in 0..8 {
            s.b.later(1_000_000);
        }
        let (link, rail) = (s.no, s.b.rails[0]);
        assert_eq!(s.b.happened()[0], Event::LinkDown { link, rail, why });
    }
}

/// A device that is removed takes with it all that was made of it, and one that comes is used at once.
#[test]
fn devices() {
    let mut b = Bench::new(quiet(true), 1);
    let no = b.link();
    let rail = b.rails[0];
    b.controls();
    b.happened();
    let before = b.world.live();
    b.pair.remove_rail(rail);
    let live = b.world.live();
    assert_eq!((before.mrs - live.mrs, before.pds - live.pds), (3, 1));
    assert_eq!((before.qps - live.qps, before.cqs - live.cqs), (1, 1));
    b.settle();
    let (link, why) = (no, "the device is gone");
    assert_eq!(
        b.happened(),
        [Event::LinkDown { link, rail, why }, Event::NoRail]
    );
    b.later(30_000_000);
    b.controls();
    let id = b.add_rail(0);
    assert_eq!(id, rail + 1);
    assert_eq!(b.world.live().mrs - live.mrs, 2);
    b.rails = vec![id];
    b.says(underpass_rdma::engine::Control::QpDeadAck { link });
    b.offered();
}
