//! What this process knows about each descriptor: one word per number, copied by fork as descriptors are. For
//! descriptors that do not concern the shim, a look at this table is the only cost.

use crate::sys::{self, lock, pids, thread};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering::*};
use lane::num;

/// Descriptors above this number stay native.
pub const MAX_FD: usize = 1 << 20;

static TABLE: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());

const KIND: u32 = 3 << 30;
const CONN: u32 = 1 << 30;
const SET: u32 = 2 << 30;
const OURS: u32 = 3 << 30;
/// Together with `OURS`: an io_uring of the application, not one of the shim's descriptors.
const RING: u32 = 1 << 29;
/// Together with `OURS`, without `RING`: these bits of the descriptor's inode number.
const IDENTITY: u32 = RING - 1;
/// With none of these bits, and not 0: the id of the thread that is closing the number or giving it another meaning.
/// Calls wait for that; otherwise the kernel could carry them out on a connection whose other bytes go another way.
const CHANGES: u32 = 0;

/// What a descriptor is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fd {
    Other,
    /// A TCP socket: index in the family table.
    Conn(u32),
    /// An epoll set: index in the set table.
    Set(u32),
    /// A descriptor of the shim's own.
    Ours,
    /// An io_uring: index in the ring table.
    Ring(u32),
}

pub fn init() -> bool {
    if !TABLE.load(Acquire).is_null() {
        return true;
    }
    // (This table is the first of ours to be made.)
    if sys::is_cramped() {
        crate::sys::env::switch_off();
        return false;
    }
    let Ok(p) = sys::map_private(MAX_FD * 4) else {
        return false;
    };
    if TABLE
        .compare_exchange(core::ptr::null_mut(), p.cast(), AcqRel, Acquire)
        .is_err()
    {
        sys::unmap(p, MAX_FD * 4);
    }
    true
}

#[inline(always)]
fn slot(fd: i32) -> Option<&'static AtomicU32> {
    let t = TABLE.load(Acquire);
    if t.is_null() || num::word(fd) >= MAX_FD {
        return None;
    }
    // SAFETY: the table has MAX_FD zero-initialised words and is never unmapped; `fd` is in range
    // (a negative one is huge as usize).
    Some(unsafe { &*t.add(num::word(fd)) })
}

#[inline(always)]
pub fn get(fd: i32) -> Fd {
    match slot(fd).map_or(0, |s| s.load(Relaxed)) {
        v if v & KIND == CHANGES => Fd::Other,
        v if v & KIND == CONN => Fd::Conn(v & !KIND),
        v if v & KIND == SET => Fd::Set(v & !KIND),
        v if v & RING != 0 => Fd::Ring(v & !KIND & !RING),
        _ => Fd::Ours,
    }
}

/// Index of the connection behind `fd`, if it is one.
#[inline(always)]
pub fn conn(fd: i32) -> Option<u32> {
    let v = slot(fd)?.load(Relaxed);
    (v & KIND == CONN).then_some(v & !KIND)
}

/// The same for calls that move bytes or duplicate the number: waits for a thread that is changing its meaning.
#[inline(always)]
pub fn settled(fd: i32) -> Option<u32> {
    let s = slot(fd)?;
    match s.load(Relaxed) {
        0 => None,
        v if v & KIND == CONN => Some(v & !KIND),
        v if v & KIND == CHANGES => wait_for_change(fd, s),
        _ => None,
    }
}

#[cold]
fn wait_for_change(fd: i32, s: &AtomicU32) -> Option<u32> {
    for round in 1u32.. {
        let v = s.load(Relaxed);
        // (A handler that is not behind our trampoline may have interrupted the very call that changes the number.)
        if v == 0 || v & KIND != CHANGES || v == thread::tid() {
            break;
        }
        // A thread that was cancelled before its close has left the descriptor as it was. If its close lingers
        // instead, the number is already free, or has been reused unseen.
        if round % 16 == 0 && (pids::dead(v) || !sys::is_tcp(fd)) {
            let _ = s.compare_exchange(v, 0, Relaxed, Relaxed);
        } else {
            sys::futex_wait(s, v, 1);
        }
    }
    conn(fd)
}

