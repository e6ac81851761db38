//! One control message with its descriptors, to and from a SEQPACKET socket. Never blocks.

use crate::os::fds::{close_all, Foreign};
use crate::os::sockopt;
use lane::proto::msg::MAX_FDS;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// The most descriptors that the kernel puts beside one message. There is room for all of them, although we accept
/// few: the kernel would close those that do not fit in our thread, and that may block.
const SCM_MAX_FD: usize = 253;

/// What was read.
#[derive(Debug)]
pub enum Incoming {
    Message {
        len: usize,
        fds: Vec<Foreign>,
    },
    /// The other side closed.
    End,
}

/// Reads one message into `buf`; `Err(AGAIN)` when there is none, `Err(TOOMANYREFS)` if it had more descriptors than any
/// message has.
pub fn recv(fd: BorrowedFd<'_>, buf: &mut [u8]) -> Result<Incoming, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(
        fd,
        &mut [IoSliceMut::new(buf)],
        &mut control,
        RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut fds = Vec::new();
    for m in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = m {
            fds.extend(rights.map(Foreign::new));
        }
    }
    if fds.len() > MAX_FDS {
        close_all(fds);
        return Err(Errno::TOOMANYREFS);
    }
    if got.bytes == 0 {
        return Ok(Incoming::End); // also an empty message, which nobody sends
    }
    Ok(Incoming::Message {
        len: got.bytes,
        fds,
    })
}

/// A socket that a shim has handed in, and the Unix socket in whose queue it lay, which the shim has, too.
#[derive(Debug)]
pub struct HandedOver {
    socket: Foreign,
    end: Option<Foreign>,
}

impl HandedOver {
    /// Takes the socket out of the queue of `fd`; a descriptor of anything else is the socket itself (see
    /// `lane::proto::msg::ToDaemon::Register`). `None`: the shim has taken it back. Runs on the blocking pool.
    pub fn take(fd: Foreign) -> Option<Self> {
        let domain = sockopt::get::<i32>(fd.as_fd(), libc::SOL_SOCKET, libc::SO_DOMAIN);
        if domain.map(|d| d.0) != Ok(libc::AF_UNIX) {
            return Some(Self {
                socket: fd,
                end: None,
            });
        }
        let Ok(Incoming::Message { mut fds, .. }) = recv(fd.as_fd(), &mut [0u8; 1]) else {
            fd.close();
            return None;
        };
        let socket = fds.pop();
        fds.into_iter().for_each(Foreign::close);
        Some(Self {
            socket: socket?,
            end: Some(fd),
        })
    }

    /// Closes our copy; then the shim, which waits before it closes its own, sees POLLHUP. Runs on the blocking pool.
    pub fn close(self) {
        self.socket.close(); // may block
        if let Some(end) = self.end {
            // Fails for a socket that has no shutdown, which is not the shim's.
            let _ = rustix::net::shutdown(&end, rustix::net::Shutdown::Both);
            end.close();
        }
    }
}

impl AsFd for HandedOver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Descriptors of one message, and the process that sent it (0: not visible here), read from a socket with
/// [`sockopt::pass_credentials`]. `None`: the other side closed. Does not use rustix, which cannot represent a pid
/// of 0.
pub fn recv_from(fd: BorrowedFd<'_>) -> Result<Option<(i32, Vec<Foreign>)>, Errno> {
    #[repr(align(8))]
    struct Space([u8; 2048]); // for SCM_MAX_FD descriptors and the sender
    let (mut space, mut byte) = (Space([0; 2048]), [0u8; 16]);
    let mut iov = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: byte.len(),
    };
    // SAFETY: all-zero is a valid msghdr.
    let mut h: libc::msghdr = unsafe { std::mem::zeroed() };
    h.msg_iov = &mut iov;
    h.msg_iovlen = 1;
    h.msg_control = space.0.as_mut_ptr().cast();
    h.msg_controllen = space.0.len() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header names buffers of ours, which live, with their lengths.
    let n = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut h, flags) };
    if n < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    let (mut sender, mut fds) = (0, Vec::new());
    // SAFETY: the kernel has filled in `msg_controllen` bytes of well-formed messages.
    let mut c = unsafe { libc::CMSG_FIRSTHDR(&h) };
    while !c.is_null() {
        // SAFETY: inside the control buffer, by the macros.
        let (head, data) = unsafe { (*c, libc::CMSG_DATA(c)) };
        let len = head.cmsg_len.saturating_sub(data as usize - c as usize);
        match (head.cmsg_level, head.cmsg_type) {
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                // SAFETY: a `struct ucred`, whose first member is the process.
                sender = unsafe { data.cast::<i32>().read_unaligned() };
            }
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                for k in 0..len / 4 {
                    // SAFETY: so many descriptors, which the kernel has just made for us.
                    let fd =
                        unsafe { OwnedFd::from_raw_fd(data.cast::<i32>().add(k).read_unaligned()) };
                    fds.push(Foreign::new(fd));
                }
            }
            _ => {}
        }
        // SAFETY: as above.
        c = unsafe { libc::CMSG_NXTHDR(&h, c) };
    }
    Ok((n > 0).then_some((sender, fds)))
}

/// Sends one message; `Err(AGAIN)` when the receiver does not keep up.
pub fn send(fd: BorrowedFd<'_>, bytes: &[u8], fds: &[Arc<OwnedFd>]) -> Result<(), Errno> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|f| f.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::TOOBIG);
    }
    rustix::net::sendmsg(
        fd,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
    )?;
    Ok(())
}
