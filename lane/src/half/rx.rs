//! The receiving half of a lane.
//!
//! Every method must be called with the direction's lock held; none blocks. Each word of the peer is read once,
//! checked, and then used: an impossible value resets the connection.

mod ask;
mod deaf;
mod died;
mod look;
mod past;
mod peek;
mod read;
mod revoke;
mod take;
mod undecided;

pub use deaf::BeforeDeaf;

use super::mem::Memory;
use super::{native_calls, Baseline, Counted, Pending, Port};
use crate::abi::{
    marks, rx, tx, AtomicEpoch, Cursor, Epoch, LocWord, Private, RxWord, Shared, TcpPos, TxPhase,
    RING_LOG2_MAX,
};
use crate::prim::{self, fence_after_rmw};
use crate::proto::frame::LEN;
use crate::proto::reason::Reason;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// States of a receiving half.
pub mod mode {
    use core::convert::identity;

    named! { u32, identity => Mode;
        /// Receives are native; `tcp_pos` counts their bytes.
        TCP: Tcp = 0;
        /// This end has declared itself ready, and the sender may switch at any moment. TCP reads are limited.
        READY: Ready = 1;
        /// The sender has switched; TCP still has bytes of the stream up to `limit`, or this end has not yet said that it has
        /// read them.
        PREFIX: Prefix = 2;
        /// On the ring.
        RING: Ring = 3;
        /// A `Down` frame was seen, or what stands for one in the sender's words: read the ring up to its final head, then
        /// skip, then TCP.
        LAST: Last = 4;
        /// TCP repeats bytes that were already taken from the ring: `skip` of them.
        SKIP: Skip = 5;
        /// This end has revoked: the cursor is frozen until the sender has answered. `revoked_mode` holds the former mode.
        REVOKING: Revoking = 6;
        /// Across nodes: a `Fin` frame was seen: read the ring up to its cursor, then report the end of file.
        FIN: Fin = 7;
        /// Across nodes, after SKIP: the bytes that a `Down` frame announced. TCP is read up to `limit` and may not end
        /// before that.
        REST: Rest = 8;
        /// Across nodes: the link group is gone, and nothing came on the ring since the switch. TCP has bytes of the stream
        /// up to `limit`; what follows them there tells whether the sender had an answer to its switch. See `decide`.
        UNDECIDED: Undecided = 9;
    }
}

/// Maximum number of bytes copied before the cursor is published.
const PIECE: u64 = 16 << 10;

/// Private state, in the family table. Zero is a fresh socket.
#[repr(C, align(64))]
#[derive(Default)]
pub struct RxState {
    /// 0 or the thread id of the holder.
    pub lock: AtomicU32,
    /// One of the constants in [`mode`], stored under the lock. Native calls read it without the lock.
    pub mode: prim::AtomicU32,
    /// Epoch of the last readiness. (No epoch is used twice, even if the readiness was withdrawn.)
    pub epoch: AtomicEpoch,
    /// Number of native receives, and of threads that may sleep in the kernel on this socket without watching the
    /// lane.
    pub native_calls: prim::AtomicU32,
    /// Bytes that hooked calls took from TCP, frames and skipped bytes included.
    pub tcp_pos: Shared<TcpPos>,
    /// Ring cursor: bytes ever consumed.
    cursor: Private<Cursor>,
    /// Location of the ring in use, and the `loc_seq` of the sender that belongs to it.
    loc: Private<LocWord>,
    loc_seq: AtomicU32,
    /// An errno that a call of the shim received from the socket, and that the application was not told yet. It is
    /// told after all bytes that came before it.
    pub error: Pending,
    /// Kernel position at which the TCP bytes end: of the prefix (PREFIX), or of what a frame announced (REST).
    limit: Private<TcpPos>,
    /// The cursor in a `Down` frame (LAST) or a `Fin` frame (FIN).
    frame_cursor: Private<Cursor>,
    /// The last cursor announced to a daemon, which tells it to the remote sender.
    told: Private<Cursor>,
    /// Number of bytes that follow a `Down` frame, counted from the cursor that it names.
    rest: AtomicU64,
    tag: AtomicU64,
    /// Time (ticks) of the last look at TCP: while the ring is empty, the kernel is asked only now and then.
    pub looked: AtomicU64,
    /// Bytes received over rings, for statistics.
    pub ring_bytes: AtomicU64,
    /// Not 0: the application has shut this direction down.
    pub shut: AtomicU32,
    /// A partly received frame, and its length. It is taken out of the kernel's queue: otherwise the kernel would
    /// report the socket as readable until the rest comes, and hide a FIN if it never comes.
    got_len: AtomicU32,
    got: [AtomicU64; LEN / 8],
    // (Last, so that what daemons read in the tables of older shims stays where it is.)
    /// Number of bytes that are still to be skipped on TCP (SKIP).
    skip: AtomicU64,
    /// The mode before the revocation (REVOKING).
    revoked_mode: AtomicU32,
    /// Number of bytes taken from TCP that are not the application's: frames, and what TCP repeats of the ring. Counted
    /// behind `tcp_pos`.
    pub again: AtomicU64,
    /// What was counted when it declared itself ready. In bytes that were padding.
    pub baseline: Baseline,
}

