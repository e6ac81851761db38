//! What this process knows of each descriptor: one word per number, copied by fork as descriptors
//! are. A look at this table is all that descriptors which are none of our business ever cost.

use crate::{lock, process, sys, thread};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering::*};

/// Descriptors above this number stay native.
pub const MAX_FD: usize = 1 << 20;

static TABLE: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());

const KIND: u32 = 3 << 30;
const CONN: u32 = 1 << 30;
const SET: u32 = 2 << 30;
const OURS: u32 = 3 << 30;
/// Beside `OURS`: not ours, an io_uring.
const RING: u32 = 1 << 29;
/// Beside `OURS`, without `RING`: these bits of its inode.
const IDENTITY: u32 = RING - 1;
/// None of these, and not 0: the thread that closes the number, or gives it another meaning. Calls wait for it: the
/// kernel would carry out what comes in between on a connection of which the rest goes another way.
const CHANGES: u32 = 0;

/// What a descriptor is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fd {
    Other,
    /// A TCP socket: index in the family table.
    Conn(u32),
    /// An epoll set: index in the set table.
    Set(u32),
    /// One of the shim's own.
    Ours,
    /// An io_uring: index in the ring table.
    Ring(u32),
}

pub fn init() -> bool {
    if !TABLE.load(Acquire).is_null() {
        return true;
    }
    // (This is the first of our tables.)
    if sys::is_cramped() {
        crate::env::switch_off();
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
    if t.is_null() || fd as usize >= MAX_FD {
        return None;
    }
    // SAFETY: the table has MAX_FD zero-initialised words and is never unmapped; `fd` is in range
    // (a negative one is huge as usize).
    Some(unsafe { &*t.add(fd as usize) })
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

/// The same for calls that move bytes, or copy the number: waits for a thread that gives it another meaning.
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
        // (A handler that we do not stand before may have interrupted the very call.)
        if v == 0 || v & KIND != CHANGES || v == thread::tid() {
            break;
        }
        // A thread that was cancelled there has left the descriptor as it was. One whose close lingers has
        // not: the number is free, or something else has got it where we did not see that.
        if round % 16 == 0 && (process::dead(v) || !sys::is_tcp(fd)) {
            let _ = s.compare_exchange(v, 0, Relaxed, Relaxed);
        } else {
            sys::futex_wait(s, v, 1);
        }
    }
    conn(fd)
}

/// This thread gives the number another meaning, or closes it, until [`changed`]. (Where fork copies this, the child
/// has no such thread: see [`forget_changes`].)
pub fn changes(fd: i32) {
    if let Some(s) = slot(fd) {
        s.store(thread::tid(), Relaxed);
        HIGH.fetch_max(fd, Relaxed);
    }
}

/// Something new has got the number: whoever changed it is done with that, though its close may linger.
#[inline(always)]
pub fn is_new(fd: i32) {
    if let Some(s) = slot(fd) {
        let v = s.load(Relaxed);
        if v != 0 && v & KIND == CHANGES {
            let _ = s.compare_exchange(v, 0, Relaxed, Relaxed);
        }
    }
}

/// It is done, in the kernel. What has got the number since stays entered.
#[inline(always)]
pub fn changed(fd: i32) {
    if let Some(s) = slot(fd) {
        let v = s.load(Relaxed);
        if v != 0 && v & KIND == CHANGES && v == thread::tid() {
            let _ = s.compare_exchange(v, 0, Relaxed, Relaxed);
        }
    }
}

/// In a forked child.
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
            // With the identity of what it stands for: see `is_ours`.
            Fd::Ours => OURS | sys::inode(fd).map_or(0, |(i, _)| i as u32 & IDENTITY),
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

/// Highest descriptor number of the application's that was ever entered.
pub fn high() -> i32 {
    HIGH.load(Relaxed)
}

/// No descriptor but ours is known from now on.
pub fn forget_all() {
    for fd in 0..=high() {
        if !matches!(get(fd), Fd::Other | Fd::Ours) {
            set(fd, Fd::Other);
        }
    }
}

/// A number that is in use, though no entry says for what.
pub fn reach(fd: i32) {
    HIGH.fetch_max(fd.min(MAX_FD as i32 - 1), Relaxed);
}

/// The same, our own included.
pub fn high_with_ours() -> i32 {
    HIGH_OURS.load(Relaxed)
}

/// From this number on the application's soft limit is so high that nobody runs into it for a few of ours.
const ROOMY: u64 = 16_384;
/// Least number of ours above a soft limit, and how many there is room for.
const BEYOND: u64 = 1024;
static LIMIT: AtomicU32 = AtomicU32::new(0);

/// A copy above the application's soft limit, so that ours take no number that it may have: EMFILE comes
/// when it would come without us. The limit is raised for that moment, and put back. (Not while a child is
/// made, which would keep it.)
fn beyond(fd: i32) -> Option<i32> {
    let _g = lock::lock(&LIMIT)?;
    let (soft, hard) = sys::nofile()?;
    if soft >= ROOMY || process::forking() {
        return None;
    }
    let from = soft.max(BEYOND);
    let room = from + BEYOND;
    let enough = if hard > from { room.min(hard) } else { room };
    if !sys::set_nofile(enough, hard.max(enough)) {
        return None;
    }
    let copy = sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, from as usize);
    sys::set_nofile(soft, hard);
    copy.ok()
}

/// Before a child is made: nobody is raising the limit, or begins to.
pub fn limit_settled() {
    drop(lock::lock(&LIMIT));
}

/// Moves one of our own descriptors out of the application's sight: to a high number, closed on
/// exec, entered as ours. Takes the number given if there is no room above.
pub fn hide(fd: i32) -> i32 {
    if let Some(high) = beyond(fd) {
        sys::close(fd);
        set(high, Fd::Ours);
        return high;
    }
    let limit = sys::rlimit_nofile().min(MAX_FD as u64) as usize;
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
    // (Not one that the C library's streams would write to.)
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

/// A copy of the application's descriptor at a number of our own.
pub fn hidden_copy(fd: i32) -> Option<i32> {
    if let Some(high) = beyond(fd) {
        set(high, Fd::Ours);
        return Some(high);
    }
    let limit = sys::rlimit_nofile().min(MAX_FD as u64) as usize;
    let copy = |base| sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, base).ok();
    let high = [(limit - limit / 4).min(16_384), limit / 2, 3]
        .into_iter()
        .find_map(copy)?;
    set(high, Fd::Ours);
    Some(high)
}

/// Descriptors of our own for this socket: calls and registrations keep some.
pub fn hidden_copies(inode: u64) -> u32 {
    let here = |fd: &i32| {
        let v = slot(*fd).map_or(0, |s| s.load(Relaxed));
        let ours = v & KIND == OURS && v & RING == 0 && v & IDENTITY == inode as u32 & IDENTITY;
        ours && sys::inode(*fd).is_ok_and(|(n, _)| n == inode)
    };
    (0..=high_with_ours()).filter(here).count() as u32
}

/// Is this still our own descriptor? An inlined system call may have closed it, and its number be a file
/// or a connection of the application's by now. (Descriptors without an inode of their own, such as
/// eventfds, share one: they are told from files and sockets only.)
pub fn is_ours(fd: i32) -> bool {
    let Some(s) = slot(fd) else { return false };
    let v = s.load(Relaxed);
    let same = |(inode, _): (u64, u32)| inode as u32 & IDENTITY == v & IDENTITY;
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
pub fn poke(efd: i32) {
    if is_ours(efd) {
        let one = 1u64;
        let _ = sys::write1(efd, (&raw const one).cast(), 8);
    }
}
