//! The sending half, step by step as in `lane::half::tx`.

use super::state::sender::*;
use super::state::{Act as Any, Config, End, Fault, Phase, State, Word, RING, UNSEEN};
use super::tcp::{No, Unit};
use super::Bug;
use lane::abi::rx;

pub fn due(n: &State, c: &Config, out: &mut Vec<Any>) {
    let s = &n.s;
    let act = match s.at {
        At::Idle => return idle(n, c, out),
        At::Native if !n.tcp.writable() => return,
        At::Wait(Wait::Asleep) if !(n.w.sender_bell || n.tcp.reset) => return,
        at => Act::Step(at),
    };
    out.push(Any::Sender(act));
}

fn idle(n: &State, c: &Config, out: &mut Vec<Any>) {
    let more = n.sent < c.bytes;
    let ends = !more && c.end != End::Stays;
    let mut push = |act| out.push(Any::Sender(act));
    match n.s.mode {
        // Waits for the kernel's buffer; ours is the next byte on it. (A close waits only for what nobody else has.)
        Mode::Drain => {
            if n.tcp.writable() {
                push(Act::GoOn);
            }
            if ends && !n.s.must_flush() {
                push(Act::Close);
            }
        }
        Mode::Tcp | Mode::Ring if more => push(Act::Send),
        Mode::Tcp | Mode::Ring if ends => push(Act::Close),
        Mode::Tcp | Mode::Ring => push(Act::Rest),
        // Nothing but the switch up itself is done in it (`holders` has the native calls that it keeps out).
        Mode::Switch => unreachable!("a switch that is left"),
        Mode::Ask => unreachable!("only between nodes"),
    }
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    let s = &n.s;
    if s.at == At::Wait(Wait::Asleep) && c.spurious {
        out.push(Any::Sender(Act::Signal));
    }
    if s.at != At::Idle {
        return;
    }
    let w = n.w.word;
    let pure = w == Word::ready(w.epoch);
    if s.mode == Mode::Tcp && s.attached && pure && w.epoch > s.epoch {
        out.push(Any::Sender(Act::Up));
    }
    if s.mode == Mode::Ring {
        if n.downs > 0 {
            out.push(Any::Sender(Act::Down));
        }
        if w.asks() {
            out.push(Any::Sender(Act::Look));
        }
    }
}

/// The publisher's half of the wake-up, after its store: looks for a sleeper, rings.
fn bell(n: &mut State, c: &Config) {
    let sleeps = if c.bug == Some(Bug::LookBeforePublish) {
        n.s.early
    } else {
        n.w.receiver_sleeps
    };
    n.w.receiver_bell |= sleeps;
}

/// For the bug: the look that should come after the store.
fn early(n: &mut State, c: &Config) {
    n.s.early = c.bug == Some(Bug::LookBeforePublish) && n.w.receiver_sleeps;
}

/// Forgets what will not be used again, so that states that differ in nothing else are one.
pub fn tidy(n: &mut State) {
    let s = &mut n.s;
    if s.mode != Mode::Drain {
        (s.framed, s.frame_done, s.drain_at) = (None, 2, s.peer_cursor);
    }
    // Nobody reads these slots before they are written again (and finds out if he does).
    let live = s.drain_at.min(s.peer_cursor).min(n.r.cursor)..s.head + 1;
    let first = n.w.cursor.min(live.start);
    let slot = |at: u8| (at % RING) as usize;
    let mut keep = [false; RING as usize];
    (first..live.end).for_each(|at| keep[slot(at)] = true);
    for (byte, keep) in n.w.ring.iter_mut().zip(keep) {
        *byte = if keep { *byte } else { u8::MAX };
    }
}

/// The next step is a store that is published.
fn store(n: &mut State, c: &Config, at: Down) {
    n.s.at = At::Down(at);
    early(n, c);
}

