//! Short counts. A ring is smaller than the kernel's send buffer, and programs rely on that buffer: a message
//! sent with MSG_DONTWAIT, or on a socket with a time-out, is taken whole there, and nobody looks at the
//! count. So where the kernel would have taken more than the ring has room for, a send that may not wait
//! gives the reader a moment, and then goes down, where TCP takes what it takes.
//!
//! Programs that are known to go on after a short count get one, and stay on the lane: those that watch for
//! room with epoll, or with poll or select among other descriptors (a loop; one alone may be a time-out's), and
//! those that have sent the rest of a message. But one that is refused room, and sends before it was told of some, does not
//! just wait for it: it has a queue of its own, and perhaps a limit for that (servers that throw out slow readers).

use crate::links::Link;
use crate::table::Local;
use crate::tcp::call::Call;
use crate::tcp::CLOSE;
use crate::wait::{self, For};
use crate::{lock, sets, sys};
use core::sync::atomic::Ordering::*;
use libc::iovec;
use link::family::Conn;
use link::lane::Memory;

/// Milliseconds that the reader gets, once per call.
const READER_MS: u64 = 3;

/// The address of byte `n` of a message; 0: there is none.
fn address(vecs: &[iovec], mut n: usize) -> usize {
    for v in vecs {
        if n < v.iov_len {
            return v.iov_base as usize + n;
        }
        n -= v.iov_len;
    }
    0
}

/// A send has taken `n` bytes of these, and not all.
#[cold]
pub fn told(l: &Local, vecs: &[iovec], n: isize) {
    l.starved.store(1, Relaxed);
    let rest = if n > 0 { address(vecs, n as usize) } else { 0 };
    l.rest.store(rest, Relaxed);
}

/// A wait for room (not for the edge at which there is some) has found none: who sends now does not just wait.
#[inline(always)]
pub fn no_room(l: &Local) {
    l.refused.store(1, Relaxed);
}

/// A send has found the ring full, and says EAGAIN. Many a program tries until it is told that, and then waits: so
/// another try counts only if it comes after a while.
#[cold]
pub fn refused(l: &Local) {
    if l.refused.load(Relaxed) == 0 {
        let from = (sys::now_ms() + READER_MS) as u32;
        l.refused.store(from.max(2), Relaxed);
    }
}

/// Has it been refused room, and been told of none since?
fn sends_all_the_same(l: &Local) -> bool {
    match l.refused.load(Relaxed) {
        0 => false,
        1 => true,
        from => (sys::now_ms() as u32).wrapping_sub(from) <= u32::MAX / 2,
    }
}

/// A wait has found room.
#[inline(always)]
pub fn has_room(l: &Local) {
    if l.refused.load(Relaxed) != 0 {
        l.refused.store(0, Relaxed);
    }
}

/// A send begins: with what an earlier one has left?
#[inline(always)]
pub fn begins(l: &Local, vecs: &[iovec]) {
    if l.rest.load(Relaxed) != 0 {
        let rest = l.rest.swap(0, Relaxed);
        if address(vecs, 0) == rest {
            l.copes.store(1, Relaxed);
        }
    }
}

/// A registration with epoll waits for room. (Before anything was sent it waits for the end of a `connect`, which
/// says nothing of later sends, unless it stays.)
#[inline(always)]
pub fn watched(c: &Conn, l: &Local, mask: u32) {
    if l.copes.load(Relaxed) == 0 && mask & sets::OUT != 0 {
        let stays = mask & libc::EPOLLET as u32 != 0;
        if stays || c.tx.kpos.load(Relaxed) > 0 || c.tx.ring_bytes.load(Relaxed) > 0 {
            l.copes.store(1, Relaxed);
        }
    }
}

/// `poll` or `select` looks for room on this connection, among so many descriptors.
#[inline(always)]
pub fn polled(c: &Conn, l: &Local, events: i16, among: usize) {
    if among > 1 && events & libc::POLLOUT != 0 {
        watched(c, l, sets::OUT);
    }
}

/// Would the kernel have taken more of a send that finds the ring full and may not wait, or not any longer?
/// Not if its buffer, too, would be full by now, or is as small as the application wanted it. `total`: what this call
/// has sent.
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

/// What such a send does: gives the reader a moment, then goes down. `until`: the end of that moment.
#[cold]
pub fn make_room(
    call: &mut Call,
    i: u32,
    (c, l): (&Conn, &Local),
    (link, m): (&Link, &Memory),
    until: &mut u64,
) {
    let now = sys::now_ms();
    if *until == 0 {
        *until = now + READER_MS;
    }
    match until.saturating_sub(now) {
        // (Closed meanwhile: the caller finds out.)
        left if left > 0 && call.hold(c, l) => {
            wait::wait(i, c, l, For::Space, left as i64, false);
        }
        _ => super::go_down_full(c, l, link, m, || call.current(c, l)),
    }
}

/// The count of a send that ends after `total` bytes, with `left` to be sent.
pub fn counted((c, l): (&Conn, &Local), fd: i32, total: usize, left: usize) -> isize {
    let whole = total + left;
    match left > 0 && was_taken((c, l), fd, total, whole) {
        true => whole as isize,
        false => total as isize,
    }
}

/// A send of `whole` bytes has sent `total`, and the connection was reset (not: shut down here, meanwhile). The kernel would have had all of them in its buffer before
/// the other end could read the first one, and reset the connection: it says that they are sent, and its next call
/// tells the error. (True: so do we. What may not have fitted into that buffer has a short count there, too.)
#[cold]
pub fn was_taken((c, l): (&Conn, &Local), fd: i32, total: usize, whole: usize) -> bool {
    // (Closed without an error: this end and the other one have ended.)
    let reset = || {
        let error = c.has_error() || sys::poll1(fd, 0) & libc::POLLERR != 0;
        error && sys::tcp_state(fd) == Some(CLOSE) && l.sends_ended.load(Relaxed) == 0
    };
    let room = || sys::getsockopt_u32(fd, libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(0) as usize;
    // (Half of it: the kernel's own needs count in it.)
    total > 0 && reset() && whole <= room() / 2
}
