//! What the kernel says about a socket that a shim registered.
//!
//! Runs on the blocking pool: the socket's lock, which `TCP_INFO` takes, may be held for as long
//! as its owner likes (a `send` whose buffer faults into a file system of its own).

use crate::os::address::normal;
use crate::os::sockopt::{self, tcp_position};
use crate::pairing::proof::{Proof, Record, Role};
use lane::abi::TcpPos;
use lane::os::TcpInfo;
use lane::proto::msg::register;
use lane::proto::reason::Reason;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::Instant;

/// One end of a TCP connection, as read at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    pub local: SocketAddr,
    pub peer: SocketAddr,
    /// Identity of the socket while it exists; not of the connection.
    pub cookie: u64,
    pub netns_cookie: u64,
    pub inode: u64,
    /// What the proof recorded when this connection was established.
    pub record: Option<Record>,
    /// On which side of the handshake the socket was, as its shim says. `None`: the shim is not certain, and has a
    /// guess at most; or it is too old to say.
    pub client: Option<bool>,
    /// The shim's guess about the same, if it has one: to be confirmed ([`End::confirmed`]).
    pub guess: Option<bool>,
    pub counts: Counts,
}

/// Kernel byte positions, and the time span in which they were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub from: Instant,
    pub until: Instant,
    /// Accepted from the application; may count the SYN as one.
    pub sent: u64,
    /// Acknowledged by the other end; may count the SYN as one.
    pub acked: u64,
    pub received: u64,
}

/// Options that a lane cannot carry and that an accepted socket has from its listener, so that no
/// shim sees them set on it: level, name, and the value that sockets begin with.
const INHERITED: &[(i32, i32, i32)] = &[
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP, 0),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 0),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPING, 0), // tells of SO_TIMESTAMPING_NEW, too
    (libc::SOL_SOCKET, SO_TIMESTAMP_NEW, 0),
    (libc::SOL_SOCKET, SO_TIMESTAMPNS_NEW, 0),
    (libc::SOL_SOCKET, libc::SO_PEEK_OFF, -1),
];
/// The same, except for shims which say that their lanes carry them ([`register::INQ_ZEROCOPY`]).
const INHERITED_BY_OLD: &[(i32, i32, i32)] = &[
    (libc::SOL_SOCKET, libc::SO_ZEROCOPY, 0),
    (libc::IPPROTO_TCP, libc::TCP_INQ, 0),
];
const SO_TIMESTAMP_NEW: i32 = 63;
const SO_TIMESTAMPNS_NEW: i32 = 64;

/// Reads and checks. The positions are those that the shim's hooks have counted, `flags` those of its `Register`.
pub fn read(
    fd: BorrowedFd<'_>,
    [tx_tcp_pos, rx_tcp_pos]: [TcpPos; 2],
    flags: u32,
    proof: &dyn Proof,
) -> Result<End, Reason> {
    use Reason::*;
    let int = |level, name| sockopt::get::<i32>(fd, level, name).map(|v| v.0);
    let domain = int(libc::SOL_SOCKET, libc::SO_DOMAIN).map_err(|_| NotEstablished)?;
    let kind = int(libc::SOL_SOCKET, libc::SO_TYPE).map_err(|_| NotEstablished)?;
    let protocol = int(libc::SOL_SOCKET, libc::SO_PROTOCOL).map_err(|_| NotEstablished)?;
    if !matches!(domain, libc::AF_INET | libc::AF_INET6) || kind != libc::SOCK_STREAM {
        return Err(NotEstablished); // the fd number was given to something else meanwhile
    }
    if protocol != libc::IPPROTO_TCP {
        return Err(Option); // MPTCP: bytes may travel on other subflows
    }
    let from = Instant::now();
    let info = tcp_position(fd).map_err(|e| match e {
        Errno::AGAIN => Young, // the counts changed during each read: both ends are busy
        _ => NotEstablished,
    })?;
    let until = Instant::now();
    if info.state != TcpInfo::ESTABLISHED {
        return Err(NotEstablished);
    }
    // A ULP (kernel TLS) changes what the bytes on the wire are.
    if matches!(sockopt::get::<[u8; 16]>(fd, libc::IPPROTO_TCP, libc::TCP_ULP), Ok((_, n)) if n > 0)
    {
        return Err(Option);
    }
    // An option that an older kernel does not know is not set.
    let set = |&(level, name, usual)| int(level, name).is_ok_and(|v| v != usual);
    let old = flags & register::INQ_ZEROCOPY == 0;
    if INHERITED.iter().any(set) || old && INHERITED_BY_OLD.iter().any(set) {
        return Err(Option);
    }
    let (local, peer) = (address(fd, true)?, address(fd, false)?);
    if local == peer {
        return Err(SelfConnected);
    }
    // The application goes on meanwhile, so the counts may have grown since the shim compared them with its own.
    // But the shim cannot have moved more bytes than the kernel has counted (a SYN included).
    if info.sent < tx_tcp_pos.get() || info.received < rx_tcp_pos.get() {
        return Err(Bypassed);
    }
    const SO_NETNS_COOKIE: i32 = 71;
    let cookie = |name| {
        sockopt::get::<u64>(fd, libc::SOL_SOCKET, name)
            .map(|v| v.0)
            .map_err(|_| Unproven)
    };
    Ok(End {
        local,
        peer,
        cookie: cookie(libc::SO_COOKIE)?,
        netns_cookie: cookie(SO_NETNS_COOKIE)?,
        inode: rustix::fs::fstat(fd).map_err(|_| NotEstablished)?.st_ino,
        record: proof.record(fd),
        client: (flags & register::CERTAIN != 0).then_some(flags & register::CLIENT != 0),
        guess: Default::default(),
        counts: Counts {
            from,
            until,
            sent: info.sent,
            acked: info.acked,
            received: info.received,
        },
    })
}

