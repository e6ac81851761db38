//! The engine over simulated verbs: many seeds, each another course of events.

mod sim;

use lane::abi::{rx, takeover, tx, Epoch, RxWord, Shared, TakeoverPhase, TakeoverWord, TxWord};
use sim::{Counts, Sim};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use underpass_rdma::sim::{Faults, Rng};
use underpass_rdma::wire::{Body, Message};

fn add(sum: &mut Counts, c: Counts) {
    sum.ring_bytes += c.ring_bytes;
    sum.inlined += c.inlined;
    sum.ups += c.ups;
    sum.moves += c.moves;
    sum.link_downs += c.link_downs;
    sum.no_rail += c.no_rail;
    sum.queries += c.queries;
    sum.removed_devices += c.removed_devices;
}

fn no_faults() -> Faults {
    Faults {
        delay_ns: 2_000,
        ..Faults::default()
    }
}

fn one(seed: u64, quiet: bool) -> Counts {
    let mut rng = Rng(seed);
    let lanes = 1 + rng.below(5) as usize;
    let faults = Faults {
        delay_ns: 500 << rng.below(7),
        slow_in: [0, 20, 200][rng.below(3) as usize],
        error_in: if quiet {
            0
        } else {
            [0, 50, 400, 2000][rng.below(4) as usize]
        },
        no_memory_in: if quiet {
            0
        } else {
            [0, 5][rng.below(2) as usize]
        },
        late_ns: 1 << (10 + rng.below(13)),
        iwarp: rng.below(8) as u8 & 3,
        repeat_ns: 0,
    };
    let mut sim = Sim::new(seed, lanes, faults);
    let ticks = 500 + rng.below(4000);
    let chaos_in = if quiet {
        0
    } else {
        [30, 100, 400][rng.below(3) as usize]
    };
    sim.run(ticks, chaos_in);
    for n in &sim.nodes {
        assert_eq!(n.pair_failed, None);
        assert_eq!(n.faults, []);
    }
    sim.end()
}

/// `SEED=n` runs one, to look at it.
fn seeds(name: &str, from: u64, n: u64, quiet: bool) -> Counts {
    let only = std::env::var("SEED").ok().and_then(|s| s.parse().ok());
    let n = std::env::var("SEEDS")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(n);
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
    let c = seeds("without faults", 0, 1000, true);
    assert!(c.ring_bytes > 0 && c.inlined > 0 && c.moves > 0);
    assert_eq!((c.link_downs, c.no_rail, c.queries), (0, 0, 0));
}

#[test]
fn with_faults() {
    let c = seeds("with faults", 1000, 8000, false);
    assert!(c.ring_bytes > 0 && c.inlined > 0 && c.moves > 0 && c.link_downs > 0 && c.no_rail > 0);
    assert!(c.queries > 0 && c.removed_devices > 0);
}

/// The rails go and do not come back: everything arrives over TCP, with or without the control
/// channel, without which the daemons give up at last. (Nobody shuts a direction down here: what is left on a ring then needs takeover.)
#[test]
fn without_rails_at_the_end() {
    let (mut ring, mut undecided) = (0, 0);
    for seed in 0..1000 {
        let mut rng = Rng(seed);
        let faults = Faults {
            delay_ns: 2_000,
            error_in: [0, 1000][rng.below(2) as usize],
            late_ns: 1_000_000,
            ..Faults::default()
        };
        let mut sim = Sim::new(seed, 3, faults);
        sim.never_shut();
        sim.set_control(true);
        for _ in 0..rng.below(1500) {
            sim.tick(true);
        }
        let control = rng.one_in(2);
        sim.set_control(control);
        for rail in 0..sim::RAILS {
            sim.set_wire(rail, false);
        }
        if !control {
            sim.abandon();
        }
        sim.finish_alone();
        for n in &sim.nodes {
            assert_eq!(
                (n.pair_failed, &n.faults[..]),
                (None, &[][..]),
                "seed {seed}"
            );
        }
        ring += sim.ring_bytes();
        undecided += sim.undecided;
    }
    eprintln!("without rails: {ring} bytes over rings, {undecided} switches stayed in doubt");
    assert!(ring > 0);
}

/// Whoever waits for something (room on a link, the rest of its bytes, a turn) hears of it, and does
/// not find out at the next look at everything, 20 ms later.
#[test]
fn nobody_waits_for_a_look_at_everything() {
    for seed in 0..500 {
        let faults = Faults {
            iwarp: seed as u8 & 3,
            ..no_faults()
        };
        let mut sim = Sim::new(seed, 4, faults);
        sim.never_refuse();
        sim.run(100_000, 0);
        assert!(sim.now < 15_000_000, "seed {seed}: {} ns", sim.now);
    }
}

