//! Lanes within the node of which one end leaves while the other one does nothing: what a helper needs to bring the
//! other one's ring to TCP.

use super::{LinkGroups, Out, Violation};
use crate::clients::ids::{ClientId, ConnRef};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use underpass_rdma::verbs::Mapping;

/// What one end of a lane sends.
#[derive(Clone, Copy)]
pub(crate) struct Direction {
    /// Link group and slot, and how often the slot was used before.
    pub at: (u64, u32),
    pub uses: u32,
    /// The end that sends, and its side.
    pub who: ConnRef,
    pub side: usize,
}

/// A direction to be taken over.
pub(crate) struct Found {
    pub direction: Direction,
    /// Its area: the control words, which may be written, and the files with their sizes in bytes.
    pub words: Arc<Mapping>,
    pub files: Vec<(Arc<OwnedFd>, u64)>,
    /// The receiver's first file.
    pub peer: Arc<OwnedFd>,
    pub tag: u64,
    /// The cookie of the end's socket.
    pub cookie: u64,
    /// Has the end asked for it itself?
    pub own: bool,
}

/// Shortest time between two takeovers of a direction: each one costs its end a message.
pub(super) const AGAIN: Duration = Duration::from_millis(50);

impl LinkGroups {
    /// Notes what is known of an end since it was paired: the cookie of its socket, and the sequence number of its first
    /// byte.
    pub(crate) fn proven(
        &mut self,
        at: (u64, u32),
        who: ConnRef,
        (cookie, first): (u64, Option<u32>),
    ) {
        let group = self.groups.get_mut(&at.0);
        let Some(u) = group.and_then(|g| Self::slot(g, at.1)) else {
            return;
        };
        if let Some(side) = u.ends.iter().position(|e| *e == who) {
            u.cookies[side] = cookie;
            u.firsts[side] = first;
        }
    }

    /// The client at this side of a link group.
    pub(crate) fn owner(&self, id: u64, side: u8) -> Option<ClientId> {
        let group = self.groups.get(&id)?;
        Some(group.sides.get(usize::from(side))?.client)
    }

    /// An end leaves, and asks that what the end at side `sender` sends be taken over. `None`: that is under way, or
    /// there is nothing to take over.
    pub(crate) fn take_over(
        &mut self,
        from: ClientId,
        (id, lane): (u64, u32),
        (side, sender): (u8, u8),
    ) -> Result<Option<Found>, Violation> {
        let now = self.clock.now();
        let Some(group) = Self::find(&mut self.groups, from, id, side)? else {
            return Ok(None);
        };
        if group.is_remote() {
            return Err(Violation("a takeover across nodes"));
        }
        let (asker, sender) = (usize::from(side), usize::from(sender));
        if sender > 1 {
            return Err(Violation("a takeover of a side that does not exist"));
        }
        let (sides, slot) = (&group.sides, group.slots.get_mut(lane as usize));
        let Some(slot) = slot else {
            return Err(Violation("a takeover on a lane that does not exist"));
        };
        let uses = slot.uses;
        let free = |u: &&mut super::Use| {
            let soon = u.asked[asker][sender].is_some_and(|t| now.saturating_sub(t) < AGAIN);
            let idle = !u.taken[sender] && !soon && u.cookies[sender] != 0;
            u.offered && !u.done[sender] && idle
        };
        let (Some(u), Some(words)) = (slot.now.as_mut().filter(free), &sides[sender].words) else {
            return Ok(None);
        };
        u.taken[sender] = true;
        u.asked[asker][sender] = Some(now);
        let files = sides[sender].chunks().map(|c| (c.fd.clone(), c.bytes));
        Ok(Some(Found {
            direction: Direction {
                at: (id, lane),
                uses,
                who: u.ends[sender],
                side: sender,
            },
            words: words.clone(),
            files: files.collect(),
            peer: sides[1 - sender].first.fd.clone(),
            tag: u.tag,
            cookie: u.cookies[sender],
            own: asker == sender,
        }))
    }

    /// A takeover is over, or came to nothing: the slot may be free now.
    pub(crate) fn taken_over(&mut self, direction: Direction, out: &mut Out) {
        let Direction { at, uses, side, .. } = direction;
        let slot = |g: &mut super::LinkGroup| {
            let slot = g.slots.get_mut(at.1 as usize)?;
            slot.now.as_mut().filter(|_| slot.uses == uses)?.taken[side] = false;
            Some(())
        };
        if self.groups.get_mut(&at.0).and_then(slot).is_some() {
            self.end_use(at.0, at.1, out);
        }
    }
}
