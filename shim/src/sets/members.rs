//! Which connections of a set are in its inner set, and which of those are queued to be looked at.
//!
//! All changes of membership are made under the set's lock.

use super::*;
use crate::state::{attached, fdtab, groups, table};
use crate::sys;
use crate::tcp::ends;
use core::sync::atomic::fence;
use lane::abi::Cursor;
use lane::num;

/// The link group is about to be given back: removes it from all sets.
pub fn unbind(group: &LinkGroup) {
    if SET_TABLE.load(Relaxed).is_null() {
        return;
    }
    for i in 0..num::small(SETS) {
        let s = set_at(i);
        if s.used.load(Relaxed) == 0 {
            continue;
        }
        let Some(_g) = lock::lock(&s.lock) else {
            continue;
        };
        if s.slots.of(group).is_some() {
            let inner = s.inner.load(Relaxed);
            let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_DEL, group.bell(), 0, 0);
            sleepers::unhear(s, group);
            s.slots.remove(group);
        }
    }
}

/// The connection has got a lane on `group`: its registrations move to inner sets. Idempotent. False if one of them
/// cannot move: then this end must not be declared ready.
pub fn activate(conn: u32, group: &LinkGroup) -> bool {
    // SYNC entered: there is a lane, then we look for registrations; who adds one enters it, then looks for a lane.
    fence(SeqCst);
    let mut all = true;
    regs::each(conn, |r, set| all &= activate_one(set, conn, r, group));
    all
}

/// Moves one registration. A one-shot registration stays where it is, because we cannot see whether the kernel has
/// already reported it. It moves when the application arms it again, before the kernel hears of that.
pub fn activate_one(set: u32, conn: u32, r: u32, group: &LinkGroup) -> bool {
    let s = set_at(set);
    let Some(_g) = lock::lock(&s.lock) else {
        return false;
    };
    if !is_of(r, set, conn) {
        return true; // it has ended meanwhile
    }
    let reg = reg_at(r);
    let once = reg.mask.load(Relaxed) & ONESHOT != 0;
    reg.flags.load(Relaxed) & ACTIVE != 0 || !once && activate_held(s, set, conn, r, group)
}

/// The same for a registration that has not ended. Set lock held.
pub fn activate_held(s: &Set, set: u32, conn: u32, r: u32, group: &LinkGroup) -> bool {
    let reg = reg_at(r);
    // The link group may be outdated: the lane may have been given back, and `deactivate` may have run before us.
    let now = table::local(conn).group.load(Acquire);
    if reg.flags.load(Relaxed) & ACTIVE != 0 || !core::ptr::eq(now, group) {
        return true;
    }
    // If the set is watched from outside, or the registration is to wake only one of several sets, the program relies
    // on the kernel: a registration that has not moved yet stays with it.
    if s.disqualified.load(Relaxed) != 0 || reg.mask.load(Relaxed) & EXCLUSIVE != 0 {
        return false;
    }
    // Nor does it move before a hooked wait on the set, unless its connection is on the lane by now, or only the shim
    // has its news.
    let (c, l) = (table::conn(conn), table::local(conn));
    let ending = ends::left_ms_of(conn);
    let ours = c.has_error() || l.notifies() || ending >= 0 || ends::is_expected_of(conn);
    let here = attached::engaged(c) || ours;
    if !here && refuses(s) {
        return false;
    }
    let Some((k, slot)) = bind(s, set, group) else {
        // No descriptors, or no memory: what is in the kernel's set stays there.
        s.disqualified.store(1, Relaxed);
        return false;
    };
    let (epfd, inner, fd) = (
        s.epfd.load(Relaxed),
        s.inner.load(Relaxed),
        reg.fd.load(Relaxed),
    );
    if watch_tcp(inner, fd, r).is_err() {
        return false;
    }
    let _ = sys::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, 0, 0);
    count_with((r, reg), conn, (k, slot), group);
    reg.tcp.store(0, Relaxed);
    let tcp_pos = c.tx.tcp_pos.load(Relaxed);
    reg.tcp_pos.store(tcp_pos, Relaxed);
    let space = space_flags(s, reg, l, fd);
    let kin = if group.is_inherited() { KIN } else { 0 };
    s.kin.fetch_add(u32::from(kin != 0), Relaxed);
    reg.flags.store(ACTIVE | EDGE_IN | space | kin, Relaxed);
    // An idle registration is queued only when it has news. (Whatever is published after the head is loaded counts as
    // news.)
    let head = attached::mapped(c, l).map_or(Cursor::UNSEEN, |(_, m)| m.peer_head().load(Acquire));
    reg.last_head.store(head, Relaxed);
    let error = c.has_error() || l.owes_notifications();
    let idle = !error
        && attached::mapped(c, l)
            .is_some_and(|(_, m)| c.rx.is_up() && c.rx.ready(&m) == Some(false));
    if ending >= 0 {
        await_end(s, ending);
    }
    if !idle || reg.mask.load(Relaxed) & (OUT | WRNORM) != 0 {
        push(s, r);
    }
    s.moves.fetch_add(1, Release); // pairs with the loads around a look at the kernel
    if s.lanes.fetch_add(1, SeqCst) == 0 {
        sleepers::listen(s);
    }
    notify_if_waiting(set as usize);
    true
}

