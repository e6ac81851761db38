//! Plain data of the verbs traits.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Why a verb failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("libibverbs is not installed")]
    NoLibrary,
    #[error("librdmacm is not installed, which connects iWARP queue pairs")]
    NoCmLibrary,
    #[error("the library lacks {0}")]
    NoSymbol(&'static str),
    #[error("no such device, or it was removed")]
    NoDevice,
    #[error("the device or its driver cannot do this")]
    Unsupported,
    #[error("the kernel's connection manager is not there (module rdma_ucm)")]
    NoConnectionManager,
    #[error("this address belongs to no port of this device")]
    NotOurAddress,
    #[error("the peer's device was not reached")]
    Unreachable,
    #[error("the peer refused the connection, or ended it")]
    Refused,
    #[error("refused as invalid")]
    Invalid,
    #[error("not permitted")]
    Permission,
    #[error("out of memory or device resources")]
    NoMemory,
    #[error("the queue is full")]
    Full,
    #[error("system error {0}")]
    Os(i32),
}

/// Posting stopped: `accepted` requests from the front of the list are in the queue, the rest are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{accepted} requests posted, then: {error}")]
pub struct PostError {
    pub accepted: usize,
    pub error: Error,
}

/// Numbers of objects that exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    pub devices: usize,
    pub pds: usize,
    pub mrs: usize,
    pub cqs: usize,
    pub qps: usize,
    /// Objects that the library refused to free; still counted above.
    pub stuck: usize,
}

/// Names one appearance of a device.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId {
    /// `rxe0`, `mlx5_0`.
    pub name: String,
    /// Kernel's number of this appearance (of its folder in sysfs); not used again while the node runs.
    pub index: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// InfiniBand's transport, over InfiniBand or RoCE: queue pairs are connected by attributes.
    InfiniBand,
    /// Queue pairs exist only as ends of RDMA-CM connections.
    Iwarp,
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkLayer {
    InfiniBand,
    /// RoCE, when the transport is InfiniBand's.
    Ethernet,
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PortState {
    Down,
    Init,
    Armed,
    Active,
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GidKind {
    InfiniBand,
    RoceV1,
    RoceV2,
    /// Not from the device's table: an IP address of its interface, by which iWARP connects.
    Address,
    /// The driver gives no type (iWARP's own is the port's hardware address).
    Other,
}

/// A port's address: an IPv6 address in form, IPv4 ones mapped.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }

    /// The address that a RoCE v2 GID stands for.
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
    /// Full length as the `rdma` and `ibv_devinfo` tools show it.
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Place in the port's table. Only good until the next GID event.
    pub index: u32,
    pub gid: Gid,
    pub kind: GidKind,
    /// Network interface it belongs to.
    pub netdev: Option<String>,
}

/// Path MTU of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mtu {
    B256,
    B512,
    B1024,
    B2048,
    B4096,
}

impl Mtu {
    pub const ALL: [Mtu; 5] = [Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096];

    pub fn bytes(self) -> u32 {
        256 << self as u32
    }

    pub fn from_bytes(bytes: u32) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|m| m.bytes() == bytes)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// From 1.
    pub port: u8,
    pub state: PortState,
    pub link_layer: LinkLayer,
    pub active_mtu: Mtu,
    pub max_mtu: Mtu,
    /// 0 but on InfiniBand.
    pub lid: u16,
    /// Megabits per second, as the driver claims.
    pub speed_mbps: Option<u32>,
    pub gids: Vec<GidEntry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub qps: u32,
    pub qp_requests: u32,
    pub cqs: u32,
    pub cq_entries: u32,
    pub mrs: u32,
    pub mr_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub id: DeviceId,
    pub node_guid: u64,
    pub transport: Transport,
    pub numa_node: Option<u32>,
    /// Address on the bus; none for software devices.
    pub pci: Option<String>,
    pub limits: Limits,
    pub ports: Vec<PortInfo>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    PortUp(u8),
    PortDown(u8),
    /// The port's GID table changed: indexes known so far are worth nothing.
    GidChange(u8),
    /// LID, key table or subnet manager changed: look at the port again.
    PortChange(u8),
    /// The device is gone or must be reset. Nothing but dropping its objects works from now on. Not all
    /// devices say this: rxe works on and its removal waits until it is closed. See `devices::Watch`.
    Removed,
    /// A queue pair went into the error state without a request of ours.
    QpError(u32),
    /// A completion queue overflowed; its queue pairs are lost.
    CqError,
    /// Something without consequences for us.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device reads it for our own requests; nobody can write to it over this region.
    LocalRead,
    /// The device also writes what we receive into it.
    LocalWrite,
    /// Peers with the key and a queue pair of the same protection domain may write.
    RemoteWrite,
}

