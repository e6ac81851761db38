//! Across nodes: a sending direction in the hands of the daemon beside it.
//!
//! An end that sleeps outside every hook, has shut down or is gone cannot put its ring back on TCP,
//! or say there where the stream ends, so its daemon does. Takeover is a word of the daemon's in its
//! mirror. The end looks at it under the lock of the direction, before it touches anything; the
//! daemon stores it and then looks at the lock: one of the two sees the other.
//!
//! What must never happen: that both put bytes on TCP, or that what one has begun is not finished by
//! the other. So whoever puts anything there first leaves word of what it is, and from which cursor
//! on, where the other finds it; how much of it is there is what the kernel has counted since.

use super::{mode, TxState};
use crate::frame::{Kind, LEN};
use crate::lane::mem::Memory;
use crate::lane::{Port, Progress};
use crate::layout::{rx, takeover, tx, Epoch, Loc, TakeoverPhase, TakeoverWord, TxPhase, TxWord};
use crate::prim::fence;
use crate::reason::Reason;
use core::sync::atomic::Ordering::*;

/// What came of a daemon's wish to take a direction over.
pub enum Taken {
    /// Its end is at it, or the far node has not answered its switch yet.
    Later,
    /// It is on TCP: there is nothing to take.
    Tcp,
    /// The direction, to be worked on with a [`Memory::for_takeover`].
    Yes(TxState),
}

/// What a daemon finds of a direction that it takes over.
pub enum Adopted {
    /// On TCP: nothing is left to do.
    Tcp,
    /// The far node has not answered a switch yet.
    Asking,
    /// On the ring, or on the way down.
    Ring,
}

/// Was the epoch of this state taken over before, and has its end only not looked since?
pub fn is_done(m: &Memory, state: TxWord) -> bool {
    m.peer_rx().takeover.load(Relaxed) == TakeoverWord::new(state.epoch(), takeover::DONE)
}

/// As the daemon: claims a direction that is in this state, unless its end is at it. `locked`: does
/// anybody hold the lock of the direction? (Not asked of an end that is gone.) Who has claimed it
/// makes of it what it must be ([`TxState::adopt`]), or gives it back ([`release`]).
pub fn claim(m: &Memory, state: TxWord, locked: impl FnOnce() -> bool) -> bool {
    let word = TakeoverWord::new(state.epoch(), takeover::TAKEN);
    m.peer_rx().takeover.store(word, Release); // pairs with the Acquire in `takeover_phase`
                                               // SYNC takeover: our word is stored, now we look at the lock; the end takes the lock, then looks
                                               // at our word.
    fence(SeqCst);
    let busy = locked();
    // If the end has just let go of it, what it did before is seen below. (It may be in its next
    // epoch by now, of which our word says nothing.)
    fence(Acquire);
    let ours = !busy && m.own_tx().state.load(Acquire) == state;
    if !ours {
        release(m, state.epoch());
    }
    ours
}

/// As the daemon: the direction, claimed in this epoch and not touched, is its end's again.
pub fn release(m: &Memory, epoch: Epoch) {
    let word = TakeoverWord::new(epoch, takeover::NONE);
    m.peer_rx().takeover.store(word, Release); // as in `claim`
}

fn under_way(phase: TakeoverPhase) -> bool {
    (takeover::TAKEN..takeover::DONE).contains(&phase)
}

impl TxState {
    /// The end's side, under the lock: is the direction taken over? Takes it back when it is through.
    #[inline(always)]
    pub(super) fn is_taken_over(&self, m: &Memory) -> bool {
        m.far() && !m.takes_over() && self.look_at_takeover(m)
    }

    #[cold]
    fn look_at_takeover(&self, m: &Memory) -> bool {
        // SYNC takeover: we have the lock, now we look; the daemon stores its word, then looks at
        // the lock.
        fence(SeqCst);
        // Looked at once: it may end meanwhile, and would be neither under way nor over.
        let phase = self.takeover_phase(m);
        if phase == takeover::DONE {
            let epoch = self.takeover_epoch(m);
            self.epoch.store(epoch, Relaxed);
            let kpos = m.peer_rx().takeover_kpos.load(Relaxed);
            self.kpos.store(kpos, Relaxed);
            self.error
                .put(m.peer_rx().takeover_error.load(Relaxed) as i32);
            self.downs.fetch_add(1, Relaxed);
            // The daemon knows; it is told all the same, so that this epoch is over for good.
            m.own_tx()
                .state
                .store(TxWord::new(epoch, tx::DOWN), Release);
            self.mode.store(mode::TCP, Release);
        }
        under_way(phase)
    }

    /// Epoch that a takeover of this direction would speak of.
    fn takeover_epoch(&self, m: &Memory) -> Epoch {
        match self.mode.load(Relaxed) {
            mode::ASK => m.own_tx().state.load(Relaxed).epoch(),
            _ => self.epoch.load(Relaxed),
        }
    }