/// The registration joins those whose lanes have a publish counter of the link group in common: `k` is the link group's
/// slot, with its number. Set lock held.
fn count_with((r, reg): (u32, &Reg), conn: u32, (k, slot): (usize, &Slot), group: &LinkGroup) {
    let lane = table::conn(conn).lane.load(Relaxed) as usize;
    let g = (lane / LANES_PER_COUNTER).min(COUNTERS - 1);
    reg.slot.store(num::small(k * COUNTERS + g), Relaxed);
    reg.next_counter.store(slot.chain[g].load(Relaxed), Relaxed);
    if slot.counters.load(Relaxed) & (1 << g) == 0 {
        slot.chain[g].store(0, Relaxed);
        reg.next_counter.store(0, Relaxed);
        // What was published up to now is looked at by the caller.
        if let Some(ctl) = group.peer.control() {
            slot.seen[g].store(notify::counter(&ctl.seq[g].0), Relaxed);
        }
        slot.counters.fetch_or(1 << g, Relaxed);
    }
    slot.chain[g].store(r, Relaxed);
}

/// What a registration that moves has to tell of TCP's space.
fn space_flags(s: &Set, reg: &Reg, l: &table::Local, fd: i32) -> u32 {
    // If TCP has space now, the inner set's first report says so and is no news. If not, later space is news.
    let space = sys::poll1(fd, libc::POLLOUT) & libc::POLLOUT != 0;
    let fresh = if space { FRESH } else { 0 };
    // Was the application already told that there is space, and has it not used that up since?
    let told = space
        && num::signed(s.told.load(SeqCst).wrapping_sub(reg.armed_at.load(Relaxed))) > 0
        && l.starved.load(Relaxed) == 0;
    fresh | if told { 0 } else { EDGE_OUT }
}

/// Makes sure that the set has its inner set. Set lock held.
pub fn make_inner(s: &Set) -> Option<()> {
    if s.inner.load(Relaxed) >= 0 {
        return Some(());
    }
    let inner = fdtab::hide(sys::epoll_create().ok()?);
    let Ok(wake_fd) = sys::eventfd() else {
        fdtab::close_ours(inner);
        return None;
    };
    let wake_fd = fdtab::hide(wake_fd);
    let ok = sys::epoll_ctl(inner, libc::EPOLL_CTL_ADD, wake_fd, IN, TAG_WAKE).is_ok()
        && sys::epoll_ctl(s.epfd.load(Relaxed), libc::EPOLL_CTL_ADD, inner, IN, mark()).is_ok();
    if !ok {
        fdtab::close_ours(inner);
        fdtab::close_ours(wake_fd);
        return None;
    }
    s.wake_fd.store(wake_fd, Relaxed);
    s.inner.store(inner, Release);
    Some(())
}