/// Sizes of a queue pair. Requests have one piece of memory each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpCaps {
    pub send_requests: u32,
    pub recv_buffers: u32,
    /// Bytes that a request may carry in itself.
    pub inline_bytes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    Reset,
    Init,
    Rtr,
    Rts,
    /// Being drained, or its send queue has failed.
    Draining,
    Error,
}

/// What a peer has to know of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub qpn: u32,
    /// First packet number, 24 random bits.
    pub psn: u32,
    pub gid: Gid,
    /// Or, with iWARP, the port that it listens at; 0: it does not.
    pub lid: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RtrAttr {
    pub remote: Endpoint,
    /// Address that the peer knows us by.
    pub local: Gid,
    /// The smaller of both ends' active MTUs.
    pub mtu: Mtu,
    /// Our own port and the index of our own GID on it.
    pub port: u8,
    pub gid_index: u32,
    /// Whether packets carry GIDs: always on RoCE, on InfiniBand only beyond the subnet.
    pub global: bool,
    /// What a sender waits when we have no receive buffer, coded as in the specification (12: 0.64 ms).
    pub min_rnr_timer: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub service_level: u8,
}

impl RtrAttr {
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RtsAttr {
    /// Our own first packet number: the one that the peer was told.
    pub psn: u32,
    /// Wait for an acknowledgement: 4.096 µs × 2^timeout, 1 to 31. (0 would be for ever.)
    pub timeout: u8,
    /// Repeats until the queue pair fails, 0 to 6. (7 is the most that the field takes, but for rxe it
    /// means for ever: a dead peer would never be noticed.)
    pub retry_count: u8,
    /// Repeats when the peer has no receive buffer, 0 to 7; 7 is for ever.
    pub rnr_retry: u8,
}

/// A piece of registered memory of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    pub addr: u64,
    pub len: u32,
    pub lkey: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op<'a> {
    /// Write into the peer's memory.
    Write { local: Sge, remote: u64, rkey: u32 },
    /// Write, and use up one of the peer's receive buffers to tell it `imm`.
    WriteImm {
        local: Sge,
        remote: u64,
        rkey: u32,
        imm: u32,
    },
    /// A message out of registered memory, which must not change until it is completed.
    Message(Sge),
    /// A message of at most [`QpCaps::inline_bytes`]; copied when posted.
    Inline(&'a [u8]),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    pub wr_id: u64,
    pub op: Op<'a>,
    /// Whether its success is told.
    pub signaled: bool,
}

/// A buffer for one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvBuffer {
    pub wr_id: u64,
    pub buffer: Sge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    Success,
    /// The queue pair was in error already.
    Flushed,
    /// No acknowledgement after all repeats: peer, cable or port gone.
    RetryExceeded,
    /// The peer had no receive buffer after all repeats.
    RnrRetryExceeded,
    /// Our own key, bounds or length are wrong.
    LocalProtection,
    LocalLength,
    /// The peer's device refused key, bounds or rights.
    RemoteAccess,
    RemoteInvalid,
    /// The peer's device failed.
    RemoteOperation,
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Opcode {
    Send,
    Write,
    Recv,
    RecvWriteImm,
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    pub wr_id: u64,
    pub status: Status,
    /// The driver's own code beside an error.
    pub vendor: u32,
    /// Only with success, as all below but `qpn`.
    pub opcode: Opcode,
    /// Length of what was received.
    pub bytes: u32,
    pub imm: Option<u32>,
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