/// The end of a call, or of a look.
fn finish(n: &mut State, c: &Config) {
    n.s.at = At::Idle;
    if n.s.closing {
        // A revocation has come in between: its bytes first.
        if n.s.must_flush() && c.bug != Some(Bug::NoFlush) {
            n.s.closing = false;
            return;
        }
        n.s.at = At::Close(said_or_fin(c));
        return;
    }
    if !n.s.in_call {
        return;
    }
    let refused = n.s.must_flush() && n.s.drain_at < n.s.head;
    if refused && c.bug != Some(Bug::NoTakeBack) {
        n.s.at = At::Ring(Ring::TakeBack);
        return;
    }
    n.s.in_call = false;
    n.sent += 1;
}

/// What the receiver's word asks for.
fn answer(n: &mut State, c: &Config, w: Word) {
    if w.epoch != n.s.epoch {
        finish(n, c);
    } else if w.has(rx::REVOKED) {
        n.s.at = At::Down(Down::Revoked);
    } else if w.has(rx::WANT_DOWN) {
        store(n, c, Down::Say);
    } else {
        finish(n, c);
    }
}

/// Something in the receiver's word to act upon.
fn asked(n: &State) -> bool {
    let w = n.w.word;
    w.epoch == n.s.epoch && w.asks()
}

fn refresh(n: &mut State) {
    let cursor = n.w.cursor.max(n.s.peer_cursor);
    if cursor > n.s.head {
        n.fault(Fault::Impossible);
    }
    n.s.peer_cursor = cursor;
}

pub fn step(n: &mut State, c: &Config, act: Act) {
    n.s.at = match act {
        Act::Step(at) => return run(n, c, at),
        Act::Send if n.s.mode == Mode::Tcp => At::Native,
        Act::Send => At::Ring(Ring::Room),
        Act::GoOn => At::Down(Down::Drain),
        Act::Up => At::Up(Up::Words(n.w.word.epoch)),
        Act::Down => {
            n.downs -= 1;
            return store(n, c, Down::Say);
        }
        Act::Look => At::Ring(Ring::LookOnly),
        Act::Rest => At::Wait(Wait::Arm),
        Act::Close => At::Close(Close::Look),
        Act::Signal => {
            n.w.sender_sleeps = false;
            At::Idle
        }
    };
}

fn run(n: &mut State, c: &Config, at: At) {
    match at {
        At::Idle => {}
        At::Native => match n.tcp.send(Unit::Byte(n.sent)) {
            Ok(()) => {
                n.s.tcp_pos += 1;
                n.sent += 1;
                n.s.at = At::Idle;
            }
            Err(No::Again) => {}
            Err(_) => n.s.failed = true,
        },
        At::Up(at) => up(n, c, at),
        At::Ring(at) => ring(n, c, at),
        At::Down(at) => down(n, c, at),
        At::Wait(at) => wait(n, c, at),
        At::Close(at) => close(n, c, at),
    }
}

fn up(n: &mut State, c: &Config, at: Up) {
    n.s.at = match at {
        Up::Words(e) => {
            n.w.up_tcp_pos = n.s.tcp_pos;
            n.w.up_start = n.s.head;
            n.s.epoch = e;
            n.s.peer_cursor = n.s.head;
            early(n, c);
            At::Up(Up::State(e))
        }
        Up::State(e) => {
            n.w.state = (e, Phase::Up);
            At::Up(Up::Bell(e))
        }
        Up::Bell(e) => {
            bell(n, c);
            At::Up(Up::Look(e))
        }
        Up::Look(e) => {
            let w = n.w.word;
            if (w.epoch != e || w.has(rx::REVOKED)) && c.bug != Some(Bug::NoRetreat) {
                return store(n, c, Down::Settle(Phase::Resumed));
            }
            n.s.mode = Mode::Ring;
            At::Idle
        }
    };
}