/// The calling thread is closing the number or giving it another meaning, until [`changed`]. (After a fork the child
/// has no such thread: see [`forget_changes`].)
pub fn changes(fd: i32) {
    if let Some(s) = slot(fd) {
        s.store(thread::tid(), Relaxed);
        HIGH.fetch_max(fd, Relaxed);
    }
}

/// Something new has got the number, so the thread that closed it has done so, even if its close lingers.
#[inline(always)]
pub fn is_new(fd: i32) {
    if let Some(s) = slot(fd) {
        let v = s.load(Relaxed);
        if v != 0 && v & KIND == CHANGES {
            let _ = s.compare_exchange(v, 0, Relaxed, Relaxed);
        }
    }
}

/// The kernel has done the change. If something was entered for the number since then, it stays.
#[inline(always)]
pub fn changed(fd: i32) {
    if let Some(s) = slot(fd) {
        let v = s.load(Relaxed);
        if v != 0 && v & KIND == CHANGES && v == thread::tid() {
            let _ = s.compare_exchange(v, 0, Relaxed, Relaxed);
        }
    }
}

/// In a forked child, where the changing threads do not exist.
pub fn forget_changes() {
    for s in (0..=high()).filter_map(slot) {
        if s.load(Relaxed) & KIND == CHANGES {
            s.store(0, Relaxed);
        }
    }
}

/// Enters `what`; false if the number is out of reach (then the descriptor stays native).
pub fn set(fd: i32, what: Fd) -> bool {
    let Some(s) = slot(fd) else { return false };
    s.store(
        match what {
            Fd::Other => 0,
            Fd::Conn(i) => CONN | i,
            Fd::Set(i) => SET | i,
            // With the inode of the descriptor: see `is_ours`.
            Fd::Ours => OURS | sys::inode(fd).map_or(0, |(i, _)| num::low32(i) & IDENTITY),
            Fd::Ring(i) => OURS | RING | i,
        },
        Relaxed,
    );
    if !matches!(what, Fd::Ours | Fd::Other) {
        HIGH.fetch_max(fd, Relaxed);
    }
    HIGH_OURS.fetch_max(fd, Relaxed);
    true
}

static HIGH: AtomicI32 = AtomicI32::new(-1);

static HIGH_OURS: AtomicI32 = AtomicI32::new(-1);

/// Highest descriptor number of the application that was ever entered.
pub fn high() -> i32 {
    HIGH.load(Relaxed)
}

/// Forgets all descriptors except the shim's own.
pub fn forget_all() {
    for fd in 0..=high() {
        if !matches!(get(fd), Fd::Other | Fd::Ours) {
            set(fd, Fd::Other);
        }
    }
}

/// Notes a number that is in use although it has no entry.
pub fn reach(fd: i32) {
    HIGH.fetch_max(fd.min(num::int(MAX_FD as u64) - 1), Relaxed);
}

/// The same including the shim's own descriptors.
pub fn high_with_ours() -> i32 {
    HIGH_OURS.load(Relaxed)
}

/// From this soft limit on, an application does not run into it because of a few descriptors of ours.
const ROOMY: u64 = 16_384;
/// Lowest number of ours above a soft limit, and how many numbers are added above it.
const BEYOND: u64 = 1024;
static LIMIT: AtomicU32 = AtomicU32::new(0);

/// A copy above the application's soft limit, so that our descriptors take none of its numbers and EMFILE comes when
/// it would come without the shim. The limit is raised for that moment and then restored. (Not while a child is being
/// made, which would inherit the raised limit.)
fn beyond(fd: i32) -> Option<i32> {
    let _g = lock::lock(&LIMIT)?;
    let (soft, hard) = sys::nofile()?;
    if soft >= ROOMY || pids::forking() {
        return None;
    }
    let from = soft.max(BEYOND);
    let room = from + BEYOND;
    let enough = if hard > from { room.min(hard) } else { room };
    if !sys::set_nofile(enough, hard.max(enough)) {
        return None;
    }
    let copy = sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, num::size(from));
    sys::set_nofile(soft, hard);
    copy.ok()
}

