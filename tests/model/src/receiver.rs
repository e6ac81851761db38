//! The receiving half, step by step as in `lane::half::rx`.

use super::read::{begin_skip, bell, early, frame, see_up, skip, view};
use super::revoke;
use super::state::receiver::*;
use super::state::{Act as Any, Config, Fault, Phase, State, Word};
use super::tcp::{No, Unit};
use super::Bug;
use lane::abi::rx;

pub fn due(n: &State, _c: &Config, out: &mut Vec<Any>) {
    let act = match n.r.at {
        At::Idle => Act::Recv,
        At::Native if !n.tcp.readable() => return,
        At::Wait(Wait::Asleep) if !(n.w.receiver_bell || n.tcp.readable()) => return,
        at @ At::Pending(..) if n.phase() == n.r.seen && view(n) == at => return,
        at => Act::Step(at),
    };
    out.push(Any::Receiver(act));
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    let r = &n.r;
    if r.at == At::Wait(Wait::Asleep) && c.spurious {
        out.push(Any::Receiver(Act::Signal));
    }
    let frozen = r.mode == Mode::Revoking && r.was == Mode::Ring;
    if c.bug == Some(Bug::ConsumeWhileRevoking) && r.revoking() && frozen {
        out.push(Any::Receiver(Act::Recv));
    }
    if r.at != At::Idle || !r.attached {
        return;
    }
    if r.mode == Mode::Tcp && r.epoch < c.ups {
        out.push(Any::Receiver(Act::Ready));
    }
    if r.mode != Mode::Tcp && n.revocations > 0 {
        out.push(Any::Receiver(Act::Revoke));
    }
    if r.mode != Mode::Tcp && n.wants > 0 {
        out.push(Any::Receiver(Act::WantDown));
    }
}

/// Forgets what will not be used again, so that states that differ in nothing else are one.
pub fn tidy(n: &mut State) {
    let r = &mut n.r;
    let of = |m: Mode| r.mode == m || r.mode == Mode::Revoking && r.was == m;
    let (prefix, last) = (of(Mode::Prefix), of(Mode::Last) || of(Mode::Skip));
    if !prefix {
        r.limit = 0;
    }
    if !last {
        r.skip = 0;
    }
    if r.at != At::Ring(Ring::Cursor) {
        r.byte = 0;
    }
    if r.mode != Mode::Revoking {
        r.was = Mode::Tcp;
    }
    if !matches!(
        r.at,
        At::Revoke(Revoke::Head | Revoke::Peek | Revoke::Tcp) | At::Pending(..)
    ) {
        r.seen = Phase::None;
    }
    if !n.w.word.has(rx::REVOKED) && r.at != At::Revoke(Revoke::Word) {
        n.w.revoked = 0;
    }
}

/// The application gets what it hopes is the next byte.
fn got(n: &mut State, u: Unit) {
    match u {
        Unit::Byte(b) if b == n.got => n.got += 1,
        Unit::Byte(_) => n.fault(Fault::Stream),
        Unit::Half | Unit::Frame { .. } => n.fault(Fault::Parsed),
    }
}

/// End of file, or TCP's error.
fn end(n: &mut State, error: bool) {
    if error {
        n.r.failed = true;
        return;
    }
    // What the application of a dead sender was told is sent must be here; a call that its death cut short may have counted.
    if n.got < n.sent {
        n.fault(Fault::Early);
    }
    n.r.eof = true;
}

