//! The kernel's TCP connection of an end, as the lane uses it.

use lane::half::Port;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The TCP connection of an end.
pub struct Sock<'a> {
    pub fd: BorrowedFd<'a>,
    pub bell: Option<BorrowedFd<'a>>,
}

impl Port for Sock<'_> {
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the lane's code gives `len` readable bytes.
        let n = unsafe { libc::send(self.fd.as_raw_fd(), data.cast(), len, flags) };
        usize::try_from(n).map_err(|_| errno())
    }

    fn tcp_recv(&self, buf: *mut u8, len: usize, peek: bool) -> Result<usize, i32> {
        let mut flags = libc::MSG_DONTWAIT;
        flags |= if peek { libc::MSG_PEEK } else { 0 };
        flags |= if buf.is_null() { libc::MSG_TRUNC } else { 0 };
        // SAFETY: the lane's code gives `len` writable bytes, or none and MSG_TRUNC.
        let n = unsafe { libc::recv(self.fd.as_raw_fd(), buf.cast(), len, flags) };
        usize::try_from(n).map_err(|_| errno())
    }

    fn tcp_unread(&self) -> Result<usize, i32> {
        let n = rustix::io::ioctl_fionread(self.fd);
        n.map(|n| n as usize).map_err(|e| e.raw_os_error())
    }

    fn tcp_sent(&self) -> Option<u64> {
        underpassd::os::sockopt::tcp_position(self.fd)
            .ok()
            .map(|p| p.sent)
    }

    fn ring(&self) {
        self.bell
            .iter()
            .for_each(|b| lane::notify::doorbell::ring(*b));
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
