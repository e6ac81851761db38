//! The interface of a [`super::Pair`], except for memory.

use super::{ClientId, LaneId, LinkId, RailId};
use crate::verbs::Gid;
use crate::wire::LinkEnd;
use lane::abi::{Cursor, Epoch, Loc, TcpPos};
use lane::half::leave::LINK_QUIET_MS;
use std::sync::Arc;

/// Sizes and times. All of them may differ between the two ends; `first` must differ.
#[derive(Clone, Debug)]
pub struct Config {
    /// Exactly one of the two ends offers links.
    pub first: bool,
    /// Number of links that the end with `first` makes over each rail.
    pub links_per_rail: usize,
    /// Maximum number of links, whatever the peer offers.
    pub max_links: usize,
    /// Receive buffers per link, which is also the number of messages that the peer may have in flight; 4 or more.
    pub depth: u16,
    /// Send requests per link, 8 or more.
    pub sends: u32,
    /// Maximum number of bytes that a lane posts per turn; more if no other lane waits.
    pub budget: u32,
    /// Maximum number of bytes in flight per link.
    pub window: u64,
    /// Interval for repeating what was not answered.
    pub retry_ns: u64,
    /// Time within which a link that was offered has to work.
    pub setup_ns: u64,
    /// After this time without a message, the peer is asked whether it is there; after as much again, it is
    /// considered gone.
    pub quiet_ns: u64,
    /// Time after which a switch that could not be sent yet is refused.
    pub ask_ns: u64,
    /// Time-out for an acknowledgement, see [`crate::verbs::RtsAttr::timeout`].
    pub ack_timeout: u8,
    /// Number of repeats without an acknowledgement, see [`crate::verbs::RtsAttr::retry_count`].
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
            quiet_ns: LINK_QUIET_MS * 1_000_000,
            ask_ns: 5_000_000_000,
            // Half a second, three times. Repeating because a busy peer was late costs more than the wait: soft-RoCE
            // then refuses good writes, and may deliver a message wrongly.
            ack_timeout: 17,
            ack_retries: 2,
        }
    }
}

/// A port of an open device, as far as links over it need it.
pub struct Rail<D> {
    /// The open device.
    pub device: Arc<D>,
    /// From 1.
    pub port: u8,
    /// Index of `gid` in the port's table; 0 with iWARP.
    pub gid_index: u32,
    /// Address that is told to the peer.
    pub gid: Gid,
    /// Local identifier; 0 except on InfiniBand.
    pub lid: u16,
    /// Code of the port's active MTU, see [`crate::verbs::Mtu`].
    pub mtu: crate::verbs::Mtu,
    /// Rails of two nodes with the same number reach each other.
    pub fabric: u32,
}

/// What the caller does for the engine during a poll.
pub trait Host {
    /// Rings the doorbell of this client; may not block.
    fn ring(&mut self, client: ClientId);
    /// Memory for an incoming ring of this lane, in a chunk of ours that was added for its client.
    fn place(&mut self, lane: LaneId, log2: u32) -> Option<Loc>;
    /// Frees a ring to which nothing can be written any more.
    fn free(&mut self, lane: LaneId, at: Loc);
}

/// Is told what arrives for a lane. Called while lanes' bytes move: must neither block nor take long.
pub trait Tap: Send {
    /// The peer's sender has been granted a switch: bytes from TCP position `tcp_pos` on arrive on the ring, from cursor
    /// `start` on. None of them has been shown.
    fn up(&mut self, tcp_pos: TcpPos, start: Cursor);
    /// It is on the ring already, by such a switch, in this epoch.
    fn join(&mut self, epoch: Epoch, tcp_pos: TcpPos, start: Cursor);
    /// How many bytes are wanted now? `None`: nobody reads along any more.
    fn room(&self) -> Option<usize>;
    /// These come next, and after them `more` that are left out. The application has not been shown them yet.
    fn arrived(&mut self, at: Cursor, bytes: Vec<u8>, more: u64);
}

