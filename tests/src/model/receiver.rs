//! The receiving half, step by step as in `lane::half::rx`.

use super::state::receiver::*;
use super::state::{Act as Any, Config, Fault, Phase, State, Word, UNSEEN};
use super::tcp::{No, Unit};
use super::Bug;

/// What a revocation that waits has seen: it polls, and comes to another result only when one of these is different.
fn view(n: &State) -> At {
    At::Pending(n.r.seen, n.tcp.unread(), n.tcp.readable())
}

pub fn due(n: &State, _c: &Config, out: &mut Vec<Any>) {
    let act = match n.r.at {
        At::Idle => Act::Recv,
        At::Native if !n.tcp.readable() => return,
        At::Asleep if !(n.w.receiver_bell || n.tcp.readable()) => return,
        at @ At::Pending(..) if n.phase() == n.r.seen && view(n) == at => return,
        at => Act::Step(at),
    };
    out.push(Any::Receiver(act));
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    let r = &n.r;
    if r.at == At::Asleep && c.spurious {
        out.push(Any::Receiver(Act::Signal));
    }
    if c.bug == Some(Bug::ConsumeWhileRevoking) && r.revoking() && r.mode == Mode::Ring {
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

fn bell(n: &mut State, c: &Config) {
    let sleeps = if c.bug == Some(Bug::LookBeforePublish) {
        n.r.early
    } else {
        n.w.sender_sleeps
    };
    n.w.sender_bell |= sleeps;
}

/// The application gets what it hopes is the next byte.
fn got(n: &mut State, u: Unit) {
    match u {
        Unit::Byte(b) if b == n.got => n.got += 1,
        Unit::Byte(_) => n.fault(Fault::Stream),
        _ => n.fault(Fault::Parsed),
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

fn clear(n: &mut State) {
    n.r.mode = Mode::Tcp;
    n.r.at = At::Idle;
}

/// Not to be had: the direction goes on as it was.
fn impossible(n: &mut State) {
    n.w.word = Word {
        epoch: n.r.epoch,
        ready: true,
        ..Word::default()
    };
    n.r.at = At::Idle;
}

fn see_up(n: &mut State) {
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

/// Takes one unit that can only be part of a frame. `false`: nothing there.
fn frame(n: &mut State) -> Result<bool, No> {
    match n.tcp.peek()? {
        Unit::Byte(_) => n.fault(Fault::Parsed),
        Unit::Half => {
            n.r.half = true;
            n.r.tcp_pos += 1;
            let _ = n.tcp.recv();
        }
        Unit::Down(epoch, cursor) => {
            if epoch != n.r.epoch || cursor > n.r.cursor || !n.r.half {
                n.fault(Fault::Parsed);
            }
            n.r.half = false;
            n.r.tcp_pos += 1;
            let _ = n.tcp.recv();
            n.r.skip = cursor;
            n.r.mode = Mode::Last;
            return Ok(true);
        }
    }
    Ok(false)
}

/// One byte that we already have. `Ok(false)`: it is done.
fn skip(n: &mut State, c: &Config) -> Result<bool, No> {
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

pub fn step(n: &mut State, c: &Config, act: Act) {
    match act {
        Act::Recv => {
            n.r.at = match n.r.mode {
                Mode::Tcp => At::Native,
                Mode::Ready => At::ReadyLook,
                Mode::Prefix => At::Prefix,
                Mode::Ring | Mode::Last => At::RingHead,
                Mode::Skip => At::Skip,
            };
        }
        Act::Ready => n.r.at = At::DeclareLook,
        Act::Revoke => {
            n.revocations -= 1;
            n.r.at = if n.r.mode == Mode::Ready {
                At::RevokeLook
            } else {
                start_revoke(n.r.mode)
            };
        }
        Act::WantDown => {
            n.wants -= 1;
            n.r.early = n.w.sender_sleeps;
            n.r.at = At::WantDown;
        }
        Act::Signal => {
            n.w.receiver_sleeps = false;
            n.r.at = At::Idle;
        }
        Act::Step(at) => run(n, c, at),
    }
}

fn start_revoke(mode: Mode) -> At {
    match mode {
        Mode::Last => At::RevokeLast,
        Mode::Skip => At::RevokeSkip,
        _ => At::RevokeCell,
    }
}

#[expect(clippy::too_many_lines)]
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
        At::DeclareLook => {
            let unread = n.w.word.revoked && matches!(n.phase(), Phase::Up | Phase::Downing);
            let refuse = unread && c.bug != Some(Bug::ReadyTooEarly);
            n.r.at = if refuse { At::Idle } else { At::Declare };
        }
        At::Declare => {
            n.r.epoch += 1;
            n.r.mode = Mode::Ready;
            n.w.word = Word {
                epoch: n.r.epoch,
                ready: true,
                ..Word::default()
            };
            n.r.at = At::Idle;
        }
        At::ReadyLook => {
            n.r.at = match c.bug {
                _ if n.phase() != Phase::None => At::SeeUp,
                Some(Bug::UnboundedRead) => At::ReadyTake,
                _ => At::ReadyCount,
            };
        }
        At::ReadyCount => {
            let k = n.tcp.unread();
            n.r.at = At::ReadyAgain(k);
            if c.bug == Some(Bug::NoLookAfterCount) {
                n.r.at = if k > 0 { At::ReadyTake } else { At::ReadyPeek };
            }
        }
        At::ReadyAgain(k) => {
            n.r.at = match n.phase() {
                Phase::None if k > 0 => At::ReadyTake,
                Phase::None => At::ReadyPeek,
                _ => At::SeeUp,
            };
        }
        At::ReadyTake => match n.tcp.recv() {
            Ok(u) => {
                n.r.tcp_pos += 1;
                got(n, u);
                n.r.at = At::Idle;
            }
            Err(No::Again) => n.r.at = At::Doze,
            Err(e) => n.r.at = At::ReadyEnd(e == No::Reset),
        },
        At::ReadyPeek => {
            n.r.at = match n.tcp.peek() {
                Ok(_) => At::Idle,
                Err(No::Again) => At::Doze,
                Err(e) => At::ReadyEnd(e == No::Reset),
            };
        }
        At::ReadyEnd(error) => {
            if n.phase() != Phase::None && c.bug != Some(Bug::ReadyEofWithoutLook) {
                n.r.at = At::SeeUp;
            } else {
                end(n, error);
            }
        }
        At::SeeUp => {
            see_up(n);
            n.r.at = At::Idle;
        }
        At::Prefix => match n.tcp.recv() {
            Ok(u) => {
                n.r.tcp_pos += 1;
                got(n, u);
                if n.r.tcp_pos == n.r.limit {
                    n.r.mode = Mode::Ring;
                }
                n.r.at = At::Idle;
            }
            Err(No::Again) => n.r.at = At::Doze,
            Err(e) => end(n, e == No::Reset),
        },
        At::RingHead => {
            n.r.at = if n.w.head != n.r.cursor {
                At::Data
            } else if n.r.mode == Mode::Last {
                n.r.skip = n.r.cursor - n.r.skip;
                n.r.mode = Mode::Skip;
                At::Skip
            } else if n.resumed() {
                n.r.mode = Mode::Tcp;
                At::Idle
            } else {
                At::RingTcp
            };
        }
        At::Data => {
            n.r.byte = n.w.ring[(n.r.cursor % super::state::RING) as usize];
            n.r.early = n.w.sender_sleeps;
            n.r.at = At::Cursor;
        }
        At::Cursor => {
            n.r.cursor += 1;
            n.w.cursor = n.r.cursor;
            got(n, Unit::Byte(n.r.byte));
            n.r.at = At::WishLook;
        }
        At::WishLook => {
            let wish = n.w.want_space && c.bug != Some(Bug::NoLookForWish);
            n.r.at = if wish { At::Bell } else { At::Idle };
        }
        At::Bell => {
            bell(n, c);
            n.r.at = At::Idle;
        }
        At::RingTcp => {
            if c.bug == Some(Bug::HalfStays)
                && n.tcp.peek() == Ok(Unit::Half)
                && n.tcp.unread() == 1
            {
                n.r.at = At::Doze;
                return;
            }
            // (Looked at once more behind a peek, which is one step with what follows it here.)
            if n.resumed() && matches!(n.tcp.peek(), Ok(Unit::Byte(_))) {
                n.r.mode = Mode::Tcp;
                n.r.at = At::Idle;
                return;
            }
            n.r.at = match frame(n) {
                Ok(true) => At::RingHead,
                Ok(false) => At::RingTcp,
                Err(No::Again) => At::Doze,
                Err(e) => At::RingEnd(e == No::Reset),
            };
        }
        At::RingEnd(error) => {
            if n.w.head != n.r.cursor && c.bug != Some(Bug::EofWithoutLook) {
                n.r.at = At::RingHead;
            } else {
                end(n, error);
            }
        }
        At::Skip => match skip(n, c) {
            Ok(true) => {}
            Ok(false) => n.r.at = At::Idle,
            Err(No::Again) => n.r.at = At::Doze,
            Err(e) => end(n, e == No::Reset),
        },
        At::Doze => {
            n.w.receiver_sleeps = true;
            n.r.at = if c.bug == Some(Bug::SleepWithoutLook) {
                At::Asleep
            } else {
                At::DozeLook
            };
        }
        At::DozeLook => {
            let has_news = match n.r.mode {
                Mode::Ready => n.phase() != Phase::None,
                Mode::Ring => n.w.head != n.r.cursor || n.resumed(),
                Mode::Last => n.w.head != n.r.cursor,
                _ => false,
            };
            if has_news {
                n.w.receiver_sleeps = false;
                n.r.at = At::Idle;
            } else {
                n.r.at = At::Asleep;
            }
        }
        At::Asleep => {
            n.w.receiver_sleeps = false;
            n.w.receiver_bell = false;
            n.r.at = At::Idle;
        }
        At::WantDown => {
            n.w.word.want_down = true;
            n.r.at = At::WantDownBell;
        }
        At::WantDownBell => {
            bell(n, c);
            n.r.at = At::Idle;
        }
        _ => revoke(n, c, at),
    }
}

#[expect(clippy::too_many_lines)]
fn revoke(n: &mut State, c: &Config, at: At) {
    match at {
        At::RevokeLook => {
            n.r.at = At::RevokeCell;
            if n.phase() != Phase::None {
                see_up(n);
            }
        }
        At::RevokeCell => {
            n.w.revoked = if n.r.mode == Mode::Ready {
                UNSEEN
            } else {
                n.r.cursor
            };
            n.r.early = n.w.sender_sleeps;
            n.r.at = At::RevokeWord;
        }
        At::RevokeWord => {
            n.w.word = Word {
                epoch: n.r.epoch,
                ready: true,
                want_down: false,
                revoked: true,
            };
            n.r.at = At::RevokeBell;
        }
        At::RevokeBell => {
            bell(n, c);
            n.r.at = At::RevokePhase;
        }
        At::RevokePhase => {
            let p = n.phase();
            n.r.seen = p;
            match (n.r.mode, p) {
                (_, Phase::None | Phase::Resumed) => clear(n),
                (Mode::Ready, _) => n.r.at = At::RevokeSeeUp,
                (_, Phase::Up) => n.r.at = At::RevokeHead,
                (Mode::Prefix, Phase::Downing) => n.r.at = view(n),
                (Mode::Prefix, _) => impossible(n),
                (_, Phase::Downing) if !n.r.half && c.bug != Some(Bug::TrustAnnouncement) => {
                    n.r.at = At::RevokePeek;
                }
                _ => n.r.at = At::RevokeTcp,
            }
        }
        At::RevokeSeeUp => {
            see_up(n);
            n.r.at = At::RevokePhase;
        }
        At::RevokeHead => {
            if n.w.head == n.r.cursor {
                clear(n);
            } else {
                n.r.at = view(n);
            }
        }
        At::RevokePeek => {
            n.r.at = match n.tcp.peek() {
                // A whole frame, or the end.
                Ok(Unit::Half) if n.tcp.unread() > 1 => At::RevokeTcp,
                Err(No::End | No::Reset) => At::RevokeTcp,
                _ => view(n),
            };
        }
        At::RevokeTcp => {
            n.r.at = match frame(n) {
                Ok(true) => At::RevokeLast,
                Ok(false) => At::RevokeTcp,
                Err(No::Again) => view(n),
                Err(_) => At::RevokeEnd,
            };
        }
        At::RevokeEnd => {
            if n.w.head == n.r.cursor {
                clear(n);
            } else {
                impossible(n);
            }
        }
        At::RevokeLast => {
            n.r.at = if n.w.head == n.r.cursor {
                At::RevokeSkip
            } else {
                At::RevokeLastPhase
            };
            if n.r.at == At::RevokeSkip {
                n.r.skip = n.r.cursor - n.r.skip;
                n.r.mode = Mode::Skip;
            }
        }
        At::RevokeLastPhase => match n.phase() {
            p @ (Phase::Up | Phase::Downing) => {
                n.r.seen = p;
                n.r.at = view(n);
            }
            Phase::Down => {
                n.r.skip = n.r.cursor - n.r.skip;
                n.r.mode = Mode::Skip;
                n.r.at = At::RevokeSkip;
            }
            _ => n.r.at = At::Idle, // not to be had
        },
        At::RevokeSkip => match skip(n, c) {
            Ok(true) => {}
            Ok(false) => clear(n),
            Err(No::Again) => {
                n.r.seen = n.phase(); // which does not matter any more
                n.r.at = view(n);
            }
            // All that comes again is here already.
            Err(_) => clear(n),
        },
        At::Pending(..) => {
            n.r.at = match n.r.mode {
                Mode::Last => At::RevokeLast,
                Mode::Skip => At::RevokeSkip,
                _ => At::RevokePhase,
            };
        }
        other => unreachable!("{other:?}"),
    }
}
