//! A receive goes through the modes until there is a result.

use super::revoke::has_arrived;
use super::{mode, How, Received, Revoked, RxState};
use crate::abi::{tx, Cursor};
use crate::half::mem::{Iov, Memory};
use crate::half::Port;
use crate::num;
use crate::prim::fence;
use crate::proto::reason::Reason;
use core::sync::atomic::Ordering::*;

/// More bytes than any socket's queue has.
const MANY: usize = 1 << 30;

/// What a step of a receive has found. `None`: the mode has changed, or has to be looked at again.
type Step = Result<Option<Received>, Reason>;

impl RxState {
    /// Receives: goes through the modes until there is a result.
    #[inline]
    pub fn recv(&self, m: &Memory, port: &impl Port, iov: &mut Iov<'_>, how: How) -> Received {
        match self.advance(m, port, iov, how) {
            Ok(r) => r,
            Err(reason) => Received::Reset(reason),
        }
    }

    pub(super) fn advance(
        &self,
        m: &Memory,
        port: &impl Port,
        iov: &mut Iov<'_>,
        how: How,
    ) -> Result<Received, Reason> {
        let mut looked = false;
        loop {
            let found = match self.mode.load(Relaxed) {
                mode::RING | mode::LAST | mode::FIN => {
                    self.read_ring(m, port, iov, how, &mut looked)?
                }
                // (Bytes in TCP's queue came before the error, and so did those on a ring whose switch was not seen
                // yet.)
                now if now != mode::TCP && self.error.is_set() && !has_arrived(port, 1) => {
                    self.reach_error(m, port, now)?
                }
                mode::SKIP => self.skip_repeated(m, port),
                mode::READY => self.read_limited(m, port, iov, how)?,
                // The sender has gone up and down meanwhile, and the whole stream is on TCP.
                mode::PREFIX if !m.is_remote() && self.phase(m) == tx::RESUMED => {
                    self.mode.store(mode::TCP, Relaxed);
                    None
                }
                mode::PREFIX => self.read_prefix(m, port, iov, how)?,
                mode::REST => self.read_rest(port, iov, how),
                mode::UNDECIDED => self.read_undecided(port, iov, how),
                mode::REVOKING => {
                    // Nothing beyond the frozen cursor may be consumed.
                    let pending = self.revoke(m, port)? == Revoked::Pending
                        && self.mode.load(Relaxed) == mode::REVOKING;
                    pending.then_some(Received::Empty)
                }
                _ => Some(Received::Tcp),
            };
            if let Some(r) = found {
                return Ok(r);
            }
        }
    }

    /// RING, LAST, FIN: bytes of the ring. `looked`: this receive has looked at TCP already.
    #[inline(always)]
    fn read_ring(
        &self,
        m: &Memory,
        port: &impl Port,
        iov: &mut Iov<'_>,
        how: How,
        looked: &mut bool,
    ) -> Step {
        let head = self.head(m)?;
        let cursor = self.cursor.load(Relaxed);
        if head == cursor {
            return self.pass_ring(m, port, how, cursor, looked);
        }
        if how.peek {
            return self.peek_ring(m, port, iov, how).map(Some);
        }
        let r = self.take(m, port, iov, how, head);
        self.taken(m, port, head);
        r.map(Some)
    }

    /// Bytes were taken off the ring, whose head was there: if they were the last ones, what repeats them is taken off TCP.
    #[inline(always)]
    pub(super) fn taken(&self, m: &Memory, port: &impl Port, head: Cursor) {
        // (Across nodes, what a frame has announced may be cut off before it is there: only a receive tells that.)
        let last = || self.is_left(m) || !m.is_remote() && self.mode.load(Relaxed) == mode::LAST;
        if self.cursor.load(Relaxed) == head && last() {
            self.take_repeat(m, port);
        }
    }