    /// Phase of a takeover of the present epoch.
    fn takeover_phase(&self, m: &Memory) -> TakeoverPhase {
        let mode = self.mode.load(Relaxed);
        let epoch = self.takeover_epoch(m);
        // Acquire: pairs with the daemon's Release; cursor and position before it are valid.
        let word = m.peer_rx().takeover.load(Acquire);
        let ours = word.epoch() == epoch && self.reclaimed.load(Relaxed) != epoch;
        match mode {
            mode::RING | mode::DRAIN | mode::ASK if ours => word.phase(),
            _ => takeover::NONE,
        }
    }

    pub(super) fn held(&self, m: &Memory) -> bool {
        under_way(self.takeover_phase(m))
    }

    /// Has a takeover of this epoch ended, and nobody here has taken it back yet?
    pub(super) fn is_through(&self, m: &Memory) -> bool {
        m.far() && self.takeover_phase(m) == takeover::DONE
    }

    /// Whoever puts anything on TCP leaves word of it first, in its own area: end or daemon. (On one node it is for
    /// who goes on when the process is gone: see [`TxState::holder_died`].)
    pub(super) fn record(&self, m: &Memory, cursor: u64, what: TakeoverPhase) {
        let w = match m.takes_over() {
            true => m.peer_rx(),
            false => m.own_rx(),
        };
        w.takeover_at.store(cursor, Relaxed);
        let word = TakeoverWord::new(self.epoch.load(Relaxed), what);
        w.takeover.store(word, Release); // pairs with the Acquire in `takeover_phase` and `adopt`
    }

    /// As the daemon, at the end: the direction is on TCP and the end's again.
    pub(super) fn say_done(&self, m: &Memory, epoch: Epoch, phase: TxPhase) {
        if phase > tx::DOWNING {
            let w = m.peer_rx();
            w.takeover_kpos.store(self.kpos.load(Relaxed), Relaxed);
            w.takeover_error.store(self.error.get() as u32, Relaxed);
            w.takeover
                .store(TakeoverWord::new(epoch, takeover::DONE), Release); // as in `record`
        }
    }

    /// As the daemon: [`claim`] and [`TxState::adopt`] at once, for who need not wait for the socket in
    /// between. After an error the connection is to be reset; the end stays shut out.
    pub fn take(
        m: &Memory,
        port: &impl Port,
        tag: u64,
        locked: impl FnOnce() -> bool,
    ) -> Result<Taken, Reason> {
        // Acquire: pairs with the Release in `say`.
        let state = m.own_tx().state.load(Acquire);
        if is_done(m, state) {
            return Ok(Taken::Tcp);
        }
        if !claim(m, state, locked) {
            return Ok(Taken::Later);
        }
        let tx = TxState::default();
        match tx.adopt(m, port, tag)? {
            Adopted::Ring => Ok(Taken::Yes(tx)),
            Adopted::Asking => {
                release(m, state.epoch());
                Ok(Taken::Later)
            }
            Adopted::Tcp => {
                release(m, state.epoch());
                Ok(Taken::Tcp)
            }
        }
    }

    /// As the daemon: makes of this fresh state what the end's must be, by what it has published
    /// and by what the kernel has counted. Nothing of it is believed further than the ring it lies in.
    pub fn adopt(&self, m: &Memory, port: &impl Port, tag: u64) -> Result<Adopted, Reason> {
        let w = m.own_tx();
        // Acquire: pairs with the Release in `say`.
        let state = w.state.load(Acquire);
        let (epoch, phase) = (state.epoch(), state.phase());
        if !matches!(phase, tx::UP | tx::DOWNING) {
            return Ok(Adopted::Tcp);
        }
        let word = m.peer_rx().word.load(Acquire);
        let ours = word.epoch() == epoch;
        if phase == tx::UP && !(ours && word.has(rx::ACCEPTED)) {
            let asks = ours && !word.has(rx::REVOKED);
            return Ok(if asks { Adopted::Asking } else { Adopted::Tcp });
        }
        let start = w.up_start.load(Acquire);
        let kpos = w.up_kpos.load(Relaxed);
        let seq = w.loc_seq.load(Acquire) as usize;
        self.epoch.store(epoch, Relaxed);
        self.tag.store(tag, Relaxed);
        self.kpos.store(kpos, Relaxed);
        let head = m.own_head().load(Acquire);
        if head < start {
            return Err(Reason::Hostile);
        }
        self.head.store(head, Relaxed);
        self.loc.store(w.loc[seq & 1].load(Relaxed), Relaxed);
        let from = w.loc_from[seq & 1].load(Relaxed);
        self.loc_from.store(from, Relaxed);
        let before = w.loc[seq & 1 ^ 1].load(Relaxed);
        self.retired.store(before, Relaxed);
        self.peer_cursor.store(start, Relaxed);
        self.frame_done.store(LEN as u32, Relaxed);
        self.mode.store(mode::RING, Relaxed);
        if Loc::unpack(self.loc.load(Relaxed)).is_none() || self.unread(m)? > self.backlog_max() {
            return Err(Reason::Hostile);
        }
        let kernel = Self::kernel_position(m, port).ok_or(Reason::NotEstablished)?;
        let begun = kernel.checked_sub(kpos).ok_or(Reason::Sync)?;
        // Acquire: pairs with the Release in `record`.
        let said = m.own_rx().takeover.load(Acquire);
        let at = m.own_rx().takeover_at.load(Relaxed);
        match (said.phase(), begun) {
            (_, 0) => {}
            (what, _) if said.epoch() == epoch => self.resume_as(what, begun, at)?,
            _ => return Err(Reason::Foreign), // nobody wrote anything, and yet there are bytes
        }
        Ok(Adopted::Ring)
    }

