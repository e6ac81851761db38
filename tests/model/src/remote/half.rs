//! A sending direction, step by step as in `lane::half::tx`: in the hands of A, or of D1, which has taken it over.
//!
//! What is here of A outlives it: its words, its ring, and the record of what it puts on TCP. Whoever has the direction
//! may be killed between any two steps; the other one then finds only what is stored, and the kernel's count of what TCP
//! has accepted.

use super::state::sender::*;
use super::state::{Came, Config, Fault, Phase, State, RING};
use super::tcp::Unit;
use super::Bug;
use lane::abi::rx;
use lane::proto::frame::Kind;

pub fn of(n: &State, who: Who) -> Option<&Half> {
    match who {
        Who::A => Some(&n.a.half),
        Who::D1 => n.d1.half.as_ref(),
    }
}

/// Changes the direction of `who`, who has one.
fn with(n: &mut State, who: Who, mut f: impl FnMut(&mut Half)) {
    match who {
        Who::A => f(&mut n.a.half),
        Who::D1 => n.d1.half.iter_mut().for_each(f),
    }
}

/// Unit number `done` of what it puts on TCP.
fn unit(n: &State, c: &Config, h: &Half) -> Option<Unit> {
    let rest = n.a.head - h.from;
    let byte = |i: u8| (i < rest).then(|| Unit::Byte(n.a.ring[((h.from + i) % RING) as usize]));
    match (h.frame, h.done) {
        (Some(_), 0) => Some(Unit::Half),
        (Some((kind, cursor)), 1) => Some(Unit::Frame {
            kind,
            epoch: h.epoch,
            cursor,
            rest: if c.bug == Some(Bug::DownWithoutLength) {
                0
            } else {
                rest
            },
        }),
        (Some(_), i) => byte(i - 2),
        (None, i) => byte(i),
    }
}

/// The peer's cursor, as A's node knows it.
fn refresh(n: &mut State, who: Who) -> u8 {
    let cursor = n.proxy.cursor;
    let known = of(n, who).map_or(0, |h| h.peer_cursor).max(cursor);
    if known > n.a.head {
        n.fault(Fault::Impossible);
    }
    with(n, who, |h| h.peer_cursor = known);
    known
}

/// Notes what is put on TCP from here on, where the other side finds it, and begins.
fn drains(
    n: &mut State,
    c: &Config,
    who: Who,
    what: Taken,
    frame: Option<(Kind, u8)>,
    from: u8,
) -> Option<At> {
    let epoch = of(n, who).map_or(0, |h| h.epoch);
    let record = Takeover {
        epoch,
        phase: what,
        at: from,
        tcp_pos: 0,
    };
    match who {
        _ if c.bug == Some(Bug::NoRecord) => {}
        Who::A => n.a.record = record,
        Who::D1 => n.proxy.takeover = record,
    }
    with(n, who, |h| {
        (h.frame, h.from, h.done) = (frame, from, 0);
        h.mode = Mode::Drain;
    });
    Some(At::Send)
}

/// Goes on with what another one has begun: `begun` units of it are on TCP. (`TxState::resume_as`.)
pub fn resume_as(n: &mut State, who: Who, what: Taken, begun: u8, from: u8) {
    let frame = match what {
        Taken::Down => Some((Kind::Down, from)),
        Taken::Fin => Some((Kind::Fin, from)),
        Taken::Plain => None,
        // There are bytes, and nobody has said what they are.
        Taken::None | Taken::Taken | Taken::Done => return n.fault(Fault::Impossible),
    };
    let most = n.a.head - from.min(n.a.head) + if frame.is_some() { 2 } else { 0 };
    if from > n.a.head || begun > most {
        return n.fault(Fault::Impossible);
    }
    with(n, who, |h| {
        (h.frame, h.from, h.done) = (frame, from, begun);
        h.tcp_pos += begun;
        h.mode = Mode::Drain;
    });
}

/// What the receiver's word asks for: `TxState::answer`.
pub fn answer(n: &State, who: Who) -> Option<At> {
    let w = n.proxy.word;
    let h = of(n, who).filter(|h| h.epoch == w.epoch)?;
    match h.mode {
        Mode::Ring if w.has(rx::REVOKED) => Some(At::Resume),
        Mode::Ring if w.has(rx::WANT_DOWN) => Some(At::Downing),
        Mode::Ring | Mode::Tcp | Mode::Drain | Mode::Switch | Mode::Ask => None,
    }
}

