//! The sending half of a lane.
//!
//! Life of a direction: TCP → (the receiver is ready) → ring → TCP → … Every method must be called with the
//! direction's lock held; none blocks.

pub mod bring;
mod died;
mod down;
mod takeover;
mod up;

pub use down::{Awaited, BeforeFin};
pub use takeover::{claim, is_asked, is_done, release, Adopted};

use super::mem::{copy_in, Iov, Memory, Ring};
use super::{native_calls, Baseline, Pending, Port, Progress};
use crate::abi::{
    loc_index, marks, rx, tx, window, AtomicEpoch, Cursor, Epoch, Loc, LocWord, Private, RxFlags,
    RxWord, Shared, SpaceWord, TcpPos, TxPhase, TxWord,
};
use crate::num;
use crate::prim::{self, fence};
use crate::proto::reason::Reason;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// States of a sending half.
pub mod mode {
    use core::convert::identity;

    named! { u32, identity => Mode;
        /// Sends are native; `tcp_pos` counts their bytes.
        TCP: Tcp = 0;
        /// On the ring.
        RING: Ring = 1;
        /// On the way down: a frame or ring bytes have to enter TCP before anything else.
        DRAIN: Drain = 2;
        /// Checking that no native send is running; none may begin.
        SWITCH: Switch = 3;
        /// Across nodes: the switch is on its way; nothing may be sent until the remote node has it.
        ASK: Ask = 4;
    }
}

/// Maximum number of bytes copied before they are published, so that the two copies of a large write overlap.
const PIECE: u64 = 16 << 10;
// (Less than a piece is unannounced when the last one is copied.)
const _: () = assert!(2 * PIECE <= crate::abi::UNPUBLISHED_MAX);
/// Number of bytes that the kernel takes at a time: if the buffer becomes unreadable after that many, they count as
/// sent.
const CHUNK: usize = 32 << 10;

/// `TxState::frame_kind` of a way down without a frame that nobody has asked for.
const UNASKED: u32 = 2;

/// `TxState::frame_cursor` of a way down that writes no frame.
const NO_FRAME: Cursor = Cursor::new(u64::MAX);

/// Private state, in the family table. Zero is a fresh socket.
#[repr(C, align(64))]
#[derive(Default)]
pub struct TxState {
    /// 0 or the thread id of the holder (see the shim's `lock`).
    pub lock: AtomicU32,
    /// One of the constants in [`mode`], stored under the lock. Native calls read it without the lock.
    pub mode: prim::AtomicU32,
    /// Epoch of the last switch up.
    pub epoch: AtomicEpoch,
    /// Number of native sends in progress: while there are any, the direction does not switch.
    pub native_calls: prim::AtomicU32,
    /// Bytes that hooked calls put on TCP, frames included.
    pub tcp_pos: Shared<TcpPos>,
    /// Ring cursor: bytes ever put into rings of this lane slot.
    head: Private<Cursor>,
    /// The last cursor of the peer that passed the checks.
    peer_cursor: Private<Cursor>,
    loc: Private<LocWord>,
    loc_from: Private<Cursor>,
    /// The ring that the last move gave up, until the reader has left it (`NONE`: there is none).
    retired: Private<LocWord>,
    loc_seq: AtomicU32,
    /// Number of bytes of the frame that are on TCP, or `LEN` if there is no frame to write.
    frame_done: AtomicU32,
    /// The next ring byte that has to go to TCP, in mode DRAIN.
    drain_at: Private<Cursor>,
    /// The cursor in the frame that is being written; `NO_FRAME` if the way down writes none.
    frame_cursor: Private<Cursor>,
    /// 0: the frame is a `Down`; 1: a `Fin`. Without a frame, 0: the receiver has asked for that; [`UNASKED`]: it has not, and
    /// may read on on the ring meanwhile.
    frame_kind: AtomicU32,
    /// Number of bytes that the frame announces.
    frame_rest: AtomicU32,
    tag: AtomicU64,
    /// Across nodes: the epoch whose takeover ended because the daemon died.
    reclaimed: AtomicEpoch,
    /// Not 0: the application has shut this direction down.
    pub shut: AtomicU32,
    /// Time (ms) since when the ring has been full; 0: it is not full.
    pub full_since_ms: AtomicU64,
    /// Bytes sent over rings, for statistics.
    pub ring_bytes: AtomicU64,
    /// Number of switches up of this socket.
    pub ups: AtomicU32,
    /// Number of switches down of this socket. The shim sees by it that one came in between.
    pub downs: AtomicU32,
    /// An errno that a send of the shim received from the socket, and that the application was not told yet.
    pub error: Pending,
    /// Number of bytes on TCP that are not the application's, or a repetition: frames, and the ring bytes that a way
    /// down repeats.
    pub again: AtomicU64,
    // (Last, in bytes that were padding.)
    /// What was counted when it switched up.
    pub baseline: Baseline,
}