    /// Goes on with what somebody who is gone had begun: so many bytes of it are on TCP.
    pub(super) fn resume_as(
        &self,
        what: TakeoverPhase,
        begun: u64,
        cursor: u64,
    ) -> Result<(), Reason> {
        match what {
            takeover::DOWN => self.resume_frame(begun, Kind::Down, cursor),
            takeover::FIN => self.resume_frame(begun, Kind::Fin, cursor),
            takeover::PLAIN => {
                let rest = self.head.load(Relaxed).checked_sub(cursor);
                let rest = rest.ok_or(Reason::Hostile)?;
                if begun > rest || rest > self.backlog_max() {
                    return Err(Reason::Foreign);
                }
                self.frame_done.store(LEN as u32, Relaxed);
                self.frame_cursor.store(u64::MAX, Relaxed);
                self.drain_at.store(cursor + begun, Relaxed);
                self.kpos.fetch_add(begun, Relaxed);
                self.mode.store(mode::DRAIN, Relaxed);
                Ok(())
            }
            _ => Err(Reason::Foreign),
        }
    }

    /// A frame with what follows it was begun: so much of it is on TCP.
    fn resume_frame(&self, begun: u64, kind: Kind, cursor: u64) -> Result<(), Reason> {
        let head = self.head.load(Relaxed);
        let rest = head.checked_sub(cursor).ok_or(Reason::Hostile)?;
        let done = begun.min(LEN as u64);
        if begun - done > rest || rest > self.backlog_max() {
            return Err(Reason::Foreign);
        }
        self.frame_kind.store(u32::from(kind == Kind::Fin), Relaxed);
        self.frame_rest.store(rest as u32, Relaxed);
        self.frame_cursor.store(cursor, Relaxed);
        self.frame_done.store(done as u32, Relaxed);
        self.drain_at.store(cursor + (begun - done), Relaxed);
        self.kpos.fetch_add(begun, Relaxed);
        self.mode.store(mode::DRAIN, Relaxed);
        Ok(())
    }

    /// So many more bytes of what is in work are on TCP: of a frame, and of what follows it.
    fn advance(&self, more: u64) -> Result<(), Reason> {
        let done = u64::from(self.frame_done.load(Relaxed));
        let frame = more.min(LEN as u64 - done);
        let at = self.drain_at.load(Relaxed) + (more - frame);
        if at > self.head.load(Relaxed) {
            return Err(Reason::Foreign);
        }
        self.frame_done.store((done + frame) as u32, Relaxed);
        self.drain_at.store(at, Relaxed);
        self.kpos.fetch_add(more, Relaxed);
        Ok(())
    }

    /// The end's side, under the lock: the daemon is gone. If it had the direction, goes on where it
    /// stopped; in any case the direction is on its way to TCP afterwards. A switch that nobody will
    /// answer is `Err(Reason::InDoubt)`.
    pub fn reclaim(&self, m: &Memory, port: &impl Port) -> Result<Progress, Reason> {
        let phase = self.takeover_phase(m);
        if phase == takeover::DONE {
            self.look_at_takeover(m);
        } else if phase != takeover::NONE {
            let epoch = self.takeover_epoch(m);
            let kernel = Self::kernel_position(m, port).ok_or(Reason::NotEstablished)?;
            let begun = kernel
                .checked_sub(self.kpos.load(Relaxed))
                .ok_or(Reason::Sync)?;
            let at = m.peer_rx().takeover_at.load(Relaxed);
            self.reclaimed.store(epoch, Relaxed);
            let was = self.mode.load(Relaxed);
            match phase {
                _ if begun == 0 => {}
                // It went on with what we had begun.
                takeover::TAKEN if was == mode::DRAIN => self.advance(begun)?,
                what => {
                    self.epoch.store(epoch, Relaxed); // not ours yet if we were still asking
                    self.resume_as(what, begun, at)?;
                    self.downs.fetch_add(u32::from(was != mode::DRAIN), Relaxed);
                }
            }
        }
        if self.mode.load(Relaxed) == mode::ASK && !self.has_answer(m) {
            return Err(Reason::InDoubt);
        }
        self.down(m, port)
    }
}
