//! Lanes as a capture sees them.

use super::LinkGroups;
use crate::clients::ids::ConnRef;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The memory of a lane, to be read only. (An area has the rings of other connections between the same two clients as
/// well: the files never leave this daemon.)
#[derive(Clone)]
pub(crate) struct LaneFiles {
    /// Link group and slot, and how often the slot was used before.
    pub at: (u64, u32),
    pub uses: u32,
    /// Is the second end on another node? What it sends arrives in the second area, which is this daemon's.
    pub remote: bool,
    /// Both ends, by side.
    pub ends: [ConnRef; 2],
    /// Sequence number of the first byte that each end sends.
    pub firsts: [Option<u32>; 2],
    /// The files of each area, with their sizes in bytes.
    pub areas: [Vec<(Arc<OwnedFd>, u64)>; 2],
}

impl LaneFiles {
    /// Do both show the same use of the same slot?
    pub(crate) fn is_same_lane(&self, other: &LaneFiles) -> bool {
        (self.at, self.uses) == (other.at, other.uses)
    }
}

impl LinkGroups {
    /// The lane of an end, once it was offered.
    pub(crate) fn files(&self, who: ConnRef) -> Option<LaneFiles> {
        let (id, slot, _) = self.by_conn.get(&(who.client, who.conn, who.gen))?;
        let group = self.groups.get(id)?;
        let slot_of = group.slots.get(*slot as usize)?;
        let now = slot_of.now.as_ref().filter(|u| u.offered)?;
        Some(LaneFiles {
            at: (*id, *slot),
            uses: slot_of.uses,
            remote: group.is_remote(),
            ends: now.ends,
            firsts: now.firsts,
            areas: [0, 1].map(|side: usize| {
                let chunks = group.sides[side].chunks();
                chunks.map(|c| (c.fd.clone(), c.bytes)).collect()
            }),
        })
    }
}
