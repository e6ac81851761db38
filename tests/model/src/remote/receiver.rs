//! The receiving half, over the words that D2 keeps for it and the ring that the network writes.

use super::leave;
use super::read::*;
use super::state::network::RailState;
use super::state::receiver::*;
use super::state::{Act as Any, Config, Fault, Phase, State, Word, RING};
use super::tcp::Unit;
use lane::abi::rx;

/// Would a receive come to anything? (`RxState::has_news`, and what the kernel says.)
fn has_news(n: &State) -> bool {
    let b = &n.b;
    match b.mode {
        Mode::Tcp | Mode::Prefix | Mode::Undecided => n.tcp.readable(),
        Mode::Ready => phase(n) != Phase::None || n.tcp.readable(),
        Mode::Ring => n.d2.head != b.cursor || n.tcp.readable() && !is_held(n),
        Mode::Last | Mode::Fin => true,
        Mode::Skip => b.skip == 0 || n.tcp.readable(),
        Mode::Rest => b.rest == 0 || n.tcp.readable(),
        Mode::Revoking => false,
    }
}

/// Does B hear that no switch can come any more: is its daemon gone, or the remote one with all its queue pairs?
fn is_orphaned(n: &State) -> bool {
    let gone = n.net.rails.iter().all(|r| r.state == RailState::Gone);
    n.d2.dead || n.d1.dead && gone && n.d2.look.is_none()
}

pub fn due(n: &State, out: &mut Vec<Any>) {
    let go = match n.b.at {
        At::Idle => has_news(n),
        at @ At::Pending(..) => leave::view(n) != at,
        At::ReadyAgain(_) | At::ReadyTake(_) | At::RingTcp | At::Leave | At::Mark(_) => true,
    };
    if go {
        out.push(Any::B(Act::Step));
    }
    let waits = n.b.mode == Mode::Ready || is_untouched(n);
    if matches!(n.b.at, At::Idle | At::Pending(..)) && waits && is_orphaned(n) {
        out.push(Any::B(Act::Orphan));
    }
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    let b = &n.b;
    if b.at != At::Idle || b.leaving {
        return;
    }
    if b.mode == Mode::Tcp && b.epoch < c.ups && !is_orphaned(n) {
        out.push(Any::B(Act::Ready));
    }
    if b.mode == Mode::Ring && n.d2.head == b.cursor && !n.tcp.readable() {
        out.push(Any::B(Act::Look));
    }
    if b.mode != Mode::Tcp && n.leaves > 0 {
        out.push(Any::B(Act::Leave));
    }
    if b.mode != Mode::Tcp && n.wants > 0 {
        out.push(Any::B(Act::Want));
    }
}

fn got(n: &mut State, u: Unit) {
    match u {
        Unit::Byte(b) if b == n.got => n.got += 1,
        Unit::Byte(_) => n.fault(Fault::Stream),
        Unit::Half | Unit::Frame { .. } => n.fault(Fault::Parsed),
    }
}

/// A byte from the ring.
fn take(n: &mut State) {
    let at = n.b.cursor;
    if n.d2.head < at {
        n.fault(Fault::Impossible);
        return;
    }
    got(n, Unit::Byte(n.sink[(at % RING) as usize]));
    n.b.cursor += 1;
    n.b.from_ring = true;
}

pub fn step(n: &mut State, c: &Config, act: Act) {
    match act {
        Act::Ready => {
            // An unread revocation of a sender that was up must be read first.
            let unread = n.b.word.has(rx::REVOKED);
            if unread && matches!(phase(n), Phase::Up | Phase::Downing) {
                return;
            }
            n.b.epoch += 1;
            n.b.mode = Mode::Ready;
            n.b.word = Word::ready(n.b.epoch);
        }
        Act::Want => {
            n.wants -= 1;
            n.b.word = n.b.word.with(rx::WANT_DOWN);
        }
        Act::Leave => {
            n.leaves -= 1;
            n.b.leaving = true;
            n.b.at = At::Leave;
        }
        Act::Look => n.b.at = At::RingTcp,
        Act::Orphan if n.b.mode == Mode::Ready && phase(n) == Phase::None => {
            n.b.mode = Mode::Tcp;
        }
        Act::Orphan => {
            if n.b.mode == Mode::Ready {
                see_up(n);
            }
            if is_untouched(n) {
                n.b.mode = Mode::Undecided;
            }
            if n.b.leaving {
                n.b.at = At::Leave;
            }
        }
        Act::Step => run(n, c),
    }
}

fn run(n: &mut State, c: &Config) {
    let at = n.b.at;
    n.b.at = At::Idle;
    match at {
        At::Idle => receive(n, c),
        At::ReadyAgain(_) if phase(n) != Phase::None => see_up(n),
        At::ReadyAgain(k) => n.b.at = At::ReadyTake(k),
        At::ReadyTake(0) => {
            if n.tcp.ended() && phase(n) == Phase::None {
                end(n);
            }
        }
        At::ReadyTake(_) => {
            if let Some(u) = recv(n) {
                got(n, u);
            }
        }
        At::RingTcp => {
            if look(n, c) == Look::Bare {
                bare(n, c);
            }
        }
        At::Leave | At::Pending(..) | At::Mark(_) => leave::run(n, c, at),
    }
}

/// `RxState::advance`.
fn receive(n: &mut State, c: &Config) {
    match n.b.mode {
        Mode::Tcp => match recv(n) {
            Some(u) => got(n, u),
            None => end(n),
        },
        // SYNC limit: the count, then the look.
        Mode::Ready => n.b.at = At::ReadyAgain(n.tcp.unread()),
        Mode::Prefix => {
            if let Some(u) = recv(n) {
                got(n, u);
            } else {
                n.fault(Fault::Impossible);
            }
            past(n);
        }
        Mode::Ring | Mode::Last if n.d2.head != n.b.cursor => take(n),
        Mode::Ring => n.b.at = At::RingTcp,
        Mode::Last => begin_skip(n, c),
        Mode::Fin if n.b.cursor < n.b.skip => take(n),
        Mode::Fin => end(n),
        Mode::Skip => skip(n, c),
        Mode::Rest if n.b.rest == 0 => n.b.mode = Mode::Tcp,
        Mode::Rest => match recv(n) {
            Some(u) => {
                got(n, u);
                n.b.rest -= 1;
            }
            None => bare(n, c),
        },
        Mode::Undecided if n.b.tcp_pos < n.b.limit => {
            if let Some(u) = recv(n) {
                got(n, u);
            }
        }
        Mode::Undecided => decide(n, c),
        Mode::Revoking => {}
    }
}
