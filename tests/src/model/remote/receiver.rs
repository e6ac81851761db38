//! The receiving half, over the words that D2 keeps for it and the ring that the network writes.

use super::state::receiver::*;
use super::state::{Act as Any, Config, Fault, Phase, State, Word, RING, UNSEEN};
use super::tcp::Unit;
use super::Bug;

/// The phase of the sender in B's epoch, as D2 has stored it.
fn phase(n: &State) -> Phase {
    if n.d2.tx.epoch == n.b.epoch {
        n.d2.tx.phase
    } else {
        Phase::None
    }
}

fn view(n: &State) -> At {
    At::Pending(phase(n), n.tcp.unread(), n.tcp.fin_arrived)
}

fn has_news(n: &State) -> bool {
    let b = &n.b;
    match b.mode {
        Mode::Tcp | Mode::Prefix => n.tcp.readable(),
        Mode::Ready => phase(n) != Phase::None || n.tcp.readable(),
        Mode::Ring => n.d2.head != b.cursor || n.tcp.readable(),
        Mode::Last | Mode::Final => true,
        Mode::Skip => b.skip == 0 || n.tcp.readable(),
        Mode::Rest => b.rest == 0 || n.tcp.readable(),
        Mode::Revoking => false,
    }
}

pub fn due(n: &State, out: &mut Vec<Any>) {
    let go = match n.b.at {
        At::Idle => has_news(n),
        at @ At::Pending(..) => view(n) != at,
        _ => true,
    };
    if go {
        out.push(Any::B(Act::Step));
    }
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    let b = &n.b;
    if b.at != At::Idle || b.leaving {
        return;
    }
    if b.mode == Mode::Tcp && b.epoch < c.ups && !n.d2.dead {
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
        _ => n.fault(Fault::Parsed),
    }
}

/// A clean end of file.
fn end(n: &mut State) {
    if n.got < n.sent {
        n.fault(Fault::Early);
    }
    n.b.eof = true;
}

fn bare(n: &mut State, c: &Config) {
    if c.bug == Some(Bug::BareFinIsEnd) {
        end(n);
    } else {
        n.bare_fin();
    }
}

fn see_up(n: &mut State) {
    let w = n.d2.tx;
    if w.tcp_pos < n.b.tcp_pos || w.phase == Phase::Resumed {
        n.fault(Fault::Impossible);
    }
    n.b.limit = w.tcp_pos;
    n.b.cursor = w.start;
    n.b.mode = Mode::Prefix;
    past(n);
}

/// Has all been read that TCP held before the switch?
fn past(n: &mut State) {
    if n.b.tcp_pos == n.b.limit {
        n.b.mode = Mode::Ring;
        n.b.word.past = true;
    }
}

/// One unit from TCP, and the count of it.
fn recv(n: &mut State) -> Option<Unit> {
    let u = n.tcp.recv()?;
    n.b.tcp_pos += 1;
    Some(u)
}

/// A byte from the ring.
fn take(n: &mut State) {
    let c = n.b.cursor;
    if n.d2.head < c {
        n.fault(Fault::Impossible);
        return;
    }
    got(n, Unit::Byte(n.sink[(c % RING) as usize]));
    n.b.cursor += 1;
    n.b.from_ring = true;
}

pub fn step(n: &mut State, c: &Config, act: Act) {
    match act {
        Act::Ready => {
            // An unread revocation of a sender that was up must be read first.
            if n.b.word.revoked && matches!(phase(n), Phase::Up | Phase::Downing) {
                return;
            }
            n.b.epoch += 1;
            n.b.mode = Mode::Ready;
            n.b.word = Word {
                epoch: n.b.epoch,
                ready: true,
                ..Word::default()
            };
        }
        Act::Want => {
            n.wants -= 1;
            n.b.word.want = true;
        }
        Act::Leave => {
            n.leaves -= 1;
            n.b.leaving = true;
            n.b.at = At::Leave;
        }
        Act::Look => n.b.at = At::RingTcp,
        Act::Step => run(n, c),
    }
}

fn run(n: &mut State, c: &Config) {
    let at = n.b.at;
    n.b.at = At::Idle;
    match at {
        At::Idle => receive(n, c),
        At::ReadyAgain(k) => {
            if phase(n) == Phase::None {
                n.b.at = At::ReadyTake(k);
            } else {
                see_up(n);
            }
        }
        At::ReadyTake(k) => match k {
            0 if n.tcp.ended() && phase(n) == Phase::None => end(n),
            0 => {}
            _ => {
                if let Some(u) = recv(n) {
                    got(n, u);
                }
            }
        },
        At::RingTcp => tcp(n, c),
        At::Leave | At::Pending(..) => leave(n, c),
        At::Mark(cell) => {
            n.b.revoked = cell;
            n.b.word.revoked = true;
            n.b.was = n.b.mode;
            n.b.mode = Mode::Revoking;
            n.b.at = At::Leave;
        }
    }
}

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
        Mode::Ring if n.d2.head != n.b.cursor => take(n),
        Mode::Ring => n.b.at = At::RingTcp,
        Mode::Last if n.d2.head != n.b.cursor => take(n),
        Mode::Last => last(n),
        Mode::Final if n.b.cursor < n.b.skip => take(n),
        Mode::Final => n.b.mode = Mode::Tcp,
        Mode::Skip => {
            if !skip(n) {
                bare(n, c);
            }
        }
        Mode::Rest if n.b.rest == 0 => n.b.mode = Mode::Tcp,
        Mode::Rest => match recv(n) {
            Some(u) => {
                got(n, u);
                n.b.rest -= 1;
            }
            None => bare(n, c),
        },
        Mode::Revoking => {}
    }
}

