//! The real lane code, driven by random operations, with every byte accounted for. See `sim` for what is simulated and what is checked.

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
        8 => any::<(bool, bool)>().prop_map(|(own, early)| Act::TakeOver { own, early }),
        1 => prop_oneof![Just(Act::DaemonDies), Just(Act::Cut), Just(Act::Reclaim), Just(Act::Reclaim)],
        2 => Just(Act::Wake),
        2 => any::<bool>().prop_map(|down| Act::Woken { down }),
        2 => Just(Act::Leave),
        1 => Just(Act::Exec),
        2 => Just(Act::Retire),
        1 => Just(Act::Withdraw),
        1 => prop_oneof![Just(20), Just(60), Just(100_000)].prop_map(|ms| Act::Pass { ms }),
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

/// Both ends attached, promoted, and past their prefix when the operations begin, or not.
fn start(w: &mut World, how: u8) {
    for end in 0..2 * usize::from(how > 0) {
        sim::op(w, end, Act::Attach { log2: 12 });
    }
    for end in 0..2 * usize::from(how > 1) {
        sim::op(w, end, Act::Ready);
        sim::op(w, 1 - end, Act::TryUp);
        sim::op(w, 1 - end, Act::Look);
        if how > 2 {
            sim::op(w, end, sim::recv(1));
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
const EVENTS: [&str; 10] = [
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
];

/// The same where ends leave beside a daemon.
const SITUATIONS: [&str; 29] = [
    "taken over",
    "both ends leave at once",
    "both ends revoke at once",
    "both directions are a daemon's at once",
    "a takeover while both ends leave",
    "a takeover meets an end at work",
    "a takeover meets an end that wakes",
    "a claim that came to nothing",
    "a receiver goes on without its sender",
    "a takeover left to a process that was cut",
    "a FIN is left to the daemon",
    "a FIN waits for a claim",
    "a FIN waits for room on TCP",
    "a takeover during an end's FIN",
    "a takeover behind the other end's FIN",
    "the daemon shuts down for an end",
    "an end shuts down late",
    "the FIN of a close follows a takeover",
    "a receiver is gone during a takeover",
    "a receiver closes during a takeover",
    "a receiver is killed during a takeover",
    "a takeover ends in a reset",
    "a takeover for an end that executes",
    "a takeover of an end that executes",
    "executed",
    "counted anew after exec",
    "a lane again",
    "taken over, and TCP is full",
    "given back after TCP was full",
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
                    act: Act::TakeOver {
                        own: false,
                        early: false,
                    },
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

/// What may come between the two ends and a daemon that has, or takes, what one of them sends.
fn between() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => Just(Act::Leave),
        2 => Just(Act::Exec),
        2 => Just(Act::ShutWr),
        2 => Just(Act::Close),
        1 => Just(Act::Kill),
        3 => Just(Act::Wake),
        3 => any::<bool>().prop_map(|down| Act::Woken { down }),
        1 => Just(Act::Cut),
        1 => Just(Act::DaemonDies),
        2 => Just(Act::Reclaim),
        5 => any::<(bool, bool)>().prop_map(|(own, early)| Act::TakeOver { own, early }),
        3 => Just(Act::Look),
        2 => len().prop_map(|len| Act::Send { len, up: true }),
        2 => len().prop_map(|len| Act::Recv { len, peek: false, discard: false, look: true }),
        2 => (1usize..200).prop_map(|n| Act::Deliver { n }),
        2 => prop_oneof![Just(60), Just(100_000)].prop_map(|ms| Act::Pass { ms }),
        1 => (0usize..60, 0usize..60, more()).prop_map(|(snd, rcv, more)| Act::Buffers { snd, rcv, piece: 40, more }),
        1 => Just(Act::Attach { log2: 12 }),
        1 => Just(Act::Retire),
        1 => Just(Act::Withdraw),
    ]
}

/// What is rare by chance, in the middle of a takeover of what an end sends, and the daemon's next step after it.
fn rare() -> impl Strategy<Value = Vec<(usize, Act)>> {
    let on = Act::TakeOver {
        own: false,
        early: false,
    };
    let late = Act::Pass { ms: 100_000 };
    let ends = || prop_oneof![Just(Act::Close), Just(Act::Kill)];
    let lost = prop_oneof![Just(Act::Cut), Just(Act::DaemonDies)];
    let again = on.clone();
    prop_oneof![
        5 => Just(vec![]),
        1 => lost.prop_map(move |lost| {
            vec![(0, Act::ShutWr), (0, lost), (0, again.clone()), (0, Act::Reclaim)]
        }),
        1 => ends().prop_map(move |end| vec![(0, end), (0, late.clone()), (0, on.clone())]),
        1 => ends().prop_map(|end| vec![(1, end)]),
        2 => Just(vec![(0, Act::ShutWr)]),
        1 => Just(vec![(0, Act::ShutWr), (1, Act::ShutWr), (1, Act::Close)]),
    ]
}

/// A receiver revokes, a shutdown of its sender is left to the daemon, which brings everything and the FIN, and the receiver
/// reads up to that before the sender has read anything.
fn read_to_the_end() -> impl Strategy<Value = Vec<Op>> {
    let buffers = |cap, piece| Act::Buffers {
        snd: cap,
        rcv: cap,
        piece,
        more: 0,
    };
    let recv = Act::Recv {
        len: 30_000,
        peek: false,
        discard: false,
        look: true,
    };
    let on = Act::TakeOver {
        own: false,
        early: false,
    };
    (0usize..2, 1usize..4096, 41usize..4096, ops()).prop_map(move |(end, x, y, then)| {
        let ours = |act| (end, act);
        let theirs = |act| (1 - end, act);
        let all = [
            theirs(Act::Send { len: x, up: true }),
            ours(Act::Send { len: y, up: true }),
            ours(buffers(20, 40)),
            theirs(Act::Revoke),
            ours(on.clone()),
            ours(Act::ShutWr),
            ours(buffers(1 << 16, 1 << 20)),
            ours(on.clone()),
            ours(Act::Deliver { n: 1 << 20 }),
            theirs(Act::Revoke),
            theirs(recv.clone()),
            theirs(recv.clone()),
        ];
        let plain = |(end, act)| Op {
            end,
            act,
            inner: vec![],
        };
        all.into_iter().map(plain).chain(then).collect()
    })
}

/// In the middle of the daemon's first step, an end wakes and takes its lock; or dies, and its receiver goes on alone.
fn meets() -> impl Strategy<Value = Vec<(usize, bool, Act)>> {
    let at = || 0usize..2;
    let dies = at().prop_map(|at| vec![(at, false, Act::Kill), (0, true, Act::Withdraw)]);
    let wakes = (at(), 0usize..6, any::<bool>()).prop_map(|(at, then, down)| {
        vec![(at, false, Act::Wake), (then, false, Act::Woken { down })]
    });
    prop_oneof![3 => Just(vec![]), 1 => dies, 1 => wakes]
}

/// Both ends have sent, TCP is full or nearly, one of them leaves or both do, and the daemon is asked.
fn situations() -> impl Strategy<Value = Vec<Op>> {
    let plain = |end, act| Op {
        end,
        act,
        inner: vec![],
    };
    let room = || {
        (0usize..60, 0usize..60, more()).prop_map(|(snd, rcv, more)| Act::Buffers {
            snd,
            rcv,
            piece: 40,
            more,
        })
    };
    let inner = || proptest::collection::vec((0usize..4, 0usize..2, between()), 0..3);
    let leaves =
        || prop_oneof![2 => Just(Act::Leave), 1 => Just(Act::Exec), 1 => Just(Act::Revoke)];
    let first = (
        (0usize..2, leaves(), inner()),
        (0usize..2, leaves(), inner()),
    );
    let taken = || (0usize..2, any::<bool>(), inner());
    let then = proptest::collection::vec((0usize..2, between(), inner()), 0..8);
    let sent = (len(), len(), room(), room());
    let between = (taken(), taken(), rare(), meets());
    (sent, first, between, then).prop_map(move |(sent, first, (a, b, rare, meets), then)| {
        let (x, y, over, under) = sent;
        let mut all = vec![
            plain(0, Act::Send { len: x, up: true }),
            plain(1, Act::Send { len: y, up: true }),
            plain(0, over),
            plain(1, under),
        ];
        for (end, act, inner) in [first.0, first.1] {
            all.push(Op { end, act, inner });
        }
        let sender = a.0;
        for (end, own, mut inner) in [a, b] {
            let act = Act::TakeOver { own, early: false };
            let whose = |peer| if peer { 1 - end } else { end };
            inner.extend(
                meets
                    .iter()
                    .map(|(at, peer, act)| (*at, whose(*peer), act.clone())),
            );
            all.push(Op { end, act, inner });
        }
        all.extend(rare.into_iter().map(|(k, act)| plain(sender ^ k, act)));
        all.extend(
            then.into_iter()
                .map(|(end, act, inner)| Op { end, act, inner }),
        );
        all
    })
}

#[test]
fn every_byte_arrives_once_and_in_order() {
    run((0u8..4, ops()), &EVENTS, Some(0));
}

#[test]
fn every_byte_arrives_without_the_daemon_that_took_over() {
    let events = ["the daemon died with a direction", "reclaimed"];
    run((2u8..4, leaving()), &events, None);
}

#[test]
fn every_byte_arrives_whoever_leaves() {
    let all = prop_oneof![12 => situations(), 1 => read_to_the_end()];
    run((2u8..4, all), &SITUATIONS, Some(1));
}

/// `which`: the column of transitions that have to be seen, if any.
fn run(begin: impl Strategy<Value = (u8, Vec<Op>)>, events: &[&str], which: Option<usize>) {
    let config = ProptestConfig {
        cases: cases(),
        max_shrink_iters: 40_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let seen = RefCell::new(BTreeMap::<&str, u64>::new());
    let moves = RefCell::new(sim::moves::Moves::new());
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
        for (what, n) in w.moves.borrow().iter() {
            *moves.borrow_mut().entry(what.clone()).or_default() += n;
        }
        for (what, n) in w.seen.borrow().iter() {
            *seen.borrow_mut().entry(what).or_default() += n;
        }
        Ok(())
    };
    // Random operations that reach nothing would prove nothing; what is rare may need more of them.
    let unseen = || events.iter().find(|e| !seen.borrow().contains_key(**e));
    for _ in 0..2 {
        if let Err(e) = TestRunner::new(config.clone()).run(&run, case) {
            panic!("{e}");
        }
        if unseen().is_none() {
            break;
        }
    }
    for (what, n) in seen.borrow().iter() {
        eprintln!("{n:>9} {what}");
    }
    for ((what, from, to), n) in moves.borrow().iter() {
        eprintln!("{n:>9} {what}: {from} to {to}");
    }
    assert_eq!(unseen(), None, "never seen");
    sim::moves::insist(&moves.borrow(), which, cases() >= 15_000);
}
