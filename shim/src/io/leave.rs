//! A connection that goes where no lane can follow: exec, SCM_RIGHTS, descriptors out of reach.

use super::reset;
use crate::links::Link;
use crate::port::Sock;
use crate::table::{self, Local};
use crate::{ends, lane, lock, port, probes, promote, sys};
use core::sync::atomic::Ordering::*;
use link::family::Conn;
use link::lane::Memory;
use link::layout::marks;
use link::reason::Reason;

/// Milliseconds that a peer gets to put bytes back on TCP, or to take them from there, before a
/// descriptor leaves; then the connection is reset.
pub const LEAVE_MS: u64 = 2000;

/// Gives a connection back to the kernel for good, before something that a lane cannot carry: both
/// directions. False: the peer did not put its bytes back in time, and the connection was reset; or it is gone, and
/// who only wants an option goes on.
pub fn leave(i: u32, fd: i32, why: Reason) -> bool {
    if super::is_other(fd) {
        return true; // no frame of ours is for that
    }
    let c = table::conn(i);
    table::disqualify(c, why);
    if why == Reason::Left && c.inode.load(Relaxed) == 0 {
        let inode = sys::inode(fd).map_or(0, |(inode, _)| inode);
        c.inode.store(inode, Relaxed); // it may come back: see `received::is_twice`
    }
    come_down(i, fd, why)
}

/// The same before this process closes a connection that others of the family go on with: not for good. (Nobody goes up
/// while this process counts as a holder, and so does another.)
pub fn yield_lane(i: u32, fd: i32) -> bool {
    super::is_other(fd) || come_down(i, fd, Reason::Shared)
}

fn come_down(i: u32, fd: i32, why: Reason) -> bool {
    let c = table::conn(i);
    let l = table::local(i);
    let Some((link, m)) = lane::of(c, l) else {
        return true;
    };
    let port = Sock { fd, link };
    let end = sys::now_ms() + LEAVE_MS;
    go_down(c, l, &m, &port);
    let mut stuck = None;
    loop {
        let tx_done = {
            let Some(_g) = lock::lock(&c.tx.lock) else {
                return false;
            };
            !matches!(c.tx.look(&m, &port), Ok(link::lane::Progress::Blocked))
        };
        let rx_done = {
            let Some(_g) = lock::lock(&c.rx.lock) else {
                return false;
            };
            match c.rx.revoke(&m, &port) {
                Ok(link::lane::rx::Revoked::Clear) => true,
                Ok(link::lane::rx::Revoked::Pending) => false,
                Ok(link::lane::rx::Revoked::Impossible) => {
                    stuck = Some(Reason::Stalled);
                    true
                }
                Err(r) => {
                    stuck = Some(r);
                    true
                }
            }
        };
        if why == Reason::Option && (stuck.is_some() || !rx_done) && is_over(c, l, link, fd) {
            // What it has left is on the ring alone, and is read there; then its end is told.
            let _g = lock::lock(&c.rx.lock);
            c.rx.go_on(&m);
            return false;
        }
        if let Some(r) = stuck {
            reset(c, fd, r);
            return false;
        }
        if tx_done && rx_done {
            promote::left(i);
            crate::sets::left(i);
            return true;
        }
        if sys::now_ms() > end {
            reset(c, fd, Reason::Stalled);
            return false;
        }
        if !rx_done {
            port::ring(link);
        }
        let _ = sys::poll_ms(fd, if tx_done { 0 } else { libc::POLLOUT }, 1);
        // The peer may be a lane of this same process: do its part, too.
        table::each(|k, other| {
            if k != i {
                if let Some((lk, mm)) = lane::of(other, table::local(k)) {
                    if let Some(_g) = lock::try_lock(&other.tx.lock) {
                        let _ = other.tx.look(
                            &mm,
                            &Sock {
                                fd: table::local(k).fd.load(Relaxed),
                                link: lk,
                            },
                        );
                    }
                }
            }
        });
    }
}

/// The sending half goes down, as far as TCP takes it now.
fn go_down(c: &Conn, l: &Local, m: &Memory, port: &Sock) {
    if let Some(_g) = lock::lock(&c.tx.lock) {
        probes::restore(c, l);
        // One that died with bytes of ours unread would answer them with an end.
        let unread = c.tx.is_up() && c.tx.unread(m).is_ok_and(|n| n > 0);
        let ended = || sys::poll1(port.fd, libc::POLLRDHUP) & (libc::POLLRDHUP | libc::POLLHUP);
        if c.rx.shut.load(Relaxed) == 0 && ended() == libc::POLLRDHUP {
            ends::has_died(c, m, port.fd, ends::is_dead(l));
        }
        let was = c.tx.is_up();
        // A peer that has closed would answer a frame with a reset, where the next owner is to find an end.
        let _ = c.tx.look(m, port);
        let _ = c.tx.down(m, port);
        // Its end may have come between the two, or be about to come: that, too, is a reset.
        if unread && c.rx.shut.load(Relaxed) == 0 && died_meanwhile(c, m, port) {
            let _ = sys::getsockopt_u32(port.fd, libc::SOL_SOCKET, libc::SO_ERROR);
            ends::tell_death(c, m, port.fd);
            port::cut(port.fd);
        }
        if was {
            probes::went_down(c);
        }
    }
}

/// Milliseconds in which the end of a process that is dying comes.
const DYING_MS: u32 = 2;

/// Bytes that the other end had not read on the ring are on TCP now: has it died without them?
fn died_meanwhile(c: &Conn, m: &Memory, port: &Sock) -> bool {
    let there = || sys::tcp_position(port.fd).is_some_and(|k| k.acked == k.sent);
    let ms = if there() { 0 } else { DYING_MS };
    let ended = sys::poll_ms(port.fd, libc::POLLRDHUP, ms)
        .is_ok_and(|e| e & (libc::POLLRDHUP | libc::POLLHUP) != 0);
    // (Who is quick has read them meanwhile; who ends by itself has said so.)
    ended
        && c.tx.unread(m).is_ok_and(|n| n > 0)
        && c.rx.said(m) & (marks::ENDED | marks::RESET | marks::KEPT) == marks::KEPT
}

/// On one node: is the other end gone, or the connection reset?
fn is_over(c: &Conn, l: &Local, link: &Link, fd: i32) -> bool {
    let reset = || c.has_error() || sys::poll1(fd, 0) & (libc::POLLHUP | libc::POLLERR) != 0;
    !link.is_far() && (ends::is_dead(l) || link.is_dead() || reset())
}
