//! One control message with its descriptors, to and from a SEQPACKET socket. Never blocks.

use crate::os::fds::{close_all, Foreign};
use crate::os::pool;
use crate::os::sockopt;
use lane::proto::msg::MAX_FDS;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// What was read.
#[derive(Debug)]
pub enum Incoming {
    Message {
        len: usize,
        fds: Vec<Foreign>,
        /// There was no room for some of its descriptors: they are gone.
        lost: bool,
    },
    /// The other side closed.
    End,
}

/// Reads one message into `buf`; `Err(AGAIN)` when there is none, `Err(TOOMANYREFS)` if it had more descriptors than any
/// message has. The caller sees to it that there is room ([`Foreign::has_room`]).
pub fn recv(from: &Foreign, buf: &mut [u8]) -> Result<Incoming, Errno> {
    let r = read(from, buf)?;
    if r.fds.len() > MAX_FDS {
        close_all(r.fds);
        return Err(Errno::TOOMANYREFS);
    }
    if r.len == 0 {
        return Ok(Incoming::End); // also an empty message, which nobody sends
    }
    Ok(Incoming::Message {
        len: r.len,
        fds: r.fds,
        lost: r.lost,
    })
}

/// There was no room for a descriptor.
#[derive(Debug)]
pub(crate) struct Lost;

/// A socket that a shim has handed in, and the Unix socket in whose queue it lay, which the shim has, too.
#[derive(Debug)]
pub struct HandedOver {
    socket: Foreign,
    end: Option<Foreign>,
}

impl HandedOver {
    /// Takes the socket out of the queue of `fd`; a descriptor of anything else is the socket itself (see
    /// `lane::proto::msg::ToDaemon::Register`). `Ok(None)`: the shim has taken it back. Runs on the blocking pool.
    pub(crate) fn take(fd: Foreign) -> Result<Option<Self>, Lost> {
        let domain = sockopt::get::<i32>(fd.as_fd(), libc::SOL_SOCKET, libc::SO_DOMAIN);
        if domain.map(|d| d.0) != Ok(libc::AF_UNIX) {
            return Ok(Some(Self {
                socket: fd,
                end: None,
            }));
        }
        let (mut fds, lost) = match fd.has_room().then(|| recv(&fd, &mut [0u8; 1])) {
            Some(Ok(Incoming::Message { fds, lost, .. })) => (fds, lost),
            Some(_) => (Vec::new(), false),
            None => (Vec::new(), true),
        };
        let socket = fds.pop();
        fds.into_iter().for_each(Foreign::close);
        if lost {
            return Err(Lost);
        }
        Ok(socket.map(|socket| Self {
            socket,
            end: Some(fd),
        }))
    }

    /// Closes our copy; then the shim, which waits before it closes its own, sees POLLHUP. Runs on a helper, which does not
    /// wait: where a close may, it is left to those who do nothing else, in the same order.
    pub fn close(self) {
        let Self { socket, end } = self;
        if sockopt::closes_at_once(socket.as_fd()) {
            socket.close();
            return hang_up(end);
        }
        let payer = socket.payer().cloned();
        pool::CLOSES.start(payer, move || {
            socket.close();
            hang_up(end);
        });
    }
}

/// Tells the shim that our copy of its socket is closed.
fn hang_up(end: Option<Foreign>) {
    let Some(end) = end else { return };
    // Fails for a socket that has no shutdown, which is not the shim's.
    let shut = rustix::net::shutdown(&end, rustix::net::Shutdown::Both).is_ok();
    // Nothing can be put into its queue any more. What lies there would be closed with it, and that may wait.
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let empty = rustix::net::recv(&end, &mut [0u8; 1][..], flags).is_ok_and(|n| n.0 == 0);
    match shut && empty {
        true => end.close(),
        false => drop(end),
    }
}

impl AsFd for HandedOver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Descriptors of one message, and the process that sent it (0: not visible here), read from a socket with
/// [`sockopt::pass_credentials`]. `None`: the other side closed. The caller sees to it that there is room.
pub fn recv_from(from: &Foreign) -> Result<Option<(i32, Vec<Foreign>)>, Errno> {
    let r = read(from, &mut [0u8; 16])?;
    Ok((r.len > 0).then_some((r.sender, r.fds)))
}

/// One message.
struct Read {
    len: usize,
    fds: Vec<Foreign>,
    lost: bool,
    /// Who sent it, if the socket tells and the process is visible here; else 0.
    sender: i32,
}

/// Reads one. There is room for all descriptors that a message can have, although we accept few, and for what whoever has
/// our end, too, may make the kernel put beside them (SO_PASSCRED): it would close those that do not fit in our thread, and
/// that may block. Does not use rustix, which cannot represent a sender of 0.
fn read(from: &Foreign, buf: &mut [u8]) -> Result<Read, Errno> {
    #[repr(align(8))]
    struct Space([u8; 2048]); // 1,032 for SCM_MAX_FD descriptors
    let mut space = Space([0; 2048]);
    let mut iov = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    // SAFETY: all-zero is a valid msghdr.
    let mut h: libc::msghdr = unsafe { std::mem::zeroed() };
    h.msg_iov = &mut iov;
    h.msg_iovlen = 1;
    h.msg_control = space.0.as_mut_ptr().cast();
    h.msg_controllen = space.0.len() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header names buffers of ours, which live, with their lengths.
    let n = unsafe { libc::recvmsg(from.as_raw_fd(), &mut h, flags) };
    let Ok(len) = usize::try_from(n) else {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    };
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
                    fds.push(Foreign::received(fd, from.payer().cloned()));
                }
            }
            _ => {}
        }
        // SAFETY: as above.
        c = unsafe { libc::CMSG_NXTHDR(&h, c) };
    }
    Ok(Read {
        len,
        fds,
        lost: h.msg_flags & libc::MSG_CTRUNC != 0,
        sender,
    })
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
