//! Two whole daemons, many seeds, each another course of events: see [`mod@world`].

#[path = "two_daemons/mod.rs"]
mod world;

use underpass_rdma::sim::{Faults, Rng};
use world::{Counts, How, World};

/// What a test lets happen.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Nothing.
    Calm,
    /// Processes sleep, and connections leave their lanes.
    Leaving,
    /// Everything.
    Rough,
}

fn one(seed: u64, kind: Kind) -> Counts {
    let mut rng = Rng(seed);
    let rough = kind == Kind::Rough;
    let mut pick = |when, from: &[u64]| match when {
        true => from[rng.below(from.len() as u64) as usize],
        false => 0,
    };
    let delay_ns = pick(true, &[500, 1_000, 2_000, 4_000, 8_000, 16_000]);
    let slow_in = pick(true, &[0, 200]);
    let error_in = pick(rough, &[0, 2_000]);
    let chaos_in = pick(kind != Kind::Calm, &[30, 100, 400]);
    let leave_in = match kind {
        Kind::Calm => 0,
        Kind::Leaving => pick(true, &[30, 100]),
        Kind::Rough => pick(true, &[0, 30, 100]),
    };
    let faults = Faults {
        delay_ns,
        slow_in,
        error_in,
        late_ns: 1 << (10 + rng.below(13)),
        ..Faults::default()
    };
    let ticks = 200 + rng.below(2_000);
    let how = match kind {
        Kind::Rough if rng.one_in(2) => How::Deaths,
        Kind::Rough => How::NoDeaths,
        _ => How::Naps,
    };
    let mut w = World::new(seed, faults, how);
    w.run(ticks, chaos_in, leave_in);
    w.end()
}

/// `SEED=n` runs one, to look at it (`WHY=1`: and tells what happens); `SEEDS=n` so many.
fn seeds(name: &str, from: u64, n: u64, kind: Kind) -> Option<Counts> {
    let number = |v| {
        std::env::var(v)
            .ok()
            .and_then(|s: String| s.parse::<u64>().ok())
    };
    let only = number("SEED");
    let (first, n) = match only {
        Some(seed) => (seed, 1),
        None => (from, number("SEEDS").unwrap_or(n)),
    };
    if std::env::var_os("WHY").is_some() {
        tracing_subscriber::fmt()
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .init();
    }
    let mut sum = Counts::default();
    for seed in first..first + n {
        match std::panic::catch_unwind(|| one(seed, kind)) {
            Ok(c) => sum.add(&c),
            Err(e) => {
                eprintln!(
                    "SEED={seed} cargo test -p underpassd --test two_daemons {name} -- --exact"
                );
                std::panic::resume_unwind(e);
            }
        }
    }
    eprintln!("{name}: {sum:?}");
    only.is_none().then_some(sum)
}

/// Of each kind.
const MANY: u64 = if cfg!(debug_assertions) { 100 } else { 3_500 };

#[test]
fn undisturbed() {
    if let Some(c) = seeds("undisturbed", 0, MANY, Kind::Calm) {
        assert!(c.ups > 0 && c.ring_bytes > 0);
        assert_eq!(c.doubts, 0);
    }
}

#[test]
fn disturbed() {
    if let Some(c) = seeds("disturbed", 10_000, MANY, Kind::Rough) {
        assert!(c.ups > 0 && c.ring_bytes > 0);
        assert!(c.wires > 0 && c.naps > 0 && c.kills > 0 && c.restarts > 0);
    }
}

#[test]
fn leaving() {
    if let Some(c) = seeds("leaving", 20_000, MANY, Kind::Leaving) {
        assert!(c.ups > 0 && c.leaves > 0 && c.naps > 0);
        // Whatever the program at the other end does.
        assert_eq!((c.late, c.doubts), (0, 0));
        assert!(c.stalled * 4 < c.leaves);
    }
}
