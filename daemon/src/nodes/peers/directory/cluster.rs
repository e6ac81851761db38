//! The directory of a Kubernetes cluster: its nodes and the addresses of their pods, as the API has them now.

use super::{Directory, Name, Owner, Peer};
use std::net::IpAddr;
use std::sync::Arc;
use tokio::sync::watch;
use underpass_admin::certificate::valid_name;
use underpass_kube::{NodeAt, Nodes};

/// What the thread that watches the API has learnt.
#[derive(Debug)]
pub struct ClusterDirectory {
    own: Name,
    nodes: Arc<Nodes>,
    /// Where all daemons of the cluster listen.
    port: u16,
    /// Certificates come from the cluster's signer, when there is a node to ask for one. (Other people's may be older.)
    signed: bool,
}

impl ClusterDirectory {
    pub fn new(own: Name, nodes: Arc<Nodes>, port: u16, signed: bool) -> Self {
        ClusterDirectory {
            own,
            nodes,
            port,
            signed,
        }
    }

    fn peer(&self, name: Name, node: &NodeAt) -> Option<Peer> {
        // (All names of nodes are names that certificates can carry, but for those that read as addresses.)
        let at = node.addresses.first()?;
        (name != self.own && valid_name(&name)).then(|| Peer {
            control: (at.to_string(), self.port),
            since: node.since,
            certified_since: if self.signed { node.since } else { 0 },
            name,
        })
    }

    /// `by`: what is asked.
    fn whose(&self, ip: IpAddr, by: fn(&Nodes, IpAddr) -> Option<Name>) -> Owner {
        if super::is_own(ip) {
            return Owner::Own;
        }
        match by(&self.nodes, ip) {
            Some(n) if n == self.own => Owner::Own,
            Some(n) => Owner::Peer(n),
            None => Owner::Nobody,
        }
    }
}

impl Directory for ClusterDirectory {
    fn own(&self) -> &Name {
        &self.own
    }

    fn find(&self, node: &str) -> Option<Peer> {
        self.peer(node.into(), &self.nodes.find(node)?)
    }

    fn peers(&self) -> Vec<Peer> {
        let all = self.nodes.all().into_iter();
        all.filter_map(|(name, node)| self.peer(name, &node))
            .collect()
    }

    fn owner(&self, ip: IpAddr) -> Owner {
        self.whose(ip, Nodes::owner)
    }

    /// (Not by what whoever makes pods may write: he would keep clients of an address that is not his from finding it.)
    fn place(&self, ip: IpAddr) -> Owner {
        self.whose(ip, Nodes::told)
    }

    fn met(&self, ip: IpAddr) {
        self.nodes.met(ip);
    }

    fn changes(&self) -> Option<watch::Receiver<u64>> {
        Some(self.nodes.changes())
    }

    fn generation(&self) -> u64 {
        self.nodes.generation()
    }
}
