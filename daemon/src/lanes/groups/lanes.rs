//! Lanes of a link group: places for connections, offered to both ends once the link group is set up.
//!
//! A slot is free for its next use only when both sides have said that they are done with it.

use super::{LinkGroup, LinkGroups, Out, Refused, Size, Slot, Use, Violation};
use crate::clients::ids::{ClientId, ConnRef};
use crate::clients::limits::Cgroup;
use lane::abi::Epoch;
use lane::num;
use lane::proto::msg::ToShim;
use std::sync::Arc;

impl LinkGroups {
    /// Makes a lane between two ends, and the link group if there is none. `tag` must be random. A lane
    /// to another node (the second end is a remote client's) waits for [`LinkGroups::release`]; its link group and
    /// slot are returned, and how often the slot has been used. `of`: the cgroup of each end, and how much memory its area gets
    /// at a time if the link group is new.
    pub fn connect(
        &mut self,
        ends: [ConnRef; 2],
        of: [(&Arc<Cgroup>, Size); 2],
        tag: u64,
        out: &mut Out,
    ) -> Result<(u64, u32, u32), Refused> {
        // The lower client is side 0, in every link group of these two.
        let swap = ends[0].client > ends[1].client;
        let (ends, of) = if swap {
            ([ends[1], ends[0]], [of[1], of[0]])
        } else {
            (ends, of)
        };
        let (cgroups, sizes) = (of.map(|o| o.0), of.map(|o| o.1));
        let given = |side: usize| if swap { 1 - side } else { side };
        let pair = (ends[0].client, ends[1].client);
        for side in 0..2 {
            if !cgroups[side].take_lane() {
                if side == 1 {
                    cgroups[0].give_lane();
                }
                return Err(Refused::Limit(given(side)));
            }
        }
        let found = self.by_pair.get(&pair).and_then(|ids| {
            ids.iter()
                .find_map(|id| Some((*id, self.groups.get(id)?.free_slot()?)))
        });
        let (id, slot) = match found {
            Some(f) => f,
            None if self.has_failed(pair) => {
                cgroups.iter().for_each(|g| g.give_lane());
                return Err(Refused::Memory);
            }
            None => match self.create(pair, (cgroups, sizes), out) {
                Ok(id) => (id, 0),
                Err(e) => {
                    cgroups.iter().for_each(|g| g.give_lane());
                    return Err(match e {
                        Refused::Limit(side) => Refused::Limit(given(side)),
                        e => e,
                    });
                }
            },
        };
        let Some(group) = self.groups.get_mut(&id) else {
            return Err(Refused::Memory);
        };
        if slot == group.slots.len() {
            group.slots.push(Slot::default());
        }
        group.slots[slot].now = Some(Use {
            ends,
            done: [false; 2],
            tag,
            offered: false,
            held: pair.1.is_remote(),
            told: [false; 2],
            taken: [false; 2],
            asked: [[None; 2]; 2],
            cookies: [0; 2],
            firsts: [None; 2],
        });
        for (side, e) in ends.iter().enumerate() {
            self.by_conn.insert(
                (e.client, e.conn, e.gen),
                (id, num::small(slot), num::tiny(side)),
            );
        }
        self.lanes += 1;
        if group.ready {
            offer(id, group, slot, out);
        }
        Ok((id, num::small(slot), group.slots[slot].uses))
    }

