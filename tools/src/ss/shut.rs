//! Which sockets are shut down, and in which direction: the kernel knows (a lane's connection is a
//! TCP connection all its life), and tells by socket inode for the caller's network namespace.

use netlink_packet_core::{
    NetlinkHeader, NetlinkMessage, NetlinkPayload, NLM_F_DUMP, NLM_F_REQUEST,
};
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, SocketId, StateFlags};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_sys::{protocols::NETLINK_SOCK_DIAG, Socket, SocketAddr};
use std::collections::HashMap;
use std::io;

/// Inode to shutdown mask: 1 cannot receive, 2 cannot send.
pub type Masks = HashMap<u64, u8>;

/// What the kernel tells; nothing where it does not, which shows as "not known".
pub fn masks() -> Masks {
    let mut all = Masks::new();
    for family in [AF_INET, AF_INET6] {
        let _ = dump(family, &mut all);
    }
    all
}

fn dump(family: u8, all: &mut Masks) -> io::Result<()> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let mut request = NetlinkMessage::new(
        header,
        NetlinkPayload::from(SockDiagMessage::InetRequest(InetRequest {
            family,
            protocol: IPPROTO_TCP,
            extensions: ExtensionFlags::SHUTDOWN,
            states: StateFlags::all(),
            socket_id: if family == AF_INET {
                SocketId::new_v4()
            } else {
                SocketId::new_v6()
            },
        })),
    );
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        let mut rest = &datagram[..];
        while !rest.is_empty() {
            let m =
                NetlinkMessage::<SockDiagMessage>::deserialize(rest).map_err(io::Error::other)?;
            let step = (m.header.length as usize).next_multiple_of(4);
            rest = rest.get(step.max(4)..).unwrap_or_default();
            match m.payload {
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(r)) => {
                    let mask = r.nlas.iter().find_map(|n| {
                        if let Nla::Shutdown(m) = n {
                            Some(*m)
                        } else {
                            None
                        }
                    });
                    all.extend(mask.map(|m| (u64::from(r.header.inode), m)));
                }
                NetlinkPayload::Done(_) => return Ok(()),
                NetlinkPayload::Error(e) => return Err(e.to_io()),
                _ => {}
            }
        }
    }
}

/// As `smcss` writes it.
pub fn text(mask: u8) -> String {
    format!(
        " {}-{}",
        if mask & 1 != 0 { 'R' } else { '<' },
        if mask & 2 != 0 { 'W' } else { '>' }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    fn inode(s: &TcpStream) -> u64 {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", s.as_raw_fd())).unwrap();
        link.to_str()
            .unwrap()
            .trim_start_matches("socket:[")
            .trim_end_matches(']')
            .parse()
            .unwrap()
    }

    #[test]
    fn the_kernel_tells_both_directions_for_both_families() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(l) = TcpListener::bind(address) else {
                eprintln!("SKIPPED: no {address} here");
                continue;
            };
            let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
            let (mut b, _) = l.accept().unwrap();
            assert_eq!(masks().get(&inode(&a)), Some(&0), "{address}");
            a.shutdown(Shutdown::Write).unwrap();
            assert_eq!(b.read(&mut [0]).unwrap(), 0); // the FIN is there
            let m = masks();
            assert_eq!(
                (m.get(&inode(&a)), m.get(&inode(&b))),
                (Some(&2), Some(&1)),
                "{address}"
            );
            assert_eq!(
                (text(0), text(1), text(2), text(3)),
                (" <->".into(), " R->".into(), " <-W".into(), " R-W".into())
            );
        }
    }
}
