//! Plain data of the verbs traits.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Why a verb failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// `libibverbs.so.1` cannot be loaded.
    #[error("libibverbs is not installed")]
    NoLibrary,
    /// `librdmacm.so.1` cannot be loaded.
    #[error("librdmacm is not installed, which connects iWARP queue pairs")]
    NoCmLibrary,
    /// The library is too old, or a different one.
    #[error("the library lacks {0}")]
    NoSymbol(&'static str),
    /// ENODEV, ENXIO or EIO; or the name belongs to another device by now.
    #[error("no such device, or it was removed")]
    NoDevice,
    /// EOPNOTSUPP or ENOSYS; or the driver has no such function.
    #[error("the device or its driver cannot do this")]
    Unsupported,
    /// `/dev/infiniband/rdma_cm` cannot be used; with iWARP only.
    #[error("the kernel's connection manager is not there (module rdma_ucm)")]
    NoConnectionManager,
    /// With iWARP only.
    #[error("this address belongs to no port of this device")]
    NotOurAddress,
    /// No answer to iWARP's handshake in time, or no route.
    #[error("the peer's device was not reached")]
    Unreachable,
    /// Nobody listens there, or the connection was ended during the handshake.
    #[error("the peer refused the connection, or ended it")]
    Refused,
    /// EINVAL; or the object is not in a state for it.
    #[error("refused as invalid")]
    Invalid,
    /// EPERM or EACCES: capabilities, limits of locked memory.
    #[error("not permitted")]
    Permission,
    /// ENOMEM or ENOSPC.
    #[error("out of memory or device resources")]
    NoMemory,
    /// For a queue pair: posted requests have to complete first.
    #[error("the queue is full")]
    Full,
    /// Another errno.
    #[error("system error {0}")]
    Os(i32),
}

/// Posting stopped: the first `accepted` requests of the list are in the queue, the rest are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{accepted} requests posted, then: {error}")]
pub struct PostError {
    /// That many requests of the list are in the queue.
    pub accepted: usize,
    /// Why the next one is not.
    pub error: Error,
}

/// Numbers of objects that exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Open devices.
    pub devices: usize,
    /// Protection domains.
    pub pds: usize,
    /// Memory regions.
    pub mrs: usize,
    /// Completion queues.
    pub cqs: usize,
    /// Queue pairs.
    pub qps: usize,
    /// Objects that the library refused to free; still counted above.
    pub stuck: usize,
}

/// Identifies one appearance of a device.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId {
    /// Such as `rxe0` or `mlx5_0`.
    pub name: String,
    /// The kernel's number of this appearance (of its directory in sysfs); not reused while the node runs.
    pub index: u64,
}

/// The transport of a device's queue pairs (`node_type` in sysfs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// InfiniBand's transport, over InfiniBand or RoCE: queue pairs are connected by attributes.
    InfiniBand,
    /// Queue pairs exist only as ends of RDMA-CM connections.
    Iwarp,
    /// Something else, which cannot be used.
    Other,
}

/// The link layer of a port (`link_layer` in sysfs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkLayer {
    /// InfiniBand's own wires.
    InfiniBand,
    /// RoCE, when the transport is InfiniBand's.
    Ethernet,
    /// Not known.
    Other,
}

/// State of a port (`state` in sysfs; PortState in the InfiniBand specification).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PortState {
    /// No link.
    Down,
    /// There is a link, but the subnet manager has not configured it yet.
    Init,
    /// Configured, but no data yet.
    Armed,
    /// It carries data.
    Active,
    /// Not known.
    Other,
}

/// The type of a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// Subnet prefix and number of the port.
    InfiniBand,
    /// Packets go by Ethernet address; no router forwards them.
    RoceV1,
    /// Packets go over UDP between the IP addresses that the GIDs represent.
    RoceV2,
    /// Not from the device's table: an IP address of its interface, which iWARP connects to.
    Address,
    /// The driver reports no type (iWARP's own GID is the port's hardware address).
    Other,
}

/// A port's address, in the form of an IPv6 address; IPv4 addresses are mapped.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Is this an empty entry of the table?
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }

    /// The IP address that a RoCE v2 GID represents.
    pub fn ip(&self) -> IpAddr {
        Ipv6Addr::from(self.0).to_canonical()
    }
}

impl From<Ipv4Addr> for Gid {
    fn from(ip: Ipv4Addr) -> Self {
        Gid(ip.to_ipv6_mapped().octets())
    }
}

impl From<IpAddr> for Gid {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => ip.into(),
            IpAddr::V6(ip) => Gid(ip.octets()),
        }
    }
}

impl fmt::Display for Gid {
    /// The full form, as the `rdma` and `ibv_devinfo` tools show it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, pair) in self.0.chunks_exact(2).enumerate() {
            let colon = if i == 0 { "" } else { ":" };
            write!(f, "{colon}{:02x}{:02x}", pair[0], pair[1])?;
        }
        Ok(())
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for Gid {
    type Err = std::net::AddrParseError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Ok(Gid(s.parse::<Ipv6Addr>()?.octets()))
    }
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Index in the port's table. Valid only until the next GID event.
    pub index: u32,
    /// The address.
    pub gid: Gid,
    /// The type of the GID, and so of the packets that use it.
    pub kind: GidKind,
    /// The network interface to which it belongs.
    pub netdev: Option<String>,
}

