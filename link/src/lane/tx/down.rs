//! The sender's ways off the ring: by its own will, at the receiver's wish, at the end of the stream.
//! It must never lose a byte that an application was told is sent, nor repeat one unannounced.

use super::{mode, TxState, UNSEEN};
use crate::frame::{Frame, Kind, LEN};
use crate::lane::mem::{Memory, Ring};
use crate::lane::{Port, Progress};
use crate::layout::{marks, rx, takeover, tx, Epoch, Loc, RxWord, TxPhase, TxWord};
use crate::reason::Reason;
use core::sync::atomic::Ordering::*;

impl TxState {
    pub(super) fn answer(
        &self,
        m: &Memory,
        port: &impl Port,
        word: RxWord,
    ) -> Result<Progress, Reason> {
        if word.epoch() != self.epoch.load(Relaxed) {
            return Ok(Progress::Done); // not about this epoch: noise
        }
        if word.has(rx::REVOKED) && self.framed(m) {
            self.down(m, port)
        } else if word.has(rx::REVOKED) {
            // The word was stored after the cursor it speaks of.
            self.resume(m, port, m.peer_rx().revoked.load(Relaxed))
        } else if word.has(rx::CLOSED) {
            // Nobody reads any more: let the kernel give the application TCP's own errors.
            self.downs.fetch_add(1, Relaxed);
            if m.far() {
                // A daemon must hear that there is nothing to take over, or, if it is us who
                // have it, the end that it is over.
                let epoch = self.epoch.load(Relaxed);
                return Ok(self.settle(m, port, epoch, tx::BROKEN));
            }
            self.mode.store(mode::TCP, Relaxed);
            Ok(Progress::Done)
        } else if word.has(rx::WANT_DOWN) {
            self.down(m, port)
        } else {
            Ok(Progress::Done)
        }
    }

    /// A send that began at `begin` has met a receiver that has read a part of it, and then closed. (False: it has read
    /// none.) So all of it had come before that, as far as anybody can tell, and is sent. It stays on the ring, where who
    /// closes finds it unread, and resets the connection. TCP gets it, too: who has looked before the last of it was there
    /// closes without a reset, and the kernel has to answer.
    #[cold]
    pub(super) fn met_close(&self, m: &Memory, port: &impl Port, begin: u64, word: RxWord) -> bool {
        let head = self.head.load(Relaxed);
        // The closed word was stored after the last cursor.
        let read = self.refresh(m).unwrap_or(begin).min(head);
        if m.far() || word.has(rx::REVOKED) || read <= begin {
            return false;
        }
        let mut at = read;
        while let Some((ring, end)) = self.ring_at(m, at, head).filter(|_| at < head) {
            let (p, n) = ring.run(at, end - at);
            match self.repeat(port, p, n) {
                Ok(Some(n)) => at += n as u64,
                _ => break, // what TCP has is unread there, too
            }
        }
        true
    }

    /// Puts on TCP what no send counts any more: a frame, or bytes that the ring has, too. None: TCP takes nothing now.
    /// An error is the connection's end, kept for the application: the kernel will not tell it once more.
    fn repeat(&self, port: &impl Port, p: *const u8, n: usize) -> Result<Option<usize>, i32> {
        match port.tcp_send(p, n) {
            Ok(n) => {
                self.kpos.fetch_add(n as u64, Relaxed);
                self.again.fetch_add(n as u64, Relaxed);
                Ok(Some(n))
            }
            Err(libc::EAGAIN) => Ok(None),
            Err(e) => {
                self.error.put(e);
                Err(e)
            }
        }
    }

    /// Does a revocation want a frame? Across nodes, if bytes of this epoch were taken from the ring
    /// (see `RxState::recall`).
    fn framed(&self, m: &Memory) -> bool {
        let at = m.peer_rx().revoked.load(Relaxed);
        m.far() && at != UNSEEN && at != m.own_tx().up_start.load(Relaxed)
    }

