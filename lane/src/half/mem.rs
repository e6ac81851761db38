//! The memory of a link group as one process sees it: its own area, the peer's area, and copies in and out.
//!
//! The peer's memory may change at any time, so there is never a Rust reference to its data: ring bytes are copied
//! through raw pointers, and control words are atomics that are read once.

use crate::abi::{
    Control, Cursor, DaemonWords, Loc, RxWords, Shared, TxWords, CHUNKS, CONTROL_BYTES,
    LANES_PER_COUNTER,
};
use crate::prim::AtomicU32;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::*};

pub use super::ring::{copy_in, copy_out, Ring};

/// One client's area, mapped here. Zeroed memory is an empty area.
#[repr(C)]
pub struct Area {
    control: AtomicPtr<Control>,
    base: [AtomicPtr<u8>; CHUNKS],
    len: [AtomicUsize; CHUNKS],
}

impl Area {
    /// An empty area.
    pub const fn new() -> Self {
        Area {
            control: AtomicPtr::new(core::ptr::null_mut()),
            base: [const { AtomicPtr::new(core::ptr::null_mut()) }; CHUNKS],
            len: [const { AtomicUsize::new(0) }; CHUNKS],
        }
    }

    /// Sets the mapping of chunk 0.
    ///
    /// # Safety
    /// `p` must be mapped for at least `CONTROL_BYTES` bytes, page aligned, for as long as the area
    /// is used.
    pub unsafe fn set_control(&self, p: *mut Control) {
        self.control.store(p, Release);
    }

    /// Sets the mapping of the first file of an area: chunk 0, and chunk 1 after it.
    ///
    /// # Safety
    /// `p` must be mapped for `len` bytes, which are more than `CONTROL_BYTES`, page aligned, for as long as the area
    /// is used.
    pub unsafe fn set_first(&self, p: *mut u8, len: usize) {
        // SAFETY: the mapping goes on after chunk 0, by the contract.
        unsafe {
            self.set_chunk(1, p.add(CONTROL_BYTES), len - CONTROL_BYTES);
            self.set_control(p.cast());
        }
    }

    /// Sets the mapping of a data chunk.
    ///
    /// # Safety
    /// `p` must be mapped for `len` bytes for as long as the area is used.
    pub unsafe fn set_chunk(&self, n: usize, p: *mut u8, len: usize) {
        if let (Some(b), Some(l)) = (self.base.get(n), self.len.get(n)) {
            l.store(len, Relaxed);
            b.store(p, Release); // pairs with the Acquire in `ring`
        }
    }

    /// Removes all mappings and passes each one to `unmap`.
    pub fn clear(&self, mut unmap: impl FnMut(*mut u8, usize)) {
        let c = self.control.swap(core::ptr::null_mut(), AcqRel);
        if !c.is_null() {
            unmap(c.cast(), CONTROL_BYTES);
        }
        for (b, l) in self.base.iter().zip(&self.len) {
            let p = b.swap(core::ptr::null_mut(), AcqRel);
            if !p.is_null() {
                unmap(p, l.swap(0, Relaxed));
            }
        }
    }

    /// The control words, if chunk 0 is mapped.
    #[inline(always)]
    pub fn control(&self) -> Option<&Control> {
        // SAFETY: by `set_control`'s contract the mapping holds while the area is used; `Control`
        // consists of atomics only, for which any bytes are valid and foreign writes allowed.
        unsafe { self.control.load(Acquire).as_ref() }
    }

    /// Is data chunk `n` (1 or more) mapped here?
    pub fn has_chunk(&self, n: usize) -> bool {
        self.base.get(n).is_some_and(|b| !b.load(Acquire).is_null())
    }

    /// Size in bytes of a chunk that is mapped here, otherwise 0.
    pub fn chunk_len(&self, n: usize) -> usize {
        if self.has_chunk(n) {
            self.len[n].load(Relaxed)
        } else {
            0
        }
    }

    /// Start of a ring, if it lies inside a chunk that is mapped here.
    #[inline(always)]
    pub fn ring(&self, loc: Loc) -> Option<Ring> {
        let i = loc.chunk as usize;
        let base = self.base.get(i)?.load(Acquire);
        if base.is_null() || !loc.fits(self.len.get(i)?.load(Relaxed)) {
            return None;
        }
        // SAFETY: `fits` was just checked against the mapped length; the mapping holds while the
        // area is used, by `set_chunk`'s contract.
        Some(unsafe { Ring::new(base.add(loc.page as usize * 4096), loc.bytes()) })
    }
}

impl Default for Area {
    fn default() -> Self {
        Self::new()
    }
}

