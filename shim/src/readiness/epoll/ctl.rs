//! `epoll_ctl`: the application adds, changes and removes registrations.
//!
//! Each call looks, asks the kernel and notes the result under the set's lock, because several threads may change the
//! same registration, and others may receive its events meanwhile.

use super::*;
use crate::readiness::room;
use crate::state::{attached, fdtab, table};
use crate::tcp::ends;
use crate::{promotion, sys};
use core::sync::atomic::fence;
use lane::family::Cause;
use lane::proto::reason::Reason;

/// Flags that the kernel allows together with EPOLLEXCLUSIVE.
const EXCLUSIVE_TOO: u32 = IN | OUT | ERR | HUP | ET | libc::EPOLLWAKEUP as u32;

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
    if s.inherited.load(Relaxed) != 0 && op != libc::EPOLL_CTL_DEL {
        if let Some(r) = regs::find(conn, set, fd) {
            crate::preserving_errno(|| adopt_one(set, s, r, conn));
        }
    }
    // Held until the kernel's result is known: another thread may change the same registration.
    let Some(g) = lock::lock(&s.lock) else {
        return native();
    };
    let exclusive = ev.is_some_and(|ev| ev.events & EXCLUSIVE != 0);
    let mut found = regs::find(conn, set, fd);
    if let Some(r) = found.filter(|r| exclusive && reg_at(*r).flags.load(Relaxed) & PARKED != 0) {
        withdraw(s, r); // whatever comes now is for the kernel to accept and to serve
        regs::end(r, conn);
        found = None;
    }
    let Some(r) = found else {
        let Some(ev) = ev.filter(|_| op == libc::EPOLL_CTL_ADD) else {
            return native();
        };
        let r = crate::preserving_errno(|| enter(set, (conn, fd), ev));
        let straight = |r: u32| crate::preserving_errno(|| enter_straight(s, set, (conn, fd), r));
        if !r.is_some_and(straight) {
            let n = native();
            if n != 0 {
                crate::preserving_errno(|| r.iter().for_each(|r| regs::end(*r, conn)));
                return n;
            }
            crate::preserving_errno(|| r.iter().for_each(|r| arm(s, reg_at(*r), conn, fd)));
        }
        crate::preserving_errno(|| {
            drop(g);
            added(s, set, (conn, fd), r);
        });
        return 0;
    };
    let n = known(s, set, op, (conn, fd), r, ev, native);
    drop(g);
    if n == 0 && op == libc::EPOLL_CTL_MOD {
        crate::preserving_errno(|| armed(set, conn, r));
    }
    n
}

/// The same for a registration that the shim already has. Set lock held.
fn known(
    s: &Set,
    set: u32,
    op: i32,
    (conn, fd): (u32, i32),
    r: u32,
    ev: Option<epoll_event>,
    native: impl Fn() -> i32,
) -> i32 {
    let reg = reg_at(r);
    let flags = reg.flags.load(Relaxed);
    let ours = flags & (ACTIVE | ABSENT) != 0;
    let exclusive = ev.is_some_and(|ev| ev.events & EXCLUSIVE != 0);
    let answer = |errno: i32| {
        crate::set_errno(errno);
        -1
    };
    match (op, ev) {
        // An active registration is changed here without a system call: programs toggle EPOLLOUT on every request.
        (libc::EPOLL_CTL_ADD, Some(ev)) if flags & PARKED != 0 => {
            rearm(s, r, ev);
            0
        }
        (libc::EPOLL_CTL_ADD, Some(ev)) if ours => {
            let odd = exclusive && ev.events & !(EXCLUSIVE_TOO | EXCLUSIVE) != 0;
            answer(if odd { libc::EINVAL } else { libc::EEXIST })
        }
        (libc::EPOLL_CTL_MOD, Some(_)) if ours && exclusive => answer(libc::EINVAL),
        (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, _) if flags & PARKED != 0 => {
            answer(libc::ENOENT)
        }
        (libc::EPOLL_CTL_MOD, Some(ev)) if flags & ACTIVE != 0 => {
            rearm(s, r, ev);
            0
        }
        (libc::EPOLL_CTL_MOD, Some(ev)) => {
            if !exclusive && crate::preserving_errno(|| rearm_straight(s, set, (conn, fd), r, ev)) {
                return 0;
            }
            let n = match flags & ABSENT != 0 {
                true => {
                    let epfd = s.epfd.load(Relaxed);
                    sys::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, ev.events, ev.u64)
                        .map_or_else(answer, |_| 0)
                }
                false => native(),
            };
            if n == 0 {
                reg.flags.fetch_and(!ABSENT, Relaxed);
                reg.mask.store(ev.events, Relaxed);
                reg.data.store(ev.u64, Relaxed);
                arm(s, reg, conn, fd);
            }
            n
        }
        (libc::EPOLL_CTL_DEL, _) if flags & ACTIVE != 0 => {
            reg.flags.fetch_or(PARKED, Relaxed);
            reg.mask.store(0, Relaxed);
            0
        }
        (libc::EPOLL_CTL_DEL, _) => {
            let n = match flags & (ABSENT | INHERITED) {
                0 => native(),
                _ => 0, // it is in none of the kernel's sets
            };
            if n == 0 {
                crate::preserving_errno(|| regs::end(r, conn));
            }
            n
        }
        _ => native(),
    }
}

