//! Peers and applications that lie. The engine may not panic, may not touch memory outside, and
//! only what the liar has a part in may fail.

mod sim;

use sim::forged::{faults, lie_about, scribble_about, spoil, tampered};
use sim::Sim;
use std::collections::BTreeSet;
use underpass_rdma::sim::Rng;
use underpass_rdma::wire::{Body, Message, LEN};

/// Each of these checks has caught a lie.
fn all_of(found: &BTreeSet<String>, wanted: &[&str]) {
    for w in wanted {
        assert!(
            found.iter().any(|f| f.contains(w)),
            "not among {found:#?}: {w}"
        );
    }
}

/// The peer's daemon lies about one lane of several: all others arrive whole.
#[test]
fn lies_about_one_lane() {
    let mut failed = 0;
    let mut found = BTreeSet::new();
    for seed in 0..1500 {
        let mut sim = Sim::new(seed, 4, faults());
        sim.lied(|l| l == 0);
        let token = sim.lanes[0].ids[0];
        let mut rng = Rng(seed);
        sim.world.set_lie(move |node, bytes| {
            let Ok((mut m, _)) = Message::decode(bytes) else {
                return;
            };
            let of_lane = bytes[0] >= 0x80;
            if node == 1 && of_lane && m.token == token && rng.one_in(6) {
                let truth = m.body;
                lie_about(&mut m.body, &mut rng);
                // Two lies spoil memory that the liar may write to anyhow, of any lane of the same
                // processes, and nobody can prevent that: a wrong place inside the liar's own memory,
                // and a ring that is smaller than what it will write there.
                let lied = m.body != truth;
                match (&mut m.body, truth) {
                    (Body::RingReply { place: Some(p), .. }, _) if lied => p.offset |= 1 << 40,
                    (Body::Ring { log2, .. }, Body::Ring { log2: size, .. }) if *log2 < size => {
                        *log2 |= 0x80;
                    }
                    _ => {}
                }
                bytes[..LEN].copy_from_slice(&m.encode());
            }
        });
        sim.run(50_000, 0);
        for n in &sim.nodes {
            // A write to a place that is a lie may cost a link, never the pair.
            assert_eq!(n.pair_failed, None, "seed {seed}");
            assert!(
                n.faults.iter().all(|f| f.0 == 0),
                "seed {seed}: {:?}",
                n.faults
            );
            failed += n.faults.len();
            found.extend(n.faults.iter().map(|f| f.1.to_string()));
        }
        sim.lanes[0].reset = true;
        sim.end();
    }
    assert!(failed > 50, "only {failed} lanes failed");
    all_of(
        &found,
        &[
            "a head beyond the ring",
            "an impossible cursor",
            "an impossible readiness",
            "an impossible ring",
            "a switch to an impossible place",
            "a sender that goes back",
        ],
    );
}

/// The peer's daemon says anything.
#[test]
fn lies_about_everything() {
    let mut failed = 0;
    let mut found = BTreeSet::new();
    for seed in 0..1500 {
        let mut sim = Sim::new(seed, 3, faults());
        sim.lied(|_| true);
        let mut rng = Rng(seed);
        let every = 3 + rng.below(60);
        sim.world.set_lie(move |node, bytes| {
            if node == 1 && rng.one_in(every) {
                spoil(bytes, &mut rng);
            }
        });
        let mut rng = Rng(seed + 1);
        sim.tamper = Some(Box::new(move |n, m| match n == 1 && rng.one_in(4) {
            true => tampered(m, &mut rng),
            false => m,
        }));
        sim.set_control(true);
        for _ in 0..3000 {
            sim.tick(true);
        }
        failed += usize::from(sim.nodes[0].pair_failed.is_some());
        found.extend(sim.nodes[0].pair_failed.map(str::to_string));
        let world = sim.world.clone();
        drop(sim);
        // The liar's own receive queue is its own affair.
        let mut bad = world.violations();
        bad.retain(|v| !v.contains("node 1 has no receive buffer"));
        assert_eq!(bad, Vec::<String>::new(), "seed {seed}");
        assert_eq!(world.live(), Default::default());
    }
    assert!(failed > 20, "only {failed} pairs failed");
    all_of(
        &found,
        &[
            "a message of a wrong length",
            "a message that is none",
            "impossible credits",
            "an impossible offer",
        ],
    );
}

/// An application writes anything into its words for one lane: its other lanes, and all others, do
/// not notice.
#[test]
fn an_application_scribbles() {
    let mut failed = 0;
    let mut found = BTreeSet::new();
    for seed in 0..1500 {
        let mut sim = Sim::new(seed, 4, faults());
        sim.lied(|l| l == 0);
        sim.set_control(true);
        let mut rng = Rng(seed);
        let slot = sim.lanes[0].ends[0].slot as usize;
        for _ in 0..4000 {
            sim.tick(true);
            if rng.one_in(20) {
                let words = sim.nodes[0].clients[0].app.control().expect("mapped");
                scribble_about(words, slot, &mut rng);
            }
        }
        sim.run(0, 0);
        for n in &sim.nodes {
            assert_eq!(n.pair_failed, None, "seed {seed}");
            assert!(
                n.faults.iter().all(|f| f.0 == 0),
                "seed {seed}: {:?}",
                n.faults
            );
        }
        failed += sim.nodes[0].faults.len();
        found.extend(sim.nodes[0].faults.iter().map(|f| f.1.to_string()));
        sim.lanes[0].reset = true;
        sim.end();
    }
    assert!(failed > 50, "only {failed} lanes failed");
    all_of(
        &found,
        &[
            "a head beyond the ring",
            "a head that goes back",
            "a ring outside of its memory",
            "an impossible cursor",
            "an impossible ring",
            "a readiness that goes back",
        ],
    );
}
