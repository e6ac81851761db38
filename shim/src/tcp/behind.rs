//! Native sends behind a way down. What that has put on TCP may stay without an acknowledgement for 40 ms, and Nagle's
//! algorithm would hold back what is sent behind it, which goes out at once where there was no lane. Whoever is killed
//! then, or closes with bytes unread, would lose it.

use crate::port::Sock;
use crate::table::Local;
use crate::{lane, lock, sys};
use core::sync::atomic::Ordering::*;
use link::family::Conn;
use link::lane::Port;

/// May a native send be held back?
#[inline(always)]
pub fn may_wait(c: &Conn, l: &Local) -> bool {
    l.behind.load(Relaxed) != 0 || l.downs.load(Relaxed) != c.tx.downs.load(Relaxed)
}

/// A native send has moved so many bytes: they go out, unless what the way down has put there is acknowledged.
#[cold]
pub fn push(c: &Conn, l: &Local, moved: u64) {
    let (Some(_g), Some((link, _))) = (lock::lock(&c.tx.lock), lane::of(c, l)) else {
        return;
    };
    let fd = l.fd.load(Relaxed);
    if super::is_other(fd) {
        return;
    }
    let (sent, downs) = (c.tx.kpos.load(Relaxed), c.tx.downs.load(Relaxed));
    if l.downs.swap(downs, Relaxed) != downs {
        l.behind.store(sent.saturating_sub(moved), Relaxed);
    }
    let unacked = sys::ioctl_i32(fd, libc::TIOCOUTQ).map_or(0, |n| n.max(0) as u64);
    if sent.saturating_sub(unacked) >= l.behind.load(Relaxed) {
        l.behind.store(0, Relaxed);
    } else {
        Sock { fd, link }.tcp_push();
    }
}