    /// RING, LAST, FIN: the ring is read up to `cursor`, where it ends for now or for good.
    fn pass_ring(
        &self,
        m: &Memory,
        port: &impl Port,
        how: How,
        cursor: Cursor,
        looked: &mut bool,
    ) -> Step {
        match self.mode.load(Relaxed) {
            mode::FIN => return Ok(Some(Received::Eof)),
            mode::LAST => {
                self.begin_skip(cursor)?;
                return Ok(None);
            }
            _ => {}
        }
        // (A frame in TCP's queue, and the bytes after it, came before the error.)
        let late = self.error.is_set();
        if late && !has_arrived(port, 1) {
            if let Some(r) = self.kept_error() {
                return Ok(Some(r));
            }
        }
        // (The ring is still empty: with bytes unread, the sender would not have stored RESUMED.)
        if !m.is_remote() && self.phase(m) == tx::RESUMED {
            self.mode.store(mode::TCP, Relaxed);
            return Ok(None);
        }
        if !(how.look || late) || *looked {
            return Ok(Some(Received::Empty));
        }
        *looked = true;
        self.look(m, port)
    }

    /// The error that was kept, if it has to be reported now. (A send, or SO_ERROR, takes it without the lock of this
    /// direction.)
    fn kept_error(&self) -> Option<Received> {
        match self.error.take() {
            0 => None,
            e => Some(Received::Error(e)),
        }
    }

    /// An error was kept, and TCP's queue is empty: reports it, unless the ring comes before it.
    fn reach_error(&self, m: &Memory, port: &impl Port, now: u32) -> Step {
        if now == mode::READY && self.see_up(m)? {
            return Ok(None);
        }
        if now == mode::PREFIX && self.prefix_left() == 0 {
            if !self.past(m, port)? {
                self.mode.store(mode::RING, Relaxed); // TCP is over, and so is its sender
            }
            return Ok(None);
        }
        Ok(self.kept_error())
    }

    /// SKIP: discards what TCP repeats.
    fn skip_repeated(&self, m: &Memory, port: &impl Port) -> Option<Received> {
        let n = self.skip.load(Relaxed);
        if n == 0 {
            self.skipped(m);
            return None;
        }
        match port.tcp_recv(core::ptr::null_mut(), num::size(n), false) {
            // This end shut the direction down itself: the kernel still accepts and delivers what comes.
            Ok(0) if self.shut.load(Relaxed) != 0 => Some(Received::Eof),
            // The sender shut TCP down or died before it had repeated the bytes that we have: nothing is missing, and
            // nothing more will come.
            Ok(0) => {
                let cut = m.is_remote() && self.rest.load(Relaxed) > 0;
                self.mode.store(mode::TCP, Relaxed);
                Some(match cut {
                    true => Received::Error(libc::ECONNRESET),
                    false => self.tcp_ended(m, port),
                })
            }
            Ok(k) => {
                self.took_again(k as u64);
                self.skip.store(n - (k as u64).min(n), Relaxed);
                None
            }
            Err(libc::EAGAIN) => Some(Received::Empty),
            Err(e) => {
                self.mode.store(mode::TCP, Relaxed);
                Some(Received::Error(e))
            }
        }
    }

    /// READY: bytes of TCP, but none from after a switch.
    fn read_limited(&self, m: &Memory, port: &impl Port, iov: &mut Iov<'_>, how: How) -> Step {
        if self.see_up(m)? {
            return Ok(None);
        }
        let n = match port.tcp_unread() {
            Ok(n) => n,
            Err(e) => return Ok(Some(Received::Error(e))),
        };
        // SYNC limit: bytes that were in the queue before a switch that we do not see yet were sent before that
        // switch; we must not take more than those.
        fence(SeqCst);
        if self.see_up(m)? {
            return Ok(None);
        }
        match n {
            0 => self.read_end(m, port, iov, how),
            n => Ok(Some(self.take_tcp(port, iov, how, n))),
        }
    }

    /// READY, and TCP counts no byte: there is an end, an error, an urgent mark, or nothing.
    fn read_end(&self, m: &Memory, port: &impl Port, iov: &mut Iov<'_>, how: How) -> Step {
        if how.part && port.tcp_at_mark() {
            return Ok(Some(Received::Empty));
        }
        let end = self.peek_end(port);
        // A receive skips an urgent byte, which is received separately: left in the queue, it would turn a close into
        // a reset. (An end that sends urgent data has left its lane for good.)
        if matches!(end, Received::Empty | Received::Eof)
            && !how.peek
            && iov.left() > 0
            && port.tcp_at_mark()
        {
            return Ok(Some(self.take_tcp(port, iov, how, 1)));
        }
        // An end or error that we see only now may have come after a switch, and after bytes on the ring.
        if end != Received::Empty && self.see_up(m)? {
            if let Received::Error(e) = end {
                self.error.put(e);
            }
            return Ok(None);
        }
        match end {
            Received::Bytes(1) => self.read_uncounted(m, port, iov, how),
            Received::Eof => Ok(Some(self.tcp_ended(m, port))),
            end => Ok(Some(end)),
        }
    }