    /// After a revocation at `cursor`: the rest of the ring goes to TCP as plain bytes.
    fn resume(&self, m: &Memory, port: &impl Port, cursor: u64) -> Result<Progress, Reason> {
        let known = self.refresh(m)?;
        let head = self.head.load(Relaxed);
        // A receiver that revoked before it saw this epoch's switch has taken nothing from the ring.
        let cursor = if cursor == UNSEEN {
            m.own_tx().up_start.load(Relaxed)
        } else {
            cursor
        };
        if cursor < known.min(head) || cursor > head || head - cursor > self.backlog_max() {
            return Err(Reason::Hostile);
        }
        self.frame_done.store(LEN as u32, Relaxed);
        self.drain_at.store(cursor, Relaxed);
        self.frame_cursor.store(u64::MAX, Relaxed);
        self.record(m, cursor, takeover::PLAIN);
        self.mode.store(mode::DRAIN, Relaxed);
        self.downs.fetch_add(1, Relaxed);
        self.drain(m, port)
    }

    /// Most bytes that can be unread: the present ring and the one before it.
    pub(super) fn backlog_max(&self) -> u64 {
        self.ring_size() + Loc::unpack(self.retired.load(Relaxed)).map_or(0, |l| l.bytes() as u64)
    }

    /// Switches down by our own will: a frame names the last cursor that the reader is known to have
    /// consumed, and the bytes from there follow on TCP. The ring keeps them, too: a reader that is
    /// quicker takes them there and skips as many on TCP, so that it never waits for our flush.
    pub fn down(&self, m: &Memory, port: &impl Port) -> Result<Progress, Reason> {
        if self.is_taken_over(m) {
            return Ok(Progress::Blocked);
        }
        match self.mode.load(Relaxed) {
            mode::RING => {}
            mode::DRAIN => return self.drain(m, port),
            mode::ASK if self.answered(m, port) => {}
            mode::ASK if self.mode.load(Relaxed) == mode::ASK => return Ok(Progress::Blocked),
            _ => return Ok(Progress::Done),
        }
        let epoch = self.epoch.load(Relaxed);
        self.say(m, port, epoch, tx::DOWNING);
        // SYNC revoke: we announce, then look; the receiver revokes, then looks at our word. One of
        // the two sees the other; if we see a revocation we give in and write no frame.
        let word = m.peer_rx().word.load(SeqCst);
        // SYNC deaf: the same of a receiver that closes or shuts the last direction: it waits for our frame, or
        // we see that it does not: see `RxState::awaits_frame`.
        let shut = marks::ENDED | marks::DEAF;
        let deaf = || m.peer_rx().marks.load(SeqCst) & shut == shut;
        if !m.far() && (self.is_closed(word) || deaf()) {
            // What arrives at a socket that is closed, or shut both ways, is answered with a reset, a frame
            // as well. The ring keeps what is unread.
            self.downs.fetch_add(1, Relaxed);
            return Ok(self.settle(m, port, epoch, tx::BROKEN));
        }
        if word.epoch() == epoch && word.has(rx::REVOKED) && !self.framed(m) {
            return self.resume(m, port, m.peer_rx().revoked.load(Relaxed));
        }
        let cursor = self.refresh(m)?;
        let rest = self.head.load(Relaxed) - cursor;
        if rest == 0 && !m.far() {
            // The ring says it all: see `RxState::resumed`. A frame would lie in the kernel of a reader who has
            // all bytes, and turn its end into a reset.
            self.downs.fetch_add(1, Relaxed);
            return Ok(self.settle(m, port, epoch, tx::RESUMED));
        }
        self.frame_done.store(0, Relaxed);
        self.frame_kind.store(0, Relaxed);
        self.frame_rest.store(rest as u32, Relaxed); // at most two rings
        self.frame_cursor.store(cursor, Relaxed);
        self.drain_at.store(cursor, Relaxed);
        self.record(m, cursor, takeover::DOWN);
        self.mode.store(mode::DRAIN, Relaxed);
        self.downs.fetch_add(1, Relaxed);
        self.drain(m, port)
    }

