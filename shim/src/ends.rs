//! Ends within the node that TCP does not tell: a packet filter or a forgotten entry of conntrack eats the FIN or
//! the reset. What came over the lane is complete all the same, and its end known: the other end has said that
//! it ends, or its process is gone. TCP gets a second to tell it; then the socket is brought into the state in
//! which that packet would have left it, and the kernel wakes whoever waits for it, in whatever way. Nothing
//! is decided about bytes that only TCP carries.
//!
//! No thread of ours keeps the time, so each wait that finds such an end pending sleeps no longer than
//! [`left_ms`] says, and looks again.

use crate::links::Link;
use crate::table::{self, Local};
use crate::{lane, lock, port, sys};
use core::sync::atomic::{AtomicU32, Ordering::*};
use libc::{POLLERR, POLLHUP, POLLIN, POLLRDHUP};
use link::family::{flag, Conn};
use link::lane::Memory;
use link::layout::marks;
use link::reason::Reason;

/// Milliseconds in which TCP may tell an end by itself.
const GRACE_MS: u64 = 1000;
/// Milliseconds until the next look at what another thread is at work on.
const BUSY_MS: u64 = 10;

// What is known of the other end, in the order in which it may follow: it sends no more; nothing of it is left.
const ENDED: u32 = 1;
const OVER: u32 = 2;

#[inline(always)]
fn known(c: &Conn, l: &Local, link: &Link, m: &Memory) -> u32 {
    let said = c.rx.said(m);
    if said & marks::RESET != 0 || is_dead(l) && !link.is_far() {
        OVER
    } else if said & marks::ENDED != 0 {
        ENDED
    } else {
        0
    }
}

/// Is it known that nobody holds the other end any more?
pub fn is_dead(l: &Local) -> bool {
    l.peer_dead.load(Relaxed) != 0
}

/// Is there an end of which TCP has not told yet, as far as we know?
#[inline(always)]
pub fn is_pending(c: &Conn, l: &Local, link: &Link, m: &Memory) -> bool {
    known(c, l, link, m) > l.end_told.load(Relaxed)
}

/// Milliseconds until an end is to be told in TCP's place; negative: there is none. 0: it was told just now, ask
/// the kernel. May be called under the lock of an epoll set, and of connections that are being closed.
#[inline(always)]
pub fn left_ms(c: &Conn, l: &Local, link: &Link, m: &Memory) -> i64 {
    match is_pending(c, l, link, m) {
        false => -1,
        true => pending_ms(c, l, link, m),
    }
}

/// The same by the connection's number.
pub fn left_ms_of(i: u32) -> i64 {
    let (c, l) = (table::conn(i), table::local(i));
    lane::of(c, l).map_or(-1, |(link, m)| left_ms(c, l, link, &m))
}

/// The shorter of two waits, of which a negative one has no end.
pub fn sooner(a: i64, b: i64) -> i64 {
    match (a < 0, b < 0) {
        (true, _) => b,
        (_, true) => a,
        _ => a.min(b),
    }
}

#[cold]
fn pending_ms(c: &Conn, l: &Local, link: &Link, m: &Memory) -> i64 {
    let (now, due) = (sys::now_ms(), l.end_due_ms.load(Relaxed));
    if due == 0 {
        // Of several who are first one counts; they differ by nothing.
        l.end_due_ms.store(now + GRACE_MS, Relaxed);
        return GRACE_MS as i64;
    }
    if now < due {
        return (due - now) as i64;
    }
    let (Some(_t), Some(_r)) = (
        lock::try_or_inherit(&c.tx.lock),
        lock::try_or_inherit(&c.rx.lock),
    ) else {
        return BUSY_MS as i64;
    };
    let Some(fd) = current(c, l, link, m) else {
        return -1;
    };
    let again = decide(c, l, link, m, fd);
    if again > 0 {
        l.end_due_ms.store(now + GRACE_MS, Relaxed);
    }
    again
}

