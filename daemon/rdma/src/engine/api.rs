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
    /// Links that the end which is `first` makes over each rail.
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
    /// Wait for an acknowledgement, see [`crate::verbs::RtsAttr::timeout`].
    pub ack_timeout: u8,
    /// Repeats without one, see [`crate::verbs::RtsAttr::retry_count`].
    pub ack_retries: u8,
}

impl Config {
    /// The usual values.
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
    /// The open device.
    pub device: Arc<D>,
    /// From 1.
    pub port: u8,
    /// Index of `gid` in the port's table; 0 with iWARP.
    pub gid_index: u32,
    /// Address that the peer is told.
    pub gid: Gid,
    /// Local identifier; 0 but on InfiniBand.
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
    /// The process has written something impossible into its area.
    #[error("the application's memory: {0}")]
    App(&'static str),
    /// The peer's daemon has said something impossible about the lane.
    #[error("the peer: {0}")]
    Peer(&'static str),
    /// No answer within [`Config::doubt_ns`], or the pair was abandoned before it came.
    #[error("whether the peer has taken a switch could not be found out in time")]
    InDoubt,
}

/// What [`super::Pair::next_event`] tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// To be sent to the peer's daemon, if the control channel is there; what is lost is repeated.
    Control(Control),
    /// A link works: both ends have confirmed it.
    LinkUp {
        /// The link.
        link: LinkId,
        /// The rail that it goes over.
        rail: RailId,
    },
    /// A link that worked has failed. Our end is destroyed.
    LinkDown {
        /// The link.
        link: LinkId,
        /// The rail that it went over.
        rail: RailId,
        /// Why, for the log.
        why: &'static str,
    },
    /// No link is left: every lane has been asked to go down. Time for takeover.
    NoRail,
    /// There is a link again.
    RailBack,
    /// This lane is finished: reset its connection, then [`super::Pair::remove`] it.
    LaneFailed {
        /// The lane.
        lane: LaneId,
        /// What was wrong.
        fault: Fault,
    },
    /// A switch of this lane was in doubt when the last link broke, and the peer's daemon has said
    /// what became of it: it stands, or it never came.
    Settled {
        /// The lane.
        lane: LaneId,
        /// The peer's node has taken it.
        stands: bool,
    },
    /// After [`super::Pair::finish`]: everything up to `head` is in the peer's ring, and its reader has
    /// been shown it.
    Flushed {
        /// The lane.
        lane: LaneId,
        /// Ring cursor of its sending direction, in bytes.
        head: u64,
    },
    /// The peer has removed this lane. `used`: bytes have gone over it.
    PeerClosed {
        /// The lane.
        lane: LaneId,
        /// In either direction.
        used: bool,
    },
    /// A lane that was removed is gone, and nothing can be written to its rings.
    Removed {
        /// The lane.
        lane: LaneId,
    },
    /// Nothing can be written to this party's chunks any more; they are not registered.
    PartyRemoved {
        /// The party.
        party: PartyId,
    },
    /// The peer broke the protocol of the links, or a device kept a queue pair. Drop the pair.
    PairFailed(&'static str),
}

/// What two engines say over the control channel, when no link can or will carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Control {
    /// Here is my end of another link.
    QpOffer(LinkEnd),
    /// Here is mine, to an offer.
    QpAnswer(LinkEnd),
    /// There will be none, to an offer.
    QpRefuse {
        /// The link.
        link: u32,
    },
    /// Our end of this link is destroyed.
    QpDead {
        /// The link.
        link: u32,
    },
    /// The answer: ours is, too.
    QpDeadAck {
        /// The link.
        link: u32,
    },
    /// Did this switch of ours reach you? `from` is our own token.
    SwitchQuery {
        /// The lane, as its receiver names it.
        token: u32,
        /// The lane, as the answer is to name it.
        from: u32,
        /// Of which switch: its epoch.
        epoch: u32,
        /// And its attempt.
        attempt: u32,
    },
    /// It stands; or it never came, and will not be taken any more.
    SwitchAnswer {
        /// The lane, as its receiver names it.
        token: u32,
        /// Of which switch: its epoch.
        epoch: u32,
        /// And its attempt.
        attempt: u32,
        /// It stands.
        stands: bool,
    },
    /// We write no more to the rings of this lane, ever.
    Close {
        /// The lane, as its receiver names it.
        token: u32,
        /// The lane, as the answer is to name it.
        from: u32,
    },
    /// The peer's `Close` has come; it need not be repeated.
    CloseAck {
        /// The lane, as its receiver names it.
        token: u32,
    },
}

/// A link, for the tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkView {
    /// Its number.
    pub link: LinkId,
    /// The rail that it goes over.
    pub rail: RailId,
    /// It is confirmed, and may carry lanes.
    pub active: bool,
    /// Number of our queue pair.
    pub qpn: u32,
    /// Number of the peer's; 0: not told yet.
    pub peer_qpn: u32,
    /// Address of our port.
    pub gid: Gid,
    /// Address of the peer's; zero: not told yet.
    pub peer_gid: Gid,
    /// Lanes that are bound to it.
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
    /// Messages that were acknowledged.
    pub messages_sent: u64,
    /// Messages that came.
    pub messages_received: u64,
    /// Links that failed, those that never worked among them.
    pub links_failed: u64,
}
