//! What there is to read, in the order of the stream: the bytes from before the switch on TCP, the ring, and the
//! bytes that TCP has after the frame of a way down. That last part begins with what the ring has, or had, from the
//! frame's cursor on. Peeks and FIONREAD follow this order; they never count a frame, nor a byte twice.

use super::{mode, How, Received, RxState};
use crate::half::mem::{Iov, Memory};
use crate::half::Port;
use crate::num;
use crate::prim::fence;
use crate::proto::frame::{Frame, Kind, LEN};
use crate::proto::reason::Reason;
use core::sync::atomic::Ordering::*;

impl RxState {
    /// May more bytes be on TCP, after the last one of the ring? Cheap on one node, where the sender announces that
    /// before it writes its frame.
    #[inline(always)]
    pub fn goes_down(&self, m: &Memory) -> bool {
        self.mode.load(Relaxed) == mode::RING && (m.is_remote() || self.is_left(m))
    }

    /// A peek at TCP; see [`Port::tcp_peek`].
    fn peek_port(
        &self,
        port: &impl Port,
        iov: &Iov<'_>,
        how: How,
        (first, gap, rest): (usize, &mut [u8], usize),
    ) -> Result<usize, i32> {
        if !how.discard {
            return port.tcp_peek(iov.clone(), first, gap, rest);
        }
        let most = iov.left().min(first.saturating_add(rest));
        port.tcp_recv(core::ptr::null_mut(), most.saturating_add(gap.len()), true)
    }

    /// A peek at TCP that returns at most `most` bytes.
    pub(super) fn peek_tcp(
        &self,
        port: &impl Port,
        iov: &mut Iov<'_>,
        how: How,
        most: usize,
    ) -> Received {
        match self.peek_port(port, iov, how, (most, &mut [], 0)) {
            Ok(0) if iov.left().min(most) > 0 => Received::Eof,
            Ok(n) => {
                iov.skip(n);
                Received::Bytes(n)
            }
            Err(libc::EAGAIN) => Received::Empty,
            Err(e) => Received::Error(e),
        }
    }

    /// A peek with `left` bytes of the prefix still on TCP.
    pub(super) fn peek_prefix(
        &self,
        m: &Memory,
        port: &impl Port,
        iov: &mut Iov<'_>,
        how: How,
        left: usize,
    ) -> Received {
        if iov.left() <= left {
            return self.peek_tcp(port, iov, how, left);
        }
        let mut frame = [0; LEN];
        let rest = if how.discard { usize::MAX } else { 0 };
        let found = match self.peek_port(port, iov, how, (left, &mut frame, rest)) {
            Ok(0) => return Received::Eof,
            Ok(n) => n,
            Err(libc::EAGAIN) => return Received::Empty,
            Err(e) => return Received::Error(e),
        };
        // Nothing of the ring was consumed, so the frame repeats all of it. (Bytes that are no frame must not be
        // shown.)
        let again = |f: Frame| f.kind == Kind::Down && f.cursor == self.cursor.load(Relaxed);
        let found = match found == left + LEN && self.our_frame(&frame).is_some_and(again) {
            true => self.peek_port(port, iov, how, (left, &mut frame, usize::MAX)),
            false => Ok(found),
        }
        .unwrap_or(found);
        iov.skip(found.min(left));
        if found < left {
            return Received::Bytes(found);
        }
        let after = found.saturating_sub(left + LEN);
        let ring = match self.knows_next(m) {
            true => self.take_more(m, port, iov, how),
            false => 0,
        };
        iov.skip(after.saturating_sub(ring));
        Received::Bytes(left + ring.max(after))
    }

