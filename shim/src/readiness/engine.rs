//! The engine of all waits on lanes: look, spin, sleep.
//!
//! poll, select and epoll sets run [`wait`] and differ in what they look at and listen to. A blocking send or receive
//! has its own rounds, because it looks by moving bytes, and takes from here the spin, and how long it may sleep.

use crate::daemon;
use crate::sys::clock::cycles_per_us;
use crate::sys::{self, thread};
use crate::tcp::probes;
use core::sync::atomic::{AtomicI32, Ordering::*};
use lane::num;
use lane::prim::{cpu, pause, ticks};
use libc::sigset_t;

/// Time-out and signal mask of the application's call.
#[derive(Clone, Copy)]
pub struct Until {
    /// Its time-out in milliseconds; -1: none.
    pub ms: i64,
    /// The signal mask that it passes, or null.
    pub mask: *const sigset_t,
}

impl Until {
    /// Milliseconds that are left of the time-out, which began at `start` (ns); -1: there is none.
    pub fn left_ms(&self, start: u64) -> i64 {
        match self.ms {
            t if t < 0 => -1,
            t => (t - num::long(sys::now_ns().saturating_sub(start) / 1_000_000)).max(0),
        }
    }
}

/// What a look has found.
pub enum Look {
    /// The wait returns this; errno is set if it is negative.
    Ends(i32),
    /// Nothing. `busy`: another thread had a lane locked.
    Nothing { busy: bool },
}

/// How a sleep ended.
pub enum Slept {
    /// Look again.
    Again,
    /// The application's time-out is over: look once more.
    Over,
    /// The wait returns this; errno is set if it is negative.
    Ends(i32),
}

/// A wait on several connections.
pub trait Rounds {
    /// Lists what is ready. `patient`: a lane has been locked by another thread for long, and the holder may be dead.
    fn look(&mut self, patient: bool) -> Look;
    /// The wait ends with nothing, although a lane was locked.
    fn gives_up(&self) {}
    /// Spins for a bounded time, if that may help. True: look again.
    fn spin(&mut self) -> bool;
    /// Enters the thread among the sleepers, looks once more, and sleeps. `left`: milliseconds until the application's
    /// time-out is over.
    fn sleep(&mut self, left: i64, patient: bool) -> Slept;
}

/// Looks until something is found, the time-out is over, or a signal has come. `start`: when the wait began (ns).
pub fn wait(rounds: &mut impl Rounds, until: Until, start: u64) -> i32 {
    let mut last = false;
    let mut patience = Patience::default();
    let mut patient = false;
    loop {
        let busy = match rounds.look(patient) {
            Look::Ends(r) => return r,
            Look::Nothing { busy } => busy,
        };
        let left = until.left_ms(start);
        let over = left == 0 || last;
        let cut = !over && thread::interrupted(true);
        if (over || cut) && busy {
            rounds.gives_up();
        }
        if over {
            return 0;
        }
        if cut {
            crate::set_errno(libc::EINTR);
            return -1;
        }
        patient = patience.is_over(busy);
        if patience.short() {
            continue;
        }
        if daemon::pending() {
            daemon::pump();
            continue;
        }
        if thread::let_in(until.mask) {
            return -1;
        }
        if !patient && rounds.spin() {
            continue;
        }
        match rounds.sleep(left, patient) {
            Slept::Again => {}
            Slept::Over => last = true,
            Slept::Ends(r) => return r,
        }
    }
}

/// Counts the rounds of a wait in which other threads work on what it waits for.
#[derive(Default)]
pub struct Patience(u32);

impl Patience {
    /// Milliseconds between two looks after many vain rounds.
    pub const NAP_MS: i64 = 10;

    /// Notes one round. `busy`: others were at work in it. True: that has been so for long, as when the holder of
    /// a lock is stopped: sleep for a while, then look whether it is dead.
    pub fn is_over(&mut self, busy: bool) -> bool {
        self.0 = if busy { self.0.saturating_add(1) } else { 0 };
        if (1..16).contains(&self.0) {
            sys::sched_yield();
        }
        self.0 >= 16
    }

    pub fn short(&self) -> bool {
        (1..16).contains(&self.0)
    }
}

/// Microseconds that a waiter spins at most. That is longer than a wake-up takes (about 50 µs), because with
/// shorter spins both sides keep missing each other.
pub const SPIN_US: u64 = 80;

/// May this connection's waiters spin, judging by how recent spins went?
pub fn may_spin(score: &AtomicI32) -> bool {
    let s = score.load(Relaxed);
    if s > 0 {
        return true;
    }
    // Try again now and then, because conditions may have changed.
    score.store(if s <= -16 { 1 } else { s - 1 }, Relaxed);
    false
}

pub fn spun(score: &AtomicI32, found: bool) {
    let s = score.load(Relaxed);
    let new = if found {
        (s + 1).min(8)
    } else {
        (s - 2).max(-8)
    };
    if new != s {
        score.store(new, Relaxed);
    }
}

/// Spins until `done` or until the budget is used up. `peer_cpu` is where the producer ran last: if that is our
/// own processor, it cannot run while we spin, so we yield a few times, and then give up. A yield may take long,
/// so `sleepy` is called before; it says whether to go on.
#[inline(always)]
pub fn spin(
    peer_cpu: impl Fn() -> u32,
    mut sleepy: impl FnMut() -> bool,
    mut done: impl FnMut() -> bool,
) -> bool {
    let budget = SPIN_US * cycles_per_us();
    let start = ticks();
    let mut yields = 0;
    loop {
        for _ in 0..32 {
            if done() {
                return true;
            }
            pause();
        }
        if daemon::pending() || thread::waiting() || ticks().wrapping_sub(start) > budget {
            return done();
        }
        if peer_cpu() == cpu() {
            yields += 1;
            if yields > 4 || !sleepy() {
                return done();
            }
            sys::sched_yield();
        }
    }
}

/// As [`spin`], for waits on several connections, if recent spins were of use. The kernel is asked now and then, too.
#[inline(always)]
pub fn spin_with_kernel(
    score: &AtomicI32,
    peer_cpu: impl Fn() -> u32,
    mut kernel_has: impl FnMut() -> bool,
    news: impl Fn() -> bool,
) -> bool {
    if !may_spin(score) {
        return false;
    }
    let mut turns = 0u32;
    let mut kernel = false;
    let found = spin(
        peer_cpu,
        || true,
        || {
            turns += 1;
            if turns % 512 == 0 && kernel_has() {
                kernel = true;
            }
            kernel || news()
        },
    );
    spun(score, found);
    found
}

/// A sleep is cut short if nothing else would end it: without a place among the waiters, and without a daemon,
/// which is looked for every second. The probes of idle connections must be checked in time, too.
pub fn nap(timeout_ms: i64, placed: bool) -> i64 {
    let cap = if !placed {
        1
    } else if daemon::fd() < 0 {
        probes::sleep_ms().min(1000)
    } else {
        probes::sleep_ms()
    };
    if timeout_ms < 0 {
        if cap == i64::from(i32::MAX) {
            -1
        } else {
            cap
        }
    } else {
        timeout_ms.min(cap)
    }
}
