//! The lane: two directions, each of which is on TCP or on its ring, and switches between the two
//! at exact byte offsets.
//!
//! [`tx`] is the sending half, [`rx`] the receiving half; both keep their private state in the
//! family table (so that forked holders agree about it) and speak to the other end only through
//! the words of [`crate::layout`] and the frames of [`crate::frame`]. [`wake`] is the publish and
//! sleep protocol that the doorbell stands on. TCP itself is behind [`Port`], so that the same code
//! runs under the shim, and under the random-operations tests with a simulated socket.

#[cfg(all(test, loom))]
mod checked;
pub mod mem;
mod ring;
pub mod rx;
pub mod tx;
pub mod wake;

pub use mem::{Area, Iov, Memory};
pub use rx::{Received, RxState};
pub use tx::{Sent, TxState};

/// The TCP connection of an end, as its lane needs it. No call may block, and none may be a
/// cancellation point: they run under the lane's lock. Errors are errno values.
pub trait Port {
    /// Sends without blocking; `Err(EAGAIN)` when the kernel's buffer is full.
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32>;
    /// Receives without blocking; `Ok(0)` is end of file. A null `buf` discards (`MSG_TRUNC`).
    fn tcp_recv(&self, buf: *mut u8, len: usize, peek: bool) -> Result<usize, i32>;
    /// Bytes that the kernel would hand out now (SIOCINQ).
    fn tcp_unread(&self) -> Result<usize, i32>;
    /// Stream bytes the kernel has accepted from us: sent - retransmitted + not yet sent
    /// (`TCP_INFO`); `None` if it cannot tell.
    fn tcp_sent(&self) -> Option<u64>;
    /// Rings the other party's doorbell; never blocks, failure does not matter.
    fn ring(&self);
}

/// Outcome of something that may have to wait for TCP's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Done,
    Blocked,
}
