//! How connections end whose lane leads to another node.
//!
//! The daemon has a copy of the socket, so the kernel sends no FIN when we close; and a FIN that overtakes the
//! ring would not be a clean end for the peer. So a direction that is on its ring is left to the daemon. When
//! everything has arrived, the daemon says on TCP where the stream ends, and only then shuts the socket down.
//! Without a daemon, the bytes of the ring first go back to TCP here.

use super::linger::linger_ms;
use crate::state::attached;
use crate::state::groups::{LinkGroup, USED};
use crate::state::table::Local;
use crate::sys::{self, lock, pids, thread};
use crate::tcp::port::Sock;
use crate::{daemon, promotion, tcp};
use core::sync::atomic::Ordering::*;
use lane::abi::TcpPos;
use lane::family::{flag, Conn};
use lane::half::{rx, tx::mode, Memory, Progress};
use lane::proto::reason::Reason;

/// Can the daemon be asked to finish this connection? It does that only for the owner of the lane.
fn served(c: &Conn, group: &LinkGroup) -> bool {
    group.state.load(Relaxed) == USED && c.owner_pid.load(Relaxed) == pids::me() && !group.is_dead()
}

/// Puts the ring's bytes back on TCP now. False: the peer does not take them in time.
fn back_on_tcp(c: &Conn, m: &Memory, port: &Sock, fd: i32) -> bool {
    let end = sys::now_ms() + promotion::LEAVE_MS;
    let mut step = c.tx.leave_group(m, port, port.group.is_dead());
    while matches!(step, Ok(Progress::Blocked)) && c.tx.holds_fin(m) {
        if sys::now_ms() >= end {
            return false;
        }
        let _ = sys::poll_ms(fd, libc::POLLOUT, 5);
        step = c.tx.come_down(m, port);
    }
    step.is_ok()
}

/// Will the last close of this connection have to wait here? (Within the node, the kernel does the waiting.)
pub fn lingers(c: &Conn, fd: i32) -> bool {
    let remote = flag::LANE | flag::REMOTE;
    c.flags.load(Relaxed) & remote == remote && linger_ms(fd).is_some_and(|ms| ms > 0)
}

/// Waits as the kernel's close does with SO_LINGER (`sk_stream_wait_close`). The kernel waits only for the last
/// descriptor of a socket, and the daemon has one. Ends when all sent bytes and the FIN are acknowledged, after
/// `ms`, or when a signal comes, whose handler runs when the close is over. No lock is held.
fn linger(c: &Conn, group: &LinkGroup, m: &Memory, fd: i32, ms: u64) {
    let end = sys::now_ms() + ms;
    let mut bell = group.bell();
    while sys::now_ms() < end && outstanding(fd) && !thread::waiting() {
        let left = end.saturating_sub(sys::now_ms());
        if bell >= 0 && group.is_dead() {
            bell = -1;
            end_here(c, group, m, fd); // the daemon that was to finish is gone
        }
        if sys::poll_ms(bell, 0, left.min(LINGER_LOOK_MS) as u32) == Err(libc::EINTR) {
            return;
        }
    }
}

/// Milliseconds between two looks of a close that lingers.
const LINGER_LOOK_MS: u64 = 5;

/// Is there anything that the other end's kernel has not acknowledged? (The FIN counts, even if it has not been
/// sent yet.)
fn outstanding(fd: i32) -> bool {
    // States of TCP: ESTABLISHED, FIN_WAIT1, CLOSE_WAIT, LAST_ACK, CLOSING.
    const OPEN: u32 = 1 << 1 | 1 << 4 | 1 << 8 | 1 << 9 | 1 << 11;
    let mut state = [0u8; 1]; // first byte of `struct tcp_info`
    let told = sys::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut state);
    told.is_ok() && OPEN >> state[0].min(31) & 1 != 0
}

/// Before the last close. The locks of both directions are taken here.
pub fn close(c: &Conn, group: &LinkGroup, m: &Memory, fd: i32) {
    let ms = linger_ms(fd);
    match finish(c, group, m, fd, ms == Some(0)) {
        Finished::Ends => linger(c, group, m, fd, ms.unwrap_or(0)),
        Finished::ByDaemon | Finished::ByKernel => {}
        Finished::Reset => tcp::disconnect(fd),
    }
}

/// Milliseconds that a close waits for bytes on TCP that repeat what was read.
const REPEATED_MS: u64 = 50;

