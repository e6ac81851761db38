//! Sending and receiving: one engine for all the calls of that family.
//!
//! A call comes with its buffers as an iovec and with a closure that makes the native call. Where
//! the direction is on TCP the closure runs, counted; otherwise the lane is used.

mod behind;
pub mod bufs;
pub mod call;
mod errors;
mod identity;
mod inq;
mod leave;
mod native;
mod parts;
mod recv;
mod send;
mod sendfile;
pub mod short;
pub mod zerocopy;

pub use crate::sys::{at_mark, SIOCATMARK};
pub use crate::table::is_other;
pub use errors::{check, disconnect, error_now, recv_or_told, reset, send_or_told, CLOSE};
use errors::{instead_of_end, peer_check};
pub use identity::{proven, still};
pub use inq::{put_inq, sync_inq};
pub use leave::{leave, yield_lane, LEAVE_MS};
pub use native::{recount, Way};
pub use recv::recv;
pub use send::{full_for_long, go_down_full, send};
pub use sendfile::sendfile;

use crate::port::Sock;
use crate::table;
use crate::{control, lane, lock, pages, real, set_errno, sys};
use call::Call;
use core::sync::atomic::Ordering::*;
use libc::iovec;
use link::family::{flag, Conn};

/// Milliseconds without any progress of the reader after which a full ring goes down: kernel buffers
/// hold megabytes, and programs that write before they read rely on it. Longer than a reader that
/// is merely not scheduled takes.
pub const FULL_MS: u64 = 20;
/// Microseconds between two looks at TCP by whoever finds the ring empty.
const LOOK_US: u64 = 20;
/// Microseconds between two looks whether the peer's TCP end is still there, by a sender.
const CHECK_US: u64 = 2000;

/// Milliseconds that a non-blocking send waits for the far node's answer to a switch.
const ASK_MS: i64 = 2;

/// A send after the end: EPIPE, and SIGPIPE unless the call does not want it.
fn broken(flags: i32) -> isize {
    if flags & libc::MSG_NOSIGNAL == 0 {
        sys::raise(libc::SIGPIPE);
    }
    fail(libc::EPIPE)
}

fn fail(e: i32) -> isize {
    set_errno(e);
    -1
}

/// What ends a call of which `total` bytes are done: their number counts for more than an error.
fn fail_or(total: usize, e: i32) -> isize {
    match total {
        0 => fail(e),
        n => n as isize,
    }
}

/// Is the call non-blocking?
#[inline(always)]
fn nonblocking(c: &Conn, flags: i32) -> bool {
    flags & libc::MSG_DONTWAIT != 0 || c.flags.load(Relaxed) & flag::NONBLOCK != 0
}

/// The lock of a direction, for a call; one that may not block does not wait for long for a holder that
/// is stopped.
#[inline(always)]
fn lock_for<'a>(word: &'a core::sync::atomic::AtomicU32, nb: bool) -> Option<lock::Guard<'a>> {
    match nb {
        true => lock::lock_within(word, 40),
        false => lock::lock(word),
    }
}

/// End of the wait that SO_RCVTIMEO or SO_SNDTIMEO allows, in CLOCK_MONOTONIC ns; `None`: for ever.
fn deadline(c: &Conn, fd: i32, name: i32) -> Option<u64> {
    let at_once = match name {
        libc::SO_RCVTIMEO => flag::RCV_AT_ONCE,
        _ => flag::SND_AT_ONCE,
    };
    if c.flags.load(Relaxed) & at_once != 0 {
        return Some(0);
    }
    let mut b = [0u8; 16];
    sys::getsockopt(fd, libc::SOL_SOCKET, name, &mut b).ok()?;
    let half = |o: usize| {
        let mut w = [0u8; 8];
        w.copy_from_slice(&b[o..o + 8]);
        u64::from_ne_bytes(w)
    };
    let ns = half(0)
        .saturating_mul(1_000_000_000)
        .saturating_add(half(8).saturating_mul(1000));
    (ns != 0).then(|| sys::now_ns().saturating_add(ns))
}

fn left_ms(deadline: Option<u64>) -> i64 {
    match deadline {
        None => -1,
        Some(d) => (d.saturating_sub(sys::now_ns()).div_ceil(1_000_000)) as i64,
    }
}

/// The connection was closed by another thread before the call slept: what it has done, or EBADF.
#[cold]
fn closed(total: usize) -> isize {
    fail_or(total, libc::EBADF)
}

/// Bytes that a receive would find, for FIONREAD.
pub fn unread(i: u32, fd: i32) -> Option<i32> {
    let c = table::conn(i);
    if !c.rx.engaged() {
        return None;
    }
    let (link, m) = lane::of(c, table::local(i))?;
    let _g = lock::lock(&c.rx.lock)?;
    let unread = c.rx.unread(&m, &Sock { fd, link })?;
    Some(unread.min(i32::MAX as u64) as i32)
}

/// Bytes that the application has sent and the peer's node does not have yet, besides what the kernel counts:
/// for SIOCOUTQ. On one node what is on the ring is there already, as in the peer's receive queue, and outlives this
/// process and a close; counted is what that queue would not have taken yet.
pub fn outstanding(i: u32) -> i32 {
    let c = table::conn(i);
    if !lane::engaged_tx(c) {
        return 0;
    }
    let Some((_, m)) = lane::of(c, table::local(i)) else {
        return 0;
    };
    let Some(_g) = lock::lock(&c.tx.lock) else {
        return 0;
    };
    c.tx.outstanding(&m).min(i32::MAX as u64) as i32
}
