//! TCP sockets as the kernel knows them: of the caller's network namespace, by sock_diag.
//!
//! The daemon's rows come from the shims. The tool uses sock_diag for what no shim knows: the shutdown state (a
//! lane's connection stays a TCP connection), and the other end of a connection that only one shim knows.

use netlink_packet_core::NLM_F_DUMP;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{
    ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags,
};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use std::io;
use std::net;
use underpass_admin::netlink;

/// A TCP socket.
#[derive(Clone, Debug, PartialEq)]
pub struct TcpSocket {
    pub local: net::SocketAddr,
    pub peer: net::SocketAddr,
    /// 0: not accepted yet, or no process holds it any more.
    pub inode: u64,
    /// 1: cannot receive, 2: cannot send.
    pub shut: Option<u8>,
}

/// All TCP sockets; none if the kernel does not return them.
pub fn sockets() -> Vec<TcpSocket> {
    let mut all = Vec::new();
    for family in [AF_INET, AF_INET6] {
        let _ = dump(family, &mut all);
    }
    all
}

fn dump(family: u8, all: &mut Vec<TcpSocket>) -> io::Result<()> {
    let socket = netlink::open(NETLINK_SOCK_DIAG)?;
    let request = SockDiagMessage::InetRequest(InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::SHUTDOWN,
        states: StateFlags::all(),
        socket_id: if family == AF_INET {
            SocketId::new_v4()
        } else {
            SocketId::new_v6()
        },
    });
    netlink::ask(&socket, NLM_F_DUMP, request, |m| {
        if let SockDiagMessage::InetResponse(r) = m {
            all.push(tcp_socket(&r));
        }
        Ok(())
    })
}

fn tcp_socket(r: &InetResponse) -> TcpSocket {
    let id = &r.header.socket_id;
    let shut = |n: &Nla| match n {
        Nla::Shutdown(m) => Some(*m),
        _ => None,
    };
    TcpSocket {
        local: net::SocketAddr::new(id.source_address.to_canonical(), id.source_port),
        peer: net::SocketAddr::new(id.destination_address.to_canonical(), id.destination_port),
        inode: r.header.inode.into(),
        shut: r.nlas.iter().find_map(shut),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    fn inode(s: &TcpStream) -> u64 {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", s.as_raw_fd())).unwrap();
        let link = link.to_str().unwrap();
        link.trim_start_matches("socket:[")
            .trim_end_matches(']')
            .parse()
            .unwrap()
    }

    /// Finds the kernel's entry for this socket.
    fn find(s: &TcpStream) -> TcpSocket {
        let (local, peer) = (s.local_addr().unwrap(), s.peer_addr().unwrap());
        let is = |t: &TcpSocket| t.local == local && t.peer == peer;
        sockets().into_iter().find(is).expect("the kernel knows it")
    }

    #[test]
    fn the_kernel_tells_inode_and_shutdown_for_both_families() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(l) = TcpListener::bind(address) else {
                eprintln!("SKIPPED: no {address} here");
                continue;
            };
            let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
            let (mut b, _) = l.accept().unwrap();
            assert_eq!(
                (find(&a).inode, find(&a).shut),
                (inode(&a), Some(0)),
                "{address}"
            );
            a.shutdown(Shutdown::Write).unwrap();
            assert_eq!(b.read(&mut [0]).unwrap(), 0); // the FIN has arrived
            assert_eq!(
                (find(&a).shut, find(&b).shut),
                (Some(2), Some(1)),
                "{address}"
            );
        }
    }
}
