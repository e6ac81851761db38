//! The engine over simulated verbs: many seeds, each another course of events.

mod sim;

use sim::{Counts, Sim};
use underpass_rdma::engine::Fault;
use underpass_rdma::sim::{Faults, Rng};

fn add(sum: &mut Counts, c: Counts) {
    sum.ring_bytes += c.ring_bytes;
    sum.ups += c.ups;
    sum.moves += c.moves;
    sum.link_downs += c.link_downs;
    sum.no_rail += c.no_rail;
    sum.queries += c.queries;
    sum.doubts += c.doubts;
    sum.removed_devices += c.removed_devices;
}

fn one(seed: u64, quiet: bool) -> Counts {
    let mut rng = Rng(seed);
    let lanes = 1 + rng.below(5) as usize;
    let faults = Faults {
        delay_ns: 500 << rng.below(7),
        slow_in: [0, 20, 200][rng.below(3) as usize],
        error_in: if quiet { 0 } else { [0, 50, 400, 2000][rng.below(4) as usize] },
        no_memory_in: if quiet { 0 } else { [0, 5][rng.below(2) as usize] },
        late_ns: 1 << (10 + rng.below(13)),
    };
    let mut sim = Sim::new(seed, lanes, faults);
    let ticks = 500 + rng.below(4000);
    let chaos_in = if quiet { 0 } else { [30, 100, 400][rng.below(3) as usize] };
    sim.run(ticks, chaos_in);
    let mut doubts = 0;
    for n in &sim.nodes {
        assert_eq!(n.pair_failed, None);
        for (_, fault) in &n.faults {
            // Only rails and control channel gone together leave a switch in doubt for so long.
            match fault {
                Fault::InDoubt if !quiet => doubts += 1,
                Fault::Peer("it has failed the lane") if !quiet => {}
                other => panic!("{other}"),
            }
        }
    }
    let mut counts = sim.end();
    counts.doubts = doubts;
    counts
}

/// `SEED=n` runs one, to look at it.
fn seeds(name: &str, from: u64, n: u64, quiet: bool) -> Counts {
    let only = std::env::var("SEED").ok().and_then(|s| s.parse().ok());
    let n = std::env::var("SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(n);
    let mut sum = Counts::default();
    for seed in from..from + n {
        if only.is_some_and(|o: u64| o != seed) {
            continue;
        }
        // A panic aborts: the last seed named is the one.
        let r = std::panic::catch_unwind(|| one(seed, quiet));
        match r {
            Ok(c) => add(&mut sum, c),
            Err(e) => {
                eprintln!("{name}: SEED={seed}");
                std::panic::resume_unwind(e);
            }
        }
    }
    eprintln!("{name}: {sum:?}");
    sum
}

#[test]
fn without_faults() {
    let c = seeds("without faults", 0, 100, true);
    assert!(c.ring_bytes > 0 && c.moves > 0);
    assert_eq!((c.link_downs, c.no_rail, c.queries), (0, 0, 0));
}

#[test]
fn with_faults() {
    let n = if cfg!(debug_assertions) { 150 } else { 2000 };
    let c = seeds("with faults", 1000, n, false);
    assert!(c.ring_bytes > 0 && c.moves > 0 && c.link_downs > 0 && c.no_rail > 0);
    assert!(c.queries > 0 && c.removed_devices > 0);
}
