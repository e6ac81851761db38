//! What TCP has while a direction is on its ring: a frame, an end, an error, or bytes that bypassed the lane. None of
//! these bytes may reach the application.

use super::{mode, How, Received, RxState};
use crate::abi::{marks, rx, takeover, tx, Cursor, TcpPos, RING_LOG2_MAX};
use crate::half::mem::{Iov, Memory};
use crate::half::Port;
use crate::num;
use crate::prim::fence;
use crate::proto::frame::{Frame, Kind, LEN};
use crate::proto::reason::Reason;
use core::sync::atomic::Ordering::*;

impl RxState {
    /// The ring is empty: what does TCP report? `None`: look at the ring again.
    pub(super) fn look(&self, m: &Memory, port: &impl Port) -> Result<Option<Received>, Reason> {
        let mut b = self.got_bytes();
        let mut have = (self.got_len.load(Relaxed) as usize).min(LEN - 1);
        loop {
            match port.tcp_recv(b[have..].as_mut_ptr(), LEN - have, true) {
                Ok(0) => {
                    // Everything that was published before the FIN is visible now: look at the ring once more.
                    if self.head(m)? != self.cursor.load(Relaxed) {
                        return Ok(None);
                    }
                    // (After our own SHUT_RD, the kernel reports an end of file whenever its queue is empty.)
                    if m.is_remote() && self.shut.load(Relaxed) == 0 {
                        // An end that no `Fin` frame announced: the bytes that were on their way are lost.
                        return Ok(Some(Received::Error(libc::ECONNRESET)));
                    }
                    return Ok(Some(self.tcp_ended(m, port)));
                }
                Ok(n) => {
                    // RESUMED was stored before these bytes were sent.
                    if have == 0 && self.resumed(m) {
                        self.mode.store(mode::TCP, Relaxed);
                        return Ok(None);
                    }
                    let n = (have + n).min(LEN);
                    if have == 0 && self.may_be_plain(m, port, &b[..n])? {
                        return Ok(Some(Received::Empty));
                    }
                    if !Frame::could_start(&b[..n]) {
                        return Err(Reason::Foreign);
                    }
                    // Recorded first, then consumed.
                    for (d, s) in self.got.iter().zip(b.chunks_exact(8)) {
                        let mut w = [0u8; 8];
                        w.copy_from_slice(s);
                        d.store(u64::from_ne_bytes(w), Relaxed);
                    }
                    if port.tcp_recv(core::ptr::null_mut(), n - have, false) != Ok(n - have) {
                        return Err(Reason::Sync);
                    }
                    self.took_again((n - have) as u64);
                    self.got_len.store(num::small(n % LEN), Relaxed);
                    if n < LEN {
                        have = n; // does more follow, or the end of file?
                        continue;
                    }
                    return self.framed(m.is_remote(), &b).map(|()| None);
                }
                Err(libc::EAGAIN) => return Ok(Some(Received::Empty)),
                Err(e) => {
                    if self.head(m)? != self.cursor.load(Relaxed) {
                        self.error.put(e);
                        return Ok(None);
                    }
                    return Ok(Some(Received::Error(e)));
                }
            }
        }
    }

    /// The recorded bytes of a frame.
    pub(super) fn got_bytes(&self) -> [u8; LEN] {
        let mut b = [0u8; LEN];
        for (d, s) in b.chunks_exact_mut(8).zip(&self.got) {
            d.copy_from_slice(&s.load(Relaxed).to_ne_bytes());
        }
        b
    }

    /// A complete frame has arrived.
    pub(super) fn framed(&self, remote: bool, b: &[u8; LEN]) -> Result<(), Reason> {
        let f = self.our_frame(b).ok_or(Reason::Foreign)?;
        let cursor = self.cursor.load(Relaxed);
        if f.kind == Kind::Fin {
            if !remote || f.cursor < cursor || f.cursor - cursor > 2 << RING_LOG2_MAX {
                return Err(Reason::Hostile);
            }
            self.frame_cursor.store(f.cursor, Relaxed);
            self.mode.store(mode::FIN, Relaxed);
            return Ok(());
        }
        self.taken_since(f.cursor).ok_or(Reason::Hostile)?;
        self.frame_cursor.store(f.cursor, Relaxed);
        self.rest.store(u64::from(f.rest), Relaxed);
        self.mode.store(mode::LAST, Relaxed);
        Ok(())
    }