    /// The remote node has a lane for the connection of `who`, too. From here on both nodes count the uses of their
    /// slots alike, and both use this `tag`.
    pub fn release(
        &mut self,
        (id, slot): (u64, u32),
        who: ConnRef,
        (uses, tag): (u32, u64),
        out: &mut Out,
    ) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let Some(s) = group.slots.get_mut(slot as usize) else {
            return;
        };
        if let Some(u) = s.now.as_mut().filter(|u| u.held && u.ends[0] == who) {
            u.held = false;
            u.tag = tag;
            s.uses = s.uses.max(uses);
            if group.ready {
                offer(id, group, slot as usize, out);
            }
        }
    }

    /// Takes a lane back if it was not offered yet.
    pub fn abandon(&mut self, id: u64, slot: u32, out: &mut Out) {
        let unoffered = |l: &LinkGroup| {
            let now = l.slots.get(slot as usize).and_then(|s| s.now.as_ref());
            now.is_some_and(|u| !u.offered)
        };
        if self.groups.get(&id).is_some_and(unoffered) {
            self.cancel(id, slot as usize, out);
        }
    }

    /// Which lane of which link group an end has.
    pub fn lane_of(&self, who: ConnRef) -> Option<(u64, u32)> {
        let (id, slot, _) = self.by_conn.get(&(who.client, who.conn, who.gen))?;
        Some((*id, *slot))
    }

    /// A shim no longer uses a lane.
    pub fn lane_done(
        &mut self,
        from: ClientId,
        id: u64,
        side: u8,
        lane: u32,
        out: &mut Out,
    ) -> Result<(), Violation> {
        let Some(group) = Self::find(&mut self.groups, from, id, side)? else {
            return Ok(());
        };
        let Some(slot) = group.slots.get_mut(lane as usize) else {
            return Err(Violation("done with a lane that does not exist"));
        };
        let Some(u) = slot.now.as_mut().filter(|u| u.offered) else {
            return Ok(());
        };
        u.done[usize::from(side)] = true;
        let end = u.ends[usize::from(side)];
        self.by_conn.remove(&(end.client, end.conn, end.gen));
        self.end_use(id, lane, out);
        Ok(())
    }

    /// Frees a slot that neither end uses any more, nor this daemon.
    pub(super) fn end_use(&mut self, id: u64, lane: u32, out: &mut Out) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let over = |u: &Use| u.done == [true; 2] && u.taken == [false; 2];
        let slot = group.slots.get_mut(lane as usize);
        if let Some(slot) = slot.filter(|s| s.now.as_ref().is_some_and(over)) {
            slot.now = None;
            slot.uses += 1;
            self.lanes -= 1;
            group.sides.iter().for_each(|s| s.cgroup.give_lane());
            self.reap(id, out);
        }
    }

    /// One end does not take the lane that it was offered: as [`LinkGroups::lane_done`], and the other end is asked to
    /// give its lane back.
    pub fn lane_refused(
        &mut self,
        from: ClientId,
        id: u64,
        side: u8,
        lane: u32,
        out: &mut Out,
    ) -> Result<(), Violation> {
        self.lane_done(from, id, side, lane, out)?;
        // (The side of an unknown link group was not checked.)
        self.lane_gone(id, lane, 1u8.saturating_sub(side), out);
        Ok(())
    }

    /// A connection was registered that has a lane already: offers it again (the offer may have
    /// been lost with a control connection). `false`: it has none.
    pub fn offer_again(&mut self, who: ConnRef, out: &mut Out) -> bool {
        let Some(&(id, slot, side)) = self.by_conn.get(&(who.client, who.conn, who.gen)) else {
            return false;
        };
        let now = |l: &LinkGroup| Some(l.slots.get(slot as usize)?.now.as_ref()?.offered);
        match self.groups.get(&id).and_then(now) {
            None => false,
            // It will be offered when both ends can have it.
            Some(false) => true,
            Some(true) if self.is_left(id, slot, side) => {
                // The other end has given it back, and the message about that was lost.
                let _ = self.lane_done(who.client, id, side, slot, out);
                false
            }
            Some(true) => {
                let l = self.groups.get(&id);
                if let Some(m) = l.and_then(|l| offer_msg(id, l, slot as usize, side.into())) {
                    out.send(who.client, m, vec![]);
                }
                true
            }
        }
    }

    /// Has the other end of this lane given it back?
    fn is_left(&self, id: u64, slot: u32, side: u8) -> bool {
        let slot = |l: &LinkGroup| Some(l.slots.get(slot as usize)?.now.as_ref()?.done);
        let done = self.groups.get(&id).and_then(slot);
        done.is_some_and(|d| d[1 - usize::from(side)])
    }

    /// A process has given up a connection whose lane it has not taken yet: the other end is told.
    pub fn forget(&mut self, who: ConnRef, out: &mut Out) {
        let Some(&(id, slot, side)) = self.by_conn.get(&(who.client, who.conn, who.gen)) else {
            return;
        };
        out.gave_up = Some(who);
        self.abandon(id, slot, out);
        // Already offered: the process refuses it when it reads the offer, which may take an hour, so tell the
        // other end now.
        if self.by_conn.contains_key(&(who.client, who.conn, who.gen)) {
            self.lane_gone(id, slot, 1 - side, out);
        }
    }

    /// Asks an end within the node to give its lane back, once.
    fn lane_gone(&mut self, id: u64, slot: u32, side: u8, out: &mut Out) {
        let at = usize::from(side);
        let now = |l| Self::slot(l, slot);
        let Some(u) = self.groups.get_mut(&id).and_then(now) else {
            return;
        };
        let e = u.ends[at];
        if u.done[at] || e.client.is_remote() || std::mem::replace(&mut u.told[at], true) {
            return;
        }
        let msg = ToShim::LaneGone {
            group: id,
            side,
            lane: slot,
            conn: e.conn,
            gen: e.gen,
        };
        out.send(e.client, msg, vec![]);
    }

    /// The present use of a slot.
    pub(super) fn slot(l: &mut LinkGroup, slot: u32) -> Option<&mut Use> {
        l.slots.get_mut(slot as usize)?.now.as_mut()
    }

    /// Takes back a lane that was not offered yet.
    pub(super) fn cancel(&mut self, id: u64, slot: usize, out: &mut Out) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let Some(u) = group.slots.get_mut(slot).and_then(|s| s.now.take()) else {
            return;
        };
        group.sides.iter().for_each(|s| s.cgroup.give_lane());
        self.lanes -= 1;
        for e in u.ends {
            self.by_conn.remove(&(e.client, e.conn, e.gen));
        }
        out.failed.push(u.ends);
    }
}

pub(super) fn offer(id: u64, group: &mut LinkGroup, slot: usize, out: &mut Out) {
    let Some(u) = group.slots.get_mut(slot).and_then(|s| s.now.as_mut()) else {
        return;
    };
    if u.held {
        return out.ready.push(u.ends[0]);
    }
    u.offered = true;
    for side in 0..2 {
        if group.sides[side].client.is_remote() {
            continue; // it knows
        }
        if let Some(msg) = offer_msg(id, group, slot, side) {
            out.send(group.sides[side].client, msg, vec![]);
        }
    }
}

fn offer_msg(id: u64, group: &LinkGroup, slot: usize, side: usize) -> Option<ToShim> {
    let s = group.slots.get(slot)?;
    let u = s.now.as_ref()?;
    Some(ToShim::Offer {
        group: id,
        side: num::tiny(side),
        lane: num::small(slot),
        conn: u.ends[side].conn,
        gen: u.ends[side].gen,
        epoch: Epoch::base(s.uses),
        tag: u.tag,
    })
}