/// May D1 say where the stream ends? D2 has shown B all that A published in this epoch, and B could take the frame out
/// of TCP even if it wanted to leave now.
pub fn may_finish(n: &State, c: &Config) -> bool {
    let landed = match c.bug {
        Some(Bug::FinOnCompletion) => n.d1.acked,
        _ => n.proxy.landed,
    };
    let past = n.proxy.word.has(rx::PAST) || c.bug == Some(Bug::FinBehindPrefix);
    landed == n.a.head && past
}

/// One step of the holder; what comes next, if it goes on.
pub fn run(n: &mut State, c: &Config, who: Who, at: At) -> Option<At> {
    match at {
        At::Word => answer(n, who),
        At::Downing | At::DowningLook | At::Cursor | At::Resume => down(n, c, who, at),
        At::Fin if !may_finish(n, c) => answer(n, who),
        At::Fin => {
            let head = n.a.head;
            n.came = Came::Framed;
            drains(n, c, who, Taken::Fin, Some((Kind::Fin, head)), head)
        }
        At::Send => send(n, c, who),
        At::Count => {
            with(n, who, |h| {
                h.done += 1;
                h.tcp_pos += 1;
            });
            Some(At::Send)
        }
        At::Say(phase) => {
            say(n, c, who, phase);
            (c.bug != Some(Bug::ModeBeforeWord)).then_some(At::Settle)
        }
        At::Settle => {
            with(n, who, |h| h.mode = Mode::Tcp);
            None
        }
        // Those under A's lock alone.
        At::Taken(_) | At::Publish | At::Published | At::Answer(_) => None,
    }
}

/// The ways off the ring: `TxState::{down, resume}`.
fn down(n: &mut State, c: &Config, who: Who, at: At) -> Option<At> {
    match at {
        At::Downing => {
            if who == Who::A {
                n.a.w.phase = Phase::Downing;
            }
            Some(At::DowningLook)
        }
        At::DowningLook => {
            let (w, epoch) = (n.proxy.word, of(n, who)?.epoch);
            // D1 is known to be dead: nobody would tell B. A frame needs nobody.
            let alone = who == Who::A && n.a.orphan && c.bug != Some(Bug::ResumeOrphan);
            let revoked = w.epoch == epoch && w.has(rx::REVOKED) && !alone;
            Some(if revoked { At::Resume } else { At::Cursor })
        }
        At::Cursor => {
            let cursor = refresh(n, who);
            n.came = Came::Framed;
            let frame = Some((Kind::Down, cursor));
            drains(n, c, who, Taken::Down, frame, cursor)
        }
        _ => {
            // A revocation is shown only if nothing was taken from the ring.
            let start = n.a.w.start;
            if refresh(n, who) > start {
                n.fault(Fault::Impossible);
            }
            let told = n.proxy.told && !(who == Who::A && n.a.orphan);
            n.came = Came::Plain { told };
            drains(n, c, who, Taken::Plain, None, start)
        }
    }
}

fn send(n: &mut State, c: &Config, who: Who) -> Option<At> {
    let h = of(n, who)?.clone();
    match unit(n, c, &h) {
        Some(u) if n.tcp.writable() => {
            n.tcp.send(u);
            Some(At::Count)
        }
        Some(_) => None, // until there is room
        None => {
            if c.bug == Some(Bug::ModeBeforeWord) {
                with(n, who, |h| h.mode = Mode::Tcp);
            }
            Some(At::Say(match h.frame {
                Some(_) => Phase::Down,
                None => Phase::Resumed,
            }))
        }
    }
}

/// The last word about an epoch: A's, or D1's, by which the direction is A's again.
fn say(n: &mut State, c: &Config, who: Who, phase: Phase) {
    match (who, &n.d1.half) {
        (Who::D1, _) if c.bug == Some(Bug::NoDone) => {}
        (Who::D1, Some(h)) => {
            let t = &mut n.proxy.takeover;
            (t.epoch, t.phase, t.tcp_pos) = (h.epoch, Taken::Done, h.tcp_pos);
        }
        _ => n.a.w.phase = phase,
    }
}

/// All steps up to the next unit on TCP are one, where nobody can come in between.
pub fn whole(c: &Config, at: Option<At>, mut step: impl FnMut(At) -> Option<At>) -> Option<At> {
    let mut next = at;
    while let (Some(at), false) = (next, c.fine()) {
        next = step(at);
        // (What was published is seen before the next look.)
        if matches!(at, At::Count | At::Publish) {
            break;
        }
    }
    next
}
