//! TCP sockets of network namespaces, asked for by their addresses.
//!
//! `/proc/PID/net/tcp` is written by a walk through one hash table that all namespaces share, empty places included: on a
//! node with 500 pods, reading it for each took seconds. A question for one socket looks at one place of that table. Whether
//! all sockets of a namespace were found so is told by the kernel's count of them, which costs nothing either.

use super::address::normal;
use super::tcp::{self, Socket};
use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::{
    ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags,
};
use netlink_packet_sock_diag::SockDiagMessage;
use rustix::thread::{move_into_link_name_space, LinkNameSpaceType};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use underpass_admin::{netlink, proc};

/// Local and peer address; of a listener, the peer's is unspecified.
pub(crate) type Pair = (SocketAddr, SocketAddr);

/// The peer of a listener at this address.
pub(crate) fn anybody(local: SocketAddr) -> SocketAddr {
    match local {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

/// More questions than this cost about as much as the whole list.
const QUESTIONS_MAX: usize = 256;
/// Any socket with these addresses.
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// What can be asked in one network namespace.
pub(crate) struct Namespace {
    pid: u32,
    /// `None`: it cannot be entered, or the kernel has no sock_diag.
    socket: Option<netlink_sys::Socket>,
}

/// Shows each of these namespaces, which are given with a process in each, to `look`, on a thread that enters them one after the
/// other. Those that it may not enter can still be listed.
pub(crate) fn each<T: Send>(
    of: &HashMap<u64, u32>,
    look: impl FnMut(u64, &Namespace) -> T + Send,
) -> Vec<T> {
    std::thread::scope(|s| {
        let work = || all(of, look);
        let entering = std::thread::Builder::new().name("namespaces".into());
        let done = entering.spawn_scoped(s, work).map(|t| t.join());
        done.ok().and_then(Result::ok).unwrap_or_default()
    })
}

fn all<T>(of: &HashMap<u64, u32>, mut look: impl FnMut(u64, &Namespace) -> T) -> Vec<T> {
    let mut here = proc::own_netns();
    let mut one = |(netns, pid): (&u64, &u32)| {
        let mut socket = None;
        if answers() && (here == Some(*netns) || enter(*netns, *pid).is_ok()) {
            here = Some(*netns);
            socket = netlink::open(netlink_sys::protocols::NETLINK_SOCK_DIAG).ok();
        }
        look(*netns, &Namespace { pid: *pid, socket })
    };
    of.iter().map(&mut one).collect()
}

fn enter(netns: u64, pid: u32) -> io::Result<()> {
    let of = proc::living(pid).ok_or(io::ErrorKind::NotFound)?;
    let there = File::open(of.join("ns/net"))?;
    if there.metadata()?.ino() != netns {
        return Err(io::ErrorKind::NotFound.into()); // it has gone elsewhere
    }
    Ok(move_into_link_name_space(
        there.as_fd(),
        Some(LinkNameSpaceType::Network),
    )?)
}

impl Namespace {
    /// Its sockets, but those in TIME_WAIT. `known`: addresses of those that it probably has; if it has no others, its list is
    /// not read.
    pub(crate) fn sockets(&self, known: &[Pair]) -> Vec<Socket> {
        let count = tcp::in_use(self.pid);
        if count == Some(0) {
            return Vec::new();
        }
        let found = || {
            let found = self.found(known)?;
            // (What the kernel is still making of a handshake is found, and not counted.)
            let whole = found.iter().filter(|s| s.state != tcp::state::SYN_RECV);
            (Some(whole.count()) == count).then_some(found)
        };
        found().unwrap_or_else(|| tcp::listed(self.pid, count))
    }

    /// Those of these that there are, each once. `None`: too many to ask for, or nobody can be asked.
    pub(crate) fn found(&self, known: &[Pair]) -> Option<Vec<Socket>> {
        let socket = self.socket.as_ref()?;
        if known.len() > QUESTIONS_MAX {
            return None;
        }
        let found = known.iter().filter_map(|pair| ask(socket, *pair).ok());
        let by_cookie: HashMap<[u8; 8], Socket> = found.collect();
        let alive = by_cookie.into_values();
        Some(alive.filter(|s| s.state != tcp::state::TIME_WAIT).collect())
    }

    /// Those of these connections that there are.
    pub(crate) fn connections(&self, of: &[Pair]) -> HashMap<Pair, Socket> {
        let Some(socket) = self.socket.as_ref().filter(|_| of.len() <= QUESTIONS_MAX) else {
            let all = tcp::connections(self.pid).into_iter();
            let wanted: HashSet<&Pair> = of.iter().collect();
            return all.filter(|(p, _)| wanted.contains(p)).collect();
        };
        let found = of.iter().filter_map(|p| Some((*p, ask(socket, *p).ok()?.1)));
        found
            .filter(|(p, s)| (s.local, s.peer) == *p && s.state != tcp::state::LISTEN)
            .collect()
    }

    /// All connections: reads the list.
    pub(crate) fn listed(&self) -> HashMap<Pair, Socket> {
        tcp::connections(self.pid)
    }

    pub(crate) fn in_use(&self) -> Option<usize> {
        tcp::in_use(self.pid)
    }
}

/// Can the kernel be asked at all? (Without its module, it says that there is no such socket.)
fn answers() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    let look = || {
        let socket = netlink::open(netlink_sys::protocols::NETLINK_SOCK_DIAG)?;
        let listeners = request(AF_INET, StateFlags::LISTEN, SocketId::new_v4());
        netlink::ask(&socket, NLM_F_DUMP, listeners, |_| Ok(()))
    };
    *KNOWN.get_or_init(|| look().is_ok())
}

fn request(family: u8, states: StateFlags, socket_id: SocketId) -> SockDiagMessage {
    SockDiagMessage::InetRequest(InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id,
    })
}

