//! The identity of this process, and of the others of its family, also if their pids belong to several pid
//! namespaces.

use crate::sys;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use lane::family::{Header, Table, DOMAINS};

/// The number of this process's pid namespace within the family, in the bits above a process or thread id. Each
/// child in a namespace of its own gets a new number. Ids of other namespaces cannot be interpreted.
static DOMAIN: AtomicU32 = AtomicU32::new(0);
/// The namespace itself; 0: not read yet, or /proc does not tell.
static HERE: AtomicU64 = AtomicU64::new(0);

/// Identifies a process of the family uniquely, even if one in another pid namespace has the same pid there.
#[inline(always)]
pub fn me() -> u32 {
    pid() | domain()
}

#[inline(always)]
pub fn domain() -> u32 {
    DOMAIN.load(Relaxed)
}

/// Is that process or thread in another pid namespace?
pub fn is_foreign(id: u32) -> bool {
    id & DOMAINS ^ domain() != 0
}

/// Has that process ended? False for other namespaces, where we cannot know.
pub fn is_gone(id: u32) -> bool {
    !is_foreign(id) && sys::kill0(id & !DOMAINS) == Err(libc::ESRCH)
}

/// The namespace of a new table.
pub fn here() -> u64 {
    HERE.store(sys::pid_namespace(), Relaxed);
    HERE.load(Relaxed)
}

/// A new table: our namespace's number is in use.
pub fn found(h: &Header) {
    let n = domain() >> DOMAINS.trailing_zeros();
    h.domains.store(n, Relaxed);
}

/// In a forked child whose namespace is `now`.
pub fn forked(now: u64, table: Option<&Table>) {
    let parents = HERE.load(Relaxed);
    if now == 0 || parents == 0 || now == parents {
        return;
    }
    HERE.store(now, Relaxed);
    // (After some hundred namespaces, all further ones share the last number.)
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

/// A page that the kernel wipes in forked children: 1 once `set_pid` was called in this process.
static PROCESS: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());

/// Called when a table is made: see [`is_new_process`].
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

/// In a forked child: true for the first caller; for all callers if the kernel cannot wipe pages.
pub fn enter_process() -> bool {
    // SAFETY: null, or a page that stays mapped.
    unsafe { PROCESS.load(Acquire).as_ref() }.is_none_or(|w| w.swap(1, Relaxed) == 0)
}

/// Is this a forked child in which `set_pid` has not been called yet? (A vfork child shares its parent's memory,
/// and does not count.)
pub fn is_new_process() -> bool {
    // SAFETY: as above.
    unsafe { PROCESS.load(Acquire).as_ref() }.is_some_and(|w| w.load(Relaxed) == 0)
}

/// Is there no such thread, or is it a zombie?
pub fn dead(tid: u32) -> bool {
    sys::kill0(tid) == Err(libc::ESRCH) || sys::is_zombie(tid)
}

/// Number of forks under way in hooks; their children are counted as holders already.
static FORKING: AtomicU32 = AtomicU32::new(0);

pub fn forking() -> bool {
    FORKING.load(SeqCst) != 0
}

/// Bits of the forks under way: see `table::forks`.
static FORKS: AtomicU64 = AtomicU64::new(0);
/// Number of tries after which a fork goes on without a bit, 64 others being under way: what it counts stays counted.
const TRIES: u32 = 1000;

/// A hook begins to make a child, until [`fork_ends`]. Returns the fork's bit.
pub fn fork_begins() -> u64 {
    FORKING.fetch_add(1, SeqCst);
    for _ in 0..TRIES {
        let free = |v: u64| (v != u64::MAX).then(|| v | (v + 1));
        match FORKS.fetch_update(SeqCst, SeqCst, free) {
            Ok(v) => return !v & (v + 1),
            Err(_) => std::thread::yield_now(),
        }
    }
    0
}

/// The hook is through.
pub fn fork_ends() {
    FORKING.fetch_sub(1, SeqCst);
}

/// Nothing has this bit any more.
pub fn forget_bit(bit: u64) {
    FORKS.fetch_and(!bit, SeqCst);
}

/// In the child: did a hook make it? (False if the application made the system call itself.)
pub fn fork_ended() -> bool {
    FORKS.store(0, SeqCst);
    FORKING.swap(0, SeqCst) != 0
}
