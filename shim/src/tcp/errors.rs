//! Errors that the kernel reports only once, and that must not get lost: if a call of ours took one from the
//! socket, the application gets it when, and as, the kernel would have reported it (see [`lane::half::Pending`]).

use super::call::Call;
use super::fail;
use crate::daemon;
use crate::state::attached;
use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::sys::{self, lock, thread};
pub use crate::sys::{CLOSE, CLOSE_WAIT};
use crate::tcp::port::{self, Sock};
use crate::tcp::{ends, probes};
use core::sync::atomic::Ordering::*;
use lane::family::Conn;
use lane::half::Memory;
use lane::num;
use lane::proto::reason::Reason;

/// Resets the connection: RST to the peer, ECONNRESET here once, and the reason in `ss`.
#[cold]
pub fn reset(c: &Conn, fd: i32, r: Reason) {
    if super::is_other(fd) {
        return; // the number stands for another file, which must not be reset
    }
    count_reset(c, fd, r);
    table::disqualify(c, r);
    c.tx.reset_to_tcp();
    announce_reset(c, fd);
    disconnect_told(c, fd);
    c.rx.abandon();
}

/// The same for who has no lock of the connection, if it is still open.
#[cold]
pub fn reset_if_open(c: &Conn, l: &Local, r: Reason) {
    // (Until the lock is released, nobody can end a close, after which the number is another connection's.)
    let _g = lock::lock(&c.tx.lock);
    let fd = l.fd.load(Relaxed);
    if table::is_at(c, fd) {
        reset(c, fd, r);
    }
}

/// Milliseconds for who has the lock of the receiving half.
const BUSY_MS: u32 = 10;

/// On one node, for an RST that a packet filter may drop (see `ends`). Under a lock of the connection: a lane that another
/// thread gives back meanwhile is the next connection's, and so are its words. (A lock that is not to be had is held by a
/// process that is stopped, and the RST has to do.)
fn announce_reset(c: &Conn, fd: i32) {
    let held = lock::lock_within(&c.rx.lock, BUSY_MS);
    if held.is_none() && !lock::is_ours(&c.rx.lock) {
        return;
    }
    if let Some((group, m)) = attached::of(c, table::local_of(c)).filter(|(k, _)| !k.is_remote()) {
        c.rx.announce_reset(&m, &Sock::new(fd, group));
    }
}

/// The same as [`disconnect`], and the application is told, also if the kernel tells nothing: the connection had ended
/// before, with an error that was reported, or it refuses while a thread sleeps in a call of its own.
pub fn disconnect_told(c: &Conn, fd: i32) {
    disconnect(fd);
    if !c.has_error() && sys::poll1(fd, 0) & libc::POLLERR == 0 {
        c.rx.error.put(libc::ECONNRESET);
    }
}

/// The shim resets a connection, or ends it in a way that its peer sees as one, and the application did not want that:
/// counted, said to the daemon, and the fuse blows, unless there was nothing left to break.
#[cold]
pub fn count_reset(c: &Conn, fd: i32, r: Reason) {
    let Some((t, i)) = table::table().zip(table::entry_of(&c.gen)) else {
        return;
    };
    let l = table::local(i);
    let dead = || {
        ends::is_dead(l) || attached::of(c, l).is_some_and(|(k, _)| !k.is_remote() && k.is_dead())
    };
    let over = c.has_error() || sys::tcp_state(fd) == Some(CLOSE) || dead();
    let theirs = matches!(r, Reason::Hostile | Reason::Foreign | Reason::Sync);
    let fault = !over && !theirs && r != Reason::NotEstablished;
    t.header.stats.count_reset(fault);
    daemon::was_reset(i, c, r);
}

/// Sends a reset now, even if others hold the socket: connect(AF_UNSPEC) (`tcp_disconnect`). The socket is then in
/// the same state as after a reset from the peer: ECONNRESET once, then end of file, EPIPE and POLLHUP.
pub fn disconnect(fd: i32) {
    let unspec = [0u8; 16];
    let _ = sys::connect(fd, unspec.as_ptr(), unspec.len());
    // Fails with ENOTCONN, and shuts the socket down all the same (`inet_shutdown`).
    let _ = sys::shutdown(fd, libc::SHUT_RDWR);
}

