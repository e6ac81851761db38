//! Large blocking sends and receives on TCP, of connections that may get a lane: in parts, with the
//! daemon's messages worked off in between, so that the switch can come in the middle of a call.
//!
//! The first part is the kernel's own blocking call: what it says of errors, signals and time-outs is
//! what the application sees. The others never block in the kernel; we sleep in `poll`, where the
//! daemon is heard, too. What ends a call that has moved something (a signal, a time-out, an error)
//! ends it with that count, as in the kernel.

use super::{closed, deadline, left_ms, nonblocking, short};
use crate::few;
use crate::table::{self, Local};
use crate::tcp::call::Call;
use crate::tcp::native::{self, header, native, rest, Native, Sleep, Way, NONE, VECS};
use crate::tcp::CLOSE_WAIT;
use crate::{control, errno, promote, real, sys, thread};
use core::ops::ControlFlow::{self, Break, Continue};
use core::sync::atomic::Ordering::*;
use libc::pollfd;
use link::family::{flag, Conn};
use link::lane::Iov;

/// Bytes of one part. Calls that move no more are made whole.
pub const PART: usize = 64 << 10;
/// Milliseconds after a registration, or the first large call, during which calls are cut although there
/// is no lane: an end whose peer is not under Underpass waits for one for ever.
const HOPE_MS: u64 = 2000;
const AGAIN: isize = -(libc::EAGAIN as isize);

/// A call that is cut.
#[derive(Default)]
pub struct Cut {
    begun: bool,
    /// End of the wait that the socket's time-out allows: see [`deadline`].
    until: Option<u64>,
    /// The daemon had something to say, or is gone.
    news: bool,
}

impl Cut {
    /// Is a call that still has to move `left` bytes made in parts? `option` has its time-out; a call that
    /// has slept knows the end of that.
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
            None => return false, // something else by now, which may take no messages
            // Its other end has closed, perhaps: that answers the first part with a reset, which the kernel does not look
            // at while one call of its own is under way.
            Some(CLOSE_WAIT) if option == libc::SO_SNDTIMEO => return false,
            Some(_) => {}
        }
        promote::consider_large(i, fd, c);
        let now = sys::now_ms();
        let _ = l.hope_ms.compare_exchange(0, now, Relaxed, Relaxed);
        let hope = now < l.hope_ms.load(Relaxed).saturating_add(HOPE_MS);
        // (Somebody may have made it non-blocking where we did not see it.)
        if control::fd() < 0
            || !hope && c.flags.load(Relaxed) & flag::LANE == 0
            || native::is_nonblocking(fd)
        {
            return false;
        }
        self.begun = true;
        self.until = *until.get_or_insert_with(|| deadline(c, fd, option));
        true
    }

    /// Has a call of this connection begun to be made in parts?
    pub fn begun(&self) -> bool {
        self.begun
    }

    /// Makes one part of a call, natively, with what is next in `iov`, and counts it in `total`. A receive waits
    /// for all of it. Goes on, or ends the call with its result.
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
        if self.heard() {
            return Continue(()); // perhaps onto the lane
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
        // The kernel does not read on behind an urgent mark.
        if !sends && !first && super::at_mark(fd) {
            return Break(*total as isize);
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
                return 0; // the next call tells it
            }
            // SAFETY: as above.
            match unsafe { way.now(fd, &mut h, flags) } {
                // Counted until the end of the wait: who is asleep on TCP does not hear the ring.
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
            *total += r as usize;
            iov.skip(r as usize);
        }
        if sends && ours && r < want as isize {
            l.starved.store(1, Relaxed);
        }
        let more = match r {
            // (A first send that falls short: a signal, a time-out, an error. The kernel has decided.)
            r if r > 0 => !(sends && first) || r == want as isize,
            AGAIN if !first => !sends || self.wait(fd, libc::POLLOUT),
            r => {
                if !first && r < 0 {
                    way.put_error(c, fd, -r as i32); // the kernel tells it once
                }
                false
            }
        };
        match more && iov.left() > 0 {
            true => Continue(()),
            false if *total == 0 => Break(r),
            false if sends => Break(short::counted((c, l), fd, *total, iov.left())),
            false => Break(*total as isize),
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
        let look = |fd, events| pollfd {
            fd,
            events,
            revents: 0,
        };
        let mut p = [look(fd, events), look(control::fd(), libc::POLLIN)];
        let ms = left_ms(self.until).min(i64::from(i32::MAX));
        // SAFETY: `p` is a valid array. A cancellation point, with nothing held but perhaps a place
        // among the native callers, as in the kernel's own call.
        let poll = || match unsafe { real::poll(p.as_mut_ptr(), p.len() as u64, ms as i32) } {
            -1 if errno() == libc::EINVAL => {
                few::poll(&mut p, &mut { ms }, core::ptr::null(), |f| f())
            }
            n => n,
        };
        if thread::waiting() {
            return false; // as one that comes during the sleep
        }
        let ran = thread::ran();
        let n = crate::preserving_errno(|| thread::outside(poll));
        self.news = n > 0 && p[1].revents != 0;
        // (A handler may run when the daemon, of which the kernel's own call knows nothing, has ended the sleep.)
        n > 0 && thread::ran() == ran
    }
}

/// A `sendfile` that is cut: it has no flag that keeps it from blocking.
impl Cut {
    /// Before a further part: waits until TCP takes something. False: the call ends with what was sent.
    pub fn may_send(&mut self, fd: i32) -> bool {
        self.heard();
        match sys::poll1(fd, libc::POLLOUT) {
            libc::POLLOUT => true,
            // (The kernel asks before each of its own parts.)
            0 => !native::is_nonblocking(fd) && self.wait(fd, libc::POLLOUT),
            _ => false, // an error, which the next call tells
        }
    }
}
