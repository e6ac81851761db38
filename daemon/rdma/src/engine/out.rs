//! State of the outgoing direction of a lane: how far the application's ring is posted, and how far it has certainly
//! arrived in the peer's ring.

use super::api::Fault;
use crate::wire::Place;
use lane::abi::{rx, Epoch, Loc, RxWord, TxPhase};
use std::collections::VecDeque;

/// The phase of the direction. An epoch and an attempt identify one request of the application to switch up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// On TCP.
    #[default]
    Idle,
    /// The application waits for an answer.
    Asking(Ask),
    /// The answer was no; until the application has seen it.
    Refused(Epoch),
    Up,
    /// The application has left the ring. `true`: the bytes that it left there still have to be sent (`BROKEN`).
    Left(bool),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    pub epoch: Epoch,
    pub attempt: u32,
    pub tcp_pos: u64,
    pub start: u64,
    pub deadline: u64,
    /// Sent over the link to which the lane is bound.
    pub said: bool,
    /// Sent over any link: the peer may have accepted it.
    pub doubt: bool,
    pub next_query: u64,
}

/// A ring of the application, and its counterpart at the peer.
#[derive(Clone, Debug)]
pub(super) struct OutRing {
    pub number: u32,
    pub loc: Loc,
    pub from: u64,
    pub remote: Option<Place>,
    pub said: bool,
}

impl OutRing {
    pub(super) fn size(&self) -> u64 {
        self.loc.bytes() as u64
    }
}

#[derive(Default)]
pub(super) struct Out {
    pub phase: Phase,
    /// The last epoch that the peer has accepted.
    pub epoch: Epoch,
    /// How far the application says it is in that epoch (`lane::abi::tx`).
    pub tx_phase: TxPhase,
    /// Epoch and flags of the peer's reader, as last received.
    pub told: RxWord,
    pub attempt: u32,
    /// Cursors: consumed by the peer's reader; posted; certainly in the peer's ring.
    pub cursor: u64,
    pub posted: u64,
    pub acked: u64,
    /// Requests for the bytes up to here are completed.
    done: u64,
    /// Bytes that were sent behind messages, first to last: the peer's device has them, but only the peer daemon's
    /// messages tell whether it has put them into the ring.
    unconfirmed: Option<(u64, u64)>,
    /// The head that the last snapshot announced: every byte before it was posted on the same link.
    pub announced: u64,
    /// The highest head ever announced in this epoch, on any link: the reader may have got that far.
    pub high: u64,
    /// The application's head, as last read and checked.
    pub head: u64,
    pub rings: VecDeque<OutRing>,
    pub numbers: u32,
    /// The application's count of ring moves.
    pub moves: u32,
    /// The application has to go down, because rings or rails are missing.
    pub want_down: bool,
    /// No readiness is shown before this time.
    pub not_before: u64,
    /// The last word that we stored.
    pub shown: Option<RxWord>,
    /// The peer's end is known to see everything up to here.
    pub landed: u64,
    /// The application will send no more: report when everything has arrived.
    pub finish: bool,
    pub flushed: bool,
    pub next_ring: u64,
    /// The caller takes the direction down for the application.
    pub takeover: bool,
    /// The caller does not want the direction to go up yet.
    pub gated: bool,
}

impl Out {
    /// The snapshot with this head is completed.
    pub(super) fn reached(&mut self, head: u64, epoch: Epoch) {
        if epoch == self.epoch && head <= self.posted {
            self.done = self.done.max(head);
            self.settle();
        }
    }

    /// `bytes` bytes from `at` on are sent behind a message.
    pub(super) fn inlined(&mut self, at: u64, bytes: u64) {
        let first = self.unconfirmed.map_or(at, |(first, _)| first);
        self.unconfirmed = Some((first, at + bytes));
    }

    /// The peer's daemon has put all bytes up to `at` into the ring.
    pub(super) fn took(&mut self, at: u64) {
        if let Some((first, end)) = self.unconfirmed {
            self.unconfirmed = (at < end).then_some((first.max(at), end));
        }
        self.settle();
    }