/// Result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// That many bytes; with [`How::peek`] they are still there.
    Bytes(usize),
    /// Nothing now.
    Empty,
    /// End of stream.
    Eof,
    /// TCP's own error, after everything that came before it.
    Error(i32),
    /// This direction is on TCP: receive natively.
    Tcp,
    /// The stream is poisoned; reset the connection.
    Reset(Reason),
}

/// How to receive.
#[derive(Clone, Copy, Default)]
pub struct How {
    /// Leave the bytes where they are (MSG_PEEK).
    pub peek: bool,
    /// Throw the bytes away (MSG_TRUNC on a stream); `Iov` pointers are not written.
    pub discard: bool,
    /// If the ring is empty, ask TCP for frames, an end of file and errors.
    pub look: bool,
    /// The call continues and a part of it is done: it must not take bytes beyond an urgent mark.
    pub part: bool,
}

/// Result of [`RxState::revoke`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revoked {
    /// All bytes still to come will come on TCP.
    Clear,
    /// The sender has to put something on TCP first: ring its doorbell and call again.
    Pending,
    /// Not possible without losing bytes.
    Impossible,
}

native_calls::methods!(RxState);

impl RxState {
    /// Bytes were taken from TCP that are not the application's.
    pub(super) fn took_again(&self, n: u64) {
        self.tcp_pos.add(n, Relaxed);
        // Release: whoever sees this has seen the other.
        self.again.fetch_add(n, Release);
    }

    /// Does this direction receive from the ring?
    pub fn is_up(&self) -> bool {
        matches!(self.mode.load(Relaxed), mode::RING | mode::LAST | mode::FIN)
    }

    /// Does every receive have to go through [`RxState::recv`]?
    #[inline(always)]
    pub fn engaged(&self) -> bool {
        self.mode.load(Relaxed) != mode::TCP
    }

    /// Starts a new use of a lane slot: epochs above `base` belong to it.
    pub fn attach(&self, m: &Memory, base: Epoch, tag: u64) {
        self.cursor.store(m.own_cursor().load(Relaxed), Relaxed);
        self.epoch.store(base, Relaxed);
        self.mode.store(mode::TCP, Relaxed);
        self.tag.store(tag, Relaxed);
        self.got_len.store(0, Relaxed);
        let passes = if m.version() < 5 { 0 } else { marks::PASSES };
        m.own_rx().marks.store(marks::KEPT | passes, Relaxed);
        m.own_rx().room.store(0, Relaxed);
        m.own_rx().word.store(RxWord::default(), Release);
    }

    /// Sets the receive buffer's size if the application has asked for one; 0: it has not.
    pub fn set_room(&self, m: &Memory, bytes: u32) {
        m.own_rx().room.store(bytes, Relaxed);
    }