/// Lets a set that watches connections listen to the daemon, too, which may ask for an idle connection. Only for sets
/// on which hooked calls wait: others would see an event that they do not know.
pub fn hear(s: &Set) {
    let (ctl, gen) = (daemon::fd(), num::signed(daemon::generation()));
    if ctl < 0
        || s.ctl.load(Relaxed) == gen
        || s.tcp.load(Relaxed) == 0
        || s.disqualified.load(Relaxed) != 0
    {
        return;
    }
    crate::preserving_errno(|| {
        let Some(_g) = lock::lock(&s.lock) else {
            return;
        };
        // If no descriptors are available, the next attempt is made at the next connection to the daemon.
        let made = make_inner(s).is_some();
        if s.ctl.swap(gen, Relaxed) != gen && made {
            let inner = s.inner.load(Relaxed);
            let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_ADD, ctl, IN, TAG_CTL);
        }
    });
}

/// Makes sure that the set has its inner set, and the inner set the link group's doorbell. Returns the slot of the link
/// group, with its number.
pub fn bind(s: &Set, set: u32, group: &LinkGroup) -> Option<(usize, &'static Slot)> {
    make_inner(s)?;
    if let Some(k) = s.slots.of(group) {
        return Some((k, s.slots.at(k)?));
    }
    let data = TAG_BELL | groups::index(group) as u64;
    let (inner, bell) = (s.inner.load(Relaxed), group.bell());
    let added = match group.is_inherited() {
        true => Ok(()), // this process must not listen to it
        false => sys::epoll_ctl(inner, libc::EPOLL_CTL_ADD, bell, IN, data),
    };
    if !matches!(added, Ok(()) | Err(libc::EEXIST)) {
        return None;
    }
    group.sets[set as usize / 64].fetch_or(1 << (set % 64), SeqCst);
    let Some(k) = s.slots.add(group) else {
        group.sets[set as usize / 64].fetch_and(!(1 << (set % 64)), SeqCst);
        let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_DEL, bell, 0, 0);
        return None;
    };
    sleepers::hear_too(s, group);
    Some((k, s.slots.at(k)?))
}

/// Removes an active registration from chain and queue, and from the count of lanes. Set lock held.
pub fn detach(s: &Set, r: u32) {
    let reg = reg_at(r);
    let slot = reg.slot.load(Relaxed) as usize;
    let mut at = s
        .slots
        .at(slot / COUNTERS)
        .map(|l| &l.chain[slot % COUNTERS]);
    while let Some(this) = at {
        let k = this.load(Relaxed);
        if k == r {
            this.store(reg.next_counter.load(Relaxed), Relaxed);
        }
        at = (k != 0 && k != r).then(|| &reg_at(k).next_counter);
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
    if reg.flags.swap(0, Relaxed) & KIN != 0 {
        s.kin.fetch_sub(1, Relaxed);
    }
    if s.lanes.fetch_sub(1, SeqCst) == 1 {
        sleepers::deafen(s);
        retire(s);
    }
}

/// A set that is watched from outside, and has no lanes any more, must report only what the kernel reports: no
/// doorbell may make it look ready, so its inner set is removed. Set lock held.
pub fn retire(s: &Set) {
    let inner = s.inner.load(Relaxed);
    if s.disqualified.load(Relaxed) != 0 && s.lanes.load(SeqCst) == 0 && inner >= 0 {
        let _ = sys::epoll_ctl(s.epfd.load(Relaxed), libc::EPOLL_CTL_DEL, inner, 0, 0);
    }
}

/// Number of tries of [`give_back`]. What it needs has just been freed, so one is enough unless another thread takes
/// it.
pub const GIVE_BACK_TRIES: u32 = 64;

/// Enters a descriptor in the application's own set again. If that failed, nobody would see its events.
pub fn give_back(epfd: i32, fd: i32, mask: u32, data: u64) {
    for _ in 0..GIVE_BACK_TRIES {
        match sys::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, mask, data) {
            Err(libc::ENOMEM | libc::ENOSPC) => sys::sched_yield(),
            _ => return,
        }
    }
}

/// Enters a registration that was active in the parent in the kernel's set, if that was not done yet. Set lock held.
pub fn give_inherited(s: &Set, reg: &Reg) {
    if reg.flags.fetch_and(!INHERITED, Relaxed) & INHERITED != 0 {
        let (fd, mask) = (reg.fd.load(Relaxed), reg.mask.load(Relaxed));
        give_back(s.epfd.load(Relaxed), fd, mask, reg.data.load(Relaxed));
    }
}

