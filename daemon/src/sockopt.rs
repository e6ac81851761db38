//! `getsockopt` for the options that the crates in use do not know. The only place that calls it.

use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Values that the kernel may fill with any bytes.
///
/// # Safety
/// Any bit pattern must be a valid value of the type.
pub unsafe trait Plain: Copy + Default {}
// SAFETY: integers.
unsafe impl Plain for i32 {}
// SAFETY: integers.
unsafe impl Plain for u64 {}
// SAFETY: an array of bytes.
unsafe impl Plain for [u8; 16] {}
// SAFETY: integers only.
unsafe impl Plain for TcpInfo {}
// SAFETY: integers only.
unsafe impl Plain for Cred {}

/// Reads an option; also how many bytes the kernel filled in. What an older kernel does not fill
/// stays zero.
pub fn get<T: Plain>(fd: BorrowedFd<'_>, level: i32, name: i32) -> Result<(T, usize), Errno> {
    let mut v = T::default();
    let mut len = std::mem::size_of::<T>() as libc::socklen_t;
    // SAFETY: `v` is writable for `len` bytes and takes any bytes (`Plain`); `len` is in and out.
    let r = unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut v).cast(), &mut len) };
    if r != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    Ok((v, len as usize))
}

/// `struct ucred`. Not rustix's: there a process of a foreign pid namespace, number 0, cannot be
/// represented.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Cred {
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

/// Every message read from this Unix socket says who sent it.
pub fn pass_credentials(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::sockopt::set_socket_passcred(fd, true)
}

/// Who connected.
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

/// The beginning of the kernel's `struct tcp_info` (`linux/tcp.h`), up to what we need.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpInfo {
    pub state: u8,
    _bytes: [u8; 7],
    _words: [u32; 24],
    _pacing_rate: u64,
    _max_pacing_rate: u64,
    pub bytes_acked: u64,
    pub bytes_received: u64,
    _segs_out: u32,
    _segs_in: u32,
    pub notsent_bytes: u32,
    _min_rtt: u32,
    _data_segs_in: u32,
    _data_segs_out: u32,
    _delivery_rate: u64,
    _busy_time: u64,
    _rwnd_limited: u64,
    _sndbuf_limited: u64,
    _delivered: u32,
    _delivered_ce: u32,
    pub bytes_sent: u64,
    pub bytes_retrans: u64,
}

impl TcpInfo {
    /// `TCP_ESTABLISHED` of the kernel.
    pub const ESTABLISHED: u8 = 1;

    pub fn read(fd: BorrowedFd<'_>) -> Result<TcpInfo, Errno> {
        let (info, len) = get::<TcpInfo>(fd, libc::IPPROTO_TCP, libc::TCP_INFO)?;
        if len < std::mem::size_of::<TcpInfo>() {
            return Err(Errno::NOSYS); // without the last counters there is nothing to go by
        }
        Ok(info)
    }

    /// Stream bytes accepted from the application.
    pub fn sent(&self) -> u64 {
        self.bytes_sent
            .wrapping_sub(self.bytes_retrans)
            .wrapping_add(u64::from(self.notsent_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    #[test]
    fn tcp_info_counts_bytes() {
        assert_eq!(std::mem::offset_of!(TcpInfo, bytes_acked), 120);
        assert_eq!(std::mem::offset_of!(TcpInfo, bytes_retrans), 208);
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let (mut b, _) = l.accept().unwrap();
        a.write_all(&[7; 1234]).unwrap();
        let mut buf = [0; 1234];
        b.read_exact(&mut buf).unwrap();
        let (ia, ib) = (
            TcpInfo::read(a.as_fd()).unwrap(),
            TcpInfo::read(b.as_fd()).unwrap(),
        );
        assert_eq!(
            (ia.state, ia.sent(), ia.bytes_received),
            (TcpInfo::ESTABLISHED, 1234, 0)
        );
        assert_eq!((ib.sent(), ib.bytes_received), (0, 1234));
    }

    #[test]
    fn peer_of_a_pair_is_us() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(peer_cred(a.as_fd()).unwrap().pid, std::process::id() as i32);
    }
}
