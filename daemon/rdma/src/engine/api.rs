//! What goes in and comes out of a [`super::Pair`], besides memory.

use super::{LaneId, LinkId, PartyId, RailId};
use crate::verbs::Gid;
use crate::wire::LinkEnd;
use link::layout::Loc;
use std::sync::Arc;

/// Sizes and times. Both ends may differ in all of them but `first`.
#[derive(Clone, Debug)]
pub struct Config {
    /// Exactly one of the two ends offers links.
    pub first: bool,
    pub links_per_rail: usize,
    /// Links at the most, whatever the peer offers.
    pub max_links: usize,
    /// Receive buffers per link, and so messages that the peer may have under way; 4 or more.
    pub depth: u16,
    /// Requests per link, 8 or more.
    pub sends: u32,
    /// Bytes that a lane posts before the next one has its turn; more if none waits.
    pub budget: u32,
    /// Bytes under way per link.
    pub window: u64,
    /// Between repeats of what was not answered.
    pub retry_ns: u64,
    /// Until a link that was offered has to work.
    pub setup_ns: u64,
    /// Without a message for so long: ask whether the peer is there. As long again: it is not.
    pub quiet_ns: u64,
    /// Until a switch that is in doubt resets its connection.
    pub doubt_ns: u64,
    /// Local acknowledgement timer and repeats (`RtsAttr`).
    pub ack_timeout: u8,
    pub ack_retries: u8,
}

impl Config {
    pub fn new(first: bool) -> Self {
        Config {
            first,
            links_per_rail: 2,
            max_links: 16,
            depth: 128,
            sends: 256,
            budget: 64 << 10,
            window: 1 << 20,
            retry_ns: 100_000_000,
            setup_ns: 5_000_000_000,
            quiet_ns: 1_000_000_000,
            doubt_ns: 5_000_000_000,
            // Half a second, three times. Repeating because a busy peer was late costs more than the
            // wait: soft-RoCE then refuses good writes, and may deliver a message wrongly.
            ack_timeout: 17,
            ack_retries: 2,
        }
    }
}

/// A port of an open device, as far as links over it need to know.
pub struct Rail<D> {
    pub device: Arc<D>,
    pub port: u8,
    pub gid_index: u32,
    pub gid: Gid,
    pub lid: u16,
    /// Code of the port's active MTU, see [`crate::verbs::Mtu`].
    pub mtu: crate::verbs::Mtu,
    /// Rails of two nodes with the same number reach each other.
    pub fabric: u32,
}

/// What the caller does for the engine in the middle of a poll.
pub trait Host {
    /// Rings the doorbell of this party; may not block.
    fn ring(&mut self, party: PartyId);
    /// Memory for an incoming ring of this lane, in a chunk of ours that was added to its party.
    fn place(&mut self, lane: LaneId, log2: u32) -> Option<Loc>;
    /// A ring that nothing can be written to any more.
    fn free(&mut self, lane: LaneId, at: Loc);
}

/// Whose fault it is that a lane failed, and what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("the application's memory: {0}")]
    App(&'static str),
    #[error("the peer: {0}")]
    Peer(&'static str),
    #[error("whether the peer has taken a switch could not be found out in time")]
    InDoubt,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// To be sent to the peer's daemon, if the control channel is there; what is lost is repeated.
    Control(Control),
    LinkUp {
        link: LinkId,
        rail: RailId,
    },
    LinkDown {
        link: LinkId,
        rail: RailId,
        why: &'static str,
    },
    /// No link is left: every lane has been asked to go down. Time for takeover.
    NoRail,
    /// There is a link again.
    RailBack,
    /// This lane is finished: reset its connection, then [`super::Pair::remove`] it.
    LaneFailed {
        lane: LaneId,
        fault: Fault,
    },
    /// A switch of this lane was in doubt when the last link broke, and the peer's daemon has said
    /// what became of it: it stands, or it never came.
    Settled {
        lane: LaneId,
        stands: bool,
    },
    /// After [`super::Pair::finish`]: everything up to `head` is in the peer's ring, and its reader has
    /// been shown it.
    Flushed {
        lane: LaneId,
        head: u64,
    },
    /// The peer has removed this lane. `used`: bytes have gone over it.
    PeerClosed {
        lane: LaneId,
        used: bool,
    },
    /// A lane that was removed is gone, and nothing can be written to its rings.
    Removed {
        lane: LaneId,
    },
    /// Nothing can be written to this party's chunks any more; they are not registered.
    PartyRemoved {
        party: PartyId,
    },
    /// The peer broke the protocol of the links, or a device kept a queue pair. Drop the pair.
    PairFailed(&'static str),
}

/// What two engines say over the control channel, when no link can or will carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Control {
    QpOffer(LinkEnd),
    QpAnswer(LinkEnd),
    QpRefuse {
        link: u32,
    },
    /// Our end is destroyed; or, as answer, ours is as well.
    QpDead {
        link: u32,
    },
    QpDeadAck {
        link: u32,
    },
    /// Did this switch of ours reach you? `from` is our own token.
    SwitchQuery {
        token: u32,
        from: u32,
        epoch: u32,
        attempt: u32,
    },
    /// It stands; or it never came, and will not be taken any more.
    SwitchAnswer {
        token: u32,
        epoch: u32,
        attempt: u32,
        stands: bool,
    },
    /// We write no more to the rings of this lane, ever.
    Close {
        token: u32,
        from: u32,
    },
    CloseAck {
        token: u32,
    },
}

/// A link, for the tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkView {
    pub link: LinkId,
    pub rail: RailId,
    pub active: bool,
    pub qpn: u32,
    pub peer_qpn: u32,
    pub gid: Gid,
    pub peer_gid: Gid,
    pub lanes: usize,
}

/// Counters of a rail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// RDMA writes that were acknowledged.
    pub writes: u64,
    /// Bytes of lanes that were acknowledged: written, or behind messages.
    pub bytes: u64,
    /// Those behind messages.
    pub behind: u64,
    pub messages_sent: u64,
    pub messages_received: u64,
    pub links_failed: u64,
}
