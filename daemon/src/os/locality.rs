//! Where the local end of a connection is on this node: which interface has its address, and to which processors its
//! process is bound.
//!
//! A pod's address may be on an interface in the pod's own network namespace that lies on one of the node's (macvlan,
//! ipvlan, a VLAN): both count, and what those lie on.

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};
use netlink_sys::{protocols::NETLINK_ROUTE, Socket};
use rustix::thread::{move_into_link_name_space, LinkNameSpaceType};
use std::io;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use underpass_admin::netlink::{self, find, Raw};

/// What is known of an end's place; each part may be unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Locality {
    /// Its address.
    pub address: Option<IpAddr>,
    /// Interfaces in the daemon's network namespace: the one that holds the address, then what each lies on.
    pub interfaces: Vec<String>,
    /// The NUMA node that has all processors of the process, if there are several nodes.
    pub numa: Option<u32>,
}

/// Most interfaces that are followed down from one.
const DEPTH: usize = 8;
/// Most messages of one answer: who may add addresses to its own namespace does not keep a helper at work.
const MESSAGES: usize = 1 << 14;

impl Locality {
    /// The place of the end with this address, in the network namespace of a socket ([`super::sockopt::network_namespace`]) and
    /// the process `pid`. It asks the kernel several times, and enters the namespace on a thread of its own.
    pub fn of(namespace: Option<BorrowedFd<'_>>, address: IpAddr, pid: u32) -> Locality {
        let address = address.to_canonical();
        let found = namespace.map(|n| interfaces(n, address));
        Locality {
            address: Some(address),
            interfaces: found.and_then(Result::ok).unwrap_or_default(),
            numa: numa(pid),
        }
    }
}

fn interfaces(theirs: BorrowedFd<'_>, address: IpAddr) -> io::Result<Vec<String>> {
    let here = route_socket()?;
    let ours = rustix::fs::stat("/proc/thread-self/ns/net")?;
    let their = rustix::fs::fstat(theirs)?;
    if (ours.st_dev, ours.st_ino) == (their.st_dev, their.st_ino) {
        below(None, &here, address)
    } else {
        let there = socket_in(theirs)?;
        below(Some(&there), &here, address)
    }
}

/// A socket for rtnetlink in another network namespace, in which it stays.
fn socket_in(namespace: BorrowedFd<'_>) -> io::Result<Socket> {
    let open = || {
        move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?;
        route_socket()
    };
    std::thread::scope(|s| {
        let opener = std::thread::Builder::new().name("network".into());
        let opener = opener.spawn_scoped(s, open)?;
        let failed = |_| io::Error::other("a thread that enters a network namespace");
        opener.join().map_err(failed)?
    })
}

fn route_socket() -> io::Result<Socket> {
    netlink::open(NETLINK_ROUTE)
}

/// `there`: where the address is, if that is not `here`.
fn below(there: Option<&Socket>, here: &Socket, address: IpAddr) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    let mut asked = there.unwrap_or(here);
    let mut home = there.is_none();
    let mut next = holder(asked, address)?;
    for _ in 0..DEPTH {
        let Some(index) = next else { break };
        let Some(link) = link(asked, index)? else {
            break;
        };
        if home {
            names.extend(link.name);
        }
        match (link.outside, home) {
            (false, _) => {}
            // Interfaces of another namespace that ours lie on are nobody's rails here.
            (true, true) => break,
            // It may also be in a third one, whose numbers are not ours: then a rail is preferred without a reason.
            (true, false) => (asked, home) = (here, true),
        }
        next = link.below.filter(|b| link.outside || *b != index);
    }
    Ok(names)
}

/// `RTM_NEWADDR` and so on (linux/rtnetlink.h), and attributes of addresses and links (if_addr.h, if_link.h).
const GET_LINK: u16 = 18;
const GET_ADDRESS: u16 = 22;
const ADDRESS: u16 = 1;
const LOCAL: u16 = 2;
const NAME: u16 = 3;
const LINK: u16 = 5;
const LINK_NAMESPACE: u16 = 37;
/// `AF_INET` and `AF_INET6`, as these messages have them.
const INET: u8 = 2;
const INET6: u8 = 10;
/// Sizes of `struct ifaddrmsg` and `struct ifinfomsg`.
const ADDRESS_HEAD: usize = 8;
const LINK_HEAD: usize = 16;

/// The number of the interface that has this address.
fn holder(socket: &Socket, address: IpAddr) -> io::Result<Option<u32>> {
    let (family, wanted) = match address {
        IpAddr::V4(a) => (INET, a.octets().to_vec()),
        IpAddr::V6(a) => (INET6, a.octets().to_vec()),
    };
    let mut head = [0; ADDRESS_HEAD];
    head[0] = family;
    let mut found = None;
    ask(socket, GET_ADDRESS, NLM_F_DUMP, &head, |body| {
        // (An interface to one other machine has that one's address as ADDRESS.)
        let attribute = |kind| find(body.get(ADDRESS_HEAD..)?, kind);
        if attribute(LOCAL).or(attribute(ADDRESS)) == Some(&wanted) {
            found = found.or(word(body.get(4..8)));
        }
    })?;
    Ok(found)
}

