//! What a receive and a hand-over have in common.

use super::resets::bare_fin;
use super::state::receiver::*;
use super::state::{Config, Fault, Phase, State};
use super::tcp::Unit;
use super::Bug;
use lane::abi::rx;
use lane::proto::frame::Kind;

/// The phase of the sender in B's epoch, as D2 has stored it.
pub fn phase(n: &State) -> Phase {
    if n.d2.tx.epoch == n.b.epoch {
        n.d2.tx.phase
    } else {
        Phase::None
    }
}

/// A clean end of file.
pub fn end(n: &mut State) {
    if n.got < n.sent {
        n.fault(Fault::Early);
    }
    n.b.eof = true;
}

/// An end of TCP that is none of the stream.
pub fn bare(n: &mut State, c: &Config) {
    if c.bug == Some(Bug::BareFinIsEnd) {
        end(n);
    } else {
        bare_fin(n);
    }
}

pub fn see_up(n: &mut State) {
    let w = n.d2.tx;
    if w.tcp_pos < n.b.tcp_pos {
        // It was not told what became of its switch, which D2 has shown late, and has gone on.
        if !n.d1.dead || n.a.w.phase != Phase::Resumed {
            n.fault(Fault::Impossible);
        }
        n.b.mode = Mode::Tcp;
        return;
    }
    n.b.limit = w.tcp_pos;
    n.b.cursor = w.start;
    n.b.mode = Mode::Prefix;
    past(n);
}

/// Has all been read that TCP held before the switch?
pub fn past(n: &mut State) {
    if n.b.tcp_pos == n.b.limit {
        n.b.mode = Mode::Ring;
        n.b.word = n.b.word.with(rx::PAST);
    }
}

/// Has nothing come yet since the switch, neither on the ring nor as a part of a frame?
pub fn is_untouched(n: &State) -> bool {
    let mode = match n.b.mode {
        Mode::Revoking => n.b.was,
        mode => mode,
    };
    let up = matches!(mode, Mode::Prefix | Mode::Ring);
    up && !n.b.half && n.b.cursor == n.d2.tx.start && n.d2.head == n.b.cursor
}

/// Are the bytes on TCP left there, until it is known whether they are the stream's?
pub fn is_held(n: &State) -> bool {
    let left = matches!(phase(n), Phase::Downing | Phase::Down | Phase::Ended);
    let asked = n.b.word.has(rx::WANT_DOWN);
    n.b.mode == Mode::Ring
        && is_untouched(n)
        && !left
        && asked
        && matches!(n.tcp.at(0), Some(Unit::Byte(_)))
}

/// The link group is gone, and nothing came on the ring: what follows the switch on TCP? (`RxState::decide`)
pub fn decide(n: &mut State, c: &Config) {
    match n.tcp.at(0) {
        Some(Unit::Byte(_)) => n.b.mode = Mode::Tcp,
        None if !n.tcp.ended() => {}
        _ => {
            n.b.mode = Mode::Ring;
            if look(n, c) == Look::Bare {
                bare(n, c);
            }
        }
    }
}

/// One unit from TCP, and the count of it.
pub fn recv(n: &mut State) -> Option<Unit> {
    let u = n.tcp.recv()?;
    n.b.tcp_pos += 1;
    Some(u)
}

/// What TCP says while the ring is up: `RxState::look`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The ring again, or another mode.
    Again,
    Nothing,
    /// An end that no `Fin` has announced.
    Bare,
}

pub fn look(n: &mut State, c: &Config) -> Look {
    if n.b.mode == Mode::Ring && matches!(n.tcp.at(0), Some(Unit::Byte(_))) {
        let before = n.b.word;
        n.b.word = before.with(rx::WANT_DOWN);
        if is_held(n) {
            return Look::Nothing;
        }
        n.b.word = before;
    }
    match recv(n) {
        Some(Unit::Half) if !n.b.half => {
            n.b.half = true;
            match n.tcp.readable() {
                true => look(n, c),
                false => Look::Nothing,
            }
        }
        Some(u) => {
            frame(n, c, u);
            Look::Again
        }
        None if !n.tcp.ended() => Look::Nothing,
        // Everything that was published before is told first.
        None if n.d2.head != n.b.cursor => Look::Again,
        None => Look::Bare,
    }
}

/// A complete frame, or what can be none: `RxState::framed`.
pub fn frame(n: &mut State, c: &Config, u: Unit) {
    let whole = std::mem::take(&mut n.b.half);
    let Unit::Frame {
        kind,
        epoch,
        cursor,
        rest,
    } = u
    else {
        return n.fault(Fault::Parsed);
    };
    if epoch != n.b.epoch || !whole {
        return n.fault(Fault::Parsed);
    }
    n.b.skip = cursor;
    match kind {
        Kind::Down => {
            if cursor > n.b.cursor {
                n.fault(Fault::Impossible);
            }
            n.b.rest = rest;
            n.b.mode = Mode::Last;
        }
        Kind::Fin if c.bug == Some(Bug::FinWithoutRing) => n.b.mode = Mode::Tcp,
        Kind::Fin => {
            // Its sender has been told that D2 shows all of it.
            if n.d2.head < cursor {
                n.fault(Fault::Impossible);
            }
            n.b.mode = Mode::Fin;
        }
    }
}

/// The ring is done: what came from it is skipped on TCP.
pub fn begin_skip(n: &mut State, c: &Config) {
    let twice = n.b.cursor - n.b.skip;
    if twice > n.b.rest && c.bug != Some(Bug::DownWithoutLength) {
        n.fault(Fault::Impossible);
    }
    n.b.skip = twice;
    n.b.rest = n.b.rest.saturating_sub(twice);
    n.b.mode = Mode::Skip;
}

/// One byte that we have, or what comes after them.
pub fn skip(n: &mut State, c: &Config) {
    if n.b.skip == 0 {
        n.b.mode = match n.b.rest {
            0 => Mode::Tcp,
            _ => Mode::Rest,
        };
        return;
    }
    match recv(n) {
        Some(u) => {
            if u != Unit::Byte(n.got - n.b.skip) {
                n.fault(Fault::Skipped);
            }
            n.b.skip -= 1;
        }
        // Who sent has ended before it had repeated what we have: nothing is missing, if nothing else was promised.
        None if n.b.rest == 0 => n.b.mode = Mode::Tcp,
        None => bare(n, c),
    }
}
