//! Large blocking sends and receives on TCP, of connections that may get a lane: in parts, with the
//! daemon's messages worked off in between, so that the switch can come in the middle of a call.
//!
//! The first part is the kernel's own blocking call: what it says of errors, signals and time-outs is
//! what the application sees. The others never block in the kernel; we sleep in `poll`, where the
//! daemon is heard, too. What ends a call that has moved something (a signal, a time-out, an error)
//! ends it with that count, as in the kernel.

use super::call::Call;
use super::{closed, deadline, left_ms, nonblocking, recv_or_told, send_or_told, uncounted};
use crate::table::{self, Local};
use crate::{control, promote, real, signals, sys};
use core::sync::atomic::Ordering::*;
use libc::{iovec, msghdr, pollfd};
use link::family::{flag, Conn};
use link::lane::Iov;

/// Bytes of one part. Calls that move no more are made whole.
pub const PART: usize = 64 << 10;
/// Milliseconds after a registration, or the first large call, during which calls are cut although there
/// is no lane: an end whose peer is not under Underpass waits for one for ever.
const HOPE_MS: u64 = 2000;
/// Buffers of one part.
const VECS: usize = 16;
const SIOCATMARK: u64 = 0x8905;

/// A call that is cut.
#[derive(Default)]
pub struct Cut {
    begun: bool,
    /// End of the wait that the socket's time-out allows: see [`deadline`].
    until: Option<u64>,
    /// The daemon had something to say, or is gone.
    news: bool,
}

/// What became of a part.
pub enum Part {
    /// Go on with the rest of the call.
    More,
    /// The call ends, with this result.
    End(isize),
    /// This direction has left TCP.
    Lane,
}

impl Cut {
    /// Is a call that still has to move `left` bytes made in parts? `option` has its time-out.
    #[cold]
    pub fn begin(&mut self, i: u32, fd: i32, flags: i32, option: i32) -> bool {
        let (c, l) = (table::conn(i), table::local(i));
        if self.begun {
            return true;
        }
        // (The kernel counts one call with MSG_ZEROCOPY, not its parts.)
        let whole = nonblocking(c, flags) || flags & libc::MSG_ZEROCOPY != 0;
        if whole || c.flags.load(Relaxed) & (flag::BARRED | flag::HELD) != 0 {
            return false;
        }
        promote::consider_large(i, fd, c);
        let now = sys::now_ms();
        let _ = l.hope_ms.compare_exchange(0, now, Relaxed, Relaxed);
        let hope = now < l.hope_ms.load(Relaxed).saturating_add(HOPE_MS);
        if control::fd() < 0 || !hope && c.flags.load(Relaxed) & flag::LANE == 0 {
            return false;
        }
        self.begun = true;
        self.until = deadline(c, fd, option);
        true
    }

    /// Has a call of this connection begun to be made in parts?
    pub fn begun(&self) -> bool {
        self.begun
    }

    /// Sends one part of `iov`, natively, and counts it in `total`.
    ///
    /// # Safety
    /// The buffers are the application's: readable.
    pub unsafe fn send(
        &mut self,
        call: &mut Call,
        (c, l): (&Conn, &Local),
        iov: &mut Iov<'_>,
        flags: i32,
        total: &mut usize,
    ) -> Part {
        if self.heard() {
            return Part::More; // perhaps onto the lane
        }
        let Some(fd) = descriptor(call, (c, l), *total) else {
            return Part::End(closed(*total));
        };
        let mut v = [NONE; VECS];
        let (h, want) = header(&mut v, iov.clone());
        if !c.tx.enter_native() {
            return Part::Lane;
        }
        if !call.current(c, l) {
            c.tx.leave_native(0);
            return Part::End(closed(*total));
        }
        let undo = || {
            uncounted(c, fd);
            c.tx.leave_native(0);
        };
        let r = if *total == 0 {
            // SAFETY: the application's buffers, as the kernel would have them from the call itself.
            let native = || unsafe { real::sendmsg(fd, &h, flags) };
            signals::or_undo(&undo, || send_or_told(c, native))
        } else if c.has_error() {
            c.tx.leave_native(0);
            return Part::End(*total as isize); // the next call tells it
        } else {
            let now = flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            sys::sendmsg(fd, &h, now).map_or_else(|e| -(e as isize), |n| n as isize)
        };
        let ours = call.counts(c);
        c.tx.leave_native(if ours { r.max(0) as u64 } else { 0 });
        let first = *total == 0;
        if r > 0 {
            *total += r as usize;
            iov.skip(r as usize);
        }
        if ours && r < want as isize {
            l.starved.store(1, Relaxed);
        }
        let go_on = match r {
            _ if r == want as isize => true,
            _ if first => false, // a signal, a time-out, an error: the kernel has decided
            r if r > 0 => true,
            r if r == -(libc::EAGAIN as isize) => self.wait(fd, libc::POLLOUT),
            r => {
                if r != -(libc::EPIPE as isize) {
                    c.tx.error.put(-r as i32); // the kernel tells it once
                }
                false
            }
        };
        match go_on && iov.left() > 0 {
            true => Part::More,
            false => Part::End(end(r, *total)),
        }
    }

