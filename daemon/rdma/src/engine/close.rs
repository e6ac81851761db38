//! How a lane ends.
//!
//! Each end tells the other over the control channel that it no longer writes to the other's rings, once it has
//! nothing in flight, and repeats that until it is answered. When both have done so, the lane is gone and its rings
//! are free; until then their memory is not reused.

use super::api::{Control, Event};
use super::lanes::{Closing, Lane};
use super::out::{Out, Phase};
use super::{Host, LaneId, Pair};
use crate::verbs::Provider;
use lane::abi::{rx, tx, Cursor, Epoch, TxPhase};
use std::sync::atomic::Ordering::Acquire;

impl<P: Provider> Pair<P> {
    /// The application will send no more (it has shut down, closed or ended): continues until everything is in the
    /// peer's ring, then reports [`Event::Flushed`].
    pub fn finish(&mut self, id: LaneId) {
        let Some(lane) = self.lanes.get_mut(id) else {
            return;
        };
        if !std::mem::replace(&mut lane.out.finish, true) {
            lane.cdc = true; // the snapshot asks the peer to report it
            self.wake(id);
        }
    }

    /// The application of this end is gone: its peer is told that nobody reads any more. Has it left bytes unread on its
    /// ring, which its kernel does not know?
    pub fn reader_gone(&mut self, id: LaneId) -> bool {
        let Some(mut lane) = self.lanes.take(id) else {
            return false;
        };
        lane.inn.gone = true;
        // (Who leaves its lane has revoked: then what is unread comes on TCP. `inn.word` does not say that of all.)
        let leaves = self.clients.get(&lane.client).is_some_and(|p| {
            let word = p.memory.app().rx[lane.slot].word.load(Acquire);
            word.has(rx::REVOKED)
        });
        // (Nor does what its sender has begun to put on TCP count.)
        let here = self.look_in(&mut lane).is_ok() && lane.inn.tx_phase == tx::UP && !leaves;
        let unread = here && lane.inn.unread();
        self.lanes.put_back(id, lane);
        self.wake(id);
        unread
    }

    /// The caller takes the sending direction down itself (takeover). If it is up, returns its epoch and the cursor
    /// up to which the peer's reader is known to have consumed. The engine sends no more bytes of it. Nothing happens
    /// if the direction is in another epoch by now: its end has taken it back and gone up again.
    pub fn take_down(&mut self, id: LaneId, epoch: Epoch) -> Option<(Epoch, Cursor)> {
        let lane = self.lanes.get_mut(id).filter(|l| l.out.epoch == epoch)?;
        if !lane.out.take_down() {
            return None;
        }
        lane.cdc = true;
        let found = (lane.out.epoch, lane.out.cursor);
        self.wake(id);
        Some(found)
    }

    /// After [`Pair::take_down`]: what was on the ring is on TCP, with a frame (`DOWN`) or without (`RESUMED`).
    pub fn is_down(&mut self, id: LaneId, epoch: Epoch, phase: TxPhase) {
        let ours = |o: &Out| o.epoch == epoch && o.takeover && o.tx_phase <= tx::DOWNING;
        if let Some(lane) = self.lanes.get_mut(id).filter(|l| ours(&l.out)) {
            lane.out.tx_phase = phase;
            lane.cdc = true;
        }
        self.wake(id);
    }

    /// While `shut` is set, the application is not invited to switch up.
    pub fn gate(&mut self, id: LaneId, shut: bool) {
        if let Some(lane) = self.lanes.get_mut(id) {
            lane.out.gated = shut;
        }
        self.wake(id);
    }

    /// From now on switches to this lane are refused without asking the application; those already accepted stand.
    pub fn refuse_switches(&mut self, id: LaneId) {
        if let Some(lane) = self.lanes.get_mut(id) {
            lane.inn.refuses = true;
        }
    }

