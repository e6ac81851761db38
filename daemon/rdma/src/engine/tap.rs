//! Reading along on what arrives for a lane.
//!
//! A place of the ring may be written again as soon as its bytes were read, long before a message says so. So bytes are
//! certain only before the application is shown them, and they are copied then, by whoever shows them: a lane that
//! somebody reads along on pays for one more copy, and waits for nobody.

use super::api::Tap;
use super::lanes::Lane;
use super::{LaneId, Pair};
use crate::verbs::Provider;
use lane::abi::{Cursor, Loc};
use lane::num;
use std::sync::atomic::Ordering::Relaxed;

impl<P: Provider> Pair<P> {
    /// From now on, this one is told what arrives for a lane, until it wants nothing more. `false`: there is no such
    /// lane.
    pub fn tap(&mut self, id: LaneId, mut tap: Box<dyn Tap>) -> bool {
        let Some(lane) = self.lanes.get_mut(id) else {
            return false;
        };
        let i = &mut lane.inn;
        if i.up {
            if let Some(p) = self.clients.get(&lane.client) {
                // (Our own word, of the switch that stands.)
                let tcp_pos = p.memory.proxy().tx[lane.slot].up_tcp_pos.load(Relaxed);
                tap.join(i.epoch, tcp_pos, i.start);
            }
        }
        i.tap = Some(tap);
        true
    }

    /// The application will be shown this head next.
    pub(super) fn tell_tap(&self, lane: &mut Lane, head: Cursor) {
        let Some(mut tap) = lane.inn.tap.take() else {
            return;
        };
        let mut at = lane.inn.shown;
        while at < head {
            let Some((loc, end)) = lane.inn.ring_of(at, head) else {
                break;
            };
            let Some(room) = tap.room() else {
                return;
            };
            let len = end.since(at);
            let mut bytes = vec![0; room.min(num::size(len))];
            if !self.copy_out(lane, loc, at, &mut bytes) {
                bytes.clear();
            }
            let more = len - bytes.len() as u64;
            tap.arrived(at, bytes, more);
            at = end;
        }
        lane.inn.tap = Some(tap);
    }

    fn copy_out(&self, lane: &Lane, loc: Loc, at: Cursor, to: &mut [u8]) -> bool {
        let client = self.clients.get(&lane.client);
        let region = client.and_then(|p| p.own_chunks.get(&loc.chunk));
        let Some(chunk) = region.and_then(|r| self.chunks.get(r)) else {
            return false;
        };
        loc.pieces(at, to.len()).is_some_and(|[a, b]| {
            let (first, second) = to.split_at_mut(a.len());
            chunk.memory.read(a.start, first) && chunk.memory.read(b.start, second)
        })
    }
}