/// The socket's pending error, if any, which is thereby reported.
pub fn error_now(i: u32, fd: i32) -> i32 {
    let kernel = sys::getsockopt_u32(fd, libc::SOL_SOCKET, libc::SO_ERROR).unwrap_or(0);
    let ours = table::conn(i).take_error();
    match kernel {
        0 => ours,
        e => num::signed(e),
    }
}

/// The native send; but if a call of ours has taken an error from the kernel, which would now raise SIGPIPE
/// instead, that error.
#[inline(always)]
pub fn send_or_told(c: &Conn, native: impl Fn() -> isize) -> isize {
    match c.has_error() {
        true => match c.take_error() {
            // A reset after a FIN: the kernel returns EPIPE every time, with the signal.
            0 | libc::EPIPE => thread::outside(native),
            e => fail(e),
        },
        false => thread::outside(native),
    }
}

/// The native receive; but if a call of ours has taken an error from the kernel, which would now report end of
/// file instead, that error, after the bytes that came before it.
#[inline(always)]
pub fn recv_or_told(c: &Conn, fd: i32, flags: i32, native: impl Fn() -> isize) -> isize {
    // (Receives with these two flags do not report it.)
    let asks = flags & (libc::MSG_ERRQUEUE | libc::MSG_OOB) == 0;
    if asks && c.has_error() && !sys::ioctl_i32(fd, libc::FIONREAD).is_ok_and(|n| n > 0) {
        match c.take_error_at_end() {
            0 => {}
            e => return fail(e),
        }
    }
    thread::outside(native)
}

/// Checks whether the peer's process or socket is gone: bytes must then go to TCP and meet its errors.
#[cold]
pub fn peer_check(call: &Call, c: &Conn, l: &Local, group: &LinkGroup, m: &Memory) {
    let fd = call.fd(l);
    // The poll runs without the lock: was `fd` still our socket?
    check_end(c, fd, group, m, || call.current(c, l) && call.fd(l) == fd);
    probes::tick(c, l, group);
}

/// The same, by the connection's number, for a call that may be the first to notice it.
#[cold]
pub fn check(i: u32, fd: i32) {
    let (c, l) = (table::conn(i), table::local(i));
    if attached::engaged_tx(c) {
        if let Some((group, m)) = attached::of(c, l) {
            check_end(c, fd, group, &m, || l.fd.load(Relaxed) == fd);
        }
    }
}

fn check_end(c: &Conn, fd: i32, group: &LinkGroup, m: &Memory, ours: impl Fn() -> bool) {
    let look = |fd, events| libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    let mut p = [look(fd, libc::POLLRDHUP), look(group.bell(), 0)];
    sys::poll_now(&mut p);
    let (e, dead) = (p[0].revents, p[1].revents & libc::POLLHUP != 0);
    if group.is_remote() && dead {
        return group.gone(); // the daemon is gone
    }
    let gone = port::is_over(fd, e) || e & libc::POLLRDHUP != 0 && dead;
    if gone {
        if let Some(_g) = lock::lock(&c.tx.lock) {
            if ours() && attached::is_still(c, group, m) {
                if e & libc::POLLHUP == 0 {
                    ends::has_died(c, m, fd, dead);
                }
                c.tx.abandon(m);
            }
        }
    }
    if dead {
        group.gone(); // the link group's other connections must learn it, too
    }
    if daemon::fd() < 0 {
        daemon::ensure();
    }
}

/// A native receive has found TCP's end: the error to report instead of end of file, or 0. If the other end died
/// with bytes of ours unread on the ring, the connection is reset.
#[cold]
pub fn instead_of_end(call: &Call, i: u32, c: &Conn, l: &Local) -> i32 {
    if let Some((group, m)) = attached::of(c, l).filter(|_| attached::engaged_tx(c)) {
        let fd = call.fd(l);
        let ended = sys::poll1(fd, libc::POLLRDHUP) & (libc::POLLRDHUP | libc::POLLHUP);
        if ended == libc::POLLRDHUP
            && ends::after_fin((c, l), (group, &m), lock::lock) == Some(true)
            && call.current(c, l)
        {
            return error_now(i, fd);
        }
    }
    // This process has ended the connection while the call slept.
    match c.has_error() && call.current(c, l) {
        true => c.take_error_at_end(),
        false => 0,
    }
}