/// Bytes came behind a message, the device has acknowledged it, and the link is destroyed before the
/// daemon has looked: they are sent again.
#[test]
fn acknowledged_and_never_read() {
    let mut seen = 0;
    for seed in 0..if cfg!(debug_assertions) { 300 } else { 3000 } {
        let mut sim = Sim::new(seed, 2, no_faults());
        sim.never_shut();
        sim.set_control(true);
        while sim.inlined(0) == 0 && !sim.all_done() {
            sim.tick(true);
        }
        for _ in 0..Rng(seed).below(100) {
            sim.tick(true);
        }
        sim.pause(1, 3_000_000);
        let before = sim.inlined(0);
        for _ in 0..50 {
            sim.tick(true);
        }
        seen += u64::from(sim.inlined(0) > before);
        let rail = seed as usize % sim::RAILS;
        for up in [false, true] {
            sim.set_port(1, rail, up);
        }
        sim.finish_alone();
        no_fault(&sim, seed);
    }
    assert!(seen > 20, "{seen}");
}

/// A reader whose owner has ended takes no switch any more. It may have been asked for, and even be in doubt:
/// the sender stays on TCP, where everything arrives.
#[test]
fn no_switch_for_who_only_inherited() {
    let mut later = 0;
    for seed in 0..1000 {
        let mut sim = Sim::new(seed, 2, no_faults());
        sim.never_shut();
        sim.set_control(true);
        for _ in 0..Rng(seed).below(300) {
            sim.tick(true);
        }
        let epoch = sim.refuse_switches(1, 0);
        sim.finish_alone();
        assert_eq!(sim.told(1, 0).epoch(), epoch, "seed {seed}");
        later += u64::from(sim.told(1, 1).epoch() != Epoch::NONE);
        no_fault(&sim, seed);
    }
    assert!(later > 50, "{later}");
}

/// No pair has failed, and no peer was found at fault.
fn no_fault(sim: &Sim, seed: u64) {
    for n in &sim.nodes {
        let found = (n.pair_failed, &n.faults[..]);
        assert_eq!(found, (None, &[][..]), "seed {seed}");
    }
}

/// A lane whose first end sends on the ring, and its epoch. None: too few bytes for a switch.
fn on_the_ring(seed: u64) -> Option<(Sim, Epoch)> {
    let mut sim = Sim::new(seed, 1, no_faults());
    sim.never_shut();
    sim.set_control(true);
    let id = sim.lanes[0].ids[0];
    while !sim.nodes[0].pair.is_up(id) && !sim.all_done() {
        sim.tick(true);
    }
    let up = sim.nodes[0].pair.is_up(id);
    let epoch = said(&sim).load(Relaxed).epoch();
    up.then_some((sim, epoch))
}

/// What the first end's sender says.
fn said(sim: &Sim) -> &Shared<TxWord> {
    let lane = &sim.lanes[0];
    let words = sim.nodes[0].clients[lane.client].app.control();
    &words.expect("mapped").tx[lane.ends[0].slot as usize].state
}

/// What the second end has been told of the first when all messages have arrived; the applications do nothing.
fn finally_told(sim: &mut Sim) -> TxWord {
    for _ in 0..3000 {
        sim.tick(false);
    }
    sim.told(1, 0)
}

/// An end has said that it goes down, and got no further: it was killed, or TCP is full and it sleeps. Its daemon brings
/// the direction to TCP, and the peer is told how.
#[test]
fn taken_over_on_the_way_down() {
    let mut seen = 0;
    for (mut sim, epoch) in (0..50).filter_map(on_the_ring) {
        let id = sim.lanes[0].ids[0];
        said(&sim).store(TxWord::new(epoch, tx::DOWNING), Relaxed);
        assert_eq!(finally_told(&mut sim), TxWord::new(epoch, tx::DOWNING));
        sim.nodes[0].pair.take_down(id, epoch);
        sim.nodes[0].pair.is_down(id, epoch, tx::RESUMED);
        assert_eq!(finally_told(&mut sim), TxWord::new(epoch, tx::RESUMED));
        seen += 1;
    }
    assert!(seen > 20, "{seen}");
}

/// What the first end's daemon, or a helper of it, does with the direction.
fn takes(sim: &Sim, epoch: Epoch, phase: TakeoverPhase) {
    let lane = &sim.lanes[0];
    let words = sim.nodes[0].clients[lane.client].proxy.control();
    let word = &words.expect("mapped").daemon[lane.ends[0].slot as usize].takeover;
    word.store(TakeoverWord::new(epoch, phase), Release);
}

/// A helper has brought a direction to TCP without a frame and given it back, and its end has taken it back, before the
/// caller knows. The end says `DOWN` whatever the helper did: the peer must not wait for a frame.
#[test]
fn given_back_before_the_caller_knows() {
    let mut seen = 0;
    for (mut sim, epoch) in (0..50).filter_map(on_the_ring) {
        let id = sim.lanes[0].ids[0];
        takes(&sim, epoch, takeover::DONE);
        said(&sim).store(TxWord::new(epoch, tx::DOWN), Release);
        assert_eq!(finally_told(&mut sim), TxWord::new(epoch, tx::DOWNING));
        sim.nodes[0].pair.take_down(id, epoch);
        sim.nodes[0].pair.is_down(id, epoch, tx::RESUMED);
        assert_eq!(finally_told(&mut sim), TxWord::new(epoch, tx::RESUMED));
        seen += 1;
    }
    assert!(seen > 20, "{seen}");
}

