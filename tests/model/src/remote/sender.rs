//! A: its calls, and what it does when its daemon is gone.

use super::half::{answer, of, resume_as, run, whole};
use super::state::sender::*;
use super::state::{Act as Any, Came, Config, End, Fault, Phase, State, TxWords, Word, RING};
use super::tcp::Unit;
use super::Bug;
use lane::abi::rx;

/// How far a takeover of the present epoch is: `TxState::takeover_phase`.
fn takeover(n: &State) -> Taken {
    let a = &n.a;
    let epoch = match a.half.mode {
        Mode::Ask => a.w.epoch,
        Mode::Ring | Mode::Drain => a.half.epoch,
        Mode::Tcp | Mode::Switch => return Taken::None,
    };
    let t = n.proxy.takeover;
    match t.epoch == epoch && a.reclaimed != epoch {
        true => t.phase,
        false => Taken::None,
    }
}

/// Does D1 have the direction?
fn held(n: &State) -> bool {
    match takeover(n) {
        Taken::None | Taken::Done => false,
        Taken::Taken | Taken::Down | Taken::Fin | Taken::Plain => true,
    }
}

/// Does A leave it alone?
fn waits(n: &State, c: &Config) -> bool {
    held(n) && c.bug != Some(Bug::NoLookAtTakeover)
}

fn has_answer(n: &State) -> bool {
    let w = n.proxy.word;
    w.epoch != n.a.w.epoch || w.has(rx::ACCEPTED | rx::REVOKED)
}

/// What there is to do, besides sending: `TxState::has_work`, and the end of the daemon.
fn task(n: &State, c: &Config) -> Option<Call> {
    let orphan = n.d1.dead && c.bug != Some(Bug::IgnoreDaemon);
    let (done, held) = (takeover(n) == Taken::Done, waits(n, c));
    let look = |if_: bool| if_.then_some(Call::Look);
    match n.a.half.mode {
        // A shutdown that came too early for D1.
        Mode::Tcp => (n.a.shut && !n.tcp.fin && orphan).then_some(Call::End),
        Mode::Ring | Mode::Ask if orphan => {
            (c.bug != Some(Bug::NoReclaim) || !held).then_some(Call::Reclaim)
        }
        Mode::Drain if orphan && (held || done) => {
            (c.bug != Some(Bug::NoReclaim)).then_some(Call::Reclaim)
        }
        Mode::Ring => look(done || !held && answer(n, Who::A).is_some()),
        Mode::Ask => look(done || !held && has_answer(n)),
        Mode::Drain => look(done || !held && n.tcp.writable()),
        Mode::Switch => unreachable!("it is part of one step here"),
    }
}

pub fn due(n: &State, c: &Config, out: &mut Vec<Any>) {
    let (a, h) = (&n.a, &n.a.half);
    if n.gone() || a.away {
        return;
    }
    let more = n.sent < c.bytes && !a.shut;
    // Native calls need no lock.
    if more && h.mode == Mode::Tcp && n.tcp.writable() {
        out.push(Any::A(Act::Native));
    }
    if h.at.is_some() {
        out.push(Any::A(Act::Step));
        return;
    }
    let mut call = |call| out.push(Any::A(Act::Call(call)));
    if let Some(t) = task(n, c) {
        call(t);
    }
    if more {
        let space = a.head - h.peer_cursor.max(n.proxy.cursor) < RING;
        if h.mode == Mode::Ring && space && !waits(n, c) {
            call(Call::Send);
        }
    } else if c.end != End::Stays && !a.shut {
        call(Call::End);
    }
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    let (a, h) = (&n.a, &n.a.half);
    if a.away {
        out.push(Any::A(Act::Back));
        return;
    }
    if n.gone() || h.at.is_some() {
        return;
    }
    if c.away {
        out.push(Any::A(Act::Away));
    }
    if a.shut || waits(n, c) {
        return;
    }
    let w = n.proxy.word;
    let ready = w == Word::ready(w.epoch) && w.epoch > h.epoch;
    if h.mode == Mode::Tcp && ready && !n.d1.dead && n.asks > 0 {
        out.push(Any::A(Act::Up));
    }
    if h.mode == Mode::Ring && n.downs > 0 {
        out.push(Any::A(Act::Call(Call::Down)));
    }
}

pub fn step(n: &mut State, c: &Config, act: Act) {
    match act {
        Act::Native => {
            n.tcp.send(Unit::Byte(n.sent));
            n.a.half.tcp_pos += 1;
            n.sent += 1;
        }
        Act::Call(call) => {
            n.downs -= u8::from(call == Call::Down);
            locked(n, c, Some(At::Taken(call)));
        }
        Act::Step => {
            let at = n.a.half.at.take();
            let next = at.and_then(|at| locked_step(n, c, at));
            locked(n, c, next);
        }
        Act::Up => up(n, c),
        Act::Away => n.a.away = true,
        Act::Back => n.a.away = false,
    }
}

fn locked(n: &mut State, c: &Config, at: Option<At>) {
    n.a.half.at = whole(c, at, |at| locked_step(n, c, at));
}

