//! Reads along on one direction of a lane whose sender is on this node, as a third party that neither end knows of. It
//! writes nothing, so it has no cursor, and nobody waits for it: what it does not read in time is overwritten. What
//! comes from another node: [`arrivals`].
//!
//! What it must never do: show bytes that are torn, that are another connection's, or that the sender has taken back.
//! Therefore bytes are copied as soon as they are published, and believed only if the words that are read *after* the
//! copy say that nobody can have written there; and they are shown when the reader has them, or, if the direction is on
//! TCP again, when it is certain that its end had sent them. To another node, all that is published is sent.

pub(crate) mod along;
pub(crate) mod arrivals;
mod opened;

use opened::{OpenLane, Sender};

use lane::abi::{
    loc_index, tx, Cursor, Epoch, Loc, TcpPos, TxPhase, TxWord, EPOCHS, RING_LOG2_MAX,
    UNPUBLISHED_MAX,
};
use lane::half::{Counted, Memory};
use std::collections::VecDeque;
use std::sync::atomic::{
    fence,
    Ordering::{Acquire, Relaxed, SeqCst},
};

/// Most bytes that are unread and wait to be shown: two rings of the largest size.
const HELD_MAX: u64 = 2 << RING_LOG2_MAX;
/// Most bytes that are copied before it is looked at again what may have been overwritten, and that one piece has.
const COPIED_MAX: u64 = 128 << 10;
/// Most pieces of them. (A sender whose pieces are not one after the other is none of ours.)
const RUNS_MAX: usize = 1024;
/// Readings of the table of which the least is believed, and attempts to get them.
const READINGS: u32 = 8;
const ATTEMPTS: u32 = 64;

/// What the sender's table says of its bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ledger {
    /// Sent over lanes.
    pub lane: u64,
    /// Sent on TCP.
    pub tcp: u64,
    /// Of these not the application's, or on a ring as well.
    pub again: u64,
    /// Switches up.
    pub ups: u32,
    /// What had been counted at the last one.
    pub before: Counted,
}

/// What lies around a direction's words.
pub(crate) trait Surroundings {
    /// Copies what lies at cursor `at` and behind of a ring of the sender's. `false`: there is no such ring.
    fn read(&self, ring: Loc, at: Cursor, to: &mut [u8]) -> bool;
    fn ledger(&self) -> Option<Ledger>;
}

/// Bytes of the direction, to be shown.
#[derive(Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where they are in the stream of the application.
    pub at: u64,
    /// Bytes before them that were on the ring, and could not be read in time.
    pub lost: u64,
    pub bytes: Vec<u8>,
}

/// Bytes that were copied.
struct Run {
    at: Cursor,
    bytes: Vec<u8>,
}

impl Run {
    fn end(&self) -> Cursor {
        self.at + self.bytes.len() as u64
    }
}

/// One direction on one use of a slot.
pub(crate) struct Follower {
    /// Base of the epochs of this use.
    base: Epoch,
    epoch: Option<Epoch>,
    start: Cursor,
    /// Position on TCP at which this epoch begins, and bytes of the application before that: on TCP, and on rings.
    up_tcp_pos: TcpPos,
    tcp: u64,
    ring: u64,
    /// Up to where everything is copied, or lost.
    copied: Cursor,
    /// Up to where everything is shown, or lost.
    shown: Cursor,
    runs: VecDeque<Run>,
}

/// What a look has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// Something, or nothing, was copied or shown.
    Moved(bool),
    /// The slot is used by another connection.
    Over,
}

impl Follower {
    /// `uses`: how often the slot was used before.
    pub(crate) fn new(uses: u32) -> Follower {
        Follower {
            base: Epoch::base(uses),
            epoch: None,
            start: Cursor::default(),
            up_tcp_pos: TcpPos::default(),
            tcp: 0,
            ring: 0,
            copied: Cursor::default(),
            shown: Cursor::default(),
            runs: VecDeque::new(),
        }
    }

    /// Bytes that were copied and not shown: the reader has not taken them.
    pub(crate) fn unread(&self) -> u64 {
        self.runs.iter().map(|r| r.bytes.len() as u64).sum()
    }

