//! Lanes that are given back: the link group to another node is gone, the other end does not use its own lane, the
//! connection has gone to another program, or it ends. Called with no lock held.

use super::has;
use crate::state::groups::{LinkGroup, GONE};
use crate::state::{attached, table};
use crate::sys::{lock, pids};
use crate::tcp::port::Sock;
use crate::tcp::probes;
use crate::{daemon, sets};
use core::sync::atomic::Ordering::*;
use lane::family::{flag, state, Cause, Conn};
use lane::half;
use lane::proto::reason::Reason;

/// Milliseconds after which a connection whose lane was given back may be registered again.
const AGAIN_MS: u64 = 200;
/// The same if the other end has given its lane back. (It decides when there is a next one: this end's registration only
/// waits for its.)
const DECLINED_MS: u64 = 20;

/// Gives back a lane that has become useless, once both directions are on TCP.
#[cold]
pub(super) fn retire(i: u32, c: &Conn) {
    let l = table::local(i);
    let Some((group, _)) = attached::of(c, l) else {
        return;
    };
    let flags = c.flags.load(Relaxed);
    let given_back = flags & flag::GIVEN_BACK != 0;
    let left = flags & flag::LEFT != 0;
    if !(given_back || left || group.is_remote() && group.state.load(Relaxed) == GONE) {
        return;
    }
    // Only the owner knows which of its epoll sets watch the connection; another process may do this when the
    // owner is dead.
    let owner = c.owner_pid.load(Relaxed);
    let by_owner = left && !group.is_remote();
    if owner != pids::me() && (by_owner || !pids::is_gone(owner)) {
        return;
    }
    let (Some(_t), Some(_r)) = (lock::try_lock(&c.tx.lock), lock::try_lock(&c.rx.lock)) else {
        return;
    };
    if given_back && !is_clear(i, c, group) || attached::engaged(c) {
        return;
    }
    // (If there is something left to report that only the lane's registrations can report, the lane stays.)
    if left && (c.has_error() || l.notifies()) {
        return;
    }
    let (why, ms) = match given_back {
        true => (Reason::PeerDeclined, DECLINED_MS),
        false => (Reason::DaemonLost, AGAIN_MS),
    };
    if give_back(i, c, group) && !left {
        table::later(c, why, ms);
        c.calls.store(0, Relaxed);
    }
}

/// As [`half::is_clear`]. Both locks are held.
fn is_clear(i: u32, c: &Conn, group: &LinkGroup) -> bool {
    let l = table::local(i);
    let Some((_, m)) = attached::of(c, l) else {
        return false;
    };
    let port = Sock::new(l.fd.load(Relaxed), group);
    let was = c.tx.is_up();
    let clear = half::is_clear(&c.tx, &c.rx, &m, &port);
    if was && !c.tx.is_up() {
        probes::went_down(c, Cause::Peer);
    }
    clear
}

/// Takes the lane from a connection that is on TCP in both directions. Both locks are held.
fn give_back(i: u32, c: &Conn, group: &LinkGroup) -> bool {
    let fd = table::local(i).fd.load(Relaxed);
    c.tx.end_late(&Sock::new(fd, group)); // (within the node nobody else will)
    if c.flags
        .fetch_and(!(flag::LANE | flag::REMOTE | flag::GIVEN_BACK), Relaxed)
        & flag::LANE
        == 0
    {
        return false;
    }
    table::local(i).group.store(core::ptr::null_mut(), Release);
    tell(c, group, false);
    sets::deactivate(i);
    true
}

/// Tells the daemon that we have finished with a lane, and, if the connection continues elsewhere, that the other
/// end must give its own lane back.
fn tell(c: &Conn, group: &LinkGroup, goes_on: bool) {
    if !group.is_remote() && c.owner_pid.load(Relaxed) != pids::me() {
        return; // not the owner: the daemon ends the lanes of dead processes
    }
    let slot = c.lane.load(Relaxed);
    let goes_on = goes_on || c.flags.load(Relaxed) & flag::LEFT != 0;
    match goes_on && !group.is_remote() {
        true => daemon::lane_left(group, slot),
        false => daemon::lane_done(group, slot),
    }
}

/// The connection has left for good. For a lane to another node, the daemon must not keep a copy of the socket,
/// which would hold back the FIN of its next owner. Within the node, the other end must become free for its next
/// lane.
pub fn left(i: u32) {
    let c = table::conn(i);
    let Some((group, _)) = attached::of(c, table::local(i)) else {
        return;
    };
    if !group.is_remote() {
        if !table::is_vfork_child() {
            retire(i, c); // (a vfork child does not have the parent's epoll sets)
        }
        return;
    }
    // (A child that is about to execute a program may have no connection to the daemon, and what it owes is gone then. So the
    // owner says it: at its next call, its close or its end.)
    let owner = c.owner_pid.load(Relaxed);
    if owner == pids::me() || pids::is_gone(owner) {
        let (_t, _r) = (lock::lock(&c.tx.lock), lock::lock(&c.rx.lock));
        give_back(i, c, group);
    }
}

/// The other end has refused its lane or given it back: gives back this end's lane, too; then the connection may
/// be registered again.
pub fn lane_gone(group: &LinkGroup, lane_no: u32, i: u32, gen: u32) {
    if i as usize >= lane::family::CONNS {
        return;
    }
    let c = table::conn(i);
    let l = table::local(i);
    let ours = || c.state.load(Relaxed) == state::OPEN && has(c, l, group, lane_no, gen);
    {
        let (Some(_t), Some(_r)) = (lock::lock(&c.tx.lock), lock::lock(&c.rx.lock)) else {
            return;
        };
        if !ours() {
            return;
        }
        c.flags.fetch_or(flag::GIVEN_BACK, Relaxed);
    }
    retire(i, c);
}

/// The connection is closed here, its lane is given back, and other processes of the family continue with it. They
/// may get a lane, unless something forbids it: it was reset, or one of them has handed it on or set an option
/// meanwhile.
pub fn yielded(c: &Conn) {
    if c.flags.load(Relaxed) & flag::DISQUALIFIED == 0 {
        table::later(c, Reason::Shared, AGAIN_MS);
        c.calls.store(0, Relaxed);
    }
}

/// The connection ends in this process, and its lane is given back. `goes_on`: other processes hold the
/// connection.
pub fn end_lane(i: u32, goes_on: bool) {
    let c = table::conn(i);
    let l = table::local(i);
    if c.flags.load(Relaxed) & flag::REGISTERED != 0 {
        daemon::forget(i, c.gen.load(Relaxed));
    }
    let group = attached::of(c, l).map(|(group, _)| group);
    let had = {
        // Under both locks: who has one of them, and has found the connection on its lane, is at work on words that are
        // another connection's as soon as the daemon is told.
        let _locks = (lock::lock(&c.tx.lock), lock::lock(&c.rx.lock));
        let lane_flags = flag::LANE | flag::REMOTE | flag::GIVEN_BACK;
        c.flags.fetch_and(!lane_flags, Relaxed) & flag::LANE != 0
    };
    if !had {
        return;
    }
    if let Some(group) = group {
        // The newest ring stays noted in the slot until its next use.
        if group.state.load(Relaxed) != 0 && c.owner_pid.load(Relaxed) == pids::me() {
            tell(c, group, goes_on);
        }
    }
    if let Some(t) = table::table() {
        if c.flags.load(Relaxed) & flag::PROMOTED != 0 {
            t.header.stats.ended_promoted.fetch_add(1, Relaxed);
        }
        t.count_ended(c);
    }
    l.group.store(core::ptr::null_mut(), Release);
}
