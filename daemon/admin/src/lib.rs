//! What the daemon shares with those who ask it: the `underpass` tool, tests and benchmarks.
//!
//! Requests and answers are one JSON object per line over the Unix stream socket `admin.sock` in the runtime directory,
//! one request and one response per connection ([`client`]). The daemon answers a tool in a network namespace with that
//! namespace's connections only; root in the daemon's own namespace sees all.

pub mod certificate;
pub mod client;
pub mod environ;
pub mod places;
pub mod proc;

use serde::{Deserialize, Serialize};

/// Name of the SEQPACKET socket for shims in the runtime directory.
pub const CONTROL_SOCK: &str = "control.sock";
/// Name of the stream socket for the tool.
pub const ADMIN_SOCK: &str = "admin.sock";

#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum Request {
    /// Every connection and listening socket the caller may see.
    Ss,
    /// Counters.
    Stats,
    /// Send matching connections down and keep them there.
    Down { target: Target },
    /// Let matching connections be promoted again.
    Up { target: Target },
    /// What would, or did, become of the connection with these endpoints, seen from both ends?
    /// Addresses as `ip:port` or `[ip]:port`, as the caller's own socket has them.
    Check { local: String, peer: String },
    /// The shims' events, newest last.
    Log,
    /// Version, pid, uptime.
    Ping,
    /// As `Ping`; and a daemon that leaves when idle stays as long as the calling process lives,
    /// whatever program it executes next.
    Keep,
    /// The processes that are connected.
    Parties,
    /// The other nodes, and the channels to their daemons.
    Peers,
}

#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    All,
    Pid(u32),
    /// By socket inode (the column of `ss`).
    Inode(u64),
    /// By endpoints, either end's view.
    Pair {
        local: String,
        peer: String,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
// One value per connection, soon gone: its size does not matter.
#[allow(clippy::large_enum_variant)]
pub enum Response {
    Ss {
        rows: Vec<Row>,
    },
    Stats {
        stats: Box<Stats>,
    },
    /// `Down` and `Up`: how many connection ends were told, and how many will be as soon as their
    /// programs speak to the daemon.
    Told {
        ends: u64,
        #[serde(default)]
        later: u64,
    },
    Check {
        local: Option<Row>,
        peer: Option<Row>,
        verdict: String,
        /// If the other end is on another node.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        across: Option<Across>,
    },
    /// By process id, as the daemon sees it.
    Parties {
        pids: Vec<u32>,
    },
    Log {
        lines: Vec<String>,
    },
    Pong {
        version: String,
        pid: u32,
        uptime_s: u64,
        proof: bool,
    },
    /// `node` without a name: the daemon works alone.
    Peers {
        node: NodeState,
        peers: Vec<PeerState>,
        refused: Vec<RefusedState>,
    },
    Error {
        message: String,
    },
}

/// This node among others. Times in seconds since 1970.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct NodeState {
    pub name: String,
    /// Where its daemon listens.
    pub listens: String,
    /// When its certificate ends.
    pub expires: Option<i64>,
    /// What is wrong with its certificate files; empty: nothing.
    pub trouble: String,
    /// Ends that wait for one of another node.
    pub waiting: u64,
}

/// A peer node.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct PeerState {
    pub name: String,
    /// Where its daemon is looked for.
    pub address: String,
    /// `up` or `down`, and since when.
    pub state: String,
    pub since: i64,
    /// Why there is no channel; empty: there is one.
    pub reason: String,
    /// Program version, and version of the protocol, of the peer; 0: not known.
    pub release: String,
    pub version: u32,
    /// When the certificate that it showed ends.
    pub expires: Option<i64>,
    /// Ends that one node looks for at the other.
    pub seeks: u64,
    /// How often it spoke for an address that is not its own.
    pub lies: u64,
}

/// What stands between this node and the one that a connection leads to. Names and `trouble` are
/// empty where the caller may not know them.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Across {
    /// This node.
    pub own: String,
    pub node: String,
    /// Does the directory give the peer's address to a node at all? If not, it is outside, or was
    /// translated on the way.
    pub listed: bool,
    /// The channel to that node's daemon: `up` or `down`, and why; both empty if not `listed`.
    pub channel: String,
    pub trouble: String,
    /// Why this node makes no lanes to others; 0: it does.
    pub refusal: u32,
    /// RDMA links to that node that work.
    pub links: u64,
}