    /// READY: a peek has found bytes that TCP did not count before.
    fn read_uncounted(&self, m: &Memory, port: &impl Port, iov: &mut Iov<'_>, how: How) -> Step {
        match port.tcp_unread() {
            // SIOCINQ stops at an urgent mark; the count returned by a peek does not. These bytes were sent before a
            // switch that we still do not see.
            Ok(0) => {
                let n = port.tcp_recv(core::ptr::null_mut(), MANY, true);
                fence(SeqCst); // SYNC limit
                if self.see_up(m)? {
                    return Ok(None);
                }
                Ok(Some(self.take_tcp(port, iov, how, n.unwrap_or(1))))
            }
            // Bytes have come just now: go through the loop again to take all of them.
            Ok(_) => Ok(None),
            Err(e) => Ok(Some(Received::Error(e))),
        }
    }

    /// PREFIX: bytes of TCP up to the switch, and those of the ring after them.
    fn read_prefix(&self, m: &Memory, port: &impl Port, iov: &mut Iov<'_>, how: How) -> Step {
        let left = self.prefix_left();
        if left == 0 {
            return Ok((!self.past(m, port)?).then_some(Received::Empty));
        }
        if how.peek {
            let found = self.peek_prefix(m, port, iov, how, num::size(left));
            return Ok(Some(found));
        }
        let r = self.take_tcp(port, iov, how, num::size(left));
        // A caller that asks `ready` or `has_news` next must see the ring. (If a word is wrong, the next call meets that.)
        if self.prefix_left() == 0 {
            let _ = self.past(m, port);
        }
        Ok(Some(match r {
            Received::Bytes(n) if n as u64 == left && self.is_up() => {
                Received::Bytes(n + self.take_more(m, port, iov, how))
            }
            r => r,
        }))
    }

    /// REST: bytes of TCP that a frame announced.
    fn read_rest(&self, port: &impl Port, iov: &mut Iov<'_>, how: How) -> Option<Received> {
        let left = self.prefix_left();
        if left == 0 {
            self.mode.store(mode::TCP, Relaxed);
            return None;
        }
        // (Plain bytes follow them on TCP, so a peek may read further.)
        let most = if how.peek {
            usize::MAX
        } else {
            num::size(left)
        };
        let r = self.take_tcp(port, iov, how, most);
        if self.prefix_left() == 0 {
            self.mode.store(mode::TCP, Relaxed);
        }
        Some(match r {
            // The sender died before it had put everything on TCP that it had announced.
            Received::Eof if self.shut.load(Relaxed) == 0 => Received::Error(libc::ECONNRESET),
            r => r,
        })
    }

    /// Number of bytes of the prefix, or of what a frame announced, that are still to be read from TCP. (A part of a frame may
    /// have been taken after the prefix, by an end that has revoked.)
    pub(super) fn prefix_left(&self) -> u64 {
        let limit = self.limit.load(Relaxed);
        limit.saturating_since(self.tcp_pos.load(Relaxed))
    }

    /// The ring is read up to `cursor`: TCP repeats the bytes from the cursor in the frame up to there.
    pub(super) fn begin_skip(&self, cursor: Cursor) -> Result<(), Reason> {
        let again = cursor - self.frame_cursor.load(Relaxed);
        let rest = self.rest.load(Relaxed);
        self.rest
            .store(rest.checked_sub(again).ok_or(Reason::Hostile)?, Relaxed);
        self.skip.store(again, Relaxed);
        self.mode.store(mode::SKIP, Relaxed);
        Ok(())
    }

    /// All bytes that were already read from the ring are skipped on TCP.
    fn skipped(&self, m: &Memory) {
        let rest = self.rest.swap(0, Relaxed);
        if m.is_remote() {
            let limit = self.tcp_pos.load(Relaxed) + rest;
            self.limit.store(limit, Relaxed);
            self.mode.store(mode::REST, Relaxed);
        } else {
            self.go_to_tcp(rest);
        }
    }
}
