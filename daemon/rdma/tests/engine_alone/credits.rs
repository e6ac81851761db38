//! How much is in flight on a link: messages by the peer's buffers, requests by the send queue, bytes by the window.

use crate::bench::*;
use crate::peer::DEPTH;
use crate::sides::*;
use lane::abi::Loc;
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::engine::Config;
use underpass_rdma::wire::Body;

const RING: Loc = Loc {
    chunk: 1,
    page: 0,
    log2: 14,
};

/// A lane on a ring of 16 KiB.
fn up(config: Config) -> Side {
    let mut s = Side::new(Bench::new(config, 1));
    s.peer_ready(e(1));
    s.ask(e(1), RING, 0);
    s.answer_ring(1, 0);
    s.answer_switch(e(1), 1, true);
    s.received();
    s
}

/// Messages stop when one buffer of the peer's is left: that one is for the message which returns credits. They go on
/// when it posts more.
#[test]
fn buffers_of_the_peer() {
    let mut s = up(quiet(true));
    s.b.peer.reposts = false;
    let mut said = 0;
    for n in 0..u64::from(DEPTH) {
        s.put(RING, n, n + 1);
        said += s.received().len();
    }
    assert_eq!(said, usize::from(DEPTH) - 1);
    s.b.peer.reposts = true;
    s.b.peer.post_again(s.no);
    s.b.peer.say(s.no, s.no, Body::TestLink { reply: true });
    s.b.settle();
    let last = s.last_snapshot().expect("a snapshot");
    assert_eq!(last.head, c(u64::from(DEPTH)));
}

/// Credits are returned when half of our buffers were used, without a question.
#[test]
fn our_buffers() {
    let depth = 8;
    let mut s = Side::new(Bench::new(
        Config {
            depth,
            ..quiet(true)
        },
        1,
    ));
    let test = Body::TestLink { reply: true };
    s.b.peer.received(s.no);
    let mut returned = Vec::new();
    for n in 1..=16 {
        s.b.peer.say(s.no, s.no, test);
        s.b.settle();
        for (m, _) in s.b.peer.received(s.no) {
            assert_eq!(m.body, test);
            returned.push((n, m.credits));
        }
    }
    let gaps: Vec<_> = returned
        .windows(2)
        .map(|w| (w[1].0 - w[0].0, w[1].1 - w[0].1))
        .collect();
    assert!(
        returned.len() >= 3 && gaps.iter().all(|g| *g == (4, 4)),
        "{returned:?}"
    );
}

/// A piece is as large as the window leaves room, and a lane that is alone gets four times its budget.
#[test]
fn pieces() {
    for (budget, window, first) in [(1000, 1 << 20, 4000), (1 << 20, 3000, 3000)] {
        let mut s = up(Config {
            budget,
            window,
            ..quiet(true)
        });
        s.put(RING, 0, 10_000);
        let heads: Vec<u64> = s.received().iter().filter_map(head).collect();
        assert_eq!(
            (heads[0], heads.last()),
            (first, Some(&10_000)),
            "{heads:?}"
        );
        let all: Vec<u8> = (0..10_000).map(|i| i as u8).collect();
        assert_eq!(s.arrived(0, 10_000), all);
    }
}

/// A lane is told of twice before the next poll: it has one turn all the same, as a lane that is alone.
#[test]
fn one_turn_at_a_time() {
    let mut s = up(Config {
        budget: 1000,
        ..quiet(true)
    });
    (0..2).for_each(|_| s.b.pair.gate(s.id, false));
    s.put(RING, 0, 10_000);
    let heads: Vec<u64> = s.received().iter().filter_map(head).collect();
    assert_eq!(heads, [4000, 8000, 10_000]);
}

/// Nothing more is posted while the window is full; it goes on when requests are done.
#[test]
fn the_window() {
    let mut s = up(Config {
        window: 2000,
        ..quiet(true)
    });
    let before = s.b.pair.stats(s.b.rails[0]);
    s.b.world.set_wire(0, false);
    s.put(RING, 0, 2000);
    s.put(RING, 2000, 5000);
    assert_eq!(s.received(), []);
    s.b.world.set_wire(0, true);
    s.b.later(MS / 4);
    let heads: Vec<u64> = s.received().iter().filter_map(head).collect();
    assert_eq!(heads, [2000, 4000, 5000]);
    let now = s.b.pair.stats(s.b.rails[0]);
    assert_eq!(
        (now.bytes - before.bytes, now.inlined, now.writes),
        (5000, 0, 3)
    );
}

