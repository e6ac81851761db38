//! The real lane code, driven by random operations of the kinds that the model knows, with every
//! byte accounted for. See `sim` for what is simulated and what is checked.

#![cfg(not(loom))]

mod sim;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use sim::{Act, Op, World};
use std::cell::RefCell;
use std::collections::BTreeMap;

fn len() -> impl Strategy<Value = usize> {
    prop_oneof![
        3 => 1usize..64,
        2 => 1usize..4096,
        2 => 4032usize..4160,
        1 => 8128usize..8256,
        1 => 1usize..20_000,
        1 => Just(0usize),
    ]
}

fn log2() -> impl Strategy<Value = u32> {
    prop_oneof![3 => Just(12u32), 1 => Just(13u32), 1 => Just(14u32)]
}

/// How far beyond its buffer the kernel lets an end go that leaves: not at all, not far, or as far as may be needed.
fn more() -> impl Strategy<Value = usize> {
    prop_oneof![2 => Just(0usize), 1 => 1usize..5000, 1 => Just(1 << 20), 1 => Just((1 << 20) + 1)]
}

fn act() -> impl Strategy<Value = Act> {
    let recv =
        (len(), any::<(bool, bool)>(), any::<bool>()).prop_map(|(len, (a, b), look)| Act::Recv {
            len,
            peek: a && b,
            discard: a && !b && !look,
            look,
        });
    let whole = len().prop_map(|n| Act::Recv {
        len: n.max(1) * 2,
        peek: false,
        discard: false,
        look: true,
    });
    prop_oneof![
        24 => (len(), any::<bool>()).prop_map(|(len, up)| Act::Send { len, up }),
        12 => recv,
        16 => whole,
        10 => prop_oneof![1usize..200, Just(1 << 20)].prop_map(|n| Act::Deliver { n }),
        10 => Just(Act::Ready),
        6 => Just(Act::TryUp),
        4 => Just(Act::Down),
        3 => Just(Act::WantDown),
        2 => Just(Act::UnwantDown),
        6 => Just(Act::Revoke),
        4 => Just(Act::Look),
        2 => Just(Act::Probe),
        2 => Just(Act::Unread),
        5 => log2().prop_map(|log2| Act::Move { log2 }),
        3 => (1usize..40, 1usize..40, 1usize..40, more()).prop_map(|(snd, rcv, piece, more)| Act::Buffers { snd, rcv, piece, more }),
        2 => (100usize..9000, 100usize..9000, more()).prop_map(|(snd, rcv, more)| Act::Buffers { snd, rcv, piece: 1 << 20, more }),
        1 => Just(Act::Buffers { snd: 1 << 16, rcv: 1 << 16, piece: 1 << 20, more: 0 }),
        2 => (0u32..3, 1u32..6000, 0u32..6000).prop_map(|(n, snd, room)| Act::Sizes { sndbuf: snd * u32::from(n > 0), room }),
        8 => Just(Act::TakeOver),
        1 => prop_oneof![Just(Act::DaemonDies), Just(Act::Reclaim), Just(Act::Reclaim)],
        1 => Just(Act::ShutWr),
        1 => prop_oneof![Just(Act::Close), Just(Act::Kill)],
        2 => log2().prop_map(|log2| Act::Attach { log2 }),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    // Several things at one point, more often than not: races need company.
    let at = prop_oneof![3 => Just(0usize), 2 => 1usize..6];
    let some = proptest::collection::vec((at, 0usize..2, act()), 0..6);
    // What one end may well do in one go while the other is inside a call.
    let last = prop_oneof![
        Just(Act::Down),
        Just(Act::ShutWr),
        Just(Act::Kill),
        Just(Act::Look)
    ];
    let burst = (0usize..6, 0usize..2, len(), last).prop_map(|(at, end, len, last)| {
        let all = Act::Deliver { n: 1 << 20 };
        let send = Act::Send { len, up: true };
        vec![
            (at, end, Act::TryUp),
            (0, end, send),
            (0, end, last),
            (0, end, all),
        ]
    });
    let inner = prop_oneof![4 => some, 1 => burst];
    let plain = (0usize..2, act(), inner).prop_map(|(end, act, inner)| Op { end, act, inner });
    let reuse = (0u32..3).prop_map(|gap| Op {
        end: 0,
        act: Act::Reuse { gap },
        inner: vec![],
    });
    prop_oneof![60 => plain, 1 => reuse]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec(op(), 1..40)
}

/// Both ends attached and promoted when the operations begin, or not.
fn start(w: &mut World, how: u8) {
    if how > 0 {
        for end in 0..2 {
            w.run(&Op {
                end,
                act: Act::Attach { log2: 12 },
                inner: vec![],
            });
        }
    }
    if how > 1 {
        for end in 0..2 {
            for (end, act) in [
                (end, Act::Ready),
                (1 - end, Act::TryUp),
                (1 - end, Act::Look),
            ] {
                w.run(&Op {
                    end,
                    act,
                    inner: vec![],
                });
            }
        }
    }
}

fn cases() -> u32 {
    // More with PROPTEST_CASES, for long runs by hand. Unoptimised code is twenty times slower.
    std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(if cfg!(debug_assertions) { 700 } else { 15_000 })
}

/// What has to happen.
const EVENTS: [&str; 12] = [
    "ready",
    "up",
    "bytes on the ring",
    "full",
    "blocked",
    "moved",
    "revoked after waiting",
    "killed within",
    "taken over",
    "taken over, and TCP is full",
    "counters changed by drops",
    "counted, peeked and received",
];

/// A receiver leaves beside a sender that does nothing and has more than TCP takes; the daemon goes on for it, and
/// dies at some moment.
fn leaving() -> impl Strategy<Value = Vec<Op>> {
    let plain = |end, act| Op {
        end,
        act,
        inner: vec![],
    };
    let room = (0usize..60, 0usize..60, more()).prop_map(|(snd, rcv, more)| Act::Buffers {
        snd,
        rcv,
        piece: 40,
        more,
    });
    let first = prop_oneof![Just(Act::Down), Just(Act::Look)];
    let inner = proptest::collection::vec((0usize..3, 0usize..2, act()), 0..3);
    (0usize..2, len(), room, first, inner, 0usize..6, ops()).prop_map(
        move |(end, len, room, first, mut inner, dies, then)| {
            inner.push((dies, end, Act::DaemonDies));
            let mut all = vec![
                plain(end, Act::Send { len, up: true }),
                plain(end, room),
                plain(end, first), // (its own way down may have begun)
                plain(1 - end, Act::Revoke),
                Op {
                    end,
                    act: Act::TakeOver,
                    inner,
                },
                plain(1 - end, Act::Revoke),
                plain(end, Act::DaemonDies),
            ];
            all.extend(then);
            all
        },
    )
}

#[test]
fn every_byte_arrives_once_and_in_order() {
    run((0u8..3, ops()), &EVENTS);
}

#[test]
fn every_byte_arrives_without_the_daemon_that_took_over() {
    let events = [
        "taken over",
        "the daemon died with a direction",
        "reclaimed",
    ];
    run((Just(2), leaving()), &events);
}

fn run(begin: impl Strategy<Value = (u8, Vec<Op>)>, events: &[&str]) {
    let config = ProptestConfig {
        cases: cases(),
        max_shrink_iters: 40_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let seen = RefCell::new(BTreeMap::<&str, u64>::new());
    let run = (begin, (0usize..20_000, 0usize..20_000), any::<bool>());
    let case = |((how, ops), todo, promote): ((u8, Vec<Op>), (usize, usize), bool)| {
        let mut w = World::new();
        w.trace.set(std::env::var_os("LANE_TRACE").is_some());
        start(&mut w, how);
        for op in &ops {
            w.run(op);
        }
        for end in 0..2 {
            w.agree(end);
        }
        w.settle([todo.0, todo.1], promote);
        for (what, n) in w.seen.borrow().iter() {
            *seen.borrow_mut().entry(what).or_default() += n;
        }
        Ok(())
    };
    // Random operations that reach nothing would prove nothing; what is rare may need more of them.
    let unseen = || events.iter().find(|e| !seen.borrow().contains_key(**e));
    for _ in 0..4 {
        if let Err(e) = TestRunner::new(config.clone()).run(&run, case) {
            panic!("{e}");
        }
        if unseen().is_none() {
            break;
        }
    }
    eprintln!("{:?}", seen.borrow());
    assert_eq!(unseen(), None, "never seen");
}
