//! Receiving: from the lane, natively, or both, as the direction switches while the call is under way.

mod withheld;

use super::parts::{Cut, PART};
use super::{
    at_mark, closed, deadline, error_now, fail, fail_or, instead_of_end, left_ms, lock_for,
    nonblocking, proven, recv_or_told, reset_of, still, Call, LOOK_US,
};
use crate::readiness::engine;
use crate::readiness::wait::{self, For, Woke};
use crate::state::attached;
use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::sys::{self, clock, lock, pids, real, thread};
use crate::tcp::ends;
use crate::tcp::native::{self, native, rest, Native, Sleep, Way};
use crate::tcp::port::{self, Sock};
use crate::{daemon, promotion};
use core::ops::ControlFlow::{self, Break, Continue};
use core::sync::atomic::Ordering::*;
use lane::family::Conn;
use lane::half::rx::{mode, How};
use lane::half::{Iov, Memory, Received, KEPT};
use lane::num;
use lane::prim::ticks;
use libc::iovec;

/// Receives into `vecs`; `native` makes the application's own call.
///
/// # Safety
/// The buffers are the application's: writable, as its own call demands.
#[inline]
pub unsafe fn recv(
    fd: i32,
    i: u32,
    vecs: &[iovec],
    flags: i32,
    native: impl Fn() -> isize,
) -> isize {
    if table::conn(i).rx.engaged() {
        real::test_cancel();
    }
    let _inside = thread::enter();
    let Some((mut call, i)) = Call::of(fd, i) else {
        return thread::outside(native);
    };
    let (c, l) = (table::conn(i), table::local(i));
    if daemon::pending() {
        daemon::pump();
    }
    if c.rx.engaged() && !still(fd, i, c, l, Way::Receive) {
        return thread::outside(native);
    }
    let all = flags & (libc::MSG_WAITALL | libc::MSG_PEEK);
    let mut r = Receiving {
        call: &mut call,
        i,
        c,
        l,
        flags,
        nb: nonblocking(c, flags),
        all: all == libc::MSG_WAITALL,
        peek_all: all == libc::MSG_WAITALL | libc::MSG_PEEK,
        vecs,
        iov: Iov::new(vecs),
        total: 0,
        look: false,
        nowait: false,
        last_look: false,
        slept: false,
        withheld: false,
        other: false,
        until: None,
        cut: Cut::default(),
    };
    loop {
        let step = match c.rx.mode.load(Relaxed) {
            // SAFETY: the application's buffers, by this function's contract.
            mode::TCP => unsafe { r.on_tcp(&native) },
            _ => r.on_lane(),
        };
        match step {
            Break(r) => return r,
            Continue(()) if r.other => return thread::outside(native),
            Continue(()) => {}
        }
    }
}

/// A call that receives. Its steps go on (`Continue`), or end it with its result.
struct Receiving<'a> {
    call: &'a mut Call,
    i: u32,
    c: &'static Conn,
    l: &'static Local,
    flags: i32,
    /// The call may not block. Decided when it begins: making the description non-blocking later does not end a
    /// call that sleeps.
    nb: bool,
    /// It waits for all the bytes that it asks for: `all` takes them (MSG_WAITALL), `peek_all` leaves them (with
    /// MSG_PEEK).
    all: bool,
    peek_all: bool,
    vecs: &'a [iovec],
    iov: Iov<'a>,
    total: usize,
    /// Ask TCP, too, if the ring is empty.
    look: bool,
    /// Only continue with what is there, without waiting.
    nowait: bool,
    /// It was interrupted by a signal, and looks once more: bytes that have come meanwhile are returned instead of
    /// EINTR.
    last_look: bool,
    /// It has slept.
    slept: bool,
    /// See `withheld`.
    withheld: bool,
    /// The number means another file by now: the call is made natively.
    other: bool,
    /// End of the wait that SO_RCVTIMEO allows, once it has been read: see [`deadline`].
    until: Option<Option<u64>>,
    cut: Cut,
}