#[derive(Debug, Default)]
struct Link {
    name: Option<String>,
    /// The number of the interface that it lies on, and whether that is in another network namespace.
    below: Option<u32>,
    outside: bool,
}

fn link(socket: &Socket, index: u32) -> io::Result<Option<Link>> {
    let mut head = [0; LINK_HEAD];
    head[4..8].copy_from_slice(&index.to_ne_bytes());
    let mut found = None;
    ask(socket, GET_LINK, NLM_F_ACK, &head, |body| {
        let attribute = |kind| find(body.get(LINK_HEAD..)?, kind);
        let name = attribute(NAME).and_then(|n| std::str::from_utf8(n).ok());
        found = Some(Link {
            name: name.map(|n| n.trim_end_matches('\0').to_owned()),
            below: word(attribute(LINK)),
            outside: attribute(LINK_NAMESPACE).is_some(),
        });
    })?;
    Ok(found)
}

fn word(bytes: Option<&[u8]>) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes?.try_into().ok()?))
}

/// Sends a request, and shows the body of each message of the answer.
fn ask(
    socket: &Socket,
    kind: u16,
    flags: u16,
    body: &[u8],
    mut each: impl FnMut(&[u8]),
) -> io::Result<()> {
    let mut seen = 0;
    let bytes = body.to_vec();
    netlink::ask(socket, flags, Raw { kind, bytes }, |m| {
        seen += 1;
        if seen > MESSAGES {
            return Err(io::Error::other("too long an answer"));
        }
        each(&m.bytes);
        Ok(())
    })
}

type Ranges = Vec<RangeInclusive<u32>>;

/// The NUMA node that has all processors on which this process may run, if the machine has several.
fn numa(pid: u32) -> Option<u32> {
    let nodes = nodes();
    if nodes.len() < 2 {
        return None;
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let all = status
        .lines()
        .find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
    node_of(&nodes, &ranges(all)?)
}

/// The NUMA nodes and their processors.
fn nodes() -> Vec<(u32, Ranges)> {
    let Ok(all) = std::fs::read_dir("/sys/devices/system/node") else {
        return Vec::new();
    };
    let node = |e: std::fs::DirEntry| {
        let number = e.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
        let list = std::fs::read_to_string(e.path().join("cpulist")).ok()?;
        Some((number, ranges(&list)?))
    };
    all.flatten().filter_map(node).collect()
}

fn node_of(nodes: &[(u32, Ranges)], cpus: &Ranges) -> Option<u32> {
    let within = |r: &RangeInclusive<u32>, all: &Ranges| {
        r.clone().all(|cpu| all.iter().any(|a| a.contains(&cpu)))
    };
    let has = |(_, all): &&(u32, Ranges)| cpus.iter().all(|r| within(r, all));
    nodes.iter().find(has).map(|(number, _)| *number)
}

/// A list of processors as the kernel writes it: `0-3,8`. `None` if it is something else, or empty.
fn ranges(list: &str) -> Option<Ranges> {
    let one = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::fd::AsFd;

    #[test]
    fn the_loopback_interface() {
        let own = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
        let locality = |a: &str| Locality::of(Some(own.as_fd()), a.parse().unwrap(), 1);
        for address in ["127.0.0.1", "::1"] {
            if TcpListener::bind((address, 0)).is_ok() {
                assert_eq!(locality(address).interfaces, ["lo"], "{address}");
            }
        }
        assert_eq!(locality("::ffff:127.0.0.1"), locality("127.0.0.1"));
        assert_eq!(locality("203.0.113.77").interfaces, [""; 0]);
    }

    /// Entering the namespace that a socket is in (the same one, from another thread) finds the same.
    #[test]
    fn the_namespace_of_a_socket() {
        let sock = TcpListener::bind("127.0.0.1:0").unwrap();
        let Ok(namespace) = crate::os::sockopt::network_namespace(sock.as_fd()) else {
            return crate::skip::skip("the namespace of a socket cannot be had here");
        };
        let there = socket_in(namespace.as_fd()).unwrap();
        let here = route_socket().unwrap();
        let found = below(Some(&there), &here, "127.0.0.1".parse().unwrap()).unwrap();
        // (What is found there is not the daemon's own, since this looks like another one.)
        assert_eq!(found, [""; 0]);
        assert_eq!(
            interfaces(namespace.as_fd(), "127.0.0.1".parse().unwrap()).unwrap(),
            ["lo"]
        );
    }

    #[test]
    fn processors_of_a_node() {
        assert_eq!(ranges("0-3,8\n"), Some(vec![0..=3, 8..=8]));
        assert_eq!(ranges("\n"), None);
        assert_eq!(ranges("0-"), None);
        let nodes = [(0, vec![0..=3, 8..=11]), (1, vec![4..=7, 12..=15])];
        let of = |list| node_of(&nodes, &ranges(list).unwrap());
        assert_eq!(of("9"), Some(0));
        assert_eq!(of("5-6,14"), Some(1));
        assert_eq!(of("3-4"), None);
        assert_eq!(of("0-15"), None);
        assert_eq!(of("16"), None);
    }
}
