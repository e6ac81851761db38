//! Both directions of a lane, read along on. Ends are 0 and 1, as the capture names them, and not sides.

use super::arrivals::{Arrivals, End};
use super::{Follower, Look, OpenLane, Piece, Sender};
use crate::clients::family::Family;
use crate::lanes::groups::LaneFiles;
use std::sync::Arc;

/// A lane that may be read along on.
pub struct Lane {
    pub(crate) files: LaneFiles,
    /// The side of end 0.
    pub(crate) side: usize,
    /// What arrives from another node, once.
    pub(crate) arrivals: Option<Arrivals>,
}

/// How one direction is followed.
enum Way {
    /// Its sender is on this node.
    Read(Follower),
    /// It comes from another node.
    Told(Arrivals),
}

/// A lane that is followed.
pub struct Along {
    lane: OpenLane,
    /// Side of end 0.
    side: usize,
    /// What each end sends. `None`: it is not known here.
    ways: [Option<Way>; 2],
}

/// What a look has found.
#[derive(Default)]
pub struct Seen {
    /// Something was copied or shown.
    pub moved: bool,
    /// The slot is used by another connection.
    pub over: bool,
    /// Is what each end sends on the ring?
    pub up: [bool; 2],
}

impl Along {
    /// `None`: no memory.
    pub fn new(lane: Lane) -> Option<Along> {
        let Lane {
            files,
            side,
            arrivals,
        } = lane;
        let (uses, remote) = (files.uses, files.remote);
        let read = || Some(Way::Read(Follower::new(uses)));
        let ways = match remote {
            false => [read(), read()],
            true => [read(), arrivals.map(Way::Told)],
        };
        Some(Along {
            lane: OpenLane::new(files)?,
            side,
            ways,
        })
    }

    /// Does a ring lie in a file that is not known here?
    pub(crate) fn has_grown(&self) -> bool {
        self.lane.has_grown()
    }

    /// Is this the same lane, whose areas may have grown? It is known then.
    pub(crate) fn grow(&mut self, now: &LaneFiles) -> bool {
        let same = self.lane.files().is_same_lane(now);
        if same {
            self.lane.grow(now.clone());
        }
        same
    }

    /// Bytes that were copied and not shown.
    pub(crate) fn unread(&self) -> u64 {
        let of = |w: &Way| match w {
            Way::Read(f) => f.unread(),
            Way::Told(_) => 0,
        };
        self.ways.iter().flatten().map(of).sum()
    }

    /// Looks at both directions, at that of end `first` first. `tables`: in which the ends of this node stand.
    pub fn look(
        &mut self,
        tables: [Option<&Arc<Family>>; 2],
        first: usize,
        show: &mut dyn FnMut(usize, Piece),
    ) -> Seen {
        let mut seen = Seen::default();
        for end in [first, 1 - first] {
            let side = self.side ^ end;
            let (Some(m), Some(way)) = (self.lane.memory(side), &mut self.ways[end]) else {
                continue;
            };
            let show = &mut |p| show(end, p);
            let (look, up) = match (way, tables[end], tables[1 - end]) {
                (Way::Read(f), Some(family), _) => {
                    let lane = &self.lane;
                    let look = f.look(&m, &Sender { lane, side, family }, show);
                    (look, f.is_up(&m))
                }
                (Way::Told(a), _, Some(family)) => {
                    let who = self.lane.files().ends[1 - side];
                    let family = family.clone();
                    let look = a.look(&m, &End { family, who }, show);
                    (look, a.is_up(&m))
                }
                _ => continue,
            };
            match look {
                Look::Moved(any) => seen.moved |= any,
                Look::Over => seen.over = true,
            }
            seen.up[end] = up;
        }
        seen
    }
}
