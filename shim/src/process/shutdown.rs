//! `shutdown`, and what it shares with a close: no frame or byte in flight may turn the end into a reset.

use super::remote;
use crate::promotion;
use crate::readiness::wait;
use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::state::{attached, waiters};
use crate::sys::{self, lock, thread};
use crate::tcp;
use crate::tcp::call::Call;
use crate::tcp::port::{self, Sock};
use core::sync::atomic::Ordering::*;
use lane::abi::TcpPos;
use lane::family::{state, Conn};
use lane::half::tx::BeforeFin;
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
        let Ok(step) = c.tx.come_to_fin(m, port, || promotion::is_orphaned(c)) else {
            return Flushed::Late;
        };
        let now = sys::now_ms();
        let _ = match step {
            BeforeFin::OnTcp(repeated) => return Flushed::OnTcp(repeated),
            BeforeFin::ByDaemon if now >= patience || thread::waiting() => {
                return Flushed::ByDaemon;
            }
            BeforeFin::ByDaemon => sys::poll_ms(-1, 0, 1),
            _ if fd < 0 || now >= end => return Flushed::Late,
            BeforeFin::Claimed => sys::poll_ms(-1, 0, 1), // (a claim alone may be withdrawn)
            BeforeFin::Room => sys::poll_ms(fd, libc::POLLOUT, 5),
        };
    }
}

/// Milliseconds for which an end that reads nothing any more waits for a frame in flight.
const FRAME_MS: u64 = 50;

/// This end reads nothing any more, and has announced it, or has read everything and is about to exit. A frame that is on TCP
/// already, or that its sender is about to write, would turn the end into a reset, so it is read here. (If this is a close,
/// unread bytes make it a reset anyway.) `until`: when the wait ends (CLOCK_MONOTONIC, ms), [`FRAME_MS`] after it has begun.
pub(super) fn take_frame(c: &Conn, m: &Memory, port: &Sock, closes: bool, until: &mut Option<u64>) {
    loop {
        let due = c.rx.awaits_frame(m);
        if c.rx.engaged() {
            let _ = c.rx.probe(m, port);
        }
        if !due || closes && c.rx.ring_unread(m) > 0 {
            return;
        }
        let now = sys::now_ms();
        if now >= *until.get_or_insert(now + FRAME_MS) {
            return;
        }
        let _ = sys::poll_ms(-1, 0, 1);
    }
}

/// What is left of a `shutdown`.
pub enum Left {
    /// All of it: the connection has no lane.
    Kernel,
    /// It is done or under way, with this result.
    Done(Result<(), i32>),
}

/// Called before the kernel's `shutdown`, which it makes itself for a connection with a lane. Others may close the number
/// during its waits: the call holds such a connection, as the kernel's own has its file from the beginning.
pub fn before_shutdown(call: &mut Call, fd: i32, i: u32, how: i32) -> Left {
    let (c, l) = (table::conn(i), table::local(i));
    if c.state.load(Relaxed) != state::OPEN {
        return Left::Kernel;
    }
    if attached::of(c, l).is_some() && !holds(call, fd, c, l) {
        return Left::Done(Err(libc::EBADF));
    }
    if how == libc::SHUT_RD || how == libc::SHUT_RDWR {
        c.rx.shut.store(1, Relaxed);
    }
    if how == libc::SHUT_WR || how == libc::SHUT_RDWR {
        // Under the lock: if a lane is attached or a switch is made after this, it finds the connection
        // disqualified (`promotion::attach`, `try_up`), so that nothing is sent after the FIN.
        let _g = lock::lock(&c.tx.lock);
        l.sends_ended.store(1, Relaxed);
        table::disqualify(c, Reason::NotEstablished);
    }
    let Some((group, m)) = attached::of(c, l) else {
        return match call.holds() {
            true => in_kernel(c, l, how),
            false => Left::Kernel,
        };
    };
    if !holds(call, fd, c, l) {
        return Left::Done(Err(libc::EBADF));
    }
    if c.rx.shut.load(Relaxed) != 0 && l.sends_ended.load(Relaxed) != 0 {
        promotion::bring_unread(i);
    }
    match group.is_remote() {
        true => match remote::shutdown(c, l, (group, &m), how) {
            Some(how) => in_kernel(c, l, how),
            None => Left::Done(Ok(())),
        },
        false => on_node(c, l, (group, &m), how),
    }
}