pub fn step(n: &mut State, c: &Config, act: Act) {
    match act {
        Act::Recv => {
            n.r.at = match n.r.mode {
                Mode::Tcp => At::Native,
                Mode::Ready => At::Ready(Ready::Look),
                Mode::Prefix => At::Prefix,
                Mode::Ring | Mode::Last => At::Ring(Ring::Head),
                Mode::Skip => At::Skip,
                // (With the bug. Otherwise who revokes does nothing else.)
                Mode::Revoking => At::Ring(Ring::Head),
                Mode::Fin | Mode::Rest => unreachable!("only between nodes"),
            };
        }
        Act::Ready => n.r.at = At::Ready(Ready::DeclareLook),
        Act::Revoke => {
            n.revocations -= 1;
            n.r.at = At::Revoke(Revoke::Begin);
        }
        Act::WantDown => {
            n.wants -= 1;
            early(n, c);
            n.r.at = At::Wait(Wait::WantDown);
        }
        Act::Signal => {
            n.w.receiver_sleeps = false;
            n.r.at = At::Idle;
        }
        Act::Step(at) => run(n, c, at),
    }
}

fn run(n: &mut State, c: &Config, at: At) {
    match at {
        At::Idle => {}
        At::Native => match n.tcp.recv() {
            Ok(u) => {
                n.r.tcp_pos += 1;
                got(n, u);
                n.r.at = At::Idle;
            }
            Err(No::Again) => {}
            Err(e) => end(n, e == No::Reset),
        },
        At::Ready(at) => ready(n, c, at),
        At::Prefix => match n.tcp.recv() {
            Ok(u) => {
                n.r.tcp_pos += 1;
                got(n, u);
                if n.r.tcp_pos == n.r.limit {
                    n.r.mode = Mode::Ring;
                }
                n.r.at = At::Idle;
            }
            Err(No::Again) => n.r.at = At::Wait(Wait::Arm),
            Err(e) => end(n, e == No::Reset),
        },
        At::Ring(at) => ring(n, c, at),
        At::Skip => match skip(n, c) {
            Ok(true) => {}
            Ok(false) => n.r.at = At::Idle,
            Err(No::Again) => n.r.at = At::Wait(Wait::Arm),
            Err(e) => end(n, e == No::Reset),
        },
        At::Wait(at) => wait(n, c, at),
        At::Revoke(at) => revoke::run(n, c, at),
        At::Pending(..) => revoke::again(n),
    }
}

fn ready(n: &mut State, c: &Config, at: Ready) {
    let up = n.phase() != Phase::None;
    n.r.at = At::Ready(match at {
        Ready::DeclareLook => {
            let unread =
                n.w.word.has(rx::REVOKED) && matches!(n.phase(), Phase::Up | Phase::Downing);
            if unread && c.bug != Some(Bug::ReadyTooEarly) {
                n.r.at = At::Idle;
                return;
            }
            Ready::Declare
        }
        Ready::Declare => {
            n.r.epoch += 1;
            n.r.mode = Mode::Ready;
            n.w.word = Word::ready(n.r.epoch);
            n.r.at = At::Idle;
            return;
        }
        Ready::Look if up => Ready::SeeUp,
        Ready::Look if c.bug == Some(Bug::UnboundedRead) => Ready::Take,
        Ready::Look => Ready::Count,
        Ready::Count => match (n.tcp.unread(), c.bug) {
            (0, Some(Bug::NoLookAfterCount)) => Ready::Peek,
            (_, Some(Bug::NoLookAfterCount)) => Ready::Take,
            (k, _) => Ready::Again(k),
        },
        Ready::Again(_) if up => Ready::SeeUp,
        Ready::Again(0) => Ready::Peek,
        Ready::Again(_) => Ready::Take,
        Ready::Take => match n.tcp.recv() {
            Ok(u) => {
                n.r.tcp_pos += 1;
                got(n, u);
                n.r.at = At::Idle;
                return;
            }
            Err(No::Again) => return fall_asleep(n),
            Err(e) => Ready::End(e == No::Reset),
        },
        Ready::Peek => match n.tcp.peek() {
            Ok(_) => {
                n.r.at = At::Idle;
                return;
            }
            Err(No::Again) => return fall_asleep(n),
            Err(e) => Ready::End(e == No::Reset),
        },
        Ready::End(_) if up && c.bug != Some(Bug::ReadyEofWithoutLook) => Ready::SeeUp,
        Ready::End(error) => return end(n, error),
        Ready::SeeUp => {
            see_up(n);
            n.r.at = At::Idle;
            return;
        }
    });
}

