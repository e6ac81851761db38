//! The outgoing direction of a lane: from the application's ring to the peer's ring.
//!
//! Towards the application, the daemon acts as the receiver: the application asks to switch up, and our word says
//! `ACCEPTED` only when the peer's daemon has accepted. Nothing that the application writes is trusted: heads, moves
//! and ring locations are checked against what it was told.

use super::api::{Event, Fault};
use super::lanes::Lane;
use super::out::{Ask, OutRing, Phase};
use super::Pair;
use crate::verbs::Provider;
use crate::wire::{Cdc, Place};
use lane::abi::{loc_index, rx, takeover, tx, Cursor, Epoch, Landed, RxWord, TxPhase, TxWords};
use std::sync::atomic::{fence, Ordering::*};

impl<P: Provider> Pair<P> {
    /// Reads the application's sending words.
    pub(super) fn look_out(&mut self, lane: &mut Lane) -> Result<(), Fault> {
        let Some(p) = self.clients.get(&lane.client) else {
            return Ok(());
        };
        let memory = p.memory.clone();
        let app = memory.app();
        let words = &app.tx[lane.slot];
        // Acquire: pairs with the Release in `TxState::say`; the words stored before it are valid.
        let state = words.state.load(Acquire);
        let (epoch, phase) = (state.epoch(), state.phase());
        // A helper of this node's daemon may have begun to put the present epoch on TCP, or be done, before the caller
        // knows and says so ([`Pair::take_down`]). What the application stores when it takes the direction back then
        // says only that the epoch is over, not how; and the peer's reader may be ready anew.
        // Acquire: pairs with the Release in `TxState::record`, which precedes the first byte on TCP.
        let takes = memory.proxy().daemon[lane.slot].takeover.load(Acquire);
        let on_tcp = (takeover::DOWN..=takeover::DONE).contains(&takes.phase());
        if on_tcp && takes.epoch() == lane.out.epoch && lane.out.take_down() {
            lane.cdc = true;
        }
        if matches!(lane.out.phase, Phase::Up) && epoch != lane.out.epoch {
            // The application has left our epoch and announced it, but we did not look in time.
            lane.out.phase = Phase::Left(false);
            lane.out.tx_phase = tx::DOWN;
            lane.cdc = true;
        }
        match lane.out.phase {
            Phase::Idle | Phase::Left(_) => {
                let (used, ahead) = (lane.out.used(), epoch.since(lane.out.epoch));
                let newer = !used || ahead < u32::MAX / 2;
                if phase == tx::UP
                    && epoch == lane.out.told.epoch()
                    && epoch != lane.out.epoch
                    && newer
                {
                    self.begin_ask(lane, words, epoch)?;
                } else if matches!(lane.out.phase, Phase::Left(_)) && epoch == lane.out.epoch {
                    self.leave_ring(lane, phase);
                }
            }
            Phase::Asking(a) => {
                let late = self.now >= a.deadline || !self.rail || lane.peer_closed;
                if late && !a.doubt {
                    self.refuse(lane, a.epoch);
                }
            }
            Phase::Refused(e) => {
                if epoch != e || phase != tx::UP {
                    lane.out.phase = Phase::Idle;
                }
            }
            Phase::Up => {
                if phase != tx::UP {
                    self.leave_ring(lane, phase);
                }
            }
        }
        if lane.out.sends() && epoch == lane.out.epoch {
            // Acquire: pairs with the Release in `TxState::send`. Read before the moves: a head beyond a move makes
            // the move visible, too.
            let head = app.heads[lane.slot].load(Acquire);
            if self.see_rings(lane, words)? {
                lane.out.believe(head)?;
            }
        }
        lane.out.prune();
        if !self.rail && lane.out.phase == Phase::Up {
            lane.out.want_down = true;
        }
        self.show(lane);
        Ok(())
    }

    /// Reads whether the application has come down, and nothing else.
    pub(super) fn look_down(&mut self, lane: &mut Lane) {
        let Some(p) = self.clients.get(&lane.client) else {
            return;
        };
        // Acquire: pairs with the Release in `TxState::say`.
        let state = p.memory.app().tx[lane.slot].state.load(Acquire);
        let used = matches!(lane.out.phase, Phase::Up | Phase::Left(_));
        if used && state.epoch() == lane.out.epoch {
            self.leave_ring(lane, state.phase());
        }
    }