    /// Where the byte at this cursor is in the stream of the application.
    fn place(&self, at: Cursor) -> u64 {
        let before = self.tcp.wrapping_add(self.ring);
        before.wrapping_add(at.saturating_since(self.start))
    }

    /// Is it on the ring, and since which epoch?
    pub(crate) fn is_up(&self, m: &Memory<'_>) -> bool {
        let state = m.own_tx().state.load(Acquire); // pairs with the Release in `TxState::say`
        Some(state.epoch()) == self.epoch && state.phase() == tx::UP
    }

    /// Copies what is new, and shows what is certain.
    pub(crate) fn look(
        &mut self,
        m: &Memory<'_>,
        around: &impl Surroundings,
        show: &mut dyn FnMut(Piece),
    ) -> Look {
        // Acquire: pairs with the Release in `TxState::say`; the words of this epoch were stored before it.
        let state = m.own_tx().state.load(Acquire);
        if state.epoch().since(self.base) >= EPOCHS {
            return Look::Over;
        }
        if state.phase() == tx::NONE {
            return Look::Moved(false);
        }
        // Acquire: pairs with the Release in `TxState::put`; the bytes before the head are in the ring.
        let mut head = m.own_head().load(Acquire);
        if !self.knows(m, state.epoch()) {
            // (Of an epoch that is over when it is seen first, nobody knows any more how much TCP had before it.)
            if state.phase() != tx::UP || !self.turn(m, state.epoch(), around, show) {
                return Look::Moved(false);
            }
            head = m.own_head().load(Acquire); // as above
            if !self.knows(m, state.epoch()) {
                return Look::Moved(true);
            }
        }
        let copied = self.copy(m, state.epoch(), head, around);
        let shown = self.settled(m, state.epoch());
        let any = shown.is_some_and(|to| self.show_to(to, show));
        Look::Moved(copied || any)
    }

    /// Is the switch of this epoch known? To another node, one that was refused may be asked for again in the same epoch,
    /// at another place. Called after the head was loaded: a head after the start is of the switch that is found here.
    fn knows(&self, m: &Memory<'_>, epoch: Epoch) -> bool {
        let same = !m.is_remote() || m.own_tx().up_tcp_pos.load(Relaxed) == self.up_tcp_pos;
        self.epoch == Some(epoch) && same
    }

    /// Begins an epoch. `false`: its words changed while they were read, or its place in the stream is not known yet.
    fn turn(
        &mut self,
        m: &Memory<'_>,
        epoch: Epoch,
        around: &impl Surroundings,
        show: &mut dyn FnMut(Piece),
    ) -> bool {
        let w = m.own_tx();
        let (tcp, start) = (w.up_tcp_pos.load(Relaxed), w.up_start.load(Relaxed));
        let before = self.before(m, epoch, around, (tcp, start));
        fence(SeqCst); // the words before, and then whether they were this epoch's
        let same = w.state.load(Acquire) == TxWord::new(epoch, tx::UP);
        let (Some((again, ring)), true) = (before, same) else {
            return false;
        };
        match self.epoch {
            // It begins after unread bytes: these are new, too.
            None => {
                let read = m.peer_cursor().load(Acquire);
                let head = m.own_head().load(Acquire);
                let read = if read > head { head } else { read };
                self.copied = read.max(start);
                self.shown = self.copied;
            }
            Some(before) => {
                // What the last epoch had put on the ring lies before the start of the next one. After more than one,
                // nobody knows what was taken back in between.
                if epoch != before && epoch != before.next() {
                    self.runs.clear();
                }
                self.take_back(start);
                self.show_to(start, show);
                self.copied = start;
            }
        }
        self.epoch = Some(epoch);
        self.start = start;
        self.up_tcp_pos = tcp;
        self.tcp = tcp.get().saturating_sub(again);
        self.ring = ring;
        true
    }

