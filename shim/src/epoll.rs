//! epoll sets that watch promoted connections.
//!
//! A registration goes to the kernel untouched and is remembered. When its connection gets a lane,
//! the descriptor moves from the application's set into an *inner* set, together with the doorbells
//! of its links, the control connection, and an eventfd to kick sleepers out; the inner set itself
//! is a member of the application's. `epoll_wait` then harvests ready lanes in user space, looks at
//! the kernel, spins, and finally sleeps in the kernel, counted as a sleeper on every link.
//!
//! Lock order: a set's lock may be taken while the locks of a connection are held, never the other
//! way round: under the set's lock those are only tried.

mod adopted;
mod ctl;
mod harvest;
mod members;
mod regs;
mod sleep;
mod sleepers;

pub use ctl::ctl;
pub use harvest::state;
pub use members::{
    activate, copy_closed, deactivate, disowned, forget, kick_if_waiting, left, lost, stir,
    tell_error, unbind,
};
pub use sleep::{wait, Until};

use crate::links::{Link, SETS};
use crate::port::Sock;
use crate::table::{self, Local};
use crate::{control, fdtab, io, lock, pages, process, promote, sys, wait};
use adopted::{adopt_one, adopted};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use harvest::*;
use libc::{epoll_event, sigset_t};
use link::family::{flag, state, Conn};
use link::lane::{tx, wake, Memory};
use link::layout::{Control, GROUP, GROUPS, LOG};
use link::prim::ticks;
use members::*;
use regs::*;

pub const IN: u32 = libc::EPOLLIN as u32;
pub const OUT: u32 = libc::EPOLLOUT as u32;
const ERR: u32 = libc::EPOLLERR as u32;
const HUP: u32 = libc::EPOLLHUP as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;
const PRI: u32 = libc::EPOLLPRI as u32;
const RDNORM: u32 = libc::EPOLLRDNORM as u32;
const WRNORM: u32 = libc::EPOLLWRNORM as u32;
const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// Links per set.
const LINKS: usize = 64;
/// Microseconds between two looks at the kernel while lanes are busy.
const LOOK_US: u64 = 20;

// Bits of `Reg::flags`.
const ACTIVE: u32 = 1; // in the inner set
const QUEUED: u32 = 2;
const EDGE_IN: u32 = 4; // something new to read since the last report
const EDGE_OUT: u32 = 8;
const DISABLED: u32 = 16; // one-shot, reported
const BLOCKED: u32 = 32; // waits for ring space
const FRESH: u32 = 128; // the inner set has yet to say what any new member says first
const PARKED: u32 = 64; // removed by the application; kept, for many remove and add in turn
const INHERITED: u32 = 512; // active in the parent, and in no set of the kernel's: see `adopt`
const KIN: u32 = 1024; // active, on a link of a process that this one descends from: see `sleep::look_at_kin`
const RINGED: u32 = 2048; // in the kernel's set, with news on a ring: see `adopted::tell`
const ABSENT: u32 = 256; // one-shot, reported, and since then taken from the lane: in no set of the kernel's

/// In `Set::asleep`: the set has lanes, and each of its links counts each thread asleep in it.
const HEARS: u32 = 1 << 31;

