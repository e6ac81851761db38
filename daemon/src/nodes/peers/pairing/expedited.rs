//! Why an end waits for one of another node. That node is asked, since only it can tell of a program without a shim.
//!
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
use lane::proto::reason::Reason;
use std::collections::HashMap;
use std::net::SocketAddr;

/// A connection that another node wants looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Addresses as the program's socket has them. If not `certain`, `local` was translated on the way, and only
    /// `peer` can be used.
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub certain: bool,
    /// The program's shim is asked to register.
    pub register: bool,
}

/// An end waits this long before the node of its other end is asked why, then twice as long each time (128 s at most); so often, if
/// there is no answer.
pub(super) const ASK_NS: u64 = 2_000_000_000;
const ASKS_MAX: u32 = 6;
/// Most questions to a node at a time; it takes no more (`nodes::expedite`).
const AT_ONCE: usize = 16;

impl Pairing {
    /// Tells the nodes that may have the other end of one of ours; returns how many were told.
    pub fn expedited(&mut self, who: &ConnRef, out: &mut Vec<Out>) -> usize {
        let Some(s) = self.ends.get(&(who.client, who.conn)) else {
            return 0;
        };
        if s.who != *who {
            return 0;
        }
        let (local, peer) = s.there;
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

    /// Asks about ends that have waited for some time.
    pub(super) fn ask(&mut self, now: u64, out: &mut Vec<Out>) {
        let mut told: HashMap<Name, usize> = HashMap::new();
        for s in self.ends.values_mut() {
            let Scope::Node(node) = &s.scope else {
                continue;
            };
            // (A program without a shim gets none; any other reason may pass.)
            let known = s.seen == Reason::PeerNoShim.code() || s.note.peer != 0;
            let in_vain = s.seen == 0 && s.asks >= ASKS_MAX;
            if known || in_vain || s.ask_ns > now {
                continue;
            }
            let Some(t) = self.tables.get(node).filter(|t| t.channel.is_some()) else {
                continue;
            };
            let n = told.entry(node.clone()).or_default();
            if *n == AT_ONCE {
                continue; // at the next tick
            }
            *n += 1;
            s.asks = (s.asks + 1).min(ASKS_MAX);
            s.ask_ns = now + (ASK_NS << s.asks);
            let (local, peer) = s.there;
            t.send(Msg::Ask { local, peer }, out);
        }
    }

    /// A node wants a connection of this node looked for.
    pub(super) fn hurried(
        &mut self,
        node: &Name,
        (local, peer): (SocketAddr, SocketAddr),
        register: bool,
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
            register,
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