    /// A peek with bytes on the ring.
    pub(super) fn peek_ring(
        &self,
        m: &Memory,
        port: &impl Port,
        iov: &mut Iov<'_>,
        how: How,
    ) -> Result<Received, Reason> {
        if self.goes_down(m) && (iov.left() as u64) > self.ring_unread(m) {
            self.look_past_ring(m, port)?;
        }
        let all = iov.clone();
        let head = self.head(m)?;
        let ring = match self.take(m, port, iov, how, head)? {
            Received::Bytes(n) => n,
            r => return Ok(r),
        };
        if self.mode.load(Relaxed) != mode::LAST || iov.left() == 0 || !self.catch_up(port) {
            return Ok(Received::Bytes(ring));
        }
        let after = match self.peek_port(port, &all, how, (usize::MAX, &mut [], 0)) {
            Ok(n) => n,
            Err(e) => {
                self.error.put(e); // reported after the bytes of the ring
                0
            }
        };
        iov.skip(after.saturating_sub(ring));
        Ok(Received::Bytes(ring.max(after)))
    }

    /// With bytes on the ring: takes a frame off TCP that lies after them. Anything else that TCP reports is kept
    /// until after them.
    fn look_past_ring(&self, m: &Memory, port: &impl Port) -> Result<(), Reason> {
        if let Some(Received::Error(e)) = self.look(m, port)? {
            self.error.put(e);
        }
        Ok(())
    }

    /// In mode LAST: takes from TCP the bytes that were already read from the ring, so that TCP's bytes begin where
    /// the ring's do. False: not all of them have arrived yet.
    fn catch_up(&self, port: &impl Port) -> bool {
        loop {
            let (at, rest) = (self.frame_cursor.load(Relaxed), self.rest.load(Relaxed));
            let again = self.cursor.load(Relaxed) - at;
            if again == 0 {
                return true;
            }
            if again > rest {
                return false; // no honest sender says this; the receive reports it
            }
            match port.tcp_recv(core::ptr::null_mut(), num::size(again), false) {
                Ok(0) | Err(libc::EAGAIN) => return false,
                Ok(n) => {
                    let n = (n as u64).min(again);
                    self.took_again(n);
                    self.frame_cursor.store(at + n, Relaxed);
                    self.rest.store(rest - n, Relaxed);
                }
                Err(e) => {
                    self.error.put(e);
                    return false;
                }
            }
        }
    }

    /// Number of bytes that receives would find now, and never more: for FIONREAD. Looks for news first, as a receive
    /// does. `None`: this direction is on TCP, ask the kernel.
    pub fn unread(&self, m: &Memory, port: &impl Port) -> Option<u64> {
        let queued = || port.tcp_unread().map_or(0, |n| n as u64);
        if !self.has_ring_bytes(m) {
            // A switch or a frame is noticed only by a look, and a program may make no other calls than this one.
            let _ = self.probe(m, port);
        }
        if self.has_ring_bytes(m) && self.goes_down(m) && queued() > 0 {
            let _ = self.look_past_ring(m, port); // the receive reports anything wrong
        }
        let n = match self.mode.load(Relaxed) {
            mode::TCP => return None,
            mode::READY => {
                let n = queued();
                // SYNC limit: as in `read_limited`; after a switch the queue may end with a frame.
                fence(SeqCst);
                match self.see_up(m) {
                    Ok(true) => return self.unread(m, port),
                    Ok(false) => n,
                    Err(_) => 0, // the receive reports it
                }
            }
            mode::PREFIX => match (queued(), self.prefix_left()) {
                (n, left) if n < left || !self.knows_next(m) => n.min(left),
                (n, left) => {
                    let head = self.head(m).unwrap_or_default();
                    let ring = head.saturating_since(self.cursor.load(Relaxed));
                    left + ring.max((n - left).saturating_sub(LEN as u64))
                }
            },
            // What a frame announced is no repetition any more, nor is anything that follows it.
            mode::REST => queued(),
            mode::UNDECIDED => queued().min(self.prefix_left()),
            mode::LAST => {
                let had = self.cursor.load(Relaxed) - self.frame_cursor.load(Relaxed);
                self.ring_unread(m).max(queued().saturating_sub(had))
            }
            mode::SKIP => queued().saturating_sub(self.skip.load(Relaxed)),
            _ => self.ring_unread(m),
        };
        Some(n)
    }
}
