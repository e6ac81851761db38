//! What the daemon shares with those who ask it: the `underpass` tool, tests and benchmarks.
//!
//! Requests and answers are one JSON object per line over the Unix stream socket `admin.sock` in the runtime directory,
//! one request and one response per connection ([`client`]). The daemon answers a tool in a network namespace with that
//! namespace's connections only; root in the daemon's own namespace sees all.

#![warn(missing_docs, unreachable_pub)]
// `as` only where a lint exception says why. Tests may: what they lose, they notice.
#![cfg_attr(
    not(test),
    warn(
        clippy::as_ptr_cast_mut,
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        clippy::ptr_as_ptr,
        clippy::ref_as_ptr
    )
)]

pub mod capture;
pub mod certificate;
pub mod client;
pub mod elf;
pub mod environ;
pub mod netlink;
pub mod places;
pub mod proc;
pub mod rules;

use serde::{Deserialize, Serialize};

/// Name of the SEQPACKET socket for shims in the runtime directory.
pub const CONTROL_SOCK: &str = "control.sock";
/// Name of the stream socket for the tool.
pub const ADMIN_SOCK: &str = "admin.sock";

/// What a tool asks. In JSON the member `op` is the name in lower case.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum Request {
    /// Every connection and listening socket the caller may see.
    Ss,
    /// Counters.
    Stats,
    /// Send matching connections down and keep them there.
    Down {
        /// Whose ends are sent down.
        target: Target,
    },
    /// Let matching connections be promoted again.
    Up {
        /// Whose ends may go up.
        target: Target,
    },
    /// Show what the lane of one connection carries, from now on.
    Capture {
        /// Which one: an inode, or a pair of addresses.
        target: Target,
    },
    /// What would, or did, become of the connection with these endpoints, seen from both ends?
    /// Addresses as `ip:port` or `[ip]:port`, as the caller's own socket has them.
    Check {
        /// The caller's end.
        local: String,
        /// The other one.
        peer: String,
    },
    /// The shims' events, newest last.
    Log,
    /// Version, pid, uptime.
    Ping,
    /// As `Ping`; and a daemon that leaves when idle stays as long as the calling process lives,
    /// whatever program it executes next.
    Keep,
    /// The processes that are connected.
    Clients,
    /// The other nodes, and the channels to their daemons.
    Peers,
    /// The containers of this node, and which of them have the shim.
    Pods,
    /// The rules that say which connections may have lanes.
    Rules,
    /// Puts a rule before all others; what it denies goes to TCP. Answered as `Down`.
    Rule {
        /// The rule.
        rule: rules::Rule,
    },
    /// Takes away a rule that was put there; what no rule denies any more may be promoted. Answered as `Up`.
    Unrule {
        /// Its place among the `added`, from 1.
        number: usize,
    },
}

/// Which connections `down` and `up` are about; of those, the ones that the caller may act on.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    /// All, and those to come of the processes that are connected now.
    All,
    /// Those of a process, and those to come.
    Pid(u32),
    /// By socket inode (the column of `ss`).
    Inode(u64),
    /// By endpoints, either end's view.
    Pair {
        /// `ip:port` or `[ip]:port` of one end.
        local: String,
        /// That of the other.
        peer: String,
    },
}

/// What the daemon answers. In JSON an object whose only member has the name in lower case.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
// One value per connection, soon gone: its size does not matter.
#[allow(clippy::large_enum_variant)]
pub enum Response {
    /// To `Ss`.
    Ss {
        /// Connections and listening sockets, in no order.
        rows: Vec<Row>,
    },
    /// To `Stats`.
    Stats {
        /// The counters.
        stats: Box<Stats>,
    },
    /// `Down` and `Up`: how many connection ends were told, and how many will be as soon as their
    /// programs speak to the daemon.
    Told {
        /// Told now.
        ends: u64,
        /// Told when their programs next speak to the daemon.
        #[serde(default)]
        later: u64,
    },
    /// To `Rules`, in their order: the first that is about a connection end decides.
    Rules {
        /// Those that were put before the others.
        added: Vec<rules::Rule>,
        /// Those of the configuration.
        configured: Vec<rules::Rule>,
    },
    /// To `Capture`: [`capture::Captured`] follow until the connection ends or somebody leaves.
    Capture {
        /// Address of the end that was named, in the form of [`Row::local`]: end 0.
        local: String,
        /// That of the other one, as the first one has it: end 1.
        peer: String,
    },
    /// To `Check`.
    Check {
        /// The caller's end, if it is under Underpass.
        local: Option<Row>,
        /// The other end, if it is on this node and known.
        peer: Option<Row>,
        /// In words for people: what carries the connection, or why TCP does.
        verdict: String,
        /// If the other end is on another node.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        across: Option<Across>,
    },
    /// By process id, as the daemon sees it.
    Clients {
        /// Process ids.
        pids: Vec<u32>,
    },
    /// To `Log`.
    Log {
        /// Events of processes that the caller may act on, oldest first.
        lines: Vec<String>,
    },
    /// To `Ping` and `Keep`.
    Pong {
        /// Version of the daemon's program.
        version: String,
        /// Process id of the daemon, in its own pid namespace.
        pid: u32,
        /// Seconds since it was started.
        uptime_s: u64,
        /// Is the BPF proof of connection identity active?
        proof: bool,
    },
    /// `node` without a name: the daemon works alone.
    Peers {
        /// This node.
        node: NodeState,
        /// The nodes that the directory lists.
        peers: Vec<PeerState>,
        /// Who was refused lately; who began it last comes first.
        refused: Vec<RefusedState>,
    },
    /// To `Pods`.
    Pods {
        /// Containers, in order of namespace, pod and name.
        rows: Vec<PodRow>,
        /// Where the container runtime is asked; empty: the daemon does not look after containers.
        #[serde(default)]
        runtime: String,
    },
    /// To any request: it was refused, or could not be read.
    Error {
        /// Why, for people. It may hold control characters.
        message: String,
    },
}

