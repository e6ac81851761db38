//! The state of the incoming direction of a lane.

use super::api::Tap;
use crate::wire::Place;
use lane::abi::{Cursor, Epoch, Loc, RxWord, TxPhase};
use lane::num;
use std::collections::VecDeque;

/// A ring in our memory, with the number that the peer gave it.
#[derive(Clone, Copy, Debug)]
pub(super) struct InRing {
    pub number: u32,
    pub loc: Loc,
    pub from: Cursor,
    pub place: Place,
}

#[derive(Default)]
pub(super) struct In {
    /// The peer's sender is on the ring, in this epoch.
    pub up: bool,
    pub epoch: Epoch,
    pub tx_phase: TxPhase,
    /// No switch is accepted any more.
    pub refuses: bool,
    /// The last switch that was answered: epoch, attempt, and whether it stands.
    pub answered: Option<(Epoch, u32, bool)>,
    /// Ring cursor at which this epoch begins.
    pub start: Cursor,
    /// All bytes before it are in our ring.
    pub head: Cursor,
    /// The head that the application has been shown.
    pub shown: Cursor,
    /// Cursors: consumed by the application; told to the peer.
    pub cursor: Cursor,
    pub told: Cursor,
    /// The application has ended, and reads nothing any more.
    pub gone: bool,
    /// Value of the application's cursor word before it noticed the switch.
    pub stale: Option<Cursor>,
    /// The peer waits for space.
    pub wants: bool,
    pub rings: VecDeque<InRing>,
    pub number: u32,
    /// The word about the application's readiness that the peer is told.
    pub word: RxWord,
    /// Epoch of the application's word when it was last read.
    pub seen: Epoch,
    /// Answers that are due.
    pub switch_reply: Option<(Epoch, u32, bool)>,
    pub ring_reply: Option<(u32, Option<Place>)>,
    /// The last answer about a ring that was sent.
    pub ring_replied: Option<(u32, Option<Place>)>,
    /// The peer wants to be told when this head has been shown here.
    pub wants_landed: Option<Cursor>,
    pub landed_reply: Option<(Epoch, Cursor)>,
    pub landed_replied: Option<(Epoch, Cursor)>,
    /// Who reads along.
    pub tap: Option<Box<dyn Tap>>,
}

impl In {
    /// The link that carried our answers is dead. The questions may have come over another link that works, so the
    /// peer may not ask again: answers that may be lost are sent once more.
    pub(super) fn moved(&mut self) {
        self.switch_reply = self.switch_reply.or(self.answered);
        self.ring_reply = self.ring_reply.take().or(self.ring_replied);
        self.landed_reply = self.landed_reply.take().or(self.landed_replied);
    }

    /// The peer's daemon asks what became of a switch. If it never arrived, it will not be accepted any more.
    pub(super) fn asked_about(&mut self, which: (Epoch, u32)) -> bool {
        match self.answered {
            Some((e, a, ok)) if (e, a) == which => ok,
            Some((e, a, _)) if !newer(which, (e, a)) => false,
            _ => {
                self.answered = Some((which.0, which.1, false));
                false
            }
        }
    }

    pub(super) fn ring_numbered(&self, low: u8) -> Option<usize> {
        self.rings
            .iter()
            .position(|r| num::low8(r.number.into()) == low)
    }

    /// Up to which head may the application be shown? Until it has changed its cursor word from the value of an
    /// earlier use of the slot, the head must stay below that value: otherwise the old value could not be told from a
    /// real cursor.
    pub(super) fn ceiling(&self) -> Cursor {
        match self.stale {
            Some(stale) if stale > self.cursor => self.head.min(stale.back(1)),
            _ => self.head,
        }
    }

    /// The ring that has the byte at this cursor, and up to where it does; the bytes end before `head`.
    pub(super) fn ring_of(&self, at: Cursor, head: Cursor) -> Option<(Loc, Cursor)> {
        let n = self.rings.iter().rposition(|r| r.from <= at)?;
        let end = self.rings.get(n + 1).map_or(head, |next| next.from);
        Some((self.rings[n].loc, end.min(head)))
    }

    /// Was the direction ever on the ring?
    pub(super) fn used(&self) -> bool {
        self.epoch != Epoch::NONE
    }

    pub(super) fn unread(&self) -> bool {
        self.up && self.cursor != self.head
    }
}

/// Is switch `a` later than `b`? Both are of one use of the lane.
pub(super) fn newer(a: (Epoch, u32), b: (Epoch, u32)) -> bool {
    let ahead = a.0.since(b.0);
    ahead != 0 && ahead < u32::MAX / 2 || ahead == 0 && a.1 > b.1
}
