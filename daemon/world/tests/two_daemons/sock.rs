//! The kernel's TCP connection of an end, as the lane's code in a process uses it.

use super::app::{App, Half};
use super::tcp;
use lane::half::{Iov, Port, RxState, TxState};
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;

/// The TCP connection of an end.
pub struct Sock<'a> {
    pub fd: BorrowedFd<'a>,
    pub bell: Option<BorrowedFd<'a>>,
    tx: Half<TxState>,
    rx: Half<RxState>,
}

impl<'a> Sock<'a> {
    pub fn new(app: &App, fd: BorrowedFd<'a>, bell: Option<BorrowedFd<'a>>) -> Sock<'a> {
        let (tx, rx) = (app.tx.clone(), app.rx.clone());
        Sock { fd, bell, tx, rx }
    }

    /// Is this within a call of the sending half's, in which the process may be killed? (What it has sent natively
    /// nobody would count.)
    fn sends(&self) -> bool {
        self.tx.lock.load(Relaxed) != 0
    }

    /// The same of the receiving half, and nothing is on its way to the application, with which it would be lost.
    fn looks(&self, taken: bool) -> bool {
        self.rx.lock.load(Relaxed) != 0 && !taken
    }
}

impl Port for Sock<'_> {
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        // SAFETY: the lane's code gives `len` readable bytes.
        let bytes = unsafe { std::slice::from_raw_parts(data, len) };
        tcp::send(self.fd, bytes, self.sends())
    }

    fn tcp_recv(&self, buf: *mut u8, len: usize, peek: bool) -> Result<usize, i32> {
        let taken = !peek && !buf.is_null();
        tcp::recv(self.fd, buf, len, peek, self.looks(taken))
    }

    fn tcp_peek(
        &self,
        iov: Iov<'_>,
        first: usize,
        gap: &mut [u8],
        rest: usize,
    ) -> Result<usize, i32> {
        tcp::peek(self.fd, iov, first, gap, rest)
    }

    fn tcp_unread(&self) -> Result<usize, i32> {
        tcp::unread(self.fd, self.looks(false))
    }

    fn tcp_sent(&self) -> Option<u64> {
        tcp::sent(self.fd, self.sends())
    }

    fn tcp_taken(&self) -> Option<u64> {
        tcp::taken(self.fd)
    }

    fn tcp_end(&self) {
        let _ = rustix::net::shutdown(self.fd, rustix::net::Shutdown::Write);
    }

    fn ring(&self) {
        tcp::between(self.sends());
        self.bell
            .iter()
            .for_each(|b| lane::notify::doorbell::ring(*b));
        tcp::between(self.sends());
    }
}
