//! Ends within the node that TCP does not report, because a packet filter or an expired entry of conntrack drops
//! the FIN or the reset. What came over the lane is complete all the same, and the end is known: the other end has
//! announced it, or its process is gone. TCP gets one second to report it. After that, the socket is brought into
//! the state in which the packet would have left it, and the kernel wakes all waiters, however they wait. Nothing
//! is decided about bytes that only TCP carries.
//!
//! The shim has no thread that could keep the time. So each wait that finds such an end pending sleeps for no
//! longer than [`left_ms`], and looks again.

use crate::state::attached;
use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::sys::{self, lock};
use crate::tcp::port;
use core::sync::atomic::{AtomicU32, Ordering::*};
use lane::abi::marks;
use lane::family::Conn;
use lane::half::Memory;
use lane::num;
use lane::proto::reason::Reason;
use libc::{POLLIN, POLLRDHUP};

/// Milliseconds in which TCP may report an end by itself.
const GRACE_MS: u64 = 1000;
/// Milliseconds until the next look if another thread holds a lock.
const BUSY_MS: u64 = 10;

// What is known of the other end, in increasing order: it sends no more; it is gone.
const ENDED: u32 = 1;
const OVER: u32 = 2;

#[inline(always)]
fn known(c: &Conn, l: &Local, group: &LinkGroup, m: &Memory) -> u32 {
    let said = c.rx.said(m);
    if said & marks::RESET != 0 || is_dead(l) && !group.is_remote() {
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

/// Is an end known that TCP has not reported yet?
#[inline(always)]
pub fn is_pending(c: &Conn, l: &Local, group: &LinkGroup, m: &Memory) -> bool {
    known(c, l, group, m) > l.end_told.load(Relaxed)
}

/// The same, or will one be known in a moment? A process that exits puts its directions on TCP, says so, and ends some
/// milliseconds later. Who sleeps in the kernel from then on hears of nothing but TCP.
pub fn is_expected(c: &Conn, l: &Local, group: &LinkGroup, m: &Memory) -> bool {
    let exits = || l.end_told.load(Relaxed) == 0 && c.rx.said(m) & marks::EXITED != 0;
    is_pending(c, l, group, m) || exits()
}

/// The same by the connection's number.
pub fn is_expected_of(i: u32) -> bool {
    let (c, l) = (table::conn(i), table::local(i));
    attached::of(c, l).is_some_and(|(group, m)| is_expected(c, l, group, &m))
}

/// Milliseconds until an end is to be reported in TCP's place. Negative: there is none. 0: it was reported just
/// now, so ask the kernel. May be called under the lock of an epoll set, and for connections that are being
/// closed.
#[inline(always)]
pub fn left_ms(c: &Conn, l: &Local, group: &LinkGroup, m: &Memory) -> i64 {
    match is_pending(c, l, group, m) {
        false => -1,
        true => pending_ms(c, l, group, m),
    }
}

/// The same by the connection's number.
pub fn left_ms_of(i: u32) -> i64 {
    let (c, l) = (table::conn(i), table::local(i));
    attached::of(c, l).map_or(-1, |(group, m)| left_ms(c, l, group, &m))
}

/// The shorter of two waits; a negative one is unlimited.
pub fn sooner(a: i64, b: i64) -> i64 {
    match (a < 0, b < 0) {
        (true, _) => b,
        (_, true) => a,
        _ => a.min(b),
    }
}

#[cold]
fn pending_ms(c: &Conn, l: &Local, group: &LinkGroup, m: &Memory) -> i64 {
    let (now, due) = (sys::now_ms(), l.end_due_ms.load(Relaxed));
    if due == 0 {
        // Several threads may be first; their values are about equal, so any of them will do.
        l.end_due_ms.store(now + GRACE_MS, Relaxed);
        return num::long(GRACE_MS);
    }
    if now < due {
        return num::long(due - now);
    }
    let (Some(_t), Some(_r)) = (
        lock::try_or_inherit(&c.tx.lock),
        lock::try_or_inherit(&c.rx.lock),
    ) else {
        return num::long(BUSY_MS);
    };
    let Some(fd) = current(c, l, group, m) else {
        return -1;
    };
    let again = decide(c, l, group, m, fd);
    if again > 0 {
        l.end_due_ms.store(now + GRACE_MS, Relaxed);
    }
    again
}

/// The descriptor of a connection that was looked at without its locks, one of which is held now. `None`: the
/// connection was closed, and the entry may be another one's.
fn current(c: &Conn, l: &Local, group: &LinkGroup, m: &Memory) -> Option<i32> {
    let same = core::ptr::eq(l.group.load(Relaxed), group) && attached::is_still(c, group, m);
    let fd = l.fd.load(Relaxed);
    (same && table::is_at(c, fd)).then_some(fd)
}

/// TCP reports that nothing more comes, and no error. If a process has died with bytes of ours unread on a ring,
/// its kernel reports no more than that. In that case the death is reported here, before the bytes that came from
/// the process are read. True: it was reported just now. `None`: `take` did not get the lock. (Under the lock of
/// an epoll set, it must not wait for it.)
#[cold]
pub fn after_fin<'a, G>(
    (c, l): (&'a Conn, &Local),
    (group, m): (&LinkGroup, &Memory),
    take: impl FnOnce(&'a AtomicU32) -> Option<G>,
) -> Option<bool> {
    if !c.rx.died_unread(m, true) {
        return Some(false);
    }
    // A FIN proves no death if the peer had ended its sending before, or if this end has shut down its receiving,
    // which looks like a FIN. In these cases only the doorbell or the daemon tells.
    let shut = c.rx.shut.load(Relaxed) != 0;
    let dead = is_dead(l) || group.is_dead();
    if !dead && (shut || !c.rx.died_unread(m, false)) {
        return Some(false);
    }
    let _g = take(&c.tx.lock)?;
    // (After the peer's FIN, nothing of it is in flight any more.)
    let fin = |fd: &i32| !shut || sys::tcp_state(*fd) == Some(sys::CLOSE_WAIT);
    let fd = current(c, l, group, m).filter(fin);
    Some(fd.is_some_and(|fd| has_died(c, m, fd, dead)))
}

/// The time is over: has TCP reported the end, can we report it, or does it depend on TCP? Both locks are held.
/// Returns the same as [`left_ms`].
fn decide(c: &Conn, l: &Local, group: &LinkGroup, m: &Memory, fd: i32) -> i64 {
    let known = known(c, l, group, m);
    let tcp = sys::poll1(fd, POLLIN | POLLRDHUP);
    let told = |what: u32| {
        l.end_told.store(what, Relaxed);
        l.end_due_ms.store(0, Relaxed);
    };
    if port::is_over(fd, tcp) {
        told(OVER);
        return -1;
    }
    let reset = c.rx.said(m) & marks::RESET != 0;
    if known == OVER && (reset || c.rx.notice_death(m, is_dead(l))) {
        told(OVER);
        match reset {
            true => end_as_reset(c, m, fd), // (the peer's own, which a packet filter has dropped)
            false => reset_by_death(c, m, fd),
        }
        c.tx.reset_to_tcp();
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
    num::long(GRACE_MS)
}

/// The other end died with bytes of ours unread on the ring, of which its kernel does not know: leaves the socket
/// as if its reset had come. If nothing of TCP is unread, which that would discard, the kernel tells it, also to who has
/// the connection next. If the socket is closed although this end has not ended, TCP has had a reset as well, which the
/// kernel reports or has reported.
pub fn reset_by_death(c: &Conn, m: &Memory, fd: i32) {
    count_death();
    end_as_reset(c, m, fd);
}

fn end_as_reset(c: &Conn, m: &Memory, fd: i32) {
    let open = sys::tcp_state(fd) != Some(sys::CLOSE);
    let queued = || sys::ioctl_i32(fd, libc::FIONREAD).is_ok_and(|n| n > 0);
    if open && !has_shut(c, m, fd) && !queued() {
        return crate::tcp::disconnect_told(c, fd);
    }
    if c.rx.has_ended(m) || open {
        tell_death(c, m, fd);
    }
    if open {
        port::cut(fd); // (of a closed socket, it would be a second event)
    }
}

/// Such an end, for the counters.
pub fn count_death() {
    if let Some(t) = table::table() {
        t.count_death();
    }
}

/// Does the same if the other end has died that way and it was not noticed before. `dead` as in
/// [`lane::half::RxState::notice_death`]. The lock of the sending half is held.
pub fn has_died(c: &Conn, m: &Memory, fd: i32, dead: bool) -> bool {
    let died = c.rx.notice_death(m, dead);
    if died {
        reset_by_death(c, m, fd);
        c.tx.reset_to_tcp();
    }
    died
}

/// Had the peer sent a FIN before?
fn has_shut(c: &Conn, m: &Memory, fd: i32) -> bool {
    let fin = || sys::poll1(fd, libc::POLLRDHUP) & libc::POLLRDHUP != 0;
    c.rx.said(m) & marks::ENDED != 0 && fin()
}

/// After a FIN that the peer sent earlier, such a reset is EPIPE for senders.
pub fn tell_death(c: &Conn, m: &Memory, fd: i32) {
    match has_shut(c, m, fd) {
        true => c.tx.error.put(libc::EPIPE),
        false => c.rx.error.put(libc::ECONNRESET),
    }
}
