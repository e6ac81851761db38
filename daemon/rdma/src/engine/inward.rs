//! The incoming direction of a lane: the peer writes our ring, and we tell the application.
//!
//! Towards the application, the daemon acts as the sender: our words tell that the sender has switched, how far it
//! is, and where the ring lies. Storing a switch and then looking at the application's readiness is one half of a
//! Dekker pair; the other half is the application's revocation.

use super::api::Fault;
use super::inn::{newer, InRing};
use super::lanes::Lane;
use super::{Host, LaneId, Pair};
use crate::verbs::Provider;
use crate::wire::{flag, Cdc, Place};
use lane::abi::{
    loc_index, rx, tx, Cursor, Epoch, Loc, RxWord, SpaceWord, TcpPos, TxWord, RING_LOG2_MAX,
    RING_LOG2_MIN,
};
use std::sync::atomic::{fence, Ordering::*};

impl<P: Provider> Pair<P> {
    /// Reads the application's receiving words.
    pub(super) fn look_in(&mut self, lane: &mut Lane) -> Result<(), Fault> {
        let Some(p) = self.clients.get(&lane.client) else {
            return Ok(());
        };
        let memory = p.memory.clone();
        let app = memory.app();
        // Acquire: pairs with the Release in `RxState::declare_ready`.
        let word = app.rx[lane.slot].word.load(Acquire);
        let epoch = word.epoch();
        let known = lane.inn.seen;
        if lane.ours(epoch) {
            if known != Epoch::NONE && epoch.since(known) > u32::MAX / 2 {
                return Err(Fault::App("a readiness that goes back"));
            }
            lane.inn.seen = epoch;
            if lane.inn.up && epoch != lane.inn.epoch {
                lane.inn.up = false; // it has taken the frame and is ready again
            }
            let flags = rx::READY | rx::WANT_DOWN | rx::REVOKED | rx::CLOSED | rx::PAST;
            let flags = word.flags().only(flags);
            let closed = if lane.inn.gone { rx::CLOSED } else { rx::NONE };
            // Stored before the word. Has the reader taken nothing from the ring, and will it never?
            let untouched = || {
                let at = app.rx[lane.slot].revoked.load(Relaxed);
                at == Cursor::UNSEEN || at == lane.inn.start
            };
            let flags = if lane.inn.up && flags.has(rx::REVOKED) && !untouched() {
                // Part of the ring is read, so the sender must say in a frame from which cursor TCP goes on: the
                // revocation becomes a request to go down.
                flags.without(rx::REVOKED) | rx::WANT_DOWN
            } else {
                flags
            };
            let word = RxWord::new(epoch, flags | closed);
            if lane.inn.word != word {
                lane.inn.word = word;
                lane.cdc = true;
            }
        } else if known != Epoch::NONE {
            return Err(Fault::App("a readiness of another use of the lane"));
        }
        if lane.inn.up {
            // Acquire: pairs with the Release in `RxState::take`; the application's copies are done.
            let at = app.cursors[lane.slot].load(Acquire);
            self.look_cursor(lane, at)?;
        }
        Ok(())
    }

    fn look_cursor(&mut self, lane: &mut Lane, at: Cursor) -> Result<(), Fault> {
        let i = &mut lane.inn;
        if i.stale == Some(at) {
            return Ok(()); // it has not noticed the switch yet
        }
        if at < i.cursor || at > i.shown {
            return Err(Fault::App("an impossible cursor"));
        }
        let fresh = i.stale.take().is_some();
        i.cursor = at;
        let size = i.rings.back().map_or(0, |r| r.loc.bytes() as u64);
        let moved = at.saturating_since(i.told);
        if moved > 0 && (i.wants || at == i.head || moved >= size / 4) {
            lane.cdc = true;
        }
        if fresh {
            self.show_head(lane);
        }
        Ok(())
    }

    /// Shows the application the head.
    fn show_head(&mut self, lane: &mut Lane) {
        let head = lane.inn.ceiling();
        if head > lane.inn.shown {
            self.tell_tap(lane, head);
            lane.inn.shown = head;
            if let Some(p) = self.clients.get(&lane.client) {
                // Release: pairs with the Acquire in `RxState::head`; the bytes have arrived, because the completion
                // of the message after them has been seen.
                p.memory.proxy().heads[lane.slot].store(head, Release);
            }
            self.publish(lane);
        }
        let i = &mut lane.inn;
        if i.wants_landed.is_some_and(|at| i.shown >= at) {
            i.wants_landed = None;
            i.landed_reply = Some((i.epoch, i.shown));
        }
    }

