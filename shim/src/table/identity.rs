//! Which process of the family is which, where their numbers are of several pid namespaces.

use crate::sys;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use link::family::{Header, DOMAINS};

/// The pid namespace of this process among those of the family, above the bits of a process or thread number: each child
/// in a namespace of its own gets a new one. What numbers of other namespaces mean nobody can tell.
static DOMAIN: AtomicU32 = AtomicU32::new(0);
/// That namespace; 0: it has not been asked for, or /proc does not tell.
static HERE: AtomicU64 = AtomicU64::new(0);

/// What tells a process of the family from all others, also from one in another pid namespace that has the same
/// number there.
#[inline(always)]
pub fn me() -> u32 {
    super::pid() | domain()
}

#[inline(always)]
pub fn domain() -> u32 {
    DOMAIN.load(Relaxed)
}

/// Is that process, or thread, of another pid namespace?
pub fn is_foreign(id: u32) -> bool {
    id & DOMAINS ^ domain() != 0
}

/// Is there no such process any more? Of other namespaces it cannot be told.
pub fn is_gone(id: u32) -> bool {
    !is_foreign(id) && sys::kill0(id & !DOMAINS) == Err(libc::ESRCH)
}

/// The namespace that a new table is of.
pub(super) fn here() -> u64 {
    HERE.store(sys::pid_namespace(), Relaxed);
    HERE.load(Relaxed)
}

/// A new table: our number is taken.
pub(super) fn found(h: &Header) {
    let n = domain() >> DOMAINS.trailing_zeros();
    h.domains.store(n, Relaxed);
}

/// In a forked child, which finds itself in this namespace.
pub(super) fn forked(now: u64) {
    let parents = HERE.load(Relaxed);
    if now == 0 || parents == 0 || now == parents {
        return;
    }
    HERE.store(now, Relaxed);
    // (After some hundred they have one in common.)
    let n = super::table().map_or(0, |t| t.header.domains.fetch_add(1, Relaxed));
    let first = DOMAINS.trailing_zeros();
    DOMAIN.store((n + 1).min(DOMAINS >> first) << first, Relaxed);
}
