//! The directory of a Kubernetes cluster: its nodes and the addresses of their pods, as the API has them now.

use super::{Directory, Name, Owner, Peer};
use std::net::IpAddr;
use std::sync::Arc;
use tokio::sync::watch;
use underpass_admin::certificate::valid_name;
use underpass_kube::Nodes;

/// What the thread that watches the API has learnt.
#[derive(Debug)]
pub struct ClusterDirectory {
    own: Name,
    nodes: Arc<Nodes>,
    /// Where all daemons of the cluster listen.
    port: u16,
}

impl ClusterDirectory {
    pub fn new(own: Name, nodes: Arc<Nodes>, port: u16) -> Self {
        ClusterDirectory { own, nodes, port }
    }

    fn peer(&self, name: Name, at: IpAddr) -> Option<Peer> {
        // (All names of nodes are names that certificates can carry, but for those that read as addresses.)
        (name != self.own && valid_name(&name)).then(|| Peer {
            control: (at.to_string(), self.port),
            name,
        })
    }
}

impl Directory for ClusterDirectory {
    fn own(&self) -> &Name {
        &self.own
    }

    fn find(&self, node: &str) -> Option<Peer> {
        self.peer(node.into(), self.nodes.address(node)?)
    }

    fn peers(&self) -> Vec<Peer> {
        let all = self.nodes.all().into_iter();
        all.filter_map(|(name, at)| self.peer(name, at)).collect()
    }

    fn owner(&self, ip: IpAddr) -> Owner {
        if super::is_own(ip) {
            return Owner::Own;
        }
        match self.nodes.owner(ip) {
            Some(n) if n == self.own => Owner::Own,
            Some(n) => Owner::Peer(n),
            None => Owner::Nobody,
        }
    }

    fn changes(&self) -> Option<watch::Receiver<u64>> {
        Some(self.nodes.changes())
    }
}
