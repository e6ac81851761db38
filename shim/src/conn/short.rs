//! Short counts. A ring is smaller than the kernel's send buffer, and programs rely on that buffer: it takes a
//! message sent with MSG_DONTWAIT, or on a socket with a time-out, as a whole, and nobody looks at the count. So
//! if the kernel would have taken more than the ring has room for, a send that may not wait gives the reader a
//! moment, and then goes down to TCP, whose buffer takes the usual amount.
//!
//! Programs that are known to continue after a short count get one, and stay on the lane: those that watch for
//! room with epoll, or with poll or select among other descriptors (an event loop; a single descriptor may just
//! implement a time-out), and those that have sent the rest of a message. But a program that is refused room, and
//! sends again before it was told of some, does not simply wait for room: it has a queue of its own, perhaps with
//! a limit (servers that disconnect slow readers).

use crate::promotion::full;
use crate::readiness::wait::{self, For};
use crate::state::groups::LinkGroup;
use crate::state::table::Local;
use crate::sys::{self, lock};
use crate::tcp::call::Call;
use crate::tcp::CLOSE;
use core::sync::atomic::Ordering::*;
use lane::family::Conn;
use lane::half::Memory;
use lane::num;
use libc::iovec;

/// Milliseconds that the reader gets to make room, once per call.
const READER_MS: u64 = 3;

/// The address of byte `n` of a message; 0 if there is no such byte.
fn address(vecs: &[iovec], mut n: usize) -> usize {
    for v in vecs {
        if n < v.iov_len {
            return v.iov_base as usize + n;
        }
        n -= v.iov_len;
    }
    0
}

/// Notes that a send has taken `n` bytes of these buffers, and not all.
#[cold]
pub fn told(l: &Local, vecs: &[iovec], n: isize) {
    l.starved.store(1, Relaxed);
    let rest = if n > 0 {
        address(vecs, num::count(n))
    } else {
        0
    };
    l.rest.store(rest, Relaxed);
}

/// A send has found the ring full and returns EAGAIN. Many programs send until they get that, and then wait; so
/// another attempt counts only if it comes after a while.
#[cold]
pub fn refused(l: &Local) {
    if l.refused.load(Relaxed) == 0 {
        let from = num::low32(sys::now_ms() + READER_MS);
        l.refused.store(from.max(2), Relaxed);
    }
}

/// Was the program refused room, and has it sent again before it was told of some?
fn sends_all_the_same(l: &Local) -> bool {
    match l.refused.load(Relaxed) {
        0 => false,
        1 => true,
        from => num::low32(sys::now_ms()).wrapping_sub(from) <= u32::MAX / 2,
    }
}

/// A send begins: does it start with the rest of an earlier one?
#[inline(always)]
pub fn begins(l: &Local, vecs: &[iovec]) {
    if l.rest.load(Relaxed) != 0 {
        let rest = l.rest.swap(0, Relaxed);
        if address(vecs, 0) == rest {
            l.copes.store(1, Relaxed);
        }
    }
}

/// Would the kernel have taken more of a send that finds the ring full and may not wait (any longer)? It would not
/// if its buffer would be full by now, too, or is as small as the application has set it. `total`: bytes that this
/// call has sent.
#[cold]
pub fn kernel_has_room(c: &Conn, l: &Local, m: &Memory, fd: i32, total: usize) -> bool {
    let waits = l.copes.load(Relaxed) != 0 && !sends_all_the_same(l);
    if waits || c.tx.is_bounded(m) {
        return false;
    }
    let unread = match lock::lock(&c.tx.lock) {
        Some(_g) => c.tx.unread(m).unwrap_or(0),
        None => return false,
    };
    let room = sys::getsockopt_u32(fd, libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(0);
    unread.max(total as u64) < u64::from(room)
}

/// In that case, the send gives the reader a moment, and then goes down. `until`: the end of that moment.
#[cold]
pub fn make_room(
    call: &mut Call,
    i: u32,
    (c, l): (&Conn, &Local),
    (group, m): (&LinkGroup, &Memory),
    until: &mut u64,
) {
    let now = sys::now_ms();
    if *until == 0 {
        *until = now + READER_MS;
    }
    match until.saturating_sub(now) {
        // (If the connection was closed meanwhile, the caller finds out.)
        left if left > 0 && call.hold(c, l) => {
            wait::wait(i, c, l, For::Space, num::long(left), false);
        }
        _ => full::go_down_full(c, l, group, m, || call.current(c, l)),
    }
}

/// The return value of a send that ends after `total` bytes, with `left` not sent.
pub fn counted((c, l): (&Conn, &Local), fd: i32, total: usize, left: usize) -> isize {
    let whole = total + left;
    match left > 0 && was_taken((c, l), fd, total, whole) {
        true => num::ssize(whole),
        false => num::ssize(total),
    }
}

/// A send of `whole` bytes has sent `total`, and the connection was reset meanwhile (not shut down by this
/// process). With kernel TCP, all bytes would have been in the buffer before the other end could read the first
/// one and reset the connection; the call would return `whole`, and the next one the error. True: return the same.
/// (Sends that may not have fitted into that buffer get a short count from the kernel, too.)
#[cold]
pub fn was_taken((c, l): (&Conn, &Local), fd: i32, total: usize, whole: usize) -> bool {
    // (A socket that is closed without an error was ended by both ends.)
    let reset = || {
        let error = c.has_error() || sys::poll1(fd, 0) & libc::POLLERR != 0;
        error && sys::tcp_state(fd) == Some(CLOSE) && l.sends_ended.load(Relaxed) == 0
    };
    let room = || sys::getsockopt_u32(fd, libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(0) as usize;
    // (Half of the buffer, because the kernel's own structures count in its size.)
    total > 0 && reset() && whole <= room() / 2
}