impl Receiving<'_> {
    fn peeks(&self) -> bool {
        self.flags & libc::MSG_PEEK != 0
    }

    /// # Safety
    /// The buffers are the application's.
    #[inline(never)]
    unsafe fn on_tcp(&mut self, own: &dyn Fn() -> isize) -> ControlFlow<isize> {
        let (i, c, l) = (self.i, self.c, self.l);
        // (The descriptor copy for the rest of the call must exist and be counted before the connection is
        // registered.)
        if self.total > 0 && self.call.native(c, l).is_none() {
            return Break(closed(self.total));
        }
        let fd = self.call.fd(l);
        promotion::evidence(i, fd, c);
        promotion::try_ready(i, c, l);
        if self.awaits_end(fd) {
            return self.await_pending();
        }
        if self.last_look && sys::poll1(fd, native::ANY_NEWS) == 0 && !c.has_error() {
            return Break(fail_or(self.total, libc::EINTR)); // the sender went down during the handler
        }
        // A MSG_WAITALL call that slept in the kernel would not notice bytes that go onto the ring: make it in
        // parts.
        if self.all
            && (self.cut.begun() || self.iov.left() > PART)
            && self
                .cut
                .begin((i, fd), self.flags, libc::SO_RCVTIMEO, &mut self.until)
        {
            let (iov, total) = (&mut self.iov, &mut self.total);
            // SAFETY: by contract.
            return match unsafe {
                self.cut
                    .part(Way::Receive, self.call, (c, l), iov, self.flags, total)
            } {
                Break(0) => Break(self.tcp_ended()),
                step => step,
            };
        }
        let goes_on = self.total > 0 || self.call.holds();
        let Some(fd) = native::descriptor(self.call, (c, l), self.total) else {
            return Break(closed(self.total));
        };
        let dontwait = goes_on && self.nowait;
        let flags = self.flags | if dontwait { libc::MSG_DONTWAIT } else { 0 };
        let total = self.total;
        let sleeps = (goes_on && !self.nb).then(|| Sleep {
            until: self.until(fd),
            disconnects: self.call.disconnects(),
        });
        // SAFETY: by contract.
        let more = || unsafe {
            let iov = self.iov.clone();
            rest(Way::Receive, c, fd, iov, flags, total, sleeps)
        };
        let counts = !self.peeks();
        let made = native(self.call, (c, l), Way::Receive, counts, || match goes_on {
            false => recv_or_told(c, fd, flags, own),
            true if total == 0 => recv_or_told(c, fd, flags, more),
            true => more(),
        });
        match made {
            Native::Made { says: 0, .. }
                if total == 0 && self.iov.left() > 0 && self.is_pending() =>
            {
                self.await_pending()
            }
            Native::Made { says: 0, .. } if total == 0 => Break(self.tcp_ended()),
            Native::Made { says, .. } => Break(num::ssize(total) + says), // after a part, `says` is no error
            Native::Closed => Break(closed(total)),
            Native::Lane => Continue(()),
        }
    }

    /// TCP has ended before anything was received: reports a reset if the other end died with bytes of ours
    /// unread.
    fn tcp_ended(&self) -> isize {
        let (c, l) = (self.c, self.l);
        if !attached::engaged_tx(c) && !c.has_error() {
            return 0;
        }
        match instead_of_end(self.call, self.i, c, l) {
            0 => 0,
            e => fail(e),
        }
    }

    /// What the call returns when the lane or the connection has ended.
    #[cold]
    fn ended(&self) -> isize {
        match self.total {
            0 if !self.call.current(self.c, self.l) => fail(libc::EBADF),
            0 => match error_now(self.i, self.call.fd(self.l)) {
                0 => 0, // the error was reported to another call: from now on it is end of file
                e => fail(e),
            },
            n => num::ssize(n),
        }
    }

    /// This direction was shut down by this process: returns the end of file, or the kernel's error. (EPIPE stands
    /// for a reset after a FIN; for a receive that is end of file.)
    #[cold]
    fn shut(&self) -> isize {
        let (c, l) = (self.c, self.l);
        match self.total {
            0 if self.call.current(c, l) => match error_now(self.i, self.call.fd(l)) {
                0 => 0,
                libc::EPIPE => {
                    c.tx.error.put(libc::EPIPE);
                    0
                }
                e => fail(e),
            },
            n => num::ssize(n),
        }
    }

    #[inline(always)]
    fn on_lane(&mut self) -> ControlFlow<isize> {
        let (c, l) = (self.c, self.l);
        let Some((group, m)) = attached::mapped(c, l) else {
            return match self.call.current(c, l) {
                true if !c.rx.engaged() => Continue(()), // given back since its mode was asked
                true => Break(fail_or(self.total, libc::ECONNRESET)), // not a clean end of file
                false => Break(closed(self.total)),
            };
        };
        if self.nb && !self.look {
            let now = ticks();
            self.look =
                now.wrapping_sub(c.rx.looked.load(Relaxed)) > LOOK_US * clock::cycles_per_us();
        }
        let before = c.rx.mode.load(Relaxed);
        let got = self.take(group, &m)?;
        if let Received::Bytes(n) = got {
            if c.rx.is_up() {
                attached::promoted(c);
            }
            self.total += n;
            group.moved();
            if self.iov.left() == 0 || n == 0 {
                return Break(num::ssize(self.total));
            }
            return self.part(before, group, &m);
        }
        self.nothing(got, group, &m)
    }

    /// Takes what the lane has.
    #[inline(always)]
    fn take(&mut self, group: &LinkGroup, m: &Memory) -> ControlFlow<isize, Received> {
        let (c, l) = (self.c, self.l);
        let Some(_g) = lock_for(&c.rx.lock, self.nb) else {
            return Break(fail_or(self.total, libc::EAGAIN));
        };
        if !self.call.current(c, l) {
            return Break(closed(self.total));
        }
        if !attached::is_its(c, l, group, m) {
            return Continue(Received::Tcp); // another lane by now, or none
        }
        let fd = l.fd.load(Relaxed);
        let port = Sock::new(fd, group);
        if c.owner_pid.load(Relaxed) != pids::me() {
            c.rx.want_down(m, &port); // a forked child also reads until the sender is on TCP
            port::ring(group);
        }
        let how = How {
            peek: self.peeks(),
            discard: self.flags & libc::MSG_TRUNC != 0,
            look: self.look,
            part: self.total > 0,
        };
        let got = c.rx.recv(m, &port, &mut self.iov, how);
        self.withheld = c.rx.shut.load(Relaxed) != 0
            && matches!(got, Received::Empty | Received::Eof)
            && self.is_withheld();
        // If the call goes on, it takes hold before a closing thread gets the lock.
        if (self.all || self.peek_all)
            && self.iov.left() > 0
            && matches!(got, Received::Bytes(n) if n > 0)
        {
            self.call.hold(c, l);
        }
        Continue(got)
    }

    /// Some bytes were there, and the buffer has room for more. The direction was in mode `before`.
    #[inline(always)]
    fn part(&mut self, before: u32, group: &LinkGroup, m: &Memory) -> ControlFlow<isize> {
        let (c, l) = (self.c, self.l);
        if self.all {
            self.look = false;
            return Continue(());
        }
        if self.peek_all {
            return self.peek_on(group, m);
        }
        let now = c.rx.mode.load(Relaxed);
        // The bytes after the ring, on TCP, may have been reported already (`looked` is 0 then) or counted: a
        // program that takes a short count for "nothing more" would wait for further events.
        let told = c.rx.is_up() && c.rx.looked.load(Relaxed) == 0;
        let after_ring = told || now == mode::LAST || !m.is_remote() && c.rx.goes_down(m);
        // The same holds if the switch happened within this read. (A peek has already found everything.)
        if self.peeks() || !after_ring && now == before {
            return Break(num::ssize(self.total));
        }
        if !self.call.hold(c, l) {
            return Break(closed(self.total));
        }
        self.look = true;
        self.nowait = true;
        Continue(())
    }

    /// A peek that waits for all it asks for has found a part: it naps, and looks again from the start.
    #[cold]
    fn peek_on(&mut self, group: &LinkGroup, m: &Memory) -> ControlFlow<isize> {
        let (c, l) = (self.c, self.l);
        if self.nb {
            return Break(num::ssize(self.total));
        }
        let fd = self.call.fd(l);
        let end = self.until(fd);
        promotion::service(c, group, m, fd);
        thread::outside(real::test_cancel);
        if self.call.was_disconnected(l) {
            return Break(num::ssize(self.total));
        }
        self.peek_all = left_ms(end) != 0
            && more_may_come(fd)
            && !thread::waiting()
            && !thread::interrupted(true);
        (self.total, self.iov, self.look) = (0, Iov::new(self.vecs), true);
        Continue(()) // look once more at the end, too: bytes may have come before it
    }

    /// Called before sleeping, or before reporting what TCP returned: does the number still stand for the
    /// connection?
    fn is_other(&mut self) -> bool {
        let fd = self.call.fd(self.l);
        self.other = self.total == 0 && !self.call.holds() && proven(fd) != Some(self.i);
        self.other
    }

    /// Has the handler that interrupted this call shut the connection down? In the kernel, the call ends before
    /// the handler runs.
    fn shut_in_handler(&self) -> bool {
        self.last_look && self.total == 0 && self.call.was_shut(self.l)
    }

    /// The lane returned no bytes.
    #[inline(never)]
    fn nothing(&mut self, got: Received, group: &LinkGroup, m: &Memory) -> ControlFlow<isize> {
        let (c, l) = (self.c, self.l);
        let told = matches!(got, Received::Error(_) | Received::Reset(_) | Received::Eof);
        if told && self.is_other() {
            return Continue(());
        }
        let refused = self.total == 0 && self.vecs.iter().any(beyond);
        match got {
            Received::Bytes(_) | Received::Tcp => Continue(()),
            Received::Empty | Received::Eof if refused => Break(fail(libc::EFAULT)),
            Received::Error(e) if refused => {
                c.rx.error.put(e);
                Break(fail(libc::EFAULT))
            }
            // As in the kernel, a zero-length receive that has slept leaves the error for the next call.
            Received::Error(e) if self.slept && self.iov.left() == 0 && self.total == 0 => {
                c.rx.error.put(e);
                Break(0)
            }
            Received::Empty => self.empty(group, m),
            Received::Eof if self.withheld => self.await_withheld(m),
            Received::Eof if self.shut_in_handler() => Break(fail(libc::EINTR)),
            Received::Eof => {
                c.rx.looked.store(0, Relaxed); // the next call must ask TCP again, and see the end
                promotion::service(c, group, m, self.call.fd(l));
                l.checked.store(0, Relaxed);
                if c.rx.shut.load(Relaxed) != 0 {
                    ends::after_fin((c, l), (group, m), lock::lock);
                }
                // Our sending half may have received the error, which the kernel does not report again.
                Break(match (self.total, c.has_error()) {
                    (0, true) => match c.take_error_at_end() {
                        0 => 0,
                        e => fail(e),
                    },
                    (n, _) => num::ssize(n),
                })
            }
            Received::Error(libc::EFAULT) => Break(fail_or(self.total, libc::EFAULT)),
            Received::Error(KEPT) if self.total == 0 => {
                let told = take_kept(self.call.fd(l));
                self.nothing(told, group, m)
            }
            Received::Error(e) => {
                l.checked.store(0, Relaxed); // the next send checks whether the peer is still there
                c.rx.looked.store(0, Relaxed);
                if self.total > 0 {
                    c.rx.error.put(e);
                    return Break(num::ssize(self.total));
                }
                c.tx.error.take(); // it is the same error
                Break(fail(e))
            }
            Received::Reset(r) => {
                reset_of(self.call, c, l, r);
                Break(self.ended())
            }
        }
    }

    /// The ring is empty, and so is TCP, if it was asked.
    #[inline(always)]
    fn empty(&mut self, group: &LinkGroup, m: &Memory) -> ControlFlow<isize> {
        let (c, l) = (self.c, self.l);
        if self.look {
            c.rx.looked.store(ticks(), Relaxed); // TCP was asked just now (it is not while the ring has bytes)
        }
        promotion::service(c, group, m, self.call.fd(l));
        if self.withheld {
            return self.await_withheld(m);
        }
        if c.rx.shut.load(Relaxed) != 0 && !self.shut_in_handler() {
            // (The other end may have died since.)
            ends::after_fin((c, l), (group, m), lock::lock);
            return Break(self.shut());
        }
        if self.last_look {
            return Break(fail_or(self.total, libc::EINTR));
        }
        if self.total > 0 && !c.rx.is_up() && at_mark(self.call.fd(l)) {
            return Break(num::ssize(self.total)); // as the kernel's own call does
        }
        if self.nowait || self.nb {
            if self.total == 0 && ends::left_ms(c, l, group, m) == 0 {
                self.look = true;
                return Continue(());
            }
            return Break(fail_or(self.total, libc::EAGAIN));
        }
        if self.iov.left() == 0 && !self.look && !self.slept {
            self.look = true; // a pending error is reported before a sleep, and not after one
            return Continue(());
        }
        // (A spin holds the connection only from its first yield on: a close during it meets a call that has not
        // slept. The time-out is not read yet, either.)
        if c.rx.is_up() && !self.look && engine::may_spin(&l.spin) {
            let cpu = || m.peer_rx().cpu.load(Relaxed);
            let found = engine::spin(cpu, || self.call.hold(c, l), || c.rx.has_news(m));
            engine::spun(&l.spin, found);
            if found {
                return Continue(());
            }
        }
        self.sleep()
    }

    /// End of its wait; `None`: it may sleep for ever.
    #[cold]
    fn until(&mut self, fd: i32) -> Option<u64> {
        let c = self.c;
        *self
            .until
            .get_or_insert_with(|| deadline(c, fd, libc::SO_RCVTIMEO))
    }

    fn sleep(&mut self) -> ControlFlow<isize> {
        let (i, c, l) = (self.i, self.c, self.l);
        if self.is_other() {
            return Continue(());
        }
        if !self.call.hold(c, l) {
            return Break(closed(self.total));
        }
        let fd = self.call.fd(l);
        let end = self.until(fd);
        let any = end.is_some() || self.total > 0;
        let ms = left_ms(end);
        let what = match self.total > 0 || self.iov.left() == 0 {
            true => For::Rest,
            false => For::Data,
        };
        let woke = wait::wait(i, c, l, what, ms, any);
        // As in the kernel, a call that restarts after a handler reads its blocking mode and time-out again.
        let anew = woke != Woke::Interrupted && thread::begins_anew();
        if anew {
            (self.nb, self.until) = (nonblocking(c, self.flags), None);
        }
        if self.call.was_disconnected(l) {
            return Break(fail_or(self.total, libc::EPIPE)); // the error is for the next call
        }
        // In the kernel, a zero-length receive ends with any wake-up. (Our doorbell does not count as one.)
        let looks = matches!(woke, Woke::Look { .. }) && !anew;
        self.slept |= ms != 0;
        if self.iov.left() == 0 && self.slept && (!looks || self.call.was_shut(l) || has_news(fd)) {
            return Break(0);
        }
        match woke {
            Woke::Look { kernel } => self.look = kernel,
            Woke::Timeout => return Break(fail_or(self.total, libc::EAGAIN)),
            // The handler has closed the connection.
            Woke::Interrupted if self.total == 0 && !self.call.current(c, l) => {
                return Break(fail(libc::EINTR))
            }
            Woke::Interrupted => (self.look, self.last_look) = (true, true),
        }
        Continue(())
    }
}

