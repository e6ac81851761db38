//! `getsockopt` for the options that the crates in use do not know. The only place that calls it.

use lane::num;
use lane::os::{position, TcpCounts, TcpInfo};
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
    let queued = |what| {
        let mut n = 0i32;
        // SAFETY: both calls write one int.
        if unsafe { libc::ioctl(fd.as_raw_fd(), what, &mut n) } == 0 {
            return Some(u64::try_from(n).unwrap_or(0));
        }
        let e = std::io::Error::last_os_error();
        told(Errno::from_io_error(&e).unwrap_or(Errno::INVAL));
        None
    };
    position(info, || queued(libc::TIOCOUTQ), || queued(libc::FIONREAD))
        .ok_or_else(|| failed.get().unwrap_or(Errno::AGAIN))
}

#[cfg(test)]
mod tests {
    use super::*;
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

    #[test]
    fn peer_of_a_pair_is_us() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(peer_cred(a.as_fd()).unwrap().pid, std::process::id() as i32);
    }
}