/// The connection has left its lane for good. If the shim counts its MSG_ZEROCOPY notifications, its registrations
/// stay in the inner sets, since only these can report them.
pub fn left(conn: u32) {
    if table::is_vfork_child() {
        // A vfork child does not have the sets that other threads have made since it began. The inner sets report TCP
        // events, too.
        return notify(conn);
    }
    if !table::local(conn).notifies() || unservable(conn) {
        deactivate(conn);
    }
}

/// Both directions are on TCP for good: registrations go back to the application's own set.
pub fn deactivate(conn: u32) {
    deactivate_if(conn, || true);
}

/// The same for those registrations for which `still` holds under the lock of their set. (A thread that promotes the
/// connection again checks under that lock whether each of them is active.)
pub fn deactivate_if(conn: u32, still: impl Fn() -> bool) {
    regs::each(conn, |r, set| {
        let (s, reg) = (set_at(set), reg_at(r));
        let Some(_g) = lock::lock(&s.lock) else {
            return;
        };
        let flags = reg.flags.load(Relaxed);
        if !is_of(r, set, conn) || flags & ACTIVE == 0 || !still() {
            return;
        }
        withdraw(s, r);
        if flags & PARKED != 0 {
            return regs::end(r, conn);
        }
        if flags & DISABLED != 0 {
            // (In the kernel's set, a reset would be reported even with an empty event mask.)
            return reg.flags.store(ABSENT, Relaxed);
        }
        let (fd, mask) = (reg.fd.load(Relaxed), reg.mask.load(Relaxed));
        give_back(s.epfd.load(Relaxed), fd, mask, reg.data.load(Relaxed));
    });
}

/// From now on only the kernel serves the connection's registrations.
pub fn disowned(conn: u32) {
    deactivate(conn);
    regs::each(conn, |r, set| {
        let (s, reg) = (set_at(set), reg_at(r));
        let Some(_g) = lock::lock(&s.lock) else {
            return;
        };
        if is_of(r, set, conn) && reg.flags.load(Relaxed) & ABSENT != 0 {
            // (A one-shot registration that was reported stays in the set, disarmed; this comes nearest to that.)
            let (epfd, fd) = (s.epfd.load(Relaxed), reg.fd.load(Relaxed));
            give_back(epfd, fd, ONESHOT, reg.data.load(Relaxed));
            reg.flags.store(0, Relaxed);
        }
    });
    forget(conn, false);
}

/// Removes an active registration from the inner set, and from our lists. Set lock held.
pub fn withdraw(s: &Set, r: u32) {
    let (inner, fd) = (s.inner.load(Relaxed), reg_at(r).fd.load(Relaxed));
    let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_DEL, fd, 0, 0);
    detach(s, r);
}

/// The last descriptor of the connection in this process is about to be closed. `alone`: no other process has one, so
/// its registrations end, although a copy of the daemon's would keep them in the kernel. (A native call that sleeps
/// on the connection keeps them, too; then they are left to it.)
pub fn forget(conn: u32, alone: bool) {
    let kept = alone && kept_by_native(conn);
    if kept {
        daemon::take_back(conn, table::conn(conn).gen.load(Relaxed)); // (a copy that the daemon has not read yet)
    }
    regs::each(conn, |r, set| {
        let (s, reg) = (set_at(set), reg_at(r));
        let Some(_g) = lock::lock(&s.lock) else {
            return;
        };
        if !is_of(r, set, conn) {
            return;
        }
        let flags = reg.flags.load(Relaxed);
        let (epfd, fd) = (s.epfd.load(Relaxed), reg.fd.load(Relaxed));
        if flags & ACTIVE != 0 {
            withdraw(s, r);
            if kept && flags & (PARKED | DISABLED) == 0 {
                let mask = reg.mask.load(Relaxed);
                give_back(epfd, fd, mask, reg.data.load(Relaxed));
            }
        } else if alone && !kept {
            let _ = sys::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, 0, 0);
        }
        regs::end(r, conn);
    });
}

/// Is a native call sleeping on a connection of which the daemon keeps no copy?
pub fn kept_by_native(conn: u32) -> bool {
    let (c, l) = (table::conn(conn), table::local(conn));
    let asleep = c.rx.native_calls.load(SeqCst) != 0 || c.tx.native_calls.load(SeqCst) != 0;
    let remote = || attached::of(c, l).is_some_and(|(k, _)| k.is_remote());
    asleep && !remote()
}

