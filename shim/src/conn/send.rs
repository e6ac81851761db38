//! Sending: over the lane, natively, or both, as the direction switches while the call is under way.

use super::parts::{Cut, PART};
use super::{
    broken, closed, deadline, error_now, fail, fail_or, left_ms, lock_for, nonblocking, peer_check,
    reset_of, send_or_told, short, still, zerocopy, Call, ASK_MS, CHECK_US,
};
use crate::daemon;
use crate::promotion::full::{full_for_long, go_down_full, FULL_MS};
use crate::promotion::{self, family};
use crate::readiness::wait::{self, For, Woke};
use crate::state::attached;
use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::sys::{self, clock, lock, pids, real, thread};
use crate::tcp::native::{self, native, rest, Native, Sleep, Way};
use crate::tcp::port::Sock;
use crate::tcp::probes;
use core::ops::ControlFlow::{self, Break, Continue};
use core::sync::atomic::Ordering::*;
use lane::abi::{RING_FAST_LOG2, RING_LOG2_MAX};
use lane::family::{flag, Cause, Conn};
use lane::half::{tx, Iov, Memory, Sent};
use lane::num;
use lane::prim::cpu_and_ticks;
use libc::iovec;

/// Sends `vecs`. `native` makes the application's own call.
///
/// # Safety
/// The buffers are the application's: readable, as its own call demands.
#[inline]
pub unsafe fn send(
    fd: i32,
    i: u32,
    vecs: &[iovec],
    flags: i32,
    native: impl Fn() -> isize,
) -> isize {
    if flags & libc::MSG_ZEROCOPY != 0 {
        // SAFETY: passed on.
        return unsafe {
            zerocopy::send(fd, i, vecs, flags, native, |flags, native| {
                send_plain(fd, i, vecs, flags, native)
            })
        };
    }
    // SAFETY: passed on.
    unsafe { send_plain(fd, i, vecs, flags, native) }
}

/// # Safety
/// As [`send`].
#[inline(always)]
unsafe fn send_plain(
    fd: i32,
    i: u32,
    vecs: &[iovec],
    flags: i32,
    native: impl Fn() -> isize,
) -> isize {
    let c = table::conn(i);
    if c.tx.on_lane() {
        real::test_cancel(); // as the kernel's calls do; on a lane we may make none
    }
    let _inside = thread::enter();
    if c.tx.on_lane() && !still(fd, i, c, table::local(i), Way::Send) {
        return thread::outside(native);
    }
    let Some((mut call, i)) = Call::of(fd, i) else {
        return thread::outside(native);
    };
    // SAFETY: passed on.
    unsafe { run(&mut call, i, vecs, flags, &native) }
}

/// The call itself, for a `Call` that its caller has begun.
///
/// # Safety
/// As [`send`].
#[inline]
pub unsafe fn run(
    call: &mut Call,
    i: u32,
    vecs: &[iovec],
    flags: i32,
    native: &impl Fn() -> isize,
) -> isize {
    if daemon::pending() {
        daemon::pump();
    }
    let mut s = Sending {
        call,
        i,
        c: table::conn(i),
        l: table::local(i),
        flags,
        nb: nonblocking(table::conn(i), flags),
        vecs,
        iov: Iov::new(vecs),
        total: 0,
        until: None,
        patient: false,
        moment: 0,
        cut: Cut::default(),
    };
    loop {
        let step = match s.c.tx.mode.load(Relaxed) {
            // SAFETY: the application's buffers, by this function's contract.
            tx::mode::TCP => unsafe { s.on_tcp(native) },
            _ => s.on_lane(),
        };
        if let Break(r) = step {
            return r;
        }
    }
}