/// Before a child is made: waits until no thread has the limit raised; no thread begins to raise it meanwhile.
pub fn limit_settled() {
    drop(lock::lock(&LIMIT));
}

/// Moves one of our own descriptors to a high number, where it does not disturb the application, sets it
/// close-on-exec, and enters it as ours. Keeps the given number if there is no room above.
pub fn hide(fd: i32) -> i32 {
    if let Some(high) = beyond(fd) {
        sys::close(fd);
        set(high, Fd::Ours);
        return high;
    }
    let limit = num::size(sys::rlimit_nofile().min(MAX_FD as u64));
    // Not higher than needed: the kernel's own table grows with the highest number.
    for base in [(limit - limit / 4).min(16_384), limit / 2] {
        if base <= 16 {
            break;
        }
        if let Ok(high) = sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, base) {
            sys::close(fd);
            set(high, Fd::Ours);
            return high;
        }
    }
    // (Not a number that the C library's standard streams would write to.)
    let kept = match fd > libc::STDERR_FILENO {
        true => Err(0),
        false => sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, libc::STDERR_FILENO as usize + 1),
    };
    if let Ok(other) = kept {
        sys::close(fd);
        set(other, Fd::Ours);
        return other;
    }
    let _ = sys::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC as usize);
    set(fd, Fd::Ours);
    fd
}

/// A copy of the application's descriptor under a hidden number.
pub fn hidden_copy(fd: i32) -> Option<i32> {
    if let Some(high) = beyond(fd) {
        set(high, Fd::Ours);
        return Some(high);
    }
    let limit = num::size(sys::rlimit_nofile().min(MAX_FD as u64));
    let copy = |base| sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, base).ok();
    let high = [(limit - limit / 4).min(16_384), limit / 2, 3]
        .into_iter()
        .find_map(copy)?;
    set(high, Fd::Ours);
    Some(high)
}

/// Number of hidden descriptors that the shim has for this socket: calls and registrations keep some.
pub fn hidden_copies(inode: u64) -> u32 {
    let here = |fd: &i32| {
        let v = slot(*fd).map_or(0, |s| s.load(Relaxed));
        let ours =
            v & KIND == OURS && v & RING == 0 && v & IDENTITY == num::low32(inode) & IDENTITY;
        ours && sys::inode(*fd).is_ok_and(|(n, _)| n == inode)
    };
    num::small((0..=high_with_ours()).filter(here).count())
}

/// Is this still our own descriptor? An inlined system call may have closed it, and its number may be a file or a
/// connection of the application by now. (Descriptors such as eventfds share one inode, so they can only be told from
/// files and sockets.)
pub fn is_ours(fd: i32) -> bool {
    let Some(s) = slot(fd) else { return false };
    let v = s.load(Relaxed);
    let same = |(inode, _): (u64, u32)| num::low32(inode) & IDENTITY == v & IDENTITY;
    if v & KIND != OURS || v & RING != 0 {
        return false;
    }
    let ours = sys::inode(fd).is_ok_and(same);
    if !ours {
        let _ = s.compare_exchange(v, 0, Relaxed, Relaxed);
    }
    ours
}

/// Closes one of our own descriptors.
pub fn close_ours(fd: i32) {
    if fd >= 0 && is_ours(fd) {
        set(fd, Fd::Other);
        sys::close(fd);
    }
}

/// Adds one to an eventfd of ours.
pub fn signal(efd: i32) {
    if is_ours(efd) {
        let one = 1u64;
        let _ = sys::write1(efd, (&raw const one).cast(), 8);
    }
}
