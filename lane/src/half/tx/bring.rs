//! On one node: the steps in which a daemon brings to TCP what is on the ring of an end that does not do it. What they
//! need of sockets, processes and time is behind [`Around`], so that the tests' world takes the same steps.

use super::takeover::{claim, is_asked, is_done, release};
use super::{mode, Adopted, TxState};
use crate::half::mem::Memory;
use crate::half::Port;
use crate::proto::reason::Reason;
use core::cmp::Ordering;
use core::sync::atomic::Ordering::{Acquire, Relaxed};

/// For how many milliseconds an end that is at work on its direction is asked again.
const BUSY_MS: u64 = 50;
/// Milliseconds between two attempts: at first; at most; and when TCP has taken nothing for so long.
const REST_MIN_MS: u64 = 1;
const REST_MAX_MS: u64 = 50;
const REST_LONG_MS: u64 = 1000;
const STILL_MS: u64 = 10_000;
/// If the receiver takes nothing for so long, and the sender has closed or its process has ended, the connection is reset:
/// it is an orphan then (tcp(7), `tcp_orphan_retries`).
pub const ORPHAN_MS: u64 = 100_000;

/// What is around a direction: its end's process, the socket, and time.
pub trait Around {
    /// A copy of the end's socket. It holds back the FIN of a close.
    type Sock;

    /// Does a thread of the end hold the direction's lock, or has the connection no lane any more?
    fn at_work(&self) -> bool;
    /// Copies the socket as the end's process has it now. `None`: it is not there any more.
    fn copy(&self) -> Option<Self::Sock>;
    /// The same as the lane's code uses it.
    fn port<'a>(&'a self, sock: &'a Self::Sock) -> impl Port + 'a;
    /// Gives the copy up.
    fn close(&self, sock: Self::Sock);
    /// Resets the connection.
    fn reset(&self, sock: &Self::Sock);
    /// Shuts the socket down for sending.
    fn shut_down(&self, sock: &Self::Sock);
    /// Has the application shut the direction down meanwhile?
    fn is_shut(&self) -> bool;
    /// Has the process lost its control connection to us? Then it goes on with the direction when it sees that.
    fn is_cut(&self) -> bool;
    /// Has the end closed, or its process ended, and nobody else may go on with it?
    fn is_orphan(&self) -> bool;
    /// Milliseconds of a clock that never goes back.
    fn now_ms(&self) -> u64;
}

/// How it ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct End {
    /// The end may have seen that its direction was the daemon's.
    pub claimed: bool,
    /// The direction is on TCP, where the daemon has brought it.
    pub brought: bool,
    /// Why the daemon could not do it.
    pub failed: Option<Reason>,
}

/// What comes of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The end has its direction, or its process goes on with it.
    Over(End),
    /// TCP is full, or the end is at work: to be tried again after so many milliseconds.
    Again(u64),
}

impl Step {
    /// Nothing was done, or nothing can be done.
    pub const NONE: Step = Step::Over(End {
        claimed: false,
        brought: false,
        failed: None,
    });
}

/// A direction that is the daemon's.
struct Held<S> {
    sock: S,
    tx: TxState,
    /// When TCP took something last.
    moved_ms: u64,
    rest_ms: u64,
}

/// A takeover under way.
pub struct Bringing<S> {
    tag: u64,
    /// Has the end asked for it itself?
    own: bool,
    began_ms: u64,
    held: Option<Held<S>>,
    /// Nobody else has the rest: the process's control connection counts no more.
    alone: bool,
}

impl<S> Bringing<S> {
    /// Nothing is claimed yet.
    pub fn new(tag: u64, own: bool, now_ms: u64) -> Self {
        Bringing {
            tag,
            own,
            began_ms: now_ms,
            held: None,
            alone: false,
        }
    }

    /// Has the daemon claimed the direction?
    pub fn holds(&self) -> bool {
        self.held.is_some()
    }

    /// Is the daemon the only one who still has the direction?
    pub fn is_alone(&self) -> bool {
        self.alone
    }

    /// Goes on as far as it can without waiting.
    pub fn step(&mut self, m: &Memory, around: &impl Around<Sock = S>) -> Step {
        match self.held.take() {
            None => self.begin(m, around),
            Some(h) => self.go_on(m, around, h),
        }
    }

    /// Takes the direction, if its end does nothing.
    fn begin(&mut self, m: &Memory, around: &impl Around<Sock = S>) -> Step {
        let now = m.own_tx().state.load(Acquire); // pairs with the Release in `TxState::say`
        if around.is_cut() || !is_asked(m, now, self.own) || is_done(m, now) {
            return Step::NONE;
        }
        let again = match around.now_ms() - self.began_ms < BUSY_MS {
            true => Step::Again(REST_MIN_MS),
            false => Step::NONE,
        };
        if around.at_work() {
            return again;
        }
        // Before the claim: an end that finds it recorded closes its descriptors, and counts on ours.
        let Some(sock) = around.copy() else {
            return Step::NONE;
        };
        if !claim(m, now, || around.at_work()) {
            around.close(sock);
            return again;
        }
        let tx = TxState::default();
        let adopted = tx.adopt(m, &around.port(&sock), self.tag);
        if let Ok(Adopted::Ring) = adopted {
            let held = Held {
                sock,
                tx,
                moved_ms: around.now_ms(),
                rest_ms: REST_MIN_MS,
            };
            return self.go_on(m, around, held);
        }
        around.close(sock);
        release(m, now.epoch());
        Step::Over(End {
            claimed: true,
            failed: adopted.err(),
            ..End::default()
        })
    }

    /// Puts on TCP as much as it takes.
    fn go_on(&mut self, m: &Memory, around: &impl Around<Sock = S>, mut h: Held<S>) -> Step {
        let mut end = End {
            claimed: true,
            ..End::default()
        };
        if !self.alone && around.is_cut() {
            if !around.is_orphan() {
                around.close(h.sock);
                return Step::Over(end);
            }
            self.alone = true;
        }
        let before = h.tx.tcp_pos.load(Relaxed);
        let taken = h.tx.taken_by_kernel(m, &around.port(&h.sock));
        if taken != Ordering::Equal {
            if taken == Ordering::Greater {
                around.reset(&h.sock); // bytes of somebody else are on TCP: the stream is lost
            }
            around.close(h.sock);
            h.tx.give_back(m, h.tx.epoch.load(Relaxed));
            return Step::Over(end);
        }
        let went = h.tx.down(m, &around.port(&h.sock));
        let is_down = h.tx.mode.load(Relaxed) == mode::TCP;
        if went.is_ok() && !is_down {
            let now_ms = around.now_ms();
            if h.tx.tcp_pos.load(Relaxed) != before {
                (h.moved_ms, h.rest_ms) = (now_ms, REST_MIN_MS);
            }
            let still = now_ms - h.moved_ms;
            if still < ORPHAN_MS || !around.is_orphan() {
                let rest = h.rest_ms;
                h.rest_ms = (2 * rest).min(REST_MAX_MS);
                self.held = Some(h);
                return Step::Again(if still < STILL_MS { rest } else { REST_LONG_MS });
            }
        }
        (end.brought, end.failed) = (is_down, went.err());
        if !is_down {
            // Its words are impossible, or nobody takes the bytes: nobody can go on with it.
            around.reset(&h.sock);
        }
        // The direction is its end's again. If the application has shut it down meanwhile, its kernel is told.
        if around.is_shut() {
            around.shut_down(&h.sock);
        }
        around.close(h.sock);
        h.tx.give_back(m, h.tx.epoch.load(Relaxed));
        Step::Over(end)
    }
}
