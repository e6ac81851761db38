//! `TCP_INQ`: receives also report how many more bytes there are to read.

use crate::state::{attached, table};
use crate::sys::{self, lock, pages};
use core::sync::atomic::Ordering::*;
use lane::family::{flag, Conn};
use lane::half::rx;
use lane::num;
use libc::{cmsghdr, msghdr};

/// Notes whether the option is set. Called when it is set, and when a lane is attached, because an accepted socket
/// inherits it from its listener.
pub fn sync_inq(c: &Conn, fd: i32) {
    if sys::getsockopt_u32(fd, libc::IPPROTO_TCP, libc::TCP_INQ).is_ok_and(|v| v != 0) {
        c.flags.fetch_or(flag::INQ, Relaxed);
    } else {
        c.flags.fetch_and(!flag::INQ, Relaxed);
    }
}

/// Finishes the control data of a receive from a lane: empty, or the kernel's hint.
///
/// # Safety
/// `m` is the application's message header.
#[inline(always)]
pub unsafe fn put_inq(i: u32, fd: i32, m: &mut msghdr) {
    if table::conn(i).flags.load(Relaxed) & flag::INQ == 0 {
        m.msg_controllen = 0;
    } else {
        let hint = crate::preserving_errno(|| hint(i, fd)).to_ne_bytes();
        // SAFETY: passed on.
        unsafe { put_control(m, libc::IPPROTO_TCP, libc::TCP_CM_INQ, &hint) }
    }
}

/// Writes control data like the kernel's `put_cmsg`: what does not fit is cut off, and MSG_CTRUNC is set.
///
/// # Safety
/// As [`put_inq`].
#[cold]
pub unsafe fn put_control(m: &mut msghdr, level: i32, kind: i32, data: &[u8]) {
    const HEADER: usize = core::mem::size_of::<cmsghdr>();
    let n = num::small(data.len());
    // SAFETY: plain arithmetic.
    let (whole, space) = unsafe { (libc::CMSG_LEN(n) as usize, libc::CMSG_SPACE(n) as usize) };
    let room = m.msg_controllen;
    m.msg_controllen = 0;
    if m.msg_control.is_null() || room < HEADER {
        m.msg_flags |= libc::MSG_CTRUNC;
        return;
    }
    let len = whole.min(room);
    if !pages::writable(m.msg_control, len) {
        return;
    }
    if len < whole {
        m.msg_flags |= libc::MSG_CTRUNC;
    }
    // SAFETY: all-zero is a valid header.
    let mut head: cmsghdr = unsafe { core::mem::zeroed() };
    head.cmsg_len = len as _;
    head.cmsg_level = level;
    head.cmsg_type = kind;
    // SAFETY: the application promises `room` writable bytes; `HEADER <= len <= room`.
    unsafe {
        m.msg_control.cast::<cmsghdr>().write_unaligned(head);
        let to = m.msg_control.cast::<u8>().add(HEADER);
        to.copy_from_nonoverlapping(data.as_ptr(), len - HEADER);
    }
    m.msg_controllen = space.min(room);
}

/// Bytes that are left to read, plus one for the end of the stream: `tcp_inq_hint` of the kernel.
fn hint(i: u32, fd: i32) -> i32 {
    let c = table::conn(i);
    let tcp = sys::poll1(fd, libc::POLLIN | libc::POLLRDHUP);
    let ring = match tcp {
        0 => on_ring(i, c),
        _ => None,
    };
    let unread = ring
        .or_else(|| super::unread(i, fd))
        .or_else(|| sys::ioctl_i32(fd, libc::FIONREAD).ok())
        .unwrap_or(0);
    // (A reset is no end, nor is the FIN of a process that has died with bytes of ours unread on the ring.)
    let end = tcp & (libc::POLLRDHUP | libc::POLLERR) == libc::POLLRDHUP
        && end_received(fd)
        && !attached::of(c, table::local(i)).is_some_and(|(_, m)| c.rx.is_reset_by_death(&m));
    unread.saturating_add(i32::from(end))
}

/// Unread bytes of the ring, if no bytes of TCP come before them.
fn on_ring(i: u32, c: &Conn) -> Option<i32> {
    let (_, m) = attached::of(c, table::local(i))?;
    let _g = lock::lock(&c.rx.lock)?;
    let up = c.rx.mode.load(Relaxed) == rx::mode::RING;
    up.then(|| num::int(c.rx.ring_unread(&m)))
}

/// Has the peer's FIN arrived? (POLLRDHUP is also set by a `shutdown` of this end.)
fn end_received(fd: i32) -> bool {
    // CLOSE_WAIT, LAST_ACK, CLOSING, TIME_WAIT, CLOSE.
    matches!(sys::tcp_state(fd), Some(8 | 9 | 11 | 6 | 7))
}
