//! Sizes of buffers. What an application has asked for (SO_SNDBUF, SO_RCVBUF, TCP_NOTSENT_LOWAT) bounds what a lane
//! takes unread about as it bounds TCP: `link::layout::unread_max`. Buffers of which nobody has asked anything grow
//! with use, and rings do so in their own way.

use crate::table::{self, Local};
use crate::{lane, lock, sets, sys, wait};
use link::family::Conn;
use link::lane::Memory;
use link::layout::RING_FAST_LOG2;

/// Which sizes were asked for (Linux 5.15), and the bits of its answer.
const SO_BUF_LOCK: i32 = 72;
const SNDBUF_LOCKED: u32 = 1;
const RCVBUF_LOCKED: u32 = 2;

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

/// Tells both halves what the kernel says of socket `fd`: when a lane is attached, for a socket may have it from its
/// listener. The locks of both are held.
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
    // The kernel counts its own structures as well: half of it is for bytes.
    c.rx.set_room(m, asked(RCVBUF_LOCKED, libc::SO_RCVBUF) / 2);
}

/// The ring has grown beyond what makes it fast, to take what the kernel would: no more than that, which TCP takes should
/// the connection leave its lane. The sending lock is held.
pub fn as_kernel(c: &Conn, m: &Memory, fd: i32) {
    let sndbuf = sys::getsockopt_u32(fd, libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(SNDBUF_MIN);
    c.tx.set_sndbuf(m, sndbuf);
}

/// The application has set such an option: who waits for room looks anew.
#[cold]
pub fn set(i: u32) {
    let (c, l): (&Conn, &Local) = (table::conn(i), table::local(i));
    {
        // What attaches a lane meanwhile has asked the kernel before, or does so later.
        let (Some(_t), Some(_r)) = (lock::lock(&c.tx.lock), lock::lock(&c.rx.lock)) else {
            return;
        };
        let Some((_, m)) = lane::of(c, l) else {
            return;
        };
        sync(c, &m, l.fd.load(core::sync::atomic::Ordering::Relaxed));
    }
    sets::stir(i);
    wait::look(i);
}