fn ring(n: &mut State, c: &Config, at: Ring) {
    let headless = c.bug == Some(Bug::HeadBeforeData);
    n.s.at = At::Ring(match at {
        Ring::Room => {
            if n.s.head - n.s.peer_cursor == RING {
                refresh(n);
            }
            match n.s.head - n.s.peer_cursor == RING {
                true => Ring::Look,
                false if headless => Ring::Head,
                false => Ring::Data,
            }
        }
        Ring::Data => {
            n.w.ring[(n.s.head % RING) as usize] = n.sent;
            early(n, c);
            if headless {
                n.s.head += 1;
                Ring::Bell
            } else {
                Ring::Head
            }
        }
        Ring::Head => {
            n.s.in_call = true;
            if headless {
                n.w.head = n.s.head + 1;
                Ring::Data
            } else {
                n.s.head += 1;
                n.w.head = n.s.head;
                Ring::Bell
            }
        }
        Ring::Bell => {
            bell(n, c);
            if c.bug == Some(Bug::NoLookAfterPublish) {
                return finish(n, c);
            }
            Ring::Look
        }
        Ring::Look if asked(n) => return answer(n, c, n.w.word),
        Ring::Look if n.s.in_call => return finish(n, c),
        Ring::Look => {
            n.s.at = At::Wait(Wait::Wish); // the ring is full
            return;
        }
        Ring::LookOnly => return answer(n, c, n.w.word),
        Ring::TakeBack => {
            n.s.head -= 1;
            n.w.head = n.s.head;
            n.s.in_call = false;
            n.s.at = At::Idle;
            return;
        }
    });
}

fn down(n: &mut State, c: &Config, at: Down) {
    let epoch = n.s.epoch;
    n.s.at = At::Down(match at {
        Down::Revoked => {
            refresh(n);
            let cursor = if n.w.revoked == UNSEEN {
                n.w.up_start
            } else {
                n.w.revoked
            };
            if cursor < n.s.peer_cursor || cursor > n.s.head {
                n.fault(Fault::Impossible);
            }
            drains(n, None, cursor)
        }
        Down::Say => {
            n.w.state = (epoch, Phase::Downing);
            Down::Bell
        }
        Down::Bell => {
            bell(n, c);
            Down::Look
        }
        Down::Look => {
            let w = n.w.word;
            match w.epoch == epoch && w.has(rx::REVOKED) {
                true => Down::Revoked,
                false => Down::Cursor,
            }
        }
        Down::Cursor => {
            refresh(n);
            let cursor = n.s.peer_cursor;
            if cursor == n.s.head {
                return store(n, c, Down::Settle(Phase::Resumed)); // all is taken: no frame
            }
            drains(n, Some(cursor), cursor)
        }
        Down::Drain => return drain(n, c),
        // The word is stored first.
        Down::Settle(p) => {
            n.s.mode = Mode::Tcp;
            n.w.state = (epoch, p);
            Down::SettleBell
        }
        Down::SettleBell => {
            bell(n, c);
            return finish(n, c);
        }
    });
}

/// A frame, if there is one, and the bytes from this cursor on have to get on TCP.
fn drains(n: &mut State, framed: Option<u8>, from: u8) -> Down {
    n.s.framed = framed;
    n.s.frame_done = if framed.is_some() { 0 } else { 2 };
    n.s.drain_at = from;
    n.s.mode = Mode::Drain;
    Down::Drain
}

fn drain(n: &mut State, c: &Config) {
    let unit = match n.s.framed {
        Some(_) if n.s.frame_done == 0 => Unit::Half,
        Some(cursor) if n.s.frame_done == 1 => Unit::down(n.s.epoch, cursor),
        _ if n.s.drain_at < n.s.head => Unit::Byte(n.w.ring[(n.s.drain_at % RING) as usize]),
        Some(_) => return store(n, c, Down::Settle(Phase::Down)),
        None => return store(n, c, Down::Settle(Phase::Resumed)),
    };
    match n.tcp.send(unit) {
        Ok(()) => {
            n.s.tcp_pos += 1;
            match unit {
                Unit::Byte(_) => n.s.drain_at += 1,
                Unit::Half | Unit::Frame { .. } => n.s.frame_done += 1,
            }
        }
        Err(No::Again) => finish(n, c),
        Err(No::End | No::Reset) => store(n, c, Down::Settle(Phase::Broken)),
    }
}