    fn leave_ring(&mut self, lane: &mut Lane, phase: TxPhase) {
        if lane.out.takeover || phase <= lane.out.tx_phase || phase > tx::BROKEN {
            return; // known already, or nonsense
        }
        lane.out.tx_phase = phase;
        lane.out.phase = Phase::Left(phase == tx::BROKEN);
        lane.cdc = true;
    }

    /// The application has switched up and waits for the answer.
    fn begin_ask(&mut self, lane: &mut Lane, words: &TxWords, epoch: Epoch) -> Result<(), Fault> {
        if lane.out.told.flags() != rx::READY {
            // The peer's reader is no longer ready, and our word says so: the application will see that, or is
            // waiting for a refusal.
            self.refuse(lane, epoch);
            return Ok(());
        }
        if !self.rail || self.now < lane.out.not_before || lane.out.gated || lane.peer_closed {
            self.refuse(lane, epoch);
            return Ok(());
        }
        let start = words.up_start.load(Relaxed);
        let tcp_pos = words.up_tcp_pos.load(Relaxed);
        if start < lane.out.posted || start > Cursor::START_MAX {
            return Err(Fault::App("a switch to an impossible place"));
        }
        // The direction was idle: whatever is left on older rings does not matter.
        lane.out.attempt += 1;
        lane.out.head = start;
        self.restart_rings(lane, words, start)?;
        lane.out.phase = Phase::Asking(Ask {
            epoch,
            attempt: lane.out.attempt,
            tcp_pos,
            start,
            deadline: self.now + self.config.ask_ns,
            said: false,
            doubt: false,
            next_query: 0,
        });
        Ok(())
    }

    /// Tells the application that it stays on TCP for now.
    pub(super) fn refuse(&mut self, lane: &mut Lane, epoch: Epoch) {
        lane.out.phase = Phase::Refused(epoch);
        self.show(lane);
    }

    /// For a new epoch, only the newest ring matters.
    fn restart_rings(&mut self, lane: &mut Lane, w: &TxWords, start: Cursor) -> Result<(), Fault> {
        let (moves, i) = newest(w);
        let ring = self.ring_at(lane, w, i)?;
        if ring.from > start {
            return Err(Fault::App("a ring begins beyond the head"));
        }
        lane.out.moves = moves;
        let known = lane.out.rings.back();
        if known.is_some_and(|k| k.loc == ring.loc && k.from == ring.from) {
            let back = lane.out.rings.len() - 1;
            lane.out.rings.drain(..back);
        } else {
            lane.out.rings.clear();
            self.add_ring(lane, ring);
        }
        Ok(())
    }

    fn add_ring(&mut self, lane: &mut Lane, mut ring: OutRing) {
        lane.out.numbers = lane.out.numbers.wrapping_add(1);
        ring.number = lane.out.numbers;
        lane.out.rings.push_back(ring);
        lane.out.next_ring = 0;
    }

    fn ring_at(&self, lane: &Lane, w: &TxWords, i: usize) -> Result<OutRing, Fault> {
        let loc = w.loc[i].load(Relaxed).loc();
        let loc = loc.ok_or(Fault::App("an impossible ring"))?;
        let from = w.loc_from[i].load(Relaxed);
        let chunk = self.clients.get(&lane.client);
        let chunk = chunk.and_then(|p| p.app_chunks.get(&loc.chunk));
        let chunk = chunk.and_then(|id| self.chunks.get(id));
        if !chunk.is_some_and(|c| loc.fits(c.memory.len())) {
            return Err(Fault::App("a ring outside of its memory"));
        }
        Ok(OutRing {
            number: 0,
            loc,
            from,
            remote: None,
            said: false,
        })
    }

