//! D1 acts for an end that has shut down, is gone, or is asleep when it should come down: as in the daemon's
//! `rail::takeover` and in `lane::half::tx::takeover`.

use super::half::{answer, may_finish, resume_as, run, whole};
use super::outward;
use super::sender::unlocked;
use super::state::daemons::{Act, Step};
use super::state::sender::*;
use super::state::{Act as Any, Config, Phase, State};
use super::Bug;
use lane::abi::rx;

/// A will send no more, and leaves what is on its ring to D1.
fn ending(n: &State) -> bool {
    n.gone() || n.a.shut
}

/// Has A gone as far as this in its epoch without being on TCP?
fn is_off_tcp(phase: Phase) -> bool {
    match phase {
        Phase::Up | Phase::Downing => true,
        Phase::None | Phase::Down | Phase::Resumed => false,
        Phase::Broken | Phase::Ended => unreachable!("TCP takes everything here"),
    }
}

/// Has D2 not answered the switch yet?
fn is_asking(n: &State) -> bool {
    let w = n.proxy.word;
    let ours = w.epoch == n.a.w.epoch;
    n.a.w.phase == Phase::Up && ours && !w.has(rx::ACCEPTED | rx::REVOKED)
}

/// Is A, on its ring, to come down?
fn is_asked(n: &State, c: &Config) -> bool {
    let w = n.proxy.word;
    let up = w.epoch == n.a.w.epoch && w.has(rx::ACCEPTED);
    let lost = !n.net.rail_up() && c.bug != Some(Bug::NoWantDown);
    up && (lost || w.asks())
}

/// What D1 does next for an end whose direction it does not have.
fn begins(n: &State, c: &Config) -> Option<Step> {
    let (w, t) = (n.a.w, n.proxy.takeover);
    let done = t.epoch == w.epoch && t.phase == Taken::Done;
    if ending(n) {
        return match done || !is_off_tcp(w.phase) {
            _ if n.tcp.fin || is_asking(n) => None,
            true => Some(Step::Done),
            false => Some(Step::Claim),
        };
    }
    // It has 20 ms to do it itself: so much as long as nothing holds it up.
    let late = match w.phase {
        Phase::Downing => c.bug != Some(Bug::ForgetDowning),
        Phase::Up => is_asked(n, c),
        Phase::None | Phase::Down | Phase::Resumed | Phase::Broken | Phase::Ended => false,
    };
    (c.fine() && late && !done).then_some(Step::Claim)
}

/// What a helper does next on a direction that D1 has.
pub fn work(n: &State, c: &Config, h: &Half) -> Option<At> {
    match h.mode {
        Mode::Drain => n.tcp.writable().then_some(At::Send),
        Mode::Ring if ending(n) && n.net.rail_up() && !n.d1.late => match c.bug {
            Some(Bug::NoFin) => Some(At::Settle),
            _ => (may_finish(n, c) || answer(n, Who::D1).is_some()).then_some(At::Fin),
        },
        Mode::Ring => Some(At::Downing),
        Mode::Tcp => None,
        Mode::Switch | Mode::Ask => unreachable!("D1 does not take up"),
    }
}

fn next(n: &State, c: &Config) -> Option<Step> {
    if n.d1.adopts {
        return Some(Step::Adopt);
    }
    if n.d1.claim.is_some() {
        return Some(Step::LookAtLock);
    }
    match &n.d1.half {
        None => begins(n, c),
        Some(h) if h.at.is_some() => Some(Step::Work),
        Some(h) if h.mode == Mode::Tcp => Some(Step::Done),
        Some(h) => work(n, c, h).map(|_| Step::Work),
    }
}

pub fn due(n: &State, c: &Config, out: &mut Vec<Any>) {
    if n.d1.dead || c.bug == Some(Bug::NoTakeover) {
        return;
    }
    // (It may find the lock taken, but not for ever.)
    if let Some(step) = next(n, c).filter(|s| *s != Step::Claim || unlocked(n)) {
        out.push(Any::Daemon(Act::Takeover(step)));
    }
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    let locked = !n.d1.dead && c.bug != Some(Bug::NoTakeover) && !unlocked(n);
    if locked && next(n, c) == Some(Step::Claim) {
        out.push(Any::Daemon(Act::Takeover(Step::Claim)));
    }
}

