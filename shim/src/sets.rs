//! Which connections are registered in which epoll sets, and in which of the kernel's sets these registrations are: see
//! `readiness::epoll`.
//!
//! Promotion moves registrations when a lane comes or goes, and readiness waits on them: so this is below both. Nothing
//! here waits, or reports an event to the application.

mod members;
pub mod regs;
pub mod sleepers;
mod slots;

pub use members::*;
pub use regs::*;
pub use slots::*;

use crate::daemon;
use crate::state::fdtab;
use crate::state::groups::{LinkGroup, SETS};
use crate::sys::{self, lock, pids};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use lane::abi::{COUNTERS, LANES_PER_COUNTER};
use lane::family::Conn;
use lane::notify;
use lane::num;

pub const IN: u32 = libc::EPOLLIN as u32;
pub const OUT: u32 = libc::EPOLLOUT as u32;
pub const ERR: u32 = libc::EPOLLERR as u32;
pub const HUP: u32 = libc::EPOLLHUP as u32;
pub const RDHUP: u32 = libc::EPOLLRDHUP as u32;
pub const PRI: u32 = libc::EPOLLPRI as u32;
pub const RDNORM: u32 = libc::EPOLLRDNORM as u32;
pub const WRNORM: u32 = libc::EPOLLWRNORM as u32;
pub const ET: u32 = num::bits(libc::EPOLLET);
pub const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
pub const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// Events of `poll` as those of epoll, which have the same bits.
#[inline(always)]
pub fn polled(revents: i16) -> u32 {
    u16::from_ne_bytes(revents.to_ne_bytes()).into()
}

/// Events of epoll as those of `poll`, which have no more than 16 bits.
#[inline(always)]
pub fn revents(events: u32) -> i16 {
    i16::from_ne_bytes(num::low16(events.into()).to_ne_bytes())
}

/// Microseconds between two system calls that ask the kernel while lanes are busy.
pub const LOOK_US: u64 = 20;

// Bits of `Reg::flags`.
pub const ACTIVE: u32 = 1; // in the inner set
pub const QUEUED: u32 = 2;
pub const EDGE_IN: u32 = 4; // something new to read since the last report
pub const EDGE_OUT: u32 = 8;
pub const DISABLED: u32 = 16; // one-shot, and has been reported
pub const BLOCKED: u32 = 32; // waits for ring space
pub const FRESH: u32 = 128; // the inner set has not yet made the first report that it makes about every new member
pub const PARKED: u32 = 64; // removed by the application, but kept: many programs remove and add in turn
pub const INHERITED: u32 = 512; // was active in the parent, and is in none of the kernel's sets: see `epoll::adopted`
pub const KIN: u32 = 1024; // active, on a link group of an ancestor process: see `epoll::sleep`
pub const RINGED: u32 = 2048; // in the kernel's set, while a ring has news: see `epoll::adopted`
pub const ABSENT: u32 = 256; // one-shot, reported, and then taken off the lane: in none of the kernel's sets

/// In `Set::asleep`: the set has lanes, and each of its link groups counts every thread asleep in the set.
pub const HEARS: u32 = 1 << 31;

