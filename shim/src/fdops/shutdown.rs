//! `shutdown`, and what it has in common with a close: nothing that is on its way may turn the end into a reset.

use super::far;
use crate::port::Sock;
use crate::{io, lane, lock, port, sys, table, tcp, wait};
use core::sync::atomic::Ordering::*;
use link::family::{state, Conn};
use link::lane::{Memory, Progress};
use link::reason::Reason;

/// What is on its way down must be on TCP before the FIN. False: the peer does not take it.
pub(super) fn flush(c: &Conn, m: &Memory, port: &Sock, fd: i32) -> bool {
    let end = sys::now_ms() + io::LEAVE_MS;
    while matches!(c.tx.look(m, port), Ok(Progress::Blocked)) && c.tx.must_flush() {
        if fd < 0 || sys::now_ms() >= end {
            return false;
        }
        let _ = sys::poll_ms(fd, libc::POLLOUT, 5);
    }
    true
}

/// Milliseconds that an end which takes nothing any more gives a frame that is on its way.
const FRAME_MS: u64 = 50;

/// This end takes nothing any more, and has said so. A frame that TCP holds, or that its sender is about to write,
/// would turn the end into a reset: it is taken in. (So would bytes unread, if this is a close: they are one.)
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

/// What is left of a `shutdown` for the kernel to do.
pub enum Left {
    Kernel(i32),
    /// It is done or under way, and this is what it says.
    Done(Result<(), i32>),
}

/// `shutdown`, before the kernel's own.
pub fn before_shutdown(fd: i32, i: u32, how: i32) -> Left {
    let c = table::conn(i);
    if c.state.load(Relaxed) != state::OPEN {
        return Left::Kernel(how);
    }
    if how == libc::SHUT_RD || how == libc::SHUT_RDWR {
        c.rx.shut.store(1, Relaxed);
    }
    if how == libc::SHUT_WR || how == libc::SHUT_RDWR {
        // Under the lock: a lane that is attached, or a switch that is made, after this finds the door
        // closed (`promote::attach`, `try_up`), so that nothing is sent behind the FIN.
        let _g = lock::lock(&c.tx.lock);
        table::local(i).sends_ended.store(1, Relaxed);
        table::disqualify(c, Reason::NotEstablished);
    }
    let Some((link, m)) = lane::of(c, table::local(i)) else {
        return Left::Kernel(how);
    };
    if link.is_far() {
        return match far::shutdown(c, link, &m, fd, how) {
            Some(how) => Left::Kernel(how),
            None => Left::Done(Ok(())),
        };
    }
    let port = Sock { fd, link };
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
        if let Some(_g) = lock::lock(&c.tx.lock) {
            if !flush(c, &m, &port, fd) {
                drop(_g);
                tcp::reset(c, fd, Reason::Stalled);
                return Left::Kernel(how);
            }
            let repeated = c.tx.repeat_unread(&m, &port);
            c.rx.announce_end(&m, &port, c.tx.kpos.load(Relaxed));
            deaf();
            // Everything sent is on the ring, and what another thread sends waits for our lock: on TCP before the FIN it
            // would be foreign bytes. Later sends get the kernel's EPIPE.
            let done = sys::shutdown(fd, how);
            c.tx.shut(&m, &port, repeated);
            return Left::Done(done);
        }
    }
    deaf();
    Left::Kernel(how)
}

/// After the kernel's `shutdown`: whoever sleeps must look.
pub fn after_shutdown(i: u32, fd: i32) {
    let c = table::conn(i);
    // (Before they are woken: those for whom any wake-up is one.)
    table::local(i).shuts.fetch_add(1, SeqCst);
    if let Some((link, m)) = lane::of(c, table::local(i)) {
        // Not before: the kernel would still take what the other end sends by TCP then.
        if c.rx.shut.load(Relaxed) != 0 && !link.is_far() {
            if let Some(_g) = lock::lock(&c.rx.lock) {
                c.rx.shut(&m, &Sock { fd, link });
            }
        }
        wait::forward(link, None, None);
        wait::look(i);
        port::ring(link);
    }
}