/// Does D1 wait for bytes that may not arrive any more? After two seconds they go to TCP.
pub fn waits(n: &State, c: &Config) -> bool {
    let waits = |h: &Half| h.mode == Mode::Ring && h.at.is_none();
    !n.d1.dead && !n.d1.late && n.d1.half.as_ref().is_some_and(waits) && c.bug != Some(Bug::NoFlush)
}

pub fn step(n: &mut State, c: &Config, step: Step) {
    match step {
        Step::Claim => {
            let w = n.a.w;
            n.d1.claim = Some((w.epoch, w.phase));
            says(n, w.epoch, Taken::Taken);
        }
        Step::LookAtLock => {
            let w = n.a.w;
            let same = n.d1.claim == Some((w.epoch, w.phase));
            n.d1.adopts = unlocked(n) && same || c.bug == Some(Bug::NoLock);
            if !n.d1.adopts {
                release(n);
            }
        }
        Step::Adopt => adopt(n, c),
        Step::Work => {
            let Some(h) = n.d1.half.clone() else { return };
            let at = h.at.or_else(|| work(n, c, &h));
            if h.at.is_none() {
                outward::look_out(n, c); // as always before D1 looks after its ends
                if at != Some(At::Fin) {
                    outward::take_down(n, c, h.epoch);
                }
            }
            let next = at.and_then(|at| run(n, c, Who::D1, at));
            let next = whole(c, next, |at| run(n, c, Who::D1, at));
            n.d1.half.iter_mut().for_each(|h| h.at = next);
        }
        Step::Done => done(n, c),
        Step::Late => n.d1.late = true,
    }
}

/// What D1 does with the direction, in the word that A looks at.
fn says(n: &mut State, epoch: u8, phase: Taken) {
    n.proxy.takeover = Takeover {
        epoch,
        phase,
        ..Takeover::NONE
    };
}

fn release(n: &mut State) {
    if let Some((epoch, _)) = n.d1.claim.take() {
        says(n, epoch, Taken::None);
    }
}

/// Makes the direction from what A has stored, and what the kernel has counted: `TxState::adopt`.
fn adopt(n: &mut State, c: &Config) {
    n.d1.adopts = false;
    let w = n.a.w;
    if ending(n) {
        outward::finish(n);
    }
    let accepted = n.proxy.word.epoch == w.epoch && n.proxy.word.has(rx::ACCEPTED);
    if !is_off_tcp(w.phase) || w.phase == Phase::Up && !accepted {
        release(n);
        if !is_asking(n) {
            done(n, c);
        }
        return;
    }
    n.d1.claim = None;
    n.d1.half = Some(Half {
        mode: Mode::Ring,
        epoch: w.epoch,
        tcp_pos: w.tcp_pos,
        peer_cursor: w.start,
        ..Half::TCP
    });
    let record = n.a.record;
    let begun = n.tcp.total - w.tcp_pos;
    match c.bug {
        Some(Bug::TrustRecord) if record.epoch == w.epoch => {
            resume_as(n, Who::D1, record.phase, 0, record.at);
        }
        _ if begun == 0 => {}
        _ if record.epoch == w.epoch => resume_as(n, Who::D1, record.phase, begun, record.at),
        _ => resume_as(n, Who::D1, Taken::None, begun, record.at),
    }
}

/// The direction is on TCP. (A may have taken it back and gone up again before D1 handles that.)
fn done(n: &mut State, c: &Config) {
    let now = n.a.w.epoch;
    let (epoch, phase) = match n.d1.half.take() {
        Some(h) if h.frame.is_some() => (h.epoch, Phase::Down),
        Some(h) => (h.epoch, Phase::Resumed),
        None => (now, n.a.w.phase.max(Phase::Down)),
    };
    n.d1.late = false;
    outward::take_down(n, c, epoch);
    outward::is_down(n, epoch, phase);
    n.tcp.fin |= ending(n) && epoch == now;
}

/// D1 is dead; what it had stored stays.
pub fn d1_died(n: &mut State) {
    n.d1.dead = true;
    (n.d1.half, n.d1.claim, n.d1.adopts) = (None, None, false);
}