    /// On one node: has the sender gone back to TCP without a frame? It does so if the reader has taken everything
    /// from the ring, which then stays empty.
    #[inline(always)]
    pub(super) fn resumed(&self, m: &Memory) -> bool {
        !m.is_remote()
            && self.phase(m) == tx::RESUMED
            && self.head(m) == Ok(self.cursor.load(Relaxed))
    }

    /// Has the sender gone down by a frame, or is it about to? (Across nodes it may have, without having said so.)
    #[inline(always)]
    pub(super) fn is_left(&self, m: &Memory) -> bool {
        matches!(self.phase(m), tx::DOWNING | tx::DOWN | tx::ENDED)
    }

    /// The ring is read to its end: takes the frame, and the bytes that repeat the ring, off TCP as far as they have
    /// arrived. A reader that has everything may close without another call, and if they are unread the kernel turns
    /// that close into a reset.
    #[cold]
    pub(super) fn take_repeat(&self, m: &Memory, port: &impl Port) {
        let how = How {
            look: true,
            ..How::default()
        };
        // (If the stream is wrong, the next call meets that again.)
        if let Ok(Received::Error(e)) = self.advance(m, port, &mut Iov::new(&[]), how) {
            self.error.put(e);
        }
    }

    /// On one node, for an end that will take no more bytes, and has announced that or taken all there are: is a frame, or what
    /// follows it, on its way? The kernel would answer it with a reset.
    pub fn awaits_frame(&self, m: &Memory) -> bool {
        fence(SeqCst); // SYNC deaf, SYNC taken: see `TxState::down`
        !m.is_remote() && self.phase(m) == tx::DOWNING
    }

    /// TCP has ended, after everything that came before: a clean end of file, unless the other end has died with
    /// bytes that we sent unread.
    pub(super) fn tcp_ended(&self, m: &Memory, port: &impl Port) -> Received {
        // (An end of file caused by our own shutdown says nothing about the other end.)
        if self.shut.load(Relaxed) == 0 && self.notice_death(m, false) {
            // (If the socket is closed although this end has not ended, TCP has received a reset of its own, which
            // was reported.)
            if port.tcp_cut() || self.has_ended(m) {
                return Received::Error(libc::ECONNRESET);
            }
        }
        Received::Eof
    }

    /// TCP has ended, on one node: did the other end die while bytes that we sent were unread on the ring? Its
    /// kernel, which does not know these bytes, sends a FIN where it would have sent a reset. Returns true only once.
    /// `dead`: its process is known to be gone. A FIN alone may come from an earlier shutdown, and after our own
    /// SHUT_RD an end of file is no FIN at all.
    pub fn notice_death(&self, m: &Memory, dead: bool) -> bool {
        (dead || self.shut.load(Relaxed) == 0)
            && self.died_unread(m, dead)
            && m.own_rx().marks.fetch_or(marks::CUT, Relaxed) & marks::CUT == 0
    }

    /// The same, without noting that it was reported.
    pub fn died_unread(&self, m: &Memory, dead: bool) -> bool {
        let said = m.peer_rx().marks.load(SeqCst);
        if m.is_remote() || said & marks::KEPT == 0 || said & marks::ENDED != 0 && !dead {
            return false; // it has shut down or closed, or is of a version without these marks
        }
        let (own, word) = (m.own_tx(), m.peer_rx().word.load(Acquire));
        let state = own.state.load(Relaxed);
        if state.phase() != tx::UP
            || state.epoch() != word.epoch()
            || word.has(rx::CLOSED | rx::REVOKED)
        {
            return false;
        }
        let (start, head) = (own.up_start.load(Relaxed), m.own_head().load(Relaxed));
        let cursor = m.peer_cursor().load(Acquire);
        // Until the peer has seen the switch, its cursor word is still that of a former use of the slot.
        let taken = cursor.since(start).min(head.since(start));
        let taken = if cursor < start { 0 } else { taken };
        head.since(start) > taken
    }