    /// Processes moves of the application's ring. `false`: they are changing right now, look again.
    fn see_rings(&mut self, lane: &mut Lane, w: &TxWords) -> Result<bool, Fault> {
        let (moves, i) = newest(w);
        let jump = moves.wrapping_sub(lane.out.moves);
        if jump == 0 {
            return Ok(true);
        }
        let (new, before) = (self.ring_at(lane, w, i), self.ring_at(lane, w, i ^ 1));
        // SYNC moves: the locations above were read before the count is read again.
        fence(Acquire);
        if newest(w).0 != moves {
            return Ok(false);
        }
        // The application moves only when the reader has left the former ring, and it learns the reader's cursor from
        // us: so only the two newest rings can hold bytes that we have not seen yet.
        let new = new?;
        let last = lane.out.rings.back().map_or(Cursor::default(), |r| r.from);
        let mut left = last;
        let mut fresh = Vec::with_capacity(2);
        if jump > 1 {
            let before = before?;
            left = before.from;
            if new.from > lane.out.head {
                fresh.push(before);
            }
        }
        if lane.out.cursor < left {
            return Err(Fault::App("a ring moved before the reader could follow"));
        }
        fresh.push(new);
        let mut from = last.max(lane.out.head);
        for r in fresh {
            if r.from < from || lane.out.rings.len() > 4 {
                return Err(Fault::App("a ring begins below the head"));
            }
            from = r.from;
            self.add_ring(lane, r);
        }
        lane.out.moves = moves;
        Ok(true)
    }

    /// Stores the word that the application has to see now.
    pub(super) fn show(&mut self, lane: &mut Lane) {
        let o = &lane.out;
        let (told, flags) = (o.told.epoch(), o.told.flags());
        let down = if o.want_down { rx::WANT_DOWN } else { rx::NONE };
        let word = match o.phase {
            Phase::Asking(a) => RxWord::new(a.epoch, rx::READY),
            Phase::Refused(e) => RxWord::new(e, rx::READY | rx::REVOKED),
            Phase::Up if told == o.epoch => {
                let asks = flags.only(rx::WANT_DOWN | rx::REVOKED | rx::CLOSED | rx::PAST);
                // Who comes down without a frame says so over a link.
                let asks = match self.rail {
                    true => asks,
                    false => asks.without(rx::REVOKED),
                };
                RxWord::new(o.epoch, rx::READY | rx::ACCEPTED | asks | down)
            }
            Phase::Up => RxWord::new(o.epoch, rx::READY | rx::ACCEPTED | down),
            // For an epoch that was used, the peer's reader's flags are shown only in phase Up, above,
            // but for a revocation: a takeover comes down as the application would have.
            Phase::Left(_) if told == o.epoch => {
                let revoked = lane
                    .out
                    .shown
                    .map_or(rx::NONE, |w| w.flags().only(rx::REVOKED));
                RxWord::new(told, rx::READY | rx::ACCEPTED | revoked | down)
            }
            // Without rails or rings, the readiness must not invite the application to switch up.
            _ if flags == rx::READY
                && (!self.rail || self.now < o.not_before || o.gated || lane.peer_closed) =>
            {
                RxWord::new(told, rx::READY | rx::WANT_DOWN)
            }
            _ => o.told,
        };
        if lane.out.shown == Some(word) {
            return;
        }
        let asks = |w: RxWord| w.has(rx::ACCEPTED) && w.has(rx::WANT_DOWN | rx::REVOKED);
        if asks(word) && !lane.out.shown.is_some_and(asks) {
            self.event(Event::Asked);
        }
        lane.out.shown = Some(word);
        if let Some(p) = self.clients.get(&lane.client) {
            let w = &p.memory.proxy().rx[lane.slot];
            w.revoked.store(Cursor::UNSEEN, Relaxed);
            // Releases `revoked` and the cursor. SeqCst: as `RxState::flag` does.
            w.word.store(word, SeqCst);
        }
        self.publish(lane);
    }

    /// The peer's daemon has answered a switch.
    pub(super) fn on_switch_answer(
        &mut self,
        lane: &mut Lane,
        which: (Epoch, u32),
        ok: bool,
    ) -> Result<(), Fault> {
        let Phase::Asking(a) = lane.out.phase else {
            return Ok(()); // answered twice, over a link and over the control channel
        };
        if !lane.out.asks(which) {
            return Ok(());
        }
        if !a.doubt {
            return Err(Fault::Peer("an answer to a switch that was not sent"));
        }
        if !ok {
            self.refuse(lane, a.epoch);
            return Ok(());
        }
        let o = &mut lane.out;
        o.phase = Phase::Up;
        o.epoch = a.epoch;
        o.tx_phase = tx::UP;
        o.want_down = !self.rail;
        o.rest_at(a.start);
        (o.cursor, o.high) = (a.start, a.start);
        o.landed = Cursor::default();
        o.flushed = false;
        o.takeover = false;
        lane.cdc |= o.finish;
        if let Some(p) = self.clients.get(&lane.client) {
            // Release: pairs with the Acquire in `TxState::refresh`.
            p.memory.proxy().cursors[lane.slot].store(a.start, Release);
        }
        self.show(lane);
        Ok(())
    }