    /// Declares this end ready for the next epoch. The caller has made sure that no thread can be asleep in the
    /// kernel on this socket unnoticed (`native_calls` is 0, epoll registrations have moved).
    pub fn declare_ready(&self, m: &Memory, port: &impl Port) -> bool {
        if self.mode.load(Relaxed) != mode::TCP {
            return false;
        }
        // A sender that was on the ring when we revoked must have read the revocation before the word says something
        // else. (One that was not on the ring need not: see SYNC
        // retreat in `TxState::try_up`.)
        let word = m.own_rx().word.load(Relaxed);
        if word.has(rx::REVOKED) && matches!(self.phase(m), tx::UP | tx::DOWNING) {
            return false;
        }
        // SYNC native-calls: we change the mode, then look whether native calls are running; `enter_native` counts
        // itself in, then looks at the mode.
        self.mode.swap(mode::READY, SeqCst);
        fence_after_rmw();
        if self.native_calls.load(SeqCst) != 0 {
            self.mode.store(mode::TCP, SeqCst);
            return false;
        }
        let epoch = self.epoch.load(Relaxed).next();
        self.epoch.store(epoch, Relaxed);
        let counted = Counted {
            epoch,
            again: self.again.load(Relaxed),
            ring: self.ring_bytes.load(Relaxed),
        };
        // (The words of the switch are the sender's.)
        self.baseline.store(counted, || ());
        // Release: pairs with the Acquire in `TxState::can_up`.
        m.own_rx()
            .word
            .store(RxWord::new(epoch, rx::READY), Release);
        if m.is_remote() {
            m.publish(port); // a daemon has to forward it
        }
        true
    }

    /// The peer's head, checked against our cursor.
    #[inline(always)]
    fn head(&self, m: &Memory) -> Result<Cursor, Reason> {
        if self.mode.load(Relaxed) == mode::FIN {
            // The sender saw these bytes land before it sent the frame, whatever our daemon has shown us so far.
            return Ok(self.frame_cursor.load(Relaxed));
        }
        // Acquire: pairs with the Release in `TxState::send`; the bytes before the head are in the ring.
        let h = m.peer_head().load(Acquire);
        let c = self.cursor.load(Relaxed);
        if h < c || h - c > 2 << RING_LOG2_MAX {
            return Err(Reason::Hostile);
        }
        Ok(h)
    }

    /// How far the sender says it is in our epoch.
    fn phase(&self, m: &Memory) -> TxPhase {
        // Acquire: pairs with the Release in `TxState::say`.
        let state = m.peer_tx().state.load(Acquire);
        if state.epoch() == self.epoch.load(Relaxed) {
            state.phase()
        } else {
            tx::NONE
        }
    }

    /// Processes a switch that the sender has made. Returns false if it has made none.
    fn see_up(&self, m: &Memory) -> Result<bool, Reason> {
        if self.phase(m) == tx::NONE {
            return Ok(false);
        }
        let limit = m.peer_tx().up_tcp_pos.load(Relaxed);
        let tcp_pos = self.tcp_pos.load(Relaxed);
        // Across nodes, a switch may be shown late: its sender's daemon has died, and the sender has gone on on TCP, where
        // we have read on (see `undecided`).
        if m.is_remote() && limit < tcp_pos {
            self.mode.store(mode::TCP, SeqCst);
            return Ok(true);
        }
        // We cannot have received more bytes on TCP than the sender had sent when it switched; and it cannot have
        // sent more ahead of us than kernel buffers hold.
        if limit < tcp_pos || limit - tcp_pos > 1 << 32 {
            return Err(Reason::Sync);
        }
        let start = m.peer_tx().up_start.load(Relaxed);
        self.limit.store(limit, Relaxed);
        self.loc.store(LocWord::NONE, Relaxed); // `source` reads it again
        self.cursor.store(start, Relaxed);
        self.told.store(start, Relaxed);
        m.own_cursor().store(start, Release);
        // The sender is told when the prefix is read, even if there is none (`past`).
        self.mode.store(mode::PREFIX, Relaxed);
        Ok(true)
    }
}
