//! Lanes whose process has ended while another one of its family holds the connection: a program
//! that connects, forks and exits to become a daemon.
//!
//! The child has the rings mapped, too. When it first uses the connection, it takes both directions down to TCP (a
//! second process cannot use a lane) and reads what is left, so the lane must stay until then. It ends here when
//! both directions are on TCP, or when nobody holds the connection any more.

use super::lanes::{Ending, Lane, Stage};
use super::{Key, Rails};
use crate::clients::limits::Limit;
use crate::lanes::inherited::{Counted, Inherited, Left};
use lane::family::{flag, View};
use lane::half::{is_left, Memory};
use std::collections::HashSet;
use underpass_rdma::verbs::Provider;

/// Time between two looks at orphaned lanes, whose inheritors do not report to the daemon.
pub(super) const LOOK_NS: u64 = 1_000_000_000;

/// Most link groups of ended processes that are kept: their memory is pinned, and no cgroup pays for it.
const INHERITED_GROUPS_MAX: usize = 64;

impl<V: Provider> Rails<V> {
    /// The process of this lane has ended; others of its family may go on with the connection. `groups`: the link
    /// groups of all orphaned lanes, as from [`Rails::inherited_groups`].
    pub(super) fn inherit(
        &mut self,
        at: Key,
        left: &Left<'_>,
        groups: &mut HashSet<u64>,
    ) -> Option<Inherited> {
        let now = self.system.now();
        let l = self.lanes.get_mut(&at)?;
        // The process's last messages may be lost, `LaneHeld` and `LaneShut` among them, but the table tells the same.
        let family = left.family;
        let view = family.view(l.who.conn).filter(|v| v.gen == l.who.gen)?;
        let inode = match l.inode {
            // Its sender was never up; its receiver may have been ready, and its peer up.
            0 if view.flags & flag::LANE != 0 => view.inode,
            n => n,
        };
        let inode = Some(inode).filter(|i| *i != 0)?;
        if groups.len() >= INHERITED_GROUPS_MAX && !groups.contains(&at.0) {
            left.cgroup.refused(Limit::Inherited);
            return None;
        }
        l.orphaned = Some(Counted::new(left.cgroup)?);
        groups.insert(at.0);
        if let (Some(id), Some(n)) = (l.engine, self.nodes.get_mut(&l.node)) {
            n.pair.refuse_switches(id);
        }
        if view.shut {
            l.end(now, Ending::Shut, true);
        }
        let inherited = Inherited::remote(l.who, at, left, inode);
        self.notify();
        Some(inherited)
    }

    /// Link groups with orphaned lanes.
    pub(super) fn inherited_groups(&self) -> HashSet<u64> {
        let has = |(k, l): (&Key, &Lane)| l.orphaned.is_some().then_some(k.0);
        self.lanes.iter().filter_map(has).collect()
    }

    pub fn is_inherited(&self, at: Key) -> bool {
        let l = self.lanes.get(&at);
        l.is_some_and(|l| l.orphaned.is_some() && l.stage == Stage::Offered)
    }

    /// As far as the daemon sees, nobody holds the connection any more; it cannot see all pid namespaces. So it
    /// only closes its copy of the socket, and the kernel ends the connection with the last descriptor.
    pub fn over(&mut self, at: Key) {
        let now = self.system.now();
        if let Some(l) = self.lanes.get_mut(&at) {
            l.end(now, Ending::Over, false);
            self.notify();
        }
    }

    /// Is there an orphaned lane?
    pub(super) fn has_orphaned(&self) -> bool {
        let waits = |l: &Lane| l.orphaned.is_some() && l.ending.is_none();
        self.lanes.values().any(waits)
    }
}

impl Lane {
    /// Have those who inherited this orphaned lane left it?
    pub(super) fn is_left(&self, m: &Memory<'_>) -> bool {
        let here = |v: &View| v.gen == self.who.gen && is_left(m, v.rx_tcp);
        self.orphaned.is_some() && self.family.view(self.who.conn).is_some_and(|v| here(&v))
    }
}