/// Result of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// That many bytes are on the ring.
    Bytes(usize),
    /// No space now.
    Full,
    /// The application's buffer cannot be read.
    Fault,
    /// This direction is on TCP: send natively.
    Tcp,
    /// The way down waits for space in TCP's buffer: to be treated as a full socket buffer.
    Blocked,
    /// The stream is poisoned; reset the connection.
    Reset(Reason),
}

native_calls::methods!(TxState);

impl TxState {
    /// Does this direction send to the ring?
    pub fn is_up(&self) -> bool {
        self.mode.load(Relaxed) == mode::RING
    }

    /// Does sending depend on the lane's words rather than on TCP's buffer? That is so on the ring, and while the remote
    /// node is asked whether it may go there.
    pub fn on_lane(&self) -> bool {
        matches!(self.mode.load(Relaxed), mode::RING | mode::ASK)
    }

    /// Is this direction waiting for the remote node's answer to a switch, or for a daemon that has taken it over?
    pub fn awaits(&self, m: &Memory) -> bool {
        self.mode.load(Relaxed) == mode::ASK || self.held(m)
    }

    /// Is it waiting for the remote node's answer to a switch?
    pub fn asks(&self) -> bool {
        self.mode.load(Relaxed) == mode::ASK
    }

    fn ring_size(&self) -> u64 {
        let loc = self.loc.load(Relaxed).loc();
        loc.map_or(0, |l| l.bytes() as u64)
    }

    /// Number of bytes published and, as far as known, not yet consumed.
    pub fn unread(&self, m: &Memory) -> Result<u64, Reason> {
        Ok(self.head.load(Relaxed) - self.refresh(m)?)
    }

    /// Number of stream bytes that the kernel has taken from this end, exactly: the value to compare with `tcp_pos`.
    /// `None`: not available now.
    fn kernel_position(m: &Memory, port: &impl Port) -> Option<TcpPos> {
        let syn = m.own_rx().marks.load(Relaxed) & marks::SYN != 0;
        let sent = port.tcp_sent()?.wrapping_sub(u64::from(syn));
        Some(TcpPos::new(sent))
    }

    /// Starts a new use of a lane slot: epochs above `base` belong to it. Forgets the old rings and returns those
    /// that may be freed.
    pub fn attach(&self, m: &Memory, base: Epoch, loc: Loc) -> [Option<Loc>; 2] {
        let old = [
            self.loc.swap(loc.word(), Relaxed).loc(),
            self.retired.swap(LocWord::NONE, Relaxed).loc(),
        ];
        // The slot's head continues from its last use, so that cursors never decrease.
        let head = m.own_head().load(Relaxed);
        self.head.store(head, Relaxed);
        self.epoch.store(base, Relaxed);
        self.mode.store(mode::TCP, Relaxed);
        self.full_since_ms.store(0, Relaxed);
        self.reclaimed.store(Epoch::NONE, Relaxed);
        let w = m.own_tx();
        // The last use's state word must not be taken for ours: a daemon would continue that way down, on another
        // connection.
        w.state.store(TxWord::new(base, tx::NONE), Release);
        w.want_space.store(SpaceWord::NONE, Relaxed);
        let seq = w.loc_seq.load(Relaxed);
        self.loc_seq.store(seq, Relaxed);
        self.loc_from.store(head, Relaxed);
        w.loc[loc_index(seq)].store(loc.word(), Relaxed);
        w.loc_from[loc_index(seq)].store(head, Relaxed);
        old
    }