/// A new mask for an active registration: any current state is reported again. Set lock held.
fn rearm(s: &Set, r: u32, ev: epoll_event) {
    let reg = reg_at(r);
    reg.mask.store(ev.events, Relaxed);
    reg.data.store(ev.u64, Relaxed);
    reg.flags.fetch_and(!(DISABLED | PARKED), Relaxed);
    reg.flags.fetch_or(EDGE_IN | EDGE_OUT, Relaxed);
    if let Some(conn) = reg.conn.load(Relaxed).checked_sub(1) {
        room::watched(table::conn(conn), table::local(conn), ev.events);
    }
    push(s, r);
    if s.waiters.load(SeqCst) > 0 {
        // Another thread sleeps in the set, and the registration may be ready already.
        fdtab::signal(s.wake_fd.load(Relaxed));
    }
}

/// Notes from which report of the kernel on its events are about this registration; waits that are in progress may
/// still bring older ones. A socket without space in its send buffer counts as starved, since space is news to it.
fn arm(s: &Set, reg: &Reg, conn: u32, fd: i32) {
    let pending = s.waiters.load(SeqCst);
    reg.armed_at
        .store(s.told.load(SeqCst).wrapping_add(pending), Relaxed);
    room::watched(
        table::conn(conn),
        table::local(conn),
        reg.mask.load(Relaxed),
    );
    if reg.mask.load(Relaxed) & ET == 0 {
        return;
    }
    let c = table::conn(conn);
    let unborn = c.state.load(Relaxed) != state::OPEN;
    if unborn || sys::poll1(fd, libc::POLLOUT) & libc::POLLOUT == 0 {
        table::local(conn).starved.store(1, Relaxed);
    }
}

/// The link group of a connection whose registration may be in the inner set.
pub(super) fn usable_lane(conn: u32) -> Option<&'static LinkGroup> {
    let c = table::conn(conn);
    let flags = c.flags.load(Relaxed) & (flag::LANE | flag::DISQUALIFIED | flag::HELD);
    // (A connection that will not be promoted again, for instance one that is half closed, is reported from the inner
    // set as long as a direction is still on the lane. So are an error that a call of the shim has taken from the
    // kernel, and MSG_ZEROCOPY notifications that the shim counts, and an end that TCP has not reported: the kernel has none
    // of them.)
    let ours = || c.has_error() || table::local(conn).notifies() || ends::is_expected_of(conn);
    let still = || attached::engaged(c) || ours();
    let usable = flags == flag::LANE || flags & flag::LANE != 0 && still();
    let (group, _) = attached::of(c, table::local(conn)).filter(|_| usable)?;
    (!is_inherited(c) || attached::engaged(c)).then_some(group)
}

