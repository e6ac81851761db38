//! A peer that writes anything, at any moment, into everything it may write: its shared words, its
//! ring bytes and the TCP stream, frames with the right tag included. The honest end must not
//! panic, hang, or touch memory that is not its own to touch (guard pages and read-only mappings
//! see to it that this kills the test); the worst that may happen is a reset.

#![cfg(not(loom))]

mod sim;

use lane::abi::{Control, Loc, Word};
use proptest::prelude::*;
use sim::memory::packed;
use sim::scribble::{begin, plan, word, Scribble, BAD, WORDS};
use sim::{Act, Op};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0u64..70_000,
        (0u64..6).prop_map(|n| u64::MAX - n),
        (0u64..64, -3i64..4).prop_map(|(bit, d)| (1u64 << bit).wrapping_add_signed(d)),
        (0u32..6, 0u8..32).prop_map(packed),
        (0u32..70, any::<u32>(), 0u32..70).prop_map(|(chunk, page, log2)| Loc {
            chunk,
            page,
            log2
        }
        .word()
        .raw()),
        (1u32..3, 0u32..70, 10u32..24)
            .prop_map(|(chunk, page, log2)| Loc { chunk, page, log2 }.word().raw()),
    ]
}

fn scribble() -> impl Strategy<Value = Scribble> {
    prop_oneof![
        8 => (0usize..WORDS, value()).prop_map(|(w, v)| Scribble::Word(w, v)),
        6 => (0usize..WORDS, -5000i64..5000).prop_map(|(w, v)| Scribble::Nudge(w, v)),
        2 => (any::<usize>(), proptest::collection::vec(any::<u8>(), 1..300)).prop_map(|(at, b)| Scribble::Bytes(at, b)),
        1 => proptest::collection::vec(any::<u8>(), 1..100).prop_map(Scribble::Tcp),
        2 => (0u32..4, value()).prop_map(|(e, c)| Scribble::Frame(e, c)),
        1 => Just(Scribble::Fin),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    let len = || prop_oneof![0usize..10_000, 1usize..50];
    prop_oneof![
        6 => (len(), any::<bool>()).prop_map(|(len, up)| Act::Send { len, up }),
        9 => (len(), any::<bool>(), any::<bool>(), any::<bool>())
            .prop_map(|(len, peek, discard, look)| Act::Recv { len, peek, discard: discard && !peek, look }),
        4 => (1usize..100_000).prop_map(|n| Act::Deliver { n }),
        4 => Just(Act::Ready),
        3 => Just(Act::TryUp),
        2 => Just(Act::Down),
        1 => Just(Act::WantDown),
        3 => Just(Act::Revoke),
        2 => Just(Act::Look),
        2 => Just(Act::Probe),
        2 => Just(Act::Unread),
        2 => (12u32..15).prop_map(|log2| Act::Move { log2 }),
        1 => Just(Act::Attach { log2: 12 }),
    ]
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(3000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 40_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_worst_is_a_reset(
        ops in proptest::collection::vec((0usize..4, act()), 1..40),
        scribbles in proptest::collection::vec((0usize..12, scribble()), 1..30),
    ) {
        let mut w = begin();
        plan(&w, scribbles);
        for (e, act) in &ops {
            // The hostile end also acts regularly, or little would be reached.
            w.run(&Op { end: usize::from(*e == 0), act: act.clone(), inner: vec![] });
        }
    }
}

/// The same with real concurrency: words and ring bytes change in the middle of everything.
#[test]
fn while_a_thread_scribbles() {
    let stop = AtomicBool::new(false);
    let turns = AtomicU64::new(0);
    let mut resets = 0;
    for round in 0..60u64 {
        let mut w = begin();
        stop.store(false, SeqCst);
        // An address, because `World` stays on this thread; the mapping outlives the scope.
        let control = std::ptr::from_ref(w.control(BAD)) as usize;
        std::thread::scope(|s| {
            s.spawn(|| {
                // SAFETY: `World` maps the control words for as long as the test's thread lives.
                let c = unsafe { &*(control as *const Control) };
                let mut x = round * 2 + 1;
                while !stop.load(Relaxed) {
                    x = x
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let (n, r) = ((x >> 33) as usize % WORDS, x >> 40);
                    let v = match r % 4 {
                        0 => word(c, n).load(Relaxed).wrapping_add(r % 9000),
                        1 => packed((r as u32 % 4, (r >> 5) as u8 & 15)),
                        2 => x,
                        _ => word(c, n).load(Relaxed) ^ 1 << (r % 64),
                    };
                    word(c, n).store(v, Relaxed);
                    turns.fetch_add(1, Relaxed);
                    std::hint::spin_loop();
                }
            });
            for i in 0..400usize {
                // On a busy machine the scribbler may not have a processor yet.
                let before = turns.load(Relaxed);
                while i % 20 == 0 && turns.load(Relaxed) == before {
                    std::thread::yield_now();
                }
                let len = 1 + i * 37 % 6000;
                let act = match i % 8 {
                    0 => Act::Ready,
                    1 => Act::Revoke,
                    2 | 3 => Act::Send { len, up: true },
                    4 => Act::Look,
                    5 => Act::Move {
                        log2: 12 + i as u32 % 3,
                    },
                    _ => Act::Recv {
                        len,
                        peek: i % 3 == 0,
                        discard: false,
                        look: true,
                    },
                };
                w.run(&Op {
                    end: 0,
                    act,
                    inner: vec![],
                });
            }
            stop.store(true, SeqCst);
        });
        resets += w.seen.borrow().get("reset").copied().unwrap_or(0);
    }
    assert!(resets > 0, "the scribbler was never noticed");
}

/// The peer's words change between two pieces of one receive: what was taken before counts.
#[test]
fn between_two_pieces() {
    let recv = |len| Act::Recv {
        len,
        peek: false,
        discard: false,
        look: false,
    };
    let ops = [
        (0, Act::Revoke),
        (1, Act::Send { len: 1, up: false }),
        (0, Act::Ready),
        (1, Act::Send { len: 0, up: false }),
        (1, Act::Deliver { n: 1 }),
        (1, recv(0)),
        (1, Act::Send { len: 787, up: true }),
        (0, recv(787)),
    ];
    let mut w = begin();
    plan(
        &w,
        vec![
            (2, Scribble::Nudge(0, -1939)),
            (4, Scribble::Word(6, 2)),
            (4, Scribble::Word(4, 0)),
        ],
    );
    for (end, act) in ops {
        w.run(&Op {
            end,
            act,
            inner: vec![],
        });
    }
}
