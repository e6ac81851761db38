//! Locks that live in the family table or in process-private tables.
//!
//! A word is 0 if the lock is free. Otherwise it is the holder's thread id and the number of its pid namespace,
//! plus a bit if a thread waits. Holders never block or call libc while they hold a lock, so neither cancellation
//! nor `siglongjmp` can leave it locked. A dead holder (a process of the family was killed, or the holder was
//! another thread of the parent when a child was made) is noticed by its id. Signal handlers are delayed meanwhile
//! (`signals`); a handler that is not behind our trampoline gets `None` instead of a deadlock.

use crate::sys::{self, pids, thread};
use core::sync::atomic::{AtomicU32, Ordering::*};
use lane::family::DOMAINS;
use std::sync::OnceLock;

const WAITERS: u32 = 1 << 31;

/// This thread's id, unique in the family.
#[inline(always)]
fn tid() -> u32 {
    thread::tid() | pids::domain()
}

/// What tells apart the locks that other processes use as well.
pub struct Family {
    /// Is this the lock of a direction in the family table?
    pub is_direction: fn(&AtomicU32) -> bool,
    /// The holder of such a lock has died while it held the lock, which the caller has now.
    pub holder_died: fn(&AtomicU32),
}

static FAMILY: OnceLock<Family> = OnceLock::new();

/// Sets these functions when the library is loaded.
pub fn of_family(f: Family) {
    let _ = FAMILY.set(f);
}

pub struct Guard<'a>(&'a AtomicU32);

impl Drop for Guard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: what was written under the lock is visible to the next holder.
        if self.0.swap(0, Release) & WAITERS != 0 {
            sys::futex_wake(self.0);
        }
    }
}

/// Takes the lock; `None` if this very thread holds it already (we are in a signal handler).
#[inline(always)]
pub fn lock(word: &AtomicU32) -> Option<Guard<'_>> {
    let me = tid();
    // Acquire: pairs with the Release in `drop`.
    if word.compare_exchange(0, me, Acquire, Relaxed).is_ok() {
        return Some(Guard(word));
    }
    slow(word, me, u32::MAX)
}

/// Takes the lock only if it is free.
pub fn try_lock(word: &AtomicU32) -> Option<Guard<'_>> {
    word.compare_exchange(0, tid(), Acquire, Relaxed)
        .ok()
        .map(|_| Guard(word))
}

/// Takes the lock if it is free, or if its holder is dead. Does not wait: for waits that look at many connections,
/// where a failure must mean that a living thread goes on with the work.
#[cold]
pub fn try_or_inherit(word: &AtomicU32) -> Option<Guard<'_>> {
    let v = word.load(Relaxed);
    let holder = v & !WAITERS;
    if v != 0 && (holder == tid() || !holder_dead(word, holder)) {
        return None;
    }
    // (The bit for waiters of the dead holder stays set.)
    match v {
        0 => try_lock(word),
        _ => inherit(word, v, tid()),
    }
}

/// Takes over the lock of a dead holder. If it is the lock of a lane's direction, the living processes must repair
/// what the holder was in the middle of. All other locks are private to a process, which died as a whole.
#[cold]
fn inherit(word: &AtomicU32, v: u32, me: u32) -> Option<Guard<'_>> {
    // Acquire: the stores of the holder's process are visible, because it is gone.
    let g = word
        .compare_exchange(v, me | v & WAITERS, Acquire, Relaxed)
        .ok()
        .map(|_| Guard(word))?;
    if let Some(f) = FAMILY.get() {
        (f.holder_died)(word);
    }
    Some(g)
}

/// Takes the lock within `ms` milliseconds; `None`: its holder is stopped, or is this very thread.
#[inline(always)]
pub fn lock_within(word: &AtomicU32, ms: u32) -> Option<Guard<'_>> {
    let me = tid();
    // Acquire: as in `lock`.
    if word.compare_exchange(0, me, Acquire, Relaxed).is_ok() {
        return Some(Guard(word));
    }
    slow(word, me, ms / NAP_MS)
}

/// Does this very thread hold the lock?
pub fn is_ours(word: &AtomicU32) -> bool {
    word.load(Relaxed) & !WAITERS == tid()
}

/// Only the locks in the family table are shared with other processes. In a forked child, a private lock that
/// another thread of the parent held at the fork has no holder.
fn holder_dead(word: &AtomicU32, tid: u32) -> bool {
    match is_private(word) {
        true => pids::is_foreign(tid) || !sys::has_thread(pids::pid(), tid & !DOMAINS),
        false => !pids::is_foreign(tid) && pids::dead(tid & !DOMAINS),
    }
}

fn is_private(word: &AtomicU32) -> bool {
    FAMILY.get().is_none_or(|f| !(f.is_direction)(word))
}

/// Milliseconds between two looks at a lock that is held.
const NAP_MS: u32 = 10;

#[cold]
fn slow(word: &AtomicU32, me: u32, most: u32) -> Option<Guard<'_>> {
    let mut rounds = 0u32;
    loop {
        for _ in 0..200 {
            let v = word.load(Relaxed);
            if v & !WAITERS == me {
                return None;
            }
            if v == 0
                && word
                    .compare_exchange(
                        0,
                        me | if rounds > 0 { WAITERS } else { 0 },
                        Acquire,
                        Relaxed,
                    )
                    .is_ok()
            {
                return Some(Guard(word));
            }
            core::hint::spin_loop();
        }
        let v = word.load(Relaxed);
        if v != 0 {
            let _ = word.compare_exchange(v, v | WAITERS, Relaxed, Relaxed);
            let last = rounds >= most;
            if !last {
                sys::futex_wait(word, v | WAITERS, NAP_MS);
                rounds += 1;
            }
            // A caller that gives up also asks: it may come again and again, and be the only one.
            let ask = last || rounds % 16 == 0 || is_private(word);
            if ask && holder_dead(word, v & !WAITERS) {
                if let Some(g) = inherit(word, v | WAITERS, me) {
                    return Some(g);
                }
            } else if last {
                return None;
            }
        }
    }
}
