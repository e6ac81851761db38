//! Sending and receiving: one engine for all the calls of that family.
//!
//! A call comes with its buffers as an iovec and with a closure that makes the native call. Where
//! the direction is on TCP the closure runs, counted; otherwise the lane is used.

pub mod call;
mod errors;
mod inq;
mod leave;
mod parts;
mod sendfile;
pub mod short;
pub mod zerocopy;

pub use errors::{
    check, cut, disconnect, error_now, recv_or_told, reset, reset_by_death, send_or_told,
};
use errors::{died_unread, peer_check, reset_now};
pub use inq::{put_inq, sync_inq};
pub use leave::{leave, LEAVE_MS};
pub use sendfile::sendfile;

use crate::links::Sock;
use crate::table::{self, Local};
use crate::wait::{self, For, Woke};
use crate::{control, errno, lock, promote, real, set_errno, signals, sys};
use call::Call;
use core::sync::atomic::Ordering::*;
use libc::iovec;
use link::family::{flag, Conn};
use link::lane::rx::How;
use link::lane::{Iov, Received, Sent};
use link::prim::{cpu_and_ticks, ticks};
use link::reason::Reason;
use parts::{Cut, Part, PART};

/// Milliseconds without any progress of the reader after which a full ring goes down: kernel buffers
/// hold megabytes, and programs that write before they read rely on it. Longer than a reader that
/// is merely not scheduled takes.
pub const FULL_MS: u64 = 20;
/// The same across nodes, where word of the reader's progress comes late.
const FULL_FAR_MS: u64 = 200;
/// Microseconds between two looks at TCP by whoever finds the ring empty.
const LOOK_US: u64 = 20;
/// Microseconds between two looks whether the peer's TCP end is still there, by a sender.
const CHECK_US: u64 = 2000;
/// Microseconds for which a proof holds that a descriptor is the connection that the table says.
const PROOF_US: u64 = 20;

/// Milliseconds that a non-blocking send waits for the far node's answer to a switch.
const ASK_MS: i64 = 2;

/// A send after the end: EPIPE, and SIGPIPE unless the call does not want it.
fn broken(flags: i32) -> isize {
    if flags & libc::MSG_NOSIGNAL == 0 {
        sys::raise(libc::SIGPIPE);
    }
    fail(libc::EPIPE)
}

fn fail(e: i32) -> isize {
    set_errno(e);
    -1
}

/// Is the call non-blocking?
#[inline(always)]
fn nonblocking(c: &Conn, flags: i32) -> bool {
    flags & libc::MSG_DONTWAIT != 0 || c.flags.load(Relaxed) & flag::NONBLOCK != 0
}

/// The lock of a direction, for a call; one that may not block does not wait for long for a holder that
/// is stopped.
#[inline(always)]
fn lock_for<'a>(
    word: &'a core::sync::atomic::AtomicU32,
    c: &Conn,
    flags: i32,
) -> Option<lock::Guard<'a>> {
    match nonblocking(c, flags) {
        true => lock::lock_within(word, 40),
        false => lock::lock(word),
    }
}

/// End of the wait that SO_RCVTIMEO or SO_SNDTIMEO allows, in CLOCK_MONOTONIC ns; `None`: for ever.
fn deadline(c: &Conn, fd: i32, name: i32) -> Option<u64> {
    let at_once = match name {
        libc::SO_RCVTIMEO => flag::RCV_AT_ONCE,
        _ => flag::SND_AT_ONCE,
    };
    if c.flags.load(Relaxed) & at_once != 0 {
        return Some(0);
    }
    let mut b = [0u8; 16];
    sys::getsockopt(fd, libc::SOL_SOCKET, name, &mut b).ok()?;
    let half = |o: usize| {
        let mut w = [0u8; 8];
        w.copy_from_slice(&b[o..o + 8]);
        u64::from_ne_bytes(w)
    };
    let ns = half(0)
        .saturating_mul(1_000_000_000)
        .saturating_add(half(8).saturating_mul(1000));
    (ns != 0).then(|| sys::now_ns().saturating_add(ns))
}

