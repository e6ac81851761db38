//! The sending half, step by step as in `lane::half::tx`.

use super::state::sender::*;
use super::state::{Act as Any, Config, Fault, Phase, State, Word, RING, UNSEEN};
use super::tcp::{No, Unit};
use super::Bug;

pub fn due(n: &State, c: &Config, out: &mut Vec<Any>) {
    let s = &n.s;
    let act = match s.at {
        At::Idle if s.mode == Mode::Drain => {
            // Waits for the kernel's buffer; ours is the next byte on it.
            if !n.tcp.writable() {
                return;
            }
            Act::GoOn
        }
        At::Idle if n.sent < c.bytes => Act::Send,
        At::Idle if c.close => Act::Close,
        At::Idle => Act::Rest,
        At::Native if !n.tcp.writable() => return,
        At::Asleep if !(n.w.sender_bell || n.tcp.reset) => return,
        at => Act::Step(at),
    };
    out.push(Any::Sender(act));
}

pub fn free(n: &State, c: &Config, out: &mut Vec<Any>) {
    let s = &n.s;
    if s.at == At::Asleep && c.spurious {
        out.push(Any::Sender(Act::Signal));
    }
    if s.at != At::Idle {
        return;
    }
    let w = n.w.word;
    let pure = w.ready && !w.want_down && !w.revoked;
    if s.mode == Mode::Tcp && s.attached && pure && w.epoch > s.epoch {
        out.push(Any::Sender(Act::Up));
    }
    if s.mode == Mode::Ring {
        if n.downs > 0 {
            out.push(Any::Sender(Act::Down));
        }
        if w.revoked || w.want_down {
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
fn early(n: &mut State) {
    n.s.early = n.w.receiver_sleeps;
}

/// The end of a call, or of a look.
fn finish(n: &mut State, c: &Config) {
    n.s.at = At::Idle;
    if !n.s.in_call {
        return;
    }
    let refused = n.s.must_flush() && n.s.drain_at < n.s.head;
    if refused && c.bug != Some(Bug::NoTakeBack) {
        n.s.at = At::TakeBack;
        return;
    }
    n.s.in_call = false;
    n.sent += 1;
}

/// What the receiver's word asks for.
fn answer(n: &mut State, c: &Config, w: Word) {
    if w.epoch != n.s.epoch {
        finish(n, c);
    } else if w.revoked {
        n.s.at = At::Revoked;
    } else if w.want_down {
        n.s.at = At::Downing;
        early(n);
    } else {
        finish(n, c);
    }
}

/// Something in the receiver's word to act upon.
fn asked(n: &State) -> bool {
    let w = n.w.word;
    w.epoch == n.s.epoch && (w.revoked || w.want_down)
}

fn refresh(n: &mut State) {
    let cursor = n.w.cursor.max(n.s.peer_cursor);
    if cursor > n.s.head {
        n.fault(Fault::Impossible);
    }
    n.s.peer_cursor = cursor;
}

#[expect(clippy::too_many_lines)]
pub fn step(n: &mut State, c: &Config, act: Act) {
    let epoch = n.s.epoch;
    match act {
        Act::Send => {
            n.s.at = if n.s.mode == Mode::Tcp {
                At::Native
            } else {
                At::Room
            }
        }
        Act::GoOn => n.s.at = At::Drain,
        Act::Up => n.s.at = At::UpWords(n.w.word.epoch),
        Act::Down => {
            n.downs -= 1;
            n.s.at = At::Downing;
            early(n);
        }
        Act::Look => n.s.at = At::LookOnly,
        Act::Rest => n.s.at = At::Doze,
        Act::Close => {
            n.s.at = if n.s.mode == Mode::Ring {
                At::CloseLook
            } else {
                At::Close
            }
        }
        Act::Signal => {
            n.w.sender_sleeps = false;
            n.s.at = At::Idle;
        }
        Act::Step(at) => match at {
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
            At::UpWords(e) => {
                n.w.up_tcp_pos = n.s.tcp_pos;
                n.w.up_start = n.s.head;
                n.s.epoch = e;
                n.s.peer_cursor = n.s.head;
                n.s.at = At::UpState(e);
                early(n);
            }
            At::UpState(e) => {
                n.w.state = (e, Phase::Up);
                n.s.at = At::UpBell(e);
            }
            At::UpBell(e) => {
                bell(n, c);
                n.s.at = At::UpLook(e);
            }
            At::UpLook(e) => {
                let w = n.w.word;
                if (w.epoch != e || w.revoked) && c.bug != Some(Bug::NoRetreat) {
                    n.s.at = At::Settle(Phase::Resumed);
                    early(n);
                } else {
                    n.s.mode = Mode::Ring;
                    n.s.at = At::Idle;
                }
            }
            At::Settle(p) => {
                n.s.mode = Mode::Tcp;
                n.w.state = (epoch, p);
                n.s.at = At::SettleBell;
            }
            At::SettleBell => {
                bell(n, c);
                finish(n, c);
            }
            At::Room => {
                if n.s.head - n.s.peer_cursor == RING {
                    refresh(n);
                }
                let full = n.s.head - n.s.peer_cursor == RING;
                n.s.at = if full { At::Look } else { At::Data };
                if c.bug == Some(Bug::HeadBeforeData) && !full {
                    n.s.at = At::Head;
                }
            }
            At::Data => {
                n.w.ring[(n.s.head % RING) as usize] = n.sent;
                n.s.at = At::Head;
                if c.bug == Some(Bug::HeadBeforeData) {
                    n.s.head += 1;
                    n.s.at = At::Bell;
                }
                early(n);
            }
            At::Head => {
                n.s.in_call = true;
                if c.bug == Some(Bug::HeadBeforeData) {
                    n.w.head = n.s.head + 1;
                    n.s.at = At::Data;
                } else {
                    n.s.head += 1;
                    n.w.head = n.s.head;
                    n.s.at = At::Bell;
                }
            }
            At::Bell => {
                bell(n, c);
                n.s.at = At::Look;
                if c.bug == Some(Bug::NoLookAfterPublish) {
                    finish(n, c);
                }
            }
            At::Look => {
                if asked(n) {
                    answer(n, c, n.w.word);
                } else if n.s.in_call {
                    finish(n, c);
                } else {
                    n.s.at = At::Wish; // the ring is full
                }
            }
            At::LookOnly => answer(n, c, n.w.word),
            At::Revoked => {
                refresh(n);
                let cursor = if n.w.revoked == UNSEEN {
                    n.w.up_start
                } else {
                    n.w.revoked
                };
                if cursor < n.s.peer_cursor || cursor > n.s.head {
                    n.fault(Fault::Impossible);
                }
                n.s.framed = None;
                n.s.frame_done = 2;
                n.s.drain_at = cursor;
                n.s.mode = Mode::Drain;
                n.s.at = At::Drain;
            }
            At::Downing => {
                n.w.state = (epoch, Phase::Downing);
                n.s.at = At::DowningBell;
            }
            At::DowningBell => {
                bell(n, c);
                n.s.at = At::DowningLook;
            }
            At::DowningLook => {
                let w = n.w.word;
                let revoked = w.epoch == epoch && w.revoked;
                n.s.at = if revoked {
                    At::Revoked
                } else {
                    At::DowningCursor
                };
            }
            At::DowningCursor => {
                refresh(n);
                if n.s.peer_cursor == n.s.head {
                    n.s.at = At::Settle(Phase::Resumed); // all is taken: no frame
                    early(n);
                    return;
                }
                n.s.framed = Some(n.s.peer_cursor);
                n.s.frame_done = 0;
                n.s.drain_at = n.s.peer_cursor;
                n.s.mode = Mode::Drain;
                n.s.at = At::Drain;
            }
            At::Drain => drain(n, c),
            At::TakeBack => {
                n.s.head -= 1;
                n.w.head = n.s.head;
                n.s.in_call = false;
                n.s.at = At::Idle;
            }
            At::Wish => {
                n.w.want_space = true;
                n.s.at = At::WishLook;
                if c.bug == Some(Bug::WishWithoutLook) {
                    n.s.at = At::Doze;
                }
            }
            At::WishLook => {
                refresh(n);
                let again = n.s.head - n.s.peer_cursor < RING || asked(n);
                n.s.at = if again { At::Idle } else { At::Doze };
            }
            At::Doze => {
                n.w.sender_sleeps = true;
                n.s.at = match c.bug {
                    Some(Bug::SleepWithoutLook | Bug::WishWithoutLook) => At::Asleep,
                    _ => At::DozeLook,
                };
            }
            At::DozeLook => {
                let mut stay = !(n.s.mode == Mode::Ring && asked(n));
                if n.sent < c.bytes {
                    refresh(n);
                    stay &= n.s.head - n.s.peer_cursor == RING;
                }
                if stay {
                    n.s.at = At::Asleep;
                } else {
                    n.w.sender_sleeps = false;
                    n.s.at = if n.s.mode == Mode::Ring {
                        At::LookOnly
                    } else {
                        At::Idle
                    };
                }
            }
            At::Asleep => {
                n.w.sender_sleeps = false;
                n.w.sender_bell = false;
                n.s.failed = n.tcp.reset;
                n.s.at = if n.s.mode == Mode::Ring {
                    At::LookOnly
                } else {
                    At::Idle
                };
            }
            At::CloseLook => {
                if asked(n) {
                    answer(n, c, n.w.word);
                } else {
                    n.s.at = At::CloseSay;
                    early(n);
                }
            }
            At::CloseSay => {
                n.s.mode = Mode::Tcp;
                n.w.state = (epoch, Phase::Broken);
                n.s.at = At::CloseBell;
            }
            At::CloseBell => {
                bell(n, c);
                n.s.at = At::Close;
            }
            At::Close => {
                n.tcp.shut();
                n.s.closed = true;
            }
        },
    }
}

fn drain(n: &mut State, c: &Config) {
    let unit = match n.s.framed {
        Some(_) if n.s.frame_done == 0 => Unit::Half,
        Some(cursor) if n.s.frame_done == 1 => Unit::Down(n.s.epoch, cursor),
        _ if n.s.drain_at < n.s.head => Unit::Byte(n.w.ring[(n.s.drain_at % RING) as usize]),
        framed => {
            n.s.at = At::Settle(if framed.is_some() {
                Phase::Down
            } else {
                Phase::Resumed
            });
            early(n);
            return;
        }
    };
    match n.tcp.send(unit) {
        Ok(()) => {
            n.s.tcp_pos += 1;
            match unit {
                Unit::Byte(_) => n.s.drain_at += 1,
                _ => n.s.frame_done += 1,
            }
        }
        Err(No::Again) => finish(n, c),
        Err(_) => {
            n.s.at = At::Settle(Phase::Broken);
            early(n);
        }
    }
}