struct Set {
    used: AtomicU32,
    lock: AtomicU32,
    refs: AtomicU32,
    /// A number of it; once it has been duplicated, and when it is closed under its waiters, one of ours.
    epfd: AtomicI32,
    /// Not 0: the application has closed it, and threads are inside a wait on it: the last of them ends it.
    ending: AtomicU32,
    inner: AtomicI32,
    kick: AtomicI32,
    /// In a forked child: those of the parent's, plus 1 (0: none).
    theirs: [AtomicI32; 2],
    /// Not 0: in a forked child, which has not used the set yet.
    inherited: AtomicU32,
    /// Not 0: registrations may be [`RINGED`].
    ringed: AtomicU32,
    /// Not 0: there may be a child that uses it as well.
    shared: AtomicU32,
    /// Generation of the control connection that is in the inner set.
    ctl: AtomicI32,
    /// Threads inside a wait on this set.
    waiters: AtomicU32,
    /// Threads asleep in the kernel on this set, and [`HEARS`]: see `sleep::fall_asleep`.
    asleep: AtomicU32,
    lanes: AtomicU32,
    /// Registrations that are [`KIN`].
    kin: AtomicU32,
    /// Not 0: some connection has been registered here.
    tcp: AtomicU32,
    /// Not 0: a hooked call has waited on it. Whoever waits by calls that we do not see (with the instruction itself)
    /// would be told of nothing that lies on a lane, and of what is the shim's.
    waited: AtomicU32,
    /// Not 0: something was refused because of that.
    refused: AtomicU32,
    /// Nested, or watched in a way we do not serve.
    disqualified: AtomicU32,
    stirred: AtomicU32,
    /// Counts registrations that moved to the inner set: see `sleep::wait_lanes`.
    moves: AtomicU32,
    /// Counts the times that the kernel told the application all it had: see `Reg::armed_at`.
    told: AtomicU32,
    looked: AtomicU64,
    /// Not 0: the kernel's events have filled a wait, and it is the lanes' turn.
    filled: AtomicU32,
    spin: AtomicI32,
    head: AtomicU32,
    tail: AtomicU32,
    queued: AtomicU32,
    /// Counts registrations put into the queue: see `Harvest::pushes`.
    pushes: AtomicU32,
    /// Slots of `links` that were ever used: the rest need not be looked at.
    high: AtomicU32,
    /// Slots of `links` whose doorbell is out of sight: see `sleep::mute`.
    muted: AtomicU64,
    /// When an end of one of its connections is to be told (CLOCK_MONOTONIC, ms), see `ends`; 0: none.
    end_ms: AtomicU64,
    links: [AtomicU32; LINKS],
    groups: [AtomicU32; LINKS],
    seen: [[AtomicU32; GROUPS]; LINKS],
    chain: [[AtomicU32; GROUPS]; LINKS],
}

/// Sets that were ever used.
static USED: AtomicU32 = AtomicU32::new(0);
static SET_TABLE: AtomicPtr<Set> = AtomicPtr::new(core::ptr::null_mut());
const TAG: u64 = 0xd00b_e11d << 32;
const TAG_REG: u64 = 1 << 56;
const TAG_BELL: u64 = 2 << 56;
const TAG_KICK: u64 = 3 << 56;
const TAG_CTL: u64 = 4 << 56;

/// `data` of the inner set in the application's set: an address of ours plus a tag, which the
/// application has no reason to use.
fn mark() -> u64 {
    regs::address() ^ TAG
}

fn set_at(i: u32) -> &'static Set {
    // SAFETY: only reached with indices from `create`, after the table was made; masked in bounds.
    unsafe { &*SET_TABLE.load(Acquire).add(i as usize & (SETS - 1)) }
}

