//! The TCP socket of a connection's end, which the daemon has a copy of.

use crate::os::system::System;
use lane::half::Port;
use lane::proto::frame::{Frame, LEN};
use rustix::net::RecvFlags;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The socket as the lane's code uses it, on helper threads.
pub(crate) struct Sock<'a> {
    pub fd: BorrowedFd<'a>,
    pub system: &'a dyn System,
    /// Its end leaves, or ends.
    pub leaves: bool,
}

impl Port for Sock<'_> {
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        // SAFETY: the lane's code gives memory that is mapped for `len` bytes: a frame of its own, or
        // ring bytes, which the process may change meanwhile; the kernel only reads them.
        let bytes = unsafe { std::slice::from_raw_parts(data, len) };
        self.system.tcp_send(self.fd, bytes)
    }

    fn tcp_send_more(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(data, len) };
        self.system.tcp_send_more(self.fd, bytes)
    }

    fn leaves(&self) -> bool {
        self.leaves
    }

    fn tcp_recv(&self, _: *mut u8, _: usize, _: bool) -> Result<usize, i32> {
        Err(libc::EAGAIN) // a sending direction receives nothing
    }

    fn tcp_unread(&self) -> Result<usize, i32> {
        Ok(0) // as above
    }

    fn tcp_sent(&self) -> Option<u64> {
        self.system.tcp_sent(self.fd)
    }

    fn ring(&self) {}
}

/// Resets a connection: connect(AF_UNSPEC) on an established socket sends RST (`tcp_disconnect`).
pub(crate) fn disconnect(sock: BorrowedFd<'_>) {
    let unspec = [0u8; 16];
    // SAFETY: 16 readable bytes, a sockaddr of family 0; the call changes only the socket.
    let _ = unsafe { libc::connect(sock.as_raw_fd(), unspec.as_ptr().cast(), 16) };
}

/// Are there bytes that the application will never read? TCP answers them with a reset at the close. A frame of
/// the lane is not such data; it is read here, because the kernel would count it.
pub(crate) fn unread(sock: BorrowedFd<'_>, tag: u64) -> bool {
    let mut b = [0u8; LEN + 1];
    let flags = RecvFlags::DONTWAIT;
    let n = match rustix::net::recv(sock, &mut b[..], flags | RecvFlags::PEEK) {
        Ok((n, _)) if n > 0 => n,
        _ => return false,
    };
    let Some(frame) = b.first_chunk::<LEN>().filter(|_| n == LEN) else {
        return !Frame::could_start(&b[..n.min(LEN)]) || n > LEN;
    };
    match Frame::decode(frame) {
        Some(f) if f.tag == tag && f.rest == 0 => {
            let _ = rustix::net::recv(sock, &mut b[..LEN], flags);
            false
        }
        _ => true,
    }
}