    /// The part of a snapshot that concerns our sender: the state of the peer's reader.
    pub(super) fn on_reader(&mut self, lane: &mut Lane, c: &Cdc) -> Result<(), Fault> {
        let told = RxWord::new(c.rx_epoch, c.rx_flags);
        let known = lane.out.told.epoch();
        if told.epoch() != Epoch::NONE && !lane.ours(told.epoch()) {
            return Err(Fault::Peer("readiness of another use of the lane"));
        }
        let flags = rx::READY | rx::WANT_DOWN | rx::REVOKED | rx::CLOSED | rx::PAST;
        if told.flags().without(flags) != rx::NONE
            || known != Epoch::NONE && told.epoch().since(known) > u32::MAX / 2
        {
            return Err(Fault::Peer("an impossible readiness"));
        }
        if lane.out.phase == Phase::Up && told.epoch() != lane.out.epoch {
            // A reader becomes ready again only after our frame, so the application must have announced that it left.
            self.look_out(lane)?;
            if lane.out.phase == Phase::Up {
                return Err(Fault::Peer("ready anew in the middle of a ring"));
            }
        }
        lane.out.told = told;
        if lane.out.phase == Phase::Up {
            if c.cursor < lane.out.cursor || c.cursor > lane.out.high {
                return Err(Fault::Peer("an impossible cursor"));
            }
            if c.cursor != lane.out.cursor {
                lane.out.read_to(c.cursor);
                if lane.out.finish && c.cursor == lane.out.head {
                    self.event(Event::Asked);
                }
                if let Some(p) = self.clients.get(&lane.client) {
                    // Release: pairs with the Acquire in `TxState::refresh`; the reader's copy is done.
                    p.memory.proxy().cursors[lane.slot].store(c.cursor, Release);
                }
                self.publish(lane);
            }
        }
        self.show(lane);
        Ok(())
    }

    /// The peer's end can see everything up to `head`.
    pub(super) fn on_landed(
        &mut self,
        lane: &mut Lane,
        epoch: Epoch,
        head: Cursor,
    ) -> Result<(), Fault> {
        let o = &mut lane.out;
        if epoch != o.epoch {
            return Ok(()); // about a former epoch
        }
        if head > o.high {
            return Err(Fault::Peer("it has been shown more than was sent"));
        }
        o.landed = o.landed.max(head);
        o.took(head);
        if let Some(p) = self.clients.get(&lane.client) {
            // Release: pairs with the Acquire in `TxState::finish`.
            let w = &p.memory.proxy().rx[lane.slot].landed;
            w.store(Landed::at_cursor(lane.out.landed), Release);
        }
        self.publish(lane);
        Ok(())
    }

    /// The peer has placed a ring for us, or has no memory for it.
    pub(super) fn on_place(
        &mut self,
        lane: &mut Lane,
        number: u32,
        place: Option<Place>,
    ) -> Result<(), Fault> {
        let Some(ring) = lane.out.rings.iter_mut().find(|r| r.number == number) else {
            return Ok(()); // answered twice
        };
        match (place, ring.remote) {
            (Some(p), None) => ring.remote = Some(p),
            (Some(p), Some(known)) if p != known => {
                return Err(Fault::Peer("a ring in two places"))
            }
            (None, None) => {
                ring.said = false;
                lane.out.next_ring = self.now + self.config.retry_ns;
                match lane.out.phase {
                    Phase::Asking(a) if !a.doubt => {
                        lane.out.not_before = lane.out.next_ring;
                        self.refuse(lane, a.epoch);
                    }
                    Phase::Up => {
                        lane.out.want_down = true;
                        self.show(lane);
                    }
                    _ => {}
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The count of moves, and the index of the newest location.
fn newest(w: &TxWords) -> (u32, usize) {
    // Acquire: pairs with the Release in `TxState::move_to`.
    let moves = w.loc_seq.load(Acquire);
    (moves, loc_index(moves))
}