fn left_ms(deadline: Option<u64>) -> i64 {
    match deadline {
        None => -1,
        Some(d) => (d.saturating_sub(sys::now_ns()).div_ceil(1_000_000)) as i64,
    }
}

/// For a peek that waits for all it asks for, with a part of it there: naps a little, for nothing wakes
/// who finds bytes. `up`: on the ring, where what TCP has is a frame. False: the end, an error, a signal.
fn more_may_come(fd: i32, up: bool) -> bool {
    let events = libc::POLLRDHUP | if up { libc::POLLIN } else { 0 };
    let end = events | libc::POLLHUP | libc::POLLERR;
    sys::poll_ms(fd, events, 1).is_ok_and(|e| e & end == 0)
}

/// Is `fd` still this connection? An inlined system call may have closed it and given its number to a
/// file: then it is forgotten, and the call belongs to the kernel. A proof holds for [`PROOF_US`].
#[inline(always)]
pub fn still(fd: i32, i: u32, c: &Conn, l: &Local) -> bool {
    let now = ticks();
    now.wrapping_sub(l.proved.load(Relaxed)) <= PROOF_US * wait::cycles_per_us()
        || prove(fd, i, c, l, now)
}

#[cold]
fn prove(fd: i32, i: u32, c: &Conn, l: &Local, now: u64) -> bool {
    let known = c.inode.load(Relaxed);
    if known == 0 || sys::inode(fd).is_ok_and(|(inode, _)| inode == known) {
        l.proved.store(now, Relaxed);
        return true;
    }
    crate::fdops::vanished(fd, i);
    false
}

/// A thread has left a native call without a word (it was cancelled, or a handler jumped out of it) and
/// may have moved bytes there that nobody has counted: then the connection stays on TCP.
#[cold]
fn uncounted(c: &Conn, fd: i32) {
    let counted = (c.tx.kpos.load(SeqCst), c.rx.kpos.load(SeqCst));
    let syn = u64::from(c.flags.load(Relaxed) & flag::CLIENT != 0);
    let moved = sys::tcp_position(fd).map(|k| (k.sent.wrapping_sub(syn), k.taken));
    if moved != Some(counted) {
        table::bar(c, Reason::Bypassed);
    }
}

/// Sends `iov`. `native` makes the application's own call; after a part went over the lane the
/// rest is sent with `sendmsg`.
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
        real::test_cancel(); // the kernel's calls do it, and we may make none
    }
    let _inside = signals::enter();
    if c.tx.on_lane() && !still(fd, i, c, table::local(i)) {
        return signals::outside(native);
    }
    let Some((mut call, i)) = Call::of(fd, i) else {
        return signals::outside(native);
    };
    // SAFETY: passed on.
    unsafe { send_on(&mut call, i, vecs, flags, native) }
}

/// The connection was closed by another thread before the call slept: what it has done, or EBADF.
#[cold]
fn closed(total: usize) -> isize {
    match total {
        0 => fail(libc::EBADF),
        n => n as isize,
    }
}

