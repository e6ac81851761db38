//! Which rail a lane takes: the one that suits the place of its end best ([`super::devices::Facts::rank`]).

use super::{Finished, Key, Rails};
use crate::clients::ids::ConnRef;
use crate::os::fds::Foreign;
use crate::os::near::Near;
use std::os::fd::AsFd;
use std::sync::Arc;
use underpass_rdma::verbs::Provider;

impl<V: Provider> Rails<V> {
    /// Has a helper look where this lane's end is. The lane may move bytes meanwhile, and moves when that is known.
    pub(super) fn look_near(&self, at: Key, pid: u32, sock: Arc<Foreign>) {
        let Some(l) = self.lanes.get(&at) else { return };
        if !self.devices.as_ref().is_some_and(|d| d.are_several()) {
            return;
        }
        let (who, system) = (l.who, self.system.clone());
        let (tell, wake) = (self.jobs.0.clone(), self.wake.clone());
        self.system.help(Box::new(move || {
            let near = system.near(sock.as_fd(), pid);
            drop(sock);
            let _ = tell.send(Finished::Near(at, who, near));
            super::wake::wake(wake.as_deref());
        }));
    }

    pub(super) fn near_found(&mut self, at: Key, who: ConnRef, near: Near) {
        if let Some(l) = self.lanes.get_mut(&at).filter(|l| l.who == who) {
            tracing::debug!(?near, "place of a lane's end");
            l.near = Some(near);
            self.rank(at);
        }
    }

    /// Tells the engines which rails suit which lanes, after the rails have changed.
    pub(super) fn rank_all(&mut self) {
        let placed = self.lanes.iter().filter(|(_, l)| l.near.is_some());
        let all: Vec<Key> = placed.map(|(at, _)| *at).collect();
        all.into_iter().for_each(|at| self.rank(at));
    }

    fn rank(&mut self, at: Key) {
        let (Some(l), Some(d)) = (self.lanes.get(&at), &self.devices) else {
            return;
        };
        let node = self.nodes.get_mut(&l.node);
        let (Some(node), Some(near), Some(id)) = (node, &l.near, l.engine) else {
            return;
        };
        for (port, rail) in &node.rails {
            if let Some(facts) = d.up().get(port) {
                node.pair.prefer(id, *rail, facts.rank(near));
            }
        }
    }
}
