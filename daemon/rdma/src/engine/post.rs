//! A lane's turn: reads its words, binds it to a link, and posts what is due.
//!
//! A turn posts at most one piece of data and the messages that have to precede it; a lane with more data goes to the
//! end of the queue. Writes and the snapshot that announces them go to one link in this order, so that the peer
//! learns of bytes only when they have arrived.

use super::api::{Control, Event};
use super::lanes::Lane;
use super::link::{Link, State};
use super::out::{OutRing, Phase};
use super::request::{Load, What, Write};
use super::{Host, LaneId, LinkId, Pair};
use crate::verbs::{MemoryRegion, Provider};
use crate::wire::{flag, Body, Cdc};
use lane::abi::Cursor;
use lane::num;
use std::cmp::Ordering;

/// A lane may post this many times its budget while no other lane waits for its turn.
const ALONE: u64 = 4;

impl<P: Provider> Pair<P> {
    /// Handles one lane; returns whether anything was posted.
    pub(super) fn turn(&mut self, id: LaneId, host: &mut dyn Host) -> bool {
        let Some(mut lane) = self.lanes.take(id) else {
            return false;
        };
        lane.queued = false;
        if lane.works() && lane.peer.is_some() {
            let looked = self
                .look_in(&mut lane)
                .and_then(|()| self.look_out(&mut lane));
            if let Err(fault) = looked {
                self.fail_lane(id, &mut lane, fault);
            }
        }
        if lane.works() {
            self.query(id, &mut lane);
        }
        let sent = self.speak(id, &mut lane);
        if lane.works() {
            self.flushed(id, &mut lane);
        }
        if lane.closing.is_some() && self.close_step(id, &mut lane, host) {
            return true;
        }
        let unread = lane.inn.unread() && lane.works();
        // A turn ends with one piece of data; everything else that is due precedes it.
        let more = sent && lane.out.sends() && lane.out.posted < lane.out.head;
        self.lanes.put_back(id, lane);
        // The application announces its cursor only now and then, so while it reads, we look at it ourselves.
        if more || unread && self.busy_look(id) {
            self.wake(id);
        }
        sent
    }

    /// Has the application's cursor moved since the last look?
    fn busy_look(&mut self, id: LaneId) -> bool {
        let Some(lane) = self.lanes.get_mut(id) else {
            return false;
        };
        let (client, slot, cursor) = (lane.client, lane.slot, lane.inn.cursor);
        self.clients.get(&client).is_some_and(|p| {
            let now = &p.memory.app().cursors[slot];
            now.load(std::sync::atomic::Ordering::Relaxed) != cursor
        })
    }

    /// A switch may have reached the peer, and no link is left over which to ask again: asks over the control
    /// channel.
    fn query(&mut self, id: LaneId, lane: &mut Lane) {
        let Phase::Asking(a) = &mut lane.out.phase else {
            return;
        };
        let Some(peer) = lane.peer else {
            return;
        };
        // (A lane that the peer is removing accepts no switch any more.)
        let unheard = !self.rail || lane.peer_closed;
        if a.doubt && unheard && self.control && self.now >= a.next_query {
            a.next_query = self.now + self.config.retry_ns;
            let query = Control::SwitchQuery {
                token: peer,
                from: id,
                epoch: a.epoch.get(),
                attempt: a.attempt,
            };
            self.event(Event::Control(query));
        }
    }

    /// Finds a link for the lane, or a better one.
    fn bind(&mut self, lane: &mut Lane) -> Option<LinkId> {
        let active = |l: &&Link<P>| l.state == State::Active;
        if let Some(no) = lane.link {
            let Some(now) = self.links.get(&no) else {
                return None; // the link is dead, but the peer has not confirmed that yet
            };
            let usable = self.usable(now, lane);
            let fewer = |l: &Link<P>| match self.rank(lane, l.rail).cmp(&self.rank(lane, now.rail))
            {
                Ordering::Less => true,
                Ordering::Equal => l.lanes + 2 <= now.lanes,
                Ordering::Greater => false,
            };
            let better = |(n, l): &(&LinkId, &Link<P>)| {
                **n != no && active(l) && self.usable(l, lane) && (!usable || fewer(l))
            };
            if !self.links.iter().any(|l| better(&l)) {
                return Some(no);
            }
            if lane.under_way > 0 {
                self.await_done(lane);
                return None; // post nothing new here; the lane moves when its requests are done
            }
            self.unbind(lane);
            // Requests to the peer are repeated on the new link; it answers a repeated one in the same way.
            let validate = lane.validate;
            lane.moved();
            lane.validate = validate;
        }
        let rank = |(no, l): (&LinkId, &Link<P>)| {
            (!self.usable(l, lane), self.rank(lane, l.rail), l.lanes, *no)
        };
        let (.., no) = self
            .links
            .iter()
            .filter(|(_, l)| active(l))
            .map(rank)
            .min()?;
        lane.link = Some(no);
        let link = self.links.get_mut(&no)?;
        link.lanes += 1;
        Some(no)
    }