impl End {
    /// Is the shim's guess about its side right, according to its record or to the other end?
    pub fn confirmed(&self, other: Option<&End>) -> bool {
        let recorded = || Some(self.record.as_ref()?.role == Role::Active);
        let mirrored = || Some(!other?.client?);
        self.guess
            .is_none_or(|g| recorded().or_else(mirrored) == Some(g))
    }
}

fn address(fd: BorrowedFd<'_>, local: bool) -> Result<SocketAddr, Reason> {
    let any = if local {
        rustix::net::getsockname(fd).ok()
    } else {
        rustix::net::getpeername(fd).ok().flatten()
    };
    any.and_then(|a| SocketAddr::try_from(a).ok())
        .map(normal)
        .ok_or(Reason::NotEstablished)
}

/// Could these counts, read at different times, belong to the two ends of one connection?
///
/// At any one moment, acked by the sender <= received by the receiver <= sent by the sender, and
/// all three only grow. So what one side had acknowledged *earlier* cannot exceed what the other
/// has received *later*, and what one had received earlier cannot exceed what the other has sent
/// later. One comparison per direction holds whichever was read first.
pub fn consistent(a: &Counts, b: &Counts) -> bool {
    // A client's `bytes_acked` includes its SYN.
    const SYN: u64 = 1;
    let ordered = |early: &Counts, late: &Counts| {
        early.acked.saturating_sub(SYN) <= late.received && early.received <= late.sent
    };
    if a.until <= b.from {
        ordered(a, b)
    } else if b.until <= a.from {
        ordered(b, a)
    } else {
        // Read at overlapping times: neither order is certain, either will do.
        ordered(a, b) || ordered(b, a)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairing::proof::NoProof;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd, AsRawFd};
    use std::time::Duration;

    fn moved(sent: u64, received: u64) -> [TcpPos; 2] {
        [TcpPos::new(sent), TcpPos::new(received)]
    }

    const NOTHING: [TcpPos; 2] = [TcpPos::new(0); 2];

    fn pair() -> (TcpStream, TcpStream) {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        (a, l.accept().unwrap().0)
    }

    #[test]
    fn reads_both_ends() {
        let (mut a, mut b) = pair();
        a.write_all(b"hello").unwrap();
        let mut two = [0; 2];
        b.read_exact(&mut two).unwrap();
        let ea = read(a.as_fd(), moved(5, 0), 0, &NoProof).unwrap();
        let eb = read(b.as_fd(), moved(0, 2), 0, &NoProof).unwrap();
        assert_eq!((ea.local, ea.peer), (eb.peer, eb.local));
        assert_eq!(ea.netns_cookie, eb.netns_cookie);
        assert_ne!(ea.cookie, eb.cookie);
        assert!(consistent(&ea.counts, &eb.counts) && consistent(&eb.counts, &ea.counts));
        assert_eq!(
            read(a.as_fd(), moved(7, 0), 0, &NoProof),
            Err(Reason::Bypassed)
        );
        assert_eq!(
            read(b.as_fd(), moved(0, 6), 0, &NoProof),
            Err(Reason::Bypassed)
        );
    }

    /// Both ends are busy all the time, which is no reason to refuse the connection for good.
    #[test]
    fn a_busy_connection_is_an_open_one() {
        let (a, b) = pair();
        let (from, to) = (a.try_clone().unwrap(), b.try_clone().unwrap());
        let sender = std::thread::spawn(move || while (&from).write_all(&[7]).is_ok() {});
        let receiver = std::thread::spawn(move || {
            let mut some = [0; 1000];
            while (&to).read(&mut some).is_ok_and(|n| n > 0) {}
        });
        let (mut read_well, mut busy) = (0, 0);
        let end = Instant::now() + Duration::from_secs(10);
        while (read_well == 0 || busy == 0) && Instant::now() < end {
            for s in [&a, &b] {
                match read(s.as_fd(), NOTHING, 0, &NoProof) {
                    Ok(_) => read_well += 1,
                    Err(e) => {
                        assert_eq!(e, Reason::Young);
                        busy += 1;
                    }
                }
            }
        }
        println!("{read_well} times read, {busy} times busy");
        a.shutdown(std::net::Shutdown::Both).unwrap();
        sender.join().unwrap();
        receiver.join().unwrap();
    }

    #[test]
    fn refuses_what_is_no_open_connection() {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(
            read(l.as_fd(), NOTHING, 0, &NoProof),
            Err(Reason::NotEstablished)
        );
        let f = std::fs::File::open("/").unwrap();
        assert_eq!(
            read(f.as_fd(), NOTHING, 0, &NoProof),
            Err(Reason::NotEstablished)
        );
        let u = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(
            read(u.as_fd(), NOTHING, 0, &NoProof),
            Err(Reason::NotEstablished)
        );
        let (a, b) = pair();
        a.shutdown(std::net::Shutdown::Write).unwrap();
        let mut v = Vec::new();
        (&b).read_to_end(&mut v).unwrap();
        assert_eq!(
            read(a.as_fd(), NOTHING, 0, &NoProof),
            Err(Reason::NotEstablished)
        );
        assert_eq!(
            read(b.as_fd(), NOTHING, 0, &NoProof),
            Err(Reason::NotEstablished)
        );
    }

    #[test]
    fn refuses_options_of_the_listener() {
        const SO_TIMESTAMPING_NEW: i32 = 65;
        const RX_SOFTWARE: i32 = 1 << 3;
        let from = |level, name, value: i32| {
            let l = TcpListener::bind("127.0.0.1:0").unwrap();
            let (p, len) = ((&raw const value).cast(), size_of::<i32>() as u32);
            // SAFETY: the value is readable for `len` bytes.
            let r = unsafe { libc::setsockopt(l.as_raw_fd(), level, name, p, len) };
            let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
            let b = l.accept().unwrap().0;
            let end = |s: &TcpStream, flags| read(s.as_fd(), NOTHING, flags, &NoProof).map(|_| ());
            assert_eq!(end(&a, 0), Ok(()), "the other end has none of it");
            let kinds = [0, register::INQ_ZEROCOPY];
            (r == 0).then_some(kinds.map(|flags| end(&b, flags)))
        };
        let zero = from(libc::SOL_SOCKET, libc::SO_RCVLOWAT, 0);
        assert_eq!(zero, Some([Ok(()); 2]), "means 1");
        let more = [(libc::SOL_SOCKET, SO_TIMESTAMPING_NEW, 0)];
        for &(level, name, usual) in INHERITED.iter().chain(&more) {
            let stamps = matches!(name, libc::SO_TIMESTAMPING | SO_TIMESTAMPING_NEW);
            let value = if stamps { RX_SOFTWARE } else { usual + 1 };
            // `None`: this kernel does not know it.
            let got = from(level, name, value);
            assert!(
                matches!(got, None | Some([Err(Reason::Option), Err(Reason::Option)])),
                "{name}: {got:?}"
            );
        }
        for &(level, name, usual) in INHERITED_BY_OLD {
            let got = from(level, name, usual + 1);
            assert_eq!(got, Some([Err(Reason::Option), Ok(())]), "{name}");
        }
    }

    #[test]
    fn counts_of_different_times() {
        let t = Instant::now();
        let at = |ms, sent, acked, received| Counts {
            from: t + Duration::from_millis(ms),
            until: t + Duration::from_millis(ms),
            sent,
            acked,
            received,
        };
        assert!(
            consistent(&at(0, 10, 11, 0), &at(1, 0, 0, 10)),
            "the SYN counts as one"
        );
        assert!(!consistent(&at(0, 10, 12, 0), &at(1, 0, 0, 10)));
        assert!(
            consistent(&at(0, 10, 11, 0), &at(1, 0, 0, 500)),
            "more was sent in between"
        );
        assert!(
            !consistent(&at(1, 10, 1, 0), &at(0, 0, 0, 500)),
            "received before it was sent"
        );
        assert!(consistent(&at(1, 900, 1, 0), &at(0, 0, 0, 500)));
    }
}