pub struct Set {
    pub used: AtomicU32,
    pub lock: AtomicU32,
    pub refs: AtomicU32,
    /// A descriptor of the set: the application's, or a hidden one once the set was duplicated, or closed while
    /// threads wait in it.
    pub epfd: AtomicI32,
    /// Not 0: the application has closed the set while threads wait in it; the last of them ends it.
    pub ending: AtomicU32,
    /// The inner set; -1: none.
    pub inner: AtomicI32,
    /// Eventfd in the inner set that wakes sleepers; -1: none.
    pub wake_fd: AtomicI32,
    /// In a forked child: the parent's `inner` and `wake_fd`, plus 1 (0: none).
    pub theirs: [AtomicI32; 2],
    /// Not 0: this is a forked child that has not used the set yet.
    pub inherited: AtomicU32,
    /// Not 0: registrations may be [`RINGED`].
    pub ringed: AtomicU32,
    /// Not 0: a child may use the set as well.
    pub shared: AtomicU32,
    /// Generation of the control connection that the inner set contains.
    pub ctl: AtomicI32,
    /// Threads inside a wait on this set.
    pub waiters: AtomicU32,
    /// Threads asleep in the kernel on this set, and [`HEARS`]: see `sleepers::fall_asleep`.
    pub asleep: AtomicU32,
    /// Number of active registrations.
    pub lanes: AtomicU32,
    /// Registrations that are [`KIN`].
    pub kin: AtomicU32,
    /// Not 0: some connection has been registered here.
    pub tcp: AtomicU32,
    /// Not 0: a hooked call has waited on the set. A program that waits only by calls without hooks (inlined system
    /// calls) would not be told of events on lanes, but would be told of the shim's own.
    pub waited: AtomicU32,
    /// Not 0: a move or a registration with the daemon was refused because of that.
    pub refused: AtomicU32,
    /// The set is nested, or watched in a way that lanes do not serve.
    pub disqualified: AtomicU32,
    /// Not 0: all lanes have to be looked at again (see `notify`).
    pub notified: AtomicU32,
    /// Counts registrations that have moved to the inner set: see `epoll::sleep`.
    pub moves: AtomicU32,
    /// Counts the times that the kernel reported everything that it had to the application: see `Reg::armed_at`.
    pub told: AtomicU32,
    /// Time (ticks) when the kernel was last asked.
    pub looked: AtomicU64,
    /// Not 0: the kernel's events have filled the array of a wait, so the lanes come first in the next one.
    pub filled: AtomicU32,
    pub spin: AtomicI32,
    /// Queue of the registrations to be looked at: the first and the last (index + 1), and their number.
    pub head: AtomicU32,
    pub tail: AtomicU32,
    pub queued: AtomicU32,
    /// Counts registrations that were put into the queue: see `Harvest::pushes`.
    pub pushes: AtomicU32,
    /// When the end of one of its connections has to be reported (CLOCK_MONOTONIC, ms), see `ends`; 0: none.
    pub end_ms: AtomicU64,
    /// Its link groups: the other processes with which its connections have lanes.
    pub slots: Slots,
}

/// Number of sets that were ever used.
pub static USED: AtomicU32 = AtomicU32::new(0);
pub static SET_TABLE: AtomicPtr<Set> = AtomicPtr::new(core::ptr::null_mut());
pub const TAG: u64 = 0xd00b_e11d << 32;
pub const TAG_REG: u64 = 1 << 56;
pub const TAG_BELL: u64 = 2 << 56;
pub const TAG_WAKE: u64 = 3 << 56;
pub const TAG_CTL: u64 = 4 << 56;

/// `data` of the inner set's entry in the application's set: an address of ours plus a tag, which the application has
/// no reason to use.
pub fn mark() -> u64 {
    regs::address() ^ TAG
}

pub fn set_at(i: u32) -> &'static Set {
    // SAFETY: only reached with indices from `create`, after the table was made; masked in bounds.
    unsafe { &*SET_TABLE.load(Acquire).add(i as usize & (SETS - 1)) }
}

pub fn init() -> bool {
    for (t, bytes) in [
        (
            SET_TABLE.as_ptr().cast::<AtomicPtr<u8>>(),
            SETS * core::mem::size_of::<Set>(),
        ),
        (
            REG_TABLE.as_ptr().cast::<AtomicPtr<u8>>(),
            regs::TABLE_BYTES,
        ),
    ] {
        // SAFETY: both statics are AtomicPtr; only the pointee type is recast.
        let t = unsafe { &*t };
        if t.load(Acquire).is_null() {
            let Ok(p) = sys::map_private(bytes) else {
                return false;
            };
            if t.compare_exchange(core::ptr::null_mut(), p, AcqRel, Acquire)
                .is_err()
            {
                sys::unmap(p, bytes);
            }
        }
    }
    true
}

/// A new epoll descriptor of the application.
pub fn created(fd: i32) {
    if fd < 0 || !init() {
        return;
    }
    for i in 0..num::small(SETS) {
        let s = set_at(i);
        // (A thread may still be asleep in a set that was closed under it, and decrements `waiters` later.)
        let free = s.used.load(Relaxed) == 0 && s.waiters.load(SeqCst) == 0;
        if free && s.used.compare_exchange(0, 1, AcqRel, Relaxed).is_ok() {
            USED.fetch_max(i + 1, Relaxed);
            s.epfd.store(fd, Relaxed);
            s.refs.store(1, Relaxed);
            for a in [&s.inner, &s.wake_fd, &s.ctl] {
                a.store(-1, Relaxed);
            }
            for a in [
                &s.lanes,
                &s.kin,
                &s.disqualified,
                &s.notified,
                &s.head,
                &s.tail,
                &s.queued,
                &s.lock,
                &s.moves,
                &s.tcp,
                &s.waited,
                &s.refused,
                &s.ending,
                &s.filled,
                &s.inherited,
                &s.ringed,
                &s.shared,
            ] {
                a.store(0, Relaxed);
            }
            s.spin.store(4, Relaxed);
            s.end_ms.store(0, Relaxed);
            s.slots.clear();
            if !fdtab::set(fd, fdtab::Fd::Set(i)) {
                s.used.store(0, Release);
            }
            return;
        }
    }
}

