//! Native sends after a direction went down. The bytes that it put on TCP when it went down (`DRAIN`) may stay
//! unacknowledged for 40 ms, and Nagle's algorithm would hold back what is sent after them, which would go out at
//! once without a lane. If the process were killed then, or closed with bytes unread, those bytes would be lost.

use crate::state::attached;
use crate::state::table::Local;
use crate::sys::{self, lock};
use crate::tcp::port::Sock;
use core::sync::atomic::Ordering::*;
use lane::abi::TcpPos;
use lane::family::Conn;
use lane::half::Port;

/// Might Nagle's algorithm hold a native send back?
#[inline(always)]
pub fn may_wait(c: &Conn, l: &Local) -> bool {
    l.down_end.load(Relaxed) != TcpPos::default()
        || l.downs.load(Relaxed) != c.tx.downs.load(Relaxed)
}

/// A native send has moved `moved` bytes: pushes them out, unless the bytes of the way down are acknowledged.
#[cold]
pub fn push(c: &Conn, l: &Local, moved: u64) {
    let (Some(_g), Some((group, _))) = (lock::lock(&c.tx.lock), attached::mapped(c, l)) else {
        return;
    };
    let fd = l.fd.load(Relaxed);
    if super::is_other(fd) {
        return;
    }
    let (sent, downs) = (c.tx.tcp_pos.load(Relaxed), c.tx.downs.load(Relaxed));
    if l.downs.swap(downs, Relaxed) != downs {
        l.down_end.store(sent.back(moved), Relaxed);
    }
    let unacked = sys::ioctl_i32(fd, libc::TIOCOUTQ).map_or(0, |n| u64::try_from(n).unwrap_or(0));
    if sent.back(unacked) >= l.down_end.load(Relaxed) {
        l.down_end.store(TcpPos::default(), Relaxed);
    } else {
        Sock::new(fd, group).tcp_push();
    }
}
