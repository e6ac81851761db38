//! Nodes that come and go while the daemon runs.

use super::directory::{Name, Peer as Listed};
use super::msg::CloseReason;
use super::{Peer, Peers};
use std::collections::HashSet;

/// Why the channel to a node that is gone has ended.
pub const GONE: &str = "it is no node of this cluster any more";

/// What the directory says that has not been carried out.
#[derive(Debug, Default)]
pub struct Changes {
    pub come: Vec<Listed>,
    pub gone: Vec<Name>,
}

impl Peers {
    /// Compares with the directory, and takes addresses over. A node that was made again under its former name has gone
    /// and come.
    pub fn compare(&mut self) -> Changes {
        let mut changes = Changes::default();
        let generation = self.directory.generation();
        if self.generation.replace(generation) == Some(generation) {
            return changes;
        }
        let listed = self.directory.peers();
        for p in &listed {
            match self.peers.get_mut(&p.name) {
                Some(known) if known.since == p.since => known.state.address = p.shown(),
                _ => changes.come.push(p.clone()),
            }
        }
        let listed: HashSet<(&Name, i64)> = listed.iter().map(|p| (&p.name, p.since)).collect();
        let gone = self.peers.iter();
        let gone = gone.filter(|(name, p)| !listed.contains(&(*name, p.since)));
        changes.gone = gone.map(|(name, _)| name.clone()).collect();
        changes
    }

    pub fn join(&mut self, peer: &Listed) {
        tracing::info!(node = %peer.name, "a node has come");
        self.pairing.join(peer.name.clone());
        self.peers.insert(peer.name.clone(), Peer::new(peer));
    }

    /// Ends the channel to a node; the number of that channel, for which its end must be carried out.
    pub fn part(&self, node: &Name) -> Option<u64> {
        let c = self.peers.get(node)?.channel.as_ref()?;
        c.cut.now(CloseReason::Identity, GONE);
        Some(c.id)
    }

    /// Forgets a node without a channel.
    pub fn leave(&mut self, node: &Name) {
        tracing::info!(%node, "a node is gone");
        self.pairing.leave(node);
        if let Some(p) = self.peers.remove(node) {
            p.redial.notify_one(); // its dialer ends
        }
    }
}