/// The set has got another descriptor. From now on the shim uses a hidden one: whichever the application closes
/// first, its number may then stand for another set.
pub fn duplicated(i: u32) {
    let s = set_at(i);
    s.refs.fetch_add(1, Relaxed);
    if let Some(_g) = lock::lock(&s.lock) {
        take_copy(s);
    }
}

/// Makes a hidden descriptor of the set. False: no descriptor is available. Set lock held.
pub fn take_copy(s: &Set) -> bool {
    let fd = s.epfd.load(Relaxed);
    if fdtab::get(fd) != fdtab::Fd::Ours {
        let Some(copy) = fdtab::hidden_copy(fd) else {
            return false;
        };
        s.epfd.store(copy, Relaxed);
    }
    true
}

/// A descriptor of the set is about to be closed. As in the kernel, threads that wait in the set keep it.
pub fn closed(i: u32) {
    let s = set_at(i);
    if s.refs.fetch_sub(1, AcqRel) != 1 {
        return;
    }
    let waited = match lock::lock(&s.lock) {
        Some(_g) => s.waiters.load(SeqCst) > 0 && take_copy(s),
        None => false,
    };
    // SYNC ending: the set is marked to be ended by its last waiter, then we look whether there is one; a waiter
    // leaves, then looks whether it has to end the set.
    s.ending.store(1, SeqCst);
    if !waited || s.waiters.load(SeqCst) == 0 {
        ended(i, s);
    }
}

/// A thread has left its wait on the set.
pub fn wait_over(i: u32, s: &Set) {
    if s.waiters.fetch_sub(1, SeqCst) == 1 && s.ending.load(SeqCst) != 0 {
        ended(i, s); // SYNC ending
    }
}

/// Nobody has or uses the set any more. (If two threads find that, only one continues here.)
#[cold]
pub fn ended(i: u32, s: &Set) {
    if s.ending.swap(0, SeqCst) == 0 {
        return;
    }
    if let Some(_g) = lock::lock(&s.lock) {
        for (r, reg) in regs::all() {
            if let Some(conn) = reg.conn.load(Relaxed).checked_sub(1) {
                if is_of(r, i, conn) {
                    regs::end(r, conn);
                }
            }
        }
        for l in s.slots.each().filter_map(|(_, slot)| slot.group()) {
            l.sets[i as usize / 64].fetch_and(!(1 << (i % 64)), SeqCst);
        }
        sleepers::deafen(s);
        for f in [&s.inner, &s.wake_fd] {
            fdtab::close_ours(f.swap(-1, Relaxed));
        }
        close_theirs(s);
        close_copy(s);
        s.lanes.store(0, Relaxed);
    }
    s.used.store(0, Release);
}

pub fn close_copy(s: &Set) {
    let fd = s.epfd.load(Relaxed);
    if fdtab::get(fd) == fdtab::Fd::Ours {
        fdtab::close_ours(fd);
    }
}

/// In a forked child: closes its copies of the parent's descriptors.
pub fn close_theirs(s: &Set) {
    for f in &s.theirs {
        fdtab::close_ours(f.swap(0, Relaxed) - 1);
    }
}

/// The same for all sets, in a process that no longer holds any connection.
pub fn release_inherited() {
    if !SET_TABLE.load(Relaxed).is_null() {
        (0..num::small(SETS)).for_each(|i| close_theirs(set_at(i)));
    }
}

/// After a fork, in the parent.
pub fn after_fork_parent() {
    for i in 0..USED.load(Relaxed) {
        let s = set_at(i);
        if s.lanes.load(Relaxed) != 0 {
            s.shared.store(1, Relaxed);
        }
    }
}

