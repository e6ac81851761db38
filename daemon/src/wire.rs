//! One control message with its descriptors, to and from a SEQPACKET socket. Never blocks.

use crate::fds::Foreign;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The kernel never puts more descriptors beside one message. Room for all of them, although we
/// accept few: what does not fit, the kernel would release in our thread, and that may block.
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

/// Reads one message into `buf`; `Err(AGAIN)` when there is none.
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
    if got.bytes == 0 {
        return Ok(Incoming::End); // also an empty message, which nobody sends
    }
    Ok(Incoming::Message {
        len: got.bytes,
        fds,
    })
}

/// Sends one message; `Err(AGAIN)` when the receiver does not keep up.
pub fn send(fd: BorrowedFd<'_>, bytes: &[u8], fds: &[Arc<OwnedFd>]) -> Result<(), Errno> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|f| f.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(link::msg::MAX_FDS))];
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
