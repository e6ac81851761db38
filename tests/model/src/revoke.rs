//! How the receiver gives its direction back to TCP, step by step as in `RxState::revoke`.

use super::read::{begin_skip, bell, early, frame, see_up, skip, view};
use super::state::receiver::*;
use super::state::{Config, Fault, Phase, State, Word, UNSEEN};
use super::tcp::{No, Unit};
use super::Bug;
use lane::abi::rx;

/// All that is to come comes on TCP: the socket may leave.
fn clear(n: &mut State) {
    n.r.mode = Mode::Tcp;
    n.r.at = At::Idle;
}

/// Not to be had: the direction goes on as it was, which in life is a reset.
fn impossible(n: &mut State, c: &Config) {
    // A frame cannot be taken out from behind bytes that nobody has read, and a dead sender puts nothing on TCP.
    // Otherwise everything can get there, if there is room.
    let prefix = n.r.mode == Mode::Revoking && n.r.was == Mode::Prefix;
    if c.ample() && !n.s.dead && !prefix {
        n.fault(Fault::Late);
    }
    if n.r.mode == Mode::Revoking {
        n.r.mode = n.r.was;
        n.w.word = Word::ready(n.r.epoch);
    }
    n.r.at = At::Idle;
}

/// Waits, having seen this phase.
fn pending(n: &mut State, seen: Phase) {
    n.r.seen = seen;
    n.r.at = view(n);
}

/// Something has changed for a revocation that waits.
pub fn again(n: &mut State) {
    n.r.at = At::Revoke(match n.r.mode {
        Mode::Last => Revoke::Last,
        Mode::Skip => Revoke::Skip,
        Mode::Revoking => Revoke::Phase,
        Mode::Tcp | Mode::Ready | Mode::Prefix | Mode::Ring => Revoke::Begin,
        Mode::Fin | Mode::Rest => unreachable!("only between nodes"),
    });
}

fn begin(n: &mut State) {
    match n.r.mode {
        Mode::Tcp => clear(n),
        Mode::Ready => {
            n.r.at = At::Revoke(Revoke::Cell);
            if n.phase() != Phase::None {
                see_up(n);
            }
        }
        Mode::Prefix | Mode::Ring => n.r.at = At::Revoke(Revoke::Cell),
        Mode::Last | Mode::Skip | Mode::Revoking => again(n),
        Mode::Fin | Mode::Rest => unreachable!("only between nodes"),
    }
}

pub fn run(n: &mut State, c: &Config, at: Revoke) {
    n.r.at = At::Revoke(match at {
        Revoke::Begin => return begin(n),
        Revoke::Cell => {
            n.w.revoked = if n.r.mode == Mode::Ready {
                UNSEEN
            } else {
                n.r.cursor
            };
            early(n, c);
            Revoke::Word
        }
        Revoke::Word => {
            n.w.word = Word::ready(n.r.epoch).with(rx::REVOKED);
            n.r.was = n.r.mode;
            n.r.mode = Mode::Revoking;
            Revoke::Bell
        }
        Revoke::Bell => {
            bell(n, c);
            Revoke::Phase
        }
        Revoke::Phase => return phase(n, c),
        // From here on it has seen the switch.
        Revoke::SeeUp => {
            see_up(n);
            n.r.was = n.r.mode;
            n.r.mode = Mode::Revoking;
            Revoke::Phase
        }
        Revoke::Head if n.w.head == n.r.cursor => return clear(n),
        Revoke::Head => return pending(n, n.r.seen),
        Revoke::Peek => match n.tcp.peek() {
            // A whole frame, or the end.
            Ok(Unit::Half) if n.tcp.unread() > 1 => Revoke::Tcp,
            Err(No::End | No::Reset) => Revoke::Tcp,
            _ => return pending(n, n.r.seen),
        },
        Revoke::Tcp => match frame(n) {
            Ok(true) => Revoke::Last,
            Ok(false) => Revoke::Tcp,
            Err(No::Again) => return pending(n, n.r.seen),
            Err(No::End | No::Reset) => Revoke::End,
        },
        Revoke::End if n.w.head == n.r.cursor => return clear(n),
        Revoke::End => return impossible(n, c),
        Revoke::Last | Revoke::LastPhase => return last(n, c, at),
        Revoke::Skip => match skip(n, c) {
            Ok(true) => Revoke::Skip,
            Ok(false) => return clear(n),
            Err(No::Again) => return pending(n, n.phase()),
            // All that comes again is here already.
            Err(No::End | No::Reset) => return clear(n),
        },
    });
}

/// What has the sender said? (In the former mode `Ready` it had said nothing yet.)
fn phase(n: &mut State, c: &Config) {
    let p = n.phase();
    n.r.seen = p;
    n.r.at = At::Revoke(match (n.r.was, p) {
        (_, Phase::None | Phase::Resumed) => return clear(n),
        (Mode::Ready, _) => Revoke::SeeUp,
        (_, Phase::Up) => Revoke::Head,
        // A frame may lie behind the prefix.
        (Mode::Prefix, Phase::Downing) => return pending(n, p),
        (Mode::Prefix, Phase::Down | Phase::Broken | Phase::Ended) => return impossible(n, c),
        (_, Phase::Downing) if !n.r.half && c.bug != Some(Bug::TrustAnnouncement) => Revoke::Peek,
        (_, Phase::Downing | Phase::Down | Phase::Broken | Phase::Ended) => Revoke::Tcp,
    });
}

/// The frame is here. What is unread on the ring comes again on TCP, if the sender has said so.
fn last(n: &mut State, c: &Config, at: Revoke) {
    let there = match at {
        Revoke::LastPhase => match n.phase() {
            p @ (Phase::Up | Phase::Downing) => return pending(n, p),
            Phase::Down | Phase::Ended => true,
            Phase::Broken => return impossible(n, c),
            // Not in this epoch.
            Phase::None | Phase::Resumed => return impossible(n, c),
        },
        _ => n.w.head == n.r.cursor,
    };
    if there {
        begin_skip(n);
        n.r.at = At::Revoke(Revoke::Skip);
    } else {
        n.r.at = At::Revoke(Revoke::LastPhase);
    }
}