/// What comes of a close.
enum Finished {
    Ends,
    /// The daemon puts on TCP what is unread at the other end, then resets the connection, for bytes are unread here.
    ByDaemon,
    /// It is to be reset.
    Reset,
    /// It has no lane any more.
    ByKernel,
}

/// Ends the connection, as far as this end can. `at_once`: by a reset, since the application wants that.
fn finish(c: &Conn, group: &LinkGroup, m: &Memory, fd: i32, at_once: bool) -> Finished {
    let port = Sock::leaving(fd, group);
    let _t = lock::lock(&c.tx.lock);
    let _r = lock::lock(&c.rx.lock);
    if !attached::is_still(c, group, m) {
        return Finished::ByKernel; // another thread has given the lane back meanwhile: see `close::on_node`
    }
    let _ = c.tx.look(m, &port);
    // Take in a frame that TCP holds: left there, it would turn our FIN into a reset.
    if c.rx.engaged() {
        let _ = c.rx.probe(m, &port);
    }
    // What repeats the ring would be answered with a reset, too.
    let late = sys::now_ms() + REPEATED_MS;
    while c.rx.awaits_repeated(m) && !c.rx.error.is_set() && sys::now_ms() < late {
        let _ = sys::poll_ms(fd, libc::POLLIN, 1);
        let _ = c.rx.probe(m, &port);
    }
    // (In this mode, the bytes on TCP repeat what was read from the ring.)
    let repeats = c.rx.mode.load(Relaxed) == rx::mode::SKIP;
    let in_kernel = || sys::ioctl_i32(fd, libc::FIONREAD).is_ok_and(|n| n > 0);
    if in_kernel() && c.rx.engaged() {
        let _ = c.rx.probe(m, &port); // a frame that has arrived just now
    }
    c.rx.close(m, &port, TcpPos::default());
    if at_once {
        return Finished::Reset;
    }
    // Unread bytes make a close a reset, as in TCP (RFC 1122, 4.2.2.13).
    let unread = c.rx.ring_unread(m) > 0 || !repeats && in_kernel();
    if c.tx.mode.load(Relaxed) != mode::TCP {
        let served = served(c, group);
        if unread && served {
            c.rx.announce_reset(m, &port);
            return Finished::ByDaemon; // `LaneDone` follows
        }
        if served && daemon::lane_shut(group, c.lane.load(Relaxed)) {
            return Finished::Ends; // `LaneDone` follows, and then it closes its copy
        }
        if !back_on_tcp(c, m, &port, fd) {
            tcp::count_reset(c, fd, Reason::Stalled);
            return Finished::Reset;
        }
    }
    if unread {
        return Finished::Reset; // at once, because our close is not the last one
    }
    let _ = sys::shutdown(fd, libc::SHUT_WR);
    Finished::Ends
}

/// The daemon that was to finish is gone: the rest of the ring goes to TCP, and the FIN after it.
fn end_here(c: &Conn, group: &LinkGroup, m: &Memory, fd: i32) {
    let _t = lock::lock(&c.tx.lock);
    let port = Sock::leaving(fd, group);
    // (Off TCP, the lane is still there.)
    if c.tx.mode.load(Relaxed) != mode::TCP && !back_on_tcp(c, m, &port, fd) {
        tcp::count_reset(c, fd, Reason::Stalled);
        return tcp::disconnect(fd);
    }
    let _ = sys::shutdown(fd, libc::SHUT_WR);
}

/// Called before `shutdown`: returns what the kernel still has to do. `None`: nothing, it is done or under way.
pub fn shutdown(c: &Conn, l: &Local, (group, m): (&LinkGroup, &Memory), how: i32) -> Option<i32> {
    if how != libc::SHUT_WR && how != libc::SHUT_RDWR {
        return Some(how);
    }
    let guard = lock::lock(&c.tx.lock);
    let fd = l.fd.load(Relaxed); // (the number stays the connection's as long as we have the lock)
    let port = Sock::leaving(fd, group);
    let _ = c.tx.look(m, &port);
    if c.tx.mode.load(Relaxed) == mode::TCP {
        return Some(how);
    }
    if served(c, group) && daemon::lane_shut(group, c.lane.load(Relaxed)) {
        c.tx.shut.store(1, Relaxed);
        return (how == libc::SHUT_RDWR).then_some(libc::SHUT_RD);
    }
    if back_on_tcp(c, m, &port, fd) {
        return Some(how);
    }
    drop(guard);
    tcp::reset(c, l.fd.load(Relaxed), Reason::Stalled);
    Some(how)
}
