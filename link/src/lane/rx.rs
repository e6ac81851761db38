//! The receiving half of a lane.
//!
//! Every method must be called with the direction's lock held; none blocks. What the peer wrote is
//! read once, checked, and then used: an impossible value resets the connection.

mod ask;
mod died;
mod look;
mod peek;
mod revoke;
mod take;

use super::mem::{Iov, Memory};
use super::{natives, Pending, Port};
use crate::frame::LEN;
use crate::layout::{marks, rx, tx, AtomicEpoch, Epoch, RxWord, TxPhase, RING_LOG2_MAX};
use crate::prim::{self, fence, fence_after_rmw};
use crate::reason::Reason;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// Where a receiving half is.
pub mod mode {
    /// Native receives; `kpos` counts them.
    pub const TCP: u32 = 0;
    /// Declared ready; the sender may switch at any moment. TCP is read with care.
    pub const READY: u32 = 1;
    /// The sender has switched; TCP still holds bytes up to `limit`.
    pub const PREFIX: u32 = 2;
    /// On the ring.
    pub const RING: u32 = 3;
    /// A `Down` frame was seen: the ring up to its final head, then skip, then TCP.
    pub const LAST: u32 = 4;
    /// Bytes that were taken from the ring still come on TCP: `skip` of them.
    pub const SKIP: u32 = 5;
    /// Revoked: the cursor is frozen until the sender has answered. `skip` holds the mode before.
    pub const REVOKING: u32 = 6;
    /// Across nodes: a `Fin` frame was seen; the ring up to `skip`, then the end.
    pub const FIN: u32 = 7;
    /// Across nodes: after SKIP, the bytes that a `Down` frame announced: up to `limit` TCP is read,
    /// and may not end before.
    pub const REST: u32 = 8;
}

/// More bytes than a socket has.
const MANY: usize = 1 << 30;

/// Most bytes copied before the cursor is published.
const PIECE: u64 = 16 << 10;

/// Private state, in the family table. Zero is a fresh socket.
#[repr(C, align(64))]
#[derive(Default)]
pub struct RxState {
    /// 0 or the holder's thread id.
    pub lock: AtomicU32,
    /// One of [`mode`]'s, stored under the lock. Native calls look at it without.
    pub mode: prim::AtomicU32,
    /// Epoch of the last readiness. (Taken back or not: none is used twice.)
    pub epoch: AtomicEpoch,
    /// Threads that may be asleep in the kernel on this socket without a look at the lane.
    pub natives: prim::AtomicU32,
    /// Bytes that hooked calls took from TCP, frames and skipped bytes included.
    pub kpos: prim::AtomicU64,
    /// Ring cursor: bytes ever consumed.
    cursor: AtomicU64,
    /// Ring in use, and the number of moves it corresponds to.
    loc: AtomicU64,
    loc_seq: AtomicU32,
    /// An errno that a look of ours took from the socket, and that the application was not told yet: it
    /// is, after all bytes that came before it.
    pub error: Pending,
    /// Kernel position at which TCP ends (PREFIX), or what a frame announced does (REST).
    limit: AtomicU64,
    /// Cursor named by a `Down` frame (LAST) or a `Fin` (FIN), bytes to skip (SKIP), or a mode
    /// (REVOKING).
    skip: AtomicU64,
    /// Cursor last announced to a daemon, which tells the far sender.
    told: AtomicU64,
    /// Bytes that follow a `Down` frame, from the cursor it names.
    rest: AtomicU64,
    tag: AtomicU64,
    /// Ticks of the last look at TCP, so that empty rings ask the kernel only now and then.
    pub looked: AtomicU64,
    /// Bytes received over rings, for statistics.
    pub ring_bytes: AtomicU64,
    /// Not 0: the application shut this direction down.
    pub shut: AtomicU32,
    /// A frame that has arrived in part, and how much of it. It does not stay in the kernel, which
    /// would report the socket readable until the rest comes, and hide a FIN if it never does.
    got_len: AtomicU32,
    got: [AtomicU64; LEN / 8],
}

