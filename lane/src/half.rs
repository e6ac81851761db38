//! The lane: two directions, each of which is on TCP or on its ring, and switches between the two
//! at exact byte offsets.
//!
//! [`tx`] is the sending half, [`rx`] the receiving half; both keep their private state in the
//! family table (so that forked holders agree about it) and speak to the other end only through
//! the words of [`crate::abi`] and the frames of [`crate::proto::frame`]. [`crate::notify`] is the publish and
//! sleep protocol that the doorbell stands on. TCP itself is behind [`Port`], so that the same code
//! runs under the shim, and under the random-operations tests with a simulated socket.

mod baseline;
#[cfg(all(test, loom))]
mod checked;
pub mod leave;
pub mod mem;
mod native_calls;
mod ring;
pub mod rx;
pub mod tx;

use crate::abi::{rx as word, tx as phase};
use crate::num;
pub use baseline::{Baseline, Counted};
use core::sync::atomic::{AtomicU32, Ordering::*};
pub use mem::{Area, Iov, Memory, CALL_MAX};
pub use rx::{Received, RxState};
pub use tx::{Sent, TxState};

/// The other end has no lane any more: will nothing go up here either, and is everything that came down on TCP? Then this
/// end can give its lane back, too. The locks of both directions are held.
pub fn is_clear(tx: &TxState, rx: &RxState, m: &Memory, port: &impl Port) -> bool {
    // (What an end has unread on its ring when it has shut both directions down, no one brings to TCP.)
    if rx.is_deaf(m) && rx.ring_unread(m) > 0 {
        return false;
    }
    let _ = tx.look(m, port); // the peer may have requested to go down before
    tx.end_late(port);
    tx.mode.load(Relaxed) == tx::mode::TCP && matches!(rx.revoke(m, port), Ok(rx::Revoked::Clear))
}

/// The TCP connection of an end, as its lane needs it. No call may block, and none may be a
/// cancellation point: they run under the lane's lock. Errors are errno values.
pub trait Port {
    /// Sends without blocking; `Err(EAGAIN)` when the kernel's buffer is full.
    fn tcp_send(&self, data: *const u8, len: usize) -> Result<usize, i32>;
    /// The same beyond what the kernel's buffer is meant to hold, as far as the kernel allows it.
    fn tcp_send_more(&self, data: *const u8, len: usize) -> Result<usize, i32> {
        self.tcp_send(data, len)
    }
    /// Does this end leave, so that all that is on its way down has to be on TCP at once?
    fn leaves(&self) -> bool {
        false
    }
    /// Receives without blocking; `Ok(0)` is end of file. A null `buf` discards (`MSG_TRUNC`).
    fn tcp_recv(&self, buf: *mut u8, len: usize, peek: bool) -> Result<usize, i32>;
    /// Copies what a receive would take, without blocking, and leaves it there: `first` bytes into the buffers, the
    /// next ones into the `gap`, and then `rest` into the buffers once more. How many they are, the gap's included.
    /// (Only a receiver peeks.)
    fn tcp_peek(
        &self,
        _iov: Iov<'_>,
        _first: usize,
        _gap: &mut [u8],
        _rest: usize,
    ) -> Result<usize, i32> {
        Err(libc::EAGAIN)
    }
    /// Bytes that the kernel would hand out now (SIOCINQ).
    fn tcp_unread(&self) -> Result<usize, i32>;
    /// Sequence numbers that the kernel has taken from us (see [`crate::os::TcpCounts`]); `None` if it cannot
    /// tell now.
    fn tcp_sent(&self) -> Option<u64>;
    /// Stream bytes that the kernel has handed out; `None` if it cannot tell now.
    fn tcp_taken(&self) -> Option<u64> {
        None
    }
    /// Is the next byte of the kernel's queue an urgent one (SIOCATMARK)?
    fn tcp_at_mark(&self) -> bool {
        false
    }
    /// Shuts both directions down here: the other end has died, and its kernel could not tell that it would
    /// have sent a reset. False: TCP was closed before.
    fn tcp_cut(&self) -> bool {
        true
    }
    /// Nothing more is sent: the FIN that the application has asked for (`shutdown(SHUT_WR)`).
    fn tcp_end(&self) {}
    /// What was sent leaves now, whatever else is still to be acknowledged (Nagle's algorithm).
    fn tcp_push(&self) {}
    /// May the application's memory be read there?
    #[inline(always)]
    fn readable(&self, _p: *const u8, _n: usize) -> bool {
        true
    }
    /// May it be written?
    #[inline(always)]
    fn writable(&self, _p: *mut u8, _n: usize) -> bool {
        true
    }
    /// Rings the other client's doorbell; never blocks, failure does not matter.
    fn ring(&self);
}

/// The errno that a call of ours took from the socket in the application's place. The kernel tells an error
/// once; so whoever meets one puts it here, and the application is told it once. One per direction.
#[repr(transparent)]
#[derive(Default)]
pub struct Pending(AtomicU32);

/// What a look says where TCP has ended with an error: it is not taken, for the connection may be another program's
/// next, or be in a set of the kernel's. (No errno, so that [`Pending`] does not keep it.)
pub const KEPT: i32 = 4096;

impl Pending {
    /// Keeps an error. The first one counts: what follows it is only its consequence. Those of a call (it was
    /// interrupted, had a bad argument, found no memory) are none of the socket's, which forgets them.
    pub fn put(&self, e: i32) {
        let of_the_call = matches!(
            e,
            libc::EAGAIN
                | libc::EINTR
                | libc::EFAULT
                | libc::EINVAL
                | libc::EBADF
                | libc::ENOTSOCK
                | libc::ENOMEM
                | libc::ENOBUFS
        );
        if (1..4096).contains(&e) && !of_the_call {
            let _ = self.0.compare_exchange(0, num::bits(e), Relaxed, Relaxed);
        }
    }

    /// 0: there is none.
    #[inline(always)]
    pub fn get(&self) -> i32 {
        num::signed(self.0.load(Relaxed))
    }

    /// Is there one that was not told yet?
    #[inline(always)]
    pub fn is_set(&self) -> bool {
        self.get() != 0
    }

    /// For the application to be told; 0: there is none.
    pub fn take(&self) -> i32 {
        num::signed(self.0.swap(0, Relaxed))
    }
}

/// Across nodes, as the daemon: has an end that only inherited its lane (its owner has ended) gone back to TCP in
/// both directions, for good? `on_tcp`: its receiving half says so, in the family table. The words alone do not: the
/// frame of a way down, with what follows it, may overtake bytes that were on their way to the ring, and then the
/// head moves beyond a cursor that nobody moves any more. From its owner's end on no switch may be taken for it
/// ([`crate::abi::rx::READY`] may stay), so that one which is not there now does not come.
pub fn is_left(m: &Memory<'_>, on_tcp: bool) -> bool {
    // Acquire: pairs with the Release in `TxState::say`.
    let ours = m.own_tx().state.load(Acquire);
    let theirs = m.peer_tx().state.load(Acquire);
    let own = m.own_rx().word.load(Acquire);
    let receives = on_tcp || theirs.epoch() != own.epoch() || own.has(word::CLOSED);
    receives && !matches!(ours.phase(), phase::UP | phase::DOWNING)
}

/// Outcome of something that may have to wait for TCP's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing is left to do.
    Done,
    /// TCP takes nothing now, or somebody else has to act first: ask again.
    Blocked,
}
