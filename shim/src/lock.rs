//! Locks that live in the family table or in process-private tables.
//!
//! A word of 0 is free, otherwise the holder's thread id, plus a bit when somebody waits. Holders
//! never block and never call libc while they hold one, so that neither cancellation nor
//! `siglongjmp` can strand it; a holder that died (a process of the family was killed) is noticed
//! by its id. A signal handler that interrupts the holder itself gets `None` instead of a deadlock.

use crate::sys;
use core::cell::Cell;
use core::sync::atomic::{AtomicU32, Ordering::*};

const WAITERS: u32 = 1 << 31;

thread_local! {
    // Const-initialised and without a destructor: plain thread-local storage, no allocation.
    static TID: Cell<u32> = const { Cell::new(0) };
}

/// This thread's id, cached.
#[inline(always)]
pub fn tid() -> u32 {
    TID.with(|t| match t.get() {
        0 => {
            let id = sys::gettid();
            t.set(id);
            id
        }
        id => id,
    })
}

/// In a forked child: its only thread has another id.
pub fn forget_tid() {
    TID.with(|t| t.set(0));
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
    slow(word, me)
}

/// Takes the lock only if it is free.
pub fn try_lock(word: &AtomicU32) -> Option<Guard<'_>> {
    word.compare_exchange(0, tid(), Acquire, Relaxed)
        .ok()
        .map(|_| Guard(word))
}

#[cold]
fn slow(word: &AtomicU32, me: u32) -> Option<Guard<'_>> {
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
            sys::futex_wait(word, v | WAITERS, 10);
            rounds += 1;
            if rounds % 16 == 0 && sys::kill0(v & !WAITERS) == Err(libc::ESRCH) {
                // The holder is dead. What it guarded is at worst in the middle of one update of
                // its own counters; its peer checks what it sees.
                let _ = word.compare_exchange(v | WAITERS, 0, Relaxed, Relaxed);
            }
        }
    }
}
