//! Two whole daemons, many seeds, each another course of events: see [`mod@world`].

#[path = "two_daemons/mod.rs"]
mod world;

use underpass_rdma::sim::{Faults, Rng};
use world::{Counts, World};

fn one(seed: u64, calm: bool) -> Counts {
    let mut rng = Rng(seed);
    let faults = Faults {
        delay_ns: 500 << rng.below(6),
        slow_in: [0, 200][rng.below(2) as usize],
        error_in: if calm {
            0
        } else {
            [0, 2_000][rng.below(2) as usize]
        },
        late_ns: 1 << (10 + rng.below(13)),
        ..Faults::default()
    };
    let chaos_in = if calm {
        0
    } else {
        [30, 100, 400][rng.below(3) as usize]
    };
    let ticks = 200 + rng.below(2_000);
    let mut w = World::new(seed, faults, !calm && rng.one_in(2));
    w.run(ticks, chaos_in);
    w.end()
}

/// `SEED=n` runs one, to look at it (`WHY=1`: and tells what happens); `SEEDS=n` so many.
fn seeds(name: &str, from: u64, n: u64, calm: bool) -> Option<Counts> {
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
        match std::panic::catch_unwind(|| one(seed, calm)) {
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
const MANY: u64 = if cfg!(debug_assertions) { 100 } else { 5_000 };

#[test]
fn undisturbed() {
    if let Some(c) = seeds("undisturbed", 0, MANY, true) {
        assert!(c.ups > 0 && c.ring_bytes > 0);
        assert_eq!(c.doubts, 0);
    }
}

#[test]
fn disturbed() {
    if let Some(c) = seeds("disturbed", 10_000, MANY, false) {
        assert!(c.ups > 0 && c.ring_bytes > 0);
        assert!(c.wires > 0 && c.naps > 0 && c.kills > 0 && c.restarts > 0);
    }
}