    pub(super) fn unbind(&mut self, lane: &mut Lane) {
        if let Some(link) = lane.link.take().and_then(|no| self.links.get_mut(&no)) {
            link.lanes = link.lanes.saturating_sub(1);
        }
    }

    /// Can this link carry the lane's bytes?
    fn usable(&self, link: &Link<P>, lane: &Lane) -> bool {
        lane.out.rings.iter().all(|r| {
            let local = self
                .local(lane, r)
                .is_some_and(|c| c.mrs.contains_key(&link.rail));
            let key = |p: crate::wire::Place| matches!(link.keys.get(&p.region), Some(Some(_)));
            local && r.remote.is_none_or(key)
        })
    }

    fn local(&self, lane: &Lane, ring: &OutRing) -> Option<&super::chunks::Chunk<P>> {
        let client = self.clients.get(&lane.client)?;
        self.chunks.get(client.app_chunks.get(&ring.loc.chunk)?)
    }

    /// Posts what is due on the lane's link. Returns whether anything was posted.
    fn speak(&mut self, id: LaneId, lane: &mut Lane) -> bool {
        let Some(peer) = lane.peer else {
            return false;
        };
        let mute = lane.closing.as_ref().is_some_and(|c| !c.tells);
        if lane.peer_closed || mute && !lane.abort {
            return false;
        }
        let mut said = false;
        loop {
            let Some(no) = self.bind(lane) else {
                return said;
            };
            let Some((body, what, load)) = self.due(id, lane, no) else {
                self.await_room(id, lane, no);
                return said;
            };
            let Some(link) = self.links.get_mut(&no) else {
                return said;
            };
            if !link.open() {
                if !lane.queued {
                    lane.queued = true;
                    link.waiters.push_back(id);
                }
                return said;
            }
            let seq = lane.next_seq();
            if link.post(&load, peer, seq, body, what, id).is_err() {
                self.fail_link(no, "a request could not be posted");
                return said;
            }
            lane.under_way += num::small(load.writes.len()) + 1;
            self.posted(lane, &body);
            said = true;
            if matches!(body, Body::Cdc(_)) {
                self.await_room(id, lane, no);
                return said;
            }
        }
    }

    /// A lane with bytes for which its link has no room gets its turn when there is room. If it waits for its own
    /// requests to be done, it has to be notified of that.
    fn await_room(&mut self, id: LaneId, lane: &mut Lane, no: LinkId) {
        let Some(link) = self.links.get_mut(&no) else {
            return;
        };
        let o = &lane.out;
        if !link.has_room() && o.sends() && o.posted < o.head && !lane.queued {
            lane.queued = true;
            link.waiters.push_back(id);
        }
        let new_ring = o.rings.iter().any(|r| r.remote.is_none() && !r.said);
        if new_ring && lane.under_way > 0 {
            self.await_done(lane);
        }
    }

    /// A lane waits for its own requests to be done, and has to be notified.
    pub(super) fn await_done(&mut self, lane: &Lane) {
        if let Some(link) = lane.link.and_then(|no| self.links.get_mut(&no)) {
            link.await_sent();
        }
    }

