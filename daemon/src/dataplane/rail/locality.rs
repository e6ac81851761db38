//! Which rail a lane takes: the one that suits the place of its end best ([`super::devices::Facts::rank`]).

use super::{Finished, Key, Rails};
use crate::clients::ids::ConnRef;
use crate::clients::limits::Job;
use crate::os::locality::Locality;
use std::os::fd::{AsFd, OwnedFd};
use underpass_rdma::verbs::Provider;

/// The process that has given us a copy of a lane's socket.
#[derive(Debug, Default)]
pub struct Holder {
    pub pid: u32,
    /// The network namespace of that socket.
    pub namespace: Option<OwnedFd>,
    /// Who pays for the helper.
    pub job: Option<Job>,
}

impl<V: Provider> Rails<V> {
    /// Has a helper look where this lane's end is. The lane may move bytes meanwhile, and moves when that is known. The
    /// helper has no copy of the socket: what it asks may take time, and the end of a connection may not wait for that.
    pub(super) fn look_up_locality(&self, at: Key, holder: Holder) {
        let Some(l) = self.lanes.get(&at) else { return };
        if self.devices.is_none() {
            return;
        }
        let (who, address, system) = (l.who, l.address, self.system.clone());
        let (tell, wake) = (self.jobs.0.clone(), self.wake.clone());
        self.system.help(Box::new(move || {
            let namespace = holder.namespace.as_ref().map(|n| n.as_fd());
            let locality = system.locality(namespace, address, holder.pid);
            let _ = tell.send(Finished::Locality(at, who, locality));
            super::wake::wake(wake.as_deref());
        }));
    }

    pub(super) fn locality_found(&mut self, at: Key, who: ConnRef, locality: Locality) {
        if let Some(l) = self.lanes.get_mut(&at).filter(|l| l.who == who) {
            let (group, node) = (format_args!("{:#x}", at.0), &l.node);
            let _lane = tracing::debug_span!("lane", %node, %group, slot = at.1).entered();
            tracing::debug!(?locality, "place of a lane's end");
            l.locality = Some(locality);
            self.rank(at);
        }
    }

    /// Tells the engines which rails suit which lanes, after the rails have changed.
    pub(super) fn rank_all(&mut self) {
        let placed = self.lanes.iter().filter(|(_, l)| l.locality.is_some());
        let all: Vec<Key> = placed.map(|(at, _)| *at).collect();
        all.into_iter().for_each(|at| self.rank(at));
    }

    fn rank(&mut self, at: Key) {
        let (Some(l), Some(d)) = (self.lanes.get(&at), &self.devices) else {
            return;
        };
        let node = self.nodes.get_mut(&l.node);
        let (Some(node), Some(locality), Some(id)) = (node, &l.locality, l.engine) else {
            return;
        };
        for (port, rail) in &node.rails {
            if let Some(facts) = d.up().get(port) {
                node.pair.prefer(id, *rail, facts.rank(locality));
            }
        }
    }
}