/// # Safety
/// As [`send`].
#[inline]
unsafe fn send_on(
    call: &mut Call,
    i: u32,
    vecs: &[iovec],
    flags: i32,
    native: impl Fn() -> isize,
) -> isize {
    let c = table::conn(i);
    let l = table::local(i);
    if control::pending() {
        control::pump();
    }
    let mut iov = Iov::new(vecs);
    let mut total = 0usize;
    let mut until: Option<Option<u64>> = None;
    let mut patient = false;
    let mut moment = 0;
    let mut cut = Cut::default();
    loop {
        let fd = call.fd(l);
        if !c.tx.is_up() && c.tx.mode.load(Relaxed) == link::lane::tx::mode::TCP {
            promote::evidence(i, fd, c);
            let far = c.flags.load(Relaxed) & flag::FAR != 0;
            if (!far || cut.begun()) && promote::try_up(i, c, l, fd) {
                continue;
            }
            let large = cut.begun() || iov.left() > PART;
            if large && cut.begin(i, fd, flags, libc::SO_SNDTIMEO) {
                // SAFETY: the application's buffers, by this function's contract.
                match unsafe { cut.send(call, (c, l), &mut iov, flags, &mut total) } {
                    Part::More => continue,
                    Part::End(r) => return r,
                    Part::Lane => {}
                }
            } else if c.tx.enter_native() {
                if !call.current(c, l) {
                    c.tx.leave_native(0);
                    return closed(total);
                }
                short::begins(l, vecs);
                let whole = total + iov.left();
                let goes_on = total > 0 || call.holds();
                let own = goes_on.then(|| call.native(c, l));
                let undo = || {
                    uncounted(c, fd);
                    c.tx.leave_native(0);
                };
                let r = signals::or_undo(&undo, || match (c.has_error(), own) {
                    (_, None) => send_or_told(c, &native),
                    (true, _) if total > 0 => 0, // the next call tells it
                    (true, _) if c.tx.error.get() != libc::EPIPE => fail(c.take_error()),
                    // SAFETY: the application's buffers, by this function's contract.
                    (_, Some(Some(fd))) => unsafe { rest(c, fd, &mut iov, flags, total > 0) },
                    (_, Some(None)) => closed(0),
                });
                let ours = call.counts(c);
                c.tx.leave_native(if ours { r.max(0) as u64 } else { 0 });
                if !ours {
                    // Closed while it was under way: the kernel has finished it.
                    return if r < 0 && total > 0 {
                        total as isize
                    } else {
                        total as isize + r
                    };
                }
                if c.flags.load(Relaxed) & flag::FAR != 0 {
                    // The far node is asked while the application does something else.
                    quietly(|| promote::try_up(i, c, l, fd));
                }
                let all = total as isize + if total > 0 { r.max(0) } else { r };
                if all < whole as isize {
                    short::told(l, vecs, all);
                }
                return all;
            }
        }
        let Some((link, m)) = promote::lane(c, l) else {
            return match call.current(c, l) {
                true => fail(libc::EPIPE),
                false => closed(total),
            };
        };
        if c.owner_pid.load(Relaxed) != table::pid() {
            promote::take_down(i); // a forked child: back to TCP, where both may send
        }
        if c.tx.shut.load(Relaxed) != 0 {
            return match call.current(c, l) {
                true => broken(flags), // shut down, though the kernel does not know yet
                false => closed(total),
            };
        }
        // Before, not after: what meets nobody must meet TCP, which answers.
        let (me, now) = cpu_and_ticks();
        if now.wrapping_sub(l.checked.load(Relaxed)) > CHECK_US * wait::cycles_per_us() {
            l.checked.store(now, Relaxed);
            peer_check(call, c, l, link, &m);
        }
        let sent = {
            let Some(_g) = lock_for(&c.tx.lock, c, flags) else {
                return fail(libc::EAGAIN);
            };
            if !call.current(c, l) {
                return closed(total);
            }
            let fd = l.fd.load(Relaxed);
            let port = Sock { fd, link };
            let was = c.tx.is_up();
            let s = c.tx.send(&m, &port, &mut iov);
            // It goes on, or sleeps: before a closer gets the lock.
            if iov.left() > 0 && !nonblocking(c, flags) && !matches!(s, Sent::Reset(_)) {
                call.hold(c, l);
            }
            if was && !c.tx.is_up() {
                promote::counted_down();
            } else if !was && c.tx.is_up() {
                promote::counted_up(c);
            }
            s
        };
        match sent {
            Sent::Bytes(n) => {
                total += n;
                link.moved();
                if m.own_rx().cpu.load(Relaxed) != me {
                    m.own_rx().cpu.store(me, Relaxed); // a hint for the other side's spin
                }
                if iov.left() == 0 {
                    return total as isize;
                }
            }
            Sent::Tcp => {}
            Sent::Reset(r) => return reset_now(i, call.fd(l), r, total),
            Sent::Full | Sent::Blocked => {
                let full = sent == Sent::Full;
                if full {
                    if grow(c, link, &m) {
                        continue;
                    }
                    if full_for_long(c, l) {
                        go_down_full(c, link, call.fd(l), &m);
                        continue;
                    }
                    let fd = call.fd(l);
                    if c.tx.want_space(&m, &Sock { fd, link }) {
                        continue;
                    }
                }
                peer_check(call, c, l, link, &m);
                let nb = nonblocking(c, flags);
                short::begins(l, vecs);
                if nb && full && short::kernel_has_room(c, l, &m, call.fd(l), total) {
                    short::make_room(call, i, (c, l), (link, &m), &mut moment);
                    continue;
                }
                if nb && !patient && !full && c.tx.awaits(&m) {
                    // One answer, once per switch: worth more than an EAGAIN that TCP would not give.
                    patient = true;
                    if !call.hold(c, l) {
                        return closed(total);
                    }
                    wait::wait(i, c, l, For::Space, ASK_MS, false);
                    continue;
                }
                if nb {
                    short::told(l, vecs, total as isize);
                    crate::epoll::blocked(i);
                    return if total > 0 {
                        total as isize
                    } else {
                        fail(libc::EAGAIN)
                    };
                }
                let end = *until.get_or_insert_with(|| deadline(c, call.fd(l), libc::SO_SNDTIMEO));
                let ms = left_ms(end);
                let cap = if full { FULL_MS as i64 + 1 } else { -1 };
                let t = if cap < 0 || (0..=cap).contains(&ms) {
                    ms
                } else {
                    cap
                };
                match wait::wait(i, c, l, For::Space, t, end.is_some() || total > 0) {
                    Woke::Timeout if t == ms => {
                        if full && short::kernel_has_room(c, l, &m, call.fd(l), total) {
                            go_down_full(c, link, call.fd(l), &m);
                            continue;
                        }
                        return if total > 0 {
                            total as isize
                        } else {
                            fail(libc::EAGAIN)
                        };
                    }
                    Woke::Interrupted => {
                        return if total > 0 {
                            total as isize
                        } else {
                            fail(libc::EINTR)
                        };
                    }
                    _ => {}
                }
            }
        }
    }
}