/// A call that sends. Its steps go on (`Continue`), or end it with its result.
struct Sending<'a> {
    call: &'a mut Call,
    i: u32,
    c: &'static Conn,
    l: &'static Local,
    flags: i32,
    /// It may not block: see [`super::recv()`].
    nb: bool,
    vecs: &'a [iovec],
    iov: Iov<'a>,
    total: usize,
    /// End of the wait that SO_SNDTIMEO allows, once it has been read: see [`deadline`].
    until: Option<Option<u64>>,
    /// It has waited once for the remote node's answer although it may not block.
    patient: bool,
    /// End of the time that it gives the reader to make room: see [`short`].
    moment: u64,
    cut: Cut,
}

impl Sending<'_> {
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
        let remote = c.flags.load(Relaxed) & flag::REMOTE != 0;
        if (!remote || self.cut.begun()) && promotion::try_up(i, c, l, fd) {
            return Continue(());
        }
        let large = self.cut.begun() || self.iov.left() > PART;
        if large
            && self
                .cut
                .begin((i, fd), self.flags, libc::SO_SNDTIMEO, &mut self.until)
        {
            let (iov, total) = (&mut self.iov, &mut self.total);
            // SAFETY: by contract.
            return unsafe {
                self.cut
                    .part(Way::Send, self.call, (c, l), iov, self.flags, total)
            };
        }
        let goes_on = self.total > 0 || self.call.holds();
        let Some(fd) = native::descriptor(self.call, (c, l), self.total) else {
            return Break(closed(self.total));
        };
        short::begins(l, self.vecs);
        let (total, flags) = (self.total, self.flags);
        let sleeps = (goes_on && !self.nb).then(|| Sleep {
            until: self.until(fd),
            disconnects: self.call.disconnects(),
        });
        let made = native(self.call, (c, l), Way::Send, true, || match goes_on {
            false => send_or_told(c, own),
            true if total > 0 && c.has_error() => 0, // the next call reports it
            // SAFETY: by contract.
            true => send_or_told(c, || unsafe {
                rest(Way::Send, c, fd, self.iov.clone(), flags, total, sleeps)
            }),
        });
        let r = match made {
            Native::Made { says, ours: true } => says,
            // The connection was closed during the call, which the kernel has finished.
            Native::Made { says, ours: false } => return Break(num::ssize(total) + says),
            Native::Closed => return Break(closed(total)),
            Native::Lane => return Continue(()),
        };
        if remote {
            // The remote node is asked for the switch while the application does something else.
            crate::preserving_errno(|| promotion::try_up(i, c, l, fd));
        }
        let bad = r < 0 && crate::errno() == libc::EFAULT;
        let (whole, r) = (total + self.iov.left(), num::ssize(total) + r); // after a part, `r` is no error
        if r < num::ssize(whole) {
            if !bad && short::was_taken((c, l), fd, total, whole) {
                return Break(num::ssize(whole));
            }
            short::told(l, self.vecs, r);
        }
        Break(r)
    }

    #[inline(always)]
    fn on_lane(&mut self) -> ControlFlow<isize> {
        let (c, l) = (self.c, self.l);
        let Some((group, m)) = attached::mapped(c, l) else {
            let given_back = !attached::engaged_tx(c) && self.call.current(c, l);
            return match given_back {
                true => Continue(()), // since its mode was asked
                false => Break(self.ended()),
            };
        };
        if c.owner_pid.load(Relaxed) != pids::me() {
            promotion::take_down(self.i, Cause::Shared); // a forked child: back to TCP, where both processes may send
        }
        if c.tx.shut.load(Relaxed) != 0 {
            return Break(self.ended()); // the kernel may not have been told yet
        }
        // Check before publishing, not after: if the peer is gone, the bytes must go to TCP, which reports that.
        let (me, now) = cpu_and_ticks();
        if now.wrapping_sub(l.checked.load(Relaxed)) > CHECK_US * clock::cycles_per_us() {
            l.checked.store(now, Relaxed);
            if family::is_wanted() {
                family::used();
            }
            peer_check(self.call, c, l, group, &m);
        }
        let sent = self.put(group, &m)?;
        if let Sent::Bytes(n) = sent {
            self.total += n;
            group.moved();
            if m.own_rx().cpu.load(Relaxed) != me {
                m.own_rx().cpu.store(me, Relaxed); // a hint for the peer's spin
            }
            return match self.iov.left() {
                0 if self.total == 0 => Break(self.nothing()),
                0 => Break(num::ssize(self.total)),
                _ => Continue(()),
            };
        }
        self.no_room(group, &m, sent)
    }

    /// As in the kernel, a zero-length send returns the error that a send of bytes would.
    #[cold]
    fn nothing(&self) -> isize {
        let told = match self.c.take_error() {
            0 => sys::send(self.call.fd(self.l), core::ptr::null(), 0).map_or_else(|e| e, |_| 0),
            e => e,
        };
        match told {
            0 => 0,
            libc::EPIPE => broken(self.flags),
            e => fail(e),
        }
    }

    /// Puts as many bytes on the ring as there is room for.
    #[inline(always)]
    fn put(&mut self, group: &LinkGroup, m: &Memory) -> ControlFlow<isize, Sent> {
        let (c, l) = (self.c, self.l);
        let Some(_g) = lock_for(&c.tx.lock, self.nb) else {
            return Break(fail_or(self.total, libc::EAGAIN));
        };
        if !self.call.current(c, l) {
            return Break(closed(self.total));
        }
        if !attached::is_its(c, l, group, m) {
            return Continue(Sent::Tcp); // another lane by now, or none
        }
        if c.tx.shut.load(Relaxed) != 0 {
            return Break(self.ended()); // by another thread meanwhile
        }
        let fd = l.fd.load(Relaxed);
        let was = c.tx.is_up();
        let s = c.tx.send(m, &Sock::new(fd, group), &mut self.iov);
        // If the call goes on, or sleeps, it takes hold before a closing thread gets the lock.
        if self.iov.left() > 0 && !self.nb && !matches!(s, Sent::Reset(_)) {
            self.call.hold(c, l);
        }
        if was && !c.tx.is_up() {
            probes::went_down(c, Cause::Peer);
        } else if !was && c.tx.is_up() {
            attached::counted_up(c);
        }
        Continue(s)
    }

    /// Nothing can be sent any more: the lane, the connection or this direction has ended.
    #[cold]
    fn ended(&self) -> isize {
        match self.total {
            0 if !self.call.current(self.c, self.l) => fail(libc::EBADF),
            0 => match error_now(self.i, self.call.fd(self.l)) {
                0 => broken(self.flags),
                e => fail(e),
            },
            n if self.call.current(self.c, self.l) => {
                short::counted((self.c, self.l), self.call.fd(self.l), n, self.iov.left())
            }
            n => num::ssize(n),
        }
    }

    #[inline(never)]
    fn no_room(&mut self, group: &LinkGroup, m: &Memory, sent: Sent) -> ControlFlow<isize> {
        let (i, c, l) = (self.i, self.c, self.l);
        let full = match sent {
            Sent::Reset(r) => {
                reset_of(self.call, c, l, r);
                return Break(self.ended());
            }
            Sent::Fault => return Break(fail_or(self.total, libc::EFAULT)),
            Sent::Tcp | Sent::Bytes(_) => return Continue(()),
            sent => sent == Sent::Full,
        };
        if full {
            let ours = || self.call.current(c, l);
            if grow(c, (group, m, self.call.fd(l)), RING_FAST_LOG2, ours) {
                return Continue(());
            }
            if full_for_long(c, l, m) {
                go_down_full(c, l, group, m, ours);
                return Continue(());
            }
            let fd = self.call.fd(l);
            if c.tx.want_space(m, &Sock::new(fd, group)) {
                return Continue(());
            }
        }
        peer_check(self.call, c, l, group, m);
        short::begins(l, self.vecs);
        if !self.nb {
            return self.sleep(full, group, m);
        }
        if full && short::kernel_has_room(c, l, m, self.call.fd(l), self.total) {
            if !grow(c, (group, m, self.call.fd(l)), RING_LOG2_MAX, || {
                self.call.current(c, l)
            }) {
                short::make_room(self.call, i, (c, l), (group, m), &mut self.moment);
            }
            return Continue(());
        }
        if !self.patient && !full && c.tx.asks() {
            // Wait for the remote node's answer, once per switch, rather than return an EAGAIN that TCP would not
            // give.
            self.patient = true;
            if !self.call.hold(c, l) {
                return Break(closed(self.total));
            }
            wait::wait(i, c, l, For::Space, ASK_MS, false);
            return Continue(());
        }
        short::told(l, self.vecs, num::ssize(self.total));
        if full && self.total == 0 {
            short::refused(l);
        }
        crate::sets::blocked(i);
        Break(fail_or(self.total, libc::EAGAIN))
    }

    /// End of its wait; `None`: it may sleep for ever.
    #[cold]
    fn until(&mut self, fd: i32) -> Option<u64> {
        let c = self.c;
        *self
            .until
            .get_or_insert_with(|| deadline(c, fd, libc::SO_SNDTIMEO))
    }

    /// Sleeps until there may be room. The call holds the connection.
    fn sleep(&mut self, full: bool, group: &LinkGroup, m: &Memory) -> ControlFlow<isize> {
        let (i, c, l) = (self.i, self.c, self.l);
        let fd = self.call.fd(l);
        let end = self.until(fd);
        let ms = left_ms(end);
        let cap = if full { num::long(FULL_MS) + 1 } else { -1 };
        let t = if cap < 0 || (0..=cap).contains(&ms) {
            ms
        } else {
            cap
        };
        let any = end.is_some() || self.total > 0;
        let woke = wait::wait(i, c, l, For::Space, t, any);
        // As in the kernel, a call that restarts after a handler reads its blocking mode and time-out again.
        if woke != Woke::Interrupted && thread::begins_anew() {
            (self.nb, self.until) = (nonblocking(c, self.flags), None);
        }
        if self.call.was_disconnected(l) {
            return Break(self.ended());
        }
        match woke {
            Woke::Timeout if t == ms => {
                if full && short::kernel_has_room(c, l, m, fd, self.total) {
                    let ours = || self.call.current(c, l);
                    if !grow(c, (group, m, fd), RING_LOG2_MAX, ours) {
                        go_down_full(c, l, group, m, ours);
                    }
                    return Continue(());
                }
                Break(fail_or(self.total, libc::EAGAIN))
            }
            Woke::Interrupted => Break(fail_or(self.total, libc::EINTR)),
            _ => Continue(()),
        }
    }
}

