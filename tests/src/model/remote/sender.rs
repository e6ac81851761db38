//! The sending half, and the lock under which A works on it and D1 acts for A.
//!
//! What is here of A outlives it: its words, its ring, and its private state (in the family table,
//! which D1 maps). Whoever holds the lock may be killed between any two steps; the other one then
//! finds only what is stored, and the kernel's count of what TCP has accepted.

use super::daemons;
use super::state::sender::*;
use super::state::{Act as Any, Config, End, Fault, Phase, State, TxWords, Word, RING, UNSEEN};
use super::tcp::Unit;
use super::Bug;

/// The proxy's word, if it asks for something in A's epoch.
fn asked(n: &State, c: &Config) -> Option<Word> {
    let w = n.proxy.word;
    let orphan = n.d1.dead && c.bug != Some(Bug::IgnoreDaemon);
    let silent = orphan && c.bug != Some(Bug::ResumeOrphan);
    let asks = w.epoch == n.a.epoch && (w.want || w.revoked);
    (asks || orphan).then_some(Word {
        // D1 is dead: nobody would tell B the answer. A frame needs nobody.
        revoked: w.revoked && w.epoch == n.a.epoch && !silent,
        ..w
    })
}

fn begin(n: &State, c: &Config) -> Option<At> {
    asked(n, c).map(|w| match w.revoked {
        true => At::Resume(n.path()),
        false => At::Downing,
    })
}

/// What there is to do for somebody who takes the lock.
fn task(n: &State, c: &Config, who: Who) -> Option<At> {
    let t = &n.a;
    let ending = n.gone() || t.shut;
    match t.mode {
        Mode::Ask => {
            let w = n.proxy.word;
            if w.epoch != t.epoch || w.revoked {
                Some(At::Say(Phase::Resumed))
            } else {
                w.accepted.then_some(At::GoRing)
            }
        }
        // Somebody died on the way down.
        Mode::Ring if t.w.phase == Phase::Downing && c.bug != Some(Bug::ForgetDowning) => {
            Some(At::DowningLook)
        }
        Mode::Ring => begin(n, c).or_else(|| {
            let fin = ending && who == Who::D1 && daemons::finished(n, c);
            let bare = c.bug == Some(Bug::NoFin);
            fin.then_some(if bare { At::Shut } else { At::FinBegin })
        }),
        Mode::Drain | Mode::Fin => {
            let done = if t.stale { count(n, c) } else { t.done };
            let more = t.unit(done, c).is_some();
            (!more || n.tcp.writable()).then_some(At::Send)
        }
        Mode::Tcp => (ending && !n.tcp.fin).then_some(At::Shut),
    }
}

/// Units of a drain that TCP has, as whoever takes it over finds out.
fn count(n: &State, c: &Config) -> u8 {
    if c.bug == Some(Bug::TrustRecord) {
        n.a.done
    } else {
        n.tcp.total - n.a.tcp_pos0
    }
}

pub fn due(n: &State, c: &Config, out: &mut Vec<Any>) {
    let t = &n.a;
    let unlocked = c.bug == Some(Bug::NoLock);
    let free = |who: Who| t.hands[1 - who as usize].is_none() || unlocked;
    let may = |who: Who| t.hands[who as usize].is_some() || task(n, c, who).is_some();
    // D1 acts for an application that is gone, that has shut, or that sleeps outside of every hook.
    let takeover = n.gone() || t.away || t.shut || t.hands[1].is_some();
    if !n.d1.dead && takeover && free(Who::D1) && may(Who::D1) && c.bug != Some(Bug::NoTakeover) {
        out.push(Any::Takeover);
    }
    if n.gone() || t.away {
        return;
    }
    if free(Who::A) && may(Who::A) {
        out.push(Any::A(Act::Locked));
    }
    if t.hands[0].is_some() || !free(Who::A) {
        return;
    }
    if n.sent < c.bytes && !t.shut {
        let space = t.head - t.peer_cursor.max(n.proxy.cursor) < RING;
        match t.mode {
            Mode::Tcp if n.tcp.writable() => out.push(Any::A(Act::Native)),
            Mode::Ring if space && t.w.phase == Phase::Up => out.push(Any::A(Act::Send)),
            _ => {}
        }
    } else if c.end != End::Stays && !t.shut {
        out.push(Any::A(Act::End));
    }
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    let t = &n.a;
    if t.away {
        out.push(Any::A(Act::Back));
        return;
    }
    if n.gone() || t.hands[0].is_some() {
        return;
    }
    if c.away {
        out.push(Any::A(Act::Away));
    }
    if t.hands[1].is_some() || t.shut {
        return;
    }
    let w = n.proxy.word;
    let ready = w.ready && !(w.want || w.revoked || w.accepted) && w.epoch > t.epoch;
    if t.mode == Mode::Tcp && ready && !n.d1.dead {
        out.push(Any::A(Act::Up));
    }
    if t.mode == Mode::Ring && t.w.phase == Phase::Up && n.downs > 0 {
        out.push(Any::A(Act::Down));
    }
}

fn refresh(n: &mut State) {
    let c = n.proxy.cursor.max(n.a.peer_cursor);
    if c > n.a.head {
        n.fault(Fault::Impossible);
        return;
    }
    n.a.peer_cursor = c;
}

