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

use crate::links::{self, Link, Sock, SETS};
use crate::table::{self, Local};
use crate::{control, fdtab, io, lock, promote, sys, wait};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use libc::epoll_event;
use link::family::{flag, Conn};
use link::lane::{tx, wake, Memory};
use link::layout::{GROUP, GROUPS};
use link::prim::ticks;

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

const REGS: usize = 1 << 17;
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

/// A connection in a set.
struct Reg {
    set: AtomicU32,
    conn: AtomicU32,
    fd: AtomicI32,
    mask: AtomicU32,
    data: AtomicU64,
    flags: AtomicU32,
    /// Events of the TCP socket that nobody has looked into yet.
    tcp: AtomicU32,
    last_head: AtomicU64,
    slot: AtomicU32,
    next_conn: AtomicU32,
    next_group: AtomicU32,
    next_queue: AtomicU32,
}

struct Set {
    used: AtomicU32,
    lock: AtomicU32,
    refs: AtomicU32,
    epfd: AtomicI32,
    inner: AtomicI32,
    kick: AtomicI32,
    /// Generation of the control connection that is in the inner set.
    ctl: AtomicI32,
    /// Threads inside a wait on this set.
    waiters: AtomicU32,
    lanes: AtomicU32,
    /// Nested, or watched in a way we do not serve.
    barred: AtomicU32,
    stirred: AtomicU32,
    looked: AtomicU64,
    spin: AtomicI32,
    head: AtomicU32,
    tail: AtomicU32,
    queued: AtomicU32,
    /// Slots of `links` that were ever used: the rest need not be looked at.
    high: AtomicU32,
    links: [AtomicU32; LINKS],
    groups: [AtomicU32; LINKS],
    seen: [[AtomicU32; GROUPS]; LINKS],
    chain: [[AtomicU32; GROUPS]; LINKS],
}

static SET_TABLE: AtomicPtr<Set> = AtomicPtr::new(core::ptr::null_mut());
static REG_TABLE: AtomicPtr<Reg> = AtomicPtr::new(core::ptr::null_mut());
static REG_LOCK: AtomicU32 = AtomicU32::new(0);
static REG_FREE: AtomicU32 = AtomicU32::new(0);
static REG_USED: AtomicU32 = AtomicU32::new(0);

const TAG: u64 = 0xd00b_e11d << 32;
const TAG_REG: u64 = 1 << 56;
const TAG_BELL: u64 = 2 << 56;
const TAG_KICK: u64 = 3 << 56;
const TAG_CTL: u64 = 4 << 56;

/// `data` of the inner set in the application's set: an address of ours plus a tag, which the
/// application has no reason to use.
fn mark() -> u64 {
    (&REG_FREE as *const AtomicU32 as u64) ^ TAG
}

fn set_at(i: u32) -> &'static Set {
    // SAFETY: only reached with indices from `create`, after the table was made; masked in bounds.
    unsafe { &*SET_TABLE.load(Acquire).add(i as usize & (SETS - 1)) }
}

/// Registration by index + 1.
fn reg_at(i: u32) -> &'static Reg {
    // SAFETY: as above; index 0 is never dereferenced as "none" by callers, and stays in bounds.
    unsafe {
        &*REG_TABLE
            .load(Acquire)
            .add(i.wrapping_sub(1) as usize & (REGS - 1))
    }
}