    /// Does a FIN that has come stand for a reset, because the other end died so? (Whether this was reported or not.) Not if
    /// it sent the FIN before.
    pub fn is_reset_by_death(&self, m: &Memory) -> bool {
        let told = m.own_rx().marks.load(Relaxed) & marks::CUT != 0;
        self.said(m) & marks::ENDED == 0 && (told || self.died_unread(m, false))
    }

    /// On one node: the other end's `marks`, if they are of this use of the lane.
    pub fn said(&self, m: &Memory) -> u32 {
        // Acquire: the other end attaches its receiving half, which resets the marks, before it stores the epoch.
        let epoch = m.peer_tx().state.load(Acquire).epoch();
        match !m.is_remote() && epoch.same_use(self.epoch.load(Relaxed)) {
            true => m.peer_rx().marks.load(SeqCst),
            false => 0,
        }
    }

    /// On one node, if the peer has ended, or is gone: do we have everything that it sent, whatever TCP still has to report?
    pub fn has_all(&self, m: &Memory) -> bool {
        let mode = self.mode.load(Relaxed);
        let (said, sent) = (self.said(m), m.peer_rx().landed.load(Relaxed).tcp_pos());
        let undecided = said & marks::ENDED != 0 && sent == TcpPos::UNKNOWN;
        if m.is_remote()
            || undecided
            || self.got_len.load(Relaxed) != 0
            || self.is_up() && self.ring_unread(m) > 0
        {
            return false;
        }
        // (BROKEN: the peer shut TCP down, or could not use it, with everything on the ring.)
        let repeated = match (mode, self.phase(m)) {
            (mode::RING, tx::UP | tx::BROKEN | tx::ENDED) => return true,
            // What has yet to come repeats the ring, and perhaps not all of it.
            (mode::RING, tx::DOWNING | tx::DOWN) => match self.follows_unseen(m) {
                Some(n) => n,
                None => return false,
            },
            (mode::TCP | mode::RING, _) | (mode::READY, tx::NONE) => 0,
            (mode::LAST, _) => self.cursor.load(Relaxed) - self.frame_cursor.load(Relaxed),
            (mode::SKIP, _) => self.skip.load(Relaxed),
            _ => return false,
        };
        let taken = self.tcp_pos.load(Relaxed) + repeated;
        let all = match repeated {
            0 => taken == sent,
            _ => taken >= sent,
        };
        all && said & (marks::ENDED | marks::EXITED) != 0
    }

    /// On one node, on the ring, which is read to its end: how many bytes a frame that has not come yet, and what repeats the
    /// ring after it, are on TCP at most. `None`: it is not known.
    fn follows_unseen(&self, m: &Memory) -> Option<u64> {
        let recorded = self.has_recorded(m, takeover::DOWN);
        let from = recorded.then(|| m.peer_rx().takeover_at.load(Relaxed))?;
        self.taken_since(from).map(|again| LEN as u64 + again)
    }

    /// How many bytes of the ring were taken from there on; `None`: no honest sender names that place.
    fn taken_since(&self, from: Cursor) -> Option<u64> {
        let cursor = self.cursor.load(Relaxed);
        (from <= cursor && cursor - from <= 2 << RING_LOG2_MAX).then(|| cursor - from)
    }

    /// The queue is empty: is that the end of file, an error, or just nothing?
    pub(super) fn peek_end(&self, port: &impl Port) -> Received {
        let mut b = 0u8;
        match port.tcp_recv(&mut b, 1, true) {
            Ok(0) => Received::Eof,
            Ok(n) => Received::Bytes(n),
            Err(libc::EAGAIN) => Received::Empty,
            Err(e) => Received::Error(e),
        }
    }

    /// Decodes a frame that has our tag and our epoch.
    pub(super) fn our_frame(&self, b: &[u8; LEN]) -> Option<Frame> {
        let f = Frame::decode(b)?;
        (f.tag == self.tag.load(Relaxed) && f.epoch == self.epoch.load(Relaxed)).then_some(f)
    }
}
