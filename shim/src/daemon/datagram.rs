//! One datagram of a Unix socket, with the descriptors that it carries.

use crate::sys;
use lane::num;
use lane::proto::msg::MAX_FDS;

/// Buffer for control data, aligned as cmsghdr requires.
#[repr(C, align(8))]
struct Ctl([u8; 64]);

impl Ctl {
    /// Writes these descriptors, [`MAX_FDS`] at most, and returns the length.
    fn put_fds(&mut self, fds: &[i32]) -> usize {
        // struct cmsghdr on 64-bit: len u64, level i32, type i32, data. musl agrees on little endian.
        let data = fds.len() * 4;
        self.0[0..8].copy_from_slice(&(16 + data as u64).to_ne_bytes());
        self.0[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
        self.0[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
        for (at, fd) in self.0[16..].chunks_exact_mut(4).zip(fds) {
            at.copy_from_slice(&fd.to_ne_bytes());
        }
        (16 + data).next_multiple_of(8)
    }

    fn fds(&self, len: usize) -> Fds {
        let mut fds = [-1; MAX_FDS];
        let word = |o: usize| {
            let mut w = [0u8; 4];
            w.copy_from_slice(&self.0[o..o + 4]);
            i32::from_ne_bytes(w)
        };
        if len >= 20 && word(8) == libc::SOL_SOCKET && word(12) == libc::SCM_RIGHTS {
            let n = (num::word(word(0)).saturating_sub(16) / 4).min((len - 16) / 4);
            for (i, f) in fds.iter_mut().enumerate().take(n) {
                *f = word(16 + 4 * i);
            }
        }
        Fds(fds)
    }
}

/// Descriptors that came with a datagram; -1: none. Those that are not taken are closed.
pub struct Fds([i32; MAX_FDS]);

impl Fds {
    pub fn take(&mut self, i: usize) -> Option<i32> {
        let f = self.0.get_mut(i).filter(|f| **f >= 0)?;
        Some(core::mem::replace(f, -1))
    }
}

impl Drop for Fds {
    fn drop(&mut self) {
        self.0
            .iter()
            .filter(|f| **f >= 0)
            .for_each(|f| sys::close(*f));
    }
}

fn header(iov: &mut libc::iovec, ctl: &mut Ctl) -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr.
    let mut h: libc::msghdr = unsafe { core::mem::zeroed() };
    h.msg_iov = iov;
    h.msg_iovlen = 1;
    h.msg_control = ctl.0.as_mut_ptr().cast();
    h.msg_controllen = ctl.0.len() as _;
    h
}

/// Sends a datagram, with or without descriptors, unless it would have to wait.
pub fn send(sock: i32, bytes: &[u8], fds: &[i32]) -> Result<(), i32> {
    let mut iov = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut ctl = Ctl([0; 64]);
    let len = match fds {
        [] => 0,
        fds => ctl.put_fds(&fds[..fds.len().min(MAX_FDS)]),
    };
    let mut h = header(&mut iov, &mut ctl);
    h.msg_controllen = len as _;
    sys::sendmsg(sock, &h, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL).map(drop)
}

/// Receives a datagram if there is one: its length (0: the connection has ended), and its descriptors.
pub fn receive(sock: i32, buf: &mut [u8]) -> Result<(usize, Fds), i32> {
    let mut iov = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    let mut ctl = Ctl([0; 64]);
    let mut h = header(&mut iov, &mut ctl);
    let n = sys::recvmsg(sock, &mut h, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC)?;
    Ok((n, ctl.fds(h.msg_controllen)))
}