/// Two lanes take turns when there is room.
#[test]
fn turns() {
    let mut s = up(Config {
        window: 1000,
        budget: 1000,
        ..quiet(true)
    });
    let other = s.b.lane(1);
    s.b.peer.received(s.no);
    assert_ne!(other, s.id);
    s.put(RING, 0, 8000);
    let heads: Vec<u64> = s.received().iter().filter_map(head).collect();
    assert_eq!(heads, [1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000]);
}

/// Counters of a rail.
#[test]
fn counters() {
    let mut s = up(quiet(true));
    let before = s.b.pair.stats(s.b.rails[0]);
    s.put(RING, 0, 100);
    s.put(RING, 100, 1100);
    s.snapshot();
    let now = s.b.pair.stats(s.b.rails[0]);
    assert_eq!(now.bytes - before.bytes, 1100);
    assert_eq!(
        (now.inlined - before.inlined, now.writes - before.writes),
        (100, 1)
    );
    assert_eq!(now.messages_sent - before.messages_sent, 2);
    assert_eq!(now.messages_received - before.messages_received, 1);
    assert_eq!(s.b.pair.stats(99), Default::default());
    let (moves, log2, from) = (1, 12, c(0));
    s.say(Body::Ring { moves, log2, from });
    let later = s.b.pair.stats(s.b.rails[0]);
    assert_eq!(later.messages_sent - now.messages_sent, 1, "the answer");
}

/// Bytes on both sides of the ring's end, and on two rings, in one piece.
#[test]
fn two_writes() {
    let mut s = up(quiet(true));
    s.put(RING, 0, 16_000);
    s.says.cursor = c(16_000);
    s.snapshot();
    s.received();
    let before = s.b.pair.stats(s.b.rails[0]).writes;
    s.put(RING, 16_000, 17_000);
    assert_eq!(s.last_snapshot().expect("a snapshot").head, c(17_000));
    assert_eq!(s.b.pair.stats(s.b.rails[0]).writes - before, 2);
    let first: Vec<u8> = (16_384..17_000).map(|i| i as u8).collect();
    assert_eq!(s.arrived(0, 616), first);
}

/// The application moves to another ring: it is told to the peer, and bytes go on there when it has a place.
#[test]
fn another_ring() {
    let mut s = up(quiet(true));
    s.put(RING, 0, 100);
    s.says.cursor = c(100);
    s.snapshot();
    s.received();
    let next = loc(8, 12);
    s.ring(2, next, 100);
    s.put(next, 100, 400);
    let (moves, log2, from) = (2, 12, c(100));
    assert_eq!(s.received(), [Body::Ring { moves, log2, from }]);
    s.answer_ring(2, 65_536);
    let said = s.last_snapshot().expect("a snapshot");
    assert_eq!((said.head, said.moves), (c(400), 2));
    let all: Vec<u8> = (100..400).map(|i| i as u8).collect();
    assert_eq!(s.arrived(65_536 + 100, 300), all);
}

/// What no application does with its rings.
#[test]
fn impossible_moves() {
    for (seq, from, cursor, wanted) in [
        (2, 100, 0, None),
        (2, 99, 0, Some("a ring begins below the head")),
        (
            3,
            100,
            0,
            Some("a ring moved before the reader could follow"),
        ),
    ] {
        let mut s = up(quiet(true));
        s.put(RING, 0, 100);
        s.says.cursor = c(cursor);
        s.snapshot();
        if seq == 3 {
            s.ring(2, loc(4, 12), 100);
        }
        s.ring(seq, loc(8, 12), from);
        s.b.app().heads[0].store(c(110), Relaxed);
        s.b.publish();
        assert_eq!(
            s.fault(),
            wanted.map(underpass_rdma::engine::Fault::App),
            "{seq} {from}"
        );
    }
}
