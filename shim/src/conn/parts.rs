//! Large blocking sends and receives on TCP, of connections that may get a lane, are made in parts. The daemon's
//! messages are processed between the parts, so that the switch can happen in the middle of a call.
//!
//! The first part is the kernel's own blocking call: the application sees its errors, signals and time-outs. The
//! later parts never block in the kernel; we sleep in `poll` instead, where the daemon's messages arrive, too. A
//! signal, a time-out or an error after a part ends the call with its count, as in the kernel.

use super::{closed, deadline, left_ms, nonblocking, short};
use crate::readiness::few;
use crate::state::table::{self, Local};
use crate::sys::{self, real, thread};
use crate::tcp::call::Call;
use crate::tcp::native::{self, header, native, rest, Native, Sleep, Way, NONE, VECS};
use crate::tcp::CLOSE_WAIT;
use crate::{daemon, errno, promotion};
use core::ops::ControlFlow::{self, Break, Continue};
use core::sync::atomic::Ordering::*;
use lane::family::{flag, Conn};
use lane::half::Iov;
use lane::num;
use libc::pollfd;

/// Bytes of one part. Calls that move no more than that are made whole.
pub const PART: usize = 64 << 10;
/// Milliseconds after a registration, or after the first large call, during which calls are cut into parts
/// although there is no lane. Without this limit, an end whose peer is not under Underpass would wait for a lane
/// for ever.
const HOPE_MS: u64 = 2000;
const AGAIN: isize = -(libc::EAGAIN as isize);

/// A call that may be made in parts.
#[derive(Default)]
pub struct Cut {
    begun: bool,
    /// End of the wait that the socket's time-out option allows: see [`deadline`].
    until: Option<u64>,
    /// The daemon had something to say, or is gone.
    news: bool,
}

impl Cut {
    /// Is a call made in parts? `option` is the socket option with its time-out; `until` is the end of its wait,
    /// if it has slept already.
    #[cold]
    pub fn begin(
        &mut self,
        (i, fd): (u32, i32),
        flags: i32,
        option: i32,
        until: &mut Option<Option<u64>>,
    ) -> bool {
        let (c, l) = (table::conn(i), table::local(i));
        if self.begun {
            return true;
        }
        // (The kernel counts one call with MSG_ZEROCOPY, not its parts.)
        let whole = nonblocking(c, flags) || flags & libc::MSG_ZEROCOPY != 0;
        if whole || c.flags.load(Relaxed) & (flag::DISQUALIFIED | flag::HELD) != 0 {
            return false;
        }
        match sys::tcp_state(fd) {
            None => return false, // the number is another file now, which may take no messages
            // The other end may have closed, and then answers the first part with a reset. The kernel would not
            // look at that reset during one call of its own, so the call stays whole.
            Some(CLOSE_WAIT) if option == libc::SO_SNDTIMEO => return false,
            Some(_) => {}
        }
        promotion::consider_large(i, fd, c);
        let now = sys::now_ms();
        let _ = l.hope_ms.compare_exchange(0, now, Relaxed, Relaxed);
        let hope = now < l.hope_ms.load(Relaxed).saturating_add(HOPE_MS);
        // (Another process, or an inlined system call, may have made the socket non-blocking.)
        if daemon::fd() < 0
            || !hope && c.flags.load(Relaxed) & flag::LANE == 0
            || native::is_nonblocking(fd)
        {
            return false;
        }
        self.begun = true;
        self.until = *until.get_or_insert_with(|| deadline(c, fd, option));
        true
    }

    /// Is this call being made in parts?
    pub fn begun(&self) -> bool {
        self.begun
    }

