//! The data engine beside a peer's daemon, and an application, that say and write anything: the world of
//! `daemon/rdma/tests/hostile.rs`, whose seeds are an input's bytes here.
//!
//! Nothing may panic, land where it should not, or be left.

#[path = "../../../daemon/rdma/tests/sim/mod.rs"]
#[allow(unreachable_pub, clippy::all)]
mod sim;

use sim::forged::{faults, scribble_about, spoil, tampered, Numbers};
use sim::Sim;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

/// Most ticks of one input, and those when everything was said.
const MOST: usize = 500;
const AFTER: usize = 50;

/// Numbers out of an input's bytes, for all who lie. Behind their end nobody does.
#[derive(Clone)]
struct Said(Rc<RefCell<VecDeque<u8>>>);

impl Said {
    fn bytes(&mut self, n: usize) -> u64 {
        let mut all = self.0.borrow_mut();
        (0..n).fold(0, |sum, _| {
            sum << 8 | u64::from(all.pop_front().unwrap_or(0))
        })
    }

    fn is_over(&self) -> bool {
        self.0.borrow().is_empty()
    }
}

impl Numbers for Said {
    fn next_u64(&mut self) -> u64 {
        self.bytes(8)
    }

    fn below(&mut self, n: u64) -> u64 {
        let n = n.max(1);
        let bytes = match n {
            ..=0x100 => 1,
            0x101..=0x1_0000 => 2,
            _ => 8,
        };
        self.bytes(bytes) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        n != 0 && !self.is_over() && self.below(n) == 0
    }
}

/// A world's seed, and then who lies when, and how.
pub(crate) fn engine(data: &[u8]) {
    let mut said = Said(Rc::new(RefCell::new(data.iter().copied().collect())));
    let (seed, lanes) = (said.below(0x1_0000), 1 + said.below(3));
    let mut sim = Sim::new(seed, lanes as usize, faults());
    sim.lied(|_| true);
    let mut forger = said.clone();
    sim.world.set_lie(move |node, bytes| {
        if node == 1 && forger.one_in(4) {
            spoil(bytes, &mut forger);
        }
    });
    let mut forger = said.clone();
    sim.tamper = Some(Box::new(move |n, m| match n == 1 && forger.one_in(4) {
        true => tampered(m, &mut forger),
        false => m,
    }));
    sim.set_control(true);
    let slot = sim.lanes[0].ends[0].slot as usize;
    let mut after = AFTER;
    for _ in 0..MOST {
        sim.tick(true);
        if said.one_in(16) {
            let words = sim.nodes[0].clients[0].app.control().expect("mapped");
            scribble_about(words, slot, &mut said);
        }
        if said.is_over() {
            after -= 1;
            if after == 0 {
                break;
            }
        }
    }
    let world = sim.world.clone();
    drop(sim);
    // The liar's own receive queue is its own affair.
    let mut bad = world.violations();
    bad.retain(|v| !v.contains("node 1 has no receive buffer"));
    assert_eq!(bad, Vec::<String>::new());
    assert_eq!(world.live(), Default::default());
}
