//! Which processes hold a connection.

use super::{conn, free, later, table};
use crate::sys;
use crate::sys::pids::{self, is_foreign, is_gone, me};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use lane::family::{flag, state, Conn, DOMAINS, HOLDERS};
use lane::proto::reason::Reason;

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
pub fn give_up(i: u32) {
    let c = conn(i);
    // As long as this process holds the connection, the entry cannot be given to another one.
    let (gen, s) = (c.gen.load(Relaxed), c.state.load(Relaxed));
    remove_holder(c, me());
    let unheld = || c.gen.load(SeqCst) == gen && holders(c) == 0;
    let take = |from, to| c.state.compare_exchange(from, to, AcqRel, Relaxed);
    if !unheld() || s == state::BUSY || take(s, state::BUSY).is_err() {
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

/// Milliseconds after which a connection that another program has got as well may be registered again.
const LENT_MS: u64 = 200;
/// When a connection of this process was last lent (CLOCK_MONOTONIC, ms).
static LENT_AT_MS: AtomicU64 = AtomicU64::new(0);

/// Another program gets the connection as well, and may move bytes that nobody here counts: it is promoted again only
/// when the daemon finds that no other process holds it, as if it had been received.
pub fn lend(c: &Conn) {
    if c.flags.load(Relaxed) & flag::DISQUALIFIED == 0 {
        later(c, Reason::Left, LENT_MS);
        LENT_AT_MS.store(sys::now_ms(), Relaxed);
    }
    c.calls.store(0, Relaxed);
    c.tx.begin_uncounted();
    c.rx.begin_uncounted();
    // Release: whoever sees the flags finds both directions marked.
    c.flags
        .fetch_or(flag::LEFT | flag::RECEIVED | flag::NEW, Release);
}

/// The other program has ended: the daemon may look at once whether somebody else still has the connection.
pub fn back(c: &Conn) {
    if is_lent(c) {
        c.not_before_ms.store(sys::now_ms(), Relaxed);
    }
}

/// The daemon asks to wait for so many milliseconds, because another process holds the connection: what a program has
/// started that was just executed is often short.
pub fn held_ms(c: &Conn, ms: u32) -> u64 {
    let lately = is_lent(c) && sys::now_ms() < LENT_AT_MS.load(Relaxed) + 5 * LENT_MS;
    u64::from(ms).min(if lately { LENT_MS } else { u64::MAX })
}

/// Has it been lent, and no lane since then?
pub fn is_lent(c: &Conn) -> bool {
    let lent = flag::LEFT | flag::RECEIVED;
    c.flags.load(Relaxed) & (lent | flag::DISQUALIFIED) == lent
}