/// A container, as the container runtime has it.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(default)]
pub struct Where {
    /// Kubernetes' namespace.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container in it.
    pub container: String,
    /// Identifier of the pod's sandbox.
    pub sandbox: String,
    /// Identifier of the container.
    pub id: String,
}

/// What became of a container that the runtime told of.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct PodRow {
    /// Which one.
    pub at: Where,
    /// Did the pod ask for the shim?
    pub wanted: bool,
    /// Has the container got it?
    pub injected: bool,
    /// Why not, if the pod asked, or why it cannot use it; for people.
    pub why_not: String,
    /// Its connections through shared memory, through RDMA and on TCP.
    pub smcd: u64,
    /// Through RDMA.
    pub smcr: u64,
    /// On TCP.
    pub tcp: u64,
}

/// This node among others. Times in seconds since 1970.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct NodeState {
    /// As the directory and its certificate have it.
    pub name: String,
    /// Where its daemon listens.
    pub listens: String,
    /// When its certificate ends.
    pub expires: Option<i64>,
    /// For how many seconds that is valid from the beginning.
    pub life_s: Option<i64>,
    /// What is wrong with its certificate files; empty: nothing.
    pub trouble: String,
    /// Ends that wait for one of another node.
    pub waiting: u64,
}

/// A peer node.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct PeerState {
    /// As the directory has it.
    pub name: String,
    /// Where its daemon is looked for.
    pub address: String,
    /// `up` or `down`, and since when.
    pub state: String,
    /// Seconds since 1970.
    pub since: i64,
    /// Why there is no channel; empty: there is one.
    pub reason: String,
    /// Program version, and version of the protocol, of the peer; 0: not known.
    pub release: String,
    /// Of the protocol: the newest that both speak.
    pub version: u32,
    /// When the certificate that it showed ends.
    pub expires: Option<i64>,
    /// For how many seconds that is valid from the beginning.
    pub life_s: Option<i64>,
    /// Ends that one node looks for at the other.
    pub lookups: u64,
    /// How often it spoke for an address that is not its own.
    pub false_claims: u64,
}

/// What stands between this node and the one that a connection leads to. Names and `trouble` are
/// empty where the caller may not know them.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Across {
    /// This node.
    pub own: String,
    /// The node that the directory gives the peer's address to; empty: none.
    pub node: String,
    /// Does the directory give the peer's address to a node at all? If not, it is outside, or was
    /// translated on the way.
    pub listed: bool,
    /// The channel to that node's daemon: `up` or `down`, and why; both empty if not `listed`.
    pub channel: String,
    /// Why there is no channel.
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
    /// Its address.
    pub address: String,
    /// Why, in words for people.
    pub reason: String,
    /// How often, for this reason.
    pub times: u64,
    /// When it was refused last: seconds since 1970.
    pub at: i64,
}

