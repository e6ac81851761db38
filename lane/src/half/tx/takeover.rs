//! A sending direction that is operated by the daemon on its node.
//!
//! An end that sleeps outside every hook, computes or is stopped cannot put its ring back on TCP, so its daemon does;
//! across nodes it does so, too, for an end that has shut down or is gone, and says by a frame where the stream ends.
//! The takeover word is the daemon's ([`crate::abi::DaemonWords`]). The end reads it under the direction's lock before
//! it touches anything; the daemon stores it and then looks at the lock: one of the two sees the other.
//!
//! Two things must never happen: that both put bytes on TCP, or that what one has begun is not completed by the
//! other. So whoever puts anything on TCP first records what it is, and from which cursor on, where the other finds
//! it. How much of it is on TCP follows from what the kernel has counted since then.

use super::{mode, TxState, NO_FRAME, UNASKED};
use crate::abi::{
    loc_index, rx, takeover, tx, Cursor, Epoch, TakeoverPhase, TakeoverWord, TxPhase, TxWord,
};
use crate::half::mem::Memory;
use crate::half::{Port, Progress};
use crate::num;
use crate::prim::{fence, fence_after_rmw};
use crate::proto::frame::{Kind, LEN};
use crate::proto::reason::Reason;
use core::sync::atomic::Ordering::*;

/// The state in which a daemon finds a direction that it takes over.
pub enum Adopted {
    /// On TCP: nothing is left to do.
    Tcp,
    /// The remote node has not answered a switch yet.
    Asking,
    /// On one node: on the ring, and the receiver has not revoked.
    Untouched,
    /// On the ring, or on the way down.
    Ring,
}

/// For the daemon: may this direction, which is in this state, be taken over on one node? Its receiver has revoked, or
/// its end is on its way down and asks for it itself (`own`).
pub fn is_asked(m: &Memory, state: TxWord, own: bool) -> bool {
    let word = m.peer_rx().word.load(Acquire); // pairs with the SeqCst store in `RxState::revoke`
    let revoked = word.epoch() == state.epoch() && word.has(rx::REVOKED);
    match state.phase() {
        tx::UP => revoked,
        tx::DOWNING => revoked || own,
        _ => false,
    }
}

/// Has the epoch of this state already been taken over and finished, and the end only not looked since then?
pub fn is_done(m: &Memory, state: TxWord) -> bool {
    m.daemon().takeover.load(Relaxed) == TakeoverWord::new(state.epoch(), takeover::DONE)
}

/// For the daemon: claims a direction that is in this state, unless its end is working on it. `locked`: does a thread
/// hold the direction's lock? (Not asked about an end that is gone.) The claimant then restores the end's state
/// ([`TxState::adopt`]), or gives the direction back ([`release`]).
pub fn claim(m: &Memory, state: TxWord, locked: impl FnOnce() -> bool) -> bool {
    let word = TakeoverWord::new(state.epoch(), takeover::TAKEN);
    // Release: pairs with the Acquire in `takeover_phase`.
    m.daemon().takeover.store(word, Release);
    // SYNC takeover: our word is stored, now we look at the lock; the end takes the lock, then looks at our word.
    fence(SeqCst);
    let busy = locked();
    // If the end has just released the lock, what it did before that is seen below. (It may be in its next epoch by
    // now, to which our word does not apply.)
    fence(Acquire);
    let ours = !busy && m.own_tx().state.load(Acquire) == state;
    if !ours {
        release(m, state.epoch());
    }
    ours
}

/// For the daemon: the direction, claimed in this epoch and not touched, belongs to its end again.
pub fn release(m: &Memory, epoch: Epoch) {
    let word = TakeoverWord::new(epoch, takeover::NONE);
    m.daemon().takeover.store(word, Release); // as in `claim`
}

fn under_way(phase: TakeoverPhase) -> bool {
    (takeover::TAKEN..takeover::DONE).contains(&phase)
}

impl TxState {
    /// For the end, under the lock: is the direction taken over? If the takeover is finished, the end takes the
    /// direction back here.
    #[inline(always)]
    pub(super) fn is_taken_over(&self, m: &Memory) -> bool {
        // SYNC takeover: we have the lock, now we look; the daemon stores its word, then looks at the lock.
        fence_after_rmw();
        // (The word stays after a takeover, so that from then on there is a closer look.)
        let never = m.daemon().takeover.load(Relaxed) == TakeoverWord::default();
        !never && !m.takes_over() && self.look_at_takeover(m)
    }

