//! B's socket goes to somebody without a shim: `RxState::revoke`.

use super::read::*;
use super::resets::reset_or_fault;
use super::state::receiver::*;
use super::state::{Config, Phase, State, Word, UNSEEN};
use super::tcp::Unit;
use super::Bug;
use lane::abi::rx;

/// What a hand-over that waits has seen: it polls, and comes to another result only when one of these is different.
pub fn view(n: &State) -> At {
    At::Pending(phase(n), n.tcp.unread(), n.tcp.fin_arrived)
}

/// The socket is at somebody else's disposal from here on.
fn clear(n: &mut State) {
    n.b.mode = Mode::Tcp;
    n.b.leaving = false;
    n.b.at = At::Idle;
}

/// Not possible without losing bytes: the connection is reset.
fn impossible(n: &mut State, c: &Config) {
    reset_or_fault(n, c);
    n.b.at = At::Idle;
}

pub fn run(n: &mut State, c: &Config, at: At) {
    if let At::Mark(cell) = at {
        n.b.revoked = cell;
        n.b.was = n.b.mode;
        n.b.word = Word::ready(n.b.epoch).with(rx::REVOKED);
        n.b.mode = Mode::Revoking;
        n.b.at = At::Leave;
        return;
    }
    n.b.at = At::Leave;
    match n.b.mode {
        Mode::Tcp => clear(n),
        Mode::Ready if phase(n) != Phase::None => see_up(n),
        Mode::Ready => n.b.at = At::Mark(UNSEEN),
        Mode::Ring if n.b.cursor != n.d2.tx.start => recall(n, c),
        Mode::Prefix | Mode::Ring => n.b.at = At::Mark(n.b.cursor),
        Mode::Last => last(n, c),
        // Nothing follows the frame on TCP: all that remains is on the ring.
        Mode::Fin if n.b.cursor == n.b.skip => {
            clear(n);
            end(n);
        }
        Mode::Fin => {
            n.reset = true;
            clear(n);
        }
        Mode::Skip if n.b.skip > 0 && !n.tcp.readable() => n.b.at = view(n),
        Mode::Skip => skip(n, c),
        Mode::Rest => {
            let here = n.tcp.unread() >= n.b.rest || phase(n) == Phase::Down;
            if here || c.bug == Some(Bug::LeaveBeforeRest) {
                clear(n);
            } else {
                n.b.at = view(n);
            }
        }
        Mode::Undecided => {
            if n.b.tcp_pos == n.b.limit {
                decide(n, c);
            }
            if n.b.mode == Mode::Undecided {
                n.b.at = view(n);
            }
        }
        Mode::Revoking => revoking(n, c),
    }
}

/// The frame is here. What is unread on the ring comes again on TCP: `DOWN` promises that, which may never be told, or
/// all that the frame has announced is there.
fn last(n: &mut State, c: &Config) {
    let told = c.bug == Some(Bug::WaitForWord);
    let there = n.d2.head == n.b.cursor || n.tcp.unread() >= n.b.rest && !told;
    match phase(n) {
        _ if there => begin_skip(n, c),
        Phase::Down | Phase::Ended => begin_skip(n, c),
        Phase::Broken => impossible(n, c),
        Phase::None | Phase::Up | Phase::Downing | Phase::Resumed => n.b.at = view(n),
    }
}

/// Part of the ring is read: the sender has to come down by a frame.
fn recall(n: &mut State, c: &Config) {
    if !n.b.word.has(rx::REVOKED) {
        n.b.revoked = n.b.cursor;
        n.b.word = n.b.word.with(rx::REVOKED);
    }
    if phase(n) == Phase::Up {
        match c.bug {
            Some(Bug::LeaveAtOnce) if n.d2.head == n.b.cursor => return clear(n),
            Some(Bug::FrameOnlyWhenSaid) => {
                n.b.at = view(n);
                return;
            }
            _ => {}
        }
    }
    match look(n, c) {
        Look::Again if n.b.mode == Mode::Ring => n.b.at = view(n),
        Look::Again => {}
        Look::Nothing => n.b.at = view(n),
        Look::Bare if c.bug == Some(Bug::EndWhileRevoking) => clear(n),
        Look::Bare => impossible(n, c),
    }
}

/// The cursor is frozen, and nothing of the ring was read: what has the sender said?
fn revoking(n: &mut State, c: &Config) {
    let (p, was) = (phase(n), n.b.was);
    if was == Mode::Ready && !matches!(p, Phase::None | Phase::Resumed) {
        // D2 was quicker: it may have accepted.
        see_up(n);
        if n.b.mode != Mode::Tcp {
            n.b.was = n.b.mode;
            n.b.mode = Mode::Revoking;
        }
        return;
    }
    let at_once = c.bug == Some(Bug::LeaveAtOnce) && n.d2.head == n.b.cursor;
    match p {
        Phase::None | Phase::Resumed => clear(n),
        Phase::Up if at_once => clear(n),
        // A frame may lie behind the prefix, where we cannot take it out.
        Phase::Up | Phase::Downing if was == Mode::Prefix => n.b.at = view(n),
        Phase::Down | Phase::Broken | Phase::Ended if was == Mode::Prefix => impossible(n, c),
        Phase::Up if c.bug == Some(Bug::FrameOnlyWhenSaid) => n.b.at = view(n),
        Phase::Up | Phase::Downing if !n.b.half && !is_whole(n) => {
            n.b.at = view(n);
            if c.bug == Some(Bug::EndWhileRevoking) && n.tcp.ended() {
                clear(n);
            }
        }
        Phase::Up | Phase::Downing | Phase::Down | Phase::Broken | Phase::Ended => {
            framed(n, c);
        }
    }
}

/// Only a whole frame is proof that one was written: the sender may yet see the revocation, and then sends plain bytes.
/// An end proves nothing; the last word may still be on its way.
fn is_whole(n: &State) -> bool {
    n.tcp.at(0) == Some(Unit::Half) && matches!(n.tcp.at(1), Some(Unit::Frame { .. }))
}

/// A frame is on TCP, or nothing more will come there.
fn framed(n: &mut State, c: &Config) {
    n.b.mode = Mode::Ring;
    match look(n, c) {
        Look::Again if n.b.mode != Mode::Ring => {}
        Look::Nothing => {
            n.b.mode = Mode::Revoking;
            n.b.at = view(n);
        }
        // TCP has ended, and the ring has not; or no frame has come at all.
        Look::Again | Look::Bare => impossible(n, c),
    }
}