    /// Are there bytes of a revoked ring that only this process can still put on TCP? They must be
    /// there before a FIN is. (After a `Down` frame the reader finds them on the ring as well.)
    pub fn must_flush(&self) -> bool {
        self.mode.load(Relaxed) == mode::DRAIN && self.frame_cursor.load(Relaxed) == u64::MAX
    }

    /// Is there something that must be on TCP before a FIN is? Across nodes that is every frame with
    /// what follows it: the receiver cannot count on the ring once our node does not serve it.
    pub fn holds_fin(&self, m: &Memory) -> bool {
        match self.mode.load(Relaxed) {
            mode::DRAIN => m.far() || self.must_flush(),
            mode::ASK => true,
            mode::RING => m.far(),
            _ => false,
        }
    }

    /// On one node: TCP is about to be shut for sending, by `shutdown` or `close`, after which nobody can answer a
    /// revocation. So what is unread goes to TCP, as far as TCP takes it, for whoever has the connection next. Call
    /// [`TxState::look`] before, until [`TxState::must_flush`] is false; what this says is for [`TxState::shut`].
    pub fn repeat_unread(&self, m: &Memory, port: &impl Port) -> Option<u64> {
        if !self.is_up() || self.unread(m).is_ok_and(|n| n == 0) {
            return None;
        }
        let _ = self.down(m, port);
        let whole =
            m.own_tx().state.load(Relaxed) == TxWord::new(self.epoch.load(Relaxed), tx::DOWN);
        whole.then(|| self.kpos.load(Relaxed))
    }

    /// On one node: TCP is shut for sending, or will be next. What is not there is on the ring alone, and the
    /// receiver hears so at once. `repeated`: TCP position up to which [`TxState::repeat_unread`] has brought everything.
    pub fn shut(&self, m: &Memory, port: &impl Port, repeated: Option<u64>) {
        let epoch = self.epoch.load(Relaxed);
        if self.is_up() {
            self.downs.fetch_add(1, Relaxed);
        }
        if matches!(self.mode.load(Relaxed), mode::RING | mode::DRAIN) {
            self.settle(m, port, epoch, tx::BROKEN);
        } else if self.inside() == 0 && repeated == Some(self.kpos.load(Relaxed)) {
            self.say(m, port, epoch, tx::ENDED); // (no other thread has sent something meanwhile)
        }
    }

    /// Across nodes, before TCP is shut for sending: says on TCP where the stream ends, so that the
    /// receiver does not take the FIN for the end while bytes are on their way. `Blocked`: not
    /// everything has landed yet, or TCP's buffer is full; ask again, or give up and go
    /// [`TxState::down`]. Nothing may be sent after it.
    pub fn finish(&self, m: &Memory, port: &impl Port) -> Result<Progress, Reason> {
        if self.is_taken_over(m) {
            return Ok(Progress::Blocked);
        }
        match self.mode.load(Relaxed) {
            mode::RING if m.far() => {}
            mode::ASK => match self.look(m, port)? {
                Progress::Done => return self.finish(m, port),
                Progress::Blocked => return Ok(Progress::Blocked),
            },
            _ => return self.look(m, port),
        }
        let head = self.head.load(Relaxed);
        // Acquire: pairs with the daemon's Release, after the far daemon has confirmed the bytes.
        let landed = m.peer_rx().landed.load(Acquire) == head;
        let word = m.peer_rx().word.load(Acquire);
        if !landed || !word.has(rx::PAST) {
            return match self.calm(word) {
                true => Ok(Progress::Blocked),
                false => self.answer(m, port, word),
            };
        }
        self.frame_done.store(0, Relaxed);
        self.frame_kind.store(1, Relaxed);
        self.frame_rest.store(0, Relaxed);
        self.frame_cursor.store(head, Relaxed);
        self.drain_at.store(head, Relaxed);
        self.record(m, head, takeover::FIN);
        self.mode.store(mode::DRAIN, Relaxed);
        self.downs.fetch_add(1, Relaxed);
        self.drain(m, port)
    }