/// Fetches the error that an earlier look has left in the kernel, so that this call reports it.
#[cold]
fn take_kept(fd: i32) -> Received {
    let mut b = 0u8;
    match sys::recv(fd, &mut b, 1, libc::MSG_PEEK) {
        Ok(0) => Received::Eof,
        Ok(_) => Received::Tcp,
        Err(libc::EAGAIN) => Received::Empty,
        Err(e) => Received::Error(e),
    }
}

/// Does the buffer begin beyond user space? The kernel refuses that before it looks for bytes.
fn beyond(v: &iovec) -> bool {
    v.iov_base.addr() > isize::MAX as usize
}

/// Has TCP anything to report?
fn has_news(fd: i32) -> bool {
    sys::poll1(fd, native::ANY_NEWS) != 0
}

/// For a peek that waits for all it asks for and has found a part: naps for 1 ms, because nothing wakes a thread
/// while bytes are readable anyway. False: end of file, an error, a signal or an urgent byte has come.
fn more_may_come(fd: i32) -> bool {
    let Ok(e) = sys::poll_ms(fd, libc::POLLRDHUP, 1) else {
        return false;
    };
    if e & libc::POLLRDHUP != 0 || port::is_over(fd, e) || at_mark(fd) {
        return false;
    }
    // (A notification of MSG_ZEROCOPY has ended the nap at once.)
    e == 0 || sys::poll_ms(-1, 0, 1).is_ok()
}
