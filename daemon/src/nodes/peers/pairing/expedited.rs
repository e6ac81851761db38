//! Expedited ends, across nodes: `underpass check` opens a connection and wants to know at once what becomes of
//! it, while the program at the other end makes no calls and will not register by itself. The node that may have
//! that program is told which connection it is, and looks for it as it does for connections of its own (see
//! `nodes::expedite`).
//!
//! Pairing does not depend on it: both ends must register, and the proof is the usual one. A node may ask only
//! about connections to an address of its own, so it learns nothing about other nodes' connections.

use super::{Out, Pairing, Scope};
use crate::clients::ids::ConnRef;
use crate::nodes::peers::directory::{Name, Owner};
use crate::nodes::peers::msg::Msg;
use crate::os::address::normal;
use std::net::SocketAddr;

/// A connection that another node wants looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Addresses as the program's socket has them. If not `certain`, `local` was translated on the way, and only
    /// `peer` can be used.
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub certain: bool,
}

impl Pairing {
    /// Tells the nodes that may have the other end of one of ours; returns how many were told.
    pub fn expedited(&mut self, who: &ConnRef, out: &mut Vec<Out>) -> usize {
        let Some(s) = self.ends.get(&(who.client, who.conn)) else {
            return 0;
        };
        if s.who != *who {
            return 0;
        }
        let (local, peer) = (s.end.peer, s.end.local);
        let nodes: Vec<&Name> = match &s.scope {
            Scope::Own => Vec::new(),
            Scope::Node(n) => vec![n],
            Scope::All => self.tables.keys().collect(),
        };
        let tables = nodes.into_iter().filter_map(|n| self.tables.get(n));
        let mut told = 0;
        for t in tables.filter(|t| t.channel.is_some()) {
            t.send(Msg::Expedited { local, peer }, out);
            told += 1;
        }
        told
    }

    /// A node wants a connection of this node looked for.
    pub(super) fn hurried(
        &mut self,
        node: &Name,
        local: SocketAddr,
        peer: SocketAddr,
        out: &mut Vec<Out>,
    ) {
        match self.directory.owner(peer.ip()) {
            Owner::Peer(n) if n == *node => {}
            // The asking end is behind translation, so our program sees another address as its peer.
            Owner::Nobody => return,
            _ => {
                if let Some(t) = self.tables.get_mut(node) {
                    t.false_claims += 1;
                }
                return;
            }
        }
        let certain = match self.directory.owner(local.ip()) {
            Owner::Own => true,
            Owner::Nobody => false,
            Owner::Peer(_) => return,
        };
        let asked = Asked {
            local: normal(local),
            peer: normal(peer),
            certain,
        };
        out.push(Out::Expedited(node.clone(), asked));
    }

    /// A node has found the program that we asked for.
    pub(super) fn seen(&mut self, node: &Name, local: SocketAddr, peer: SocketAddr, reason: u32) {
        let key = self.tuples.get(&(normal(peer), normal(local)));
        let end = key.and_then(|k| self.ends.get_mut(k));
        if let Some(s) = end.filter(|s| s.scope.covers(node)) {
            s.seen = reason;
        }
    }
}