fn init() -> bool {
    for (t, bytes) in [
        (
            SET_TABLE.as_ptr() as *mut AtomicPtr<u8>,
            SETS * core::mem::size_of::<Set>(),
        ),
        (REG_TABLE.as_ptr() as *mut AtomicPtr<u8>, regs::TABLE_BYTES),
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
    for i in 0..SETS as u32 {
        let s = set_at(i);
        // (A thread may still be asleep in a set that was closed under it, and takes that back.)
        let free = s.used.load(Relaxed) == 0 && s.waiters.load(SeqCst) == 0;
        if free && s.used.compare_exchange(0, 1, AcqRel, Relaxed).is_ok() {
            USED.fetch_max(i + 1, Relaxed);
            s.epfd.store(fd, Relaxed);
            s.refs.store(1, Relaxed);
            for a in [&s.inner, &s.kick, &s.ctl] {
                a.store(-1, Relaxed);
            }
            for a in [
                &s.lanes,
                &s.kin,
                &s.disqualified,
                &s.stirred,
                &s.head,
                &s.tail,
                &s.queued,
                &s.lock,
                &s.high,
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
            s.muted.store(0, Relaxed);
            s.end_ms.store(0, Relaxed);
            for k in 0..LINKS {
                s.links[k].store(0, Relaxed);
                s.groups[k].store(0, Relaxed);
            }
            if !fdtab::set(fd, fdtab::Fd::Set(i)) {
                s.used.store(0, Release);
            }
            return;
        }
    }
}

/// The set has another descriptor. From now on we use one of our own: whichever of them is closed first, its
/// number may be another set's.
pub fn duplicated(i: u32) {
    let s = set_at(i);
    s.refs.fetch_add(1, Relaxed);
    if let Some(_g) = lock::lock(&s.lock) {
        take_copy(s);
    }
}

/// False: there is no descriptor for it. Set lock held.
fn take_copy(s: &Set) -> bool {
    let fd = s.epfd.load(Relaxed);
    if fdtab::get(fd) != fdtab::Fd::Ours {
        let Some(copy) = fdtab::hidden_copy(fd) else {
            return false;
        };
        s.epfd.store(copy, Relaxed);
    }
    true
}

/// A descriptor of the set is about to be closed. Threads that wait in it keep it, as in the kernel.
pub fn closed(i: u32) {
    let s = set_at(i);
    if s.refs.fetch_sub(1, AcqRel) != 1 {
        return;
    }
    let waited = match lock::lock(&s.lock) {
        Some(_g) => s.waiters.load(SeqCst) > 0 && take_copy(s),
        None => false,
    };
    // SYNC ending: it is to be ended by the last waiter, then we look whether there is one; a waiter
    // leaves, then looks whether it is to end the set.
    s.ending.store(1, SeqCst);
    if !waited || s.waiters.load(SeqCst) == 0 {
        ended(i, s);
    }
}

/// A thread is inside a wait on the set no more.
fn wait_over(i: u32, s: &Set) {
    if s.waiters.fetch_sub(1, SeqCst) == 1 && s.ending.load(SeqCst) != 0 {
        ended(i, s); // SYNC ending
    }
}

/// Nobody has or uses the set any more. (Of two who find that, one is here.)
#[cold]
fn ended(i: u32, s: &Set) {
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
        for k in 0..LINKS {
            if let Some(l) = set_link(s, k) {
                l.sets[i as usize / 64].fetch_and(!(1 << (i % 64)), SeqCst);
            }
        }
        sleepers::deafen(s);
        for f in [&s.inner, &s.kick] {
            fdtab::close_ours(f.swap(-1, Relaxed));
        }
        close_theirs(s);
        close_copy(s);
        s.lanes.store(0, Relaxed);
    }
    s.used.store(0, Release);
}

fn close_copy(s: &Set) {
    let fd = s.epfd.load(Relaxed);
    if fdtab::get(fd) == fdtab::Fd::Ours {
        fdtab::close_ours(fd);
    }
}

/// In a forked child: our copies of the parent's descriptors go.
fn close_theirs(s: &Set) {
    for f in &s.theirs {
        fdtab::close_ours(f.swap(0, Relaxed) - 1);
    }
}

/// The same for all sets, by a process that holds no connection any more.
pub fn give_up_inherited() {
    if !SET_TABLE.load(Relaxed).is_null() {
        (0..SETS as u32).for_each(|i| close_theirs(set_at(i)));
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

/// In a forked child: the kernel's sets are shared with the parent, whose lanes are not ours.
pub fn after_fork() {
    if SET_TABLE.load(Relaxed).is_null() {
        return;
    }
    for i in 0..SETS as u32 {
        let s = set_at(i);
        if s.used.load(Relaxed) != 0 {
            for a in [
                &s.lock, &s.waiters, &s.asleep, &s.lanes, &s.kin, &s.head, &s.tail, &s.queued,
            ] {
                a.store(0, Relaxed);
            }
            // The kernel's inner set is the parent's: its doorbells are not ours to drain.
            for (own, theirs) in [&s.inner, &s.kick].into_iter().zip(&s.theirs) {
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
            for k in 0..LINKS {
                s.links[k].store(0, Relaxed);
                s.groups[k].store(0, Relaxed);
            }
        }
    }
    regs::inherit_all();
}

/// The set is polled or nested: its sockets stay on, or go back to, TCP.
pub fn nest(i: u32) {
    let s = set_at(i);
    adopted(i, s);
    if s.disqualified.load(Relaxed) != 0 {
        return;
    }
    // Under the lock: whoever attaches a lane says so, then comes for the lock (`activate`) and does not find this.
    if let Some(_g) = lock::lock(&s.lock) {
        s.disqualified.store(1, Relaxed);
    }
    let inner = s.inner.load(Relaxed);
    if inner >= 0 {
        // Whoever watches the set from outside must not take the daemon's messages for events.
        let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_DEL, control::fd(), 0, 0);
    }
    table::each(|k, c| {
        if unservable(k) && c.flags.load(Relaxed) & flag::LANE != 0 {
            io::leave(
                k,
                table::local(k).fd.load(Relaxed),
                link::reason::Reason::EpollShared,
            );
        }
    });
    if let Some(_g) = lock::lock(&s.lock) {
        retire(s);
    }
}

/// Is its lane of a process that this one descends from?
fn is_inherited(c: &Conn) -> bool {
    c.owner_pid.load(Relaxed) != process::me()
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

/// Is the connection in a set that nobody has waited on, as far as we see?
pub fn unwaited(i: u32) -> bool {
    let mut any = false;
    regs::each(i, |r, set| {
        let own = reg_at(r).flags.load(Relaxed) & INHERITED == 0;
        any |= own && refuses(set_at(set));
    });
    any
}

/// Has nobody waited on it yet? Then the first who does makes up for what is refused.
fn refuses(s: &Set) -> bool {
    // SYNC waited: we say that something is refused, then look; who waits says so, then looks for that.
    s.waited.load(Relaxed) == 0 && {
        s.refused.store(1, SeqCst);
        s.waited.load(SeqCst) == 0
    }
}

/// A wait on a set begins.
#[inline(always)]
fn waited(i: u32, s: &Set) {
    if s.waited.load(Relaxed) == 0 {
        crate::preserving_errno(|| first_wait(i, s));
    }
}

/// It is the first one: its connections may be registered, and their lanes used.
#[cold]
fn first_wait(i: u32, s: &Set) {
    if s.waited.swap(1, SeqCst) != 0 || s.refused.load(SeqCst) == 0 {
        return; // SYNC waited
    }
    table::each(|k, c| {
        let mut here = false;
        regs::each(k, |_, set| here |= set == i);
        if here {
            promote::awaited(k, c);
            if let Some(link) = ctl::usable_lane(k) {
                activate(k, link);
                promote::try_ready(k, c, table::local(k));
            }
        }
    });
}

/// A non-blocking sender found no space: its sets report when there is some, and see to it that a
/// ring does not stay full for long.
#[cold]
pub fn blocked(conn: u32) {
    note(conn, OUT | WRNORM, BLOCKED | EDGE_OUT);
}

/// Something is on the connection's error queue: its sets report it, and with it, as the kernel does, all
/// that there is.
#[cold]
pub fn error_came(conn: u32) {
    note(conn, u32::MAX, EDGE_IN | EDGE_OUT);
    regs::each(conn, |_, set| kick_if_waiting(set as usize));
}

/// Queues the connection's registrations that watch for one of `events`, with what is news to them.
fn note(conn: u32, events: u32, news: u32) {
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