/// Somebody who connected and was refused.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct RefusedState {
    pub address: String,
    pub reason: String,
    pub times: u64,
    pub at: i64,
}

/// One end of a connection, or a listening socket.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Row {
    /// `ACTIVE`, `LISTEN`, `INIT`, as smcss says it.
    pub state: String,
    pub uid: u32,
    pub inode: u64,
    /// `ip:port`, IPv6 in brackets; IPv4-mapped addresses as IPv4.
    pub local: String,
    pub peer: String,
    /// Interface index column of smcss; 0 for lanes of this node.
    pub intf: String,
    /// `SMCD`, `SMCR`, or `TCP 0x…/0x…`.
    pub mode: String,
    /// Reason codes behind a `TCP` mode.
    pub reason: u32,
    pub peer_reason: u32,
    /// Which directions are on the ring now: `both`, `tx`, `rx` or `none`.
    pub up: String,
    /// Does the lane lead to another node?
    #[serde(default)]
    pub far: bool,
    /// What carries the lane to the other node now, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rail: Option<RailRow>,
    pub pid: u32,
    pub comm: String,
    /// Every process under the shim that holds the socket, `pid` among them.
    #[serde(default)]
    pub pids: Vec<u32>,
    /// The process at the other end, where it is on this node; 0: not known.
    #[serde(default)]
    pub peer_pid: u32,
    #[serde(default)]
    pub peer_comm: String,
    /// Network namespace inode of the process.
    pub netns: u64,
    /// `client` or `server`.
    pub role: String,
    pub link: u64,
    pub lane: u32,
    pub tx_epoch: u32,
    pub rx_epoch: u32,
    /// Size of the outgoing ring; 0: none, or told by a daemon that does not say.
    #[serde(default)]
    pub tx_ring_bytes: u64,
    pub lane_tx_bytes: u64,
    pub lane_rx_bytes: u64,
    pub tcp_tx_bytes: u64,
    pub tcp_rx_bytes: u64,
}

/// The RDMA link that carries a lane to another node.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct RailRow {
    /// Part of this node among the two: `server` (it adds links) or `client`.
    pub role: String,
    pub device: String,
    pub port: u8,
    /// Number of the link between the two nodes.
    pub link: u32,
    /// Eight groups of four digits; empty where the caller may not know the nodes' addresses.
    pub gid: String,
    pub peer_gid: String,
}

/// Counters of the daemon and of all shims together.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Stats {
    pub version: String,
    pub pid: u32,
    pub uptime_s: u64,
    /// Is the BPF proof of connection identity active?
    pub proof: bool,
    pub parties: u64,
    pub links: u64,
    pub lanes: u64,
    pub memory_bytes: u64,
    pub registered: u64,
    pub paired: u64,
    /// Ends whose other end another node has.
    #[serde(default)]
    pub paired_across: u64,
    pub declined: u64,
    /// Datagrams between shims and daemon, both ways.
    #[serde(default)]
    pub datagrams: u64,
    /// Sums over the shims' family tables, ended processes included.
    pub promoted: u64,
    pub ups: u64,
    pub downs: u64,
    pub lane_tx_bytes: u64,
    pub lane_rx_bytes: u64,
    pub rings: u64,
    pub sleeps: u64,
    pub resets: u64,
    /// Ports of RDMA devices that carry lanes, or have.
    #[serde(default)]
    pub rails: Vec<RailStats>,
}

/// Counters of one port of one device, all peer nodes together.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct RailStats {
    pub device: String,
    pub port: u8,
    /// Links that work now, by peer node.
    pub links: Vec<RailLinks>,
    /// RDMA writes that were acknowledged.
    pub writes: u64,
    /// Bytes of lanes that were acknowledged: written, or behind messages.
    pub bytes: u64,
    pub messages_sent: u64,
    pub messages_received: u64,
    pub links_failed: u64,
}

/// Links over one rail to one node.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct RailLinks {
    /// Empty where the caller may not know the nodes: then the sum over all.
    pub node: String,
    pub up: u64,
    /// Lanes that use them.
    pub lanes: u64,
}
