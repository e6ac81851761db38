//! Lanes whose process has ended while another one of its family holds the connection: a program
//! that connects, forks and exits to become a daemon.
//!
//! The child has the rings mapped, too. It takes both directions down to TCP when it first uses the
//! connection (a second process cannot use a lane), reads what is left, and for that the lane must
//! live on. It ends here when both directions are on TCP, or when nobody holds the connection any
//! more.

use super::lane::{Ending, Lane, Stage};
use super::{Key, Rails};
use crate::inherited::{Counted, Inherited, Left};
use link::family::View;
use link::lane::{is_left, Memory};
use std::collections::HashSet;
use underpass_rdma::verbs::Provider;

/// Between two looks at orphaned lanes: what those who have inherited them do is not said to us.
pub(super) const LOOK_NS: u64 = 1_000_000_000;

/// More links of the dead are not kept: their memory is pinned, and no cgroup pays for it.
const LINKS: usize = 64;

impl<V: Provider> Rails<V> {
    /// The process of this lane has ended; others of its family may go on with the connection. `links`: as
    /// [`Rails::inherited_links`].
    pub(super) fn inherit(
        &mut self,
        at: Key,
        left: &Left<'_>,
        links: &mut HashSet<u64>,
    ) -> Option<Inherited> {
        let now = self.system.now();
        let l = self.lanes.get_mut(&at)?;
        let inode = Some(l.inode).filter(|i| *i != 0)?; // 0: never up
        if links.len() >= LINKS && !links.contains(&at.0) {
            return None;
        }
        let family = left.family;
        l.orphaned = Some(Counted::new(left.group)?);
        links.insert(at.0);
        if let (Some(id), Some(n)) = (l.engine, self.nodes.get_mut(&l.node)) {
            n.pair.refuse_switches(id);
        }
        // What it may have said last is lost.
        if family.view(l.who.conn).is_some_and(|v| v.shut) {
            l.end(now, Ending::Shut, true);
        }
        let inherited = Inherited::far(l.who, at, left, inode);
        self.stir();
        Some(inherited)
    }

    /// Links with lanes of the dead.
    pub(super) fn inherited_links(&self) -> HashSet<u64> {
        let has = |(k, l): (&Key, &Lane)| l.orphaned.is_some().then_some(k.0);
        self.lanes.iter().filter_map(has).collect()
    }

    pub fn is_inherited(&self, at: Key) -> bool {
        let l = self.lanes.get(&at);
        l.is_some_and(|l| l.orphaned.is_some() && l.stage == Stage::Offered)
    }

    /// Nobody has the connection any more, as far as we see; in other pid namespaces we may not. The
    /// kernel knows, and ends it with its last descriptor, of which we have one.
    pub fn over(&mut self, at: Key) {
        let now = self.system.now();
        if let Some(l) = self.lanes.get_mut(&at) {
            l.end(now, Ending::Over, false);
            self.stir();
        }
    }

    /// Is there an orphaned lane?
    pub(super) fn has_orphaned(&self) -> bool {
        let waits = |l: &Lane| l.orphaned.is_some() && l.ending.is_none();
        self.lanes.values().any(waits)
    }
}

impl Lane {
    /// Is it of no more use to those who have inherited it?
    pub(super) fn is_left(&self, m: &Memory<'_>) -> bool {
        let here = |v: &View| v.gen == self.who.gen && is_left(m, v.rx_tcp);
        self.orphaned.is_some() && self.family.view(self.who.conn).is_some_and(|v| here(&v))
    }
}
