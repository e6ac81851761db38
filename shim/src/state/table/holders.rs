//! Which processes hold a connection.

use super::{conn, free, table};
use crate::sys::pids::{self, is_foreign, is_gone, me};
use core::sync::atomic::{AtomicU32, Ordering::*};
use lane::family::{state, Conn, DOMAINS, HOLDERS};

/// How many live processes hold the connection? Dead ones are removed on the way.
pub fn holders(c: &Conn) -> usize {
    let mut n = c.forks.load(SeqCst) as usize;
    let me = me();
    for h in &c.holders {
        let p = h.load(SeqCst);
        if p == 0 {
            continue;
        }
        if p != me && is_gone(p) {
            let _ = h.compare_exchange(p, 0, SeqCst, Relaxed);
            continue;
        }
        n += 1;
    }
    n
}

/// Removes holders that are zombies (ended, but not waited for by their parents): they have no descriptors any more.
/// (The kernel still knows their process numbers, so this costs more than [`holders`].)
pub fn forget_zombies(c: &Conn) {
    for h in &c.holders {
        let p = h.load(SeqCst);
        if p != 0 && p != me() && !is_foreign(p) && pids::dead(p & !DOMAINS) {
            let _ = h.compare_exchange(p, 0, SeqCst, Relaxed);
        }
    }
}

/// Enters a process as a holder. If there is no room, the connection counts as shared for good.
pub fn add_holder(c: &Conn, p: u32) {
    let enter = |h: &AtomicU32| h.compare_exchange(0, p, SeqCst, Relaxed).is_ok();
    let enters = || c.holders.iter().take(HOLDERS).any(enter);
    if enters() {
        return;
    }
    // (Holders may have ended since anybody last checked.)
    holders(c);
    forget_zombies(c);
    if !enters() {
        c.forks.fetch_add(1, SeqCst);
    }
}

pub fn remove_holder(c: &Conn, p: u32) {
    for h in &c.holders {
        if h.compare_exchange(p, 0, SeqCst, Relaxed).is_ok() {
            return;
        }
    }
}

/// This process no longer holds the connection. If nobody does, the entry is freed; if the last holders leave at the
/// same time, only one of them frees it.
pub fn release(i: u32) {
    let c = conn(i);
    // As long as this process holds the connection, the entry cannot be given to another one.
    let (gen, s) = (c.gen.load(Relaxed), c.state.load(Relaxed));
    remove_holder(c, me());
    free_unheld(i, gen, s);
}

/// Frees the entry if nobody holds it: `gen` and `s` are its generation and its state from when somebody still did.
pub(super) fn free_unheld(i: u32, gen: u32, s: u32) {
    let c = conn(i);
    let unheld = || c.gen.load(SeqCst) == gen && holders(c) == 0;
    let take = |from, to| c.state.compare_exchange(from, to, AcqRel, Relaxed);
    if !unheld() || matches!(s, state::FREE | state::BUSY) || take(s, state::BUSY).is_err() {
        return;
    }
    // Check again now that no other process can free it: it may have been freed before, and belong to another
    // connection.
    if !unheld() {
        let _ = take(state::BUSY, s);
        return;
    }
    table().iter().for_each(|t| t.count_ended(c));
    free(i);
}
