//! Within the node: the other end's process has died with bytes unread on its ring, and this end leaves the lane. Over
//! TCP, these bytes would lie in the socket's receive queue, before the FIN. This puts them there (TCP_REPAIR, which
//! needs CAP_NET_ADMIN). For helper threads: the socket's lock may be held for as long as its owner likes.
//!
//! A process can use this to lie to itself only: the socket is one that it has registered, the other end has ended its
//! stream, and nothing of TCP is unread. The kernel is told nothing that it could tell anybody else, but for one thing:
//! what is acknowledged from now on lies beyond what the other end has sent, so that end has to be gone.

use crate::os::fds::{self, Foreign};
use crate::os::memfd;
use crate::os::sockopt::{self, Of};
use lane::abi::RING_LOG2_MAX;
use lane::num;
use lane::os::room::{Options, RCVBUF_LOCKED, SO_BUF_LOCK};
use lane::os::TcpInfo;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Most bytes: a ring and its predecessor, and what TCP has of the stream before and behind them.
pub(crate) const BYTES_MAX: u64 = (2 << RING_LOG2_MAX) + (8 << 20);
/// Most bytes that one system call puts into the queue: what the kernel keeps in one buffer.
const PIECE: usize = 64 << 10;
/// Most bytes that the buffer of the FIN holds.
const EXACT_MAX: usize = 8 * PIECE;

/// Within the node, the buffer of the FIN is also the sending kernel's, and nothing can be added to it, until that one has
/// seen the acknowledgement, and for some milliseconds more. (With 5 ms, 20 of 100 FINs that had come just now were left
/// alone, with 8 ms none of 400.)
const SETTLED: Duration = Duration::from_millis(10);

// linux/tcp.h
const TCP_REPAIR: i32 = 19;
const TCP_REPAIR_QUEUE: i32 = 20;
const NO_QUEUE: u32 = 0;
const RECV_QUEUE: u32 = 1;
/// Off, without a window probe, which the other end's kernel would answer.
const OFF_NO_WP: u32 = u32::MAX;
const OFF: u32 = 0;

/// Why it was not done: the connection is to be reset.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It is another socket, or not one whose peer has ended with everything read.
    Socket,
    /// The file is none, or not of this size, or the shim has given up.
    File,
    /// The queue has other bytes than these, because somebody else uses the socket.
    Queue,
    System(Errno),
}

impl From<Errno> for Refused {
    fn from(e: Errno) -> Self {
        Refused::System(e)
    }
}

/// What a shim asks for.
pub(crate) struct Requeue {
    /// The connection's socket; and its cookie, as it was when it was paired.
    pub socket: Foreign,
    pub cookie: u64,
    /// A memory file with the bytes. Who seals it first decides: we, before we begin; or the shim, which empties it when
    /// it waits no longer.
    pub file: Foreign,
    pub bytes: u64,
    /// A Unix socket on which it waits for a byte: 1, or 0 if nothing was done.
    pub answer: Foreign,
}