fn wait(n: &mut State, c: &Config, at: Wait) {
    let look_or_idle = |n: &State| match n.s.mode {
        Mode::Ring => At::Ring(Ring::LookOnly),
        _ => At::Idle,
    };
    n.s.at = At::Wait(match at {
        Wait::Wish => {
            n.w.want_space = true;
            match c.bug {
                Some(Bug::WishWithoutLook) => Wait::Arm,
                _ => Wait::WishLook,
            }
        }
        Wait::WishLook => {
            refresh(n);
            if n.s.head - n.s.peer_cursor < RING || asked(n) {
                n.s.at = At::Idle;
                return;
            }
            Wait::Arm
        }
        Wait::Arm => {
            n.w.sender_sleeps = true;
            match c.bug {
                Some(Bug::SleepWithoutLook | Bug::WishWithoutLook) => Wait::Asleep,
                _ => Wait::ArmLook,
            }
        }
        Wait::ArmLook => {
            let mut stay = !(n.s.mode == Mode::Ring && asked(n));
            if n.sent < c.bytes {
                refresh(n);
                stay &= n.s.head - n.s.peer_cursor == RING;
            }
            if !stay {
                n.w.sender_sleeps = false;
                n.s.at = look_or_idle(n);
                return;
            }
            Wait::Asleep
        }
        Wait::Asleep => {
            n.w.sender_sleeps = false;
            n.w.sender_bell = false;
            n.s.failed = n.tcp.reset;
            n.s.at = look_or_idle(n);
            return;
        }
    });
}

/// A close says the last word before the kernel's FIN, a shutdown after it.
fn said_or_fin(c: &Config) -> Close {
    match c.end {
        End::Shuts => Close::Fin,
        End::Closes | End::Stays => Close::Say,
    }
}

/// `TxState::repeat_unread` and `TxState::shut`.
fn close(n: &mut State, c: &Config, at: Close) {
    n.s.at = At::Close(match at {
        Close::Look if n.s.mode == Mode::Ring && asked(n) => return answer(n, c, n.w.word),
        Close::Look => Close::Repeat,
        Close::Repeat => {
            refresh(n);
            let unread = n.s.mode == Mode::Ring && n.s.head != n.s.peer_cursor;
            if unread && c.bug != Some(Bug::NoRepeat) {
                n.s.closing = true;
                return store(n, c, Down::Say);
            }
            early(n, c);
            said_or_fin(c)
        }
        Close::Say => {
            let said = n.w.state == (n.s.epoch, Phase::Down);
            let phase = match n.s.mode {
                Mode::Ring | Mode::Drain => Some(Phase::Broken),
                Mode::Tcp if n.s.closing && said => Some(Phase::Ended),
                Mode::Tcp | Mode::Switch | Mode::Ask => None,
            };
            n.s.mode = Mode::Tcp;
            match phase {
                Some(p) => {
                    n.w.state = (n.s.epoch, p);
                    Close::Bell
                }
                None if c.end == End::Shuts => return over(n),
                None => Close::Fin,
            }
        }
        Close::Bell => {
            bell(n, c);
            if c.end == End::Shuts {
                return over(n);
            }
            Close::Fin
        }
        Close::Fin => {
            n.tcp.shut();
            if c.end != End::Shuts {
                return over(n);
            }
            early(n, c);
            Close::Say
        }
    });
}

fn over(n: &mut State) {
    n.s.at = At::Idle;
    n.s.closed = true;
}