/// The application has just armed a registration: it may move to the inner set now.
fn armed(set: u32, conn: u32, r: u32) {
    let c = table::conn(conn);
    promotion::expected(conn, reg_at(r).fd.load(Relaxed), c);
    if c.flags.load(Relaxed) & flag::LANE != 0 && is_inherited(c) && attached::engaged(c) {
        // What comes from now on comes on TCP. (If the link group's doorbell were in a set of this process, its owner
        // would no longer hear it.) Bytes already on the ring are reported from the inner set.
        promotion::take_down(conn, Cause::Watched);
    }
    let Some(group) = usable_lane(conn) else {
        return;
    };
    if activate_one(set, conn, r, group) {
        return;
    }
    if is_inherited(c) {
        return adopted::note(set, conn, r);
    }
    // The registration stays in the kernel's set, so its connection cannot stay on a lane. (A thread that looked
    // through the registrations before this one was entered, and is about to switch a direction, holds the lock of
    // that direction.)
    drop((lock::lock(&c.tx.lock), lock::lock(&c.rx.lock)));
    // (A registration in a set that nobody has waited on can move now if its connection is on its lane by now.)
    if attached::engaged(c) && !activate_one(set, conn, r, group) {
        promotion::leave(conn, reg_at(r).fd.load(Relaxed), Reason::EpollShared);
    }
}

/// Enters a new registration that the kernel does not know yet. A thread that gives its connection a lane from now on
/// finds it, and takes the set's lock. `None`: the table is full. Set lock held.
fn enter(set: u32, (conn, fd): (u32, i32), ev: epoll_event) -> Option<u32> {
    let r = regs::alloc()?;
    let reg = reg_at(r);
    reg.fd.store(fd, Relaxed);
    reg.mask.store(ev.events, Relaxed);
    reg.data.store(ev.u64, Relaxed);
    reg.flags.store(0, Relaxed);
    reg.tcp.store(0, Relaxed);
    regs::begin(r, set, conn);
    Some(r)
}

/// A new one-shot or edge-triggered registration of a connection with a lane never enters the kernel's set: another
/// thread could receive its event there, and again after it has moved. False: it is added the usual way. Set lock
/// held.
fn enter_straight(s: &Set, set: u32, (conn, fd): (u32, i32), r: u32) -> bool {
    let reg = reg_at(r);
    let mask = reg.mask.load(Relaxed);
    if mask & (ONESHOT | ET) == 0 || mask & EXCLUSIVE != 0 {
        return false;
    }
    fence(SeqCst); // SYNC entered: it is in the list, then we look for a lane; see `activate`
    let Some(group) = usable_lane(conn) else {
        return false;
    };
    arm(s, reg, conn, fd);
    move_straight(s, set, conn, r, group)
}

/// Moves a registration that the kernel does not know, or not in its present form, so that no thread has been told of
/// it. False: it is added the usual way; also if the lane was given back a moment ago. Set lock held.
fn move_straight(s: &Set, set: u32, conn: u32, r: u32, group: &LinkGroup) -> bool {
    let flags = &reg_at(r).flags;
    let moved = activate_held(s, set, conn, r, group) && flags.load(Relaxed) & ACTIVE != 0;
    if moved {
        flags.fetch_or(EDGE_OUT, Relaxed);
    }
    moved
}

/// The same when a registration is armed again. False: it is changed the usual way. Set lock held.
fn rearm_straight(s: &Set, set: u32, (conn, fd): (u32, i32), r: u32, ev: epoll_event) -> bool {
    let reg = reg_at(r);
    let before = (reg.mask.load(Relaxed), reg.data.load(Relaxed));
    if before.0 & EXCLUSIVE != 0 {
        return false;
    }
    let Some(group) = usable_lane(conn) else {
        return false;
    };
    reg.mask.store(ev.events, Relaxed);
    reg.data.store(ev.u64, Relaxed);
    arm(s, reg, conn, fd);
    let moved = move_straight(s, set, conn, r, group);
    if !moved {
        reg.mask.store(before.0, Relaxed);
        reg.data.store(before.1, Relaxed);
    }
    moved
}

/// The application has added a connection to a set.
fn added(s: &Set, set: u32, (conn, fd): (u32, i32), r: Option<u32>) {
    let c = table::conn(conn);
    let Some(r) = r else {
        return table::disqualify(c, Reason::EpollShared);
    };
    c.flags.fetch_or(flag::WATCHED, Relaxed);
    s.tcp.store(1, Relaxed);
    if s.waiters.load(SeqCst) > 0 {
        hear(s);
    }
    promotion::expected(conn, fd, c);
    if c.flags.load(Relaxed) & flag::LANE != 0 {
        if unservable(conn) {
            promotion::leave(conn, fd, Reason::EpollShared);
        } else {
            armed(set, conn, r);
            promotion::watched(conn, c);
            // The next wait asks the kernel first, for what TCP has to report about this connection.
            s.looked.store(0, Relaxed);
        }
    }
}
