//! Sizes of buffers. What an application has set (SO_SNDBUF, SO_RCVBUF, TCP_NOTSENT_LOWAT) limits the unread bytes
//! on a lane to about what TCP would take: `lane::abi::unread_max`. Buffers whose size nobody has set grow with
//! use, and rings grow by rules of their own.

use crate::state::{attached, table};
use crate::sys;
use lane::abi::RING_FAST_LOG2;
use lane::family::Conn;
use lane::half::Memory;
use lane::os::room::{RCVBUF_LOCKED, SNDBUF_LOCKED, SO_BUF_LOCK};

/// The kernel's smallest send buffer.
const SNDBUF_MIN: u32 = 4608;

/// Is it one of these options?
pub fn is_size(level: i32, name: i32) -> bool {
    match level {
        libc::SOL_SOCKET => matches!(
            name,
            libc::SO_SNDBUF
                | libc::SO_RCVBUF
                | libc::SO_SNDBUFFORCE
                | libc::SO_RCVBUFFORCE
                | SO_BUF_LOCK
        ),
        libc::IPPROTO_TCP => name == libc::TCP_NOTSENT_LOWAT,
        _ => false,
    }
}

/// Passes the socket's sizes to both halves. Also called when a lane is attached, because an accepted socket
/// inherits sizes from its listener. The locks of both directions are held.
pub fn sync(c: &Conn, m: &Memory, fd: i32) {
    let option = |level, name| sys::getsockopt_u32(fd, level, name).unwrap_or(0);
    let locked = option(libc::SOL_SOCKET, SO_BUF_LOCK);
    let asked = |bit, name| match locked & bit {
        0 => 0,
        _ => option(libc::SOL_SOCKET, name),
    };
    let unsent = option(libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT);
    let sndbuf = match (asked(SNDBUF_LOCKED, libc::SO_SNDBUF), unsent) {
        (size, 0) => size,
        (0, unsent) => unsent.max(SNDBUF_MIN),
        (size, unsent) => size.min(unsent.max(SNDBUF_MIN)),
    };
    let sndbuf = match sndbuf {
        0 if c.tx.ring_log2() > RING_FAST_LOG2 => option(libc::SOL_SOCKET, libc::SO_SNDBUF),
        asked => asked,
    };
    c.tx.set_sndbuf(m, sndbuf);
    // The kernel counts its own structures, too: half of the size is for bytes.
    c.rx.set_room(m, asked(RCVBUF_LOCKED, libc::SO_RCVBUF) / 2);
}

/// Waits until a daemon that has taken this direction over is done, at most so many milliseconds: it changes sizes, too.
pub fn await_daemon(c: &Conn) {
    const MOST_MS: u64 = 100;
    let end = sys::now_ms() + MOST_MS;
    let held = || attached::of(c, table::local_of(c)).is_some_and(|(_, m)| c.tx.is_recorded(&m));
    while held() && sys::now_ms() < end {
        let _ = sys::poll_ms(-1, 0, 1);
    }
}

/// After the ring has grown beyond the size that makes it fast, so as to hold what the kernel would: limits its
/// unread bytes to the kernel's send buffer, because TCP must take them if the connection leaves its lane. The
/// sending lock is held.
pub fn as_kernel(c: &Conn, m: &Memory, fd: i32) {
    let sndbuf = sys::getsockopt_u32(fd, libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(SNDBUF_MIN);
    c.tx.set_sndbuf(m, sndbuf);
}
