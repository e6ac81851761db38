//! State of the outgoing direction of a lane: how far the application's ring is posted, and how far it has certainly
//! arrived in the peer's ring.

use super::api::Fault;
use crate::wire::Place;
use lane::abi::{rx, tx, Cursor, Epoch, Loc, RxWord, TcpPos, TxPhase};
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
    pub tcp_pos: TcpPos,
    pub start: Cursor,
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
    pub from: Cursor,
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
    pub cursor: Cursor,
    pub posted: Cursor,
    pub acked: Cursor,
    /// Requests for the bytes up to here are completed.
    done: Cursor,
    /// Bytes that were sent in messages, first to last: the peer's device has them, but only the peer daemon's
    /// messages tell whether it has put them into the ring.
    unconfirmed: Option<(Cursor, Cursor)>,
    /// The head that the last snapshot announced: every byte before it was posted on the same link.
    pub announced: Cursor,
    /// The highest head ever announced in this epoch, on any link: the reader may have got that far.
    pub high: Cursor,
    /// The application's head, as last read and checked.
    pub head: Cursor,
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
    pub landed: Cursor,
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
    pub(super) fn reached(&mut self, head: Cursor, epoch: Epoch) {
        if epoch == self.epoch && head <= self.posted {
            self.done = self.done.max(head);
            self.settle();
        }
    }

    /// `bytes` bytes from `at` on are sent in a message.
    pub(super) fn inlined(&mut self, at: Cursor, bytes: u64) {
        let first = self.unconfirmed.map_or(at, |(first, _)| first);
        self.unconfirmed = Some((first, at + bytes));
    }

    /// The peer's daemon has put all bytes up to `at` into the ring.
    pub(super) fn took(&mut self, at: Cursor) {
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
    pub(super) fn announce(&mut self, posted: Cursor) {
        self.posted = posted;
        self.announced = posted;
        self.high = self.high.max(posted);
    }

    /// The peer's reader has consumed all bytes up to `cursor`; after a move to another link that may be more than we
    /// were going to repeat.
    pub(super) fn read_to(&mut self, cursor: Cursor) {
        self.cursor = cursor;
        self.took(cursor);
        if cursor > self.posted {
            self.acked = self.acked.max(cursor);
            self.done = self.acked;
            self.announce(cursor);
        }
    }

    /// Sets all positions to `at`: nothing beyond it is posted.
    pub(super) fn rest_at(&mut self, at: Cursor) {
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

    /// This node's daemon takes the direction down: no more bytes of it are sent. Was it up?
    pub(super) fn take_down(&mut self) -> bool {
        // Its end may have said that it goes down and got no further: then the daemon says the rest.
        self.takeover |= self.phase == Phase::Left(false) && self.tx_phase == tx::DOWNING;
        if !self.sends() {
            return false;
        }
        self.phase = Phase::Left(false);
        self.tx_phase = tx::DOWNING;
        self.takeover = true;
        true
    }

    /// May bytes be sent on the ring?
    pub(super) fn sends(&self) -> bool {
        matches!(self.phase, Phase::Up | Phase::Left(true))
    }

    /// Number of the ring that holds the first byte that was not announced.
    pub(super) fn ring_of(&self, at: Cursor) -> u32 {
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
    pub(super) fn believe(&mut self, head: Cursor) -> Result<(), Fault> {
        if head < self.head {
            return Err(Fault::App("a head that goes back"));
        }
        // Each ring holds at most its size of bytes that are not consumed.
        let mut end = head;
        for r in self.rings.iter().rev() {
            let begin = r.from.max(self.cursor);
            if end.saturating_since(begin) > r.size() {
                return Err(Fault::App("a head beyond the ring"));
            }
            end = end.min(r.from);
        }
        self.head = head;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn c(bytes: u64) -> Cursor {
        Cursor::new(bytes)
    }

    /// A ring of 4 KiB from a cursor on, which the peer has placed or not.
    fn ring(number: u32, from: u64, placed: bool) -> OutRing {
        let (chunk, page, log2) = (1, number, 12);
        OutRing {
            number,
            loc: Loc { chunk, page, log2 },
            from: c(from),
            remote: placed.then_some(Place {
                region: 1,
                offset: 0,
            }),
            said: false,
        }
    }

    fn out(rings: &[OutRing]) -> Out {
        Out {
            rings: rings.iter().cloned().collect(),
            epoch: Epoch::new(1),
            ..Out::default()
        }
    }

    /// A head is believed up to a full ring, or up to what a ring holds of it, and the new one.
    #[test]
    fn heads() {
        let mut o = out(&[ring(1, 0, true)]);
        assert!(o.believe(c(4096)).is_ok() && o.head == c(4096));
        assert!(o.believe(c(4095)).is_err() && o.believe(c(4097)).is_err());
        assert_eq!(o.head, c(4096));
        o.cursor = c(1);
        assert!(o.believe(c(4097)).is_ok());
        let rings = [ring(1, 0, true), ring(2, 4000, true)];
        assert!(out(&rings).believe(c(8096)).is_ok());
        assert!(out(&rings).believe(c(8097)).is_err());
        let mut o = out(&[ring(1, 0, true), ring(2, 5000, true)]);
        assert!(o.believe(c(5000)).is_err(), "more than the first ring held");
        o.cursor = c(904);
        assert!(o.believe(c(5000)).is_ok());
    }

    /// Bytes have arrived when their requests are done, except for those in messages, of which the peer tells.
    #[test]
    fn arrivals() {
        let mut o = out(&[ring(1, 0, true)]);
        o.announce(c(100));
        o.reached(c(40), Epoch::new(1));
        assert_eq!(o.acked, c(40));
        o.reached(c(30), Epoch::new(1));
        o.reached(c(60), Epoch::new(2));
        o.reached(c(101), Epoch::new(1));
        assert_eq!(o.acked, c(40), "older, of another epoch, not posted");
        o.reached(c(100), Epoch::new(1));
        assert_eq!(o.acked, c(100));
        // 100 to 130 in two messages; then written ones.
        o.inlined(c(100), 10);
        o.inlined(c(110), 20);
        o.announce(c(200));
        o.reached(c(200), Epoch::new(1));
        assert_eq!(o.acked, c(100));
        o.took(c(105));
        assert_eq!(o.acked, c(105));
        o.took(c(103));
        assert_eq!(o.acked, c(105));
        o.took(c(130));
        assert_eq!(o.acked, c(200));
        // What the reader has consumed was there, even if it was not posted on this link.
        o.read_to(c(150));
        assert_eq!((o.cursor, o.acked, o.posted), (c(150), c(200), c(200)));
        o.read_to(c(250));
        assert_eq!(
            (o.acked, o.posted, o.announced, o.high),
            (c(250), c(250), c(250), c(250))
        );
        assert!(!o.repeats());
        o.rest_at(c(220));
        assert!(o.repeats());
        assert_eq!(
            (o.acked, o.posted, o.announced, o.high),
            (c(220), c(220), c(220), c(250))
        );
    }

    /// A move to another link goes on after what has certainly arrived, and tells everything once more.
    #[test]
    fn another_link() {
        let mut o = out(&[ring(1, 0, true)]);
        o.announce(c(100));
        o.reached(c(40), Epoch::new(1));
        o.cursor = c(50);
        o.rings[0].said = true;
        o.moved();
        assert_eq!((o.acked, o.posted, o.rings[0].said), (c(50), c(50), false));
        o.cursor = c(20);
        o.moved();
        assert_eq!(o.posted, c(50));
    }

    /// Everything is there: announced, and seen to land.
    #[test]
    fn all_there() {
        let mut o = out(&[]);
        for (announced, landed, head) in [(5, 5, 5), (4, 5, 5), (5, 4, 5), (5, 5, 6)] {
            let [announced, landed, head] = [announced, landed, head].map(c);
            (o.announced, o.landed, o.head) = (announced, landed, head);
            assert_eq!(o.is_there(), (announced, landed) == (head, head));
        }
        assert!(o.used() && !Out::default().used());
    }

    /// Rings are found by the bytes they hold, dropped when all of these have arrived, and told in order.
    #[test]
    fn rings() {
        let mut o = out(&[ring(1, 0, true), ring(2, 100, true), ring(3, 200, false)]);
        let found = [0, 99, 100, 199, 200].map(|at| o.ring_of(c(at)));
        assert_eq!(found, [1, 1, 2, 2, 2]);
        o.acked = c(99);
        assert!(o.may_ring(0), "there is none before it");
        o.prune();
        assert_eq!(o.rings.len(), 3);
        assert!(!o.may_ring(2), "the second one is not reached");
        o.acked = c(100);
        assert!(o.may_ring(2));
        o.prune();
        assert_eq!(o.rings.len(), 2);
        o.acked = c(300);
        o.prune();
        assert_eq!(o.rings.len(), 2, "the last one has no place yet");
        o.rings[1].remote = o.rings[0].remote;
        o.prune();
        assert_eq!((o.rings.len(), o.rings[0].number), (1, 3));
    }
}
