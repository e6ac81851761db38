//! epoll sets that watch promoted connections.
//!
//! A registration is passed to the kernel unchanged and remembered. When its connection gets a lane, the descriptor
//! moves from the application's set into an *inner* set, which also has the doorbells of its link groups, the control
//! connection, and an eventfd to wake sleepers; the inner set itself is a member of the application's set.
//! `epoll_wait` then harvests ready lanes in user space, asks the kernel, spins, and finally sleeps in the kernel,
//! counted as a sleeper on every link group.
//!
//! Lock order: a set's lock may be taken while the locks of a connection are held. The reverse is forbidden: under
//! the set's lock, the locks of connections are only tried.

mod adopted;
mod ctl;
mod harvest;
mod kernel;
mod sleep;

pub use ctl::ctl;
pub use harvest::state;
pub use sleep::wait;

use crate::readiness::wait;
use crate::sets::{regs, *};
use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::sys::{self, lock, pages};
use crate::tcp::port::Sock;
use crate::{daemon, promotion};
use adopted::{adopt_one, adopted};
use core::sync::atomic::Ordering::*;
use harvest::*;
use lane::abi::{Control, COUNTERS, LANES_PER_COUNTER, LOG};
use lane::family::{flag, state, Conn};
use lane::half::{tx, Memory};
use lane::notify;
use lane::prim::ticks;
use lane::proto::reason::Reason;
use libc::epoll_event;

/// The set is polled itself, or nested in another set: its sockets stay on, or go back to, TCP.
pub fn nest(i: u32) {
    nest_all(|f| f(i));
}

/// The same for all sets that a call concerns. `each` names them whenever it is called.
pub fn nest_all(each: impl Fn(&mut dyn FnMut(u32))) {
    let mut any = false;
    each(&mut |i| any |= refuse(i));
    if !any {
        return;
    }
    let lanes = |f: &mut dyn FnMut(u32, i32)| {
        table::each(|k, c| {
            if unservable(k) && c.flags.load(Relaxed) & flag::LANE != 0 {
                f(k, table::local(k).fd.load(Relaxed));
            }
        });
    };
    promotion::leave_all(lanes, Reason::EpollShared);
    each(&mut |i| {
        let s = set_at(i);
        if let Some(_g) = lock::lock(&s.lock) {
            retire(s);
        }
    });
}

/// From now on no connection in the set gets a lane. False: that was so before.
fn refuse(i: u32) -> bool {
    let s = set_at(i);
    adopted(i, s);
    if s.disqualified.load(Relaxed) != 0 {
        return false;
    }
    // Under the lock: a thread that attaches a lane stores the lane first, then takes this lock (`activate`) and sees
    // `disqualified`.
    if let Some(_g) = lock::lock(&s.lock) {
        s.disqualified.store(1, Relaxed);
    }
    let inner = s.inner.load(Relaxed);
    if inner >= 0 {
        // A program that watches the set from outside must not take the daemon's messages for events.
        let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_DEL, daemon::fd(), 0, 0);
    }
    true
}

/// A wait on a set begins.
#[inline(always)]
fn waited(i: u32, s: &Set) {
    if s.waited.load(Relaxed) == 0 {
        crate::preserving_errno(|| first_wait(i, s));
    }
}

/// This is the first hooked wait on the set: from now on its connections may be registered and their lanes used.
#[cold]
fn first_wait(i: u32, s: &Set) {
    if s.waited.swap(1, SeqCst) != 0 || s.refused.load(SeqCst) == 0 {
        return; // SYNC waited
    }
    table::each(|k, c| {
        let mut here = false;
        regs::each(k, |_, set| here |= set == i);
        if here {
            promotion::awaited(k, c);
            if let Some(group) = ctl::usable_lane(k) {
                activate(k, group);
                promotion::try_ready(k, c, table::local(k));
            }
        }
    });
}