fn init() -> bool {
    for (t, bytes) in [
        (
            SET_TABLE.as_ptr() as *mut AtomicPtr<u8>,
            SETS * core::mem::size_of::<Set>(),
        ),
        (
            REG_TABLE.as_ptr() as *mut AtomicPtr<u8>,
            REGS * core::mem::size_of::<Reg>(),
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
    for i in 0..SETS as u32 {
        let s = set_at(i);
        if s.used.load(Relaxed) == 0 && s.used.compare_exchange(0, 1, AcqRel, Relaxed).is_ok() {
            s.epfd.store(fd, Relaxed);
            s.refs.store(1, Relaxed);
            for a in [&s.inner, &s.kick, &s.ctl] {
                a.store(-1, Relaxed);
            }
            for a in [
                &s.waiters, &s.lanes, &s.barred, &s.stirred, &s.head, &s.tail, &s.queued, &s.lock,
                &s.high,
            ] {
                a.store(0, Relaxed);
            }
            s.spin.store(4, Relaxed);
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

pub fn duplicated(i: u32) {
    set_at(i).refs.fetch_add(1, Relaxed);
}

/// A descriptor of the set was closed.
pub fn closed(i: u32) {
    let s = set_at(i);
    if s.refs.fetch_sub(1, AcqRel) != 1 {
        return;
    }
    if let Some(_g) = lock::lock(&s.lock) {
        for r in 1..=REG_USED.load(Relaxed) {
            let reg = reg_at(r);
            if reg.conn.load(Relaxed) != 0 && reg.set.load(Relaxed) == i + 1 {
                unlink_conn(reg.conn.load(Relaxed) - 1, r);
                reg_free(r);
            }
        }
        for k in 0..LINKS {
            if let Some(l) = set_link(s, k) {
                l.sets[i as usize / 64].fetch_and(!(1 << (i % 64)), SeqCst);
            }
        }
        for f in [&s.inner, &s.kick] {
            fdtab::close_ours(f.swap(-1, Relaxed));
        }
        s.lanes.store(0, Relaxed);
    }
    s.used.store(0, Release);
}

/// In a forked child: the kernel's sets are shared with the parent, whose lanes are not ours.
pub fn after_fork() {
    if SET_TABLE.load(Relaxed).is_null() {
        return;
    }
    for i in 0..SETS as u32 {
        let s = set_at(i);
        if s.used.load(Relaxed) != 0 {
            for a in [&s.lock, &s.waiters, &s.lanes, &s.head, &s.tail, &s.queued] {
                a.store(0, Relaxed);
            }
            // The kernel's inner set is the parent's: its doorbells are not ours to drain.
            s.inner.store(-1, Relaxed);
            s.kick.store(-1, Relaxed);
            s.barred.store(1, Relaxed); // shared across fork: its sockets stay on TCP here
            for k in 0..LINKS {
                s.links[k].store(0, Relaxed);
                s.groups[k].store(0, Relaxed);
            }
        }
    }
    REG_LOCK.store(0, Relaxed);
    for r in 1..=REG_USED.load(Relaxed) {
        let reg = reg_at(r);
        let c = reg.conn.load(Relaxed);
        if c != 0 {
            table::local(c - 1).regs.store(0, Relaxed);
            reg_free(r);
        }
    }
}

/// The set is polled or nested: its sockets stay on, or go back to, TCP.
pub fn nest(i: u32) {
    let s = set_at(i);
    if s.barred.swap(1, Relaxed) != 0 {
        return;
    }
    promote::each(|k, c| {
        if unservable(k) && c.flags.load(Relaxed) & flag::LANE != 0 {
            io::leave(
                k,
                table::local(k).fd.load(Relaxed),
                link::reason::Reason::EpollShared,
            );
        }
    });
}

/// Is the connection watched in a way that a lane cannot serve?
pub fn unservable(i: u32) -> bool {
    let mut r = table::local(i).regs.load(Acquire);
    while r != 0 {
        let reg = reg_at(r);
        let s = reg.set.load(Relaxed);
        if s == 0 {
            r = reg.next_conn.load(Relaxed);
            continue;
        }
        if set_at(s - 1).barred.load(Relaxed) != 0 || reg.mask.load(Relaxed) & EXCLUSIVE != 0 {
            return true;
        }
        r = reg.next_conn.load(Relaxed);
    }
    false
}

fn reg_alloc() -> Option<u32> {
    let _g = lock::lock(&REG_LOCK)?;
    let f = REG_FREE.load(Relaxed);
    if f != 0 {
        REG_FREE.store(reg_at(f).next_conn.load(Relaxed), Relaxed);
        return Some(f);
    }
    let n = REG_USED.load(Relaxed) + 1;
    if n as usize > REGS {
        return None;
    }
    REG_USED.store(n, Relaxed);
    Some(n)
}

fn reg_free(r: u32) {
    if let Some(_g) = lock::lock(&REG_LOCK) {
        let reg = reg_at(r);
        reg.conn.store(0, Relaxed);
        reg.set.store(0, Relaxed);
        reg.flags.store(0, Relaxed);
        reg.next_conn.store(REG_FREE.load(Relaxed), Relaxed);
        REG_FREE.store(r, Relaxed);
    }
}

fn find(conn: u32, set: u32, fd: i32) -> Option<u32> {
    let mut r = table::local(conn).regs.load(Acquire);
    while r != 0 {
        let reg = reg_at(r);
        if reg.set.load(Relaxed) == set + 1 && reg.fd.load(Relaxed) == fd {
            return Some(r);
        }
        r = reg.next_conn.load(Relaxed);
    }
    None
}

fn unlink_conn(conn: u32, r: u32) {
    let l = table::local(conn);
    let Some(_g) = lock::lock(&l.regs_lock) else {
        return;
    };
    let mut at = &l.regs;
    loop {
        let k = at.load(Relaxed);
        if k == 0 {
            return;
        }
        if k == r {
            at.store(reg_at(r).next_conn.load(Relaxed), Release);
            return;
        }
        at = &reg_at(k).next_conn;
    }
}

/// `epoll_ctl` on a connection. `native` makes the application's own call.
pub fn ctl(
    set: u32,
    op: i32,
    fd: i32,
    conn: u32,
    ev: Option<epoll_event>,
    native: impl Fn() -> i32,
) -> i32 {
    let s = set_at(set);
    let found = find(conn, set, fd);
    let parked = found.is_some_and(|r| reg_at(r).flags.load(Relaxed) & PARKED != 0);
    match (op, found, ev) {
        (libc::EPOLL_CTL_ADD, Some(r), Some(ev)) if parked => {
            let Some(_g) = lock::lock(&s.lock) else {
                return native();
            };
            rearm(s, r, ev);
            0
        }
        (libc::EPOLL_CTL_ADD, Some(r), Some(_)) if reg_at(r).flags.load(Relaxed) & ACTIVE != 0 => {
            crate::set_errno(libc::EEXIST);
            -1
        }
        (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, _, _) if parked => {
            crate::set_errno(libc::ENOENT);
            -1
        }
        (libc::EPOLL_CTL_ADD, None, Some(ev)) => {
            let r = native();
            if r == 0 {
                io::quietly(|| add(set, fd, conn, ev));
            }
            r
        }
        (libc::EPOLL_CTL_MOD, Some(r), Some(ev)) => {
            let reg = reg_at(r);
            let Some(_g) = lock::lock(&s.lock) else {
                return native();
            };
            if reg.flags.load(Relaxed) & ACTIVE == 0 {
                let n = native();
                if n == 0 {
                    reg.mask.store(ev.events, Relaxed);
                    reg.data.store(ev.u64, Relaxed);
                    drop(_g);
                    io::quietly(|| armed(set, conn, r));
                }
                return n;
            }
            // Answered here: programs toggle EPOLLOUT on every request.
            rearm(s, r, ev);
            0
        }
        (libc::EPOLL_CTL_DEL, Some(r), _) => {
            let reg = reg_at(r);
            let n = {
                let Some(_g) = lock::lock(&s.lock) else {
                    return native();
                };
                if reg.flags.load(Relaxed) & ACTIVE != 0 {
                    reg.flags.fetch_or(PARKED, Relaxed);
                    reg.mask.store(0, Relaxed);
                    return 0;
                }
                native()
            };
            if n == 0 {
                io::quietly(|| {
                    unlink_conn(conn, r);
                    reg_free(r);
                });
            }
            n
        }
        _ => native(),
    }
}

/// A new mask for an active registration: everything counts as news again. Set lock held.
fn rearm(s: &Set, r: u32, ev: epoll_event) {
    let reg = reg_at(r);
    reg.mask.store(ev.events, Relaxed);
    reg.data.store(ev.u64, Relaxed);
    reg.flags.fetch_and(!(DISABLED | PARKED), Relaxed);
    reg.flags.fetch_or(EDGE_IN | EDGE_OUT, Relaxed);
    push(s, r);
    if s.waiters.load(SeqCst) > 0 {
        sys::poke(s.kick.load(Relaxed)); // another thread sleeps on what may be ready already
    }
}

/// A non-blocking sender found no space: its sets report when there is some, and see to it that a
/// ring does not stay full for long.
#[cold]
pub fn blocked(conn: u32) {
    let mut r = table::local(conn).regs.load(Acquire);
    while r != 0 {
        let reg = reg_at(r);
        let set = reg.set.load(Relaxed);
        if set != 0 && reg.mask.load(Relaxed) & (OUT | WRNORM) != 0 {
            let s = set_at(set - 1);
            if let Some(_g) = lock::lock(&s.lock) {
                if reg.conn.load(Relaxed) == conn + 1 && reg.flags.load(Relaxed) & ACTIVE != 0 {
                    reg.flags.fetch_or(BLOCKED | EDGE_OUT, Relaxed);
                    push(s, r);
                }
            }
        }
        r = reg.next_conn.load(Relaxed);
    }
}

/// The application has just armed a registration: it may move to the inner set.
fn armed(set: u32, conn: u32, r: u32) {
    let c = table::conn(conn);
    if c.flags.load(Relaxed) & (flag::LANE | flag::BARRED | flag::HELD) == flag::LANE {
        if let Some((link, _)) = promote::lane(c, table::local(conn)) {
            activate_one(set, conn, r, link);
        }
    }
}

fn add(set: u32, fd: i32, conn: u32, ev: epoll_event) {
    let l = table::local(conn);
    let Some(r) = reg_alloc() else {
        return table::bar(table::conn(conn), link::reason::Reason::EpollShared);
    };
    let reg = reg_at(r);
    reg.set.store(set + 1, Relaxed);
    reg.conn.store(conn + 1, Relaxed);
    reg.fd.store(fd, Relaxed);
    reg.mask.store(ev.events, Relaxed);
    reg.data.store(ev.u64, Relaxed);
    reg.flags.store(0, Relaxed);
    reg.tcp.store(0, Relaxed);
    if let Some(_g) = lock::lock(&l.regs_lock) {
        reg.next_conn.store(l.regs.load(Relaxed), Relaxed);
        l.regs.store(r, Release);
    }
    let c = table::conn(conn);
    if c.flags.load(Relaxed) & flag::LANE != 0 {
        if unservable(conn) {
            io::leave(conn, fd, link::reason::Reason::EpollShared);
        } else {
            armed(set, conn, r);
        }
    }
}

/// Slots to look at.
#[inline(always)]
fn slots(s: &Set) -> usize {
    (s.high.load(Relaxed) as usize).min(LINKS)
}

/// The link is about to be given back: no set watches it any more.
pub fn unbind(link: &Link) {
    if SET_TABLE.load(Relaxed).is_null() {
        return;
    }
    let want = links::index(link) as u32 + 1;
    for i in 0..SETS as u32 {
        let s = set_at(i);
        if s.used.load(Relaxed) == 0 {
            continue;
        }
        let Some(_g) = lock::lock(&s.lock) else {
            continue;
        };
        for k in 0..slots(s) {
            if s.links[k].load(Relaxed) == want {
                let inner = s.inner.load(Relaxed);
                let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_DEL, link.bell(), 0, 0);
                s.links[k].store(0, Release);
                s.groups[k].store(0, Relaxed);
            }
        }
    }
}

fn set_link(s: &Set, k: usize) -> Option<&'static Link> {
    match s.links[k].load(Acquire) {
        0 => None,
        n => links::by_index(n as usize - 1),
    }
}

/// The connection got a lane on `link`: its registrations move to inner sets. Idempotent. False if
/// one of them could not: then nobody may be told that this end is ready.
///
/// A one-shot registration moves only when the application arms it: whether the kernel has used it
/// up already cannot be seen.
pub fn activate(conn: u32, link: &Link) -> bool {
    let mut all = true;
    let mut r = table::local(conn).regs.load(Acquire);
    while r != 0 {
        let reg = reg_at(r);
        let s = reg.set.load(Relaxed);
        if s != 0 && reg.flags.load(Relaxed) & ACTIVE == 0 {
            all &= reg.mask.load(Relaxed) & ONESHOT == 0 && activate_one(s - 1, conn, r, link);
        }
        r = reg.next_conn.load(Relaxed);
    }
    all
}

fn activate_one(set: u32, conn: u32, r: u32, link: &Link) -> bool {
    let s = set_at(set);
    let reg = reg_at(r);
    let Some(_g) = lock::lock(&s.lock) else {
        return false;
    };
    // Looked up without the lock: it may be another's by now, or done.
    if reg.set.load(Relaxed) != set + 1 || reg.conn.load(Relaxed) != conn + 1 {
        return true;
    }
    if reg.flags.load(Relaxed) & ACTIVE != 0 {
        return true;
    }
    let Some(k) = bind(s, set, link) else {
        s.barred.store(1, Relaxed); // too many links, or no descriptors: what is there stays
        return false;
    };
    let (epfd, inner, fd) = (
        s.epfd.load(Relaxed),
        s.inner.load(Relaxed),
        reg.fd.load(Relaxed),
    );
    let events = IN | OUT | RDHUP | libc::EPOLLPRI as u32 | ET;
    if sys::epoll_ctl(
        inner,
        libc::EPOLL_CTL_ADD,
        fd,
        events,
        TAG_REG | u64::from(r),
    )
    .is_err()
    {
        return false;
    }
    let _ = sys::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, 0, 0);
    let lane = table::conn(conn).lane.load(Relaxed) as usize;
    let g = (lane / GROUP).min(GROUPS - 1);
    reg.slot.store((k * GROUPS + g) as u32, Relaxed);
    reg.next_group.store(s.chain[k][g].load(Relaxed), Relaxed);
    if s.groups[k].load(Relaxed) & (1 << g) == 0 {
        s.chain[k][g].store(0, Relaxed);
        reg.next_group.store(0, Relaxed);
        s.groups[k].fetch_or(1 << g, Relaxed);
    }
    s.chain[k][g].store(r, Relaxed);
    reg.last_head.store(u64::MAX, Relaxed);
    reg.tcp.store(0, Relaxed);
    // The inner set will say that TCP has space, if it has: no news. If it has not, that is.
    let space = sys::poll1(fd, libc::POLLOUT) & libc::POLLOUT != 0;
    let fresh = if space { FRESH } else { 0 };
    reg.flags
        .store(ACTIVE | fresh | EDGE_IN | EDGE_OUT, Relaxed);
    push(s, r);
    s.lanes.fetch_add(1, SeqCst);
    kick_if_waiting(set as usize);
    true
}

/// Makes sure that the set has its inner set, and the link's doorbell in it. Slot of the link.
fn bind(s: &Set, set: u32, link: &Link) -> Option<usize> {
    if s.inner.load(Relaxed) < 0 {
        let inner = fdtab::hide(sys::epoll_create().ok()?);
        let Ok(kick) = sys::eventfd() else {
            fdtab::close_ours(inner);
            return None;
        };
        let kick = fdtab::hide(kick);
        let ok = sys::epoll_ctl(inner, libc::EPOLL_CTL_ADD, kick, IN, TAG_KICK).is_ok()
            && sys::epoll_ctl(s.epfd.load(Relaxed), libc::EPOLL_CTL_ADD, inner, IN, mark()).is_ok();
        if !ok {
            fdtab::close_ours(inner);
            fdtab::close_ours(kick);
            return None;
        }
        s.kick.store(kick, Relaxed);
        s.inner.store(inner, Release);
    }
    let want = links::index(link) as u32 + 1;
    let mut free = None;
    for k in 0..LINKS {
        match s.links[k].load(Relaxed) {
            n if n == want => return Some(k),
            0 if free.is_none() => free = Some(k),
            _ => {}
        }
    }
    let k = free?;
    let data = TAG_BELL | u64::from(want - 1);
    match sys::epoll_ctl(
        s.inner.load(Relaxed),
        libc::EPOLL_CTL_ADD,
        link.bell(),
        IN,
        data,
    ) {
        Ok(()) | Err(libc::EEXIST) => {}
        Err(_) => return None,
    }
    link.sets[set as usize / 64].fetch_or(1 << (set % 64), SeqCst);
    s.groups[k].store(0, Relaxed);
    s.links[k].store(want, Release);
    s.high.fetch_max(k as u32 + 1, Release);
    Some(k)
}

/// Takes an active registration out of chain, queue and count. Set lock held.
fn detach(s: &Set, r: u32) {
    let reg = reg_at(r);
    let slot = reg.slot.load(Relaxed) as usize;
    let mut at = &s.chain[(slot / GROUPS).min(LINKS - 1)][slot % GROUPS];
    loop {
        let k = at.load(Relaxed);
        if k == 0 {
            break;
        }
        if k == r {
            at.store(reg.next_group.load(Relaxed), Relaxed);
            break;
        }
        at = &reg_at(k).next_group;
    }
    if reg.flags.load(Relaxed) & QUEUED != 0 {
        let mut at = &s.head;
        let mut prev = 0;
        loop {
            let k = at.load(Relaxed);
            if k == 0 {
                break;
            }
            if k == r {
                at.store(reg.next_queue.load(Relaxed), Relaxed);
                if s.tail.load(Relaxed) == r {
                    s.tail.store(prev, Relaxed);
                }
                s.queued.fetch_sub(1, Relaxed);
                break;
            }
            prev = k;
            at = &reg_at(k).next_queue;
        }
    }
    reg.flags.store(0, Relaxed);
    s.lanes.fetch_sub(1, SeqCst);
}

/// Both directions are on TCP for good: registrations go back to the application's own set.
pub fn deactivate(conn: u32) {
    let mut r = table::local(conn).regs.load(Acquire);
    while r != 0 {
        let reg = reg_at(r);
        let set = reg.set.load(Relaxed);
        if set != 0 {
            let s = set_at(set - 1);
            if let Some(_g) = lock::lock(&s.lock) {
                if reg.conn.load(Relaxed) == conn + 1 && reg.flags.load(Relaxed) & ACTIVE != 0 {
                    let disabled = reg.flags.load(Relaxed) & DISABLED != 0;
                    let parked = reg.flags.load(Relaxed) & PARKED != 0;
                    let fd = reg.fd.load(Relaxed);
                    let _ = sys::epoll_ctl(s.inner.load(Relaxed), libc::EPOLL_CTL_DEL, fd, 0, 0);
                    detach(s, r);
                    if parked {
                        reg.set.store(0, Relaxed); // no longer a registration; freed at close
                        r = reg.next_conn.load(Relaxed);
                        continue;
                    }
                    let mask = if disabled {
                        ONESHOT
                    } else {
                        reg.mask.load(Relaxed)
                    };
                    let _ = sys::epoll_ctl(
                        s.epfd.load(Relaxed),
                        libc::EPOLL_CTL_ADD,
                        fd,
                        mask,
                        reg.data.load(Relaxed),
                    );
                }
            }
        }
        r = reg.next_conn.load(Relaxed);
    }
}

/// The last descriptor of the connection is about to be closed.
pub fn forget(conn: u32) {
    loop {
        let r = table::local(conn).regs.load(Acquire);
        if r == 0 {
            return;
        }
        let reg = reg_at(r);
        let set = reg.set.load(Relaxed);
        if set != 0 {
            let s = set_at(set - 1);
            if let Some(_g) = lock::lock(&s.lock) {
                if reg.flags.load(Relaxed) & ACTIVE != 0 {
                    let _ = sys::epoll_ctl(
                        s.inner.load(Relaxed),
                        libc::EPOLL_CTL_DEL,
                        reg.fd.load(Relaxed),
                        0,
                        0,
                    );
                    detach(s, r);
                }
            }
        }
        unlink_conn(conn, r);
        reg_free(r);
    }
}

/// Something about the connection changed from outside: its sets look at it again.
pub fn stir(conn: u32) {
    let mut r = table::local(conn).regs.load(Acquire);
    while r != 0 {
        let reg = reg_at(r);
        let set = reg.set.load(Relaxed);
        if set != 0 {
            set_at(set - 1).stirred.store(1, SeqCst);
            kick_if_waiting(set as usize - 1);
        }
        r = reg.next_conn.load(Relaxed);
    }
}

/// Wakes whoever sleeps in the kernel on this set.
pub fn kick_if_waiting(set: usize) {
    let s = set_at(set as u32);
    if s.waiters.load(SeqCst) > 0 {
        let k = s.kick.load(Relaxed);
        if k >= 0 {
            sys::poke(k);
        }
    }
}

fn push(s: &Set, r: u32) {
    let reg = reg_at(r);
    if reg.flags.fetch_or(QUEUED, Relaxed) & QUEUED != 0 {
        return;
    }
    reg.next_queue.store(0, Relaxed);
    match s.tail.load(Relaxed) {
        0 => s.head.store(r, Relaxed),
        t => reg_at(t).next_queue.store(r, Relaxed),
    }
    s.tail.store(r, Relaxed);
    s.queued.fetch_add(1, Relaxed);
}

fn pop(s: &Set) -> u32 {
    let r = s.head.load(Relaxed);
    if r != 0 {
        let reg = reg_at(r);
        let next = reg.next_queue.load(Relaxed);
        s.head.store(next, Relaxed);
        if next == 0 {
            s.tail.store(0, Relaxed);
        }
        reg.flags.fetch_and(!QUEUED, Relaxed);
        s.queued.fetch_sub(1, Relaxed);
    }
    r
}

/// What a poll of a promoted connection says, now. `tcp`: events TCP has reported and that were
/// not looked into yet; bits that turned out to be nothing are removed.
/// `None`: somebody else is at work on it this moment.
pub fn state(c: &Conn, l: &Local, fd: i32, want: u32, tcp: &mut u32) -> Option<u32> {
    let (link, m) = promote::lane(c, l)?;
    let port = Sock { fd, link };
    let mut ev = 0;
    match c.rx.ready(&m) {
        Some(true) => ev |= IN,
        _ if *tcp & (IN | RDHUP | HUP | ERR) != 0 || c.rx.stirs(&m) => {
            let _g = lock::try_lock(&c.rx.lock)?;
            match c.rx.probe(&m, &port) {
                Some(true) => ev |= IN,
                Some(false) => *tcp &= !IN,
                None if sys::poll1(fd, libc::POLLIN) & libc::POLLIN != 0 => ev |= IN,
                None => *tcp &= !IN,
            }
        }
        _ => {}
    }
    if *tcp & (IN | RDHUP | HUP | ERR) != 0 {
        // The reader who comes for this must ask TCP, however shortly ago it did.
        c.rx.looked.store(0, Relaxed);
    }
    if *tcp & (RDHUP | HUP | ERR) != 0 {
        let p = sys::poll1(fd, libc::POLLRDHUP) as u32;
        ev |= p & (RDHUP | HUP | ERR);
        *tcp = (*tcp & !(RDHUP | HUP | ERR)) | (p & (RDHUP | HUP | ERR));
        if ev & (RDHUP | HUP | ERR) != 0 && want & IN != 0 && ev & IN == 0 && !c.rx.is_up() {
            ev |= sys::poll1(fd, libc::POLLIN) as u32 & IN;
        }
    }
    if *tcp & PRI != 0 {
        let p = sys::poll1(fd, libc::POLLPRI) as u32 & PRI;
        ev |= p;
        *tcp = (*tcp & !PRI) | p;
    }
    promote::attend(c, link, &m, fd);
    if want & OUT != 0 {
        let up = c.tx.mode.load(Relaxed) == tx::mode::RING;
        let ok = if up {
            writable(c, l, link, fd, &m)
        } else {
            if c.tx.mode.load(Relaxed) == tx::mode::DRAIN {
                let _g = lock::try_lock(&c.tx.lock)?;
                let _ = c.tx.look(&m, &port);
            }
            c.tx.mode.load(Relaxed) == tx::mode::TCP
                && sys::poll1(fd, libc::POLLOUT) & libc::POLLOUT != 0
        };
        if ok {
            ev |= OUT;
        }
    }
    Some(ev)
}

/// Ring space, or after too long without: down to TCP, which has larger buffers.
fn writable(c: &Conn, l: &Local, link: &Link, fd: i32, m: &Memory) -> bool {
    if c.tx.writable(m) {
        return true;
    }
    if io::full_for_long(c, l) {
        io::go_down_full(c, link, fd, m);
        return !promote::engaged_tx(c) && sys::poll1(fd, libc::POLLOUT) & libc::POLLOUT != 0;
    }
    c.tx.want_space(m)
}

/// Outcome of a harvest: events written, and whether somebody was in the way.
#[derive(Default)]
struct Harvest {
    n: usize,
    busy: bool,
    blocked: bool,
}

fn harvest(i: u32, s: &Set, evs: *mut epoll_event, max: usize) -> Harvest {
    let mut h = Harvest::default();
    let mut leaving = [0u32; 8];
    let mut nleaving = 0;
    {
        let Some(_g) = lock::lock(&s.lock) else {
            return h;
        };
        gather(s, s.stirred.swap(0, SeqCst) != 0);
        let rounds = s.queued.load(Relaxed);
        for _ in 0..rounds {
            if h.n >= max {
                // Somebody else may have time for the rest.
                if s.waiters.load(SeqCst) > 1 {
                    sys::poke(s.kick.load(Relaxed));
                }
                break;
            }
            let r = pop(s);
            if r == 0 {
                break;
            }
            let reg = reg_at(r);
            let conn = reg.conn.load(Relaxed);
            if conn == 0 || reg.flags.load(Relaxed) & ACTIVE == 0 {
                continue;
            }
            let (c, l) = (table::conn(conn - 1), table::local(conn - 1));
            let flags = reg.flags.load(Relaxed);
            if flags & (DISABLED | PARKED) != 0 {
                continue;
            }
            let mask = reg.mask.load(Relaxed);
            let want = (mask & (IN | OUT | RDHUP))
                | if mask & RDNORM != 0 { IN } else { 0 }
                | if mask & WRNORM != 0 { OUT } else { 0 };
            let mut tcp = reg.tcp.load(Relaxed);
            let Some(ev) = state(c, l, reg.fd.load(Relaxed), want, &mut tcp) else {
                h.busy = true;
                push(s, r);
                continue;
            };
            reg.tcp.store(tcp, Relaxed);
            let blocked = want & OUT != 0 && ev & OUT == 0 && c.tx.is_up();
            let mut told = ev & (mask | ERR | HUP)
                | if ev & IN != 0 { mask & RDNORM } else { 0 }
                | if ev & OUT != 0 { mask & WRNORM } else { 0 };
            if mask & ET != 0 {
                let reads = IN | PRI | RDNORM | RDHUP | HUP | ERR;
                let fresh = if flags & EDGE_IN != 0 { reads } else { 0 }
                    | if flags & (EDGE_OUT | BLOCKED) != 0 {
                        OUT | WRNORM
                    } else {
                        0
                    };
                if told & fresh == 0 {
                    told = 0;
                }
            }
            let keep_flags = reg.flags.load(Relaxed) & !(EDGE_IN | EDGE_OUT | BLOCKED);
            reg.flags.store(
                keep_flags
                    | if blocked { BLOCKED } else { 0 }
                    | if told == 0 && want & OUT == 0 {
                        flags & EDGE_OUT
                    } else {
                        0
                    },
                Relaxed,
            );
            if blocked {
                h.blocked = true;
            }
            if told != 0 {
                // SAFETY: `n < max`, the application's array holds `max` events.
                unsafe {
                    evs.add(h.n).write_unaligned(epoll_event {
                        events: told,
                        u64: reg.data.load(Relaxed),
                    })
                };
                h.n += 1;
                if mask & ONESHOT != 0 {
                    reg.flags.fetch_or(DISABLED, Relaxed);
                } else if mask & ET == 0 || blocked {
                    push(s, r);
                }
            } else if blocked {
                push(s, r);
            }
            if nleaving < leaving.len()
                && c.flags.load(Relaxed) & (flag::HELD | flag::BARRED) != 0
                && !promote::engaged(c)
            {
                leaving[nleaving] = conn;
                nleaving += 1;
            }
        }
    }
    let _ = i;
    for conn in leaving.iter().take(nleaving) {
        deactivate(conn - 1);
    }
    h
}

/// Queues every registration with news in the peer's memory. Set lock held.
fn gather(s: &Set, all: bool) {
    for k in 0..slots(s) {
        let Some(l) = set_link(s, k) else {
            continue;
        };
        let Some(ctl) = l.peer.control() else {
            continue;
        };
        let mut groups = s.groups[k].load(Relaxed);
        while groups != 0 {
            let g = groups.trailing_zeros() as usize;
            groups &= groups - 1;
            let seq = wake::counter(&ctl.seq[g].0);
            if seq == s.seen[k][g].load(Relaxed) && !all {
                continue;
            }
            s.seen[k][g].store(seq, Relaxed);
            let mut r = s.chain[k][g].load(Relaxed);
            while r != 0 {
                let reg = reg_at(r);
                news(s, r, reg, all);
                r = reg.next_group.load(Relaxed);
            }
        }
    }
}

fn news(s: &Set, r: u32, reg: &Reg, all: bool) {
    let conn = reg.conn.load(Relaxed);
    if conn == 0 {
        return;
    }
    let c = table::conn(conn - 1);
    let Some((_, m)) = promote::lane(c, table::local(conn - 1)) else {
        return;
    };
    let head = m.peer_head().load(Acquire);
    let moved = head != reg.last_head.load(Relaxed);
    if moved || all || c.tx.has_work(&m) || c.rx.stirs(&m) || reg.flags.load(Relaxed) & BLOCKED != 0
    {
        if moved || all {
            reg.last_head.store(head, Relaxed);
            reg.flags.fetch_or(EDGE_IN, Relaxed);
        }
        if all {
            reg.flags.fetch_or(EDGE_OUT, Relaxed);
            reg.tcp.fetch_or(IN | RDHUP | HUP | ERR, Relaxed);
        }
        push(s, r);
    }
}

/// Has any group that this set watches changed? Reads only; no lock.
fn changed(s: &Set) -> bool {
    for k in 0..slots(s) {
        let Some(l) = set_link(s, k) else {
            continue;
        };
        let Some(ctl) = l.peer.control() else {
            continue;
        };
        let mut groups = s.groups[k].load(Relaxed);
        while groups != 0 {
            let g = groups.trailing_zeros() as usize;
            groups &= groups - 1;
            if wake::counter(&ctl.seq[g].0) != s.seen[k][g].load(Relaxed) {
                return true;
            }
        }
    }
    false
}

/// Takes what the inner set reports.
fn inner(i: u32, s: &Set) {
    let mut evs = [epoll_event { events: 0, u64: 0 }; 64];
    let fd = s.inner.load(Acquire);
    if fd < 0 {
        return;
    }
    let n = sys::epoll_poll(fd, evs.as_mut_ptr(), evs.len() as i32).unwrap_or(0);
    for e in evs.iter().take(n) {
        let (events, data) = (e.events, e.u64);
        let low = data as u32;
        match data & (0xff << 56) {
            TAG_REG => {
                let Some(_g) = lock::lock(&s.lock) else {
                    return;
                };
                let reg = reg_at(low);
                if reg.set.load(Relaxed) == i + 1 && reg.flags.load(Relaxed) & ACTIVE != 0 {
                    reg.tcp
                        .fetch_or(events & (IN | PRI | RDHUP | HUP | ERR), Relaxed);
                    let fresh = reg.flags.fetch_and(!FRESH, Relaxed) & FRESH != 0;
                    let mut edges = 0;
                    if events & (IN | PRI | RDHUP | HUP | ERR) != 0 {
                        edges |= EDGE_IN;
                    }
                    // TCP's buffer has space: news only to who sends there, and had none.
                    let sends = table::conn(reg.conn.load(Relaxed).wrapping_sub(1));
                    if events & OUT != 0 && !fresh && !sends.tx.is_up() {
                        edges |= EDGE_OUT;
                    }
                    reg.flags.fetch_or(edges, Relaxed);
                    push(s, low);
                }
            }
            TAG_BELL => {
                if let Some(l) = links::by_index(low as usize) {
                    if l.drain_bell() == link::doorbell::Drained::Gone {
                        let _ = sys::epoll_ctl(fd, libc::EPOLL_CTL_DEL, l.bell(), 0, 0);
                        l.state.store(links::GONE, Release);
                        promote::peer_gone(l);
                    }
                    wait::forward(l, None, Some(i as usize));
                }
            }
            TAG_KICK => {
                let mut b = [0u8; 8];
                let _ = sys::read(s.kick.load(Relaxed), b.as_mut_ptr(), 8);
            }
            TAG_CTL => control::pump(),
            _ => {}
        }
    }
}

/// Removes the inner set's own entry from what the kernel returned. True if it was there.
///
/// # Safety
/// `evs` holds `*n` events.
unsafe fn strip(evs: *mut epoll_event, n: &mut usize) -> bool {
    for k in 0..*n {
        // SAFETY: `k < n`.
        let e = unsafe { evs.add(k).read_unaligned() };
        if { e.u64 } == mark() {
            *n -= 1;
            // SAFETY: both indices are below the old `n`.
            unsafe { evs.add(k).write_unaligned(evs.add(*n).read_unaligned()) };
            return true;
        }
    }
    false
}

/// `epoll_wait` and its relatives. `native(evs, max, ms)` is the application's own call with
/// another time-out; it blocks and is a cancellation point.
///
/// # Safety
/// `evs` is the application's array of `max` events.
pub unsafe fn wait(
    i: u32,
    evs: *mut epoll_event,
    max: i32,
    timeout_ms: i64,
    native: impl Fn(*mut epoll_event, i32, i64) -> i32,
) -> i32 {
    if control::pending() {
        control::pump();
    }
    if control::lost() {
        promote::find_daemon();
    }
    let s = set_at(i);
    if max <= 0 || evs.is_null() {
        return native(evs, max, timeout_ms);
    }
    let max_n = max as usize;
    let start = sys::now_ns();
    s.waiters.fetch_add(1, SeqCst);
    if s.lanes.load(SeqCst) == 0 {
        let r = native(evs, max, timeout_ms);
        let mut n = r.max(0) as usize;
        // SAFETY: the kernel wrote `n` events.
        let ours = r > 0 && unsafe { strip(evs, &mut n) };
        if ours && n == 0 && s.inner.load(Relaxed) < 0 {
            // Only the parent's inner set is ready, for the parent: do not turn in a circle.
            sys::poll_ms(-1, 0, 1);
        }
        if !ours || n > 0 {
            s.waiters.fetch_sub(1, SeqCst);
            if ours {
                io::quietly(|| inner(i, s));
            }
            return if r < 0 { r } else { n as i32 };
        }
        io::quietly(|| inner(i, s));
    }
    // SAFETY: passed on.
    let r = unsafe { wait_lanes(i, s, evs, max_n, timeout_ms, start, native) };
    s.waiters.fetch_sub(1, SeqCst);
    r
}

/// What the kernel has ready in the application's set, and in the inner one. Number of events.
///
/// # Safety
/// `evs` is the application's array of `max` events.
unsafe fn look_at_kernel(i: u32, s: &Set, evs: *mut epoll_event, max: usize) -> usize {
    s.looked.store(ticks(), Relaxed);
    let mut n = sys::epoll_poll(s.epfd.load(Relaxed), evs, max as i32).unwrap_or(0);
    // SAFETY: the kernel wrote `n` events.
    if n > 0 && unsafe { strip(evs, &mut n) } {
        inner(i, s);
    }
    n
}

/// # Safety
/// As [`wait`].
unsafe fn wait_lanes(
    i: u32,
    s: &Set,
    evs: *mut epoll_event,
    max: usize,
    timeout_ms: i64,
    start: u64,
    native: impl Fn(*mut epoll_event, i32, i64) -> i32,
) -> i32 {
    let mut last = false;
    loop {
        // The kernel first when its turn has come, so that busy lanes starve nobody; then the lanes,
        // once, so that none is listed twice.
        let due = ticks().wrapping_sub(s.looked.load(Relaxed)) > LOOK_US * wait::cycles_per_us();
        let mut n = if due {
            // SAFETY: the application's array of `max` events.
            unsafe { look_at_kernel(i, s, evs, max) }
        } else {
            0
        };
        let mut h = Harvest::default();
        if n < max {
            // SAFETY: behind the kernel's events, inside the array.
            h = harvest(i, s, unsafe { evs.add(n) }, max - n);
        }
        if n + h.n == 0 && !due {
            // SAFETY: as above; nothing was harvested.
            n = unsafe { look_at_kernel(i, s, evs, max) };
            if n < max {
                // SAFETY: as above.
                h = harvest(i, s, unsafe { evs.add(n) }, max - n);
            }
        }
        h.n += n;
        if h.n > 0 {
            return h.n as i32;
        }
        let left = match timeout_ms {
            t if t < 0 => -1,
            t => (t - (sys::now_ns().saturating_sub(start) / 1_000_000) as i64).max(0),
        };
        if left == 0 || last {
            return 0;
        }
        if h.busy {
            sys::sched_yield();
            continue;
        }
        if control::pending() {
            control::pump();
            continue;
        }
        if !h.blocked && wait::may_spin(&s.spin) {
            let mut turns = 0u32;
            let mut kernel = false;
            let found = wait::spin(
                || producer_cpu(s),
                || {
                    turns += 1;
                    if turns % 512 == 0 && sys::poll1(s.epfd.load(Relaxed), libc::POLLIN) != 0 {
                        kernel = true;
                    }
                    kernel || changed(s)
                },
            );
            wait::spun(&s.spin, found);
            if found {
                continue;
            }
        }
        let ctl = control::fd();
        let ctl_gen = control::generation() as i32;
        if ctl >= 0 && s.ctl.swap(ctl_gen, Relaxed) != ctl_gen {
            let _ = sys::epoll_ctl(s.inner.load(Relaxed), libc::EPOLL_CTL_ADD, ctl, IN, TAG_CTL);
        }
        let mut nap = wait::nap(left, true);
        if h.blocked {
            let full = io::FULL_MS as i64 + 1;
            nap = if nap < 0 { full } else { nap.min(full) };
        }
        let dozed = doze_all(s);
        let r = if changed(s) || s.stirred.load(SeqCst) != 0 || control::pending() {
            rouse_all(s, dozed);
            continue;
        } else {
            if let Some(t) = table::table() {
                t.header.stats.sleeps.fetch_add(1, Relaxed);
            }
            native(evs, max as i32, nap)
        };
        let e = crate::errno();
        rouse_all(s, dozed);
        if r < 0 {
            crate::set_errno(e);
            return r;
        }
        let mut n = r as usize;
        // SAFETY: the kernel wrote `n` events.
        if n > 0 && unsafe { strip(evs, &mut n) } {
            inner(i, s);
        }
        if n > 0 {
            if n < max {
                // SAFETY: behind the kernel's events, inside the array.
                n += harvest(i, s, unsafe { evs.add(n) }, max - n).n;
            }
            return n as i32;
        }
        if r == 0 {
            if ctl < 0 {
                control::ensure();
            }
            last = left >= 0 && nap >= left;
        }
    }
}

fn doze_all(s: &Set) -> u64 {
    let mut dozed = 0;
    for k in 0..slots(s) {
        if let Some(ctl) = set_link(s, k).and_then(|l| l.own.control()) {
            wake::doze(&ctl.sleepers.0);
            dozed |= 1 << k;
        }
    }
    dozed
}

/// Takes back exactly what [`doze_all`] did: links may have joined the set meanwhile.
fn rouse_all(s: &Set, dozed: u64) {
    for k in 0..LINKS {
        if dozed & (1 << k) != 0 {
            if let Some(ctl) = set_link(s, k).and_then(|l| l.own.control()) {
                wake::rouse(&ctl.sleepers.0);
            }
        }
    }
}

/// Processor of the producer, where the set has only one link; with several nobody in particular.
fn producer_cpu(s: &Set) -> u32 {
    if s.links[1].load(Relaxed) != 0 {
        return u32::MAX;
    }
    let lane = reg_at(
        s.chain[0][s.groups[0]
            .load(Relaxed)
            .trailing_zeros()
            .min(GROUPS as u32 - 1) as usize]
            .load(Relaxed),
    );
    let conn = lane.conn.load(Relaxed);
    if conn == 0 {
        return u32::MAX;
    }
    match promote::lane(table::conn(conn - 1), table::local(conn - 1)) {
        Some((_, m)) => m.peer_rx().cpu.load(Relaxed),
        None => u32::MAX,
    }
}