    #[cold]
    fn look_at_takeover(&self, m: &Memory) -> bool {
        // Read only once: the takeover may end between two reads, and would then look neither under way nor finished.
        let phase = self.takeover_phase(m);
        if phase == takeover::DONE {
            let epoch = self.takeover_epoch(m);
            self.epoch.store(epoch, Relaxed);
            let tcp_pos = m.daemon().tcp_pos.load(Relaxed);
            // A frame, and what the ring has had.
            let put = tcp_pos.checked_since(self.tcp_pos.load(Relaxed));
            self.tcp_pos.store(tcp_pos, Relaxed);
            self.recount_again(m, put.unwrap_or(0));
            self.error.put(num::signed(m.daemon().error.load(Relaxed)));
            self.downs.fetch_add(1, Relaxed);
            if m.is_remote() {
                // The daemon knows this; the word is stored all the same, so that this epoch is over for good.
                m.own_tx()
                    .state
                    .store(TxWord::new(epoch, tx::DOWN), Release);
            }
            self.mode.store(mode::TCP, Release);
        }
        under_way(phase)
    }

    /// The epoch to which a takeover of this direction would apply.
    fn takeover_epoch(&self, m: &Memory) -> Epoch {
        match self.mode.load(Relaxed) {
            mode::ASK => m.own_tx().state.load(Relaxed).epoch(),
            _ => self.epoch.load(Relaxed),
        }
    }

    /// The phase of a takeover of the present epoch.
    fn takeover_phase(&self, m: &Memory) -> TakeoverPhase {
        let mode = self.mode.load(Relaxed);
        let epoch = self.takeover_epoch(m);
        // Acquire: pairs with the daemon's Release; the cursor and position stored before it are valid.
        let word = m.daemon().takeover.load(Acquire);
        let ours = word.epoch() == epoch && self.reclaimed.load(Relaxed) != epoch;
        match mode {
            mode::RING | mode::DRAIN | mode::ASK if ours => word.phase(),
            _ => takeover::NONE,
        }
    }

    pub(super) fn held(&self, m: &Memory) -> bool {
        under_way(self.takeover_phase(m))
    }

    /// Has a daemon taken the direction over and recorded what it does? It will not give it back before that is done. (A
    /// claim alone may be withdrawn, and an end that has the lock may see one.)
    pub fn is_recorded(&self, m: &Memory) -> bool {
        (takeover::DOWN..takeover::DONE).contains(&self.takeover_phase(m))
    }

    /// For the daemon: what has the kernel taken? Its own bytes last (`Equal`, also if that cannot be told now); bytes of
    /// somebody else behind them (`Greater`); or it is another connection (`Less`).
    pub fn taken_by_kernel(&self, m: &Memory, port: &impl Port) -> core::cmp::Ordering {
        let own = self.tcp_pos.load(Relaxed);
        Self::kernel_position(m, port).map_or(core::cmp::Ordering::Equal, |k| k.cmp(&own))
    }

    /// Has a takeover of this epoch finished, without the end having taken the direction back yet?
    pub fn is_through(&self, m: &Memory) -> bool {
        self.takeover_phase(m) == takeover::DONE
    }

    /// End or daemon: whoever puts anything on TCP first records that in its own words. (On one node the end's record is
    /// also for whoever continues when the process is gone: see [`TxState::holder_died`].)
    pub(super) fn record(&self, m: &Memory, cursor: Cursor, what: TakeoverPhase) {
        let (at, takeover) = match m.takes_over() {
            true => (&m.daemon().at, &m.daemon().takeover),
            false => (&m.own_rx().takeover_at, &m.own_rx().takeover),
        };
        at.store(cursor, Relaxed);
        let word = TakeoverWord::new(self.epoch.load(Relaxed), what);
        takeover.store(word, Release); // pairs with the Acquire in `takeover_phase` and `adopt`
    }

    /// For the daemon: what [`TxState::say`] is for the end. Across nodes the direction is the end's again when it is on
    /// TCP; on one node the receiver is told first how it came there, and the end by [`TxState::give_back`].
    pub(super) fn say_instead(&self, m: &Memory, epoch: Epoch, phase: TxPhase) {
        if phase <= tx::DOWNING {
            return;
        }
        match m.is_remote() {
            true => self.give_back(m, epoch),
            false => m.own_tx().state.store(TxWord::new(epoch, phase), Release), // as in `say`
        }
    }

    /// For the daemon, at the end: the direction, which is on TCP, belongs to its end again. On one node the daemon has
    /// closed its copy of the socket before, which would hold back the FIN of a close that follows.
    pub fn give_back(&self, m: &Memory, epoch: Epoch) {
        let w = m.daemon();
        w.tcp_pos.store(self.tcp_pos.load(Relaxed), Relaxed);
        w.error.store(num::bits(self.error.get()), Relaxed);
        w.takeover
            .store(TakeoverWord::new(epoch, takeover::DONE), Release); // as in `record`
    }