/// Path MTU of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1024 bytes.
    B1024,
    /// 2048 bytes.
    B2048,
    /// 4096 bytes.
    B4096,
}

impl Mtu {
    /// In order of size. The index is the code in messages ([`crate::wire::LinkEnd::mtu`]).
    pub const ALL: [Mtu; 5] = [Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096];

    /// Bytes of payload in a packet.
    pub fn bytes(self) -> u32 {
        256 << self as u32
    }

    /// `None`: no path MTU has this size.
    pub fn from_bytes(bytes: u32) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|m| m.bytes() == bytes)
    }
}

/// What a device reports about a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// From 1.
    pub port: u8,
    /// The port carries data only in [`PortState::Active`].
    pub state: PortState,
    /// The port's link layer.
    pub link_layer: LinkLayer,
    /// The MTU in use, of its link or its interface.
    pub active_mtu: Mtu,
    /// The largest MTU that the port supports.
    pub max_mtu: Mtu,
    /// Local identifier; 0 except on InfiniBand.
    pub lid: u16,
    /// Megabits per second, as the driver reports.
    pub speed_mbps: Option<u32>,
    /// The entries that are set, by index.
    pub gids: Vec<GidEntry>,
}

/// Maximum numbers and sizes of a device (`ibv_query_device(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs.
    pub qps: u32,
    /// Requests in a queue of a queue pair.
    pub qp_requests: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Completions in a completion queue.
    pub cq_entries: u32,
    /// Memory regions.
    pub mrs: u32,
    /// Size of a region in bytes.
    pub mr_bytes: u64,
}

/// What a device reports about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Which one this is.
    pub id: DeviceId,
    /// The device's own number, EUI-64.
    pub node_guid: u64,
    /// The transport of its queue pairs.
    pub transport: Transport,
    /// The NUMA node of the device, if there is one.
    pub numa_node: Option<u32>,
    /// Address on the PCI bus; none for software devices.
    pub pci: Option<String>,
    /// Its maximum numbers and sizes.
    pub limits: Limits,
    /// In order of numbers.
    pub ports: Vec<PortInfo>,
}

/// What a device reports unasked (`ibv_get_async_event(3)`). The numbers are those of ports, or of queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// The port carries data.
    PortUp(u8),
    /// The port carries none any more.
    PortDown(u8),
    /// The port's GID table changed: indexes read before are invalid.
    GidChange(u8),
    /// LID, key table or subnet manager changed: look at the port again.
    PortChange(u8),
    /// The device is gone or must be reset. Its objects can only be dropped from now on. Not all devices report this:
    /// rxe continues to work, and its removal waits until it is closed. See `devices::Watch`.
    Removed,
    /// A queue pair went into the error state without a request of ours.
    QpError(u32),
    /// A completion queue overflowed; its queue pairs are lost.
    CqError,
    /// Something that does not matter to us.
    Other,
}

/// Who may access a region, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device reads it for our own requests; nobody can write to it through this region.
    LocalRead,
    /// The device also writes received messages into it.
    LocalWrite,
    /// Peers with the key and a queue pair of the same protection domain may write.
    RemoteWrite,
}

/// Sizes of a queue pair. Each request has one memory range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpCaps {
    /// Length of the send queue.
    pub send_requests: u32,
    /// Length of the receive queue.
    pub recv_buffers: u32,
    /// Maximum number of bytes that a request may contain itself (inline).
    pub inline_bytes: u32,
}

/// State of a queue pair (`ibv_modify_qp(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    /// New: nothing can be posted.
    Reset,
    /// It has a port: receive buffers can be posted.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send, too.
    Rts,
    /// Being drained, or its send queue has failed.
    Draining,
    /// Whatever is posted is flushed.
    Error,
}

/// What a peer has to know about a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Number of the queue pair, 24 bits.
    pub qpn: u32,
    /// First packet number, 24 random bits.
    pub psn: u32,
    /// Address of its port.
    pub gid: Gid,
    /// Local identifier of its port; or, with iWARP, the TCP port on which it listens; 0: it does not listen.
    pub lid: u16,
}

/// Arguments of [`super::QueuePair::to_rtr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RtrAttr {
    /// The peer's end.
    pub remote: Endpoint,
    /// The address by which the peer knows us.
    pub local: Gid,
    /// The smaller of both ends' active MTUs.
    pub mtu: Mtu,
    /// Our own port, from 1.
    pub port: u8,
    /// Index of `local` in our port's table.
    pub gid_index: u32,
    /// Do packets carry GIDs? Always on RoCE; on InfiniBand only beyond the subnet.
    pub global: bool,
    /// How long a sender waits when we have no receive buffer, coded as in the specification (12: 0.64 ms).
    pub min_rnr_timer: u8,
    /// Hop limit of packets with GIDs.
    pub hop_limit: u8,
    /// Traffic class of packets with GIDs (with RoCE v2, the one in the IP header).
    pub traffic_class: u8,
    /// Service level of InfiniBand packets, 0 to 15.
    pub service_level: u8,
}

