//! `getsockopt` and `setsockopt` for the options that the crates in use do not know. The only place that calls them.

use lane::num;
use lane::os::{position, room, TcpCounts, TcpInfo};
use rustix::io::Errno;
use std::cell::Cell;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Values that the kernel may fill with any bytes.
///
/// # Safety
/// Any bit pattern must be a valid value of the type.
pub unsafe trait Plain: Copy {}
// SAFETY: integers.
unsafe impl Plain for i32 {}
// SAFETY: integers.
unsafe impl Plain for u64 {}
// SAFETY: an array of bytes.
unsafe impl<const N: usize> Plain for [u8; N] {}
// SAFETY: integers only.
unsafe impl Plain for Cred {}

/// Reads an option; also how many bytes the kernel filled in. What an older kernel does not fill
/// stays zero.
pub fn get<T: Plain>(fd: BorrowedFd<'_>, level: i32, name: i32) -> Result<(T, usize), Errno> {
    // SAFETY: any bit pattern is a valid value (`Plain`).
    let mut v: T = unsafe { std::mem::zeroed() };
    let mut len = num::small(std::mem::size_of::<T>());
    // SAFETY: `v` is writable for `len` bytes and takes any bytes (`Plain`); `len` is in and out.
    let r = unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut v).cast(), &mut len) };
    if r != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    Ok((v, len as usize))
}

/// Is it a TCP socket, and the one with this cookie?
pub fn is_tcp_of(sock: BorrowedFd<'_>, cookie: u64) -> bool {
    get::<i32>(sock, libc::SOL_SOCKET, libc::SO_PROTOCOL).is_ok_and(|p| p.0 == libc::IPPROTO_TCP)
        && get::<u64>(sock, libc::SOL_SOCKET, libc::SO_COOKIE).is_ok_and(|c| c.0 == cookie)
}

/// Is it a TCP socket whose last close waits for nothing, as far as its options go?
pub fn closes_at_once(sock: BorrowedFd<'_>) -> bool {
    get::<i32>(sock, libc::SOL_SOCKET, libc::SO_PROTOCOL).is_ok_and(|p| p.0 == libc::IPPROTO_TCP)
        // A `struct linger` begins with whether it counts.
        && get::<[u8; 8]>(sock, libc::SOL_SOCKET, libc::SO_LINGER)
            .is_ok_and(|l| l.0[..4] == [0; 4])
}

/// The network namespace that a socket is in. It needs CAP_NET_ADMIN there.
pub fn network_namespace(sock: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    /// linux/sockios.h
    const SIOCGSKNS: libc::c_ulong = 0x894c;
    // SAFETY: the request takes no argument.
    let fd = unsafe { libc::ioctl(sock.as_raw_fd(), SIOCGSKNS) };
    if fd < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The options of a socket that are numbers.
pub struct Of<'a>(pub BorrowedFd<'a>);

impl room::Options for Of<'_> {
    fn get(&self, level: i32, name: i32) -> Option<u32> {
        get::<i32>(self.0, level, name)
            .ok()
            .map(|(v, _)| num::bits(v))
    }

    fn set(&self, level: i32, name: i32, value: u32) -> bool {
        let p = (&raw const value).cast();
        // SAFETY: `value` has the 4 readable bytes that are named.
        unsafe { libc::setsockopt(self.0.as_raw_fd(), level, name, p, 4) == 0 }
    }
}

/// `struct ucred`. Rustix's own type cannot represent a process of a foreign pid namespace, whose pid is 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Cred {
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

/// From now on every message read from this Unix socket tells who sent it.
pub fn pass_credentials(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::sockopt::set_socket_passcred(fd, true)
}

/// The credentials of the process that connected.
pub fn peer_cred(fd: BorrowedFd<'_>) -> Result<Cred, Errno> {
    Ok(get::<Cred>(fd, libc::SOL_SOCKET, libc::SO_PEERCRED)?.0)
}

