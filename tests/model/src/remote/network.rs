//! What is between the two daemons: two rails with one queue pair each, and the control channel.
//!
//! A queue pair delivers in order: the bytes of a message, then its snapshot. A rail that fails is
//! dead for D1 at once, while what it has sent may still land until D2 has destroyed its end.

use super::state::network::*;
use super::state::{Act as Any, Config, State};
use super::{inward, outward};

pub fn due(n: &State, out: &mut Vec<Any>) {
    for (i, r) in n.net.rails.iter().enumerate() {
        if r.flight.is_some() && r.arrived.is_none() {
            out.push(Any::Net(Act::Land(i)));
        }
        if r.state == RailState::Dead && !n.d2.dead && (n.path() || n.d1.dead) {
            out.push(Any::Net(Act::Destroy(i)));
        }
    }
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    for (i, r) in n.net.rails.iter().enumerate() {
        if r.state == RailState::Up && n.fails > 0 {
            out.push(Any::Net(Act::Fail(i)));
        }
        if r.state == RailState::Gone && n.repairs > 0 && n.path() {
            out.push(Any::Net(Act::Repair(i)));
        }
    }
    if c.cut && n.net.tls {
        out.push(Any::Net(Act::Cut));
    }
}

/// D1's end is destroyed: nothing comes out of it any more.
fn fail(n: &mut State, i: usize) {
    n.net.rails[i].state = RailState::Dead;
    n.net.rails[i].back = None;
    if n.d1.rail == Some(i) {
        n.d1.rail = None;
        n.d1.left = i;
    }
}

/// So is D2's: nothing lands.
fn destroy(n: &mut State, c: &Config, i: usize) {
    let r = &mut n.net.rails[i];
    (r.state, r.flight, r.arrived) = (RailState::Gone, None, None);
    if n.d2.rail == i && c.slow {
        inward::moved(n, c);
        n.d2.rail = 1 - i;
    }
}

pub fn step(n: &mut State, c: &Config, act: Act) {
    match act {
        Act::Land(i) => {
            let m = n.net.rails[i].flight.take();
            if let Some(m) = m {
                if !c.inline {
                    inward::put(n, &m, m.said.head().unwrap_or(m.from));
                }
                if n.net.is_up(i) {
                    outward::completed(n, c, &m);
                }
            }
            n.net.rails[i].arrived = m;
        }
        Act::Destroy(i) => destroy(n, c, i),
        Act::Fail(i) => {
            n.fails -= 1;
            fail(n, i);
        }
        Act::Repair(i) => {
            n.repairs -= 1;
            n.net.rails[i].state = RailState::Up;
            if !n.net.is_up(n.d2.rail) {
                n.d2.rail = i;
            }
        }
        Act::Cut => n.net.cut(),
    }
}

/// D1's ends of the queue pairs are gone; what they sent may still land.
pub fn d1_died(n: &mut State) {
    for i in 0..RAILS {
        if n.net.is_up(i) {
            fail(n, i);
        }
    }
    n.net.cut();
}

pub fn d2_died(n: &mut State) {
    for i in 0..RAILS {
        if n.net.is_up(i) {
            fail(n, i);
        }
        let r = &mut n.net.rails[i];
        (r.state, r.flight, r.arrived) = (RailState::Gone, None, None);
    }
    n.net.cut();
    n.d2.dead = true;
}