    /// Is the receiver ready for a switch?
    #[inline(always)]
    pub fn can_up(&self, m: &Memory) -> bool {
        self.ready_epoch(m).is_some()
    }

    /// The epoch for which the receiver is ready. It may be several ahead of ours, because a receiver that withdraws
    /// an unused readiness does not use that epoch again.
    #[inline(always)]
    fn ready_epoch(&self, m: &Memory) -> Option<Epoch> {
        // Acquire: pairs with the Release in `RxState::declare_ready`.
        let word = m.peer_rx().word.load(Acquire);
        let ahead = word.epoch().since(self.epoch.load(Relaxed));
        (word.flags() == rx::READY && ahead != 0 && ahead <= u32::MAX / 2).then_some(word.epoch())
    }

    /// Stores the state word and publishes it.
    fn say(&self, m: &Memory, port: &impl Port, epoch: Epoch, phase: TxPhase) {
        if m.takes_over() {
            return self.say_instead(m, epoch, phase);
        }
        // Release: pairs with the Acquire loads of `state` in `rx`; the words that were stored before it are valid.
        m.own_tx().state.store(TxWord::new(epoch, phase), Release);
        m.publish(port);
    }

    /// The peer's cursor, checked: not below the last one, and not above what we sent.
    #[inline(always)]
    fn refresh(&self, m: &Memory) -> Result<Cursor, Reason> {
        let head = self.head.load(Relaxed);
        let known = self.peer_cursor.load(Relaxed);
        // Acquire: the reader has finished its copies before we overwrite what it consumed.
        let c = m.peer_cursor().load(Acquire);
        // Until the reader has seen the switch, its cursor word is still that of a former use of the slot.
        let c = if c.is_before(known) { known } else { c };
        if c > head {
            return Err(Reason::Hostile);
        }
        self.peer_cursor.store(c, Relaxed);
        Ok(c)
    }

    /// Maximum number of bytes that may be unread, whatever the ring holds. Unlimited unless the application has set
    /// the size of its send buffer.
    #[inline(always)]
    fn unread_max(&self, m: &Memory) -> u64 {
        let word = m.own_tx().want_space.load(Relaxed);
        word.unread_max(|| m.peer_rx().room.load(Relaxed))
    }

    /// Sets the size of the send buffer if the application has set one; 0: it has not. (Not across nodes, where those
    /// who report space do not know that size.)
    pub fn set_sndbuf(&self, m: &Memory, bytes: u32) {
        if !m.is_remote() {
            m.own_tx().want_space.set_sndbuf(bytes, SeqCst);
        }
    }

    /// Can the ring hold as many bytes as may be unread? Then, when it is full, TCP would take no more either.
    pub fn is_bounded(&self, m: &Memory) -> bool {
        self.unread_max(m) <= self.ring_size()
    }

    /// Free bytes of the current ring, computed from `cursor`.
    #[inline(always)]
    fn free(&self, size: u64, most: u64, cursor: Cursor) -> u64 {
        let head = self.head.load(Relaxed);
        let start = cursor.max(self.loc_from.load(Relaxed));
        let room = most.saturating_sub(head.since(cursor));
        size.saturating_sub(head.since(start)).min(room)
    }

    /// Is there enough space for poll to report it? The limit is a quarter of the ring; the kernel's is a third of
    /// the send buffer (`sk_stream_is_writeable`).
    pub fn writable(&self, m: &Memory) -> bool {
        if self.shut.load(Relaxed) != 0 {
            return true; // the next send is told
        }
        if self.held(m) {
            return false; // the daemon rings when it is done
        }
        let (size, most) = (self.ring_size(), self.unread_max(m));
        let want = size.min(most) / 4;
        if self.free(size, most, self.peer_cursor.load(Relaxed)) >= want {
            return true;
        }
        match self.refresh(m) {
            Ok(c) => self.free(size, most, c) >= want,
            Err(_) => true, // let the send report it
        }
    }