impl Requeue {
    /// Does it, and answers. Closes what came with the request.
    pub(crate) fn run(self) -> bool {
        let done = self.put();
        if let Err(why) = &done {
            tracing::debug!(?why, "unread bytes cannot go back to TCP");
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let _ = rustix::net::send(&self.answer, &[u8::from(done.is_ok())], flags);
        [self.socket, self.file, self.answer]
            .into_iter()
            .for_each(Foreign::close);
        done.is_ok()
    }

    fn put(&self) -> Result<(), Refused> {
        let (sock, bytes) = (self.socket.as_fd(), num::size(self.bytes));
        if !self.is_the_connection() {
            return Err(Refused::Socket);
        }
        // (A process that has ended does not wait. Its family may go on with the lane.)
        let ended = fds::events(&self.answer, PollFlags::empty()).contains(PollFlags::HUP);
        // (Of a memory file nobody else answers, so nothing may block.)
        if ended || self.bytes == 0 || self.bytes > BYTES_MAX || !is_unix(self.answer.as_fd()) {
            return Err(Refused::File);
        }
        memfd::seal(&self.file).map_err(|_| Refused::File)?;
        if memfd::check_fixed(&self.file, bytes).is_none() {
            return Err(Refused::File);
        }
        is_ended(sock)?;
        with_room(sock, bytes, || self.fill(sock, bytes))
    }

    fn is_the_connection(&self) -> bool {
        let sock = self.socket.as_fd();
        let kind = sockopt::get::<i32>(sock, libc::SOL_SOCKET, libc::SO_TYPE);
        sockopt::is_tcp_of(sock, self.cookie)
            && kind.is_ok_and(|k| k.0 == libc::SOCK_STREAM)
            && self.cookie != 0
    }

    /// Over TCP, the FIN shares the buffer with the last bytes before it. It does so again if all bytes fit into the
    /// buffer of the FIN. Otherwise the FIN is taken out first, and SIOCINQ counts one byte too few, because the kernel
    /// believes that the FIN is still there.
    fn fill(&self, sock: BorrowedFd<'_>, bytes: usize) -> Result<(), Refused> {
        let page = rustix::param::page_size();
        // The kernel copies small pieces to where there is no room for them. So there are whole pages, two of them at
        // least, and what lies before the bytes is read again.
        let total = bytes.next_multiple_of(page).max(2 * page);
        let peeks = sockopt::get::<i32>(sock, libc::SOL_SOCKET, libc::SO_PEEK_OFF);
        if total <= EXACT_MAX && page < PIECE && !peeks.is_ok_and(|p| p.0 >= 0) {
            std::thread::sleep(SETTLED);
            self.send(sock, total - bytes, bytes, page)?;
            if peeked(sock, total + 1) == total {
                return discard(sock, total - bytes, 0);
            }
            discard(sock, total, 2)?;
        }
        // (Nothing but the FIN is in the queue, if that.)
        if rustix::net::recv(sock, &mut [0u8; 1], RecvFlags::DONTWAIT)?.0 != 0 {
            return Err(Refused::Queue);
        }
        self.send(sock, 0, bytes, 1)?;
        match sockopt::unread(sock)? == bytes - 1 {
            true => Ok(()),
            false => Err(Refused::Queue),
        }
    }

    /// Appends zeros and the bytes to the receive queue, in multiples of `unit` of which none but the only one is a
    /// single one.
    fn send(
        &self,
        sock: BorrowedFd<'_>,
        zeros: usize,
        bytes: usize,
        unit: usize,
    ) -> Result<(), Refused> {
        let mut piece = vec![0u8; PIECE];
        let (mut at, total) = (0, zeros + bytes);
        let repair = Repair::begin(sock)?;
        while at < total {
            let left = total - at;
            let n = match left.saturating_sub(PIECE) {
                0 => left,
                over if over <= unit => PIECE - unit,
                _ => PIECE,
            };
            let (pad, piece) = (zeros.saturating_sub(at).min(n), &mut piece[..n]);
            piece[..pad].fill(0);
            let from = at.saturating_sub(zeros) as u64;
            if memfd::read_at(&self.file, &mut piece[pad..], from)? < n - pad {
                return Err(Refused::File);
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            if rustix::net::send(sock, piece, flags)? != n {
                return Err(Refused::System(Errno::NOBUFS));
            }
            at += n;
        }
        drop(repair);
        Ok(())
    }
}

/// A socket in repair mode: what is sent goes into its own receive queue. The mode ends with this value, whatever
/// happens; only if the daemon is killed meanwhile does it stay, and then the socket closes without telling its peer,
/// which is gone.
struct Repair<'a> {
    sock: Of<'a>,
    reuse: Option<u32>,
}

impl<'a> Repair<'a> {
    fn begin(sock: BorrowedFd<'a>) -> Result<Self, Refused> {
        let sock = Of(sock);
        let reuse = sock.get(libc::SOL_SOCKET, libc::SO_REUSEADDR);
        if !sock.set(libc::IPPROTO_TCP, TCP_REPAIR, 1) {
            return Err(Refused::System(Errno::PERM));
        }
        let repair = Repair { sock, reuse };
        match repair.queue(RECV_QUEUE) {
            true => Ok(repair),
            false => Err(Refused::System(Errno::INVAL)),
        }
    }