/// A lane that fills its ring gets a larger one, if the daemon allows it and the reader has left the previous
/// ring. (Not while another process holds the connection: it does not have mapped what was mapped here since the
/// fork.) `most`: log2 of the largest size. `ours`: as above.
fn grow(
    c: &Conn,
    (group, m, fd): (&LinkGroup, &Memory, i32),
    most: u32,
    ours: impl Fn() -> bool,
) -> bool {
    let Some(_g) = lock::lock(&c.tx.lock) else {
        return false;
    };
    let log2 = c.tx.ring_log2();
    // (Across nodes the daemon pins the ring, and the bound is not known there.)
    let most = if m.is_remote() { RING_FAST_LOG2 } else { most };
    let max = daemon::ring_sizes().1.min(most);
    if !ours() || log2 == 0 || log2 >= max || !c.tx.can_move(m) || table::holders(c) != 1 {
        return false;
    }
    let Some(loc) = group.alloc((log2 + 2).min(max), daemon::want_chunk) else {
        return false;
    };
    let freed = c.tx.move_to(m, loc);
    if loc.log2 > RING_FAST_LOG2 {
        crate::tcp::bufs::as_kernel(c, m, fd);
    }
    let slot = &group.rings[c.lane.load(Relaxed) as usize];
    slot[1].store(slot[0].swap(loc.word(), Relaxed), Relaxed);
    if let Some(f) = freed {
        group.free(f);
    }
    true
}