/// A pidfd of who connected (Linux 6.5).
pub fn peer_pidfd(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    const SO_PEERPIDFD: i32 = 77;
    let (raw, _) = get::<i32>(fd, libc::SOL_SOCKET, SO_PEERPIDFD)?;
    if raw < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Number of bytes that the other end has not acknowledged, or were not sent yet. (After a reset none are.)
pub fn outstanding(fd: BorrowedFd<'_>) -> Result<u64, Errno> {
    // (The state is the first byte of `struct tcp_info`.)
    match get::<[u8; 1]>(fd, libc::IPPROTO_TCP, libc::TCP_INFO)?.0 {
        [TcpInfo::CLOSE] => Ok(0),
        _ => queued(fd, libc::TIOCOUTQ),
    }
}

fn queued(fd: BorrowedFd<'_>, what: libc::Ioctl) -> Result<u64, Errno> {
    let mut n = 0i32;
    // SAFETY: the calls that are made here write one int.
    if unsafe { libc::ioctl(fd.as_raw_fd(), what, &mut n) } == 0 {
        return Ok(u64::try_from(n).unwrap_or(0));
    }
    let e = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&e).unwrap_or(Errno::INVAL))
}

/// Byte positions of a TCP socket. AGAIN: they changed during each read.
pub fn tcp_position(fd: BorrowedFd<'_>) -> Result<TcpCounts, Errno> {
    let failed = Cell::new(None);
    let told = |e: Errno| failed.set(Some(e));
    let info = || {
        let read = get::<[u8; TcpInfo::BYTES]>(fd, libc::IPPROTO_TCP, libc::TCP_INFO);
        let (b, len) = read.map_err(told).ok()?;
        let parsed = b.get(..len).and_then(TcpInfo::parse);
        if parsed.is_none() {
            told(Errno::NOSYS); // a kernel that does not say enough
        }
        parsed
    };
    let queued = |what| queued(fd, what).map_err(told).ok();
    position(info, || queued(libc::TIOCOUTQ), || queued(libc::FIONREAD))
        .ok_or_else(|| failed.get().unwrap_or(Errno::AGAIN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lane::os::room::Options;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    #[test]
    fn position_counts_bytes() {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let (mut b, _) = l.accept().unwrap();
        a.write_all(&[7; 1234]).unwrap();
        b.write_all(&[8; 100]).unwrap();
        let mut buf = [0; 1234];
        b.read_exact(&mut buf[..1000]).unwrap();
        let (pa, pb) = (
            tcp_position(a.as_fd()).unwrap(),
            tcp_position(b.as_fd()).unwrap(),
        );
        // Who connected has sent a SYN that counts.
        assert_eq!((pa.state, pa.sent), (TcpInfo::ESTABLISHED, 1 + 1234));
        assert_eq!((pb.sent, pb.taken, pb.received), (100, 1000, 1234));
    }

    /// Sends until nothing more is taken.
    fn fill(a: &TcpStream) -> usize {
        let (some, mut n) = ([7u8; 1 << 13], 0);
        let flags = rustix::net::SendFlags::DONTWAIT;
        while let Ok(k) = rustix::net::send(a, &some, flags) {
            n += k;
        }
        n
    }

    #[test]
    fn more_than_fits_and_the_sizes_stay() {
        let sizes = [
            (libc::SOL_SOCKET, room::SO_BUF_LOCK),
            (libc::SOL_SOCKET, libc::SO_SNDBUF),
            (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT),
        ];
        for (force, asked) in [(true, None), (false, Some(1u32)), (true, Some(30_000))] {
            let l = TcpListener::bind("127.0.0.1:0").unwrap();
            let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
            let (mut b, _) = l.accept().unwrap();
            let of = Of(a.as_fd());
            if let Some(bytes) = asked {
                assert!(of.set(libc::SOL_SOCKET, libc::SO_SNDBUF, bytes));
                assert!(of.set(libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, 5000));
            }
            let mut all = fill(&a);
            let before = sizes.map(|(level, name)| of.get(level, name));
            let more = room::with_more(&of, force, || fill(&a));
            let least = if force && rustix::process::getuid().is_root() {
                2 << 20
            } else {
                1 << 16 // (net.core.wmem_max)
            };
            assert!(more >= least, "{force} {asked:?}: {more}");
            assert_eq!(sizes.map(|(level, name)| of.get(level, name)), before);
            // No more and no more memory, however often.
            let again: usize = (0..5)
                .map(|_| room::with_more(&of, force, || fill(&a)))
                .sum();
            assert!(again < 1 << 18, "{again}");
            all += more + again;
            assert_eq!(fill(&a), 0);
            drop(a);
            let mut got = Vec::new();
            b.read_to_end(&mut got).unwrap();
            assert_eq!(got.len(), all);
        }
    }

    #[test]
    fn peer_of_a_pair_is_us() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(peer_cred(a.as_fd()).unwrap().pid, std::process::id() as i32);
    }
}
