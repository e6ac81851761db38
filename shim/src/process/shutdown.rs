//! `shutdown`, and what it shares with a close: no frame or byte in flight may turn the end into a reset.

use super::remote;
use crate::promotion;
use crate::readiness::wait;
use crate::state::{attached, table, waiters};
use crate::sys::{self, lock, thread};
use crate::tcp;
use crate::tcp::port::{self, Sock};
use core::sync::atomic::Ordering::*;
use core::task::Poll;
use lane::abi::TcpPos;
use lane::family::{state, Conn};
use lane::half::Memory;
use lane::proto::reason::Reason;

/// Result of [`flush`].
#[derive(PartialEq, Eq)]
pub(super) enum Flushed {
    /// It is on TCP; as [`TxState::before_fin`](lane::half::TxState::before_fin) says.
    OnTcp(Option<TcpPos>),
    /// The daemon has taken the direction over, and does not leave it undone.
    ByDaemon,
    /// The peer does not take it in time, and the connection is to be reset.
    Late,
}

/// Puts on TCP what must be there before the FIN, and what is unread. (Also if a reset follows: what the other end's
/// kernel has by then stays readable.) A daemon that has the direction is waited for for at most
/// `patience` milliseconds, or until a signal comes.
pub(super) fn flush(c: &Conn, m: &Memory, port: &Sock, patience: u64) -> Flushed {
    let (fd, begin) = (port.fd, sys::now_ms());
    let (end, patience) = (begin + promotion::LEAVE_MS, begin.saturating_add(patience));
    loop {
        if c.tx.awaits(m) {
            if promotion::is_orphaned(c) && c.tx.reclaim(m, port).is_err() {
                return Flushed::Late;
            }
            if c.tx.is_recorded(m) {
                if sys::now_ms() >= patience || thread::waiting() {
                    return Flushed::ByDaemon;
                }
                let _ = sys::poll_ms(-1, 0, 1);
                continue;
            }
        }
        if let Poll::Ready(repeated) = c.tx.before_fin(m, port) {
            return Flushed::OnTcp(repeated);
        }
        if fd < 0 || sys::now_ms() >= end {
            return Flushed::Late;
        }
        let _ = match c.tx.awaits(m) {
            true => sys::poll_ms(-1, 0, 1), // (a claim alone may be withdrawn)
            false => sys::poll_ms(fd, libc::POLLOUT, 5),
        };
    }
}

/// Milliseconds for which an end that reads nothing any more waits for a frame in flight.
const FRAME_MS: u64 = 50;

/// This end reads nothing any more, and has announced it. A frame that is on TCP already, or that its sender is
/// about to write, would turn the end into a reset, so it is read here. (If this is a close, unread bytes make it
/// a reset anyway.)
pub(super) fn take_frame(c: &Conn, m: &Memory, port: &Sock, closes: bool) {
    let end = sys::now_ms() + FRAME_MS;
    loop {
        let due = c.rx.awaits_frame(m);
        if c.rx.engaged() {
            let _ = c.rx.probe(m, port);
        }
        if !due || closes && c.rx.ring_unread(m) > 0 || sys::now_ms() >= end {
            return;
        }
        let _ = sys::poll_ms(-1, 0, 1);
    }
}

/// What the kernel still has to do for a `shutdown`.
pub enum Left {
    Kernel(i32),
    /// It is done or under way, with this result.
    Done(Result<(), i32>),
}

/// Called before the kernel's `shutdown`.
pub fn before_shutdown(fd: i32, i: u32, how: i32) -> Left {
    let c = table::conn(i);
    if c.state.load(Relaxed) != state::OPEN {
        return Left::Kernel(how);
    }
    if how == libc::SHUT_RD || how == libc::SHUT_RDWR {
        c.rx.shut.store(1, Relaxed);
    }
    if how == libc::SHUT_WR || how == libc::SHUT_RDWR {
        // Under the lock: if a lane is attached or a switch is made after this, it finds the connection
        // disqualified (`promotion::attach`, `try_up`), so that nothing is sent after the FIN.
        let _g = lock::lock(&c.tx.lock);
        table::local(i).sends_ended.store(1, Relaxed);
        table::disqualify(c, Reason::NotEstablished);
    }
    if c.rx.shut.load(Relaxed) != 0 && table::local(i).sends_ended.load(Relaxed) != 0 {
        promotion::bring_unread(i, fd);
    }
    let Some((group, m)) = attached::of(c, table::local(i)) else {
        return Left::Kernel(how);
    };
    if group.is_remote() {
        return match remote::shutdown(c, group, &m, fd, how) {
            Some(how) => Left::Kernel(how),
            None => Left::Done(Ok(())),
        };
    }
    let port = Sock::leaving(fd, group);
    if c.rx.shut.load(Relaxed) != 0 {
        c.rx.announce_deaf(&m);
    }
    let deaf = || {
        if c.rx.is_deaf(&m) {
            let _g = lock::lock(&c.rx.lock);
            take_frame(c, &m, &port, false);
        }
    };
    if how == libc::SHUT_WR || how == libc::SHUT_RDWR {
        if let Some(_g) = lock::lock(&c.tx.lock).filter(|_| attached::is_still(c, group, &m)) {
            let repeated = match flush(c, &m, &port, 0) {
                Flushed::OnTcp(repeated) => repeated,
                Flushed::ByDaemon => {
                    // The daemon shuts the socket down when it is done, or we do when we have the direction again.
                    c.tx.shut.store(1, SeqCst);
                    let _ = c.tx.look(&m, &port);
                    promotion::shut_late(c, fd);
                    return match how {
                        libc::SHUT_RDWR => Left::Kernel(libc::SHUT_RD),
                        _ => Left::Done(Ok(())),
                    };
                }
                Flushed::Late => {
                    drop(_g);
                    tcp::reset(c, fd, Reason::Stalled);
                    return Left::Kernel(how);
                }
            };
            c.rx.announce_end(&m, &port, c.tx.tcp_pos.load(Relaxed));
            deaf();
            // Everything sent is on the ring, and other threads' sends wait for our lock: if their bytes reached
            // TCP before the FIN, the reader, which is on the ring, would not expect them there. Later sends get
            // the kernel's EPIPE.
            let done = sys::shutdown(fd, how);
            c.tx.shut(&m, &port, repeated);
            return Left::Done(done);
        }
    }
    deaf();
    Left::Kernel(how)
}

/// Called after the kernel's `shutdown`: sleeping threads must look.
pub fn after_shutdown(i: u32, fd: i32) {
    let c = table::conn(i);
    // (Counted before the sleepers are woken, because some calls end with any wake-up if this has changed.)
    table::local(i).shuts.fetch_add(1, SeqCst);
    if let Some((group, m)) = attached::of(c, table::local(i)) {
        // Not before the kernel's shutdown, since until then the kernel takes what the other end sends by TCP.
        if c.rx.shut.load(Relaxed) != 0 && !group.is_remote() {
            if let Some(_g) = lock::lock(&c.rx.lock) {
                c.rx.shut(&m, &Sock::new(fd, group));
            }
        }
        wait::forward(group, None, None);
        waiters::look(i);
        port::ring(group);
    }
}