    /// For the daemon: turns this fresh state into what the end's must be, from what the end has published and what
    /// the kernel has counted. What the end has published is believed only within the limits of its rings. After an
    /// error the connection has to be reset; the end must not use the direction any more.
    pub fn adopt(&self, m: &Memory, port: &impl Port, tag: u64) -> Result<Adopted, Reason> {
        let w = m.own_tx();
        // Acquire: pairs with the Release in `say`.
        let state = w.state.load(Acquire);
        let (epoch, phase) = (state.epoch(), state.phase());
        if !matches!(phase, tx::UP | tx::DOWNING) {
            return Ok(Adopted::Tcp);
        }
        // SYNC withdraw: we have claimed, with a fence in `claim`, and look whether the receiver still revokes.
        let word = m.peer_rx().word.load(Acquire);
        let ours = word.epoch() == epoch;
        if !m.is_remote() && phase == tx::UP && !(ours && word.has(rx::REVOKED)) {
            return Ok(Adopted::Untouched);
        }
        if m.is_remote() && phase == tx::UP && !(ours && word.has(rx::ACCEPTED)) {
            let asks = ours && !word.has(rx::REVOKED);
            return Ok(if asks { Adopted::Asking } else { Adopted::Tcp });
        }
        let start = w.up_start.load(Acquire);
        let tcp_pos = w.up_tcp_pos.load(Relaxed);
        let newest = loc_index(w.loc_seq.load(Acquire));
        self.epoch.store(epoch, Relaxed);
        self.tag.store(tag, Relaxed);
        self.tcp_pos.store(tcp_pos, Relaxed);
        let head = m.own_head().load(Acquire);
        if head < start {
            return Err(Reason::Hostile);
        }
        self.head.store(head, Relaxed);
        self.loc.store(w.loc[newest].load(Relaxed), Relaxed);
        let from = w.loc_from[newest].load(Relaxed);
        self.loc_from.store(from, Relaxed);
        let before = w.loc[newest ^ 1].load(Relaxed);
        self.retired.store(before, Relaxed);
        self.peer_cursor.store(start, Relaxed);
        self.mode.store(mode::RING, Relaxed);
        if self.loc.load(Relaxed).loc().is_none() || self.unread(m)? > self.backlog_max() {
            return Err(Reason::Hostile);
        }
        if self
            .loc
            .load(Relaxed)
            .loc()
            .and_then(|l| m.own.ring(l))
            .is_none()
        {
            return Err(Reason::Internal); // it lies in memory that we do not have
        }
        let kernel = Self::kernel_position(m, port).ok_or(Reason::NotEstablished)?;
        let begun = kernel.checked_since(tcp_pos).ok_or(Reason::Sync)?;
        // Acquire: pairs with the Release in `record`.
        let said = m.own_rx().takeover.load(Acquire);
        let at = m.own_rx().takeover_at.load(Relaxed);
        match (said.phase(), begun) {
            // (A receiver may already have gone by what an end has recorded that goes down by itself: see `RxState::past`.)
            (what, n)
                if said.epoch() == epoch
                    && (n > 0
                        || what == takeover::PLAIN && phase == tx::DOWNING && at == start) =>
            {
                self.resume_as(what, begun, at)?;
                if !m.is_remote() {
                    self.record(m, at, what); // a receiver that leaves may count on the daemon for the rest
                }
            }
            (_, 0) => {}
            _ => return Err(Reason::Foreign), // no frame was recorded, and yet there are bytes
        }
        Ok(Adopted::Ring)
    }

    /// Continues what a process that is gone had begun: `begun` bytes of it are on TCP.
    pub(super) fn resume_as(
        &self,
        what: TakeoverPhase,
        begun: u64,
        cursor: Cursor,
    ) -> Result<(), Reason> {
        match what {
            takeover::DOWN => self.resume_frame(begun, Kind::Down, cursor),
            takeover::FIN => self.resume_frame(begun, Kind::Fin, cursor),
            takeover::PLAIN => {
                let rest = self.head.load(Relaxed).checked_since(cursor);
                let rest = rest.ok_or(Reason::Hostile)?;
                if begun > rest || rest > self.backlog_max() {
                    return Err(Reason::Foreign);
                }
                self.frame_kind.store(UNASKED, Relaxed); // (if it was asked for, that still stands)
                self.frame_done.store(num::small(LEN), Relaxed);
                self.frame_cursor.store(NO_FRAME, Relaxed);
                self.drain_at.store(cursor + begun, Relaxed);
                self.tcp_pos.add(begun, Relaxed);
                self.mode.store(mode::DRAIN, Relaxed);
                Ok(())
            }
            _ => Err(Reason::Foreign),
        }
    }

