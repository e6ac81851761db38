//! The TCP connection of an end, as its lane uses it.

mod peek;

use crate::state::groups::LinkGroup;
use crate::state::table;
use crate::sys::{self, pages};
use core::sync::atomic::Ordering::*;
use lane::half::{Iov, Port, KEPT};
use lane::os::room;

/// Rings the other client.
pub fn ring(group: &LinkGroup) {
    if group.ring() {
        if let Some(t) = table::table() {
            t.header.stats.rings.fetch_add(1, Relaxed);
        }
    }
}

/// Leaves the socket in the state after a reset: EPIPE, POLLHUP, and end of file after the bytes in TCP's queue,
/// which a `disconnect` would discard. False: it was closed before.
pub fn cut(fd: i32) -> bool {
    sys::shutdown(fd, libc::SHUT_RDWR) != Err(libc::ENOTCONN)
}

/// Do these events of a socket say that its connection has ended both ways? (POLLERR alone does not: notifications of
/// MSG_ZEROCOPY set it, too, and so do errors that an ICMP message has brought.)
pub fn is_over(fd: i32, events: i16) -> bool {
    events & libc::POLLHUP != 0
        || events & libc::POLLERR != 0 && sys::tcp_state(fd) == Some(sys::CLOSE)
}

/// The TCP connection of an end, for its lane.
pub struct Sock<'a> {
    pub fd: i32,
    pub group: &'a LinkGroup,
    leaves: bool,
}

impl<'a> Sock<'a> {
    pub fn new(fd: i32, group: &'a LinkGroup) -> Self {
        let leaves = false;
        Sock { fd, group, leaves }
    }

    /// That of an end that leaves its lane, or ends.
    pub fn leaving(fd: i32, group: &'a LinkGroup) -> Self {
        let leaves = true;
        Sock { fd, group, leaves }
    }

    /// Has TCP ended with an error that has not been reported yet?
    fn has_error(&self) -> bool {
        let e = sys::poll1(self.fd, 0) & libc::POLLERR;
        e != 0 && is_over(self.fd, e)
    }
}

impl room::Options for Sock<'_> {
    fn get(&self, level: i32, name: i32) -> Option<u32> {
        sys::getsockopt_u32(self.fd, level, name).ok()
    }
    fn set(&self, level: i32, name: i32, value: u32) -> bool {
        sys::setsockopt(self.fd, level, name, &value.to_ne_bytes()).is_ok()
    }
}

impl Port for Sock<'_> {
    #[inline(always)]
    fn readable(&self, p: *const u8, n: usize) -> bool {
        pages::readable(p, n)
    }
    #[inline(always)]
    fn writable(&self, p: *mut u8, n: usize) -> bool {
        pages::writable(p, n)
    }
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        match table::is_other(self.fd) {
            true => Err(libc::EBADF),
            false if self.has_error() => Err(KEPT),
            false => sys::send(self.fd, data, len),
        }
    }
    fn tcp_send_more(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        // (A thread that reads or sets the size waits for the lock that we hold: `hooks::sock`.)
        room::with_more(self, false, || self.tcp_send(data, len))
    }
    fn leaves(&self) -> bool {
        self.leaves
    }
    fn tcp_recv(&self, buf: *mut u8, len: usize, peek: bool) -> Result<usize, i32> {
        if peek && self.has_error() && self.tcp_unread() == Ok(0) {
            return Err(KEPT);
        }
        let flags =
            if peek { libc::MSG_PEEK } else { 0 } | if buf.is_null() { libc::MSG_TRUNC } else { 0 };
        sys::recv(self.fd, buf, len, flags)
    }
    fn tcp_peek(
        &self,
        iov: Iov<'_>,
        first: usize,
        gap: &mut [u8],
        rest: usize,
    ) -> Result<usize, i32> {
        match self.has_error() && self.tcp_unread() == Ok(0) {
            true => Err(KEPT),
            false => peek::peek(self.fd, iov, (first, gap, rest)),
        }
    }
    fn tcp_unread(&self) -> Result<usize, i32> {
        sys::ioctl_i32(self.fd, libc::FIONREAD).map(|n| usize::try_from(n).unwrap_or(0))
    }
    fn tcp_sent(&self) -> Option<u64> {
        sys::tcp_position(self.fd).map(|p| p.sent)
    }
    fn tcp_taken(&self) -> Option<u64> {
        sys::tcp_position(self.fd)?.bytes_taken()
    }
    fn tcp_at_mark(&self) -> bool {
        sys::at_mark(self.fd)
    }
    fn tcp_cut(&self) -> bool {
        table::is_other(self.fd) || cut(self.fd)
    }
    fn tcp_end(&self) {
        if !table::is_other(self.fd) {
            let _ = sys::shutdown(self.fd, libc::SHUT_WR);
        }
    }
    fn tcp_push(&self) {
        // (A thread that reads or sets this option waits for the lock that we hold: `hooks::sock`.)
        let (tcp, name) = (libc::IPPROTO_TCP, libc::TCP_NODELAY);
        if sys::getsockopt_u32(self.fd, tcp, name) == Ok(0) {
            for on in [1i32, 0] {
                let _ = sys::setsockopt(self.fd, tcp, name, &on.to_ne_bytes());
            }
        }
    }
    fn ring(&self) {
        ring(self.group);
    }
}