pub fn step(n: &mut State, c: &Config, act: Act) {
    match act {
        Act::Locked => locked(n, c, Who::A),
        Act::Native => {
            n.tcp.send(Unit::Byte(n.sent));
            n.a.tcp_pos += 1;
            n.sent += 1;
        }
        Act::Send => {
            refresh(n);
            n.a.ring[(n.a.head % RING) as usize] = n.sent;
            n.a.head += 1;
            n.sent += 1;
            n.a.hands[0] = Some(At::Look);
        }
        Act::Up => {
            let t = &mut n.a;
            t.epoch = n.proxy.word.epoch;
            t.peer_cursor = t.head;
            t.w = TxWords {
                epoch: t.epoch,
                phase: Phase::Up,
                tcp_pos: t.tcp_pos,
                start: t.head,
            };
            (t.tcp_pos0, t.done, t.frame) = (t.tcp_pos, 0, None);
            t.told = true;
            t.mode = if c.bug == Some(Bug::NoAsk) {
                Mode::Ring
            } else {
                Mode::Ask
            };
        }
        Act::Down => {
            n.downs -= 1;
            n.a.hands[0] = Some(At::Downing);
        }
        Act::End => {
            n.a.shut = true;
            // Without a daemon it is the application that has to finish, before it closes.
            n.a.closed = c.end == End::Exits && !n.d1.dead;
        }
        Act::Away => n.a.away = true,
        Act::Back => n.a.away = false,
    }
}

/// `who` is dead. Its hand is free, and whoever takes the lock knows that it was not let go.
pub fn died(n: &mut State, c: &Config, who: Who) {
    if c.bug == Some(Bug::NoSteal) {
        return;
    }
    if n.a.hands[who as usize].is_some() {
        n.a.stale = true;
    }
    n.a.hands[who as usize] = None;
}

/// Takes the lock, or makes a step under it.
pub fn locked(n: &mut State, c: &Config, who: Who) {
    let me = who as usize;
    let Some(at) = n.a.hands[me].take() else {
        if n.a.stale && matches!(n.a.mode, Mode::Drain | Mode::Fin) {
            n.a.done = count(n, c);
        }
        n.a.stale = false;
        n.a.hands[me] = task(n, c, who);
        if !c.fine() {
            whole(n, c, me);
        }
        return;
    };
    n.a.hands[me] = run(n, c, at);
    if !c.fine() {
        whole(n, c, me);
    }
}

/// Nobody can come in between: all steps up to the next unit on TCP are one.
fn whole(n: &mut State, c: &Config, me: usize) {
    while let Some(at) = n.a.hands[me].take() {
        n.a.hands[me] = run(n, c, at);
        if at == At::Record {
            break;
        }
    }
}

fn drain(n: &mut State, frame: Option<u8>, from: u8) -> Option<At> {
    let t = &mut n.a;
    (t.tcp_pos0, t.done, t.frame, t.from) = (t.tcp_pos, 0, frame, from);
    t.mode = Mode::Drain;
    Some(At::Send)
}

#[expect(clippy::too_many_lines)]
fn run(n: &mut State, c: &Config, at: At) -> Option<At> {
    match at {
        At::Look => {
            let next = begin(n, c);
            if matches!(next, Some(At::Resume(_))) && c.bug == Some(Bug::TakeBack) {
                n.a.head -= 1;
                n.sent -= 1;
            }
            next
        }
        At::GoRing => {
            n.a.mode = Mode::Ring;
            None
        }
        At::Downing => {
            n.a.w.phase = Phase::Downing;
            Some(At::DowningLook)
        }
        At::DowningLook => match asked(n, c) {
            Some(w) if w.revoked => Some(At::Resume(n.path())),
            _ => Some(At::Cursor),
        },
        At::Cursor => {
            refresh(n);
            let cursor = n.a.peer_cursor;
            drain(n, Some(cursor), cursor)
        }
        At::Resume(told) => {
            refresh(n);
            n.a.told = told;
            let cursor = match n.proxy.revoked {
                UNSEEN => n.a.w.start,
                r => r,
            };
            if cursor < n.a.peer_cursor.min(n.a.head) || cursor > n.a.head {
                n.fault(Fault::Impossible);
                return None;
            }
            drain(n, None, cursor)
        }
        At::Send => match n.a.unit(n.a.done, c) {
            Some(u) if n.tcp.writable() => {
                n.tcp.send(u);
                Some(At::Record)
            }
            Some(_) => None, // lets go of the lock until there is room
            None if n.a.mode == Mode::Fin => Some(At::Shut),
            None => {
                let phase = if n.a.frame.is_some() {
                    Phase::Down
                } else {
                    Phase::Resumed
                };
                if c.bug == Some(Bug::ModeBeforeWord) {
                    settle(n);
                }
                Some(At::Say(phase))
            }
        },
        At::Record => {
            n.a.done += 1;
            Some(At::Send)
        }
        At::Say(phase) => {
            n.a.w.phase = phase;
            (c.bug != Some(Bug::ModeBeforeWord)).then_some(At::Settle)
        }
        At::Settle => {
            settle(n);
            None
        }
        At::FinBegin => {
            let t = &mut n.a;
            (t.tcp_pos0, t.done) = (t.tcp_pos, 0);
            t.mode = Mode::Fin;
            Some(At::Send)
        }
        At::Shut => {
            n.tcp.fin = true;
            n.a.mode = Mode::Tcp;
            None
        }
    }
}

fn settle(n: &mut State) {
    n.a.tcp_pos = n.a.tcp_pos0 + n.a.done;
    n.a.mode = Mode::Tcp;
}