/// The ring is done: what came from it is skipped on TCP.
fn last(n: &mut State) {
    let twice = n.b.cursor - n.b.skip;
    n.b.skip = twice;
    n.b.rest = n.b.rest.saturating_sub(twice);
    n.b.mode = Mode::Skip;
}

/// `false`: TCP has ended.
fn skip(n: &mut State) -> bool {
    if n.b.skip == 0 {
        n.b.mode = Mode::Rest;
        return true;
    }
    let Some(u) = recv(n) else { return false };
    if u != Unit::Byte(n.got - n.b.skip) {
        n.fault(Fault::Skipped);
    }
    n.b.skip -= 1;
    true
}

/// What TCP says while the ring is up and empty: a frame, or the end.
fn tcp(n: &mut State, c: &Config) {
    match recv(n) {
        Some(Unit::Half) if !n.b.half => {
            n.b.half = true;
            n.b.at = At::RingTcp;
            if !n.tcp.readable() {
                n.b.at = At::Idle;
            }
        }
        Some(u) => frame(n, c, u),
        // Everything that was published before is told first.
        None if n.tcp.ended() && n.d2.head == n.b.cursor => bare(n, c),
        None => {}
    }
}

fn frame(n: &mut State, c: &Config, u: Unit) {
    let (epoch, half) = (n.b.epoch, n.b.half);
    n.b.half = false;
    match u {
        Unit::Down(e, cursor, rest) if e == epoch && half && cursor <= n.b.cursor => {
            n.b.skip = cursor;
            n.b.rest = rest;
            n.b.mode = Mode::Last;
        }
        Unit::Fin(e, head) if e == epoch && half => {
            if c.bug == Some(Bug::FinWithoutRing) {
                n.b.mode = Mode::Tcp;
                return;
            }
            if n.d2.head < head {
                n.fault(Fault::Impossible);
            }
            n.b.skip = head;
            n.b.mode = Mode::Final;
        }
        _ => n.fault(Fault::Parsed),
    }
}

/// The socket is at somebody else's disposal from here on.
fn clear(n: &mut State) {
    n.b.mode = Mode::Tcp;
    n.b.leaving = false;
}

fn leave(n: &mut State, c: &Config) {
    n.b.at = At::Leave;
    match n.b.mode {
        Mode::Tcp => {
            clear(n);
            n.b.at = At::Idle;
        }
        Mode::Ready if phase(n) != Phase::None => see_up(n),
        Mode::Ready => n.b.at = At::Mark(UNSEEN),
        Mode::Prefix | Mode::Ring => n.b.at = At::Mark(n.b.cursor),
        Mode::Last => last(n),
        Mode::Final => {
            // The sender has ended, and what is on the ring alone cannot be handed over: as on
            // one node, the connection is reset.
            if n.b.cursor != n.b.skip {
                n.reset = true;
            }
            clear(n);
            n.b.at = At::Idle;
        }
        Mode::Skip if n.b.skip > 0 && !n.tcp.readable() => n.b.at = view(n),
        Mode::Skip => {
            if !skip(n) {
                bare(n, c);
            }
        }
        Mode::Rest => {
            let here = n.tcp.unread() >= n.b.rest || phase(n) == Phase::Down;
            if here || c.bug == Some(Bug::LeaveBeforeRest) {
                clear(n);
                n.b.at = At::Idle;
            } else if n.tcp.fin_arrived {
                bare(n, c);
            } else {
                n.b.at = view(n);
            }
        }
        Mode::Revoking => revoking(n, c),
    }
}

fn revoking(n: &mut State, c: &Config) {
    let (p, was) = (phase(n), n.b.was);
    let at_once = c.bug == Some(Bug::LeaveAtOnce) && p == Phase::Up && n.d2.head == n.b.cursor;
    if was == Mode::Ready && !matches!(p, Phase::None | Phase::Resumed) {
        // D2 was quicker: it may have accepted.
        n.b.mode = Mode::Ready;
        see_up(n);
        n.b.was = n.b.mode;
        n.b.mode = Mode::Revoking;
        return;
    }
    if matches!(p, Phase::None | Phase::Resumed) || at_once {
        clear(n);
        n.b.at = At::Idle;
        return;
    }
    if was == Mode::Prefix {
        n.b.at = view(n);
        return;
    }
    // Only a whole frame is proof that one was written: the sender may yet see the revocation, and
    // then sends plain bytes. An end proves nothing; the last word may still be on its way.
    let said = c.bug == Some(Bug::FrameOnlyWhenSaid) && p == Phase::Up;
    let whole = if n.b.half {
        n.tcp.at(0)
    } else {
        n.tcp.at(0).filter(|&u| u == Unit::Half).and(n.tcp.at(1))
    };
    match whole {
        Some(u @ (Unit::Down(..) | Unit::Fin(..))) if !said => {
            if !n.b.half {
                recv(n);
                n.b.half = true;
            }
            recv(n);
            n.b.mode = Mode::Ring;
            frame(n, c, u);
        }
        _ if c.bug == Some(Bug::EndWhileRevoking) && n.tcp.ended() => {
            clear(n);
            n.b.at = At::Idle;
        }
        _ => n.b.at = view(n),
    }
}
