//! The other nodes: who they are, the channels to their daemons, and which of our ends have their
//! other end there.
//!
//! Without peers in the configuration nothing here exists at run time: no socket, no task. A peer is trusted only
//! as far as its certificate and the directory go. The worst that it can do is to take the lanes from connections
//! with itself; their TCP goes on.

pub mod cut;
pub mod digest;
pub mod directory;
pub mod members;
pub mod msg;
pub(crate) mod pairing;

use cut::Cut;
use directory::{Directory, Name, Owner};
use lane::num;
use lane::proto::reason::Reason;
use msg::{CloseReason, Msg};
use pairing::Pairing;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;
use underpass_admin::{Across, NodeState, PeerState, RefusedState};

/// Messages that may wait for a peer to read them.
pub const QUEUE: usize = 4 * pairing::LOOKUPS_MAX;
/// Most refused connections that are remembered with their reason.
const REFUSED: usize = 32;

/// Seconds since 1970.
pub fn now() -> i64 {
    let t = SystemTime::now().duration_since(UNIX_EPOCH);
    t.map_or(0, |d| num::long(d.as_secs()))
}

/// A channel as the core knows it.
struct Channel {
    /// Unique among all channels of this daemon.
    id: u64,
    queue: mpsc::Sender<Msg>,
    cut: Rc<Cut>,
    /// Which run of the daemon at the other end it is.
    incarnation: u64,
    we_dialed: bool,
}

/// A peer node.
struct Peer {
    state: PeerState,
    channel: Option<Channel>,
    /// Wakes the dialer, so that it tries at once.
    redial: Rc<tokio::sync::Notify>,
    /// As in the directory.
    since: i64,
}

impl Peer {
    fn new(listed: &directory::Peer) -> Peer {
        let state = PeerState {
            name: listed.name.to_string(),
            address: listed.shown(),
            state: "down".into(),
            since: now(),
            reason: "not tried yet".into(),
            ..PeerState::default()
        };
        Peer {
            state,
            channel: None,
            redial: Rc::default(),
            since: listed.since,
        }
    }
}

/// What the handshake of a new channel has established.
pub struct Accepted {
    pub node: Name,
    pub address: String,
    pub incarnation: u64,
    pub release: String,
    pub version: u32,
    pub expires: i64,
    /// Seconds for which that certificate was valid from the beginning.
    pub life_s: i64,
    pub we_dialed: bool,
}

/// The part of the core that deals with other nodes.
pub struct Peers {
    pub directory: Rc<dyn Directory>,
    pub pairing: Pairing,
    pub node: NodeState,
    peers: BTreeMap<Name, Peer>,
    refused: VecDeque<RefusedState>,
    next: u64,
    /// Of the directory when it was compared last.
    generation: Option<u64>,
}

impl Peers {
    /// `refusal`: why this node makes no lanes to others.
    pub fn new(directory: Rc<dyn Directory>, refusal: Reason) -> Peers {
        // (Once: it may change meanwhile.)
        let listed = directory.peers();
        let names = listed.iter().map(|p| p.name.clone());
        Peers {
            node: NodeState {
                name: directory.own().to_string(),
                ..NodeState::default()
            },
            pairing: Pairing::new(directory.clone(), names, refusal.code()),
            peers: listed
                .iter()
                .map(|p| (p.name.clone(), Peer::new(p)))
                .collect(),
            directory,
            refused: VecDeque::new(),
            next: 1,
            generation: None,
        }
    }

    /// May this channel be used? Of two, the one dialed by the smaller name is kept; a newer one
    /// of the same dialer, or of another run, shows that the older is dead.
    pub fn admit(
        &mut self,
        accepted: &Accepted,
        queue: mpsc::Sender<Msg>,
        cut: Rc<Cut>,
    ) -> Option<u64> {
        let own = self.directory.own().clone();
        let p = self.peers.get_mut(&accepted.node)?;
        if let Some(old) = &p.channel {
            let by_smaller = accepted.we_dialed == (own < accepted.node);
            let same_dialer = old.we_dialed == accepted.we_dialed;
            if old.incarnation == accepted.incarnation && !same_dialer && !by_smaller {
                return None;
            }
            old.cut
                .now(CloseReason::Duplicate, "another channel is used");
        }
        let id = self.next;
        self.next += 1;
        p.channel = Some(Channel {
            id,
            queue,
            cut,
            incarnation: accepted.incarnation,
            we_dialed: accepted.we_dialed,
        });
        p.state.state = "up".into();
        p.state.since = now();
        p.state.reason.clear();
        p.state.release = accepted.release.clone();
        p.state.version = accepted.version;
        p.state.expires = Some(accepted.expires);
        p.state.life_s = Some(accepted.life_s);
        tracing::info!(node = %accepted.node, address = accepted.address, "channel up");
        Some(id)
    }

