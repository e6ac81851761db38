//! Remote lanes whose link group is gone: back to TCP, and then given back (`retire`). Called with no lock held.

use super::set_reason;
use crate::daemon;
use crate::state::groups::{LinkGroup, GONE};
use crate::state::{attached, table};
use crate::sys::lock;
use crate::tcp::port::Sock;
use crate::tcp::probes;
use core::sync::atomic::Ordering::*;
use lane::family::{flag, Cause, Conn};
use lane::half::tx;
use lane::proto::reason::Reason;

/// The link group to the other node is gone, or the daemon that serves it: the connection continues on TCP, and may be
/// promoted again.
pub(super) fn gone(i: u32, c: &Conn, group: &LinkGroup) {
    let l = table::local(i);
    let Some((_, m)) = attached::of(c, l) else {
        return;
    };
    let fd = l.fd.load(Relaxed);
    let port = Sock::new(fd, group);
    let mut poisoned = None;
    if let Some(_g) = lock::lock(&c.tx.lock) {
        let was = c.tx.is_up();
        poisoned = c.tx.leave_group(&m, &port, group.is_dead()).err();
        if was && !c.tx.is_up() {
            probes::went_down(c, Cause::Daemon);
        }
        c.tx.end_late(&port);
    }
    if let Some(_g) = lock::lock(&c.rx.lock) {
        poisoned = poisoned.or(c.rx.orphan(&m).err());
    }
    match poisoned {
        Some(r) => crate::tcp::reset_if_open(c, l, r),
        None => set_reason(c, Reason::DaemonLost),
    }
}

/// The daemon has greeted us, perhaps not for the first time. Shutdowns that it was told of over an earlier
/// control connection may be lost: tells it again.
pub fn greeted() {
    table::each(|i, c| {
        if c.flags.load(Relaxed) & flag::REMOTE == 0 || c.tx.shut.load(Relaxed) == 0 {
            return;
        }
        let of = attached::of(c, table::local(i)).filter(|(k, _)| k.state.load(Relaxed) != GONE);
        if let Some((group, _)) = of.filter(|_| c.tx.mode.load(Relaxed) != tx::mode::TCP) {
            let _ = daemon::lane_shut(group, c.lane.load(Relaxed));
        }
    });
}
