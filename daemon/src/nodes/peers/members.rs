//! Nodes that come and go while the daemon runs.

use super::directory::{Name, Peer as Listed};
use super::msg::CloseReason;
use super::{Peer, Peers};
use lane::proto::reason::Reason;

/// Why the channel to a node that is gone has ended.
const GONE: &str = "it is no node of this cluster any more";

/// What the directory says that has not been carried out.
#[derive(Debug, Default)]
pub struct Changes {
    pub come: Vec<Listed>,
    pub gone: Vec<Name>,
}

impl Peers {
    /// Compares with the directory, and takes addresses over.
    pub fn compare(&mut self) -> Changes {
        let mut changes = Changes::default();
        let listed = self.directory.peers();
        for p in &listed {
            match self.peers.get_mut(&p.name) {
                Some(known) => known.state.address = p.shown(),
                None => changes.come.push(p.clone()),
            }
        }
        let is_listed = |n: &&Name| listed.iter().any(|p| p.name == **n);
        let gone = self.peers.keys().filter(|n| !is_listed(n));
        changes.gone = gone.cloned().collect();
        changes
    }

    pub fn join(&mut self, peer: &Listed) {
        tracing::info!(node = %peer.name, "a node has come");
        self.pairing.join(peer.name.clone());
        self.peers.insert(peer.name.clone(), Peer::new(peer));
    }

    /// Ends the channel to a node; the number of that channel, for which its end must be carried out.
    pub fn part(&mut self, node: &Name) -> Option<(u64, &'static str, Reason)> {
        let p = self.peers.get(node)?;
        let c = p.channel.as_ref()?;
        c.cut.now(CloseReason::Identity, GONE);
        Some((c.id, GONE, Reason::PeerDaemon))
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