/// `TxState::try_up`. (The switch of the mode keeps other threads' native calls out: see `holders`.)
fn up(n: &mut State, c: &Config) {
    n.asks -= 1;
    n.came = Came::No;
    let a = &mut n.a;
    a.w = TxWords {
        epoch: n.proxy.word.epoch,
        phase: Phase::Up,
        tcp_pos: a.half.tcp_pos,
        start: a.head,
    };
    a.half.peer_cursor = a.head;
    a.half.mode = Mode::Ask;
    if c.bug == Some(Bug::NoAsk) {
        (a.half.mode, a.half.epoch) = (Mode::Ring, a.w.epoch);
    }
}

fn locked_step(n: &mut State, c: &Config, at: At) -> Option<At> {
    match at {
        At::Taken(call) => taken(n, c, call),
        At::Answer(call) => answered(n, call),
        At::Publish => {
            let a = &mut n.a;
            let known = a.half.peer_cursor.max(n.proxy.cursor);
            if known > a.head {
                n.fault(Fault::Impossible);
                return None;
            }
            a.half.peer_cursor = known;
            if a.head - known == RING {
                return Some(At::Word); // the ring is full
            }
            a.ring[(a.head % RING) as usize] = n.sent;
            a.head += 1;
            n.sent += 1;
            Some(At::Published)
        }
        At::Published => {
            let next = answer(n, Who::A);
            if next == Some(At::Resume) && c.bug == Some(Bug::TakeBack) {
                n.a.head -= 1;
                n.sent -= 1;
            }
            next
        }
        at => run(n, c, Who::A, at),
    }
}

/// A has the lock. Is the direction D1's? If D1 is done, A takes it back.
fn taken(n: &mut State, c: &Config, call: Call) -> Option<At> {
    if takeover(n) == Taken::Done {
        take_back(n);
    }
    let goes_on_anyway = matches!(call, Call::Reclaim | Call::End);
    if waits(n, c) && !goes_on_anyway {
        return None;
    }
    match call {
        Call::Reclaim => reclaim(n),
        Call::End => {
            end(n, c);
            None
        }
        Call::Send | Call::Look | Call::Down => goes_on(n, call),
    }
}

fn goes_on(n: &State, call: Call) -> Option<At> {
    match n.a.half.mode {
        Mode::Tcp => None,
        Mode::Ring => Some(match call {
            Call::Send => At::Publish,
            Call::Look => At::Word,
            Call::Down | Call::Reclaim | Call::End => At::Downing,
        }),
        Mode::Drain => Some(At::Send),
        Mode::Ask => Some(At::Answer(call)),
        Mode::Switch => unreachable!("it is part of one step here"),
    }
}

fn take_back(n: &mut State) {
    let (a, t) = (&mut n.a, n.proxy.takeover);
    (a.half.epoch, a.half.tcp_pos) = (t.epoch, t.tcp_pos);
    a.w.phase = Phase::Down;
    a.half.mode = Mode::Tcp;
}

/// `TxState::answered`.
fn answered(n: &mut State, call: Call) -> Option<At> {
    let (w, epoch) = (n.proxy.word, n.a.w.epoch);
    let accepted = w.has(rx::ACCEPTED);
    if w.epoch != epoch || w.has(rx::REVOKED) && !accepted {
        return Some(At::Say(Phase::Resumed)); // the epoch is not used up
    }
    if !accepted {
        return None;
    }
    (n.a.half.epoch, n.a.half.mode) = (epoch, Mode::Ring);
    goes_on(n, call)
}

/// `shutdown` and `close`: a direction that is on its ring is left to D1.
fn end(n: &mut State, c: &Config) {
    n.a.shut = true;
    let tcp = n.a.half.mode == Mode::Tcp;
    n.tcp.fin |= tcp;
    // Without D1, A itself has to bring it down first.
    n.a.closed = c.end == End::Exits && (tcp || !n.d1.dead);
}

/// `TxState::reclaim`: D1 is gone; if it had the direction, A goes on where it stopped. In any case it comes down.
fn reclaim(n: &mut State) -> Option<At> {
    n.a.orphan = true;
    let phase = takeover(n);
    if held(n) {
        let was = n.a.half.mode;
        let asked = n.a.w.epoch;
        let begun = n.tcp.total - n.a.half.tcp_pos;
        n.a.reclaimed = n.proxy.takeover.epoch;
        match phase {
            _ if begun == 0 => {}
            // D1 went on with what we had begun.
            Taken::Taken if was == Mode::Drain => {
                n.a.half.done += begun;
                n.a.half.tcp_pos += begun;
            }
            what => {
                n.a.half.epoch = asked; // not set yet if we were still asking
                resume_as(n, Who::A, what, begun, n.proxy.takeover.at);
            }
        }
    }
    if n.a.half.mode == Mode::Ask && !has_answer(n) {
        return Some(At::Say(Phase::Resumed)); // nobody will answer
    }
    goes_on(n, Call::Down)
}

/// A is dead, and with it its hold of the lock.
pub fn died(n: &mut State) {
    n.a.dead = true;
    n.a.away = false;
    n.a.half.at = None;
}

/// Is it free for D1 to take the direction?
pub fn unlocked(n: &State) -> bool {
    n.gone() || of(n, Who::A).is_some_and(|h| h.at.is_none())
}
