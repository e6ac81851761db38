//! What the two daemons do, each in its time, as proxies of each other's application.

use super::state::daemons::*;
use super::state::messages::{small, Tls};
use super::state::network::{RailState, RAILS};
use super::state::{Act as Any, Config, State};
use super::{inward, outward, takeover, Bug};
use underpass_rdma::engine::Control;

pub fn due(n: &State, c: &Config, out: &mut Vec<Any>) {
    takeover::due(n, c, out);
    let mut push = |a| out.push(Any::Daemon(a));
    match n.net.under_way {
        Some(Tls::Query(_)) if n.d2.look.is_some() => {} // D2 is about to answer the switch itself
        Some(Tls::Query(_) | Tls::Answer(..)) => push(Act::Control),
        None => {}
    }
    if !n.d1.dead {
        d1(n, c, &mut push);
    }
    if !n.d2.dead {
        d2(n, c, &mut push);
    }
}

fn d1(n: &State, c: &Config, push: &mut impl FnMut(Act)) {
    if n.d1.rail.is_none() {
        let left = n.net.rails[n.d1.left].state;
        let clear = left != RailState::Dead || c.bug == Some(Bug::NoWaitForDelete);
        if let Some(i) = (0..RAILS).find(|i| n.net.is_up(*i)).filter(|_| clear) {
            push(Act::Bind(i));
        }
    }
    if outward::has_turn(n, c) {
        push(Act::Turn);
    }
    if n.net.tls && n.net.under_way.is_none() && outward::query(n, c).is_some() {
        push(Act::Query);
    }
    for i in 0..RAILS {
        if n.net.rails[i].back.is_some() {
            push(Act::Receive(i));
        }
    }
}

fn d2(n: &State, c: &Config, push: &mut impl FnMut(Act)) {
    if n.d2.look.is_some() {
        push(Act::Look);
        return;
    }
    for i in 0..RAILS {
        if n.net.rails[i].arrived.is_some() {
            push(Act::Take(i));
        }
    }
    let rail = &n.net.rails[n.d2.rail];
    let free = match c.slow {
        true => rail.state == RailState::Up && rail.back.is_none(),
        false => n.rails(),
    };
    if !n.d1.dead && free && inward::next(n, c).is_some() {
        push(Act::Tell);
    }
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    takeover::free(n, c, out);
    let Some(i) = n.d1.rail.filter(|_| n.moves > 0 && !n.d1.dead) else {
        return;
    };
    let drained = n.net.rails[i].flight.is_none() || c.bug == Some(Bug::MoveUndrained);
    for to in 0..RAILS {
        if to != i && drained && n.net.is_up(to) {
            out.push(Any::Daemon(Act::Move(to)));
        }
    }
}

pub fn step(n: &mut State, c: &Config, act: Act) {
    match act {
        Act::Bind(i) => outward::bind(n, c, i, true),
        Act::Move(i) => {
            n.moves -= 1;
            outward::bind(n, c, i, false);
        }
        Act::Turn => outward::turn(n, c),
        Act::Query => n.net.under_way = outward::query(n, c).map(Tls::Query),
        Act::Take(i) => {
            if let Some(m) = n.net.rails[i].arrived.take() {
                inward::take(n, c, m);
            }
        }
        Act::Look => inward::look(n, c),
        Act::Tell => tell(n, c),
        Act::Receive(i) => {
            if let Some(m) = n.net.rails[i].back.take() {
                outward::receive(n, c, m);
            }
        }
        Act::Control => {
            if let Some(m) = n.net.under_way.take() {
                control(n, c, m);
            }
        }
        Act::Takeover(step) => takeover::step(n, c, step),
    }
}

/// D2 says what is due: one message, or, if none takes any time, all of them.
fn tell(n: &mut State, c: &Config) {
    inward::look_in(n);
    while let Some(m) = inward::next(n, c) {
        inward::said(n, m);
        if c.slow {
            n.net.rails[n.d2.rail].back = Some(m);
            return;
        }
        outward::receive(n, c, m);
    }
}

/// A message has come over the control channel.
fn control(n: &mut State, c: &Config, m: Tls) {
    match m.control() {
        Control::SwitchQuery {
            token: _,
            from: _,
            epoch,
            attempt,
        } => {
            let which = (small(epoch), small(attempt));
            let stands = inward::asked_about(n, c, which);
            n.net.under_way = Some(Tls::Answer(which, stands));
        }
        Control::SwitchAnswer {
            token: _,
            epoch,
            attempt,
            stands,
        } => outward::on_answer(n, c, (small(epoch), small(attempt)), stands),
        // `network` has links that fail, are destroyed at both ends, and come again.
        Control::QpOffer(_)
        | Control::QpAnswer(_)
        | Control::QpRefuse { .. }
        | Control::QpDead { .. }
        | Control::QpDeadAck { .. } => unreachable!("links"),
        // The lane is not removed here.
        Control::Close { .. } | Control::CloseAck { .. } => unreachable!("a removal"),
    }
}