/// The ring is full: has it been so for long, without the reader taking anything?
pub fn full_for_long(c: &Conn, l: &Local) -> bool {
    let (since, now) = (c.tx.full_since_ms.load(Relaxed), sys::now_ms());
    let consumed = c.tx.consumed();
    if since == 0 || l.full_at.swap(consumed, Relaxed) != consumed {
        l.full_at.store(consumed, Relaxed);
        c.tx.full_since_ms.store(now, Relaxed);
        return false;
    }
    let most = match c.flags.load(Relaxed) & flag::FAR {
        0 => FULL_MS,
        _ => FULL_FAR_MS,
    };
    now.saturating_sub(since) > most
}

/// Ring full for long: down, and up again only later.
pub fn go_down_full(c: &Conn, link: &crate::links::Link, fd: i32, m: &link::lane::Memory) {
    // Tried only: this may run under the lock of an epoll set.
    let Some(_g) = lock::try_lock(&c.tx.lock) else {
        return;
    };
    if c.tx.is_up() {
        promote::full_down(c);
        let _ = c.tx.down(m, &Sock { fd, link });
        promote::counted_down();
    }
}

/// A lane that fills its ring gets a larger one, if the daemon allows and the reader has left the
/// one before.
fn grow(c: &Conn, link: &crate::links::Link, m: &link::lane::Memory) -> bool {
    let Some(_g) = lock::lock(&c.tx.lock) else {
        return false;
    };
    let log2 = c.tx.ring_log2();
    let max = control::ring_sizes().1;
    if log2 == 0 || log2 >= max || !c.tx.can_move(m) {
        return false;
    }
    let Some(loc) = link.alloc((log2 + 2).min(max)) else {
        return false;
    };
    let freed = c.tx.move_to(m, loc);
    let slot = &link.rings[c.lane.load(Relaxed) as usize];
    slot[1].store(slot[0].swap(loc.pack(), Relaxed), Relaxed);
    if let Some(f) = freed {
        link.free(f);
    }
    true
}