    fn queue(&self, which: u32) -> bool {
        self.sock.set(libc::IPPROTO_TCP, TCP_REPAIR_QUEUE, which)
    }
}

impl Drop for Repair<'_> {
    fn drop(&mut self) {
        self.queue(NO_QUEUE);
        if !self.sock.set(libc::IPPROTO_TCP, TCP_REPAIR, OFF_NO_WP) {
            self.sock.set(libc::IPPROTO_TCP, TCP_REPAIR, OFF);
        }
        // (The mode has set and reset it.)
        if self.reuse == Some(1) {
            self.sock.set(libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
        }
    }
}

fn is_unix(fd: BorrowedFd<'_>) -> bool {
    sockopt::get::<i32>(fd, libc::SOL_SOCKET, libc::SO_DOMAIN).is_ok_and(|d| d.0 == libc::AF_UNIX)
}

/// Has the peer sent its FIN, and is nothing else unread, or unacknowledged? Then acknowledges the FIN, if the kernel has
/// not yet: the peer's kernel waits for that, and will not know what is acknowledged later.
fn is_ended(sock: BorrowedFd<'_>) -> Result<(), Refused> {
    let state = sockopt::get::<[u8; 1]>(sock, libc::IPPROTO_TCP, libc::TCP_INFO)?.0;
    let end = rustix::net::recv(sock, &mut [0u8; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK);
    let quiet = sockopt::unread(sock)? == 0 && sockopt::outstanding(sock)? == 0;
    if state != [TcpInfo::CLOSE_WAIT] || !quiet || end.map(|e| e.0) != Ok(0) {
        return Err(Refused::Socket);
    }
    let of = Of(sock);
    let quick = of.get(libc::IPPROTO_TCP, libc::TCP_QUICKACK);
    of.set(libc::IPPROTO_TCP, libc::TCP_QUICKACK, 1);
    if quick == Some(0) {
        of.set(libc::IPPROTO_TCP, libc::TCP_QUICKACK, 0);
    }
    Ok(())
}

/// Does something for which the receive buffer has to hold twice so many bytes, and gives it back its size. (A kernel
/// that does not tell who has set the size makes it larger by itself, as far as `net.ipv4.tcp_rmem` allows.)
fn with_room<R>(sock: BorrowedFd<'_>, bytes: usize, put: impl FnOnce() -> R) -> R {
    let (of, sol) = (Of(sock), libc::SOL_SOCKET);
    let (lock, size) = (of.get(sol, SO_BUF_LOCK), of.get(sol, libc::SO_RCVBUF));
    let wanted = num::small(bytes + 4 * PIECE);
    let (Some(lock), Some(size), true) = (lock, size, size.is_some_and(|s| s / 2 < wanted)) else {
        return put();
    };
    // The kernel doubles what it is told.
    if !of.set(sol, libc::SO_RCVBUFFORCE, wanted) {
        return put();
    }
    let ours = of.get(sol, libc::SO_RCVBUF);
    let r = put();
    if of.get(sol, libc::SO_RCVBUF) == ours {
        of.set(sol, libc::SO_RCVBUFFORCE, size / 2);
        let now = of.get(sol, SO_BUF_LOCK).unwrap_or(lock);
        let locks = now & !RCVBUF_LOCKED | lock & RCVBUF_LOCKED;
        of.set(sol, SO_BUF_LOCK, locks);
    }
    r
}

/// Number of bytes that a receive would return, of so many.
fn peeked(sock: BorrowedFd<'_>, most: usize) -> usize {
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    rustix::net::recv(sock, &mut vec![0; most][..], flags).map_or(0, |r| r.0)
}

/// Takes so many bytes out of the queue. The FIN may be met so many times.
fn discard(sock: BorrowedFd<'_>, bytes: usize, ends: u32) -> Result<(), Refused> {
    let (mut buf, mut left, mut met) = (vec![0; bytes.min(PIECE)], bytes, 0);
    while left > 0 {
        let n = left.min(buf.len());
        match rustix::net::recv(sock, &mut buf[..n], RecvFlags::DONTWAIT)?.0 {
            0 if met == ends => return Err(Refused::Queue),
            0 => met += 1,
            n => left -= n,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
