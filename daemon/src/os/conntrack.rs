//! How a network namespace translates the addresses of a connection that goes through it, by the kernel's table of connections
//! (conntrack, asked over netlink). kube-proxy's translation of a service's address is in the node's namespace, whichever the
//! client's is.
//!
//! A question for one connection looks at one place of a hash table. It needs CAP_NET_ADMIN there, and finds what is in the default
//! zone.

use super::address::{normal, Pair};
use netlink_packet_core::{NLA_F_NESTED, NLM_F_ACK};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use underpass_admin::netlink::{self, attribute, find, Raw};

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
        netlink::ask(&self.0, NLM_F_ACK, question(sent), |m| {
            found = tuples(&m.bytes).or(found);
            Ok(())
        })?;
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

fn question((src, dst): Tuple) -> Raw {
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
    Raw { kind: GET, bytes }
}

/// Of an answer, from the protocol's own header on: packets of who began, and packets back.
fn tuples(bytes: &[u8]) -> Option<[Tuple; 2]> {
    let all = bytes.get(HEADER..)?;
    Some([tuple(all, TUPLE_ORIG)?, tuple(all, TUPLE_REPLY)?])
}

fn tuple(all: &[u8], kind: u16) -> Option<Tuple> {
    let all = find(all, kind)?;
    let (ips, ports) = (find(all, TUPLE_IP)?, find(all, TUPLE_PROTO)?);
    let ip = |v4, v6| -> Option<IpAddr> {
        let four = |v: &[u8]| Some(Ipv4Addr::from(<[u8; 4]>::try_from(v).ok()?).into());
        let six = |v: &[u8]| Some(Ipv6Addr::from(<[u8; 16]>::try_from(v).ok()?).into());
        find(ips, v4).and_then(four).or_else(|| six(find(ips, v6)?))
    };
    let port = |kind| Some(u16::from_be_bytes(find(ports, kind)?.try_into().ok()?));
    let src = (ip(V4_SRC, V6_SRC)?, port(SRC_PORT)?).into();
    let dst = (ip(V4_DST, V6_DST)?, port(DST_PORT)?).into();
    Some((src, dst))
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
            let m = question(t);
            assert_eq!(tuple(&m.bytes[HEADER..], TUPLE_ORIG), Some(t));
            assert_eq!(tuples(&m.bytes), None, "half of an answer");
        }
    }

    proptest! {
        #[test]
        fn noise_is_nothing(bytes: Vec<u8>) {
            let _ = tuples(&bytes);
        }

        /// Whatever is cut off or changed, no panic.
        #[test]
        fn a_changed_answer(cut in 0usize..200, at: proptest::sample::Index, to: u8) {
            let t = ("10.0.0.1:1".parse().unwrap(), "10.0.0.2:2".parse().unwrap());
            let mut bytes = question(t).bytes;
            bytes.extend_from_slice(&question(t).bytes[HEADER..]);
            bytes.truncate(bytes.len().saturating_sub(cut).max(1));
            let i = at.index(bytes.len());
            bytes[i] = to;
            let _ = tuples(&bytes);
        }
    }
}