    /// What TCP had that was not the application's when this epoch began, and how many bytes rings had had: of this lane, and of
    /// those before it. The sender notes both before it says that it is up; what it counts now may be ahead of that (a frame, what it
    /// repeats of the ring), or behind the head (a process was killed within a send).
    fn before(
        &self,
        m: &Memory<'_>,
        epoch: Epoch,
        around: &impl Surroundings,
        (tcp, start): (TcpPos, Cursor),
    ) -> Option<(u64, u64)> {
        let now = around.ledger()?;
        if now.before.epoch == epoch {
            return Some((now.before.again, now.before.ring));
        }
        // A shim of before December 2026 notes nothing: as long as its position on TCP is that of the switch, nothing was
        // put there since.
        let ring = match self.epoch {
            Some(_) => self.ring.wrapping_add(start.saturating_since(self.start)),
            None => counted(m, around, now, start)?,
        };
        fence(SeqCst);
        (around.ledger()?.tcp == tcp.get()).then_some((now.again, ring))
    }

    /// Forgets what lies from this cursor on: it was published, and counts as not sent.
    fn take_back(&mut self, head: Cursor) {
        while let Some(r) = self.runs.back_mut().filter(|r| r.end() > head) {
            let kept = head.saturating_since(r.at);
            if kept == 0 {
                self.runs.pop_back();
                continue;
            }
            r.bytes.truncate(lane::num::size(kept));
            r.bytes.shrink_to_fit();
        }
        self.copied = self.copied.min(head);
    }

    /// Copies up to the head. Returns whether there was anything.
    fn copy(
        &mut self,
        m: &Memory<'_>,
        epoch: Epoch,
        head: Cursor,
        around: &impl Surroundings,
    ) -> bool {
        if head < self.copied {
            self.take_back(head);
        }
        let from = self.copied;
        let possible = head < Cursor::START_MAX;
        while possible && self.copied < head {
            if !self.copy_ring(m, epoch, head, around) {
                break;
            }
        }
        self.copied != from
    }

    /// Copies what one ring has. `false`: its words changed meanwhile, or are impossible; nothing was copied.
    fn copy_ring(
        &mut self,
        m: &Memory<'_>,
        epoch: Epoch,
        head: Cursor,
        around: &impl Surroundings,
    ) -> bool {
        let w = m.own_tx();
        // Acquire: pairs with the Release in `TxState::move_to`. Loaded after the head: a head beyond a move makes the
        // move visible, too.
        let seq = w.loc_seq.load(Acquire);
        let new = loc_index(seq);
        let moved = w.loc_from[new].load(Relaxed);
        let (at, begin, end) = match moved <= self.copied {
            true => (new, moved, head),
            false => (new ^ 1, w.loc_from[new ^ 1].load(Relaxed), moved.min(head)),
        };
        let Some(ring) = w.loc[at].load(Relaxed).loc() else {
            return false;
        };
        let size = ring.bytes() as u64;
        let first = self.copied.max(begin).max(end.back(size));
        if first >= end {
            // The ring before this one is gone. (Or a word is impossible: then so is the next look.)
            let gone = self.is_now(m, epoch, seq) && at == new ^ 1;
            if gone {
                self.copied = end;
            }
            return gone;
        }
        let end = end.min(first + COPIED_MAX);
        let mut bytes = vec![0; lane::num::size(end.since(first))];
        let there = around.read(ring, first, &mut bytes);
        // If the copy has bytes of after a fence of the sender, which follows each publish, the loads after this fence
        // find what it had published before; and the cursor that it had seen, because a processor that sees a store sees
        // what its writer had seen (x86).
        fence(SeqCst);
        let now = m.own_head().load(Relaxed);
        let read = m.peer_cursor().load(Relaxed);
        if !there || !self.is_now(m, epoch, seq) {
            return false;
        }
        // Nobody writes to a ring that was left before it is freed, which changes `seq`.
        let written = match at == new {
            true => Cursor::new(now.max(head).get().saturating_add(UNPUBLISHED_MAX)),
            false => moved,
        };
        // The sender writes where the reader has read, and no further than one ring before its head. (Until the reader
        // has seen the switch, its cursor is that of a former epoch.)
        let read = if read > now {
            now
        } else {
            read.max(self.start)
        };
        let whole = first.max(written.back(size).min(read));
        if whole < end {
            // (In memory of its own size: what was left out counts for nothing.)
            let bytes = bytes.split_off(lane::num::size(whole.since(first)));
            self.hold(Run { at: whole, bytes });
        }
        self.copied = end;
        true
    }

