//! Which process is at the other end, as far as this node can tell without the daemon.
//!
//! The daemon may not know a service yet that has only listened so far. But it can be seen from outside whether its
//! process has loaded the shim.

use crate::diag;
use std::fs;
use std::net::SocketAddr;
use underpass_admin::proc;

/// The process at the other end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Process {
    pub pid: u32,
    pub comm: String,
    /// Is the library loaded? `None`: we have no permission to look.
    pub shim: Option<Shim>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shim {
    Loaded,
    /// Loaded, but switched off: `UNDERPASS=off`.
    Off,
    Absent,
}

/// What is known about the other end.
#[derive(Clone, Debug, PartialEq)]
pub enum Peer {
    /// No such socket here: it is on another node, or in another network namespace.
    Elsewhere,
    /// The kernel has the connection, but the program has not accepted it.
    Unaccepted,
    /// A process at which the caller may not look.
    Hidden,
    Here(Process),
}

/// Looks for the process at the other end of the connection `local` -> `peer`.
pub fn look(local: &str, peer: &str) -> Peer {
    let (Ok(local), Ok(peer)) = (local.parse::<SocketAddr>(), peer.parse::<SocketAddr>()) else {
        return Peer::Elsewhere;
    };
    let is = |s: &diag::TcpSocket| s.local == peer && s.peer == local;
    match diag::sockets().into_iter().find(is) {
        None => Peer::Elsewhere,
        Some(s) if s.inode == 0 => Peer::Unaccepted,
        Some(s) => holder(s.inode).map_or(Peer::Hidden, |pid| Peer::Here(process(pid))),
    }
}

/// A process that holds the socket, if there is one.
fn holder(inode: u64) -> Option<u32> {
    proc::all().find(|pid| proc::sockets(*pid).into_iter().any(|s| s == inode))
}

fn process(pid: u32) -> Process {
    let read = |file: &str| fs::read(format!("/proc/{pid}/{file}"));
    let comm = read("comm").unwrap_or_default();
    let off = |maps: &str| {
        let env = read("environ").unwrap_or_default();
        let has = |v: &[u8]| env.split(|b| *b == 0).any(|e| e.starts_with(v));
        // A program that shows a title of its own has overwritten its environment. But an active shim makes its table
        // at the first TCP socket, and this process has such a socket.
        has(b"UNDERPASS=off") || (!has(b"LD_PRELOAD=") && !maps.contains("/memfd:underpass-family"))
    };
    let shim = read("maps").ok().map(|maps| {
        let maps = String::from_utf8_lossy(&maps);
        match maps.lines().any(|l| l.contains("/libunderpass.so")) {
            false => Shim::Absent,
            true if off(&maps) => Shim::Off,
            true => Shim::Loaded,
        }
    });
    Process {
        pid,
        comm: String::from_utf8_lossy(&comm).trim_end().to_owned(),
        shim,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_holder_of_the_other_end_is_found() {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let (local, peer) = (
            a.local_addr().unwrap().to_string(),
            a.peer_addr().unwrap().to_string(),
        );
        assert_eq!(look(&local, &peer), Peer::Unaccepted);
        let (_b, _) = l.accept().unwrap();
        let Peer::Here(p) = look(&local, &peer) else {
            panic!("not found")
        };
        assert_eq!((p.pid, p.shim), (std::process::id(), Some(Shim::Absent)));
        assert!(!p.comm.is_empty());
        assert_eq!(look("192.0.2.1:1", "192.0.2.2:2"), Peer::Elsewhere);
    }
}
