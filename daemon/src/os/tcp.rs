//! The TCP sockets of a network namespace, as `/proc/PID/net/tcp` and `tcp6` list them.

use crate::os::address::normal;
use std::net::SocketAddr;

/// Values of [`Socket::state`], as in Linux's `tcp_states.h`.
pub(crate) mod state {
    pub(crate) const ESTABLISHED: u8 = 1;
    pub(crate) const TIME_WAIT: u8 = 6;
    pub(crate) const LISTEN: u8 = 10;
}

/// A TCP socket of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Socket {
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub state: u8,
    pub uid: u32,
    /// 0: not accepted yet, or closed by its program while the kernel still ends the connection.
    pub inode: u64,
}

/// All TCP sockets in the network namespace of this process, by two files that take milliseconds each (see `os::diag`).
pub(crate) fn sockets(pid: u32) -> Vec<Socket> {
    let mut all = Vec::new();
    let Some(of) = underpass_admin::proc::living(pid) else {
        return all;
    };
    for file in ["net/tcp", "net/tcp6"] {
        let text = std::fs::read_to_string(of.join(file)).unwrap_or_default();
        all.extend(text.lines().skip(1).filter_map(line));
    }
    all
}

/// How many sockets there are in the network namespace of this process, of IPv4 and of IPv6: listeners and connections, without
/// those in TIME_WAIT and unfinished handshakes.
pub(crate) fn in_use(pid: u32) -> Option<[usize; 2]> {
    let of = underpass_admin::proc::living(pid)?;
    let count = |file: &str, name: &str| -> Option<usize> {
        let text = std::fs::read_to_string(of.join(file)).ok()?;
        let line = text.lines().find_map(|l| l.strip_prefix(name))?;
        line.split_ascii_whitespace().next()?.parse().ok()
    };
    // (Without IPv6 there is no second file.)
    let v6 = count("net/sockstat6", "TCP6: inuse ");
    Some([count("net/sockstat", "TCP: inuse ")?, v6.unwrap_or(0)])
}

/// `sl local peer state queues timer retransmits uid timeout inode …`
fn line(line: &str) -> Option<Socket> {
    let mut f = line.split_ascii_whitespace();
    Some(Socket {
        local: hex_address(f.nth(1)?)?,
        peer: hex_address(f.next()?)?,
        state: u8::from_str_radix(f.next()?, 16).ok()?,
        uid: f.nth(3)?.parse().ok()?,
        inode: f.nth(1)?.parse().ok()?,
    })
}

/// `0100007F:1F90`: 32-bit words in the processor's byte order; the port is a plain hexadecimal number.
fn hex_address(s: &str) -> Option<SocketAddr> {
    let (ip, port) = s.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words: Option<Vec<[u8; 4]>> = (0..ip.len() / 8)
        .map(|i| {
            u32::from_str_radix(ip.get(i * 8..i * 8 + 8)?, 16)
                .ok()
                .map(u32::to_ne_bytes)
        })
        .collect();
    let bytes = words?.concat();
    let ip: std::net::IpAddr = match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok()?.into(),
        16 => <[u8; 16]>::try_from(bytes).ok()?.into(),
        _ => return None,
    };
    Some(normal(SocketAddr::new(ip, port)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_sockets_are_listed() {
        let me = std::process::id();
        let l = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let a = std::net::TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let key = (a.local_addr().unwrap(), a.peer_addr().unwrap());
        let (mine, other) = (key, (key.1, key.0));
        let inode = |(local, peer): &(SocketAddr, SocketAddr)| {
            let all = sockets(me).into_iter();
            let mut found = all.filter(|s| (s.local, s.peer) == (*local, *peer));
            found.next().map(|s| s.inode)
        };
        assert_eq!(inode(&other), Some(0), "not accepted yet");
        let (b, _) = l.accept().unwrap();
        let ino = |s: &std::net::TcpStream| rustix::fs::fstat(s).unwrap().st_ino;
        assert_eq!(inode(&mine), Some(ino(&a)));
        assert_eq!(inode(&other), Some(ino(&b)));
        let ino = rustix::fs::fstat(&l).unwrap().st_ino;
        let all = sockets(me);
        let l = all.iter().find(|s| s.inode == ino).unwrap();
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!((l.state, l.local, l.uid), (state::LISTEN, key.1, uid));
    }

    #[test]
    fn hex_addresses() {
        let v4 = hex_address("0100007F:1F90").unwrap();
        assert_eq!(v4, "127.0.0.1:8080".parse().unwrap());
        let mapped = hex_address("0000000000000000FFFF00000100007F:0050").unwrap();
        assert_eq!(mapped, "127.0.0.1:80".parse().unwrap());
        let v6 = hex_address("00000000000000000000000001000000:0050").unwrap();
        assert_eq!(v6, "[::1]:80".parse().unwrap());
        for bad in ["", ":", "zz:1", "01:1", "0100007F:10000", "é100007F:1"] {
            assert_eq!(hex_address(bad), None, "{bad}");
        }
    }
}