impl RtrAttr {
    /// The usual values; packets carry GIDs if the peer has one.
    pub fn new(remote: Endpoint, local: Gid, mtu: Mtu, port: u8, gid_index: u32) -> Self {
        RtrAttr {
            remote,
            local,
            mtu,
            port,
            gid_index,
            global: !remote.gid.is_zero(),
            min_rnr_timer: 12,
            hop_limit: 64,
            traffic_class: 0,
            service_level: 0,
        }
    }
}

/// Arguments of [`super::QueuePair::to_rts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RtsAttr {
    /// Our first packet number, which the peer was told.
    pub psn: u32,
    /// Time-out for an acknowledgement: 4.096 µs × 2^timeout, 1 to 31. (0 would mean for ever.)
    pub timeout: u8,
    /// Number of repeats until the queue pair fails, 0 to 6. (7 is the maximum of the field, but for rxe it means for
    /// ever: a dead peer would never be noticed.)
    pub retry_count: u8,
    /// Number of repeats when the peer has no receive buffer, 0 to 7; 7 means for ever.
    pub rnr_retry: u8,
}

/// A range of our registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// Address of the first byte, at or above [`super::MemoryRegion::addr`].
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Key of the region.
    pub lkey: u32,
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op<'a> {
    /// Write into the peer's memory.
    Write {
        /// The bytes.
        local: Sge,
        /// Address of the first byte in the peer's memory.
        remote: u64,
        /// Key of the peer's region.
        rkey: u32,
    },
    /// Write, and use one of the peer's receive buffers to tell it `imm`.
    WriteImm {
        /// The bytes.
        local: Sge,
        /// Address of the first byte in the peer's memory.
        remote: u64,
        /// Key of the peer's region.
        rkey: u32,
        /// The value that the peer's completion has in [`Completion::imm`].
        imm: u32,
    },
    /// A message from registered memory, which must not change until it is completed.
    Message(Sge),
    /// A message of at most [`QpCaps::inline_bytes`]; it is copied when posted.
    Inline(&'a [u8]),
}

/// A request to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Returned in its completion.
    pub wr_id: u64,
    /// The operation.
    pub op: Op<'a>,
    /// Does a success cause a completion?
    pub signaled: bool,
}

/// A buffer for one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvBuffer {
    /// Returned in its completion.
    pub wr_id: u64,
    /// Where the message is stored.
    pub buffer: Sge,
}

/// Result of a request or a receive buffer (`ibv_poll_cq(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Done.
    Success,
    /// The queue pair was already in the error state.
    Flushed,
    /// No acknowledgement after all repeats: peer, cable or port gone.
    RetryExceeded,
    /// The peer had no receive buffer after all repeats.
    RnrRetryExceeded,
    /// Our own key, bounds or length are wrong.
    LocalProtection,
    /// A message is longer than its buffer, or than a port can send.
    LocalLength,
    /// The peer's device refused the key, the bounds or the access.
    RemoteAccess,
    /// The peer's device could not process it; a message is longer than the peer's buffer.
    RemoteInvalid,
    /// The peer's device failed.
    RemoteOperation,
    /// Anything else, see [`Completion::vendor`].
    Other,
}

/// The operation to which a completion refers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// A message that we sent.
    Send,
    /// A write of ours, with or without immediate data.
    Write,
    /// A message that we received.
    Recv,
    /// A write with immediate data ([`Op::WriteImm`]) that we received.
    RecvWriteImm,
    /// Unknown, or there was an error.
    Other,
}

/// A completion of one request or receive buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The id that was posted with it.
    pub wr_id: u64,
    /// The result.
    pub status: Status,
    /// The driver's own error code.
    pub vendor: u32,
    /// Valid only after a success, like all fields below except `qpn`.
    pub opcode: Opcode,
    /// Length of what was received.
    pub bytes: u32,
    /// The immediate data that came with it.
    pub imm: Option<u32>,
    /// The queue pair.
    pub qpn: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_addresses() {
        let gid = Gid::from(Ipv4Addr::new(10, 9, 0, 1));
        assert_eq!(gid.to_string(), "0000:0000:0000:0000:0000:ffff:0a09:0001");
        assert_eq!(gid.to_string().parse(), Ok(gid));
        assert_eq!(gid.ip(), IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1)));
        let v6: IpAddr = "fe80::1".parse().unwrap();
        assert_eq!(Gid::from(v6).ip(), v6);
        assert!("10.9.0.1".parse::<Gid>().is_err());
    }

    #[test]
    fn mtus() {
        for m in Mtu::ALL {
            assert_eq!(Mtu::from_bytes(m.bytes()), Some(m));
        }
        assert_eq!(Mtu::B4096.bytes(), 4096);
        assert_eq!(Mtu::from_bytes(1500), None);
    }
}