    /// The next message of a lane, and the writes that precede it.
    fn due(&mut self, id: LaneId, lane: &mut Lane, no: LinkId) -> Option<(Body, What, Load)> {
        let lane_message = What::Lane { lane: id };
        if lane.abort || lane.closing.as_ref().is_some_and(|c| c.tells) {
            return Some((self.snapshot(lane), lane_message, Load::default()));
        }
        if !lane.works() {
            return None;
        }
        if let Some((moves, place)) = lane.inn.ring_reply {
            return Some((
                Body::RingReply { moves, place },
                lane_message,
                Load::default(),
            ));
        }
        if let Some((epoch, head)) = lane.inn.landed_reply {
            return Some((Body::Landed { epoch, head }, lane_message, Load::default()));
        }
        if let Some((epoch, attempt, ok)) = lane.inn.switch_reply {
            let body = Body::SwitchReply { epoch, attempt, ok };
            return Some((body, lane_message, Load::default()));
        }
        if let Some(body) = self.ring_request(lane) {
            return Some((body, lane_message, Load::default()));
        }
        if let Phase::Asking(a) = &mut lane.out.phase {
            let placed = lane.out.rings.iter().all(|r| r.remote.is_some());
            if !a.said && placed {
                let body = Body::Switch {
                    epoch: a.epoch,
                    attempt: a.attempt,
                    tcp_pos: a.tcp_pos,
                    start: a.start,
                };
                return Some((body, lane_message, Load::default()));
            }
        }
        let mut load = Load::default();
        match self.data(lane, no) {
            Some(data) => load.data = data,
            None => load.writes = self.writes(lane, no),
        }
        let bytes = load.bytes();
        if bytes == 0 && !lane.cdc {
            return None;
        }
        if !load.data.is_empty() {
            lane.out.inlined(lane.out.posted, bytes);
            lane.starved = None;
        }
        lane.out.announce(lane.out.posted + bytes);
        let what = What::Cdc {
            lane: id,
            head: lane.out.announced,
            epoch: lane.out.epoch,
            inlined: num::small(load.data.len()),
        };
        Some((self.snapshot(lane), what, load))
    }

    fn ring_request(&mut self, lane: &Lane) -> Option<Body> {
        let o = &lane.out;
        let needed = matches!(o.phase, Phase::Asking(_)) || o.sends();
        let i = o.rings.iter().position(|r| r.remote.is_none())?;
        let r = &o.rings[i];
        // The first ring of an epoch replaces all former ones, so none of the lane's requests may be in flight.
        let first = i == 0 && lane.under_way > 0;
        if !needed || r.said || first || !o.may_ring(i) || self.now < o.next_ring {
            return None;
        }
        Some(Body::Ring {
            moves: r.number,
            log2: num::low8(r.loc.log2.into()),
            from: r.from,
        })
    }

    /// The rest of the ring's bytes, if they are few enough to be sent in the message of the snapshot.
    fn data(&self, lane: &Lane, no: LinkId) -> Option<Vec<u8>> {
        let (o, link) = (&lane.out, self.links.get(&no)?);
        let (at, n) = (o.posted, o.head.saturating_since(o.posted));
        if n == 0 || n > link.data_max() || !link.open() || !o.sends() {
            return None;
        }
        let ring = o.rings.iter().rfind(|r| r.from <= at)?;
        if ring.remote.is_none() || o.rings.iter().any(|r| r.from > at && r.from <= o.head) {
            return None;
        }
        let memory = &self.local(lane, ring)?.memory;
        let [a, b] = ring.loc.pieces(at, num::size(n))?;
        let mut data = vec![0; num::size(n)];
        let (first, second) = data.split_at_mut(a.len());
        let read = memory.read(a.start, first) && memory.read(b.start, second);
        read.then_some(data)
    }

    /// The next piece of the ring's bytes, as one or two writes.
    fn writes(&mut self, lane: &mut Lane, no: LinkId) -> Vec<Write> {
        let mut writes = Vec::new();
        let Some(link) = self.links.get(&no) else {
            return writes;
        };
        if !link.open() || !lane.out.sends() {
            return writes;
        }
        let mut at = lane.out.posted;
        // A lane that is alone gets larger pieces: each piece costs both ends a message and a wake-up.
        let share = match self.queue.is_empty() {
            true => ALONE * u64::from(self.config.budget),
            false => u64::from(self.config.budget),
        };
        let budget = share.min(link.window());
        let end = lane.out.head.min(at + budget);
        while at < end && writes.len() < 2 {
            let Some((write, n)) = self.write_at(lane, link, at, end) else {
                if writes.is_empty() {
                    self.starve(lane);
                }
                return writes;
            };
            writes.push(write);
            at += n;
        }
        lane.starved = None;
        writes
    }