    /// Is the sending direction on the ring?
    pub fn is_up(&mut self, id: LaneId) -> bool {
        self.lanes
            .get_mut(id)
            .is_some_and(|l| matches!(l.out.phase, Phase::Up | Phase::Left(true)))
    }

    /// The link over which the lane goes, if any.
    pub fn link_of(&self, id: LaneId) -> Option<super::LinkId> {
        self.lanes.get(id)?.link
    }

    /// The caller is about to drop the pair. Every application is asked to go down. Those that wait for a switch are
    /// refused, and so are those that might ask for one now, since nobody would answer. (If the peer has accepted a switch,
    /// its receiver finds out: `RxState::orphan`.) Events can still be taken.
    pub fn abandon(&mut self, host: &mut dyn Host) {
        self.rail = false;
        let mut all = Vec::new();
        self.lanes.each(|id, _| all.push(id));
        for id in all {
            let Some(mut lane) = self.lanes.take(id) else {
                continue;
            };
            let (told, flags) = (lane.out.told.epoch(), lane.out.told.flags());
            match lane.out.phase {
                Phase::Asking(a) => self.refuse(&mut lane, a.epoch),
                Phase::Up => {}
                _ if flags.has(rx::READY) && told != lane.out.epoch => {
                    self.refuse(&mut lane, told);
                }
                _ => {}
            }
            lane.out.want_down = true;
            self.show(&mut lane);
            self.lanes.put_back(id, lane);
        }
        self.publish_all(host);
    }

    /// The connection is over. [`Event::Removed`] follows when the peer has removed the lane, too.
    pub fn remove(&mut self, id: LaneId) {
        let Some(mut lane) = self.lanes.take(id) else {
            return;
        };
        if lane.closing.is_none() {
            self.look_down(&mut lane);
            lane.closing = Some(Closing {
                tells: lane.cdc && lane.fault.is_none(),
                ..Closing::default()
            });
        }
        self.lanes.put_back(id, lane);
        self.wake(id);
    }

    /// Continues a removal; `true`: the lane is gone.
    pub(super) fn close_step(&mut self, id: LaneId, lane: &mut Lane, host: &mut dyn Host) -> bool {
        let Some(closing) = &mut lane.closing else {
            return false;
        };
        if self.stuck {
            return false;
        }
        // A failed pair has no queue pairs through which anything could be written.
        if let (Some(peer), false) = (lane.peer, self.failed) {
            let tells = closing.tells && self.rail && !lane.peer_closed;
            if lane.under_way > 0 || tells {
                self.await_done(lane);
                return false;
            }
            if !closing.acked && self.control && self.now >= closing.next_try {
                closing.next_try = self.now + self.config.retry_ns;
                self.events.push_back(Event::Control(Control::Close {
                    token: peer,
                    from: id,
                }));
            }
            if !closing.acked || !lane.peer_closed {
                return false;
            }
        }
        for r in lane.inn.rings.drain(..) {
            host.free(id, r.loc);
        }
        self.unbind(lane);
        if let Some(p) = self.clients.get_mut(&lane.client) {
            p.leave(id, lane.slot);
        }
        self.lanes.remove(id);
        self.event(Event::Removed { lane: id });
        self.lane_timer = 0;
        true
    }

    /// The peer no longer writes to the rings of this lane.
    pub(super) fn on_close(&mut self, token: LaneId, from: u32) {
        if let Some(lane) = self.lanes.get_mut(token) {
            if lane.peer.is_some_and(|p| p != from) {
                return;
            }
            if !lane.peer_closed {
                lane.peer_closed = true;
                lane.out.reader_closed();
                let used = lane.out.used() || lane.inn.used();
                self.event(Event::PeerClosed { lane: token, used });
                self.wake(token);
            }
        }
        self.event(Event::Control(Control::CloseAck { token: from }));
    }

    pub(super) fn on_close_ack(&mut self, token: LaneId) {
        if let Some(c) = self.lanes.get_mut(token).and_then(|l| l.closing.as_mut()) {
            c.acked = true;
        }
        self.wake(token);
    }
}
