//! The ends of connections whose lane leads to another node.
//!
//! The daemon has a copy of the socket, so the kernel sends no FIN of its own when we close; and a FIN
//! that overtook the ring would be no clean end for the peer. So a direction that is on its ring is
//! left to the daemon, which says on TCP where it ends when everything has arrived, and only then
//! shuts the socket down. Without a daemon the ring goes back to TCP first, here.

use super::RESET_AT_CLOSE;
use crate::links::{Link, Sock, USED};
use crate::{control, io, lock, sys, table};
use core::sync::atomic::Ordering::*;
use link::family::Conn;
use link::lane::{rx, tx::mode, Memory, Progress};
use link::reason::Reason;

/// Can the daemon be asked to finish this connection? It does so for the lane's owner only.
fn served(c: &Conn, link: &Link) -> bool {
    link.state.load(Relaxed) == USED && c.owner_pid.load(Relaxed) == table::pid() && !link.is_dead()
}

/// Puts the ring back on TCP, now. False: the peer does not take it in time.
fn back_on_tcp(c: &Conn, m: &Memory, port: &Sock, fd: i32) -> bool {
    let end = sys::now_ms() + io::LEAVE_MS;
    let mut step = match port.link.is_dead() {
        true => c.tx.reclaim(m, port),
        false => c.tx.down(m, port), // it may have the direction, and then we wait
    };
    while matches!(step, Ok(Progress::Blocked)) && c.tx.holds_fin(m) {
        if sys::now_ms() >= end {
            return false;
        }
        let _ = sys::poll_ms(fd, libc::POLLOUT, 5);
        step = c.tx.look(m, port);
    }
    step.is_ok()
}

/// Does the application want its close to be a reset?
pub fn lingers_for_no_time(fd: i32) -> bool {
    let mut linger = [0u8; 8];
    let _ = sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &mut linger);
    linger == RESET_AT_CLOSE
}

/// Before the last close. The locks of both directions are taken here.
pub fn close(c: &Conn, link: &Link, m: &Memory, fd: i32) {
    let port = Sock { fd, link };
    let _t = lock::lock(&c.tx.lock);
    let _r = lock::lock(&c.rx.lock);
    let _ = c.tx.look(m, &port);
    // Take in a frame that TCP holds: left there, it would turn our FIN into a reset.
    if c.rx.engaged() {
        let _ = c.rx.probe(m, &port);
    }
    // (What TCP repeats of the ring has been read.)
    let repeats = c.rx.mode.load(Relaxed) == rx::mode::SKIP;
    let in_kernel = || sys::ioctl_i32(fd, libc::FIONREAD).is_ok_and(|n| n > 0);
    if in_kernel() && c.rx.engaged() {
        let _ = c.rx.probe(m, &port); // a frame that came just now
    }
    c.rx.close(m, &port, 0);
    let unread = c.rx.ring_unread(m) > 0 || !repeats && in_kernel();
    if unread || lingers_for_no_time(fd) {
        // As in TCP (RFC 1122, 4.2.2.13), and at once: our close is not the last one.
        return io::disconnect(fd);
    }
    if c.tx.mode.load(Relaxed) != mode::TCP {
        if served(c, link) && control::lane_shut(link, c.lane.load(Relaxed)) {
            return; // then it hears that the lane is done, and closes its copy after that
        }
        if !back_on_tcp(c, m, &port, fd) {
            return io::disconnect(fd);
        }
    }
    let _ = sys::shutdown(fd, libc::SHUT_WR);
}

/// Before `shutdown`: what is left of it for the kernel to do; none: nothing, it is done or under way.
pub fn shutdown(c: &Conn, link: &Link, m: &Memory, fd: i32, how: i32) -> Option<i32> {
    let port = Sock { fd, link };
    if how != libc::SHUT_WR && how != libc::SHUT_RDWR {
        return Some(how);
    }
    let guard = lock::lock(&c.tx.lock);
    let _ = c.tx.look(m, &port);
    if c.tx.mode.load(Relaxed) == mode::TCP {
        return Some(how);
    }
    if served(c, link) && control::lane_shut(link, c.lane.load(Relaxed)) {
        c.tx.shut.store(1, Relaxed);
        return (how == libc::SHUT_RDWR).then_some(libc::SHUT_RD);
    }
    if back_on_tcp(c, m, &port, fd) {
        return Some(how);
    }
    drop(guard);
    io::reset(c, fd, Reason::Stalled);
    Some(how)
}
