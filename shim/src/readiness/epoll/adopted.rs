//! Sets that a forked child inherits and uses: the child shares the kernel's set with its parent.

use super::kernel::strip;
use super::*;
use crate::state::{attached, table};
use crate::{promotion, sys};
use lane::family::Cause;
use lane::num;
use lane::proto::reason::Reason;

/// Maximum number of registrations with bytes on a ring that one wait reports.
const TOLD: usize = 16;

/// A forked child uses a set of its parent, and both share the kernel's set. What the parent watches through its
/// inner set has to be entered in the kernel's set, so that the child is told of it. (Only if the child does use the
/// set, since the parent would be told of such events, too.)
#[cold]
fn adopt(i: u32, s: &Set) {
    if s.inherited.swap(0, Relaxed) == 0 {
        return;
    }
    for (r, reg) in regs::all() {
        if let Some(conn) = reg.conn.load(Relaxed).checked_sub(1) {
            adopt_one(i, s, r, conn);
        }
    }
}

/// The same for one registration, if it belongs to this set.
pub(super) fn adopt_one(i: u32, s: &Set, r: u32, conn: u32) {
    let reg = reg_at(r);
    if reg.set.load(Relaxed) != i + 1 || reg.flags.load(Relaxed) & INHERITED == 0 {
        return;
    }
    let c = table::conn(conn);
    // This comes first, because the bytes that the switch itself puts on TCP would look like data. Bytes on the ring
    // are data, and their sender may be asleep for long.
    if is_unread(conn) {
        table::disqualify(c, Reason::EpollShared);
        promotion::take_down(conn, Cause::Watched);
    } else if attached::engaged(c) {
        promotion::leave(conn, reg.fd.load(Relaxed), Reason::EpollShared);
    }
    if let Some(_g) = lock::lock(&s.lock) {
        if is_of(r, i, conn) {
            give_inherited(s, reg);
        }
    }
    note(i, conn, r);
}

/// Are there bytes on the ring?
fn is_unread(conn: u32) -> bool {
    let (c, l) = (table::conn(conn), table::local(conn));
    attached::mapped(c, l).is_some_and(|(_, m)| c.rx.ready(&m) == Some(true))
}

/// A registration in the kernel's set may have bytes on a ring, where the kernel does not see them. (Later bytes come
/// on TCP, because the sender is asked to go down.)
pub(super) fn note(i: u32, conn: u32, r: u32) {
    let s = set_at(i);
    let Some(_g) = lock::lock(&s.lock) else {
        return;
    };
    if is_of(r, i, conn) && is_unread(conn) {
        reg_at(r).flags.fetch_or(RINGED, Relaxed);
        s.ringed.store(1, Relaxed);
    }
}

/// Calls [`adopt`] if the child waits in the set for the first time.
#[inline(always)]
pub(super) fn adopted(i: u32, s: &Set) {
    if s.inherited.load(Relaxed) != 0 {
        crate::preserving_errno(|| adopt(i, s));
    }
}

/// Reports bytes on rings together with the kernel's events. `None`: no ring has bytes.
///
/// # Safety
/// `evs` is the application's array of `max` events.
#[cold]
pub(super) unsafe fn tell(i: u32, s: &Set, evs: *mut epoll_event, max: usize) -> Option<i32> {
    let _g = lock::lock(&s.lock)?;
    let (mut found, mut n) = ([0u32; TOLD], 0);
    let mut more = false;
    for (r, reg) in regs::all() {
        let conn = reg.conn.load(Relaxed);
        if reg.flags.load(Relaxed) & RINGED == 0 || conn == 0 || !is_of(r, i, conn - 1) {
            continue;
        }
        if !is_unread(conn - 1) {
            reg.flags.fetch_and(!RINGED, Relaxed);
            continue;
        }
        more = true;
        if n < TOLD && reg.mask.load(Relaxed) & (IN | RDNORM) != 0 {
            found[n] = r;
            n += 1;
        }
    }
    s.ringed.store(u32::from(more), Relaxed);
    if n == 0 {
        return None;
    }
    let epfd = s.epfd.load(Relaxed);
    let mut told = sys::epoll_poll(epfd, evs, num::int(max as u64)).unwrap_or(0);
    // SAFETY: the kernel wrote so many events. (The parent's inner set is nothing to the child.)
    unsafe { strip(evs, &mut told) };
    for r in &found[..n] {
        let reg = reg_at(*r);
        let (mask, data) = (reg.mask.load(Relaxed), reg.data.load(Relaxed));
        let news = mask & (IN | RDNORM);
        // SAFETY: of these, the kernel has just written each; bytes need no alignment.
        let same = (0..told).find(|k| unsafe { evs.add(*k).read_unaligned() }.u64 == data);
        let (at, before) = match same {
            // SAFETY: as above.
            Some(k) => (k, unsafe { evs.add(k).read_unaligned() }.events),
            None => (told, 0),
        };
        // SAFETY: compared with the end before it is used.
        let to = unsafe { evs.add(at) };
        if at == max || !pages::writable(to, size_of::<epoll_event>()) {
            break;
        }
        let event = epoll_event {
            events: before | news,
            u64: data,
        };
        // SAFETY: the application's, below `max`, and just proven.
        unsafe { to.write_unaligned(event) };
        told = told.max(at + 1);
        if mask & (ET | ONESHOT) != 0 {
            reg.flags.fetch_and(!RINGED, Relaxed);
        }
        if mask & ONESHOT != 0 {
            // (A one-shot registration that was reported stays in the set, disarmed; this comes nearest to that.)
            let fd = reg.fd.load(Relaxed);
            let _ = sys::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, fd, ONESHOT, data);
        }
    }
    (told > 0).then_some(num::int(told as u64))
}
