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

/// What lies between the ends.
#[derive(Clone, Copy, PartialEq)]
enum Between {
    /// One node.
    Nothing,
    Daemons,
    /// The same, and they take directions over, and die.
    Keepers,
}

fn act(between: Between) -> BoxedStrategy<Act> {
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
    let act = prop_oneof![
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
        3 => (1usize..40, 1usize..40, 1usize..40).prop_map(|(snd, rcv, piece)| Act::Buffers { snd, rcv, piece }),
        2 => (100usize..9000, 100usize..9000).prop_map(|(snd, rcv)| Act::Buffers { snd, rcv, piece: 1 << 20 }),
        1 => Just(Act::Buffers { snd: 1 << 16, rcv: 1 << 16, piece: 1 << 20 }),
        2 => (0u32..3, 1u32..6000, 0u32..6000).prop_map(|(n, snd, room)| Act::Sizes { sndbuf: snd * u32::from(n > 0), room }),
        1 => Just(Act::ShutWr),
        1 => prop_oneof![Just(Act::Close), Just(Act::Kill)],
        2 => log2().prop_map(|log2| Act::Attach { log2 }),
    ];
    let wire = prop_oneof![
        20 => prop_oneof![0usize..4, Just(1000)].prop_map(|n| Act::Carry { n }),
        1 => Just(Act::Cut),
        2 => Just(Act::Mend),
    ];
    let keepers = prop_oneof![
        12 => any::<bool>().prop_map(|patient| Act::Keep { patient }),
        2 => Just(Act::Cut),
        1 => Just(Act::Kill),
        1 => Just(Act::ShutWr),
        1 => Just(Act::DaemonDies),
    ];
    match between {
        Between::Nothing => act.boxed(),
        Between::Daemons => prop_oneof![3 => act, 1 => wire].boxed(),
        Between::Keepers => prop_oneof![6 => act, 2 => wire, 2 => keepers].boxed(),
    }
}

fn op(between: Between) -> impl Strategy<Value = Op> {
    // Several things at one point, more often than not: races need company.
    let at = prop_oneof![3 => Just(0usize), 2 => 1usize..6];
    let some = proptest::collection::vec((at, 0usize..2, act(between)), 0..6);
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
    let plain =
        (0usize..2, act(between), inner).prop_map(|(end, act, inner)| Op { end, act, inner });
    let reuse = (0u32..3).prop_map(|gap| Op {
        end: 0,
        act: Act::Reuse { gap },
        inner: vec![],
    });
    prop_oneof![60 => plain, 1 => reuse]
}

/// An end falls asleep, or ends, with bytes on its ring, in front of a TCP that takes little; its
/// daemon takes over, and may die of it.
fn asleep() -> impl Strategy<Value = Vec<Op>> {
    let why = prop_oneof![
        4 => Just(Act::Cut),
        1 => Just(Act::Kill),
        1 => Just(Act::ShutWr),
        1 => Just(Act::Close),
    ];
    let begins = proptest::option::of(prop_oneof![Just(Act::Down), Just(Act::Look)]);
    let inner = |end| {
        let act = prop_oneof![2 => act(Between::Keepers), 1 => Just(Act::DaemonDies)];
        proptest::collection::vec((0usize..5, Just(end), act), 0..2)
    };
    let keeps = proptest::collection::vec((any::<bool>(), 0usize..60, inner(0), inner(1)), 1..4);
    let room = (1usize..60, 1usize..60, 1usize..60);
    let after = prop_oneof![1 => Just(0), 1 => Just(1), 2 => Just(2)];
    let end = (0usize..2, after, any::<bool>());
    (end, len(), room, why, begins, keeps).prop_map(
        |((end, after, ready), len, (snd, rcv, piece), why, begins, keeps)| {
            let op = |end, act| Op {
                end,
                act,
                inner: vec![],
            };
            let (one, peer) = (|act| op(end, act), |act| op(1 - end, act));
            let carry = Act::Carry { n: 1000 };
            let up = || {
                let mut all = vec![peer(Act::Ready), peer(carry.clone())];
                all.extend([Act::TryUp, carry.clone()].map(one));
                all.push(peer(carry.clone()));
                all
            };
            let mut all = vec![];
            if ready {
                all.extend(up());
            }
            all.push(one(Act::Send { len, up: true }));
            all.push(one(Act::Carry { n: len % 5 }));
            all.push(one(Act::Buffers { snd, rcv, piece }));
            all.extend(begins.map(one));
            all.push(one(why));
            for (patient, n, a, b) in keeps {
                all.push(Op {
                    end,
                    act: Act::Keep { patient },
                    inner: [a, b].concat(),
                });
                all.push(one(Act::Deliver { n }));
            }
            match after {
                0 => {}
                1 => all.push(one(Act::DaemonDies)),
                _ => {
                    // Everything is well again.
                    let (snd, rcv, piece) = (1 << 16, 1 << 16, 1 << 20);
                    let recv = Act::Recv {
                        len: 30_000,
                        peek: false,
                        discard: false,
                        look: true,
                    };
                    let all_of_it = Act::Deliver { n: 1 << 20 };
                    all.extend([Act::Mend, Act::Buffers { snd, rcv, piece }].map(one));
                    for _ in 0..2 {
                        all.extend([Act::Keep { patient: true }, Act::Look].map(one));
                        all.extend([carry.clone(), all_of_it.clone()].map(one));
                        all.extend([recv.clone(), recv.clone()].map(peer));
                    }
                    all.extend(up());
                    all.push(one(Act::Send { len, up: true }));
                }
            }
            all
        },
    )
}