    /// The channel that is used with `node` has ended; `false`: it was not this one.
    pub fn ended(&mut self, node: &Name, id: u64, why: &str) -> bool {
        let Some(p) = self.peers.get_mut(node) else {
            return false;
        };
        if p.channel.as_ref().is_none_or(|c| c.id != id) {
            return false;
        }
        let was = p.channel.take();
        if was.is_some_and(|c| !c.we_dialed) {
            p.redial.notify_one(); // our dialer waits while there is a channel
        }
        p.state.state = "down".into();
        p.state.since = now();
        p.state.reason = why.into();
        tracing::info!(%node, "channel down: {why}");
        true
    }

    /// There is no channel with `node`, for this reason.
    pub fn failed(&mut self, node: &Name, why: &str) {
        let Some(p) = self.peers.get_mut(node) else {
            return;
        };
        if p.channel.is_none() && p.state.reason != why {
            // Log a new reason only, not every attempt.
            tracing::warn!(%node, "no channel: {why}");
            p.state.reason = why.into();
        }
    }

    /// A connection was refused before it was certain which node it came from.
    pub fn refused(&mut self, ip: IpAddr, why: &str) {
        let text = ip.to_string();
        let known = |r: &&mut RefusedState| r.address == text && r.reason == why;
        if let Some(r) = self.refused.iter_mut().find(known) {
            r.times += 1;
            r.at = now();
            return;
        }
        tracing::warn!(address = %ip, "refused: {why}");
        if self.refused.len() == REFUSED {
            self.refused.pop_front();
        }
        self.refused.push_back(RefusedState {
            address: text,
            reason: why.into(),
            times: 1,
            at: now(),
        });
    }

    /// Queues a message. A peer that does not read loses its channel.
    pub(crate) fn send(&mut self, node: &Name, msg: Msg) {
        if let Some(c) = self.peers.get(node).and_then(|p| p.channel.as_ref()) {
            if c.queue.try_send(msg).is_err() {
                c.cut.now(CloseReason::Other, "too much is unread");
            }
        }
    }

    pub fn is_current(&self, node: &Name, id: u64) -> bool {
        let c = self.peers.get(node).and_then(|p| p.channel.as_ref());
        c.is_some_and(|c| c.id == id)
    }

    pub fn has_channel(&self, node: &Name) -> bool {
        self.peers.get(node).is_some_and(|p| p.channel.is_some())
    }

    pub fn names(&self) -> Vec<Name> {
        self.peers.keys().cloned().collect()
    }

    pub fn redial(&self, node: &Name) -> Option<Rc<tokio::sync::Notify>> {
        self.peers.get(node).map(|p| p.redial.clone())
    }

    /// Ends every channel, and has every peer dialed at once.
    pub fn cut_all(&self, code: CloseReason, why: &str) {
        for p in self.peers.values() {
            if let Some(c) = &p.channel {
                c.cut.now(code, why);
            }
            p.redial.notify_one();
        }
    }

    pub fn channels(&self) -> usize {
        self.peers.values().filter(|p| p.channel.is_some()).count()
    }

    /// Is the other end of a connection with these addresses on another node, and what is the state of that node?
    pub fn across(&self, local: IpAddr, peer: IpAddr) -> Option<Across> {
        let mut a = Across {
            own: self.node.name.clone(),
            ..Across::default()
        };
        match self.directory.owner(peer) {
            Owner::Own => return None,
            Owner::Nobody if local == peer => return None,
            // The node is not known: a refusal is shown only if it is that of all nodes.
            Owner::Nobody => {
                let mut all = self.peers.keys().map(|n| self.pairing.refusal(n));
                let none = Reason::NoDevice.code();
                a.refusal = if all.all(|r| r == none) { none } else { 0 };
            }
            Owner::Peer(n) => {
                a.refusal = self.pairing.refusal(&n);
                let state = self.peers.get(&n).map(|p| p.state.clone());
                let state = state.unwrap_or_default();
                a.listed = true;
                a.node = n.to_string();
                (a.channel, a.trouble) = (state.state, state.reason);
            }
        }
        Some(a)
    }

    /// Is it an address of a node that this one knows?
    pub fn is_another_nodes(&self, ip: IpAddr) -> bool {
        matches!(self.directory.owner(ip), Owner::Peer(_))
    }

    /// For `underpass peers`.
    pub fn states(&self) -> (NodeState, Vec<PeerState>, Vec<RefusedState>) {
        let state = |p: &Peer| {
            let (lookups, false_claims) = self.pairing.counts(&p.state.name);
            PeerState {
                lookups: lookups as u64,
                false_claims,
                ..p.state.clone()
            }
        };
        let mut node = self.node.clone();
        node.waiting = self.pairing.waiting() as u64;
        let refused = self.refused.iter().rev().cloned().collect();
        (node, self.peers.values().map(state).collect(), refused)
    }
}
