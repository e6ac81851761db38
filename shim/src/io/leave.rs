//! A connection that goes where no lane can follow: exec, SCM_RIGHTS, descriptors out of reach.

use super::reset;
use crate::links::Sock;
use crate::{lock, probes, promote, sys, table};
use core::sync::atomic::Ordering::*;
use link::reason::Reason;

/// Milliseconds that a peer gets to put bytes back on TCP, or to take them from there, before a
/// descriptor leaves; then the connection is reset.
pub const LEAVE_MS: u64 = 2000;

/// Gives a connection back to the kernel for good, before something that a lane cannot carry: both
/// directions. False: the peer did not put its bytes back in time, and the connection was reset.
pub fn leave(i: u32, fd: i32, why: Reason) -> bool {
    let c = table::conn(i);
    let l = table::local(i);
    table::bar(c, why);
    let Some((link, m)) = promote::lane(c, l) else {
        return true;
    };
    let port = Sock { fd, link };
    let end = sys::now_ms() + LEAVE_MS;
    if let Some(_g) = lock::lock(&c.tx.lock) {
        probes::restore(l);
        let was = c.tx.is_up();
        // A peer that has closed would answer a frame with a reset, where the next owner is to find an end.
        let _ = c.tx.look(&m, &port);
        let _ = c.tx.down(&m, &port);
        if was {
            promote::went_down(c);
        }
    }
    let mut stuck = None;
    loop {
        let tx_done = {
            let Some(_g) = lock::lock(&c.tx.lock) else {
                return false;
            };
            !matches!(c.tx.look(&m, &port), Ok(link::lane::Progress::Blocked))
        };
        let rx_done = {
            let Some(_g) = lock::lock(&c.rx.lock) else {
                return false;
            };
            match c.rx.revoke(&m, &port) {
                Ok(link::lane::rx::Revoked::Clear) => true,
                Ok(link::lane::rx::Revoked::Pending) => false,
                Ok(link::lane::rx::Revoked::Impossible) => {
                    stuck = Some(Reason::Stalled);
                    true
                }
                Err(r) => {
                    stuck = Some(r);
                    true
                }
            }
        };
        if let Some(r) = stuck {
            reset(c, fd, r);
            return false;
        }
        if tx_done && rx_done {
            promote::leave_far(i);
            crate::epoll::deactivate(i);
            return true;
        }
        if sys::now_ms() > end {
            reset(c, fd, Reason::Stalled);
            return false;
        }
        if !rx_done {
            link.ring();
        }
        let _ = sys::poll_ms(fd, if tx_done { 0 } else { libc::POLLOUT }, 1);
        // The peer may be a lane of this same process: do its part, too.
        promote::each(|k, other| {
            if k != i {
                if let Some((lk, mm)) = promote::lane(other, table::local(k)) {
                    if let Some(_g) = lock::try_lock(&other.tx.lock) {
                        let _ = other.tx.look(
                            &mm,
                            &Sock {
                                fd: table::local(k).fd.load(Relaxed),
                                link: lk,
                            },
                        );
                    }
                }
            }
        });
    }
}