/// Holds the connection: from now on its descriptor is `l.fd`. False: it was closed before.
fn holds(call: &mut Call, fd: i32, c: &Conn, l: &Local) -> bool {
    let holds = call.hold(c, l);
    let other = l.fd.load(Relaxed);
    if holds && other != fd {
        tcp::proven(other); // if it was closed unseen, the number given takes its place
    }
    holds
}

/// Under the lock, the number stays the connection's.
fn in_kernel(c: &Conn, l: &Local, how: i32) -> Left {
    let _g = lock::lock(&c.tx.lock);
    Left::Done(sys::shutdown(l.fd.load(Relaxed), how))
}

/// The same for a lane within the node.
fn on_node(c: &Conn, l: &Local, (group, m): (&LinkGroup, &Memory), how: i32) -> Left {
    if c.rx.shut.load(Relaxed) != 0 {
        // Under the lock: a lane that another thread gives back meanwhile is the next connection's, and so are its words.
        // (If there is no guard, this very thread has the lock.)
        let _g = lock::lock(&c.rx.lock);
        if attached::is_still(c, group, m) {
            c.rx.announce_deaf(m);
        }
    }
    let deaf = || {
        if c.rx.is_deaf(m) {
            let _g = lock::lock(&c.rx.lock);
            take_frame(
                c,
                m,
                &Sock::leaving(l.fd.load(Relaxed), group),
                false,
                &mut None,
            );
        }
    };
    if how == libc::SHUT_WR || how == libc::SHUT_RDWR {
        if let Some(_g) = lock::lock(&c.tx.lock).filter(|_| attached::is_still(c, group, m)) {
            let fd = l.fd.load(Relaxed);
            let port = Sock::leaving(fd, group);
            let repeated = match flush(c, m, &port, 0) {
                Flushed::OnTcp(repeated) => repeated,
                Flushed::ByDaemon => {
                    // The daemon shuts the socket down when it is done, or we do when we have the direction again.
                    c.tx.leave_fin(&c.rx, m, &port);
                    c.tx.end_late(&port);
                    return Left::Done(match how {
                        libc::SHUT_RDWR => sys::shutdown(fd, libc::SHUT_RD),
                        _ => Ok(()),
                    });
                }
                Flushed::Late => {
                    drop(_g);
                    tcp::reset(c, l.fd.load(Relaxed), Reason::Stalled);
                    return in_kernel(c, l, how);
                }
            };
            c.rx.announce_end(m, &port, c.tx.sent_at_fin(false));
            deaf();
            // Everything sent is on the ring, and other threads' sends wait for our lock: if their bytes reached
            // TCP before the FIN, the reader, which is on the ring, would not expect them there. Later sends get
            // the kernel's EPIPE.
            let done = sys::shutdown(fd, how);
            c.tx.shut(m, &port, repeated);
            return Left::Done(done);
        }
    }
    deaf();
    in_kernel(c, l, how)
}

/// Called after the kernel's `shutdown`: sleeping threads must look.
pub fn after_shutdown(i: u32) {
    let c = table::conn(i);
    // (Counted before the sleepers are woken, because some calls end with any wake-up if this has changed.)
    table::local(i).shuts.fetch_add(1, SeqCst);
    if let Some((group, m)) = attached::of(c, table::local(i)) {
        // Not before the kernel's shutdown, since until then the kernel takes what the other end sends by TCP. (If another
        // thread has given the lane back meanwhile, the direction is on TCP for good, since it is shut, and nothing is
        // stored.)
        if c.rx.shut.load(Relaxed) != 0 && !group.is_remote() {
            if let Some(_g) = lock::lock(&c.rx.lock) {
                c.rx.shut(&m, &Sock::new(table::local(i).fd.load(Relaxed), group));
            }
        }
        wait::forward(group, None, None);
        waiters::look(i);
        port::ring(group);
    }
}