fn fall_asleep(n: &mut State) {
    n.r.at = At::Wait(Wait::Arm);
}

fn ring(n: &mut State, c: &Config, at: Ring) {
    n.r.at = match at {
        Ring::Head if n.w.head != n.r.cursor => At::Ring(Ring::Data),
        Ring::Head if n.r.mode == Mode::Last => {
            begin_skip(n);
            At::Skip
        }
        Ring::Head if n.resumed() => {
            n.r.mode = Mode::Tcp;
            At::Idle
        }
        Ring::Head => At::Ring(Ring::Tcp),
        Ring::Data => {
            n.r.byte = n.w.ring[(n.r.cursor % super::state::RING) as usize];
            early(n, c);
            At::Ring(Ring::Cursor)
        }
        Ring::Cursor => {
            n.r.cursor += 1;
            n.w.cursor = n.r.cursor;
            got(n, Unit::Byte(n.r.byte));
            At::Ring(Ring::WishLook)
        }
        Ring::WishLook if n.w.want_space && c.bug != Some(Bug::NoLookForWish) => {
            At::Ring(Ring::Bell)
        }
        Ring::WishLook => At::Idle,
        Ring::Bell => {
            bell(n, c);
            At::Idle
        }
        Ring::Tcp => return ring_tcp(n, c),
        Ring::End(_) if n.w.head != n.r.cursor && c.bug != Some(Bug::EofWithoutLook) => {
            At::Ring(Ring::Head)
        }
        Ring::End(error) => return end(n, error),
    };
}

/// The ring is empty: what does TCP say?
fn ring_tcp(n: &mut State, c: &Config) {
    let half = n.tcp.peek() == Ok(Unit::Half) && n.tcp.unread() == 1;
    if c.bug == Some(Bug::HalfStays) && half {
        return fall_asleep(n);
    }
    // (Looked at once more behind a peek, which is one step with what follows it here.)
    if n.resumed() && matches!(n.tcp.peek(), Ok(Unit::Byte(_))) {
        n.r.mode = Mode::Tcp;
        n.r.at = At::Idle;
        return;
    }
    n.r.at = match frame(n) {
        Ok(true) => At::Ring(Ring::Head),
        Ok(false) => At::Ring(Ring::Tcp),
        Err(No::Again) => At::Wait(Wait::Arm),
        Err(e) => At::Ring(Ring::End(e == No::Reset)),
    };
}

fn wait(n: &mut State, c: &Config, at: Wait) {
    n.r.at = At::Wait(match at {
        Wait::Arm => {
            n.w.receiver_sleeps = true;
            match c.bug {
                Some(Bug::SleepWithoutLook) => Wait::Asleep,
                _ => Wait::ArmLook,
            }
        }
        // As `RxState::has_news`.
        Wait::ArmLook => {
            let has_news = match n.r.mode {
                Mode::Ready => n.phase() != Phase::None,
                Mode::Ring => n.w.head != n.r.cursor || n.resumed(),
                Mode::Last => n.w.head != n.r.cursor,
                Mode::Tcp | Mode::Prefix | Mode::Skip => false,
                Mode::Revoking => false, // (who revokes polls)
                Mode::Fin | Mode::Rest => unreachable!("only between nodes"),
            };
            if has_news {
                n.w.receiver_sleeps = false;
                n.r.at = At::Idle;
                return;
            }
            Wait::Asleep
        }
        Wait::Asleep => {
            n.w.receiver_sleeps = false;
            n.w.receiver_bell = false;
            n.r.at = At::Idle;
            return;
        }
        Wait::WantDown => {
            n.w.word = n.w.word.with(rx::WANT_DOWN);
            Wait::WantDownBell
        }
        Wait::WantDownBell => {
            bell(n, c);
            n.r.at = At::Idle;
            return;
        }
    });
}