/// The rest of a send that began on the lane, natively.
///
/// # Safety
/// As [`send`].
unsafe fn rest(c: &Conn, fd: i32, iov: &mut Iov<'_>, flags: i32, part: bool) -> isize {
    let mut total = 0isize;
    let mut flags = flags & !libc::MSG_ZEROCOPY; // we count this one: see `zerocopy`
    while let Some((p, n)) = iov.take(usize::MAX) {
        // After a part of the bytes there is no SIGPIPE.
        let part = part || total > 0;
        flags |= if part { libc::MSG_NOSIGNAL } else { 0 };
        // SAFETY: the application's buffer.
        let r = signals::outside(|| unsafe { real::send(fd, p.cast(), n, flags) });
        if r < 0 {
            if part && errno() != libc::EPIPE {
                c.tx.error.put(errno()); // the kernel tells it once
            }
            return if total > 0 { total } else { r };
        }
        total += r;
        if (r as usize) < n {
            break;
        }
    }
    total
}

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
    let _inside = signals::enter();
    let Some((mut call, i)) = Call::of(fd, i) else {
        return signals::outside(native);
    };
    let c = table::conn(i);
    let l = table::local(i);
    if control::pending() {
        control::pump();
    }
    if c.rx.engaged() && !still(fd, i, c, l) {
        return signals::outside(native);
    }
    let peek = flags & libc::MSG_PEEK != 0;
    let all = flags & libc::MSG_WAITALL != 0 && !peek;
    let mut whole = flags & libc::MSG_WAITALL != 0 && peek;
    let mut iov = Iov::new(vecs);
    let mut total = 0usize;
    let mut look = false;
    let mut nowait = false;
    let mut ended = false;
    let mut until: Option<Option<u64>> = None;
    let mut cut = Cut::default();
    let mut peeks: Option<Option<u64>> = None;
    loop {
        let fd = call.fd(l);
        if !c.rx.engaged() {
            promote::evidence(i, fd, c);
            promote::try_ready(i, c, l);
            // A call that waits for everything must not be caught by the switch half-way.
            if all
                && (cut.begun() || iov.left() > PART)
                && cut.begin(i, fd, flags, libc::SO_RCVTIMEO)
            {
                // SAFETY: the application's buffers, by this function's contract.
                match unsafe { cut.recv(&mut call, (c, l), &mut iov, flags, &mut total) } {
                    Part::More => continue,
                    Part::End(r) => return r,
                    Part::Lane => {}
                }
            } else if c.rx.enter_native() {
                if !call.current(c, l) {
                    c.rx.leave_native(0);
                    return closed(total);
                }
                let goes_on = total > 0 || call.holds();
                let own = goes_on.then(|| call.native(c, l));
                let undo = || {
                    uncounted(c, fd);
                    c.rx.leave_native(0);
                };
                let flags = flags
                    | if goes_on && nowait {
                        libc::MSG_DONTWAIT
                    } else {
                        0
                    };
                let mut r = signals::or_undo(&undo, || match own {
                    None => recv_or_told(c, fd, flags, &native),
                    // SAFETY: the application's buffers, by this function's contract.
                    Some(Some(fd)) if total == 0 => recv_or_told(c, fd, flags, || unsafe {
                        remainder(fd, c, &mut iov.clone(), flags, false)
                    }),
                    // SAFETY: as above.
                    Some(Some(fd)) => unsafe { remainder(fd, c, &mut iov, flags, true) },
                    Some(None) if total > 0 => 0,
                    Some(None) => closed(0),
                });
                let ended = r == 0 && total == 0 && promote::engaged_tx(c);
                if ended && died_unread(&call, c, l) {
                    r = fail(error_now(i, call.fd(l)));
                }
                let counted = !peek && call.counts(c);
                c.rx.leave_native(if counted { r.max(0) as u64 } else { 0 });
                return total as isize + r;
            }
        }
        let Some((link, m)) = promote::lane(c, l) else {
            return match call.current(c, l) {
                true => fail(libc::ECONNRESET),
                false => closed(total),
            };
        };
        let nb = nonblocking(c, flags);
        if nb && !look {
            let now = ticks();
            look = now.wrapping_sub(c.rx.looked.load(Relaxed)) > LOOK_US * wait::cycles_per_us();
        }
        let mode = c.rx.mode.load(Relaxed);
        let how = How {
            peek,
            discard: flags & libc::MSG_TRUNC != 0,
            look,
        };
        let got = {
            let Some(_g) = lock_for(&c.rx.lock, c, flags) else {
                return fail(libc::EAGAIN);
            };
            if !call.current(c, l) {
                return closed(total);
            }
            let fd = l.fd.load(Relaxed);
            let port = Sock { fd, link };
            if c.owner_pid.load(Relaxed) != table::pid() {
                c.rx.want_down(&m, &port); // a forked child reads along until the sender is on TCP
                link.ring();
            }
            let got = c.rx.recv(&m, &port, &mut iov, how);
            // It goes on: before a closer gets the lock.
            if (all || whole) && iov.left() > 0 && matches!(got, Received::Bytes(n) if n > 0) {
                call.hold(c, l);
            }
            got
        };
        if look && got == Received::Empty {
            c.rx.looked.store(ticks(), Relaxed); // TCP was asked; with bytes on the ring it is not
        }
        match got {
            Received::Bytes(n) => {
                if c.rx.is_up() {
                    promote::promoted(c);
                }
                total += n;
                link.moved();
                if all && iov.left() > 0 && n > 0 {
                    look = false;
                    continue;
                }
                if !peek && n > 0 && iov.left() > 0 {
                    let now = c.rx.mode.load(Relaxed);
                    // What lies behind the ring, on TCP, may have been told already (`looked` is 0 then):
                    // who takes a short count for "nothing more" waits for other news.
                    let told = c.rx.is_up() && c.rx.looked.load(Relaxed) == 0;
                    let goes_on = told || now == link::lane::rx::mode::LAST || now != mode;
                    if goes_on && !call.hold(c, l) {
                        return closed(total);
                    }
                    if told || now == link::lane::rx::mode::LAST {
                        look = true;
                        nowait = true;
                        continue;
                    }
                    // The same where the switch lay inside this read.
                    if now != mode {
                        nowait = true;
                        continue;
                    }
                }
                if whole && n > 0 && iov.left() > 0 && !nonblocking(c, flags) {
                    let fd = call.fd(l);
                    let end = *peeks.get_or_insert_with(|| deadline(c, fd, libc::SO_RCVTIMEO));
                    promote::attend(c, link, &m, fd);
                    signals::outside(real::test_cancel);
                    // A peek cannot go on where it stopped: not in a second buffer from TCP, nor behind
                    // a frame that comes after the ring.
                    let up = c.rx.is_up();
                    whole = left_ms(end) != 0
                        && (up || vecs.len() == 1)
                        && more_may_come(fd, up)
                        && !signals::waiting()
                        && !signals::interrupted(true);
                    (total, iov, look) = (0, Iov::new(vecs), true);
                    continue; // once more at the end, too: something may have come before it
                }
                return total as isize;
            }
            Received::Eof => {
                c.rx.looked.store(0, Relaxed); // whoever comes again is told again
                                               // Our sending half may have met the error that the kernel does not tell any more.
                promote::attend(c, link, &m, fd);
                l.checked.store(0, Relaxed);
                return match (total, c.has_error()) {
                    (0, true) => match c.take_error_at_end() {
                        0 => 0,
                        e => fail(e),
                    },
                    _ => total as isize,
                };
            }
            Received::Error(e) => {
                l.checked.store(0, Relaxed); // the next send looks whether anybody is there
                c.rx.looked.store(0, Relaxed);
                if total > 0 {
                    c.rx.error.put(e);
                    return total as isize;
                }
                c.tx.error.take(); // the same trouble
                return fail(e);
            }
            Received::Reset(r) => return reset_now(i, call.fd(l), r, total),
            Received::Tcp => {}
            Received::Empty => {
                promote::attend(c, link, &m, fd);
                if c.rx.shut.load(Relaxed) != 0 {
                    return total as isize;
                }
                if nb || nowait || ended {
                    return match total {
                        0 if ended => fail(libc::EINTR),
                        0 => fail(libc::EAGAIN),
                        n => n as isize,
                    };
                }
                let spins = c.rx.is_up() && !look;
                if !spins && !call.hold(c, l) {
                    return closed(total);
                }
                let end = *until.get_or_insert_with(|| {
                    if spins {
                        None // first the spin: the option is asked for only before a sleep
                    } else {
                        deadline(c, call.fd(l), libc::SO_RCVTIMEO)
                    }
                });
                if spins && wait::may_spin(&l.spin) {
                    // (A spin holds nothing: whoever is closed in it had not slept.)
                    let found = wait::spin(|| m.peer_rx().cpu.load(Relaxed), || c.rx.stirs(&m));
                    wait::spun(&l.spin, found);
                    if found {
                        continue;
                    }
                }
                if !call.hold(c, l) {
                    return closed(total);
                }
                let end = match end {
                    None => {
                        let d = deadline(c, call.fd(l), libc::SO_RCVTIMEO);
                        until = Some(d);
                        d
                    }
                    d => d,
                };
                match wait::wait(i, c, l, For::Data, left_ms(end), end.is_some() || total > 0) {
                    Woke::Look { kernel } => look = kernel,
                    Woke::Timeout => {
                        return if total > 0 {
                            total as isize
                        } else {
                            fail(libc::EAGAIN)
                        }
                    }
                    // The handler has closed it.
                    Woke::Interrupted if total == 0 && !call.current(c, l) => {
                        return fail(libc::EINTR)
                    }
                    // What has come meanwhile counts for more.
                    Woke::Interrupted => (look, ended) = (true, true),
                }
            }
        }
    }
}