/// The socket that the kernel would give a packet of this connection to: the connection's, otherwise a listener. With its
/// cookie.
fn ask(socket: &netlink_sys::Socket, (local, peer): Pair) -> io::Result<([u8; 8], Socket)> {
    let v4 = local.is_ipv4();
    let mut id = match v4 {
        true => SocketId::new_v4(),
        false => SocketId::new_v6(),
    };
    (id.source_address, id.source_port) = (local.ip(), local.port());
    (id.destination_address, id.destination_port) = (peer.ip(), peer.port());
    id.cookie = NO_COOKIE;
    let family = if v4 { AF_INET } else { AF_INET6 };
    let mut found = None;
    // (The acknowledgement says where the answer ends.)
    netlink::ask(
        socket,
        NLM_F_ACK,
        request(family, StateFlags::all(), id),
        |m| {
            if let SockDiagMessage::InetResponse(r) = m {
                found = Some(told(&r));
            }
            Ok(())
        },
    )?;
    found.ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn told(r: &InetResponse) -> ([u8; 8], Socket) {
    let (h, id) = (&r.header, &r.header.socket_id);
    let socket = Socket {
        local: normal((id.source_address, id.source_port).into()),
        peer: normal((id.destination_address, id.destination_port).into()),
        state: h.state,
        uid: h.uid,
        inode: h.inode.into(),
    };
    (id.cookie, socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    fn inode(s: impl AsFd) -> u64 {
        rustix::fs::fstat(s).unwrap().st_ino
    }

    /// In the namespace of this process.
    fn here<T: Send>(look: impl FnMut(u64, &Namespace) -> T + Send) -> T {
        let own = HashMap::from([(proc::own_netns().unwrap(), std::process::id())]);
        each(&own, look).pop().expect("one namespace")
    }

    #[test]
    fn a_socket_is_found_by_its_addresses() {
        for address in ["127.0.0.1:0", "[::1]:0", "[::]:0", "0.0.0.0:0"] {
            let Ok(l) = TcpListener::bind(address) else {
                eprintln!("SKIPPED: no {address} here");
                continue;
            };
            let listens = l.local_addr().unwrap();
            let to = SocketAddr::from(([127, 0, 0, 1], listens.port()));
            let a = match address {
                "[::1]:0" => TcpStream::connect(listens).unwrap(),
                // (With `::`, IPv4 between a socket of either kind.)
                _ => TcpStream::connect(to).unwrap(),
            };
            let pair = (a.local_addr().unwrap(), a.peer_addr().unwrap());
            let other = (pair.1, pair.0);
            let look = |pair| here(|_, n| n.connections(&[pair]).get(&pair).map(|s| s.inode));
            assert_eq!(look(pair), Some(inode(&a)), "{address}");
            assert_eq!(look(other), Some(0), "{address}: not accepted yet");
            let (b, _) = l.accept().unwrap();
            assert_eq!(look(other), Some(inode(&b)), "{address}");
            let all = [(listens, anybody(listens)), pair, other];
            let mut found = here(|_, n| n.found(&all)).expect("sock_diag");
            found.sort_by_key(|s| s.inode);
            let mut listed = tcp::listed(std::process::id(), None);
            listed.retain(|s| [inode(&l), inode(&a), inode(&b)].contains(&s.inode));
            listed.sort_by_key(|s| s.inode);
            assert_eq!(found, listed, "{address}");
            // (A listener is not the connection that was asked for.)
            let nobody = (pair.1, (pair.0.ip(), 1).into());
            assert_eq!(look(nobody), None, "{address}");
        }
    }

    #[test]
    fn what_was_not_known_is_listed() {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let all = here(|_, n| n.sockets(&[]));
        assert!(all.iter().any(|s| s.inode == inode(&l)));
    }
}