    /// Puts as many bytes on the ring as fit.
    #[inline]
    pub fn send(&self, m: &Memory, port: &impl Port, iov: &mut Iov<'_>) -> Sent {
        if self.is_taken_over(m) {
            return Sent::Blocked;
        }
        match self.mode.load(Relaxed) {
            // (What is published counts as sent across nodes, and would be lost without the other kernel's answer.)
            mode::RING if m.is_remote() && self.is_closed(m.peer_rx().word.load(Acquire)) => {
                return match self.look(m, port) {
                    Ok(_) if self.mode.load(Relaxed) == mode::TCP => Sent::Tcp,
                    Ok(_) => Sent::Blocked,
                    Err(r) => Sent::Reset(r),
                };
            }
            mode::RING => {}
            mode::DRAIN => match self.drain(m, port) {
                Ok(Progress::Done) => return Sent::Tcp,
                Ok(Progress::Blocked) => return Sent::Blocked,
                Err(r) => return Sent::Reset(r),
            },
            mode::ASK if self.answered(m, port) => {}
            mode::ASK if self.mode.load(Relaxed) == mode::ASK => return Sent::Blocked,
            _ => return Sent::Tcp,
        }
        let Some(ring) = self.loc.load(Relaxed).loc().and_then(|l| m.own.ring(l)) else {
            return Sent::Reset(Reason::Internal);
        };
        let begin = self.head.load(Relaxed);
        let untouched = iov.clone();
        let mut head = match self.put(m, port, ring, iov) {
            Ok(head) => head,
            Err(nothing) => return nothing,
        };
        // After the publish, which is a full fence: has the receiver asked for something?
        let word = m.peer_rx().word.load(Acquire);
        if !self.is_quiet(word) {
            head = match self.answer_within(m, port, word, begin) {
                Ok(head) => head,
                Err(r) => return Sent::Reset(r),
            };
            *iov = untouched;
            iov.skip(num::size(head - begin));
        }
        let n = head - begin;
        self.ring_bytes.fetch_add(n, Relaxed);
        if n > 0 || iov.left() == 0 {
            self.full_since_ms.store(0, Relaxed);
            return Sent::Bytes(num::size(n));
        }
        match self.mode.load(Relaxed) {
            mode::RING => Sent::Full,
            mode::DRAIN => Sent::Blocked,
            _ => Sent::Tcp,
        }
    }

    /// Copies as many bytes to the ring as fit, and publishes them. Returns the new head; `Err`: the send ends here.
    #[inline(always)]
    fn put(
        &self,
        m: &Memory,
        port: &impl Port,
        ring: Ring,
        iov: &mut Iov<'_>,
    ) -> Result<Cursor, Sent> {
        let (size, most) = (ring.size(), self.unread_max(m));
        let begin = self.head.load(Relaxed);
        let mut head = begin;
        let mut cursor = self.peer_cursor.load(Relaxed);
        let mut unannounced = 0u64;
        let mut proven = 0;
        loop {
            let mut free = self.free(size, most, cursor);
            if free == 0 {
                cursor = self.refresh(m).map_err(Sent::Reset)?;
                free = self.free(size, most, cursor);
                if free == 0 {
                    break;
                }
            }
            if proven == 0 {
                proven = match iov.proven(CHUNK, |p, n| port.readable(p, n)) {
                    Some(n) => n,
                    None if head == begin => return Err(Sent::Fault),
                    None => break,
                };
            }
            let Some((p, n)) = iov.take(proven.min(num::size(PIECE.min(free)))) else {
                break;
            };
            proven -= n;
            // SAFETY: the application promises `p` readable for `n`; `n <= free <= size`.
            unsafe { copy_in(ring, head, p, n) };
            head += n as u64;
            unannounced += n as u64;
            self.head.store(head, Relaxed);
            if unannounced >= PIECE {
                unannounced = 0;
                m.own_head().store(head, Release); // pairs with the Acquire in `RxState::head`
                m.publish(port);
            }
        }
        if unannounced > 0 {
            m.own_head().store(head, Release); // as above
            m.publish(port);
        }
        Ok(head)
    }