    /// A frame and what follows it were begun: `begun` bytes of them are on TCP.
    fn resume_frame(&self, begun: u64, kind: Kind, cursor: Cursor) -> Result<(), Reason> {
        let head = self.head.load(Relaxed);
        let rest = head.checked_since(cursor).ok_or(Reason::Hostile)?;
        let done = begun.min(LEN as u64);
        if begun - done > rest || rest > self.backlog_max() {
            return Err(Reason::Foreign);
        }
        self.frame_kind.store(u32::from(kind == Kind::Fin), Relaxed);
        self.frame_rest.store(num::small(num::size(rest)), Relaxed);
        self.frame_cursor.store(cursor, Relaxed);
        self.frame_done.store(num::low32(done), Relaxed);
        self.drain_at.store(cursor + (begun - done), Relaxed);
        self.tcp_pos.add(begun, Relaxed);
        self.mode.store(mode::DRAIN, Relaxed);
        Ok(())
    }

    /// `more` bytes of what is in progress (a frame, and what follows it) are on TCP.
    fn advance(&self, more: u64) -> Result<(), Reason> {
        let done = u64::from(self.frame_done.load(Relaxed));
        let frame = more.min(LEN as u64 - done);
        let at = self.drain_at.load(Relaxed) + (more - frame);
        if at > self.head.load(Relaxed) {
            return Err(Reason::Foreign);
        }
        self.frame_done.store(num::low32(done + frame), Relaxed);
        self.drain_at.store(at, Relaxed);
        self.tcp_pos.add(more, Relaxed);
        Ok(())
    }

    /// The link group to the other node is gone: goes down. `dead`: so is the daemon that served it, and what that one had
    /// begun is gone on with; otherwise it may have taken the direction over, and is waited for.
    pub fn leave_group(
        &self,
        m: &Memory,
        port: &impl Port,
        dead: bool,
    ) -> Result<Progress, Reason> {
        match dead {
            true => self.reclaim(m, port),
            false => self.down(m, port),
        }
    }

    /// For the end: `more` bytes were put on TCP since the switch up that it has not counted, and that are not the
    /// application's, as all of this epoch.
    pub(super) fn recount_again(&self, m: &Memory, more: u64) {
        let up = m.own_tx().up_tcp_pos.load(Relaxed);
        let here = self.tcp_pos.load(Relaxed).checked_since(up);
        let before = self.baseline.before(self.epoch.load(Relaxed));
        match (before, here) {
            (Some(c), Some(n)) => self.again.store(c.again.wrapping_add(n), Relaxed),
            _ => {
                self.again.fetch_add(more, Relaxed);
            }
        }
    }

    /// For the end, under the lock, when the daemon is gone: if the daemon had the direction, continues where it
    /// stopped. Afterwards the direction is on its way to TCP; on one node only if the daemon had it.
    pub fn reclaim(&self, m: &Memory, port: &impl Port) -> Result<Progress, Reason> {
        let phase = self.takeover_phase(m);
        if !m.is_remote() && phase == takeover::NONE {
            return Ok(Progress::Done);
        }
        // (What is done the way down takes back.)
        if !matches!(phase, takeover::NONE | takeover::DONE) {
            let epoch = self.takeover_epoch(m);
            let kernel = Self::kernel_position(m, port).ok_or(Reason::NotEstablished)?;
            let since = |tcp_pos| kernel.checked_since(tcp_pos).ok_or(Reason::Sync);
            let more = since(self.tcp_pos.load(Relaxed))?;
            let at = m.daemon().at.load(Relaxed);
            self.reclaimed.store(epoch, Relaxed);
            let was = self.mode.load(Relaxed);
            match phase {
                // The daemon continued what we had begun.
                takeover::TAKEN if was == mode::DRAIN => self.advance(more)?,
                // (On one node a receiver may have left because plain bytes were recorded.)
                _ if more == 0 && (m.is_remote() || phase == takeover::TAKEN) => {}
                what => {
                    // What it recorded counts from the switch on: what we had begun is a part of that, or had put
                    // nothing on TCP.
                    let up = m.own_tx().up_tcp_pos.load(Relaxed);
                    let begun = since(up)?;
                    self.tcp_pos.store(up, Relaxed);
                    self.epoch.store(epoch, Relaxed); // not set yet if we were still asking
                    self.resume_as(what, begun, at)?;
                    self.downs.fetch_add(u32::from(was != mode::DRAIN), Relaxed);
                }
            }
            self.recount_again(m, more); // a frame, and what the ring has had
        }
        if self.mode.load(Relaxed) == mode::ASK && !self.has_answer(m) {
            // Nobody will answer, and nothing was sent since it asked: the stream goes on on TCP, without a frame. (If the
            // switch was shown, its receiver sees that: `RxState::decide`.)
            return Ok(self.settle(m, port, self.asked_epoch(m), tx::RESUMED));
        }
        self.go_down(m, port, m.is_remote())
    }
}