/// The descriptor of a connection that was looked at without its locks, one of which is held now. `None`: it was closed,
/// and the entry may be another connection's.
fn current(c: &Conn, l: &Local, link: &Link, m: &Memory) -> Option<i32> {
    let same = c.flags.load(Relaxed) & flag::LANE != 0
        && core::ptr::eq(l.link.load(Relaxed), link)
        && Memory::new(&link.own, &link.peer, c.lane.load(Relaxed))
            .is_some_and(|now| core::ptr::eq(now.own_tx(), m.own_tx()));
    let fd = l.fd.load(Relaxed);
    (same && table::is_at(c, fd)).then_some(fd)
}

/// TCP says that nothing more comes, and no error. That is all that the kernel of a process says which has died with
/// bytes of ours unread on a ring: then it is told here, before what came from it is read. True: just now. `None`:
/// `take` did not get the lock. (Under the lock of an epoll set it may not wait for it.)
#[cold]
pub fn after_fin<'a, G>(
    (c, l): (&'a Conn, &Local),
    (link, m): (&Link, &Memory),
    take: impl FnOnce(&'a AtomicU32) -> Option<G>,
) -> Option<bool> {
    if !c.rx.died_unread(m, true) {
        return Some(false);
    }
    // Who has ended before it died has sent its FIN before, and what this end has shut down looks like one: there the
    // doorbell tells.
    let shut = c.rx.shut.load(Relaxed) != 0;
    let dead = is_dead(l) || link.is_dead();
    if !dead && (shut || !c.rx.died_unread(m, false)) {
        return Some(false);
    }
    let _g = take(&c.tx.lock)?;
    // (Behind its FIN, nothing of it is on its way any more.)
    let fin = |fd: &i32| !shut || sys::tcp_state(*fd) == Some(sys::CLOSE_WAIT);
    let fd = current(c, l, link, m).filter(fin);
    Some(fd.is_some_and(|fd| has_died(c, m, fd, dead)))
}

/// The time is over: has TCP told it, can we, or does it depend on TCP? Both locks held. As [`left_ms`].
fn decide(c: &Conn, l: &Local, link: &Link, m: &Memory, fd: i32) -> i64 {
    let known = known(c, l, link, m);
    let tcp = sys::poll1(fd, POLLIN | POLLRDHUP);
    let told = |what: u32| {
        l.end_told.store(what, Relaxed);
        l.end_due_ms.store(0, Relaxed);
    };
    if tcp & (POLLHUP | POLLERR) != 0 {
        told(OVER);
        return -1;
    }
    let reset = c.rx.said(m) & marks::RESET != 0;
    if known == OVER && (reset || c.rx.notice_death(m, is_dead(l))) {
        told(OVER);
        reset_by_death(c, m, fd);
        c.tx.abandon();
        table::disqualify(c, Reason::PeerGone);
        return 0;
    }
    if tcp & POLLRDHUP != 0 {
        told(known);
        return -1;
    }
    if tcp & POLLIN == 0 && c.rx.has_all(m) {
        told(known);
        let _ = sys::shutdown(fd, libc::SHUT_RD); // as a FIN does: the end, and events
        return 0;
    }
    GRACE_MS as i64
}

/// The other end died with bytes of ours unread on the ring, of which its kernel does not know: as if its
/// reset had come. A socket that is closed, though this end has not ended, has had one by TCP, too, of which the
/// kernel tells, or has told.
pub fn reset_by_death(c: &Conn, m: &Memory, fd: i32) {
    if c.rx.has_ended(m) || sys::tcp_state(fd) != Some(sys::CLOSE) {
        tell_death(c, m, fd);
    }
    port::cut(fd);
}

/// The same, once, if the other end has died so. `dead` as in [`link::lane::RxState::notice_death`]. Under the lock of
/// the sending half.
pub fn has_died(c: &Conn, m: &Memory, fd: i32, dead: bool) -> bool {
    let died = c.rx.notice_death(m, dead);
    if died {
        reset_by_death(c, m, fd);
        c.tx.abandon();
    }
    died
}

/// Behind a FIN that it sent before, such a reset is EPIPE, for who sends.
pub fn tell_death(c: &Conn, m: &Memory, fd: i32) {
    let fin = || sys::poll1(fd, libc::POLLRDHUP) & libc::POLLRDHUP != 0;
    match c.rx.said(m) & marks::ENDED != 0 && fin() {
        true => c.tx.error.put(libc::EPIPE),
        false => c.rx.error.put(libc::ECONNRESET),
    }
}