    /// Makes one part of a call natively, with the next buffers of `iov`, and adds its bytes to `total`. A receive
    /// waits for all bytes it asked for. Goes on (`Continue`), or ends the call with its result.
    ///
    /// # Safety
    /// The buffers are the application's, as its own call demands.
    pub unsafe fn part(
        &mut self,
        way: Way,
        call: &mut Call,
        (c, l): (&Conn, &Local),
        iov: &mut Iov<'_>,
        flags: i32,
        total: &mut usize,
    ) -> ControlFlow<isize> {
        if self.service_daemon() {
            return Continue(()); // the messages may have brought the lane
        }
        let Some(fd) = native::descriptor(call, (c, l), *total) else {
            return Break(closed(*total));
        };
        let sends = way == Way::Send;
        let (first, slept) = (*total == 0, call.holds());
        let sleep = Sleep {
            until: self.until,
            disconnects: call.disconnects(),
        };
        // As in the kernel, a receive does not continue past an urgent mark.
        if !sends && !first && super::at_mark(fd) {
            return Break(num::ssize(*total));
        }
        let flags = flags & !libc::MSG_WAITALL;
        let mut v = [NONE; VECS];
        let (mut h, want) = header(&mut v, iov.clone(), PART);
        let made = native(call, (c, l), way, true, || {
            if first {
                let (p, one) = (&raw mut h, &v[..h.msg_iovlen]);
                // SAFETY: the application's buffers, as the kernel would have them from the call itself.
                return way.or_told(c, fd, flags, || unsafe {
                    match slept {
                        true => rest(way, c, fd, Iov::new(one), flags, 0, Some(sleep)),
                        false => way.block(fd, p, flags),
                    }
                });
            }
            if c.has_error() {
                return 0; // the next call reports it
            }
            // SAFETY: as above.
            match unsafe { way.now(fd, &mut h, flags) } {
                // It stays counted as native during the wait: a thread that sleeps on TCP does not notice the
                // ring.
                AGAIN if !sends && !self.wait(fd, libc::POLLIN) => 0,
                r => r,
            }
        });
        let (r, ours) = match made {
            Native::Made { says, ours } => (says, ours),
            Native::Lane => return Continue(()),
            Native::Closed => return Break(closed(*total)),
        };
        if r > 0 {
            *total += num::count(r);
            iov.skip(num::count(r));
        }
        if sends && ours && r < num::ssize(want) {
            l.starved.store(1, Relaxed);
        }
        let whole = r == num::ssize(want);
        match self.goes_on(way, (c, fd), r, whole, first) && iov.left() > 0 {
            true => Continue(()),
            false if *total == 0 => Break(r),
            false if sends => Break(short::counted((c, l), fd, *total, iov.left())),
            false => Break(num::ssize(*total)),
        }
    }

    /// Is another part made after one with the result `r`? `whole`: it moved all that it was given; `first`: it was the
    /// first one.
    fn goes_on(
        &mut self,
        way: Way,
        (c, fd): (&Conn, i32),
        r: isize,
        whole: bool,
        first: bool,
    ) -> bool {
        let sends = way == Way::Send;
        match r {
            // (A first send that falls short was ended by a signal, a time-out or an error, as the kernel
            // decided.)
            r if r > 0 => !(sends && first) || whole,
            AGAIN if !first => !sends || self.wait(fd, libc::POLLOUT),
            r => {
                if !first && r < 0 {
                    // The kernel reports it only once.
                    way.put_error(c, fd, i32::try_from(-r).unwrap_or(libc::EIO));
                }
                false
            }
        }
    }

    /// Processes the daemon's messages. Must not be called while this thread is counted as native.
    fn service_daemon(&mut self) -> bool {
        let news = core::mem::take(&mut self.news) || daemon::pending();
        if news {
            daemon::pump();
        }
        news
    }

    /// Sleeps until TCP is ready or the daemon has a message. False: the call ends with what it has.
    fn wait(&mut self, fd: i32, events: i16) -> bool {
        let look = |fd, events| pollfd {
            fd,
            events,
            revents: 0,
        };
        let mut p = [look(fd, events), look(daemon::fd(), libc::POLLIN)];
        let ms = left_ms(self.until).min(i64::from(i32::MAX));
        // SAFETY: `p` is a valid array. A cancellation point, with nothing held but perhaps a place
        // among the native callers, as in the kernel's own call.
        let poll = || match unsafe { real::poll(p.as_mut_ptr(), p.len() as u64, num::millis(ms)) } {
            -1 if errno() == libc::EINVAL => {
                few::poll(&mut p, &mut { ms }, core::ptr::null(), |f| f())
            }
            n => n,
        };
        if thread::waiting() {
            return false; // a pending signal counts like one that arrives during the sleep
        }
        let ran = thread::ran();
        let n = crate::preserving_errno(|| thread::outside(poll));
        self.news = n > 0 && p[1].revents != 0;
        // (If the daemon's message ended the poll, n > 0 although a handler may have run. The kernel's own call
        // does not know the daemon: the signal would have ended it.)
        n > 0 && thread::ran() == ran
    }
}

/// A `sendfile` that is made in parts. It has no flag that would keep it from blocking.
impl Cut {
    /// Before a further part: waits until TCP takes something. False: the call ends with what it has sent.
    pub fn may_send(&mut self, fd: i32) -> bool {
        self.service_daemon();
        match sys::poll1(fd, libc::POLLOUT) {
            libc::POLLOUT => true,
            // (The kernel, too, looks at the blocking mode before each of its own parts.)
            0 => !native::is_nonblocking(fd) && self.wait(fd, libc::POLLOUT),
            _ => false, // an error, which the next call reports
        }
    }
}
