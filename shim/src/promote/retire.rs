//! Lanes that are given back: the way to another node is gone, the other end has no use for its own, the connection
//! has gone to another program, or it ends. Called with no lock held.

use super::has;
use crate::links::{Link, GONE};
use crate::port::Sock;
use crate::{control, lane, lock, probes, process, sets, table};
use core::sync::atomic::Ordering::*;
use link::family::{flag, state, Conn};
use link::lane::{rx, tx};
use link::reason::Reason;

/// Milliseconds after which a connection whose lane was given back may be registered again.
const AGAIN_MS: u64 = 200;

/// A lane that is of no use any more is given back when both directions are on TCP.
#[cold]
pub(super) fn retire(i: u32, c: &Conn) {
    let l = table::local(i);
    let Some((link, _)) = lane::of(c, l) else {
        return;
    };
    let flags = c.flags.load(Relaxed);
    let forsaken = flags & flag::FORSAKEN != 0;
    let left = flags & flag::LEFT != 0 && !link.is_far();
    if !(forsaken || left || link.is_far() && link.state.load(Relaxed) == GONE) {
        return;
    }
    // Only its owner knows which of his epoll sets watch it; an heir may when he is dead.
    let owner = c.owner_pid.load(Relaxed);
    if owner != process::me() && (left || !process::is_gone(owner)) {
        return;
    }
    let (Some(_t), Some(_r)) = (lock::try_lock(&c.tx.lock), lock::try_lock(&c.rx.lock)) else {
        return;
    };
    if forsaken && !is_clear(i, c, link) || lane::engaged(c) {
        return;
    }
    // (Who has something to tell that only the lane's registrations can tell keeps it.)
    if left && (c.has_error() || l.notifies()) {
        return;
    }
    let why = if forsaken {
        Reason::PeerDeclined
    } else {
        Reason::LinkLost
    };
    if give_back(i, c, link) && !left {
        table::later(c, why, AGAIN_MS);
        c.calls.store(0, Relaxed);
    }
}

/// The other end's lane is no more: nobody will go up, and what has come down is on TCP. Both locks held.
fn is_clear(i: u32, c: &Conn, link: &Link) -> bool {
    let l = table::local(i);
    let Some((_, m)) = lane::of(c, l) else {
        return false;
    };
    let port = Sock {
        fd: l.fd.load(Relaxed),
        link,
    };
    let was = c.tx.is_up();
    let _ = c.tx.look(&m, &port); // it may have asked for that before
    if was && !c.tx.is_up() {
        probes::went_down(c);
    }
    c.tx.mode.load(Relaxed) == tx::mode::TCP
        && matches!(c.rx.revoke(&m, &port), Ok(rx::Revoked::Clear))
}

/// The connection, on TCP in both directions, no longer has its lane. Both locks held.
fn give_back(i: u32, c: &Conn, link: &Link) -> bool {
    if c.flags
        .fetch_and(!(flag::LANE | flag::FAR | flag::FORSAKEN), Relaxed)
        & flag::LANE
        == 0
    {
        return false;
    }
    table::local(i).link.store(core::ptr::null_mut(), Release);
    tell(c, link, false);
    sets::deactivate(i);
    true
}

/// Tells the daemon that we are done with a lane; and that the other end is to give its own back, if the connection
/// goes on elsewhere.
fn tell(c: &Conn, link: &Link, goes_on: bool) {
    if !link.is_far() && c.owner_pid.load(Relaxed) != process::me() {
        return; // an heir: the daemon finishes the lanes of the dead
    }
    let slot = c.lane.load(Relaxed);
    let goes_on = goes_on || c.flags.load(Relaxed) & flag::LEFT != 0;
    match goes_on && !link.is_far() {
        true => control::lane_left(link, slot),
        false => control::lane_done(link, slot),
    }
}

/// The connection has left for good. A lane to another node must not leave a copy with the daemon, which would
/// hold back the end that its next owner makes; and at the other end of one within the node there shall be place for the next.
pub fn left(i: u32) {
    let c = table::conn(i);
    let Some((link, _)) = lane::of(c, table::local(i)) else {
        return;
    };
    if !link.is_far() {
        if !table::is_vfork_child() {
            retire(i, c); // (it has not the parent's epoll sets)
        }
        return;
    }
    let (_t, _r) = (lock::lock(&c.tx.lock), lock::lock(&c.rx.lock));
    give_back(i, c, link);
}

/// The other end does not take its lane, or has given it back: so does ours, and the connection may be registered
/// again.
pub fn lane_gone(link: &Link, lane_no: u32, i: u32, gen: u32) {
    if i as usize >= link::family::CONNS {
        return;
    }
    let c = table::conn(i);
    let l = table::local(i);
    let ours = || c.state.load(Relaxed) == state::OPEN && has(c, l, link, lane_no, gen);
    {
        let (Some(_t), Some(_r)) = (lock::lock(&c.tx.lock), lock::lock(&c.rx.lock)) else {
            return;
        };
        if !ours() {
            return;
        }
        c.flags.fetch_or(flag::FORSAKEN, Relaxed);
    }
    retire(i, c);
}

/// The connection is closed here, its lane given back, and it goes on in other processes of the family, which may get
/// one (unless something bars it: it was reset, or one of them has handed it on, or set an option, meanwhile).
pub fn yielded(c: &Conn) {
    if c.flags.load(Relaxed) & flag::DISQUALIFIED == 0 {
        table::later(c, Reason::Shared, AGAIN_MS);
        c.calls.store(0, Relaxed);
    }
}

/// The connection ends in this process: the lane is given back. `goes_on`: others have the connection.
pub fn end_lane(i: u32, goes_on: bool) {
    let c = table::conn(i);
    let l = table::local(i);
    if c.flags.load(Relaxed) & flag::REGISTERED != 0 {
        control::forget(i, c.gen.load(Relaxed));
    }
    let lane_flags = flag::LANE | flag::FAR | flag::FORSAKEN;
    if c.flags.fetch_and(!lane_flags, Relaxed) & flag::LANE == 0 {
        return;
    }
    if let Some((link, _)) = lane::of(c, l) {
        // The newest ring is remembered for the slot's next use.
        if link.state.load(Relaxed) != 0 && c.owner_pid.load(Relaxed) == process::me() {
            tell(c, link, goes_on);
        }
    }
    if let Some(t) = table::table() {
        if c.flags.load(Relaxed) & flag::PROMOTED != 0 {
            t.header.stats.ended_promoted.fetch_add(1, Relaxed);
        }
        t.count_ended(c);
    }
    l.link.store(core::ptr::null_mut(), Release);
}