    /// The receiver has asked for something, and a send that began at `begin` meets that. Returns the head: what was
    /// beyond it is not sent.
    fn answer_within(
        &self,
        m: &Memory,
        port: &impl Port,
        word: RxWord,
        begin: Cursor,
    ) -> Result<Cursor, Reason> {
        // (A receiver that has revoked, and then closed, is answered as one that has revoked.)
        let closed = self.is_closed(word) && !word.has(rx::REVOKED);
        let unread = closed && !self.met_close(m, port, begin);
        self.answer(m, port, word)?;
        Ok(match unread {
            true => self.take_back_all(m, begin),
            false => self.take_back(m, begin),
        })
    }

    /// A revocation met a send that began at `begin`: the bytes of that send that TCP did not take are not sent at
    /// all. The receiver has left the ring and may have left this node's reach; if we reported them as sent, our
    /// death would lose them without an error.
    fn take_back(&self, m: &Memory, begin: Cursor) -> Cursor {
        let head = self.head.load(Relaxed);
        // (Across nodes a daemon may already have forwarded them: they stay published, and go to TCP.)
        if !self.must_flush(m) || self.is_unasked() || m.is_remote() {
            return head;
        }
        let kept = head.min(self.drain_at.load(Relaxed).max(begin));
        self.head.store(kept, Relaxed);
        m.own_head().store(kept, Release);
        kept
    }

    /// Is this, in our epoch, the word of a receiver that has closed?
    pub(super) fn is_closed(&self, word: RxWord) -> bool {
        self.says(word, rx::CLOSED)
    }

    /// Does a receiver's word say any of this in our epoch?
    fn says(&self, word: RxWord, what: RxFlags) -> bool {
        word.epoch() == self.epoch.load(Relaxed) && word.has(what)
    }

    /// A send that began at `begin` met a closed receiver: the bytes that it has not read have to go to TCP, so that
    /// the other kernel answers them with a reset. (A quick receiver may have read some of them before it closed.)
    fn take_back_all(&self, m: &Memory, begin: Cursor) -> Cursor {
        let head = self.head.load(Relaxed);
        if m.is_remote() {
            return head;
        }
        // The closed word was stored after the last cursor, so the cursor is final.
        let read = self.refresh(m).unwrap_or(begin).clamp(begin, head);
        self.head.store(read, Relaxed);
        m.own_head().store(read, Release);
        read
    }

    /// Number of bytes sent that the peer's node does not have yet, besides those on TCP. On one node: what the
    /// reader's kernel would not have taken yet.
    pub fn outstanding(&self, m: &Memory) -> u64 {
        let head = self.head.load(Relaxed);
        match self.mode.load(Relaxed) {
            mode::RING if m.is_remote() => {
                head.saturating_since(m.peer_rx().landed.load(Acquire).cursor())
            }
            mode::RING => {
                let taken = window(m.peer_rx().room.load(Relaxed));
                self.unread(m).unwrap_or(0).saturating_sub(taken)
            }
            // (After a frame the reader still finds these bytes on the ring.)
            mode::DRAIN if m.is_remote() || self.must_flush(m) => {
                head.saturating_since(self.drain_at.load(Relaxed))
            }
            _ => 0,
        }
    }

    /// Asks the reader to ring when there is space again. `true`: there is some already, or the reader has asked for
    /// something that the next send must answer first.
    ///
    /// The request stays until the slot is used anew: several threads may wait, and one that finds space must not
    /// withdraw the request of another. The reader answers at most once per quarter of a ring, so that costs little.
    pub fn want_space(&self, m: &Memory, port: &impl Port) -> bool {
        if !m.own_tx().want_space.wait(SeqCst).waits() && m.is_remote() {
            m.publish(port); // a daemon has to forward the request
        }
        // SYNC space: full fence between our request and the look at the cursor; pairs with the fence between the
        // cursor and the look at the request in `RxState::consumed`.
        fence(SeqCst);
        let asked = || !self.held(m) && self.asked(m.peer_rx().word.load(Acquire));
        !self.is_up() || asked() || self.writable(m)
    }

