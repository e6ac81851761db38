//! TCP sockets of network namespaces, by sock_diag.
//!
//! The kernel finds those of a namespace by a walk through one hash table that all namespaces share, empty places included.
//! For `/proc/PID/net/tcp` this takes 3.4 ms (of 262,144 places; twice, with `tcp6`), by sock_diag 0.2 ms: on a node with 500
//! pods, reading the files took seconds. A question for one socket looks at one place of the table.

use super::address::normal;
pub(crate) use super::address::Pair;
use super::conntrack;
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
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use underpass_admin::{netlink, proc};

/// More questions than this cost more than the whole list.
const QUESTIONS_MAX: usize = 16;
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
    /// Its sockets, but those in TIME_WAIT.
    pub(crate) fn sockets(&self) -> Vec<Socket> {
        let dumped = |socket| dump(socket, tcp::in_use(self.pid)).ok();
        let listed = || {
            let mut all = tcp::sockets(self.pid);
            all.retain(|s| s.state != tcp::state::TIME_WAIT);
            all
        };
        self.socket.as_ref().and_then(dumped).unwrap_or_else(listed)
    }

    /// Its connections, as far as the kernel still has their addresses.
    pub(crate) fn connections(&self) -> HashMap<Pair, Socket> {
        let all = self.sockets().into_iter();
        let all = all.filter(|s| s.state != tcp::state::LISTEN);
        all.map(|s| ((s.local, s.peer), s)).collect()
    }

    /// Of those, some.
    pub(crate) fn these(&self, of: &[Pair]) -> HashMap<Pair, Socket> {
        let Some(socket) = self.socket.as_ref().filter(|_| of.len() <= QUESTIONS_MAX) else {
            let wanted: HashSet<&Pair> = of.iter().collect();
            let mut all = self.connections();
            all.retain(|p, _| wanted.contains(p));
            return all;
        };
        let found = of.iter().filter_map(|p| Some((*p, ask(socket, *p).ok()?)));
        let other = [tcp::state::LISTEN, tcp::state::TIME_WAIT];
        found
            .filter(|(p, s)| (s.local, s.peer) == *p && !other.contains(&s.state))
            .collect()
    }

    /// How the other ends of these have them, where this namespace translates them.
    pub(crate) fn beyond(&self, of: &[Pair]) -> Vec<Option<Pair>> {
        // (The thread is in this namespace only if there is a socket.)
        let table = self
            .socket
            .as_ref()
            .and_then(|_| conntrack::Table::open().ok());
        let one = |p: &Pair| table.as_ref()?.beyond(*p).filter(|b| *b != (p.1, p.0));
        of.iter().map(one).collect()
    }
}

/// All sockets. `count`: how many there are of each family, if that is known: one that has none is not asked for. (It is not
/// enough that as many have been found as there were of both: others come and go meanwhile.)
fn dump(socket: &netlink_sys::Socket, count: Option<[usize; 2]>) -> io::Result<Vec<Socket>> {
    let mut all = Vec::new();
    let states = StateFlags::all() - StateFlags::TIME_WAIT;
    let families = [
        (AF_INET, SocketId::new_v4()),
        (AF_INET6, SocketId::new_v6()),
    ];
    for (k, (family, any)) in families.into_iter().enumerate() {
        if count.is_some_and(|n| n[k] == 0) {
            continue;
        }
        let request = request(family, states.clone(), any);
        netlink::ask(socket, NLM_F_DUMP, request, |m| {
            if let SockDiagMessage::InetResponse(r) = m {
                all.push(told(&r));
            }
            Ok(())
        })?;
    }
    Ok(all)
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

/// The socket that the kernel would give a packet of this connection to: the connection's, otherwise a listener.
fn ask(socket: &netlink_sys::Socket, (local, peer): Pair) -> io::Result<Socket> {
    let v4 = local.is_ipv4();
    let mut id = match v4 {
        true => SocketId::new_v4(),
        false => SocketId::new_v6(),
    };
    (id.source_address, id.source_port) = (local.ip(), local.port());
    (id.destination_address, id.destination_port) = (peer.ip(), peer.port());
    id.cookie = NO_COOKIE;
    let family = if v4 { AF_INET } else { AF_INET6 };
    let request = request(family, StateFlags::all(), id);
    let mut found = None;
    // (The acknowledgement says where the answer ends.)
    netlink::ask(socket, NLM_F_ACK, request, |m| {
        if let SockDiagMessage::InetResponse(r) = m {
            found = Some(told(&r));
        }
        Ok(())
    })?;
    found.ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn told(r: &InetResponse) -> Socket {
    let (h, id) = (&r.header, &r.header.socket_id);
    Socket {
        local: normal((id.source_address, id.source_port).into()),
        peer: normal((id.destination_address, id.destination_port).into()),
        state: h.state,
        uid: h.uid,
        inode: h.inode.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{SocketAddr, TcpListener, TcpStream};

    fn inode(s: impl AsFd) -> u64 {
        rustix::fs::fstat(s).unwrap().st_ino
    }

    /// In the namespace of this process.
    fn here<T: Send>(look: impl FnMut(u64, &Namespace) -> T + Send) -> T {
        let own = HashMap::from([(proc::own_netns().unwrap(), std::process::id())]);
        each(&own, look).pop().expect("one namespace")
    }

    /// Sockets that come between the count and the look do not stand for others.
    #[test]
    fn a_family_is_left_out_only_if_it_has_no_sockets() {
        let Ok(six) = TcpListener::bind("[::1]:0") else {
            return crate::skip::skip("no IPv6 here");
        };
        let _four = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = netlink::open(netlink_sys::protocols::NETLINK_SOCK_DIAG).unwrap();
        let has_six = |count| {
            let all = dump(&socket, count).unwrap();
            all.iter().any(|s| s.inode == inode(&six))
        };
        assert!(has_six(Some([0, 1])) && has_six(Some([1, 1])) && has_six(None));
        assert!(!has_six(Some([1, 0])));
        let [v4, v6] = tcp::in_use(std::process::id()).unwrap();
        assert!(v4 > 0 && v6 > 0, "{v4} {v6}");
    }

    #[test]
    fn sockets_are_found_by_their_addresses_and_all_together() {
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
            let look = |pair| here(|_, n| n.these(&[pair]).get(&pair).map(|s| s.inode));
            assert_eq!(look(pair), Some(inode(&a)), "{address}");
            assert_eq!(look(other), Some(0), "{address}: not accepted yet");
            let (b, _) = l.accept().unwrap();
            assert_eq!(look(other), Some(inode(&b)), "{address}");
            // (A listener is not the connection that was asked for.)
            let nobody = (pair.1, (pair.0.ip(), 1).into());
            assert_eq!(look(nobody), None, "{address}");
            let ours = |mut all: Vec<Socket>| {
                all.retain(|s| [inode(&l), inode(&a), inode(&b)].contains(&s.inode));
                all.sort_by_key(|s| s.inode);
                all
            };
            let (all, files) = (
                ours(here(|_, n| n.sockets())),
                ours(tcp::sockets(std::process::id())),
            );
            assert_eq!((all.len(), &all), (3, &files), "{address}");
            let many: Vec<Pair> = vec![pair; QUESTIONS_MAX + 1];
            let found = here(|_, n| n.these(&many));
            assert_eq!(found.len(), 1);
            assert_eq!(found.get(&pair).map(|s| s.inode), Some(inode(&a)));
        }
    }
}
