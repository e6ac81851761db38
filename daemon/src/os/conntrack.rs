//! How a network namespace translates the addresses of a connection that goes through it, by the kernel's table of connections
//! (conntrack, asked over netlink). kube-proxy's translation of a service's address is in the node's namespace, whichever the
//! client's is.
//!
//! A question for one connection looks at one place of a hash table. It needs CAP_NET_ADMIN there, and finds what is in the default
//! zone.

use super::address::{normal, Pair};
use netlink_packet_core::{
    NetlinkDeserializable, NetlinkHeader, NetlinkSerializable, NLA_F_NESTED, NLA_TYPE_MASK,
    NLM_F_ACK,
};
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use underpass_admin::netlink;

/// As in `linux/netfilter/nfnetlink.h` and `nfnetlink_conntrack.h`.
const GET: u16 = 0x0101;
const TUPLE_ORIG: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const TUPLE_IP: u16 = 1;
const TUPLE_PROTO: u16 = 2;
const V4_SRC: u16 = 1;
const V4_DST: u16 = 2;
const V6_SRC: u16 = 3;
const V6_DST: u16 = 4;
const PROTO_NUM: u16 = 1;
const SRC_PORT: u16 = 2;
const DST_PORT: u16 = 3;
/// Family, version, and two bytes that do not matter here.
const HEADER: usize = 4;
const TCP: u8 = 6;

/// A namespace's table.
pub(crate) struct Table(netlink_sys::Socket);

/// Where packets go in one direction: source, destination.
type Tuple = (SocketAddr, SocketAddr);

impl Table {
    /// That of the thread's namespace.
    pub(crate) fn open() -> io::Result<Self> {
        netlink::open(netlink_sys::protocols::NETLINK_NETFILTER).map(Table)
    }

    /// The connection that has these addresses (local, peer) on this side of the namespace's translation, as it is on the other
    /// side: the other end's local address, and its peer. `None`: the kernel does not know it, or may not be asked.
    pub(crate) fn beyond(&self, (local, peer): Pair) -> Option<Pair> {
        let sent = (normal(local), normal(peer));
        let [orig, reply] = self.find(sent).ok()?;
        // Packets that come back on the other side are, turned round, those that go out there.
        [(orig, reply), (reply, orig)]
            .into_iter()
            .find_map(|(here, back)| (here == sent).then_some(back))
    }

    fn find(&self, sent: Tuple) -> io::Result<[Tuple; 2]> {
        let mut found = None;
        netlink::ask(&self.0, NLM_F_ACK, Message::get(sent), |m| {
            found = m.tuples().or(found);
            Ok(())
        })?;
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// A message of this protocol, from its own header on.
#[derive(Debug)]
struct Message {
    kind: u16,
    bytes: Vec<u8>,
}

impl Message {
    fn get((src, dst): Tuple) -> Self {
        let v4 = src.is_ipv4();
        let ip = |a: SocketAddr| match a.ip() {
            IpAddr::V4(a) => a.octets().to_vec(),
            IpAddr::V6(a) => a.octets().to_vec(),
        };
        let (s, d) = if v4 {
            (V4_SRC, V4_DST)
        } else {
            (V6_SRC, V6_DST)
        };
        let ips = [attribute(s, &ip(src)), attribute(d, &ip(dst))].concat();
        let ports = [
            attribute(PROTO_NUM, &[TCP]),
            attribute(SRC_PORT, &src.port().to_be_bytes()),
            attribute(DST_PORT, &dst.port().to_be_bytes()),
        ];
        let tuple = [
            attribute(TUPLE_IP | NLA_F_NESTED, &ips),
            attribute(TUPLE_PROTO | NLA_F_NESTED, &ports.concat()),
        ];
        let family = if v4 { libc::AF_INET } else { libc::AF_INET6 };
        let mut bytes = vec![family.to_le_bytes()[0], 0, 0, 0];
        bytes.extend(attribute(TUPLE_ORIG | NLA_F_NESTED, &tuple.concat()));
        Message { kind: GET, bytes }
    }

    /// Of an answer: packets of who began, and packets back.
    fn tuples(&self) -> Option<[Tuple; 2]> {
        let all = self.bytes.get(HEADER..)?;
        Some([tuple(all, TUPLE_ORIG)?, tuple(all, TUPLE_REPLY)?])
    }
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(HEADER + value.len()).unwrap_or(u16::MAX);
    let mut a = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
    a.extend(value);
    a.resize(a.len().next_multiple_of(4), 0);
    a
}

/// The value of an attribute among these.
fn value(mut all: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let (head, _) = all.split_at_checked(HEADER)?;
        let [l0, l1, k0, k1] = head.try_into().ok()?;
        let len = usize::from(u16::from_ne_bytes([l0, l1]));
        if u16::from_ne_bytes([k0, k1]) & NLA_TYPE_MASK == kind {
            return all.get(HEADER..len);
        }
        all = all.get(len.max(HEADER).next_multiple_of(4)..)?;
    }
}

fn tuple(all: &[u8], kind: u16) -> Option<Tuple> {
    let all = value(all, kind)?;
    let (ips, ports) = (value(all, TUPLE_IP)?, value(all, TUPLE_PROTO)?);
    let ip = |v4, v6| -> Option<IpAddr> {
        let four = |v: &[u8]| Some(Ipv4Addr::from(<[u8; 4]>::try_from(v).ok()?).into());
        let six = |v: &[u8]| Some(Ipv6Addr::from(<[u8; 16]>::try_from(v).ok()?).into());
        value(ips, v4)
            .and_then(four)
            .or_else(|| six(value(ips, v6)?))
    };
    let port = |kind| Some(u16::from_be_bytes(value(ports, kind)?.try_into().ok()?));
    let src = (ip(V4_SRC, V6_SRC)?, port(SRC_PORT)?).into();
    let dst = (ip(V4_DST, V6_DST)?, port(DST_PORT)?).into();
    Some((src, dst))
}

impl NetlinkSerializable for Message {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        self.bytes.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.bytes);
    }
}

impl NetlinkDeserializable for Message {
    type Error = Infallible;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, Infallible> {
        Ok(Message {
            kind: header.message_type,
            bytes: payload.to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What is asked is in the form of what is answered.
    #[test]
    fn tuples_come_out_as_they_go_in() {
        for (a, b) in [
            ("10.0.0.1:1000", "10.96.0.9:80"),
            ("[fd00::1]:1000", "[fd00:96::9]:65535"),
        ] {
            let t: Tuple = (a.parse().unwrap(), b.parse().unwrap());
            let m = Message::get(t);
            assert_eq!(tuple(&m.bytes[HEADER..], TUPLE_ORIG), Some(t));
            assert_eq!(m.tuples(), None, "half of an answer");
        }
    }

    proptest! {
        #[test]
        fn noise_is_nothing(bytes: Vec<u8>) {
            let _ = Message { kind: 0, bytes }.tuples();
        }

        /// Whatever is cut off or changed, no panic.
        #[test]
        fn a_changed_answer(cut in 0usize..200, at: proptest::sample::Index, to: u8) {
            let t = ("10.0.0.1:1".parse().unwrap(), "10.0.0.2:2".parse().unwrap());
            let mut bytes = Message::get(t).bytes;
            bytes.extend_from_slice(&Message::get(t).bytes[HEADER..]);
            bytes.truncate(bytes.len().saturating_sub(cut).max(1));
            let i = at.index(bytes.len());
            bytes[i] = to;
            let _ = Message { kind: 0, bytes }.tuples();
        }
    }
}
