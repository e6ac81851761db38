//! The sender's ways off the ring: by its own decision, at the receiver's request, or at the end of the stream. No
//! byte that an application was told is sent may be lost, and none may be repeated without a frame that says so.

use super::{mode, TxState, NO_FRAME, UNASKED};
use crate::abi::{marks, rx, takeover, tx, Cursor, Epoch, RxWord, TcpPos, TxPhase, TxWord};
use crate::half::mem::{Memory, Ring};
use crate::half::{Port, Progress, RxState};
use crate::num;
use crate::prim::fence;
use crate::proto::frame::{Frame, Kind, LEN};
use crate::proto::reason::Reason;
use core::sync::atomic::Ordering::*;
use core::task::Poll;

/// What the announcement of a stream's end waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// It can be made.
    Nothing,
    /// All bytes are there, and the receiver reads the ring, but has not read all of them.
    Reader,
    /// Bytes on their way, or the receiver on its way to the ring.
    Bytes,
}

/// What an end on one node has to wait for before its FIN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BeforeFin {
    /// Nothing; as [`TxState::before_fin`] says.
    OnTcp(Option<TcpPos>),
    /// Nothing: a daemon has taken the direction over and does not leave it undone, and the FIN comes after that.
    ByDaemon,
    /// A daemon, which has claimed the direction and may withdraw that.
    Claimed,
    /// Room on TCP.
    Room,
}

impl TxState {
    pub(super) fn answer(
        &self,
        m: &Memory,
        port: &impl Port,
        word: RxWord,
    ) -> Result<Progress, Reason> {
        if word.epoch() != self.epoch.load(Relaxed) {
            return Ok(Progress::Done); // not about this epoch: ignored
        }
        if word.has(rx::REVOKED) && self.framed(m) {
            self.down(m, port)
        } else if word.has(rx::REVOKED) {
            // The word was stored after the cursor to which it refers. (If it is withdrawn meanwhile, there is nothing to
            // answer.)
            let resumed = self.resume(m, port, m.peer_rx().revoked.load(Relaxed))?;
            Ok(resumed.unwrap_or(Progress::Done))
        } else if word.has(rx::CLOSED) {
            // Nobody reads any more: the kernel gives the application TCP's own errors. A daemon must learn that there is
            // nothing to take over; or, if we are the daemon and have taken the direction over, the end must learn that
            // this is finished.
            self.downs.fetch_add(1, Relaxed);
            let epoch = self.epoch.load(Relaxed);
            Ok(self.settle(m, port, epoch, tx::BROKEN))
        } else if word.has(rx::WANT_DOWN) {
            self.down(m, port)
        } else {
            Ok(Progress::Done)
        }
    }

    /// A send that began at `begin` has met a receiver that read a part of it and then closed. (False: it has read
    /// nothing of it.) As far as anybody can tell, the whole send came before the close, and counts as sent. It stays
    /// on the ring, where the closing end finds it unread and resets the connection. The bytes go to TCP as well: an
    /// end that looked at the ring before the last of them was there closes without a reset, and then its kernel has
    /// to answer with one.
    #[cold]
    pub(super) fn met_close(&self, m: &Memory, port: &impl Port, begin: Cursor) -> bool {
        let head = self.head.load(Relaxed);
        // The closed word was stored after the last cursor, so the cursor is final.
        let read = self.refresh(m).unwrap_or(begin).min(head);
        if m.is_remote() || read <= begin {
            return false;
        }
        let mut at = read;
        while let Some((ring, end)) = self.ring_at(m, at, head).filter(|_| at < head) {
            let (p, n) = ring.run(at, end - at);
            match self.repeat(m, port, p, n) {
                Ok(Some(n)) => at += n as u64,
                _ => break, // what TCP has is unread at the other end, too
            }
        }
        true
    }