/// Who has caused a lane's failure, and what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The process has written something impossible into its area.
    #[error("the application's memory: {0}")]
    App(&'static str),
    /// The peer's daemon has said something impossible about the lane.
    #[error("the peer: {0}")]
    Peer(&'static str),
}

/// What [`super::Pair::next_event`] returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// To be sent to the peer's daemon if the control channel is connected; what is lost is repeated.
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
    /// No link is left: every lane has been asked to go down. The caller may take over directions now.
    NoRail,
    /// There is a link again.
    RailBack,
    /// The application has been asked to take a lane's sending direction down: time for takeover if it does not. Or what
    /// was sent before the end is read.
    Asked,
    /// This lane has failed: reset its connection, then [`super::Pair::remove`] it.
    LaneFailed {
        /// The lane.
        lane: LaneId,
        /// What was wrong.
        fault: Fault,
    },
    /// A switch of this lane was in doubt when the last link broke, and the peer's daemon has now answered whether it
    /// stands or never came.
    Settled {
        /// The lane.
        lane: LaneId,
        /// The peer's node has taken it.
        stands: bool,
    },
    /// After [`super::Pair::finish`]: everything up to `head` is in the peer's ring and visible to its reader.
    Flushed {
        /// The lane.
        lane: LaneId,
        /// Ring cursor of the lane's sending direction, in bytes.
        head: lane::abi::Cursor,
    },
    /// The peer has removed this lane. `used`: it has carried bytes.
    PeerClosed {
        /// The lane.
        lane: LaneId,
        /// In either direction.
        used: bool,
    },
    /// A lane that was removed is gone, and nothing can be written to its rings any more.
    Removed {
        /// The lane.
        lane: LaneId,
    },
    /// Nothing can be written to this client's chunks any more; they are not registered any more.
    ClientRemoved {
        /// The client.
        client: ClientId,
    },
    /// The peer violated the protocol of the links, or a device could not destroy a queue pair. Drop the pair.
    PairFailed(&'static str),
}

/// Messages of two engines over the control channel, where no link can or should carry them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Control {
    /// This is my end of another link.
    QpOffer(LinkEnd),
    /// My end, in answer to an offer.
    QpAnswer(LinkEnd),
    /// There will be no such link, in answer to an offer.
    QpRefuse {
        /// The link.
        link: u32,
    },
    /// Our end of this link is destroyed.
    QpDead {
        /// The link.
        link: u32,
    },
    /// The answer: our end is destroyed, too.
    QpDeadAck {
        /// The link.
        link: u32,
    },
    /// Has this switch of ours reached you? `from` is our own token.
    SwitchQuery {
        /// Token of the lane, given by the receiver of this message.
        token: u32,
        /// Token of the lane for the answer.
        from: u32,
        /// Epoch of the switch.
        epoch: u32,
        /// Attempt number of the switch.
        attempt: u32,
    },
    /// The switch stands; or it never arrived, and will not be accepted any more.
    SwitchAnswer {
        /// Token of the lane, given by the receiver of this message.
        token: u32,
        /// Epoch of the switch.
        epoch: u32,
        /// Attempt number of the switch.
        attempt: u32,
        /// Does the switch stand?
        stands: bool,
    },
    /// We will never again write to the rings of this lane.
    Close {
        /// Token of the lane, given by the receiver of this message.
        token: u32,
        /// Token of the lane for the answer.
        from: u32,
    },
    /// The peer's `Close` has arrived; it need not be repeated.
    CloseAck {
        /// Token of the lane, given by the receiver of this message.
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
    /// Is it confirmed, so that it may carry lanes?
    pub active: bool,
    /// Number of our queue pair.
    pub qpn: u32,
    /// Number of the peer's queue pair; 0: not known yet.
    pub peer_qpn: u32,
    /// Address of our port.
    pub gid: Gid,
    /// Address of the peer's port; zero: not known yet.
    pub peer_gid: Gid,
    /// Number of lanes that are bound to it.
    pub lanes: usize,
}

/// Upper limits of the parts of [`RoundTrips`], in µs; what is above the last is counted, too.
pub const ROUND_TRIPS_US: [u64; 14] = [
    5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 20_000, 100_000, 500_000, 2_000_000,
];

/// How long the peer's engine took to answer over a link on which nothing else was said for a while. Both engines slept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundTrips {
    /// One for each of [`ROUND_TRIPS_US`], and one for the rest.
    pub counts: [u64; ROUND_TRIPS_US.len() + 1],
    /// All of them together.
    pub sum_ns: u64,
}

impl RoundTrips {
    pub(super) fn add(&mut self, ns: u64) {
        let part = ROUND_TRIPS_US.partition_point(|l| l * 1_000 < ns);
        self.counts[part] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// Adds those of another rail.
    pub fn merge(&mut self, other: &RoundTrips) {
        let both = self.counts.iter_mut().zip(other.counts);
        both.for_each(|(a, b)| *a = a.saturating_add(b));
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }
}

/// Counters of a rail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// RDMA writes that were acknowledged.
    pub writes: u64,
    /// Bytes of lanes that were acknowledged: written, or sent in messages.
    pub bytes: u64,
    /// Those that were sent in messages.
    pub inlined: u64,
    /// Messages that were acknowledged.
    pub messages_sent: u64,
    /// Messages that were received.
    pub messages_received: u64,
    /// Links that failed, including those that never worked.
    pub links_failed: u64,
    /// What the peer's answers took.
    pub round_trips: RoundTrips,
}