/// In a forked child: the kernel's sets are shared with the parent, but the parent's lanes are not.
pub fn after_fork() {
    if SET_TABLE.load(Relaxed).is_null() {
        return;
    }
    for i in 0..num::small(SETS) {
        let s = set_at(i);
        if s.used.load(Relaxed) != 0 {
            for a in [
                &s.lock, &s.waiters, &s.asleep, &s.lanes, &s.kin, &s.head, &s.tail, &s.queued,
            ] {
                a.store(0, Relaxed);
            }
            // The kernel's inner set belongs to the parent: this process must not drain its doorbells.
            for (own, theirs) in [&s.inner, &s.wake_fd].into_iter().zip(&s.theirs) {
                let fd = own.swap(-1, Relaxed);
                if fd >= 0 {
                    theirs.store(fd + 1, Relaxed);
                }
            }
            s.disqualified.store(1, Relaxed); // shared across fork: its sockets stay on TCP here
            s.inherited.store(1, Relaxed);
            s.ringed.store(0, Relaxed);
            if s.ending.swap(0, Relaxed) != 0 {
                close_copy(s);
                s.used.store(0, Relaxed);
            }
            s.slots.clear();
        }
    }
    regs::inherit_all();
}

/// Does the connection's lane belong to an ancestor of this process?
pub fn is_inherited(c: &Conn) -> bool {
    c.owner_pid.load(Relaxed) != pids::me()
}

/// Is the connection watched in a way that a lane cannot serve?
pub fn unservable(i: u32) -> bool {
    let mut any = false;
    regs::each(i, |r, set| {
        let reg = reg_at(r);
        let disqualified =
            set_at(set).disqualified.load(Relaxed) != 0 || reg.mask.load(Relaxed) & EXCLUSIVE != 0;
        any |= disqualified && reg.flags.load(Relaxed) & INHERITED == 0;
    });
    any
}

/// Is the connection in a set on which no hooked call has waited yet?
pub fn unwaited(i: u32) -> bool {
    let mut any = false;
    regs::each(i, |r, set| {
        let own = reg_at(r).flags.load(Relaxed) & INHERITED == 0;
        any |= own && refuses(set_at(set));
    });
    any
}

/// Has no hooked call waited on the set yet? Then the first one makes up for what is refused now.
pub fn refuses(s: &Set) -> bool {
    // SYNC waited: we store that something is refused, then look; a waiter stores that it waits, then looks for that.
    s.waited.load(Relaxed) == 0 && {
        s.refused.store(1, SeqCst);
        s.waited.load(SeqCst) == 0
    }
}

/// A non-blocking sender found no space: its sets report when there is some, and take care that a ring does not stay
/// full for long.
#[cold]
pub fn blocked(conn: u32) {
    note(conn, OUT | WRNORM, BLOCKED | EDGE_OUT);
}

/// Something is on the connection's error queue: its sets report that and, as the kernel does, everything else that
/// is ready.
#[cold]
pub fn error_came(conn: u32) {
    note(conn, u32::MAX, EDGE_IN | EDGE_OUT);
    regs::each(conn, |_, set| notify_if_waiting(set as usize));
}

/// Queues the connection's registrations that watch for one of `events`, and marks `news` in them.
pub fn note(conn: u32, events: u32, news: u32) {
    regs::each(conn, |r, set| {
        let (s, reg) = (set_at(set), reg_at(r));
        if events == u32::MAX || reg.mask.load(Relaxed) & events != 0 {
            if let Some(_g) = lock::lock(&s.lock) {
                if is_of(r, set, conn) && reg.flags.load(Relaxed) & ACTIVE != 0 {
                    reg.flags.fetch_or(news, Relaxed);
                    push(s, r);
                }
            }
        }
    });
}

/// An end of connection has to be reported `ms` milliseconds from now: threads that sleep in the set are woken now,
/// and sleep no longer than until then. (By then the kernel has an event.) Set lock held.
pub fn await_end(s: &Set, ms: i64) {
    let (before, at) = (s.end_ms.load(SeqCst), sys::now_ms() + num::natural(ms));
    if before != 0 && before <= at {
        return;
    }
    // SYNC end: the time is stored, then we look for sleepers; a sleeper counts itself, then reads the time.
    s.end_ms.store(at, SeqCst);
    if s.asleep.load(SeqCst) & !HEARS != 0 {
        fdtab::signal(s.wake_fd.load(Relaxed));
    }
}