    fn settle(&mut self) {
        let sure = self
            .unconfirmed
            .map_or(self.done, |(first, _)| self.done.min(first));
        self.acked = self.acked.max(sure);
    }

    /// Nothing is in flight: continues after the last byte that has certainly arrived.
    pub(super) fn moved(&mut self) {
        // Bytes that the peer's reader has consumed had arrived, with or without a completion; the application may
        // have put other bytes in their place already.
        self.acked = self.acked.max(self.cursor);
        self.rest_at(self.acked);
        if let Phase::Asking(a) = &mut self.phase {
            a.said = false;
        }
        for r in &mut self.rings {
            r.said = false;
        }
        self.next_ring = 0;
    }

    /// All bytes up to here are posted, and the next snapshot announces them.
    pub(super) fn announce(&mut self, posted: u64) {
        self.posted = posted;
        self.announced = posted;
        self.high = self.high.max(posted);
    }

    /// The peer's reader has consumed all bytes up to `cursor`; after a move to another link that may be more than we
    /// were going to repeat.
    pub(super) fn read_to(&mut self, cursor: u64) {
        self.cursor = cursor;
        self.took(cursor);
        if cursor > self.posted {
            self.acked = self.acked.max(cursor);
            self.done = self.acked;
            self.announce(cursor);
        }
    }

    /// Sets all positions to `at`: nothing beyond it is posted.
    pub(super) fn rest_at(&mut self, at: u64) {
        (self.acked, self.done, self.posted, self.announced) = (at, at, at, at);
        self.unconfirmed = None;
    }

    /// Is this the switch that waits for an answer?
    pub(super) fn asks(&self, which: (Epoch, u32)) -> bool {
        matches!(&self.phase, Phase::Asking(a) if (a.epoch, a.attempt) == which)
    }

    /// May the bytes that are written now be in the peer's ring already?
    pub(super) fn repeats(&self) -> bool {
        self.announced < self.high
    }

    pub(super) fn query_again(&mut self) {
        if let Phase::Asking(a) = &mut self.phase {
            a.next_query = 0;
        }
    }

    /// Has everything arrived, and can the peer's end see it?
    pub(super) fn is_there(&self) -> bool {
        self.announced == self.head && self.landed == self.head
    }

    /// Was the direction ever on the ring?
    pub(super) fn used(&self) -> bool {
        self.epoch != Epoch::NONE
    }

    /// The peer's reader is gone: the application has to get TCP's own errors.
    pub(super) fn reader_closed(&mut self) {
        if self.phase == Phase::Up {
            self.told = self.told.with(rx::CLOSED);
        }
    }

    /// May bytes be sent on the ring?
    pub(super) fn sends(&self) -> bool {
        matches!(self.phase, Phase::Up | Phase::Left(true))
    }

    /// Number of the ring that holds the first byte that was not announced.
    pub(super) fn ring_of(&self, at: u64) -> u32 {
        let known = |r: &&OutRing| r.remote.is_some() && r.from <= at;
        self.rings.iter().rev().find(known).map_or(0, |r| r.number)
    }

    /// Drops rings whose bytes have all arrived.
    pub(super) fn prune(&mut self) {
        while self.rings.len() > 1
            && self.rings[1].remote.is_some()
            && self.acked >= self.rings[1].from
        {
            self.rings.pop_front();
        }
    }

    /// May the peer be told about this ring? When it is told, it frees the ring before the former one, so no write to
    /// that one may be in flight, or follow.
    pub(super) fn may_ring(&self, i: usize) -> bool {
        self.rings
            .get(i.wrapping_sub(1))
            .is_none_or(|r| self.acked >= r.from)
    }

    /// Takes over a new head after checking it.
    pub(super) fn believe(&mut self, head: u64) -> Result<(), Fault> {
        if head < self.head {
            return Err(Fault::App("a head that goes back"));
        }
        // Each ring holds at most its size of bytes that are not consumed.
        let mut end = head;
        for r in self.rings.iter().rev() {
            let begin = r.from.max(self.cursor);
            if end.saturating_sub(begin) > r.size() {
                return Err(Fault::App("a head beyond the ring"));
            }
            end = end.min(r.from);
        }
        self.head = head;
        Ok(())
    }
}
