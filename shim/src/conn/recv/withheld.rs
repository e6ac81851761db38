//! Receives that must not take TCP's word. This process has shut the direction down while bytes lay unread on the ring, and they
//! are neither there any more nor on TCP yet: without a lane they would be read, so a receive that finds nothing must not take
//! that for the end. Or the other end has ended, and TCP does not say so: a receive must not sleep for it in the kernel.

use super::{fail_or, lock_for, Receiving};
use crate::state::attached;
use crate::sys;
use crate::tcp::ends;
use crate::tcp::native::ANY_NEWS;
use core::ops::ControlFlow::{self, Break, Continue};
use core::sync::atomic::Ordering::*;
use lane::abi::TcpPos;
use lane::half::rx::mode;
use lane::half::Memory;

impl Receiving<'_> {
    /// Is it so? Asked under the lock under which the receive found nothing, because they may come in the next moment.
    #[cold]
    pub(super) fn is_withheld(&self) -> bool {
        let fd = self.l.fd.load(Relaxed);
        self.c.rx.is_withheld() && sys::tcp_state(fd) != Some(sys::CLOSE)
    }

    /// The same of a direction that is on TCP again, where the kernel has reported the end.
    pub(super) fn is_pending(&self) -> bool {
        let c = self.c;
        let (Some(up_to), fd) = (c.rx.pending_until(), self.call.fd(self.l)) else {
            return false;
        };
        if c.rx.shut.load(Relaxed) == 0 || up_to == TcpPos::default() {
            return false;
        }
        let to_come = sys::tcp_info(fd).is_some_and(|k| {
            let over = matches!(k.state, sys::CLOSE | sys::CLOSE_WAIT);
            !over && TcpPos::new(k.received) < up_to
        });
        // (They may have come since then.)
        to_come || sys::ioctl_i32(fd, libc::FIONREAD).is_ok_and(|n| n > 0)
    }

    /// The same if the end of this direction, which is on TCP, is known or expected, and TCP reports neither that nor anything
    /// else (see [`ends`]): a native call would sleep on, also when the end is reported in TCP's place.
    pub(super) fn awaits_end(&self, fd: i32) -> bool {
        let (c, l) = (self.c, self.l);
        let Some((group, m)) = attached::of(c, l) else {
            return false;
        };
        // (Also a call that may not wait has it reported, when it is due.)
        let ms = ends::left_ms(c, l, group, &m);
        (ms > 0 || ms < 0 && ends::is_expected(c, l, group, &m))
            && !(self.nb || self.nowait || c.rx.engaged() || c.has_error())
            && sys::poll1(fd, ANY_NEWS) == 0
    }

    /// Sleeps until that may have changed.
    #[cold]
    pub(super) fn await_withheld(&mut self, m: &Memory) -> ControlFlow<isize> {
        let c = self.c;
        // The kernel takes nothing more, and nobody waits for them any more: what is on the ring is read there.
        if c.rx.is_deaf(m) && c.rx.mode.load(Relaxed) == mode::REVOKING {
            let lock = lock_for(&c.rx.lock, self.nb);
            if lock.is_some() && c.rx.go_on(m) {
                return Continue(());
            }
        }
        self.await_pending()
    }

    #[cold]
    pub(super) fn await_pending(&mut self) -> ControlFlow<isize> {
        if self.last_look {
            return Break(fail_or(self.total, libc::EINTR));
        }
        if self.nowait || self.nb {
            return Break(fail_or(self.total, libc::EAGAIN));
        }
        self.sleep()?;
        // (A direction that is shut down lets no sleep last: TCP reports the end all the time.)
        let _ = sys::poll_ms(-1, 0, 1);
        Continue(())
    }
}