/// An end's view of its lane: own words, the peer's words, both areas. Cheap to make.
#[derive(Clone, Copy)]
pub struct Memory<'a> {
    /// The area of the end to which this lane belongs. This client writes it, except in a takeover.
    pub own: &'a Area,
    /// The other client's area, mapped read-only. In a takeover it is the daemon's, which writes it.
    pub peer: &'a Area,
    own_ctl: &'a Control,
    peer_ctl: &'a Control,
    lane: usize,
    /// The other client is a daemon that represents an end on another node: see [`Memory::is_remote`].
    remote: bool,
    takes_over: bool,
}

impl<'a> Memory<'a> {
    /// `None` if either control chunk is not mapped or the lane number is impossible.
    #[inline(always)]
    pub fn new(own: &'a Area, peer: &'a Area, lane: u32) -> Option<Self> {
        let lane = lane as usize;
        if lane >= crate::abi::LANES {
            return None;
        }
        Some(Memory {
            own,
            peer,
            own_ctl: own.control()?,
            peer_ctl: peer.control()?,
            lane,
            remote: false,
            takes_over: false,
        })
    }

    /// Is it the lane with this number?
    #[inline(always)]
    pub fn is_lane(&self, lane: u32) -> bool {
        self.lane == lane as usize
    }

    /// The same for a lane across nodes: words that the other side stores arrive here with a delay, and ours arrive
    /// there with a delay.
    #[inline(always)]
    pub fn across(self, remote: bool) -> Self {
        Memory { remote, ..self }
    }

    /// Is the other end on another node?
    #[inline(always)]
    pub fn is_remote(&self) -> bool {
        self.remote
    }

    /// Version of the daemon that made the areas.
    pub(super) fn version(&self) -> u32 {
        self.own_ctl.header.version.load(Relaxed)
    }

    /// The same as seen by a daemon that has taken over the end's sending direction: `own` is the end's area, which
    /// the daemon only reads, and `peer` the daemon's own; on one node `own` has control words that the daemon may
    /// write, and `peer` is the other end's area, which it only reads.
    pub fn for_takeover(self) -> Self {
        Memory {
            takes_over: true,
            ..self
        }
    }

    #[inline(always)]
    pub(super) fn takes_over(&self) -> bool {
        self.takes_over
    }

    /// Words of our sending half.
    #[inline(always)]
    pub fn own_tx(&self) -> &'a TxWords {
        &self.own_ctl.tx[self.lane]
    }
    /// Words of our receiving half.
    #[inline(always)]
    pub fn own_rx(&self) -> &'a RxWords {
        &self.own_ctl.rx[self.lane]
    }
    /// Words of the other end's sending half.
    #[inline(always)]
    pub(super) fn peer_tx(&self) -> &'a TxWords {
        &self.peer_ctl.tx[self.lane]
    }
    /// Words of the other end's receiving half.
    #[inline(always)]
    pub fn peer_rx(&self) -> &'a RxWords {
        &self.peer_ctl.rx[self.lane]
    }
    /// What a daemon does with our sending half.
    #[inline(always)]
    pub fn daemon(&self) -> &'a DaemonWords {
        match self.remote {
            true => &self.peer_ctl.daemon[self.lane],
            false => &self.own_ctl.daemon[self.lane],
        }
    }
    /// On one node: what a daemon does with the other end's sending half.
    #[inline(always)]
    pub(super) fn peer_daemon(&self) -> &'a DaemonWords {
        &self.peer_ctl.daemon[self.lane]
    }
    /// Number of bytes ever published by us on this slot.
    #[inline(always)]
    pub fn own_head(&self) -> &'a Shared<Cursor> {
        &self.own_ctl.heads[self.lane]
    }
    /// Number of bytes ever consumed by us from the incoming ring.
    #[inline(always)]
    pub fn own_cursor(&self) -> &'a Shared<Cursor> {
        &self.own_ctl.cursors[self.lane]
    }
    /// Number of bytes ever published by the other end; any value is possible.
    #[inline(always)]
    pub fn peer_head(&self) -> &'a Shared<Cursor> {
        &self.peer_ctl.heads[self.lane]
    }
    /// Number of our bytes that the other end says it has consumed; any value is possible.
    #[inline(always)]
    pub fn peer_cursor(&self) -> &'a Shared<Cursor> {
        &self.peer_ctl.cursors[self.lane]
    }
    /// Publish counter of our area for the lane.
    #[inline(always)]
    pub(super) fn own_seq(&self) -> &'a AtomicU32 {
        &self.own_ctl.seq[self.lane / LANES_PER_COUNTER].0
    }
    /// Number of threads of the other client that sleep on the link group.
    #[inline(always)]
    pub(super) fn peer_sleepers(&self) -> &'a AtomicU32 {
        &self.peer_ctl.sleepers.0
    }

    /// Enters the coming publish in the counter's log.
    #[cfg(not(loom))]
    #[inline(always)]
    fn note(&self) {
        use crate::{
            abi::{LogEntry, LOG},
            prim::ticks,
        };
        let (counter, lane) = (self.lane / LANES_PER_COUNTER, self.lane % LANES_PER_COUNTER);
        // Relaxed: the log is only a hint. Two threads that publish at the same time may leave only one entry.
        let at = self.own_seq().load(Relaxed) as usize % LOG;
        self.own_ctl.log[counter][at].store(LogEntry::new(ticks(), lane), Relaxed);
    }

    /// Announces what was just stored; rings the doorbell if the other side counts sleepers. Returns whether it rang.
    #[inline(always)]
    pub fn publish(&self, port: &impl super::Port) -> bool {
        #[cfg(not(loom))]
        self.note();
        let ring = crate::notify::publish(self.own_seq(), self.peer_sleepers());
        if ring {
            port.ring();
        }
        ring
    }
}

