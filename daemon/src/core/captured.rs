//! The core's part of a capture: which lane a connection has, and who captures.

use super::Core;
use crate::clients::client::Client;
use crate::clients::family::Family;
use crate::clients::ids::ConnRef;
use crate::lanes::capture::along::{Along, Lane};
use crate::lanes::capture::arrivals::{self, Arrivals, End};
use crate::lanes::groups::LaneFiles;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use underpass_rdma::verbs::Provider;

/// Captures at a time: all, those of everybody but root, and those of one user but root.
const ALL_MAX: usize = 8;
const OTHERS_MAX: usize = 4;
const USER_MAX: usize = 2;

/// The users whose captures are under way.
#[derive(Clone, Default)]
pub(crate) struct Captures(Rc<RefCell<Vec<u32>>>);

/// One capture.
pub(crate) struct Seat(Captures, u32);

impl Captures {
    /// `None`: there are too many.
    pub(crate) fn take(&self, uid: u32) -> Option<Seat> {
        let mut all = self.0.borrow_mut();
        let others = all.iter().filter(|u| **u != 0).count();
        let own = all.iter().filter(|u| **u == uid).count();
        let full = uid != 0 && (others >= OTHERS_MAX || own >= USER_MAX);
        if full || all.len() >= ALL_MAX {
            return None;
        }
        all.push(uid);
        Some(Seat(self.clone(), uid))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut all = self.0 .0.borrow_mut();
        if let Some(at) = all.iter().position(|u| *u == self.1) {
            all.swap_remove(at);
        }
    }
}

/// Link group and slot of a lane, and how often the slot was used before.
pub(crate) type Use = ((u64, u32), u32);

/// An end, on this node, of a connection that is captured.
#[derive(Clone)]
pub(crate) struct Watched {
    pub family: Arc<Family>,
    pub conn: u32,
    pub gen: u32,
}

impl Watched {
    fn is(&self, end: ConnRef, of: &Client) -> bool {
        (self.conn, self.gen) == (end.conn, end.gen) && self.family.ident == of.family.ident
    }
}

impl<V: Provider> Core<V> {
    /// The end that a row of a table stands for.
    pub(crate) fn watched(
        &self,
        row: (crate::clients::ids::ClientId, u32, u32),
    ) -> Option<Watched> {
        let family = self.clients.get(&row.0)?.family.clone();
        Some(Watched {
            family,
            conn: row.1,
            gen: row.2,
        })
    }

    /// Is a process of the family there?
    pub(crate) fn has_family(&self, end: &Watched) -> bool {
        self.of_family(end.family.ident).next().is_some()
    }

    /// The processes that hold an end, of those that are connected.
    pub(crate) fn holders_of(&self, end: &Watched) -> Vec<&Client> {
        let view = end.family.view(end.conn).filter(|v| v.gen == end.gen);
        let holds = |c: &&Client| {
            let v = view.as_ref();
            v.is_some_and(|v| v.holders.contains(&c.own_pid))
        };
        self.of_family(end.family.ident).filter(holds).collect()
    }

    /// The lane of these two, if this daemon has paired them; without a second one, the lane of the first one to another
    /// node. (What a table says of link groups is not believed.) What arrives on that is told from now on, unless this
    /// use of its slot is the last one of which it was.
    pub(crate) fn captured(
        &self,
        first: &Watched,
        second: Option<&Watched>,
        told: &mut Option<Use>,
        may: impl Fn(&Client) -> bool,
    ) -> Option<Lane> {
        let mut kin = self.of_family(first.family.ident);
        let (files, who) = kin.find_map(|c| {
            let who = ConnRef {
                client: c.id,
                conn: first.conn,
                gen: first.gen,
            };
            Some((self.groups.files(who)?, who))
        })?;
        let side = files.ends.iter().position(|e| *e == who)?;
        let ok = |side: usize, watched: &Watched| {
            let end = files.ends[side];
            let client = self.clients.get(&end.client);
            client.is_some_and(|c| watched.is(end, c) && may(c))
        };
        let other = match second {
            Some(s) => !files.remote && ok(1 - side, s),
            None => files.remote,
        };
        if !(other && ok(side, first)) {
            return None;
        }
        let this = Some((files.at, files.uses));
        let mut arrivals = None;
        if files.remote && *told != this {
            arrivals = self.tap(&files, who, first.family.clone());
            if arrivals.is_some() {
                *told = this;
            }
        }
        Some(Lane {
            files,
            side,
            arrivals,
        })
    }

    /// Has what arrives on this lane from another node told, until the returned end is dropped. `None`: the lane is over.
    fn tap(&self, files: &LaneFiles, who: ConnRef, family: Arc<Family>) -> Option<Arrivals> {
        let (tapped, arrivals) = arrivals::tap(End { family, who }, files.uses);
        let plane = self.rails.as_ref()?;
        let there = plane.lock().tap(files.at, who, Box::new(tapped));
        there.then_some(arrivals)
    }

    /// Reads along on the lane of this end to another node: for tests of what a capture shows.
    #[doc(hidden)]
    pub fn along(&self, who: ConnRef) -> Option<(Along, Arc<Family>)> {
        let watched = self.watched((who.client, who.conn, who.gen))?;
        let lane = self.captured(&watched, None, &mut None, |_| true)?;
        Some((Along::new(lane)?, watched.family))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_takes_all_captures() {
        let all = Captures::default();
        let mine: Vec<_> = (0..USER_MAX).map(|_| all.take(1).unwrap()).collect();
        assert!(all.take(1).is_none(), "of one user");
        let more: Vec<_> = (2..4).map(|u| all.take(u).unwrap()).collect();
        assert!(all.take(9).is_none(), "of all but root");
        let root: Vec<_> = (0..4).map(|_| all.take(0).unwrap()).collect();
        assert!(all.take(0).is_none(), "of all");
        drop((mine, more, root));
        assert!(all.take(1).is_some() && all.0.borrow().is_empty());
    }
}
