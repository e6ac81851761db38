//! What the kernel reports: in the application's set, and in the inner set, which is a member of it.

use super::*;
use crate::state::{groups, table};
use crate::sys;
use lane::num;

/// Processes the events that the inner set reports.
pub(super) fn inner(i: u32, s: &Set) {
    let mut evs = [epoll_event { events: 0, u64: 0 }; 64];
    let fd = s.inner.load(Acquire);
    if fd < 0 {
        return;
    }
    let n = sys::epoll_poll(fd, evs.as_mut_ptr(), num::int(evs.len() as u64)).unwrap_or(0);
    for e in evs.iter().take(n) {
        let (events, data) = (e.events, e.u64);
        let low = num::low32(data);
        match data & (0xff << 56) {
            TAG_REG => {
                let Some(_g) = lock::lock(&s.lock) else {
                    return;
                };
                let reg = reg_at(low);
                if reg.set.load(Relaxed) == i + 1 && reg.flags.load(Relaxed) & ACTIVE != 0 {
                    reg.tcp
                        .fetch_or(events & (IN | PRI | RDHUP | HUP | ERR), Relaxed);
                    let mut edges = 0;
                    if events & (IN | PRI | RDHUP | HUP | ERR) != 0 {
                        edges |= EDGE_IN;
                    }
                    // TCP's buffer has space: that is news only if the direction sends on TCP and had no space
                    // before.
                    let sends = table::conn(reg.conn.load(Relaxed).wrapping_sub(1));
                    let fresh = reg.flags.fetch_and(!FRESH, Relaxed) & FRESH != 0;
                    let news = !fresh || !is_old(reg, sends);
                    if events & OUT != 0 && news && !sends.tx.on_lane() {
                        edges |= EDGE_OUT;
                    }
                    reg.flags.fetch_or(edges, Relaxed);
                    if edges != 0 {
                        push(s, low);
                    }
                }
            }
            TAG_BELL => {
                if let Some(l) = groups::by_index(low as usize) {
                    if l.drain_bell() == lane::notify::doorbell::Drained::Gone {
                        let _ = sys::epoll_ctl(fd, libc::EPOLL_CTL_DEL, l.bell(), 0, 0);
                        l.gone();
                    }
                    wait::forward(l, None, Some(i as usize));
                }
            }
            TAG_WAKE => {
                let mut b = [0u8; 8];
                let _ = sys::read(s.wake_fd.load(Relaxed), b.as_mut_ptr(), 8);
            }
            TAG_CTL => daemon::pump(),
            _ => {}
        }
    }
}

/// Removes the inner set's own entry from what the kernel returned. Returns the place where it was.
///
/// # Safety
/// `evs` holds `*n` events.
pub(super) unsafe fn strip(evs: *mut epoll_event, n: &mut usize) -> Option<usize> {
    for k in 0..*n {
        // SAFETY: `k < n`.
        let e = unsafe { evs.add(k).read_unaligned() };
        if { e.u64 } == mark() {
            *n -= 1;
            // SAFETY: all indices are below the old `n`. The others keep the kernel's order.
            unsafe { core::ptr::copy(evs.add(k + 1), evs.add(k), *n - k) };
            return Some(k);
        }
    }
    None
}

/// The kernel's events, without the inner set's own entry.
pub(super) struct Found {
    pub(super) n: usize,
    /// The place of that entry: the events before it came earlier, and not from the inner set.
    pub(super) at: Option<usize>,
}

/// The kernel has returned `n` events to the application. If that is fewer than `max`, it had no more.
pub(super) fn told(s: &Set, n: usize, max: usize) {
    if n < max {
        s.told.fetch_add(1, SeqCst);
    }
}

/// Did a wait in the kernel fail because it had no memory for its event? That may be the event of our inner set.
pub(super) fn faulted(s: &Set, r: i32) -> bool {
    r < 0 && crate::errno() == libc::EFAULT && s.inner.load(Relaxed) >= 0
}

/// What the kernel has ready in the application's set, and in the inner one. `None`: the array has no memory for an
/// event.
///
/// # Safety
/// `evs` is the application's array of `max` events.
pub(super) unsafe fn look_at_kernel(
    i: u32,
    s: &Set,
    evs: *mut epoll_event,
    max: usize,
) -> Option<Found> {
    s.looked.store(ticks(), Relaxed);
    let poll = || sys::epoll_poll(s.epfd.load(Relaxed), evs, num::int(max as u64));
    let mut n = match poll() {
        Err(libc::EFAULT) => {
            inner(i, s); // was it the inner set's event that faulted?
            match poll() {
                Err(libc::EFAULT) => return None,
                r => r.unwrap_or(0),
            }
        }
        r => r.unwrap_or(0),
    };
    told(s, n, max);
    // SAFETY: the kernel wrote `n` events.
    let mut at = unsafe { strip(evs, &mut n) };
    if at.is_some() {
        inner(i, s);
        if max == 1 {
            // The inner set's entry took the only place of the array. Another entry may be ready behind it, and comes
            // first now.
            n = poll().unwrap_or(0);
            // SAFETY: as above.
            at = unsafe { strip(evs, &mut n) }.or(at);
        }
    }
    Some(Found { n, at })
}