/// A cursor over an application's buffers. Like the kernel's `iov_iter`, it trusts the
/// application's pointers: an invalid one faults in the application's own call.
#[derive(Clone)]
pub struct Iov<'a> {
    vecs: &'a [libc::iovec],
    offset: usize,
    /// Bytes that this call may still move.
    rest: usize,
}

/// Most bytes that one call moves: the kernel's `MAX_RW_COUNT`, see read(2) and send(2).
pub const CALL_MAX: usize = 0x7fff_f000;

impl<'a> Iov<'a> {
    /// At the beginning of the first buffer.
    pub fn new(vecs: &'a [libc::iovec]) -> Self {
        Iov {
            vecs,
            offset: 0,
            rest: CALL_MAX,
        }
    }

    /// Number of buffers left, including empty ones.
    pub fn runs(&self) -> usize {
        self.vecs.len()
    }

    /// Bytes left, at most [`CALL_MAX`] with those that were taken.
    pub fn left(&self) -> usize {
        self.vecs
            .iter()
            .fold(0usize, |n, v| n.saturating_add(v.iov_len))
            .saturating_sub(self.offset)
            .min(self.rest)
    }

    /// Steps over up to `want` bytes and returns the run. `None` at the end.
    #[inline(always)]
    pub fn take(&mut self, want: usize) -> Option<(*mut u8, usize)> {
        while let Some((first, rest)) = self.vecs.split_first() {
            let left = first.iov_len - self.offset;
            if left == 0 {
                self.vecs = rest;
                self.offset = 0;
                continue;
            }
            let n = left.min(want).min(self.rest);
            let p = first.iov_base.cast::<u8>().wrapping_add(self.offset);
            self.offset += n;
            self.rest -= n;
            return (self.rest > 0 || n > 0).then_some((p, n));
        }
        None
    }

    /// Steps over `n` bytes.
    pub fn skip(&mut self, mut n: usize) {
        while n > 0 {
            match self.take(n) {
                Some((_, k)) => n -= k,
                None => return,
            }
        }
    }

    /// Number of bytes from here on, at most `most`, if `good` holds for every run of them; otherwise `None`.
    #[inline(always)]
    pub fn proven(&self, most: usize, good: impl Fn(*mut u8, usize) -> bool) -> Option<usize> {
        if let [v] = self.vecs {
            let p = v.iov_base.cast::<u8>().wrapping_add(self.offset);
            let n = (v.iov_len - self.offset).min(most).min(self.rest);
            return good(p, n).then_some(n);
        }
        let (mut all, mut n) = (self.clone(), 0);
        while n < most {
            let Some((p, k)) = all.take(most - n) else {
                break;
            };
            if !good(p, k) {
                return None;
            }
            n += k;
        }
        Some(n)
    }

    /// Gives back the last `n` bytes of the run that [`Iov::take`] returned last.
    pub fn untake(&mut self, n: usize) {
        let n = n.min(self.offset);
        self.offset -= n;
        self.rest += n;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_call_moves_no_more_than_the_kernel_would() {
        let v = |n| libc::iovec {
            iov_base: core::ptr::null_mut(),
            iov_len: n,
        };
        let all = [v(CALL_MAX - 10), v(0), v(100)];
        let mut iov = Iov::new(&all);
        assert_eq!(iov.left(), CALL_MAX);
        assert_eq!(iov.take(usize::MAX).map(|t| t.1), Some(CALL_MAX - 10));
        assert_eq!(iov.proven(50, |_, n| n <= 10), Some(10));
        assert_eq!(iov.take(50).map(|t| t.1), Some(10));
        assert_eq!((iov.left(), iov.take(50)), (0, None));
        iov.untake(4);
        assert_eq!((iov.left(), iov.take(0).map(|t| t.1)), (4, Some(0)));
        assert_eq!(iov.take(50).map(|t| t.1), Some(4));
    }
}