    /// Receives one part into `iov`, natively, for a call that waits for all of it, and counts it in
    /// `total`.
    ///
    /// # Safety
    /// The buffers are the application's: writable.
    pub unsafe fn recv(
        &mut self,
        call: &mut Call,
        (c, l): (&Conn, &Local),
        iov: &mut Iov<'_>,
        flags: i32,
        total: &mut usize,
    ) -> Part {
        if self.heard() {
            return Part::More;
        }
        let Some(fd) = descriptor(call, (c, l), *total) else {
            return Part::End(closed(*total));
        };
        // The kernel does not read on behind an urgent mark.
        if *total > 0 && sys::ioctl_i32(fd, SIOCATMARK) == Ok(1) {
            return Part::End(*total as isize);
        }
        let flags = flags & !libc::MSG_WAITALL;
        let mut v = [NONE; VECS];
        let (mut h, _) = header(&mut v, iov.clone());
        if !c.rx.enter_native() {
            return Part::Lane;
        }
        if !call.current(c, l) {
            c.rx.leave_native(0);
            return Part::End(closed(*total));
        }
        let first = *total == 0;
        let to = &raw mut h;
        let undo = || {
            uncounted(c, fd);
            c.rx.leave_native(0);
        };
        let r = if first {
            // SAFETY: the application's buffers, as above.
            let native = || unsafe { real::recvmsg(fd, to, flags) };
            signals::or_undo(&undo, || recv_or_told(c, fd, flags, native))
        } else if c.has_error() {
            0
        } else {
            let now = flags | libc::MSG_DONTWAIT;
            sys::recvmsg(fd, &mut h, now).map_or_else(|e| -(e as isize), |n| n as isize)
        };
        // Until the end of the wait, too: who is asleep on TCP does not hear the ring.
        let go_on = match r {
            r if r > 0 => true,
            _ if first => false,
            r if r == -(libc::EAGAIN as isize) => {
                signals::or_undo(&undo, || self.wait(fd, libc::POLLIN))
            }
            0 => false,
            r => {
                c.rx.error.put(-r as i32);
                false
            }
        };
        let ours = call.counts(c);
        c.rx.leave_native(if ours { r.max(0) as u64 } else { 0 });
        if r > 0 {
            *total += r as usize;
            iov.skip(r as usize);
        }
        match go_on && iov.left() > 0 {
            true => Part::More,
            false => Part::End(end(r, *total)),
        }
    }

    /// Works off what the daemon has said. Never while this thread is counted as a native caller.
    fn heard(&mut self) -> bool {
        let news = core::mem::take(&mut self.news) || control::pending();
        if news {
            control::pump();
        }
        news
    }

    /// Sleeps until TCP or the daemon has something. False: the call ends with what it has.
    fn wait(&mut self, fd: i32, events: i16) -> bool {
        // Somebody may have made it non-blocking where we did not see it.
        if sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|f| f & libc::O_NONBLOCK != 0) {
            return false;
        }
        let look = |fd, events| pollfd {
            fd,
            events,
            revents: 0,
        };
        let mut p = [look(fd, events), look(control::fd(), libc::POLLIN)];
        let ms = left_ms(self.until).min(i64::from(i32::MAX));
        // SAFETY: `p` is a valid array. A cancellation point, with nothing held but perhaps a place
        // among the native callers, as in the kernel's own call.
        let poll = || unsafe { real::poll(p.as_mut_ptr(), p.len() as u64, ms as i32) };
        if signals::waiting() {
            return false; // as one that comes during the sleep
        }
        let n = signals::outside(poll);
        self.news = n > 0 && p[1].revents != 0;
        n > 0
    }
}

const NONE: iovec = iovec {
    iov_base: core::ptr::null_mut(),
    iov_len: 0,
};

/// A message of the next part of `iov`, and its length.
fn header(v: &mut [iovec; VECS], mut iov: Iov<'_>) -> (msghdr, usize) {
    let (mut n, mut bytes) = (0, 0);
    while n < VECS && bytes < PART {
        let Some((p, len)) = iov.take(PART - bytes) else {
            break;
        };
        v[n] = iovec {
            iov_base: p.cast(),
            iov_len: len,
        };
        n += 1;
        bytes += len;
    }
    // SAFETY: all-zero is a valid msghdr.
    let mut h: msghdr = unsafe { core::mem::zeroed() };
    h.msg_iov = v.as_mut_ptr();
    h.msg_iovlen = n;
    (h, bytes)
}

/// The descriptor for the next part: a call that goes on has one of its own.
fn descriptor(call: &mut Call, (c, l): (&Conn, &Local), total: usize) -> Option<i32> {
    match total > 0 || call.holds() {
        true => call.native(c, l),
        false => Some(call.fd(l)),
    }
}

/// What a call says: what was moved, or what its first part said.
fn end(last: isize, total: usize) -> isize {
    match total {
        0 => last,
        n => n as isize,
    }
}

/// A `sendfile` that is cut: it has no flag that keeps it from blocking.
impl Cut {
    /// Before a further part: waits until TCP takes something. False: the call ends with what was sent.
    pub fn may_send(&mut self, fd: i32) -> bool {
        self.heard();
        match sys::poll1(fd, libc::POLLOUT) {
            libc::POLLOUT => true,
            0 => self.wait(fd, libc::POLLOUT),
            _ => false, // an error, which the next call tells
        }
    }
}
