//! What is between the two daemons: two rails with one queue pair each, and the control channel.
//!
//! A queue pair delivers in order: the bytes of a message, then its snapshot. A rail that fails is
//! dead for D1 at once, while what it has sent may still land until D2 has destroyed its end.

use super::state::network::*;
use super::state::{Act as Any, Config, State, RING};

pub fn due(n: &State, out: &mut Vec<Any>) {
    for (i, r) in n.net.rails.iter().enumerate() {
        if r.flight.is_some() && r.arrived.is_none() {
            out.push(Any::Net(Act::Land(i)));
        }
        if r.life == Life::Dead && !n.d2.dead && (n.path() || n.d1.dead) {
            out.push(Any::Net(Act::Destroy(i)));
        }
    }
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    for (i, r) in n.net.rails.iter().enumerate() {
        if r.life == Life::Up && n.fails > 0 {
            out.push(Any::Net(Act::Fail(i)));
        }
        if r.life == Life::Gone && n.repairs > 0 && n.path() {
            out.push(Any::Net(Act::Repair(i)));
        }
    }
    if c.cut && n.net.tls.up {
        out.push(Any::Net(Act::Cut));
    }
}

fn fail(n: &mut State, i: usize) {
    n.net.rails[i].life = Life::Dead;
    if n.d1.rail == Some(i) {
        n.d1.rail = None;
        n.d1.left = i;
    }
}

pub fn step(n: &mut State, act: Act) {
    match act {
        Act::Land(i) => {
            let s = n.net.rails[i].flight.take();
            if let Some(s) = s {
                for c in s.from..s.to {
                    let slot = (c % RING) as usize;
                    n.sink[slot] = s.data[slot];
                }
            }
            n.net.rails[i].arrived = s;
        }
        Act::Destroy(i) => {
            let r = &mut n.net.rails[i];
            (r.life, r.flight, r.arrived) = (Life::Gone, None, None);
        }
        Act::Fail(i) => {
            n.fails -= 1;
            fail(n, i);
        }
        Act::Repair(i) => {
            n.repairs -= 1;
            n.net.rails[i].life = Life::Up;
        }
        Act::Cut => {
            n.net.tls = Tls {
                up: false,
                forth: None,
            };
        }
    }
}

/// D1's ends of the queue pairs are gone; what they sent may still land.
pub fn d1_died(n: &mut State) {
    for i in 0..RAILS {
        if n.net.rails[i].life == Life::Up {
            fail(n, i);
        }
    }
    n.net.tls.up = false;
}

pub fn d2_died(n: &mut State) {
    for i in 0..RAILS {
        if n.net.rails[i].life == Life::Up {
            fail(n, i);
        }
        let r = &mut n.net.rails[i];
        (r.life, r.flight, r.arrived) = (Life::Gone, None, None);
    }
    n.net.tls.up = false;
    n.net.tls.forth = None;
}