/// One of a connection's descriptors is about to be closed, and others stay. As in the kernel, a registration by that
/// number stays as well (epoll(7)). But the number may stand for another connection a moment later. So an active
/// registration goes on under a hidden number, and no registration is passed to the kernel by the old one any more.
pub fn copy_closed(conn: u32, fd: i32) {
    regs::each(conn, |r, set| {
        let (s, reg) = (set_at(set), reg_at(r));
        if reg.fd.load(Relaxed) != fd {
            return;
        }
        let Some(_g) = lock::lock(&s.lock) else {
            return;
        };
        let flags = reg.flags.load(Relaxed);
        if !is_of(r, set, conn) || reg.fd.load(Relaxed) != fd {
            return;
        }
        if flags & (PARKED | ABSENT) != 0 {
            if flags & ACTIVE != 0 {
                withdraw(s, r);
            }
            return regs::end(r, conn);
        }
        let copy = match flags & ACTIVE != 0 {
            true => fdtab::hidden_copy(fd),
            false => None, // it is in the kernel's set and stays there, so this connection gets no lane
        };
        if let Some(copy) = copy {
            let inner = s.inner.load(Relaxed);
            // (Pending events of the old entry are lost with it. The first report of the new one may repeat them, so
            // it counts as news.)
            let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_DEL, fd, 0, 0);
            reg.flags.fetch_and(!FRESH, Relaxed);
            let _ = watch_tcp(inner, copy, r);
        }
        reg.fd.store(copy.unwrap_or(-1), Relaxed);
    });
}

/// Enters a connection's descriptor in the inner set.
pub fn watch_tcp(inner: i32, fd: i32, r: u32) -> Result<(), i32> {
    let events = IN | OUT | RDHUP | PRI | ET;
    let data = TAG_REG | u64::from(r);
    sys::epoll_ctl(inner, libc::EPOLL_CTL_ADD, fd, events, data)
}

/// The first report that TCP has space, about a registration that already had space when it entered the inner set:
/// does it say nothing new? It does if bytes were put on TCP since then. Space that is gone again when the event is
/// fetched is not reported at all, so the report is then about later space.
pub fn is_old(reg: &Reg, c: &Conn) -> bool {
    // In this order: a native call counts its bytes before it leaves; pairs with `lane::half::native_calls`.
    c.tx.native_calls.load(Acquire) == 0 && c.tx.tcp_pos.load(Relaxed) == reg.tcp_pos.load(Relaxed)
}

/// The number no longer stands for the connection: whatever has it now must not be removed from any set.
pub fn lost(conn: u32, fd: i32) {
    regs::each(conn, |r, _| {
        let _ = reg_at(r).fd.compare_exchange(fd, -1, Relaxed, Relaxed);
    });
}

/// Something about the connection was changed from outside: its sets look at it again.
pub fn notify(conn: u32) {
    regs::each(conn, |_, set| {
        set_at(set).notified.store(1, SeqCst);
        notify_if_waiting(set as usize);
    });
}

/// An error that a call of the shim may have taken from the kernel, or a notification that the shim counts, has to be
/// reported by sets as well until the application takes it, so the registrations have to be in the inner set.
#[cold]
pub fn tell_error(fd: i32) {
    let ours = |i: &u32| table::conn(*i).has_error() || table::local(*i).owes_notifications();
    let Some(i) = fdtab::conn(fd).filter(ours) else {
        return;
    };
    if let Some((group, _)) = attached::of(table::conn(i), table::local(i)) {
        activate(i, group);
    }
}

/// Wakes the threads that sleep in the kernel on this set.
pub fn notify_if_waiting(set: usize) {
    let s = set_at(num::small(set));
    if s.waiters.load(SeqCst) > 0 {
        let k = s.wake_fd.load(Relaxed);
        if k >= 0 {
            fdtab::signal(k);
        }
    }
}

pub fn push(s: &Set, r: u32) {
    s.pushes.fetch_add(1, SeqCst);
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

pub fn pop(s: &Set) -> u32 {
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
