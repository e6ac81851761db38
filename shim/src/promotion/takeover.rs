//! Lanes within the node whose sending direction the daemon brings to TCP, because the other end leaves and this one
//! does nothing (`lane::half::tx::takeover`).

use super::{has, retire};
use crate::state::groups::LinkGroup;
use crate::state::{attached, table, waiters};
use crate::sys::{lock, pids};
use crate::tcp::port::Sock;
use crate::{daemon, sets};
use core::sync::atomic::Ordering::*;
use lane::family::{state, Conn};

/// We leave this lane, and the other end's ring is not on TCP: asks the daemon to bring it there, if it is within the
/// node and ours.
pub fn ask(i: u32) {
    let c = table::conn(i);
    let Some((group, _)) = attached::of(c, table::local(i)) else {
        return;
    };
    // (On behalf of another process the daemon would not do it.)
    let ours = c.owner_pid.load(Relaxed) == pids::me();
    if ours && !group.is_remote() && c.rx.engaged() {
        daemon::take_over(group, c.lane.load(Relaxed));
    }
}

/// The daemon has given a direction back, for which threads may wait.
pub fn given_back(group: &LinkGroup, lane_no: u32, i: u32, gen: u32) {
    if i as usize >= lane::family::CONNS {
        return;
    }
    let (c, l) = (table::conn(i), table::local(i));
    if c.state.load(Relaxed) != state::OPEN || !has(c, l, group, lane_no, gen) {
        return;
    }
    if let Some((group, m)) = attached::of(c, l) {
        let fd = l.fd.load(Relaxed);
        if let Some(_g) = lock::lock(&c.tx.lock) {
            let _ = c.tx.look(&m, &Sock { fd, group });
        }
    }
    retire::retire(i, c); // (the other end may have left meanwhile)
    waiters::look(i);
    sets::notify(i);
}

/// If the daemon has ended while it had this connection's direction: goes on with it. Called with no lock held.
pub fn reclaim(i: u32, c: &Conn) {
    let l = table::local(i);
    let Some((group, m)) = attached::of(c, l).filter(|(g, _)| !g.is_remote()) else {
        return;
    };
    if !daemon::has_ended() || !c.tx.awaits(&m) {
        return;
    }
    let fd = l.fd.load(Relaxed);
    let failed = match lock::lock(&c.tx.lock) {
        Some(_g) => c.tx.reclaim(&m, &Sock { fd, group }).err(),
        None => None,
    };
    if let Some(r) = failed {
        crate::tcp::reset(c, fd, r);
    }
    waiters::look(i);
    sets::notify(i);
}