/// What is left of a receive whose first part came from the lane, or whose number was closed, natively.
///
/// # Safety
/// As [`recv`].
unsafe fn remainder(fd: i32, c: &Conn, iov: &mut Iov<'_>, flags: i32, part: bool) -> isize {
    let mut total = 0isize;
    let mut flags = flags;
    while let Some((p, n)) = iov.take(usize::MAX) {
        // SAFETY: the application's buffer.
        let r = signals::outside(|| unsafe { real::recv(fd, p.cast(), n, flags) });
        if r < 0 && total == 0 && !part {
            return r;
        }
        if r < 0 {
            c.rx.error.put(errno()); // the kernel tells it once
        }
        total += r.max(0);
        if r < n as isize || flags & libc::MSG_PEEK != 0 {
            break;
        }
        if flags & libc::MSG_WAITALL == 0 {
            flags |= libc::MSG_DONTWAIT; // the first buffer is full: the rest is what there is
        }
    }
    total
}

/// Bytes that a receive would find, for FIONREAD.
pub fn unread(i: u32, fd: i32) -> Option<i32> {
    let c = table::conn(i);
    if !c.rx.engaged() {
        return None;
    }
    let (link, m) = promote::lane(c, table::local(i))?;
    let _g = lock::lock(&c.rx.lock)?;
    let unread = c.rx.unread(&m, &Sock { fd, link })?;
    Some(unread.min(i32::MAX as u64) as i32)
}

/// Bytes that the application has sent and the peer's node does not have yet, besides what the kernel counts:
/// for SIOCOUTQ. On one node what is on the ring is there already, as in the peer's receive queue: it
/// outlives this process, and a close.
pub fn outstanding(i: u32) -> i32 {
    let c = table::conn(i);
    if !promote::engaged_tx(c) {
        return 0;
    }
    let Some((_, m)) = promote::lane(c, table::local(i)) else {
        return 0;
    };
    let Some(_g) = lock::lock(&c.tx.lock) else {
        return 0;
    };
    c.tx.outstanding(&m).min(i32::MAX as u64) as i32
}

/// Keeps errno over something done on the side.
pub fn quietly<T>(f: impl FnOnce() -> T) -> T {
    let e = errno();
    let r = f();
    set_errno(e);
    r
}