/// What became of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// So many bytes; with [`How::peek`] they are still there.
    Bytes(usize),
    /// Nothing now.
    Empty,
    /// End of stream.
    Eof,
    /// TCP's own error, after everything that came before it.
    Error(i32),
    /// This direction is on TCP: receive natively.
    Tcp,
    /// The stream is spoilt; reset the connection.
    Reset(Reason),
}

/// How to receive.
#[derive(Clone, Copy, Default)]
pub struct How {
    /// Leave the bytes where they are (MSG_PEEK).
    pub peek: bool,
    /// Throw the bytes away (MSG_TRUNC on a stream); `Iov` pointers are not written.
    pub discard: bool,
    /// If the ring is empty, ask TCP for frames, end of file and errors.
    pub look: bool,
    /// It goes on with a call of which a part is done: nothing behind an urgent mark is for that.
    pub part: bool,
}

/// Outcome of [`RxState::revoke`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revoked {
    /// Everything still to come is on TCP.
    Clear,
    /// The sender has to put something on TCP first: ring its doorbell, ask again.
    Pending,
    /// It cannot be done without losing bytes.
    Impossible,
}

impl RxState {
    /// Does it receive from the ring?
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
        m.own_rx().marks.store(marks::KEPT, Relaxed);
        m.own_rx().room.store(0, Relaxed);
        m.own_rx().word.store(RxWord::default(), Release);
    }

    /// What a receive buffer holds that the application has asked for; 0: it did not.
    pub fn set_room(&self, m: &Memory, bytes: u32) {
        m.own_rx().room.store(bytes, Relaxed);
    }

    /// Declares this end ready for the next epoch. The caller has made sure that nobody can be
    /// caught asleep in the kernel on this socket (`natives` is 0, epoll sets are in place).
    pub fn declare_ready(&self, m: &Memory, port: &impl Port) -> bool {
        if self.mode.load(Relaxed) != mode::TCP {
            return false;
        }
        // A sender that we have revoked and that was on the ring must have read the revocation
        // before the word says something else. (One that was not on the ring need not: see SYNC
        // retreat in `TxState::try_up`.)
        let word = m.own_rx().word.load(Relaxed);
        if word.has(rx::REVOKED) && matches!(self.phase(m), tx::UP | tx::DOWNING) {
            return false;
        }
        // SYNC natives: we close the door, then look who is inside; `enter_native` counts itself
        // in, then looks at the door.
        self.mode.swap(mode::READY, SeqCst);
        fence_after_rmw();
        if self.natives.load(SeqCst) != 0 {
            self.mode.store(mode::TCP, SeqCst);
            return false;
        }
        let epoch = self.epoch.load(Relaxed).next();
        self.epoch.store(epoch, Relaxed);
        // Release: pairs with the Acquire in `TxState::can_up`.
        m.own_rx()
            .word
            .store(RxWord::new(epoch, rx::READY), Release);
        if m.far() {
            m.publish(port); // a daemon has to carry it
        }
        true
    }

    /// Enters a native receive, or a native wait for one, without the lock. `false`: this direction
    /// is not on TCP. Every `true` is followed by [`RxState::leave_native`].
    #[inline(always)]
    pub fn enter_native(&self) -> bool {
        // SYNC natives: see `declare_ready`.
        self.natives.fetch_add(1, SeqCst);
        fence_after_rmw();
        if self.mode.load(SeqCst) == mode::TCP {
            return true;
        }
        self.natives.fetch_sub(1, SeqCst);
        false
    }

    /// Leaves a native receive that took `received` bytes from TCP.
    #[inline(always)]
    pub fn leave_native(&self, received: u64) {
        self.kpos.fetch_add(received, Relaxed);
        self.natives.fetch_sub(1, SeqCst); // releases `kpos`
    }

    /// Leaves a native receive of which nobody knows what it has moved: see [`natives`].
    pub fn leave_uncounted(&self) {
        natives::leave_uncounted(&self.natives);
    }

    /// The connection has moved bytes before it came here: they count after [`Self::recount`].
    pub fn begin_uncounted(&self) {
        natives::begin_uncounted(&self.natives);
    }

    /// Was one left so, and has [`Self::recount`] not mended it yet? Then this direction stays on TCP.
    #[inline(always)]
    pub fn uncounted(&self) -> bool {
        natives::uncounted(&self.natives)
    }

    /// Takes the count afresh from the kernel's, if nobody is inside a native receive. Needs no lock.
    pub fn recount(&self, position: impl FnOnce() -> Option<u64>) {
        natives::recount(&self.natives, &self.kpos, position);
    }

    /// How many are inside a native receive now?
    pub fn inside(&self) -> u32 {
        natives::inside(&self.natives)
    }

    /// Another connection begins in this entry, with nobody inside.
    pub fn forget_uncounted(&self) {
        natives::forget(&self.natives);
    }

    /// The peer's head, checked against our cursor.
    #[inline(always)]
    fn head(&self, m: &Memory) -> Result<u64, Reason> {
        if self.mode.load(Relaxed) == mode::FIN {
            // The sender saw these bytes land before it said so, whatever our daemon has told us yet.
            return Ok(self.skip.load(Relaxed));
        }
        // Acquire: pairs with the Release in `TxState::send`; the bytes before it are there.
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

    /// Notices a switch that the sender has made. Returns false while it has not.
    fn see_up(&self, m: &Memory) -> Result<bool, Reason> {
        if self.phase(m) == tx::NONE {
            return Ok(false);
        }
        let limit = m.peer_tx().up_kpos.load(Relaxed);
        let kpos = self.kpos.load(Relaxed);
        // The kernel cannot have handed out more than the sender had sent when it switched; and a
        // sender cannot be further ahead than kernel buffers hold.
        if limit < kpos || limit - kpos > 1 << 32 {
            return Err(Reason::Sync);
        }
        let start = m.peer_tx().up_start.load(Relaxed);
        self.limit.store(limit, Relaxed);
        self.loc.store(0, Relaxed); // `source` asks afresh
        self.cursor.store(start, Relaxed);
        self.told.store(start, Relaxed);
        m.own_cursor().store(start, Release);
        // Across nodes the far sender is told when the prefix is past, even if there is none.
        let past = limit == kpos && !m.far();
        self.mode
            .store(if past { mode::RING } else { mode::PREFIX }, Relaxed);
        Ok(true)
    }

    /// Receives. Loops over the modes until there is something to say.
    #[inline]
    pub fn recv(&self, m: &Memory, port: &impl Port, iov: &mut Iov<'_>, how: How) -> Received {
        match self.advance(m, port, iov, how) {
            Ok(r) => r,
            Err(reason) => Received::Reset(reason),
        }
    }

    /// The error that was kept, to be told now. (Who sends, or asks, takes it without the lock of this direction.)
    fn kept_error(&self) -> Option<Received> {
        match self.error.take() {
            0 => None,
            e => Some(Received::Error(e)),
        }
    }

    #[expect(clippy::too_many_lines)]
    fn advance(
        &self,
        m: &Memory,
        port: &impl Port,
        iov: &mut Iov<'_>,
        how: How,
    ) -> Result<Received, Reason> {
        let mut looked = false;
        loop {
            match self.mode.load(Relaxed) {
                mode::RING | mode::LAST | mode::FIN => {
                    let head = self.head(m)?;
                    let cursor = self.cursor.load(Relaxed);
                    if head != cursor && how.peek {
                        return self.peek_ring(m, port, iov, how);
                    }
                    if head != cursor {
                        let r = self.take(m, port, iov, how, head);
                        if self.cursor.load(Relaxed) == head && self.is_left(m) {
                            self.take_repeat(m, port);
                        }
                        return r;
                    }
                    if self.mode.load(Relaxed) == mode::FIN {
                        return Ok(Received::Eof);
                    }
                    if self.mode.load(Relaxed) == mode::LAST {
                        self.begin_skip(cursor)?;
                        continue;
                    }
                    // (A frame in TCP's queue, and what follows it, came before it.)
                    let late = self.error.is_set();
                    if late && !port.tcp_unread().is_ok_and(|n| n > 0) {
                        if let Some(r) = self.kept_error() {
                            return Ok(r);
                        }
                    }
                    // (Nothing was put there since we looked: the sender would not be so.)
                    if !m.far() && self.phase(m) == tx::RESUMED {
                        self.mode.store(mode::TCP, Relaxed);
                        continue;
                    }
                    if !(how.look || late) || looked {
                        return Ok(Received::Empty);
                    }
                    looked = true;
                    if let Some(r) = self.look(m, port)? {
                        return Ok(r);
                    }
                }
                // (What lies in TCP's queue came before it, and so did what is on a ring that was not seen yet.)
                now if now != mode::TCP
                    && self.error.is_set()
                    && !port.tcp_unread().is_ok_and(|n| n > 0) =>
                {
                    if now == mode::READY && self.see_up(m)? {
                        continue;
                    }
                    if now == mode::PREFIX && self.prefix_left() == 0 {
                        self.past(m, port);
                        continue;
                    }
                    match self.kept_error() {
                        Some(r) => return Ok(r),
                        None => continue,
                    }
                }
                mode::SKIP => {
                    let n = self.skip.load(Relaxed);
                    if n == 0 {
                        self.skipped(m);
                        continue;
                    }
                    match port.tcp_recv(core::ptr::null_mut(), n as usize, false) {
                        // Ours: the kernel still takes, and hands out, what comes.
                        Ok(0) if self.shut.load(Relaxed) != 0 => return Ok(Received::Eof),
                        // The sender shut TCP or died before it had repeated what we have: nothing
                        // is missing, and nothing more will come.
                        Ok(0) => {
                            let cut = m.far() && self.rest.load(Relaxed) > 0;
                            self.mode.store(mode::TCP, Relaxed);
                            return Ok(match cut {
                                true => Received::Error(libc::ECONNRESET),
                                false => self.tcp_ended(m, port),
                            });
                        }
                        Ok(k) => {
                            self.kpos.fetch_add(k as u64, Relaxed);
                            self.skip.store(n - (k as u64).min(n), Relaxed);
                        }
                        Err(libc::EAGAIN) => return Ok(Received::Empty),
                        Err(e) => {
                            self.mode.store(mode::TCP, Relaxed);
                            return Ok(Received::Error(e));
                        }
                    }
                }
                mode::READY => {
                    if self.see_up(m)? {
                        continue;
                    }
                    let n = match port.tcp_unread() {
                        Ok(n) => n,
                        Err(e) => return Ok(Received::Error(e)),
                    };
                    // SYNC limit: what was in the queue before a switch we now do not see was sent
                    // before it; more we must not take.
                    fence(SeqCst);
                    if self.see_up(m)? {
                        continue;
                    }
                    if n == 0 {
                        if how.part && port.tcp_at_mark() {
                            return Ok(Received::Empty);
                        }
                        let end = self.peek_end(port);
                        // A receive passes an urgent byte, which is received apart: left there, it would make
                        // a reset of a close. (Who sends one has left its lane for good.)
                        if matches!(end, Received::Empty | Received::Eof)
                            && !how.peek
                            && iov.left() > 0
                            && port.tcp_at_mark()
                        {
                            return Ok(self.take_tcp(port, iov, how, 1));
                        }
                        // An end that we only see now may have come after a switch, and behind
                        // bytes on the ring.
                        let urgent = end == Received::Bytes(1);
                        if end != Received::Empty && self.see_up(m)? {
                            if let Received::Error(e) = end {
                                self.error.put(e);
                            }
                            continue;
                        }
                        if urgent {
                            match port.tcp_unread() {
                                // SIOCINQ stops at an urgent mark, a count by a peek does not. What is there
                                // was sent before a switch that we still do not see.
                                Ok(0) => {
                                    let n = port.tcp_recv(core::ptr::null_mut(), MANY, true);
                                    fence(SeqCst); // SYNC limit
                                    if self.see_up(m)? {
                                        continue;
                                    }
                                    return Ok(self.take_tcp(port, iov, how, n.unwrap_or(1)));
                                }
                                // It came just now: all of it is wanted.
                                Ok(_) => continue,
                                Err(e) => return Ok(Received::Error(e)),
                            }
                        }
                        return Ok(match end {
                            Received::Eof => self.tcp_ended(m, port),
                            end => end,
                        });
                    }
                    return Ok(self.take_tcp(port, iov, how, n));
                }
                // It has gone up and down meanwhile, and all of the stream is on TCP.
                mode::PREFIX if self.resumed(m) => self.mode.store(mode::TCP, Relaxed),
                mode::PREFIX => {
                    let left = self.limit.load(Relaxed) - self.kpos.load(Relaxed);
                    if left == 0 {
                        self.past(m, port);
                        continue;
                    }
                    if how.peek {
                        return Ok(self.peek_prefix(m, port, iov, how, left as usize));
                    }
                    let r = self.take_tcp(port, iov, how, left as usize);
                    // Whoever asks `ready` or `stirs` next must hear about the ring.
                    if self.kpos.load(Relaxed) == self.limit.load(Relaxed) {
                        self.past(m, port);
                    }
                    return Ok(match r {
                        Received::Bytes(n) if n as u64 == left => {
                            Received::Bytes(n + self.take_more(m, port, iov, how))
                        }
                        r => r,
                    });
                }
                mode::REST => {
                    let left = self.limit.load(Relaxed) - self.kpos.load(Relaxed);
                    if left == 0 {
                        self.mode.store(mode::TCP, Relaxed);
                        continue;
                    }
                    // (Behind it are plain bytes, at which a peek may look.)
                    let most = if how.peek { usize::MAX } else { left as usize };
                    let r = self.take_tcp(port, iov, how, most);
                    if self.kpos.load(Relaxed) == self.limit.load(Relaxed) {
                        self.mode.store(mode::TCP, Relaxed);
                    }
                    return Ok(match r {
                        // Its sender died in the middle of what it had announced.
                        Received::Eof if self.shut.load(Relaxed) == 0 => {
                            Received::Error(libc::ECONNRESET)
                        }
                        r => r,
                    });
                }
                mode::REVOKING => {
                    // Nothing may be consumed beyond the frozen cursor.
                    if self.revoke(m, port)? == Revoked::Pending
                        && self.mode.load(Relaxed) == mode::REVOKING
                    {
                        return Ok(Received::Empty);
                    }
                }
                _ => return Ok(Received::Tcp),
            }
        }
    }

    /// Bytes of the prefix, or of what a frame announced, that are still to be read from TCP.
    fn prefix_left(&self) -> u64 {
        self.limit.load(Relaxed) - self.kpos.load(Relaxed)
    }

    /// The prefix is read: on to the ring. The far sender may say where the stream ends from now on.
    pub(super) fn past(&self, m: &Memory, port: &impl Port) {
        self.mode.store(mode::RING, Relaxed);
        if m.far() {
            self.flag(m, rx::PAST);
            m.publish(port);
        }
    }

    /// The ring is read up to `cursor`: what a frame announced from its own cursor up to there comes
    /// again on TCP.
    fn begin_skip(&self, cursor: u64) -> Result<(), Reason> {
        let again = cursor - self.skip.load(Relaxed);
        let rest = self.rest.load(Relaxed);
        self.rest
            .store(rest.checked_sub(again).ok_or(Reason::Hostile)?, Relaxed);
        self.skip.store(again, Relaxed);
        self.mode.store(mode::SKIP, Relaxed);
        Ok(())
    }

    /// All that the ring had already told is skipped on TCP.
    fn skipped(&self, m: &Memory) {
        let rest = self.rest.swap(0, Relaxed);
        if m.far() && rest > 0 {
            let limit = self.kpos.load(Relaxed) + rest;
            self.limit.store(limit, Relaxed);
            self.mode.store(mode::REST, Relaxed);
        } else {
            self.mode.store(mode::TCP, Relaxed);
        }
    }
}