    fn write_at(
        &self,
        lane: &Lane,
        link: &Link<P>,
        at: Cursor,
        end: Cursor,
    ) -> Option<(Write, u64)> {
        let rings = &lane.out.rings;
        let i = rings.iter().rposition(|r| r.from <= at)?;
        let ring = &rings[i];
        let end = rings.get(i + 1).map_or(end, |next| end.min(next.from));
        let offset = ring.loc.offset(at);
        let n = (end - at).min(ring.size() - offset);
        let place = ring.remote?;
        let key = (*link.keys.get(&place.region)?)?;
        let inside = place.offset.checked_add(ring.size())? <= key.len;
        let mr = self.local(lane, ring)?.mrs.get(&link.rail)?;
        let local = mr.sge(
            u64::from(ring.loc.page) * 4096 + offset,
            u32::try_from(n).ok()?,
        )?;
        let remote = key.addr.checked_add(place.offset)?.checked_add(offset)?;
        let write = Write {
            local,
            remote,
            rkey: key.rkey,
            region: place.region,
        };
        inside.then_some((write, n))
    }

    /// There are bytes to send, but no link has both a key and a registration for them: after a while the lane has to
    /// go down.
    fn starve(&mut self, lane: &mut Lane) {
        let since = *lane.starved.get_or_insert(self.now);
        if self.now >= since + self.config.quiet_ns && !lane.out.want_down {
            lane.out.want_down = true;
            self.show(lane);
        }
    }

    fn snapshot(&self, lane: &Lane) -> Body {
        let (o, i) = (&lane.out, &lane.inn);
        let mut flags = 0;
        // (Whoever finishes waits until all is read, for a while.)
        let half = match o.finish {
            true => 0,
            false => o.rings.back().map_or(u64::MAX, |r| r.size() / 2),
        };
        if o.sends() && o.announced.saturating_since(o.cursor) > half {
            flags |= flag::WANT_SPACE;
        }
        if o.finish && o.sends() {
            flags |= flag::WANT_LANDED;
        }
        if lane.validate || o.repeats() {
            flags |= flag::VALIDATE;
        }
        if lane.abort {
            flags |= flag::ABORT;
        }
        Body::Cdc(Cdc {
            head: o.announced,
            cursor: i.cursor,
            tx_epoch: o.epoch,
            tx_phase: o.tx_phase,
            rx_epoch: i.word.epoch(),
            rx_flags: i.word.flags(),
            flags,
            moves: num::low8(o.ring_of(o.announced).into()),
            acked_moves: i.number,
        })
    }

    /// Updates the lane for a message that was just posted.
    fn posted(&mut self, lane: &mut Lane, body: &Body) {
        match body {
            Body::RingReply { .. } => {
                lane.inn.ring_replied = lane.inn.ring_reply.take();
            }
            Body::Landed { .. } => lane.inn.landed_replied = lane.inn.landed_reply.take(),
            Body::SwitchReply { .. } => lane.inn.switch_reply = None,
            Body::Ring { moves, .. } => {
                let ring = lane.out.rings.iter_mut().find(|r| r.number == *moves);
                if let Some(r) = ring {
                    r.said = true;
                }
            }
            Body::Switch { .. } => {
                if let Phase::Asking(a) = &mut lane.out.phase {
                    a.said = true;
                    a.doubt = true;
                }
            }
            Body::Cdc(c) => {
                lane.inn.told = c.cursor;
                lane.cdc = false;
                lane.validate = false;
                lane.abort = false;
                if let Some(c) = &mut lane.closing {
                    c.tells = false;
                }
            }
            _ => {}
        }
    }

    /// Reports once that everything has arrived.
    fn flushed(&mut self, id: LaneId, lane: &mut Lane) {
        let o = &mut lane.out;
        let there = match o.phase {
            Phase::Asking(_) => false,
            Phase::Up | Phase::Left(true) => o.is_there(),
            _ => true,
        };
        if o.finish && !o.flushed && there {
            o.flushed = true;
            let head = o.head;
            self.event(Event::Flushed { lane: id, head });
        }
    }
}