    /// Are epoch and rings still the ones that were read?
    fn is_now(&self, m: &Memory<'_>, epoch: Epoch, seq: u32) -> bool {
        let w = m.own_tx();
        w.loc_seq.load(Acquire) == seq && w.state.load(Acquire).epoch() == epoch
    }

    /// A correct sender has no more than two rings unread.
    fn hold(&mut self, run: Run) {
        let fits = |r: &&mut Run| {
            let both = r.bytes.len() + run.bytes.len();
            r.end() == run.at && both as u64 <= COPIED_MAX
        };
        match self.runs.back_mut().filter(fits) {
            Some(last) => last.bytes.extend_from_slice(&run.bytes),
            None => self.runs.push_back(run),
        }
        while self.unread() > HELD_MAX || self.runs.len() > RUNS_MAX {
            self.runs.pop_front();
        }
    }

    /// Up to where bytes are certain to be the stream's. `None`: the epoch is over.
    fn settled(&self, m: &Memory<'_>, epoch: Epoch) -> Option<Cursor> {
        let w = m.own_tx();
        let same = |phase: Option<TxPhase>| {
            let now = w.state.load(Acquire);
            now.epoch() == epoch && phase.is_none_or(|p| p == now.phase())
        };
        // Acquire: what the reader has is stored before what follows in the next epoch.
        let read = m.peer_cursor().load(Acquire);
        fence(SeqCst); // (the cursor, and then whether it was this epoch's)
        if !same(None) {
            return None;
        }
        let phase = w.state.load(Acquire).phase();
        if m.is_remote() {
            // Its daemon may have forwarded what is published, so nothing is taken back (`TxState::take_back`).
            let head = m.own_head().load(Acquire);
            fence(SeqCst);
            return same(None).then_some(head);
        }
        if !matches!(phase, tx::DOWN | tx::RESUMED | tx::ENDED) {
            return Some(read);
        }
        // It is on TCP: nothing that is on the ring now can be taken back.
        let head = m.own_head().load(Acquire);
        fence(SeqCst);
        same(Some(phase)).then_some(head)
    }

    /// Shows what was copied before this cursor.
    fn show_to(&mut self, to: Cursor, show: &mut dyn FnMut(Piece)) -> bool {
        let to = to.min(self.copied);
        if to <= self.shown {
            return false;
        }
        while let Some(mut run) = self.runs.pop_front() {
            if run.at >= to {
                self.runs.push_front(run);
                break;
            }
            if run.end() > to {
                let rest = run.bytes.split_off(lane::num::size(to.since(run.at)));
                self.runs.push_front(Run {
                    at: to,
                    bytes: rest,
                });
            }
            let end = run.end();
            show(Piece {
                at: self.place(run.at),
                lost: run.at.saturating_since(self.shown),
                bytes: run.bytes,
            });
            self.shown = end;
        }
        true
    }
}

/// How many bytes rings had had when this epoch began, by what is counted now. It counts after the publish, so one reading
/// may be too small, and none is too large.
fn counted(
    m: &Memory<'_>,
    around: &impl Surroundings,
    ledger: Ledger,
    start: Cursor,
) -> Option<u64> {
    // (To another node, a switch counts when it is granted.)
    if ledger.ups == u32::from(!m.is_remote()) {
        return Some(0); // the first bytes of all
    }
    let (mut most, mut n): (Option<u64>, u32) = (None, 0);
    for _ in 0..ATTEMPTS {
        let head = m.own_head().load(Acquire);
        let all = around.ledger()?.lane;
        fence(SeqCst);
        let new = all.saturating_sub(head.saturating_since(start));
        if m.own_head().load(Acquire) == head {
            most = most.max(Some(new));
            n += 1;
        }
        if n == READINGS {
            break;
        }
    }
    most
}

#[cfg(test)]
mod tests;