/// One end of a connection, or a listening socket.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Row {
    /// `ACTIVE`, `LISTEN`, `INIT` (not connected), `CLOSED`, as smcss says it.
    pub state: String,
    /// User id of the socket's owner.
    pub uid: u32,
    /// Inode of the socket.
    pub inode: u64,
    /// `ip:port`, IPv6 in brackets; IPv4-mapped addresses as IPv4.
    pub local: String,
    /// Address of the other end, in the same form; empty for listening sockets.
    pub peer: String,
    /// Interface index column of smcss; 0 for lanes of this node.
    pub intf: String,
    /// `SMCD`, `SMCR`, or `TCP 0x…/0x…`.
    pub mode: String,
    /// Reason codes behind a `TCP` mode.
    pub reason: u32,
    /// The other end's; 0: none is known.
    pub peer_reason: u32,
    /// Which directions are on the ring now: `both`, `tx`, `rx` or `none`.
    pub up: String,
    /// Does the lane lead to another node?
    #[serde(default)]
    pub remote: bool,
    /// What carries the lane to the other node now, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rail: Option<RailRow>,
    /// The process that the row is shown under, as the daemon sees it.
    pub pid: u32,
    /// Its name in `/proc`; it may hold control characters.
    pub comm: String,
    /// Every process under the shim that holds the socket, `pid` among them.
    #[serde(default)]
    pub pids: Vec<u32>,
    /// The process at the other end, where it is on this node; 0: not known.
    #[serde(default)]
    pub peer_pid: u32,
    /// Its name; empty: not known.
    #[serde(default)]
    pub peer_comm: String,
    /// Network namespace inode of the process.
    pub netns: u64,
    /// `client` or `server`.
    pub role: String,
    /// The container of the process, if the runtime told of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Where>,
    /// Number of the link group that its lane is on; 0: it has none.
    pub link: u64,
    /// The lane's slot on it.
    pub lane: u32,
    /// Epoch of the last switch up of sending.
    pub tx_epoch: u32,
    /// Epoch for which it last was ready to receive from its ring.
    pub rx_epoch: u32,
    /// Size of the outgoing ring; 0: none, or told by a daemon that does not say.
    #[serde(default)]
    pub tx_ring_bytes: u64,
    /// Bytes sent over its lane.
    pub lane_tx_bytes: u64,
    /// Bytes received over its lane.
    pub lane_rx_bytes: u64,
    /// Bytes sent over TCP, frames included.
    pub tcp_tx_bytes: u64,
    /// Bytes received over TCP, frames included.
    pub tcp_rx_bytes: u64,
    /// Further sockets of the same user and cgroup, which are not shown because it has so many: told in its last row.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde calls it
fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// The RDMA link that carries a lane to another node.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct RailRow {
    /// Part of this node among the two: `server` (it adds links) or `client`.
    pub role: String,
    /// Name of this node's device.
    pub device: String,
    /// Port of the device, from 1.
    pub port: u8,
    /// Number of the link.
    pub link: u32,
    /// Eight groups of four digits; empty where the caller may not know the nodes' addresses.
    pub gid: String,
    /// That of the other node's port, in the same form.
    pub peer_gid: String,
}

/// Counters of the daemon and of all shims together.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Stats {
    /// Version of the daemon's program.
    pub version: String,
    /// Process id of the daemon, in its own pid namespace.
    pub pid: u32,
    /// Seconds since it was started.
    pub uptime_s: u64,
    /// Is the BPF proof of connection identity active?
    pub proof: bool,
    /// Processes that are connected now.
    pub clients: u64,
    /// Link groups of two processes each, or of a process and this daemon.
    pub links: u64,
    /// Lanes that are in use on them.
    pub lanes: u64,
    /// Bytes of link groups' memory that somebody has written to.
    pub memory_bytes: u64,
    /// Registrations that came from shims.
    pub registered: u64,
    /// Connections both of whose ends are here, and were found to belong together.
    pub paired: u64,
    /// Ends whose other end another node has.
    #[serde(default)]
    pub paired_across: u64,
    /// Directions within the node that the daemon has brought to TCP, because their ends did not.
    #[serde(default)]
    pub taken_over: u64,
    /// Times that an end was told to stay on TCP for now, or for good.
    pub declined: u64,
    /// Datagrams between shims and daemon, both ways.
    #[serde(default)]
    pub datagrams: u64,
    /// Sums over the shims' family tables, ended processes included.
    pub promoted: u64,
    /// Switches up of sending directions.
    pub ups: u64,
    /// Switches down of sending directions.
    pub downs: u64,
    /// Bytes sent over lanes.
    pub lane_tx_bytes: u64,
    /// Bytes received over lanes.
    pub lane_rx_bytes: u64,
    /// Doorbells that shims rang.
    pub rings: u64,
    /// Sleeps from which a lane could wake.
    pub sleeps: u64,
    /// Connections that shims have reset.
    pub resets: u64,
    /// Connections that ended as after a reset, because the process at the other end died with bytes unread on its ring.
    #[serde(default)]
    pub deaths: u64,
    /// Ports of RDMA devices that carry lanes, or have.
    #[serde(default)]
    pub rails: Vec<RailStats>,
}

/// Counters of one port of one device, all peer nodes together.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct RailStats {
    /// Name of the device.
    pub device: String,
    /// Port of the device, from 1.
    pub port: u8,
    /// Links that work now, by peer node.
    pub links: Vec<RailLinks>,
    /// RDMA writes that were acknowledged.
    pub writes: u64,
    /// Bytes of lanes that were acknowledged: written, or sent in messages.
    pub bytes: u64,
    /// Messages of 44 bytes and more that were acknowledged.
    pub messages_sent: u64,
    /// Messages that came from the peers.
    pub messages_received: u64,
    /// Links that failed, those that never worked among them.
    pub links_failed: u64,
    /// How often the other node's daemon took how long to answer over a link: the parts of a histogram.
    pub round_trips: Vec<u64>,
    /// All of these together.
    pub round_trips_ns: u64,
}

/// Links over one rail to one node.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct RailLinks {
    /// Empty where the caller may not know the nodes: then the sum over all.
    pub node: String,
    /// Links that work now.
    pub up: u64,
    /// Lanes that use them.
    pub lanes: u64,
}
