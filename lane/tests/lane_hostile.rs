//! A peer that writes anything, at any moment, into everything it may write: its shared words, its
//! ring bytes and the TCP stream, frames with the right tag included. The honest end must not
//! panic, hang, or touch memory that is not its own to touch (guard pages and read-only mappings
//! see to it that this kills the test); the worst that may happen is a reset.

#![cfg(not(loom))]

mod sim;

use lane::abi::{Control, Cursor, Epoch, Loc, Word, CONTROL_BYTES};
use lane::proto::frame::{Frame, Kind};
use proptest::prelude::*;
use sim::memory::{packed, raw};
use sim::{Act, Op, World, LANE, TAG};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

/// The one that scribbles; the other is checked.
const BAD: usize = 1;

#[derive(Clone, Debug)]
enum Scribble {
    /// One of the words of the lane.
    Word(usize, u64),
    /// The word plus a little.
    Nudge(usize, i64),
    Bytes(usize, Vec<u8>),
    Tcp(Vec<u8>),
    Frame(u32, u64),
    Fin,
}

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

const WORDS: usize = 13;

fn word(c: &Control, n: usize) -> &AtomicU64 {
    let lane = LANE as usize;
    let (tx, rx) = (&c.tx[lane], &c.rx[lane]);
    [
        raw(&tx.state),
        raw(&tx.up_tcp_pos),
        raw(&tx.up_start),
        raw(&tx.loc[0]),
        raw(&tx.loc[1]),
        raw(&tx.loc_from[0]),
        raw(&tx.loc_from[1]),
        raw(&rx.word),
        raw(&rx.revoked),
        raw(&c.heads[lane]),
        raw(&c.cursors[lane]),
        // Twice: it matters most.
        raw(&c.heads[lane]),
        raw(&tx.state),
    ][n]
}

fn apply(w: &World, s: &Scribble) {
    let c = w.control(BAD);
    match s {
        Scribble::Word(n, v) => word(c, *n).store(*v, SeqCst),
        Scribble::Nudge(n, v) => {
            word(c, *n).fetch_add(*v as u64, SeqCst);
            if v % 7 == 0 {
                c.tx[LANE as usize].loc_seq.fetch_add(*v as u32 % 4, SeqCst);
            }
        }
        Scribble::Bytes(at, b) => w.scribble(
            BAD,
            at % (CONTROL_BYTES + sim::memory::CHUNKS * sim::memory::CHUNK),
            b,
        ),
        Scribble::Tcp(b) => w.inject(BAD, b),
        Scribble::Frame(epoch, cursor) => {
            let f = Frame {
                kind: Kind::Down,
                epoch: Epoch::new(*epoch),
                rest: 0,
                cursor: Cursor::new(*cursor),
                tag: TAG ^ BAD as u64,
            };
            w.inject(BAD, &f.encode());
        }
        Scribble::Fin => _ = w.net.borrow_mut().fin(BAD),
    }
}

fn begin() -> World {
    let mut w = World::new();
    for end in 0..2 {
        w.run(&Op {
            end,
            act: Act::Attach { log2: 12 },
            inner: vec![],
        });
    }
    for end in 0..2 {
        w.run(&Op {
            end,
            act: Act::Ready,
            inner: vec![],
        });
        w.run(&Op {
            end: 1 - end,
            act: Act::TryUp,
            inner: vec![],
        });
    }
    w.hostile.set(true);
    w.trace.set(std::env::var_os("LANE_TRACE").is_some());
    w
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
        let mut plan = scribbles.into_iter();
        let mut next = plan.next();
        *w.meddle.borrow_mut() = Some(Box::new(move |w: &World| {
            if let Some((wait, s)) = &mut next {
                if *wait > 0 {
                    *wait -= 1;
                } else {
                    apply(w, s);
                    next = plan.next();
                }
            }
        }));
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
    let mut plan = [
        (2, Scribble::Nudge(0, -1939)),
        (4, Scribble::Word(6, 2)),
        (4, Scribble::Word(4, 0)),
    ]
    .into_iter();
    let mut next = plan.next();
    *w.meddle.borrow_mut() = Some(Box::new(move |w: &World| match &mut next {
        Some((wait @ 1.., _)) => *wait -= 1,
        Some((_, s)) => {
            apply(w, s);
            next = plan.next();
        }
        None => {}
    }));
    for (end, act) in ops {
        w.run(&Op {
            end,
            act,
            inner: vec![],
        });
    }
}
