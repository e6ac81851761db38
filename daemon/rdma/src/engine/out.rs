//! What is known of the outgoing direction of a lane: how far the application's ring is posted, and
//! how far it is surely in the peer's.

use super::api::Fault;
use crate::wire::Place;
use link::layout::{rx, Epoch, Loc, RxWord, TxPhase};
use std::collections::VecDeque;

/// Where the direction is. Epochs and attempts name one request of the application to switch up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// On TCP.
    #[default]
    Idle,
    /// The application waits for an answer.
    Asking(Ask),
    /// The answer is no; until the application has seen it.
    Refused(Epoch),
    Up,
    /// It has left the ring. `true`: what it left there still has to be sent (`BROKEN`).
    Left(bool),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    pub epoch: Epoch,
    pub attempt: u32,
    pub kpos: u64,
    pub start: u64,
    pub deadline: u64,
    /// Said on the link that the lane is bound to.
    pub said: bool,
    /// Said on any link: the peer may have taken it.
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
    /// Last epoch that the peer has accepted.
    pub epoch: Epoch,
    /// What the application says of that epoch (`layout::tx`).
    pub tx_phase: TxPhase,
    /// Epoch and flags of the peer's reader, as it told last.
    pub told: RxWord,
    pub attempt: u32,
    /// Consumed by the peer's reader; posted; in the peer's ring for good.
    pub cursor: u64,
    pub posted: u64,
    pub acked: u64,
    /// Up to here, requests are completed.
    done: u64,
    /// Bytes that went behind messages, first to last: the peer's device has them, but whether its
    /// daemon has put them into the ring only its words tell.
    soft: Option<(u64, u64)>,
    /// Head that the last snapshot announced: every byte before it was posted on the same link.
    pub announced: u64,
    /// Highest head ever announced in this epoch, on whatever link: the reader may be there.
    pub high: u64,
    /// The application's head, as last believed.
    pub head: u64,
    pub rings: VecDeque<OutRing>,
    pub numbers: u32,
    /// The application's count of moves.
    pub moves: u32,
    /// The application shall go down: rings or rails are missing.
    pub want_down: bool,
    /// No readiness is shown before.
    pub not_before: u64,
    /// Last word we stored.
    pub shown: Option<RxWord>,
    /// The peer's end is known to have been shown everything up to here.
    pub landed: u64,
    /// Final head to tell when it has arrived.
    pub finish: bool,
    pub flushed: bool,
    pub next_ring: u64,
    /// The caller takes the direction down in the application's stead.
    pub takeover: bool,
    /// The caller is not ready for it to go up.
    pub gated: bool,
}

impl Out {
    /// A snapshot with this head is completed.
    pub(super) fn reached(&mut self, head: u64, epoch: Epoch) {
        if epoch == self.epoch && head <= self.posted {
            self.done = self.done.max(head);
            self.settle();
        }
    }

    /// So many bytes from here on go behind a message.
    pub(super) fn behind(&mut self, at: u64, bytes: u64) {
        let first = self.soft.map_or(at, |(first, _)| first);
        self.soft = Some((first, at + bytes));
    }

    /// The peer's daemon has put everything up to here into the ring.
    pub(super) fn took(&mut self, at: u64) {
        if let Some((first, end)) = self.soft {
            self.soft = (at < end).then_some((first.max(at), end));
        }
        self.settle();
    }

    fn settle(&mut self) {
        let sure = self
            .soft
            .map_or(self.done, |(first, _)| self.done.min(first));
        self.acked = self.acked.max(sure);
    }

    /// Nothing is under way: goes on after the last byte that is surely there.
    pub(super) fn moved(&mut self) {
        // What the peer's reader has consumed was there, completion or not; the application may have
        // put other bytes in its place already.
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

    /// Everything up to here is posted, and the next snapshot says so.
    pub(super) fn announce(&mut self, posted: u64) {
        self.posted = posted;
        self.announced = posted;
        self.high = self.high.max(posted);
    }

    /// The peer's reader has consumed so much; after a move to another link that may be more than
    /// we would write again.
    pub(super) fn read_to(&mut self, cursor: u64) {
        self.cursor = cursor;
        self.took(cursor);
        if cursor > self.posted {
            self.acked = self.acked.max(cursor);
            self.done = self.acked;
            self.announce(cursor);
        }
    }

    /// Nothing beyond this is posted.
    pub(super) fn rest_at(&mut self, at: u64) {
        (self.acked, self.done, self.posted, self.announced) = (at, at, at, at);
        self.soft = None;
    }

    /// Is this the switch that waits for an answer?
    pub(super) fn asks(&self, which: (Epoch, u32)) -> bool {
        matches!(&self.phase, Phase::Asking(a) if (a.epoch, a.attempt) == which)
    }

    /// Is what we write now perhaps in the peer's ring already?
    pub(super) fn repeats(&self) -> bool {
        self.announced < self.high
    }

    pub(super) fn query_again(&mut self) {
        if let Phase::Asking(a) = &mut self.phase {
            a.next_query = 0;
        }
    }

    /// Has everything arrived, and has the peer's end been shown it?
    pub(super) fn is_there(&self) -> bool {
        self.announced == self.head && self.landed == self.head
    }

    /// Reached the ring at any time?
    pub(super) fn used(&self) -> bool {
        self.epoch != Epoch::NONE
    }

    /// The peer's reader is gone: the application is to meet TCP's own errors.
    pub(super) fn reader_closed(&mut self) {
        if self.phase == Phase::Up {
            self.told = self.told.with(rx::CLOSED);
        }
    }

    /// May bytes be sent?
    pub(super) fn sends(&self) -> bool {
        matches!(self.phase, Phase::Up | Phase::Left(true))
    }

    /// Number of the ring that holds the first byte not announced.
    pub(super) fn ring_of(&self, at: u64) -> u32 {
        let known = |r: &&OutRing| r.remote.is_some() && r.from <= at;
        self.rings.iter().rev().find(known).map_or(0, |r| r.number)
    }

    /// Gives up rings that no byte needs any more.
    pub(super) fn prune(&mut self) {
        while self.rings.len() > 1
            && self.rings[1].remote.is_some()
            && self.acked >= self.rings[1].from
        {
            self.rings.pop_front();
        }
    }

    /// May the peer be told of this ring? When it is, it gives up the one before the one before:
    /// so nothing may be under way there, and nothing will be.
    pub(super) fn may_ring(&self, i: usize) -> bool {
        self.rings
            .get(i.wrapping_sub(1))
            .is_none_or(|r| self.acked >= r.from)
    }

    /// Takes a new head in.
    pub(super) fn believe(&mut self, head: u64) -> Result<(), Fault> {
        if head < self.head {
            return Err(Fault::App("a head that goes back"));
        }
        // Each ring holds no more than its size of what is not consumed.
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