    /// Puts bytes on TCP that no send counts: a frame, or bytes that the ring has as well; if an end leaves, also more
    /// than TCP is meant to hold, because the other end may take nothing. None: TCP takes nothing now. An error means
    /// the end of the connection; it is kept for the application, because the kernel reports it only once.
    fn repeat(
        &self,
        m: &Memory,
        port: &impl Port,
        p: *const u8,
        n: usize,
    ) -> Result<Option<usize>, i32> {
        let sent = match port.tcp_send(p, n) {
            Err(libc::EAGAIN) if port.leaves() || self.is_revoked(m) => port.tcp_send_more(p, n),
            sent => sent,
        };
        match sent {
            Ok(n) => {
                self.tcp_pos.add(n as u64, Relaxed);
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

    /// Has the receiver revoked this epoch, and so wait for what is on TCP, or will be?
    fn is_revoked(&self, m: &Memory) -> bool {
        self.says(m.peer_rx().word.load(Relaxed), rx::REVOKED)
    }

    /// Does a revocation require a frame? Across nodes it does if bytes of this epoch were taken from the ring (see
    /// `RxState::recall`).
    fn framed(&self, m: &Memory) -> bool {
        let at = m.peer_rx().revoked.load(Relaxed);
        m.is_remote() && at != Cursor::UNSEEN && at != m.own_tx().up_start.load(Relaxed)
    }

    /// After a revocation at `cursor`: the rest of the ring goes to TCP as plain bytes. `None`: it is withdrawn.
    fn resume(
        &self,
        m: &Memory,
        port: &impl Port,
        cursor: Cursor,
    ) -> Result<Option<Progress>, Reason> {
        let known = self.refresh(m)?;
        let head = self.head.load(Relaxed);
        // A receiver that revoked before it saw this epoch's switch has taken nothing from the ring.
        let cursor = if cursor == Cursor::UNSEEN {
            m.own_tx().up_start.load(Relaxed)
        } else {
            cursor
        };
        if cursor < known.min(head) || cursor > head || head - cursor > self.backlog_max() {
            // (Who has withdrawn it reads on, and may revoke anew.)
            return match self.is_withdrawn(m, cursor) {
                true => Ok(None),
                false => Err(Reason::Hostile),
            };
        }
        self.record(m, cursor, takeover::PLAIN);
        // SYNC withdraw: we have recorded, now we look; the receiver withdraws, then looks at our record. (A daemon has
        // claimed the direction before: see `TxState::adopt`.)
        fence(SeqCst);
        if self.is_withdrawn(m, cursor) {
            self.record(m, cursor, takeover::NONE);
            return Ok(None);
        }
        self.go_plain(m, port, cursor, 0).map(Some)
    }

    /// All of the ring from there on goes to TCP without a frame, as is recorded. `kind`: as of [`TxState::frame_kind`].
    fn go_plain(
        &self,
        m: &Memory,
        port: &impl Port,
        from: Cursor,
        kind: u32,
    ) -> Result<Progress, Reason> {
        self.frame_kind.store(kind, Relaxed);
        self.frame_done.store(num::small(LEN), Relaxed);
        self.drain_at.store(from, Relaxed);
        self.frame_cursor.store(NO_FRAME, Relaxed);
        self.mode.store(mode::DRAIN, Relaxed);
        self.downs.fetch_add(1, Relaxed);
        self.drain(m, port)
    }

    /// On one node: has the receiver, whose word this is, taken nothing off the ring, which begins at `start`? It says so
    /// before it does. (Older ones do not; and one that has let the sender overwrite a part of it has said that, too.)
    fn is_untouched(&self, m: &Memory, word: RxWord, start: Cursor) -> Result<bool, Reason> {
        let says = m.peer_rx().marks.load(Relaxed) & marks::PASSES != 0;
        let silent = !m.is_remote() && says && !self.says(word, rx::PAST);
        Ok(silent && self.refresh(m)? == start)
    }

    /// On one node: is the revocation at `cursor` not there any more?
    fn is_withdrawn(&self, m: &Memory, cursor: Cursor) -> bool {
        if m.is_remote() || m.takes_over() {
            return false;
        }
        // Acquire: the cursor that belongs to the word. (UNSEEN means the start of the epoch.)
        let stays = self.says(m.peer_rx().word.load(Acquire), rx::REVOKED);
        let at = m.peer_rx().revoked.load(Relaxed);
        !stays || at != cursor && at != Cursor::UNSEEN
    }

    /// Maximum number of bytes that can be unread: the present ring and the former one.
    pub(super) fn backlog_max(&self) -> u64 {
        let retired = self.retired.load(Relaxed).loc();
        self.ring_size() + retired.map_or(0, |l| l.bytes() as u64)
    }

    /// Switches down by the sender's own decision: a frame names the last cursor that the reader is known to have
    /// consumed, and the bytes from there on follow on TCP. They stay on the ring, too: a faster reader takes them
    /// there and skips as many on TCP, so it never waits for our flush.
    pub fn down(&self, m: &Memory, port: &impl Port) -> Result<Progress, Reason> {
        self.go_down(m, port, false)
    }

    /// The same. `alone`: the daemon that would tell the receiver of a way down without a frame is gone.
    pub(super) fn go_down(
        &self,
        m: &Memory,
        port: &impl Port,
        alone: bool,
    ) -> Result<Progress, Reason> {
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
        // SYNC revoke: we announce, then look; the receiver revokes, then looks at our word. One of the two sees the
        // other; if we see a revocation, we write no frame.
        let word = m.peer_rx().word.load(SeqCst);
        // SYNC deaf: the same for a receiver that closes or shuts the last direction: it waits for our frame, or we
        // see that it does not: see `RxState::awaits_frame`.
        let shut = marks::ENDED | marks::DEAF;
        let deaf = || m.peer_rx().marks.load(SeqCst) & shut == shut;
        if !m.is_remote() && (self.is_closed(word) || deaf()) {
            // What arrives at a socket that is closed, or shut both ways, is answered with a reset, and so would be a
            // frame. What is unread stays on the ring.
            self.downs.fetch_add(1, Relaxed);
            return Ok(self.settle(m, port, epoch, tx::BROKEN));
        }
        // SYNC past: the same for a receiver that has read its prefix: it waits for what we record, or we see that it may have
        // taken bytes of the ring.
        let start = m.own_tx().up_start.load(Relaxed);
        if self.is_untouched(m, word, start)? {
            self.record(m, start, takeover::PLAIN);
            let step = self.go_plain(m, port, start, UNASKED)?;
            return Ok(self.tell_blocked(m, port, step));
        }
        if self.says(word, rx::REVOKED) && !self.framed(m) && !alone {
            if let Some(step) = self.resume(m, port, m.peer_rx().revoked.load(Relaxed))? {
                return Ok(step);
            }
        }
        // SYNC taken: the same for a receiver that takes the last bytes and then exits: it waits for our frame, or we see that it
        // has everything.
        let cursor = self.refresh(m)?;
        let rest = self.head.load(Relaxed) - cursor;
        if rest == 0 && !m.is_remote() {
            // The words on the ring suffice: see `RxState::resumed`. A frame would stay in the kernel of a reader
            // that has all bytes, and turn its close into a reset.
            self.downs.fetch_add(1, Relaxed);
            return Ok(self.settle(m, port, epoch, tx::RESUMED));
        }
        self.frame_done.store(0, Relaxed);
        self.frame_kind.store(0, Relaxed);
        self.frame_rest.store(num::small(num::size(rest)), Relaxed); // at most two rings
        self.frame_cursor.store(cursor, Relaxed);
        self.drain_at.store(cursor, Relaxed);
        self.record(m, cursor, takeover::DOWN);
        self.mode.store(mode::DRAIN, Relaxed);
        self.downs.fetch_add(1, Relaxed);
        let step = self.drain(m, port)?;
        Ok(self.tell_blocked(m, port, step))
    }

    /// A way down has begun. If TCP takes nothing now, a receiver that waits for what is recorded (`RxState::past`) must hear
    /// of it.
    fn tell_blocked(&self, m: &Memory, port: &impl Port, step: Progress) -> Progress {
        if step == Progress::Blocked && !m.is_remote() && !m.takes_over() {
            m.publish(port);
        }
        step
    }

    /// Is there a way down without a frame that nobody has asked for?
    pub(super) fn is_unasked(&self) -> bool {
        self.frame_cursor.load(Relaxed) == NO_FRAME && self.frame_kind.load(Relaxed) == UNASKED
    }

    /// For an end that must be on TCP before it goes on: call it until it says `Done`, which it says on TCP only. (A look
    /// is not enough: a switch whose answer was awaited is on the ring after it.) Then a FIN that was left to a daemon is
    /// made as well: it has to come before the first call of whoever has the connection next, and the daemon's may not.
    pub fn come_down(&self, m: &Memory, port: &impl Port) -> Result<Progress, Reason> {
        let step = match self.look(m, port)? {
            Progress::Done => self.down(m, port)?,
            Progress::Blocked => Progress::Blocked,
        };
        self.end_late(port);
        Ok(step)
    }

    /// Makes the FIN that is owed ([`TxState::owes_fin`]).
    pub fn end_late(&self, port: &impl Port) {
        if self.owes_fin() {
            port.tcp_end();
        }
    }

    /// Are there bytes of a revoked ring that only this process can still put on TCP? They must be there before a
    /// FIN. (A reader that has not revoked finds them on the ring as well, unless it has left because a daemon had
    /// taken over what we now finish.)
    pub fn must_flush(&self, m: &Memory) -> bool {
        let alone = || self.reclaimed.load(Relaxed) == self.epoch.load(Relaxed);
        let plain = || self.frame_cursor.load(Relaxed) == NO_FRAME;
        let asked = || !self.is_unasked() || self.is_revoked(m);
        self.mode.load(Relaxed) == mode::DRAIN && (alone() || plain() && asked())
    }

    /// Is there something that must be on TCP before a FIN? Across nodes that is every frame with what follows it:
    /// the receiver cannot count on the ring once our node no longer serves it.
    pub fn holds_fin(&self, m: &Memory) -> bool {
        match self.mode.load(Relaxed) {
            mode::DRAIN => m.is_remote() || self.must_flush(m),
            mode::ASK => true,
            mode::RING => m.is_remote(),
            _ => false,
        }
    }

    /// On one node, before TCP is shut down for sending by `shutdown` or `close`: afterwards nobody can answer a
    /// revocation, and a receiver that finds some bytes of a revoked ring on TCP expects all of them there. Unread bytes
    /// that were not revoked go there, too. `Pending`: revoked ones are not there yet, or a daemon is bringing them
    /// there; call again when TCP takes more, or reset the connection. The result is for [`TxState::shut`].
    pub fn before_fin(&self, m: &Memory, port: &impl Port) -> Poll<Option<TcpPos>> {
        let _ = self.look(m, port);
        let repeated = self.repeat_unread(m, port);
        // (Asked last, because a revocation may have come since the look.)
        match self.must_flush(m) || self.held(m) {
            true => Poll::Pending,
            false => Poll::Ready(repeated),
        }
    }

    /// One attempt of an end on one node to come to its FIN, also beside a daemon that has the direction. `orphaned`: has
    /// the daemon ended? (Asked only if it is waited for.) After an error the connection has to be reset.
    pub fn come_to_fin(
        &self,
        m: &Memory,
        port: &impl Port,
        orphaned: impl FnOnce() -> bool,
    ) -> Result<BeforeFin, Reason> {
        if self.awaits(m) {
            if orphaned() {
                self.reclaim(m, port)?;
            }
            if self.is_recorded(m) {
                return Ok(BeforeFin::ByDaemon);
            }
        }
        Ok(match self.before_fin(m, port) {
            Poll::Ready(repeated) => BeforeFin::OnTcp(repeated),
            Poll::Pending if self.awaits(m) => BeforeFin::Claimed,
            Poll::Pending => BeforeFin::Room,
        })
    }

    /// The application shuts down, and what comes before the FIN is left to a daemon ([`BeforeFin::ByDaemon`]): the FIN
    /// comes from the daemon, or from the end when it has the direction again ([`TxState::owes_fin`]). The other end must
    /// not take it for a death.
    pub fn leave_fin(&self, rx: &RxState, m: &Memory, port: &impl Port) {
        rx.announce_end(m, port, self.sent_at_fin(true));
        self.shut.store(1, SeqCst);
        let _ = self.look(m, port);
    }

    /// All that is on TCP before the FIN, for [`RxState::announce_end`] and [`RxState::close`]. What a daemon still brings
    /// there, or a native call that still runs (`more`), is not known.
    pub fn sent_at_fin(&self, more: bool) -> TcpPos {
        match more {
            true => TcpPos::UNKNOWN,
            false => self.tcp_pos.load(Relaxed),
        }
    }

    /// Has the application shut this direction down while it could not be, and is it on TCP now? Then the kernel is to
    /// be told.
    pub fn owes_fin(&self) -> bool {
        self.shut.load(Relaxed) != 0 && self.mode.load(Relaxed) == mode::TCP
    }

    /// Unread bytes of a ring that is not revoked go to TCP, as far as TCP takes them, for whoever has the connection
    /// after the reader. All of them: the TCP position behind them. If a revocation is met meanwhile, they are plain
    /// bytes, which [`TxState::before_fin`] finishes.
    fn repeat_unread(&self, m: &Memory, port: &impl Port) -> Option<TcpPos> {
        if !self.is_up() || self.unread(m).is_ok_and(|n| n == 0) {
            return None;
        }
        let _ = self.down(m, port);
        let whole =
            m.own_tx().state.load(Relaxed) == TxWord::new(self.epoch.load(Relaxed), tx::DOWN);
        whole.then(|| self.tcp_pos.load(Relaxed))
    }

    /// On one node: TCP is shut down for sending, or will be next. What is not on TCP is only on the ring, and the
    /// receiver is told so at once, unless a daemon has the direction. `repeated`: the TCP position up to which [`TxState::before_fin`] has put
    /// everything on TCP.
    pub fn shut(&self, m: &Memory, port: &impl Port, repeated: Option<TcpPos>) {
        let epoch = self.epoch.load(Relaxed);
        if self.is_taken_over(m) && self.is_recorded(m) {
            return;
        }
        if self.is_up() {
            self.downs.fetch_add(1, Relaxed);
        }
        if matches!(self.mode.load(Relaxed), mode::RING | mode::DRAIN) {
            self.settle(m, port, epoch, tx::BROKEN);
        } else if self.inside() == 0 && repeated == Some(self.tcp_pos.load(Relaxed)) {
            self.say(m, port, epoch, tx::ENDED); // (and no other thread has sent anything meanwhile)
        }
    }

    /// Across nodes, before TCP is shut down for sending: puts on TCP a frame that says where the stream ends, so
    /// that the receiver does not take the FIN for the end while bytes are on their way. `Blocked`: not all bytes
    /// have landed and been read yet, or TCP's buffer is full; call again, or give up and go [`TxState::down`]. Nothing
    /// may be sent afterwards.
    pub fn finish(&self, m: &Memory, port: &impl Port) -> Result<Progress, Reason> {
        if self.is_taken_over(m) {
            return Ok(Progress::Blocked);
        }
        match self.mode.load(Relaxed) {
            mode::RING if m.is_remote() => {}
            mode::ASK => match self.look(m, port)? {
                Progress::Done => return self.finish(m, port),
                Progress::Blocked => return Ok(Progress::Blocked),
            },
            _ => return self.look(m, port),
        }
        if self.awaited(m)? != Awaited::Nothing {
            let word = m.peer_rx().word.load(Acquire);
            return match self.is_quiet(word) {
                true => Ok(Progress::Blocked),
                false => self.answer(m, port, word),
            };
        }
        let head = self.head.load(Relaxed);
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

    /// Across nodes, on the ring: what the frame about the end of the stream has to wait for.
    pub fn awaited(&self, m: &Memory) -> Result<Awaited, Reason> {
        // (What is unread is for TCP, in case that the receiver leaves: nobody could put it there later. With bytes from
        // before the switch unread on TCP, the frame would lie behind them, in the way of the socket's next owner.)
        let unread = self.unread(m)? > 0;
        let past = m.peer_rx().word.load(Acquire).has(rx::PAST);
        Ok(match (self.has_landed(m) && past, unread) {
            (true, false) => Awaited::Nothing,
            (true, true) => Awaited::Reader,
            (false, _) => Awaited::Bytes,
        })
    }

    /// Across nodes: can the receiver see all bytes of the ring?
    pub fn has_landed(&self, m: &Memory) -> bool {
        // Acquire: pairs with the daemon's Release, which follows the remote daemon's confirmation of the bytes.
        m.peer_rx().landed.load(Acquire).cursor() == self.head.load(Relaxed)
    }

    /// The peer's process is gone: what is sent from now on goes to TCP, which returns the errors. (What a daemon has
    /// taken over comes before that.)
    pub fn abandon(&self, m: &Memory) {
        if !self.is_taken_over(m) {
            self.reset_to_tcp();
        }
    }

    /// The same for a connection that is reset: nothing has to come before that.
    pub fn reset_to_tcp(&self) {
        if self.mode.load(Relaxed) != mode::TCP {
            self.mode.store(mode::TCP, SeqCst);
            self.downs.fetch_add(1, Relaxed);
        }
    }

    /// In mode DRAIN: continues the way down as far as TCP's buffer takes it.
    pub(super) fn drain(&self, m: &Memory, port: &impl Port) -> Result<Progress, Reason> {
        let epoch = self.epoch.load(Relaxed);
        let framed = self.frame_cursor.load(Relaxed) != NO_FRAME;
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
            match self.repeat(m, port, frame[done..].as_ptr(), LEN - done) {
                Ok(Some(n)) => self.frame_done.store(num::small(done + n), Relaxed),
                Ok(None) => return Ok(Progress::Blocked),
                // Shut down or dead. Everything is still on the ring.
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
            match self.repeat(m, port, p, n) {
                Ok(Some(n)) => self.drain_at.store(at + n as u64, Relaxed),
                Ok(None) => return Ok(Progress::Blocked),
                Err(_) => return Ok(self.settle(m, port, epoch, tx::BROKEN)), // as above
            }
        }
        // These sends were reported as done long ago: bytes that the peer saw on the ring must not wait for an
        // acknowledgement.
        port.tcp_push();
        Ok(self.settle(m, port, epoch, if framed { tx::DOWN } else { tx::RESUMED }))
    }

    /// After a way down: how it ended, as the remote end has to be told. For a daemon that took the direction down for
    /// its end.
    pub fn phase(&self) -> TxPhase {
        match self.frame_cursor.load(Relaxed) {
            NO_FRAME => tx::RESUMED,
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
        // The word is stored first: if we die in between, whoever finds mode TCP need not store the word for us.
        self.say(m, port, epoch, phase);
        self.mode.store(mode::TCP, Release);
        Progress::Done
    }

    /// The ring that holds byte `at`, and the cursor up to which it does. (A daemon that reads the words of an end
    /// that it has taken over may find more bytes than a ring can hold: `None`.)
    fn ring_at(&self, m: &Memory, at: Cursor, head: Cursor) -> Option<(Ring, Cursor)> {
        let from = self.loc_from.load(Relaxed);
        let (loc, end) = match at >= from {
            true => (&self.loc, head),
            false => (&self.retired, from),
        };
        let ring = m.own.ring(loc.load(Relaxed).loc()?)?;
        (end - at <= ring.size()).then_some((ring, end))
    }
}