    /// The peer's application wants to switch up.
    pub(super) fn on_switch(
        &mut self,
        lane: &mut Lane,
        which: (Epoch, u32),
        tcp_pos: TcpPos,
        start: Cursor,
    ) -> Result<(), Fault> {
        let (epoch, attempt) = which;
        if !lane.ours(epoch) {
            return Err(Fault::Peer("a switch of another use of the lane"));
        }
        if let Some((e, a, ok)) = lane.inn.answered {
            if (e, a) == which {
                lane.inn.switch_reply = Some((e, a, ok)); // the answer was lost
                return Ok(());
            }
            if !newer(which, (e, a)) {
                return Ok(()); // a later one has arrived already
            }
            if ok && e == epoch {
                return Err(Fault::Peer("a switch that was made already"));
            }
        }
        let Some(ring) = lane.inn.rings.back() else {
            return Err(Fault::Peer("a switch without a ring"));
        };
        if ring.from > start || start > Cursor::START_MAX {
            return Err(Fault::Peer("a switch to an impossible place"));
        }
        let stands = self.store_switch(lane, epoch, tcp_pos, start);
        lane.inn.answered = Some((epoch, attempt, stands));
        lane.inn.switch_reply = Some((epoch, attempt, stands));
        Ok(())
    }

    fn store_switch(
        &mut self,
        lane: &mut Lane,
        epoch: Epoch,
        tcp_pos: TcpPos,
        start: Cursor,
    ) -> bool {
        let Some(p) = self.clients.get(&lane.client) else {
            return false;
        };
        let memory = p.memory.clone();
        let (app, words) = (memory.app(), &memory.proxy().tx[lane.slot]);
        // WANT_DOWN is no reason to refuse: a reader that has not revoked would take the refusal for a switch.
        let ready =
            |w: RxWord| w.epoch() == epoch && w.flags().only(rx::READY | rx::REVOKED) == rx::READY;
        let word = &app.rx[lane.slot].word;
        if lane.inn.refuses || !ready(word.load(Acquire)) {
            return false; // the application never learns of it
        }
        // The application reads this only after `state`, below, says so.
        memory.proxy().heads[lane.slot].store(start, Relaxed);
        words.up_tcp_pos.store(tcp_pos, Relaxed);
        words.up_start.store(start, Relaxed);
        // (Whoever waited for space in a former epoch does so no more.)
        words.want_space.store(SpaceWord::NONE, Relaxed);
        // Release: pairs with the Acquire in `RxState::phase`.
        words.state.store(TxWord::new(epoch, tx::UP), Release);
        self.publish(lane);
        // SYNC retreat: we have switched, now we look; the receiver revokes, then looks for our switch. One of the
        // two sees the other, and the answer is sent only after this.
        fence(SeqCst);
        if !ready(word.load(SeqCst)) {
            words.state.store(TxWord::new(epoch, tx::RESUMED), Release);
            return false;
        }
        let i = &mut lane.inn;
        let at = app.cursors[lane.slot].load(Relaxed);
        i.up = true;
        i.epoch = epoch;
        i.tx_phase = tx::UP;
        (i.start, i.head, i.shown, i.cursor, i.told) = (start, start, start, start, start);
        i.stale = (at != start).then_some(at);
        i.wants = false;
        if let Some(tap) = &mut i.tap {
            tap.up(tcp_pos, start);
        }
        true
    }

    /// The part of a snapshot that concerns our reader: the state of the peer's sender.
    pub(super) fn on_sender(&mut self, lane: &mut Lane, c: &Cdc, data: &[u8]) -> Result<(), Fault> {
        let i = &mut lane.inn;
        if c.tx_epoch != i.epoch || !i.up {
            let known = i.answered.map_or(Epoch::NONE, |a| a.0);
            if c.tx_epoch != Epoch::NONE
                && (!lane.ours(c.tx_epoch) || newer((c.tx_epoch, 0), (known, 0)))
            {
                return Err(Fault::Peer("a sender in an epoch that was not agreed"));
            }
            return Ok(());
        }
        if c.tx_phase < i.tx_phase || c.tx_phase == tx::NONE {
            return Err(Fault::Peer("a sender that goes back"));
        }
        let wants = c.flags & flag::WANT_SPACE != 0;
        if wants != std::mem::replace(&mut i.wants, wants) {
            if let Some(p) = self.clients.get(&lane.client) {
                // SYNC space: pairs with the fence in `RxState::take`; `on_cdc` looks at the cursor.
                let w = &p.memory.proxy().tx[lane.slot].want_space;
                w.store(SpaceWord::new(wants), SeqCst);
            }
        }
        let i = &mut lane.inn;
        if c.flags & flag::WANT_LANDED != 0 {
            i.wants_landed = Some(c.head);
        }
        if c.head > i.head {
            let Some(n) = i.ring_numbered(c.moves) else {
                return Err(Fault::Peer("a head on a ring that is not there"));
            };
            let ring = &i.rings[n];
            let size = ring.loc.bytes() as u64;
            let beyond = i.rings.get(n + 1).is_some_and(|next| c.head > next.from);
            let begin = ring.from.max(i.told);
            if c.head < ring.from || beyond || c.head.saturating_since(begin) > size {
                return Err(Fault::Peer("a head beyond the ring"));
            }
            let at = c.head.back(data.len() as u64);
            if at < ring.from || data.len() as u64 > size {
                return Err(Fault::Peer("bytes outside of the ring"));
            }
            let loc = ring.loc;
            if !self.put(lane, loc, at, data) {
                return Err(Fault::Peer("bytes for a ring that is gone"));
            }
            lane.inn.head = c.head;
        } else if c.head < i.head && c.flags & flag::VALIDATE == 0 {
            // After a move to another link the sender may know less than we do; otherwise a head never decreases.
            return Err(Fault::Peer("a head that goes back"));
        }
        self.show_head(lane);
        let i = &mut lane.inn;
        if c.tx_phase != i.tx_phase {
            i.tx_phase = c.tx_phase;
            if let Some(p) = self.clients.get(&lane.client) {
                // Release: pairs with the Acquire in `RxState::phase`; the head is stored.
                let state = TxWord::new(lane.inn.epoch, c.tx_phase);
                p.memory.proxy().tx[lane.slot].state.store(state, Release);
            }
            self.publish(lane);
        }
        Ok(())
    }

