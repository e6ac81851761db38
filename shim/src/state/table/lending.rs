//! Connections that another program gets as well, and when they may have a lane again.

use super::later;
use crate::sys;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use lane::family::{flag, Conn};
use lane::proto::reason::Reason;

/// Milliseconds after which a connection that another program has got as well may be registered again.
const LENT_MS: u64 = 200;
/// When a connection of this process was last lent (CLOCK_MONOTONIC, ms).
static LENT_AT_MS: AtomicU64 = AtomicU64::new(0);

/// Another program gets the connection as well, and may move bytes that nobody here counts: it is promoted again only
/// when the daemon finds that no other process holds it, as if it had been received.
pub fn lend(c: &Conn) {
    if c.flags.load(Relaxed) & flag::DISQUALIFIED == 0 {
        rest(c);
    }
    c.calls.store(0, Relaxed);
    c.tx.begin_uncounted();
    c.rx.begin_uncounted();
    // Release: whoever sees the flags finds both directions marked.
    c.flags
        .fetch_or(flag::LEFT | flag::RECEIVED | flag::NEW, Release);
}

/// All that was lent for the same child is on TCP now, which may have taken time: the child exists soon, and until then
/// nothing of it may be on a lane again.
pub fn rests(c: &Conn) {
    if is_lent(c) {
        rest(c);
    }
}

fn rest(c: &Conn) {
    later(c, Reason::Left, LENT_MS);
    LENT_AT_MS.store(sys::now_ms(), Relaxed);
}

/// Number of calls that lend connections to a child which does not exist yet, and when the last one began
/// (CLOCK_MONOTONIC, ms).
static LENDING: AtomicU32 = AtomicU32::new(0);
static LENDING_MS: AtomicU64 = AtomicU64::new(0);
/// Milliseconds after which such a call counts as ended: a handler may have left it by `longjmp`.
const LONGEST_MS: u64 = 10_000;

/// Such a call, until this is dropped. (Who forgets it calls [`lent_all`].)
pub struct Lending(());

impl Lending {
    pub fn new() -> Lending {
        LENDING_MS.store(sys::now_ms(), Relaxed);
        LENDING.fetch_add(1, SeqCst);
        Lending(())
    }
}

impl Drop for Lending {
    fn drop(&mut self) {
        lent_all();
    }
}

/// One of these calls has ended.
pub fn lent_all() {
    let _ = LENDING.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1));
}

/// Is there such a call? Then nothing gets a lane: what has left for a child might be up again before the child exists.
pub fn is_lending() -> bool {
    LENDING.load(SeqCst) != 0 && sys::now_ms() < LENDING_MS.load(Relaxed) + LONGEST_MS
}

/// In a forked child: the calls of its parent's other threads are none of its own.
pub(super) fn none_lends() {
    LENDING.store(0, Relaxed);
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
