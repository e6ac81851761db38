//! A connection leaves its lane for good, because no lane can follow: exec, SCM_RIGHTS, descriptors out of reach.

use super::retire;
use crate::state::attached;
use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::sys::{self, lock};
use crate::tcp::port::{self, Sock};
use crate::tcp::{ends, probes, reset};
use core::sync::atomic::Ordering::*;
use lane::abi::marks;
use lane::family::Conn;
use lane::half::Memory;
use lane::proto::reason::Reason;

/// Milliseconds that a peer gets to put bytes back on TCP, or to take them from there, before a descriptor leaves.
/// After that, the connection is reset.
pub const LEAVE_MS: u64 = 2000;

/// Gives both directions of a connection back to the kernel for good, before an operation that a lane cannot
/// carry. False: the peer did not put its bytes back in time, and the connection was reset; or the peer is gone,
/// nothing was reset, and a caller that only sets an option goes on.
pub fn leave(i: u32, fd: i32, why: Reason) -> bool {
    if table::is_other(fd) {
        return true; // the number is another file now: no frame may go there
    }
    let c = table::conn(i);
    table::disqualify(c, why);
    if why == Reason::Left && c.inode.load(Relaxed) == 0 {
        let inode = sys::inode(fd).map_or(0, |(inode, _)| inode);
        c.inode.store(inode, Relaxed); // it may come back to this process: see `received::is_twice`
    }
    come_down(i, fd, why)
}

/// The same, but not for good: before this process closes a connection that other processes of the family go on
/// using. (Neither direction goes up again before that close, because the connection has several holders until
/// then.)
pub fn yield_lane(i: u32, fd: i32) -> bool {
    table::is_other(fd) || come_down(i, fd, Reason::Shared)
}

fn come_down(i: u32, fd: i32, why: Reason) -> bool {
    let c = table::conn(i);
    let l = table::local(i);
    let Some((group, m)) = attached::of(c, l) else {
        return true;
    };
    let port = Sock { fd, group };
    let end = sys::now_ms() + LEAVE_MS;
    go_down(c, l, &m, &port);
    let mut stuck = None;
    loop {
        let tx_done = {
            let Some(_g) = lock::lock(&c.tx.lock) else {
                return false;
            };
            !matches!(c.tx.come_down(&m, &port), Ok(lane::half::Progress::Blocked))
        };
        let rx_done = {
            let Some(_g) = lock::lock(&c.rx.lock) else {
                return false;
            };
            match c.rx.revoke(&m, &port) {
                Ok(lane::half::rx::Revoked::Clear) => true,
                Ok(lane::half::rx::Revoked::Pending) => false,
                Ok(lane::half::rx::Revoked::Impossible) => {
                    stuck = Some(Reason::Stalled);
                    true
                }
                Err(r) => {
                    stuck = Some(r);
                    true
                }
            }
        };
        if why == Reason::Option && (stuck.is_some() || !rx_done) && is_over(c, l, group, fd) {
            // The bytes that the peer has left are only on the ring: they are read there, and then the end is
            // reported.
            let _g = lock::lock(&c.rx.lock);
            c.rx.go_on(&m);
            return false;
        }
        if let Some(r) = stuck {
            reset(c, fd, r);
            return false;
        }
        if tx_done && rx_done {
            retire::left(i);
            crate::sets::left(i);
            return true;
        }
        if sys::now_ms() > end {
            reset(c, fd, Reason::Stalled);
            return false;
        }
        if !rx_done {
            port::ring(group);
        }
        let _ = sys::poll_ms(fd, if tx_done { 0 } else { libc::POLLOUT }, 1);
        // The peer's end may be a lane of this same process: do that end's part, too.
        table::each(|k, other| {
            if k != i {
                if let Some((lk, mm)) = attached::of(other, table::local(k)) {
                    if let Some(_g) = lock::try_lock(&other.tx.lock) {
                        let _ = other.tx.look(
                            &mm,
                            &Sock {
                                fd: table::local(k).fd.load(Relaxed),
                                group: lk,
                            },
                        );
                    }
                }
            }
        });
    }
}

/// Takes the sending half down, as far as TCP accepts the bytes now.
fn go_down(c: &Conn, l: &Local, m: &Memory, port: &Sock) {
    if let Some(_g) = lock::lock(&c.tx.lock) {
        probes::restore(c, l);
        // If the peer process died with bytes of ours unread, TCP shows a FIN where kernel TCP would have sent a
        // reset.
        let unread = c.tx.is_up() && c.tx.unread(m).is_ok_and(|n| n > 0);
        let ended = || sys::poll1(port.fd, libc::POLLRDHUP) & (libc::POLLRDHUP | libc::POLLHUP);
        if c.rx.shut.load(Relaxed) == 0 && ended() == libc::POLLRDHUP {
            ends::has_died(c, m, port.fd, ends::is_dead(l));
        }
        let was = c.tx.is_up();
        // `come_down` first looks whether the peer has closed: its kernel would answer a frame with a reset, but the next
        // owner of the socket must find a clean end of file.
        let _ = c.tx.come_down(m, port);
        // The peer's FIN may have arrived meanwhile, or be about to arrive: that counts as a reset, too.
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

/// Milliseconds within which the FIN of a dying process arrives.
const DYING_MS: u32 = 2;

/// Bytes that the peer had not read from the ring are on TCP now: has it died without reading them?
fn died_meanwhile(c: &Conn, m: &Memory, port: &Sock) -> bool {
    let there = || sys::tcp_position(port.fd).is_some_and(|k| k.acked == k.sent);
    let ms = if there() { 0 } else { DYING_MS };
    let ended = sys::poll_ms(port.fd, libc::POLLRDHUP, ms)
        .is_ok_and(|e| e & (libc::POLLRDHUP | libc::POLLHUP) != 0);
    // (A quick peer has read them meanwhile. A peer that ends by itself has stored ENDED or RESET.)
    ended
        && c.tx.unread(m).is_ok_and(|n| n > 0)
        && c.rx.said(m) & (marks::ENDED | marks::RESET | marks::KEPT) == marks::KEPT
}

/// On one node: is the other end gone, or has the connection been reset?
fn is_over(c: &Conn, l: &Local, group: &LinkGroup, fd: i32) -> bool {
    let reset = || c.has_error() || sys::poll1(fd, 0) & (libc::POLLHUP | libc::POLLERR) != 0;
    !group.is_remote() && (ends::is_dead(l) || group.is_dead() || reset())
}