    /// Puts bytes that came in a message into the ring, from cursor `at` on. The peer may write there anyway.
    fn put(&self, lane: &Lane, loc: Loc, at: Cursor, data: &[u8]) -> bool {
        if data.is_empty() {
            return true;
        }
        let client = self.clients.get(&lane.client);
        let region = client.and_then(|p| p.own_chunks.get(&loc.chunk));
        let Some(chunk) = region.and_then(|r| self.chunks.get(r)) else {
            return false;
        };
        loc.pieces(at, data.len()).is_some_and(|[a, b]| {
            let (first, second) = data.split_at(a.len());
            chunk.memory.write(a.start, first) && chunk.memory.write(b.start, second)
        })
    }

    pub(super) fn on_cdc(&mut self, lane: &mut Lane, c: &Cdc, data: &[u8]) -> Result<(), Fault> {
        if c.flags & flag::ABORT != 0 {
            return Err(Fault::Peer("it has failed the lane"));
        }
        // Read our reader's own words first: it may have left the epoch to which the peer refers.
        self.look_in(lane)?;
        self.on_sender(lane, c, data)?;
        self.on_reader(lane, c)?;
        // SYNC space: the head is stored, now we look at the cursor once more.
        fence(SeqCst);
        self.look_in(lane)
    }

    /// From cursor `from` on, the peer's bytes are on another ring.
    pub(super) fn on_ring(
        &mut self,
        id: LaneId,
        lane: &mut Lane,
        (number, log2, from): (u32, u8, Cursor),
        host: &mut dyn Host,
    ) -> Result<(), Fault> {
        let log2 = u32::from(log2);
        if let Some(r) = lane.inn.rings.iter().find(|r| r.number == number) {
            lane.inn.ring_reply = Some((number, Some(r.place)));
            return Ok(()); // the answer was lost
        }
        let last = lane.inn.rings.back();
        // Not always the next number: a ring that the sender left before it was placed is skipped.
        let ahead = number.wrapping_sub(lane.inn.number);
        if ahead == 0
            || ahead > u32::MAX / 2
            || !(RING_LOG2_MIN..=RING_LOG2_MAX).contains(&log2)
            || last.is_some_and(|r| r.from > from)
        {
            return Err(Fault::Peer("an impossible ring"));
        }
        self.look_in(lane)?;
        let i = &mut lane.inn;
        if i.up && (i.rings.back().is_some_and(|r| i.told < r.from) || from < i.head) {
            return Err(Fault::Peer("a ring moved before the reader could follow"));
        }
        let placed = host.place(id, log2);
        let ring = placed.and_then(|loc| self.check_place(lane, loc, log2));
        let Some((loc, place)) = ring else {
            if let Some(loc) = placed {
                host.free(id, loc);
            }
            lane.inn.ring_reply = Some((number, None));
            return Ok(());
        };
        let i = &mut lane.inn;
        i.number = number;
        i.ring_reply = Some((number, Some(place)));
        i.rings.push_back(InRing {
            number,
            loc,
            from,
            place,
        });
        // A move to this ring means that no write to the ring before the former one is in flight, or will follow. The
        // reader has left that ring, too.
        while lane.inn.rings.len() > 2 {
            if let Some(r) = lane.inn.rings.pop_front() {
                host.free(id, r.loc);
            }
        }
        if let Some(p) = self.clients.get(&lane.client) {
            let w = &p.memory.proxy().tx[lane.slot];
            // As `TxState::move_to` does: `from` is stored before the count.
            let seq = w.loc_seq.load(Relaxed).wrapping_add(1);
            w.loc[loc_index(seq)].store(loc.word(), Relaxed);
            w.loc_from[loc_index(seq)].store(from, Relaxed);
            w.loc_seq.store(seq, Release); // pairs with the Acquire in `RxState::source`
        }
        self.publish(lane);
        Ok(())
    }

    fn check_place(&self, lane: &Lane, loc: Loc, log2: u32) -> Option<(Loc, Place)> {
        let region = *self.clients.get(&lane.client)?.own_chunks.get(&loc.chunk)?;
        let chunk = self.chunks.get(&region)?;
        let fits = loc.log2 == log2 && loc.fits(chunk.memory.len()) && chunk.number == loc.chunk;
        fits.then_some((
            loc,
            Place {
                region,
                offset: u64::from(loc.page) * 4096,
            },
        ))
    }
}