    /// The peer's process is gone: what is sent from now on goes to TCP, whose errors tell.
    pub fn abandon(&self) {
        if self.mode.load(Relaxed) != mode::TCP {
            self.mode.store(mode::TCP, SeqCst);
            self.downs.fetch_add(1, Relaxed);
        }
    }

    /// Goes on with the way down as far as TCP's buffer takes it.
    pub fn drain(&self, m: &Memory, port: &impl Port) -> Result<Progress, Reason> {
        if self.mode.load(Relaxed) != mode::DRAIN {
            return Ok(Progress::Done);
        }
        let epoch = self.epoch.load(Relaxed);
        let framed = self.frame_cursor.load(Relaxed) != u64::MAX;
        while (self.frame_done.load(Relaxed) as usize) < LEN {
            let done = self.frame_done.load(Relaxed) as usize;
            let frame = Frame {
                kind: match self.frame_kind.load(Relaxed) {
                    0 => Kind::Down,
                    _ => Kind::Fin,
                },
                epoch,
                rest: self.frame_rest.load(Relaxed),
                cursor: self.frame_cursor.load(Relaxed),
                tag: self.tag.load(Relaxed),
            }
            .encode();
            match self.repeat(port, frame[done..].as_ptr(), LEN - done) {
                Ok(Some(n)) => self.frame_done.store((done + n) as u32, Relaxed),
                Ok(None) => return Ok(Progress::Blocked),
                // Shut or dead. Everything is still on the ring.
                Err(_) => return Ok(self.settle(m, port, epoch, tx::BROKEN)),
            }
        }
        let head = self.head.load(Relaxed);
        while self.drain_at.load(Relaxed) < head {
            let at = self.drain_at.load(Relaxed);
            let Some((ring, end)) = self.ring_at(m, at, head) else {
                return Err(Reason::Internal);
            };
            let (p, n) = ring.run(at, end - at);
            match self.repeat(port, p, n) {
                Ok(Some(n)) => self.drain_at.store(at + n as u64, Relaxed),
                Ok(None) => return Ok(Progress::Blocked),
                Err(_) => return Ok(self.settle(m, port, epoch, tx::BROKEN)), // as above
            }
        }
        // Their sends are long over: what the ring has shown to the other end must not wait for an acknowledgement.
        port.tcp_push();
        Ok(self.settle(m, port, epoch, if framed { tx::DOWN } else { tx::RESUMED }))
    }

    /// After a way down: how it ended, as the far end is to be told. For a daemon that took the
    /// direction down in its end's stead.
    pub fn phase(&self) -> TxPhase {
        match self.frame_cursor.load(Relaxed) {
            u64::MAX => tx::RESUMED,
            _ => tx::DOWN,
        }
    }

    pub(super) fn settle(
        &self,
        m: &Memory,
        port: &impl Port,
        epoch: Epoch,
        phase: TxPhase,
    ) -> Progress {
        // The word first: whoever finds the mode TCP after our death need not say it for us.
        self.say(m, port, epoch, phase);
        self.mode.store(mode::TCP, Release);
        Progress::Done
    }

    /// Ring that holds byte `at`, and the cursor up to which it does. (More than a ring can hold is
    /// what a daemon may read in the words of an end that it has taken over.)
    fn ring_at(&self, m: &Memory, at: u64, head: u64) -> Option<(Ring, u64)> {
        let from = self.loc_from.load(Relaxed);
        let (loc, end) = match at >= from {
            true => (&self.loc, head),
            false => (&self.retired, from),
        };
        let ring = m.own.ring(Loc::unpack(loc.load(Relaxed))?)?;
        (end - at <= ring.size()).then_some((ring, end))
    }
}