fn ops(between: Between) -> BoxedStrategy<Vec<Op>> {
    let some = proptest::collection::vec(op(between), 1..40);
    match between {
        Between::Keepers => proptest::collection::vec(
            prop_oneof![12 => op(between).prop_map(|o| vec![o]), 1 => asleep()],
            1..40,
        )
        .prop_map(|all| all.concat())
        .boxed(),
        _ => some.boxed(),
    }
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
        let all = Act::Carry { n: 1000 }; // nothing to do on one node
        for end in 0..2 {
            for (end, act) in [
                (end, Act::Ready),
                (end, all.clone()),
                (1 - end, Act::TryUp),
                (1 - end, all.clone()),
                (end, all.clone()),
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

#[test]
fn every_byte_arrives_once_and_in_order() {
    every_byte(
        Between::Nothing,
        &[
            "ready",
            "up",
            "bytes on the ring",
            "full",
            "blocked",
            "moved",
            "revoked after waiting",
            "killed within",
            "counters changed by drops",
            "counted, peeked and received",
        ],
    );
}

/// The same with the ends on two nodes: what each stores reaches the other late, through daemons, or
/// not at all.
#[test]
fn every_byte_arrives_once_and_in_order_across_nodes() {
    every_byte(
        Between::Daemons,
        &[
            "ready",
            "bytes on the ring",
            "blocked",
            "moved",
            "revoked after waiting",
            "killed within",
        ],
    );
}

/// And with daemons that take over from ends that are asleep, have closed or are gone.
#[test]
fn every_byte_arrives_once_and_in_order_through_takeovers() {
    every_byte(
        Between::Keepers,
        &[
            "bytes on the ring",
            "blocked",
            "killed within",
            "taken",
            "taken in the middle",
            "not taken",
            "kept",
            "kept to the end",
            "kept without a frame",
            "daemon died within",
            "daemon died with a direction",
            "reclaimed in the middle",
            "in doubt",
        ],
    );
}

fn every_byte(between: Between, events: &[&str]) {
    let config = ProptestConfig {
        cases: cases(),
        max_shrink_iters: 40_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let seen = RefCell::new(BTreeMap::<&str, u64>::new());
    let run = (
        0u8..3,
        ops(between),
        (0usize..20_000, 0usize..20_000),
        any::<bool>(),
    );
    let result = TestRunner::new(config).run(&run, |(how, ops, todo, promote)| {
        let mut w = match between {
            Between::Nothing => World::new(),
            Between::Daemons => World::across_nodes(),
            Between::Keepers => World::with_takeover(),
        };
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
    });
    if let Err(e) = result {
        panic!("{e}");
    }
    // Random operations that reach nothing would prove nothing.
    let seen = seen.into_inner();
    eprintln!("{seen:?}");
    for what in events {
        assert!(seen.contains_key(what), "never seen: {what}");
    }
}
