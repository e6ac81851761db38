//! Which process this is, and which process of the family is which, where their numbers are of several pid namespaces.

use crate::sys;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use link::family::{Header, Table, DOMAINS};

/// The pid namespace of this process among those of the family, above the bits of a process or thread number: each child
/// in a namespace of its own gets a new one. What numbers of other namespaces mean nobody can tell.
static DOMAIN: AtomicU32 = AtomicU32::new(0);
/// That namespace; 0: it has not been asked for, or /proc does not tell.
static HERE: AtomicU64 = AtomicU64::new(0);

/// What tells a process of the family from all others, also from one in another pid namespace that has the same
/// number there.
#[inline(always)]
pub fn me() -> u32 {
    pid() | domain()
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
pub fn here() -> u64 {
    HERE.store(sys::pid_namespace(), Relaxed);
    HERE.load(Relaxed)
}

/// A new table: our number is taken.
pub fn found(h: &Header) {
    let n = domain() >> DOMAINS.trailing_zeros();
    h.domains.store(n, Relaxed);
}

/// In a forked child, which finds itself in this namespace.
pub fn forked(now: u64, table: Option<&Table>) {
    let parents = HERE.load(Relaxed);
    if now == 0 || parents == 0 || now == parents {
        return;
    }
    HERE.store(now, Relaxed);
    // (After some hundred they have one in common.)
    let n = table.map_or(0, |t| t.header.domains.fetch_add(1, Relaxed));
    let first = DOMAINS.trailing_zeros();
    DOMAIN.store((n + 1).min(DOMAINS >> first) << first, Relaxed);
}

static PID: AtomicU32 = AtomicU32::new(0);

/// This process, as of the last fork that we know of.
#[inline(always)]
pub fn pid() -> u32 {
    PID.load(Relaxed)
}

pub fn set_pid(p: u32) {
    PID.store(p, Relaxed);
}

/// A page that the kernel wipes in forked children: 1 where `set_pid` was told.
static PROCESS: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());

/// A table is made: see [`is_new_process`].
pub fn mark() {
    let Ok(p) = sys::map_private(4096) else {
        return;
    };
    if !sys::wipe_on_fork(p, 4096) {
        return sys::unmap(p, 4096);
    }
    PROCESS.store(p.cast(), Release);
    enter_process();
}

/// In a forked child: true for the first who comes; for all, where the kernel does not tell.
pub fn enter_process() -> bool {
    // SAFETY: null, or a page that stays mapped.
    unsafe { PROCESS.load(Acquire).as_ref() }.is_none_or(|w| w.swap(1, Relaxed) == 0)
}

/// Is this a forked child that `set_pid` has not been told of? (A vfork child is not, for its memory is
/// its parent's.)
pub fn is_new_process() -> bool {
    // SAFETY: as above.
    unsafe { PROCESS.load(Acquire).as_ref() }.is_some_and(|w| w.load(Relaxed) == 0)
}

/// Is no such thread there, or only what is left of a process until its parent has asked for it?
pub fn dead(tid: u32) -> bool {
    sys::kill0(tid) == Err(libc::ESRCH) || sys::is_zombie(tid)
}

/// Forks under way in hooks: a child of one has been counted.
static FORKING: AtomicU32 = AtomicU32::new(0);

pub fn forking() -> bool {
    FORKING.load(SeqCst) != 0
}

/// A hook makes a child, until [`fork_ends`].
pub fn fork_begins() {
    FORKING.fetch_add(1, SeqCst);
}

pub fn fork_ends() {
    FORKING.fetch_sub(1, SeqCst);
}

/// In the child: was it a hook that made it? (Not by who makes the system call itself.)
pub fn fork_ended() -> bool {
    FORKING.swap(0, SeqCst) != 0
}