/// A helper's result about an epoch that is over says nothing about the next one.
#[test]
fn a_result_that_comes_late() {
    let (mut sim, epoch) = (0..50).find_map(on_the_ring).expect("a lane goes up");
    let id = sim.lanes[0].ids[0];
    let before = Epoch::new(epoch.get() - 1);
    assert_eq!(sim.nodes[0].pair.take_down(id, before), None);
    sim.nodes[0].pair.is_down(id, before, tx::DOWN);
    assert!(sim.nodes[0].pair.is_up(id));
    assert_eq!(finally_told(&mut sim), TxWord::new(epoch, tx::UP));
}

/// A helper has put a frame on TCP, and the reader that has taken it is ready anew, before the caller knows: the reader
/// has done nothing wrong.
#[test]
fn ready_anew_before_the_caller_knows() {
    let mut seen = 0;
    for (mut sim, epoch) in (0..50).filter_map(on_the_ring) {
        takes(&sim, epoch, takeover::DOWN);
        let lane = &sim.lanes[0];
        let words = sim.nodes[1].clients[lane.client].app.control();
        let word = &words.expect("mapped").rx[lane.ends[1].slot as usize].word;
        word.store(RxWord::new(epoch.next(), rx::READY), Release);
        finally_told(&mut sim);
        assert_eq!(sim.nodes[0].faults, []);
        seen += 1;
    }
    assert!(seen > 20, "{seen}");
}

/// An application of whose socket the daemon has no copy yet is not invited to its ring; then it is.
#[test]
fn a_gate_before_the_ring() {
    let mut up = 0;
    for seed in 0..if cfg!(debug_assertions) { 100 } else { 300 } {
        let mut sim = Sim::new(seed, 2, no_faults());
        sim.never_shut();
        sim.gate(0, 0, true);
        sim.set_control(true);
        for _ in 0..Rng(seed).below(300) {
            sim.tick(true);
            assert_ne!(sim.shown(0, 0).flags(), rx::READY, "seed {seed}");
            assert_eq!(sim.told(1, 0).epoch(), Epoch::NONE, "seed {seed}");
        }
        sim.gate(0, 0, false);
        sim.finish_alone();
        up += u64::from(sim.told(1, 0).epoch() != Epoch::NONE);
        no_fault(&sim, seed);
    }
    assert!(up > 20, "{up}");
}

/// An application that was invited and asks at that moment is refused, too.
#[test]
fn a_gate_before_the_answer() {
    let mut refused = 0;
    for seed in 0..50 {
        let mut sim = Sim::new(seed, 1, no_faults());
        sim.never_shut();
        sim.set_control(true);
        // (Within a tick the daemon looks before the application acts.)
        while said(&sim).load(Relaxed).phase() != tx::UP && !sim.all_done() {
            sim.tick(true);
        }
        let asked = said(&sim).load(Relaxed).phase() == tx::UP;
        sim.gate(0, 0, true);
        assert_eq!(finally_told(&mut sim).epoch(), Epoch::NONE, "seed {seed}");
        refused += u64::from(asked);
    }
    assert!(refused > 20, "{refused}");
}

/// The one round trip in which a switch is in doubt: all rails are cut when the request is posted
/// (it never arrives) or when the answer is (it has been taken).
#[test]
fn the_switch_in_doubt() {
    let (mut asked, mut undecided) = ([0, 0], 0);
    for (seed, taken, control) in (0..400).map(|s| (s, s % 2 == 0, s % 8 < 6)) {
        let mut sim = Sim::new(seed, 1, no_faults());
        sim.never_shut();
        sim.set_control(true);
        let cut = Rc::new(Cell::new(false));
        let seen = cut.clone();
        sim.world.set_lie(
            move |_, bytes| match Message::decode(bytes).map(|(m, _)| m.body) {
                Ok(Body::Switch { .. }) => seen.set(seen.get() || !taken),
                Ok(Body::SwitchReply { ok: true, .. }) => seen.set(seen.get() || taken),
                _ => {}
            },
        );
        while !cut.get() && !sim.all_done() {
            sim.tick(true);
        }
        if !cut.get() {
            continue; // too few bytes for a switch
        }
        for rail in 0..sim::RAILS {
            sim.set_wire(rail, false);
        }
        sim.set_control(control);
        if !control {
            sim.abandon();
        }
        sim.finish_alone();
        let faults: Vec<_> = sim.nodes.iter().flat_map(|n| &n.faults).collect();
        assert!(faults.is_empty(), "seed {seed}: {faults:?}");
        if control {
            asked[usize::from(taken)] += usize::from(sim.counts.queries > 0);
        } else {
            undecided += u64::from(taken) * sim.undecided;
        }
    }
    // Not in all of them: who asks with nothing left to send does not wait for the answer.
    assert!(
        asked[0] > 50 && asked[1] > 50 && undecided > 20,
        "{asked:?} {undecided}"
    );
}