    /// Is this the word of a receiver that asks for nothing?
    #[inline(always)]
    fn is_quiet(&self, word: RxWord) -> bool {
        word.without(rx::ACCEPTED | rx::PAST) == RxWord::new(self.epoch.load(Relaxed), rx::READY)
    }

    /// Does the receiver's word ask for something in our epoch?
    fn asked(&self, word: RxWord) -> bool {
        self.says(word, rx::REVOKED | rx::CLOSED | rx::WANT_DOWN)
    }

    /// Has the receiver asked for something, or is the way down unfinished? Then [`TxState::look`] has work.
    #[inline(always)]
    pub fn has_work(&self, m: &Memory) -> bool {
        match self.mode.load(Relaxed) {
            mode::RING if self.held(m) => false,
            mode::RING => self.asked(m.peer_rx().word.load(Acquire)) || self.is_through(m),
            mode::DRAIN => !self.held(m),
            mode::ASK => self.is_through(m) || !self.held(m) && self.has_answer(m),
            _ => false,
        }
    }

    /// Does what the receiver has asked for, if anything. Other hooks that notice such work call it, too: a
    /// revocation must not have to wait for the next send.
    pub fn look(&self, m: &Memory, port: &impl Port) -> Result<Progress, Reason> {
        if self.is_taken_over(m) {
            return Ok(Progress::Blocked);
        }
        match self.mode.load(Relaxed) {
            mode::RING => self.answer(m, port, m.peer_rx().word.load(Acquire)),
            mode::DRAIN => self.drain(m, port),
            mode::ASK => Ok(match self.answered(m, port) {
                // A caller that waits for us to go down must wait for the answer first.
                true => self.look(m, port)?,
                false if self.mode.load(Relaxed) == mode::ASK => Progress::Blocked,
                false => Progress::Done,
            }),
            _ => Ok(Progress::Done),
        }
    }

    /// Number of bytes of this lane that the reader is known to have consumed.
    pub fn consumed(&self) -> Cursor {
        self.peer_cursor.load(Relaxed)
    }

    /// May the lane move to a larger ring now? Only if the reader has left the former ring, and if more bytes may be
    /// unread than the current one holds.
    pub fn can_move(&self, m: &Memory) -> bool {
        !self.is_taken_over(m)
            && self.is_up()
            && !self.is_bounded(m)
            && matches!(self.refresh(m), Ok(c) if c >= self.loc_from.load(Relaxed))
    }

    /// Moves to another (larger) ring from the present head on. Returns a ring that the reader has left and that may
    /// be freed. Call only if [`TxState::can_move`].
    pub fn move_to(&self, m: &Memory, loc: Loc) -> Option<Loc> {
        let left = self.loc.swap(loc.word(), Relaxed);
        let freed = self.retired.swap(left, Relaxed).loc();
        let head = self.head.load(Relaxed);
        self.loc_from.store(head, Relaxed);
        let seq = self.loc_seq.load(Relaxed).wrapping_add(1);
        self.loc_seq.store(seq, Relaxed);
        let w = m.own_tx();
        // Two places each: the reader may still need the former location. It has left the location that is
        // overwritten here; otherwise we could not move (`can_move`).
        w.loc[loc_index(seq)].store(loc.word(), Relaxed);
        w.loc_from[loc_index(seq)].store(head, Relaxed);
        w.loc_seq.store(seq, Release); // pairs with the Acquire in `RxState::source`
        freed
    }

    /// log2 of the current ring's size.
    pub fn ring_log2(&self) -> u32 {
        self.loc.load(Relaxed).loc().map_or(0, |l| l.log2)
    }

    /// The secret that marks this lane's frames.
    pub fn set_tag(&self, tag: u64) {
        self.tag.store(tag, Relaxed);
    }
}
