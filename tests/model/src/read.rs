//! What a receive and a revocation have in common.

use super::state::receiver::*;
use super::state::{Config, Fault, State};
use super::tcp::{No, Unit};
use super::Bug;
use lane::proto::frame::Kind;

/// What a revocation that waits has seen: it polls, and comes to another result only when one of these is different.
pub fn view(n: &State) -> At {
    At::Pending(n.r.seen, n.tcp.unread(), n.tcp.readable())
}

pub fn bell(n: &mut State, c: &Config) {
    let sleeps = if c.bug == Some(Bug::LookBeforePublish) {
        n.r.early
    } else {
        n.w.sender_sleeps
    };
    n.w.sender_bell |= sleeps;
}

/// For the bug: the look that should come after the store.
pub fn early(n: &mut State, c: &Config) {
    n.r.early = c.bug == Some(Bug::LookBeforePublish) && n.w.sender_sleeps;
}

pub fn see_up(n: &mut State) {
    n.r.limit = n.w.up_tcp_pos;
    n.r.cursor = n.w.up_start;
    n.w.cursor = n.r.cursor;
    if n.r.limit < n.r.tcp_pos {
        n.fault(Fault::Impossible);
    }
    n.r.mode = if n.r.limit == n.r.tcp_pos {
        Mode::Ring
    } else {
        Mode::Prefix
    };
}

/// Takes one unit that can only be part of a frame. `false`: it was not its end.
pub fn frame(n: &mut State) -> Result<bool, No> {
    let unit = n.tcp.peek()?;
    match unit {
        Unit::Byte(_) => {
            n.fault(Fault::Parsed);
            return Ok(false);
        }
        Unit::Half => n.r.half = true,
        Unit::Frame {
            kind,
            epoch,
            cursor,
        } => {
            if epoch != n.r.epoch || cursor > n.r.cursor || !n.r.half {
                n.fault(Fault::Parsed);
            }
            n.r.half = false;
            match kind {
                Kind::Down => {
                    n.r.skip = cursor;
                    n.r.mode = Mode::Last;
                }
                // On one node TCP's end is the end.
                Kind::Fin => n.fault(Fault::Parsed),
            }
        }
    }
    n.r.tcp_pos += 1;
    n.tcp.recv()?;
    Ok(n.r.mode == Mode::Last)
}

/// The ring is read: TCP repeats what came from it.
pub fn begin_skip(n: &mut State) {
    n.r.skip = n.r.cursor - n.r.skip;
    n.r.mode = Mode::Skip;
}

/// One byte that we already have. `Ok(false)`: it is done.
pub fn skip(n: &mut State, c: &Config) -> Result<bool, No> {
    if n.r.skip == 0 || c.bug == Some(Bug::NoSkip) {
        n.r.mode = Mode::Tcp;
        return Ok(false);
    }
    let u = n.tcp.recv()?;
    if u != Unit::Byte(n.got - n.r.skip) {
        n.fault(Fault::Skipped);
    }
    n.r.tcp_pos += 1;
    n.r.skip -= 1;
    Ok(true)
}
