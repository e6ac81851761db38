//! What waits for room tell about a program: how it takes a short count is decided by that (`conn::short`).

use crate::sets;
use crate::state::table::Local;
use core::sync::atomic::Ordering::*;
use lane::family::Conn;
use lane::num;

/// A level-triggered wait has found no room: a program that sends now does not simply wait for room. (Waits for
/// the edge do not count.)
#[inline(always)]
pub fn no_room(l: &Local) {
    l.refused.store(1, Relaxed);
}

/// A wait has found room.
#[inline(always)]
pub fn has_room(l: &Local) {
    if l.refused.load(Relaxed) != 0 {
        l.refused.store(0, Relaxed);
    }
}

/// A registration with epoll waits for room. (Before anything was sent, it waits for `connect` to finish, which
/// says nothing about later sends, unless it is edge-triggered and so stays registered.)
#[inline(always)]
pub fn watched(c: &Conn, l: &Local, mask: u32) {
    if l.copes.load(Relaxed) == 0 && mask & sets::OUT != 0 {
        let stays = mask & num::bits(libc::EPOLLET) != 0;
        if stays || c.tx.tcp_pos.load(Relaxed).get() > 0 || c.tx.ring_bytes.load(Relaxed) > 0 {
            l.copes.store(1, Relaxed);
        }
    }
}

/// `poll` or `select` watches this connection for room, among `among` descriptors.
#[inline(always)]
pub fn polled(c: &Conn, l: &Local, events: i16, among: usize) {
    if among > 1 && events & libc::POLLOUT != 0 {
        watched(c, l, sets::OUT);
    }
}
