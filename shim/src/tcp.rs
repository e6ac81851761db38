//! The TCP socket below the lane: what a call on a connection holds while it runs, and what the socket reports and does
//! for it.
//!
//! The rooms above decide whether bytes go over the lane or over TCP. Nothing here does, and nothing here waits, except
//! in the application's own native call.

pub mod after_down;
pub mod bufs;
pub mod call;
pub mod ends;
mod errors;
mod identity;
mod inq;
pub mod native;
pub mod port;
pub mod probes;

pub use crate::state::table::is_other;
pub use crate::sys::at_mark;
pub use errors::{
    check, count_reset, disconnect, disconnect_told, error_now, instead_of_end, peer_check,
    recv_or_told, reset, reset_if_open, send_or_told, CLOSE, CLOSE_WAIT,
};
pub use identity::{proven, still};
pub use inq::{put_control, put_inq, sync_inq};
pub use native::{recount, Way};

use crate::set_errno;
use crate::state::{attached, table};
use crate::sys::{self, lock};
use crate::tcp::port::Sock;
use core::sync::atomic::Ordering::*;
use lane::family::{flag, Conn};
use lane::num;
use std::sync::OnceLock;

/// Functions of higher modules that close what calls have kept open and forget descriptor numbers. (They are set
/// when the library is loaded, because this module must not name higher ones.)
pub struct Listener {
    /// The last call that slept on a connection has ended, and the connection's last descriptor is closed.
    pub finish_close: fn(u32),
    /// A descriptor number does not stand for this connection any more.
    pub vanished: fn(i32, u32),
}

static LISTENER: OnceLock<Listener> = OnceLock::new();

pub fn listen(l: Listener) {
    let _ = LISTENER.set(l);
}

/// A send after the end of the stream: EPIPE, and SIGPIPE unless the call does not want it.
pub fn broken(flags: i32) -> isize {
    if flags & libc::MSG_NOSIGNAL == 0 {
        sys::raise(libc::SIGPIPE);
    }
    fail(libc::EPIPE)
}

pub fn fail(e: i32) -> isize {
    set_errno(e);
    -1
}

/// The result of a call that ends with error `e` after `total` bytes: the count, if there is one, or the error.
pub fn fail_or(total: usize, e: i32) -> isize {
    match total {
        0 => fail(e),
        n => num::ssize(n),
    }
}

/// Is the call non-blocking?
#[inline(always)]
pub fn nonblocking(c: &Conn, flags: i32) -> bool {
    flags & libc::MSG_DONTWAIT != 0 || c.flags.load(Relaxed) & flag::NONBLOCK != 0
}

/// Takes the lock of a direction for a call. A call that may not block gives up soon if the holder is stopped.
#[inline(always)]
pub fn lock_for<'a>(word: &'a core::sync::atomic::AtomicU32, nb: bool) -> Option<lock::Guard<'a>> {
    match nb {
        true => lock::lock_within(word, 40),
        false => lock::lock(word),
    }
}

/// End of the wait that SO_RCVTIMEO or SO_SNDTIMEO allows, in CLOCK_MONOTONIC ns; `None`: for ever.
pub fn deadline(c: &Conn, fd: i32, name: i32) -> Option<u64> {
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

pub fn left_ms(deadline: Option<u64>) -> i64 {
    match deadline {
        None => -1,
        Some(d) => num::long(d.saturating_sub(sys::now_ns()).div_ceil(1_000_000)),
    }
}

/// The connection was closed by another thread before the call slept: returns the bytes done, or EBADF.
#[cold]
pub fn closed(total: usize) -> isize {
    fail_or(total, libc::EBADF)
}

/// Bytes that a receive would find, for FIONREAD.
pub fn unread(i: u32, fd: i32) -> Option<i32> {
    let c = table::conn(i);
    if !c.rx.engaged() {
        return None;
    }
    let (group, m) = attached::of(c, table::local(i))?;
    let _g = lock::lock(&c.rx.lock)?;
    let unread = c.rx.unread(&m, &Sock::new(fd, group))?;
    Some(num::int(unread))
}
