//! The threads of this process that sleep on lanes.
//!
//! Of the threads asleep on one link group, only the *leader* polls the doorbell. It wakes the threads whose lane has
//! news through their eventfds, so that one ring does not wake five hundred threads. For the sleeps themselves, see
//! `readiness`.

mod leader;

pub use leader::{join, leave};

use crate::state::fdtab;
use crate::state::groups::WAITERS;
use crate::sys::{self, thread};
use core::sync::atomic::{fence, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use leader::step_down;

/// A thread that sleeps. Slots are process-private and keep their eventfd.
pub struct Waiter {
    pub efd: AtomicI32,
    /// The connection waited for, plus 1 (0: several).
    pub conn: AtomicU32,
    /// Which connections are waited for, a bit each, see [`bit`]; 0: nobody sleeps.
    mask: AtomicU64,
    /// Thread that waits.
    tid: AtomicU32,
}

static SLOTS: AtomicPtr<Waiter> = AtomicPtr::new(core::ptr::null_mut());
static TAKEN: [AtomicU64; WAITERS / 64] = [const { AtomicU64::new(0) }; WAITERS / 64];

pub fn slot(i: usize) -> Option<&'static Waiter> {
    let mut p = SLOTS.load(Acquire);
    if p.is_null() {
        let bytes = WAITERS * core::mem::size_of::<Waiter>();
        let new: *mut Waiter = sys::map_private(bytes).ok()?.cast();
        match SLOTS.compare_exchange(core::ptr::null_mut(), new, AcqRel, Acquire) {
            Ok(_) => p = new,
            Err(other) => {
                sys::unmap(new.cast(), bytes);
                p = other;
            }
        }
    }
    // SAFETY: WAITERS zero-initialised entries, never unmapped; `i` comes from `take`.
    (i < WAITERS).then(|| unsafe { &*p.add(i) })
}

/// The bit of a connection in the masks of waiters; several connections share it.
pub fn bit(conn: u32) -> u64 {
    1 << (conn % 64)
}

/// Wakes the threads that sleep on the connection: a lane was attached whose doorbell they must listen to, or
/// there is news that neither the doorbell nor TCP reports.
pub fn look(conn: u32) {
    // SYNC lane: the lane is stored, then we look for sleepers; a sleeper enters itself (its mask), then looks
    // which lane there is (`take_slot`).
    fence(SeqCst);
    for (w, word) in TAKEN.iter().enumerate() {
        let mut v = word.load(SeqCst);
        while v != 0 {
            let i = w * 64 + v.trailing_zeros() as usize;
            v &= v - 1;
            if slot(i).is_some_and(|s| s.mask.load(SeqCst) & bit(conn) != 0) {
                wake_waiter(i);
            }
        }
    }
}

fn take_slot(conn: Option<u32>, mask: u64) -> Option<usize> {
    for (w, word) in TAKEN.iter().enumerate() {
        let mut v = word.load(Relaxed);
        while v != u64::MAX {
            let bit = v.trailing_ones();
            match word.compare_exchange(v, v | 1 << bit, SeqCst, Relaxed) {
                Ok(_) => {
                    let i = w * 64 + bit as usize;
                    let s = slot(i)?;
                    if s.efd.load(Relaxed) == 0 {
                        match sys::eventfd() {
                            Ok(fd) => s.efd.store(fdtab::hide(fd) + 1, Relaxed),
                            Err(_) => {
                                word.fetch_and(!(1 << bit), Release);
                                return None;
                            }
                        }
                    }
                    s.tid.store(thread::tid(), Relaxed);
                    s.conn.store(conn.map_or(0, |c| c + 1), SeqCst);
                    // SYNC lane: see `look`; the caller looks at the lanes after this.
                    s.mask.store(mask, SeqCst);
                    fence(SeqCst);
                    return Some(i);
                }
                Err(now) => v = now,
            }
        }
    }
    None
}

/// `notified`: its eventfd was readable, and is read empty. (If it is notified later, the next sleeper in this slot
/// wakes once in vain.)
fn give_slot(i: usize, notified: bool) {
    if let Some(s) = slot(i) {
        if notified {
            let mut b = [0u8; 8];
            let _ = sys::read(s.efd.load(Relaxed) - 1, b.as_mut_ptr(), 8);
        }
        s.mask.store(0, Relaxed);
        TAKEN[i / 64].fetch_and(!(1 << (i % 64)), Release);
    }
}

pub fn wake_waiter(i: usize) {
    if let Some(s) = slot(i) {
        fdtab::signal(s.efd.load(Relaxed) - 1);
    }
}

/// Wakes the threads that sleep on connection `i`, because its descriptor has changed.
pub fn look_again(i: u32) {
    for (w, word) in TAKEN.iter().enumerate() {
        let mut v = word.load(SeqCst);
        while v != 0 {
            let s = w * 64 + v.trailing_zeros() as usize;
            v &= v - 1;
            // SYNC moved: the descriptor has changed, then we look who sleeps; a sleeper takes its slot, then
            // reads the descriptor (`readiness::wait`).
            if slot(s).is_some_and(|s| s.conn.load(SeqCst) == i + 1) {
                wake_waiter(s);
            }
        }
    }
}

/// In a forked child: nobody sleeps yet, and the eventfds are still shared with the parent.
pub fn after_fork() {
    for t in &TAKEN {
        t.store(0, Relaxed);
    }
    if !SLOTS.load(Relaxed).is_null() {
        for i in 0..WAITERS {
            let Some(s) = slot(i) else { return };
            let fd = s.efd.swap(0, Relaxed);
            if fd == 0 {
                break; // slots are handed out from the first on
            }
            fdtab::close_ours(fd - 1);
        }
    }
}

/// A place among the sleepers.
pub struct Place {
    slot: Option<usize>,
}

impl Place {
    /// Without a place, the wait is a short nap.
    pub fn none() -> Self {
        Place { slot: None }
    }
    /// For a wait on one connection.
    pub fn of(conn: u32) -> Self {
        Place {
            slot: take_slot(Some(conn), bit(conn)),
        }
    }
    /// For a wait on several. `mask`: their bits.
    pub fn take(mask: u64) -> Self {
        Place {
            slot: take_slot(None, mask),
        }
    }
    pub fn index(&self) -> Option<usize> {
        self.slot
    }
    /// For `thread::asleep`: the place, and what is done when a handler runs during the sleep.
    pub fn in_sleep(&self) -> Option<thread::Place> {
        self.slot.map(|n| (n, step_down as fn(usize) -> bool))
    }
    pub fn efd(&self) -> i32 {
        self.slot
            .and_then(slot)
            .map_or(-1, |s| s.efd.load(Relaxed) - 1)
    }
    /// `notified`: its eventfd was readable.
    pub fn give(&self, notified: bool) {
        if let Some(i) = self.slot {
            give_slot(i, notified);
        }
    }
}
