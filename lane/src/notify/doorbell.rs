//! The doorbell: one Unix stream socket pair per link group, an end for each client.
//!
//! Not an eventfd: the two clients share a description there, so that the peer can clear
//! O_NONBLOCK, fill it, and block whoever rings. Of a socket pair each holds its own end; sending
//! with `MSG_DONTWAIT` cannot block whatever the peer does, and a full socket means that the peer
//! has unread rings anyway. Raw system calls: neither is a cancellation point.

use rustix::fd::BorrowedFd;
use rustix::io::{retry_on_intr, Errno};
use rustix::net::{RecvFlags, SendFlags};

/// Tries of [`ring`] while the kernel has no memory for a byte.
const RING_TRIES: u32 = 64;

/// Rings. Other errors do not matter: EAGAIN means rung already, EPIPE that nobody is left. But a ring that
/// is lost leaves the peer asleep, so that EINTR (which a seccomp supervisor may answer) and ENOBUFS are
/// no end of it.
pub fn ring(fd: BorrowedFd<'_>) {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    for _ in 0..RING_TRIES {
        match retry_on_intr(|| rustix::net::send(fd, &[1], flags)) {
            Err(Errno::NOMEM | Errno::NOBUFS) => core::hint::spin_loop(),
            _ => return,
        }
    }
}

/// What [`drain`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// There was a ring.
    Rung,
    /// Nothing to read.
    Quiet,
    /// The peer's end is closed: its client is gone.
    Gone,
}

/// Takes all pending rings. At most a handful of system calls, so that a peer that rings all the
/// time cannot keep the caller here.
pub fn drain(fd: BorrowedFd<'_>) -> Drained {
    let mut rung = false;
    for _ in 0..4 {
        let mut b = [0u8; 512];
        match retry_on_intr(|| rustix::net::recv(fd, &mut b[..], RecvFlags::DONTWAIT)) {
            Ok((0, _)) => return Drained::Gone,
            Ok((n, _)) => {
                rung = true;
                if n < b.len() {
                    break;
                }
            }
            Err(_) => break,
        }
    }
    if rung {
        Drained::Rung
    } else {
        Drained::Quiet
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn rings_and_drains() {
        let (a, b) = UnixStream::pair().unwrap();
        assert_eq!(drain(b.as_fd()), Drained::Quiet);
        ring(a.as_fd());
        ring(a.as_fd());
        assert_eq!(drain(b.as_fd()), Drained::Rung);
        assert_eq!(drain(b.as_fd()), Drained::Quiet);
        drop(a);
        assert_eq!(drain(b.as_fd()), Drained::Gone);
        ring(b.as_fd());
    }

    /// A peer that never reads and fiddles with its own flags cannot block the ringer.
    #[test]
    fn a_full_doorbell_does_not_block() {
        let (a, b) = UnixStream::pair().unwrap();
        b.set_nonblocking(false).unwrap();
        for _ in 0..100_000 {
            ring(a.as_fd());
        }
        assert_eq!(drain(b.as_fd()), Drained::Rung);
    }
}
