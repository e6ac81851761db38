//! Lanes within the node whose sending direction the daemon brings to TCP, because the other end leaves and this one
//! does nothing, or because this one leaves and may not have as much of TCP (`lane::half::tx::takeover`).

use super::{has, retire};
use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::state::{attached, waiters};
use crate::sys::{self, lock, pids};
use crate::tcp::port::Sock;
use crate::tcp::probes;
use crate::{daemon, sets};
use core::sync::atomic::Ordering::*;
use lane::family::{state, Cause, Conn};
use lane::half::tx::mode;
use lane::half::Memory;
use lane::proto::reason::Reason;

/// Number of waits in which a peer that runs does its part by itself.
const ASK_AFTER: u32 = 1;
/// Milliseconds after which the daemon is asked again: the peer was at work when it looked.
const ASK_AGAIN_MS: u64 = 100;
/// Number of waits of a millisecond; each later one is twice as long, up to the longest, so that they are few however long
/// the daemon takes.
const SHORT_WAITS: u32 = 4;
const LONGEST_LOG2: u32 = 5;
/// Number of waits without which no connection is given up.
const ENOUGH_WAITS: u32 = 10;

/// The waits of a call that leaves lanes, and when the daemon is to be asked.
pub struct Asked {
    waits: u32,
    /// Not before this time (CLOCK_MONOTONIC, ms).
    due_ms: u64,
}

impl Asked {
    /// Nobody has waited yet.
    pub fn new() -> Self {
        Asked {
            waits: 0,
            due_ms: 0,
        }
    }

    /// Milliseconds for the next wait.
    pub fn wait_ms(&self) -> u32 {
        1 << self.waits.saturating_sub(SHORT_WAITS).min(LONGEST_LOG2)
    }

    /// Were there enough for all others to do their part?
    pub fn has_waited_enough(&self) -> bool {
        self.waits >= ENOUGH_WAITS
    }

    /// Before each wait: is the daemon to be asked now?
    pub fn is_due(&mut self) -> bool {
        // (A child that was just forked is greeted meanwhile. A vfork child has the parent's connection.)
        let now = sys::now_ms();
        let due = self.waits >= ASK_AFTER && now >= self.due_ms;
        let is = due && (table::is_vfork_child() || daemon::ensure());
        if is {
            self.due_ms = now + ASK_AGAIN_MS;
        }
        self.waits += 1;
        is
    }

    /// We leave this lane, and what is on its rings is not on TCP: asks the daemon to bring it there.
    pub fn ask(&mut self, i: u32) {
        if !ask(i) {
            self.due_ms = 0; // again after the next wait
        }
    }
}

/// Asks about one lane, if it is within the node. False: the daemon could not be asked.
fn ask(i: u32) -> bool {
    let c = table::conn(i);
    match attached::of(c, table::local(i)) {
        Some((group, m)) if !group.is_remote() => {
            let ask = |ours| daemon::take_over(group, c.lane.load(Relaxed), ours);
            let stuck = c.tx.mode.load(Relaxed) == mode::DRAIN && !c.tx.awaits(&m);
            (!c.rx.engaged() || ask(false)) && (!stuck || ask(true))
        }
        _ => true,
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
        let _ = take_back(c, l, (group, &m));
    }
    retire::retire(i, c); // (the other end may have left meanwhile)
    waiters::look(i);
    sets::notify(i);
}

/// The daemon has given the direction back, or has ended: goes on with it.
fn take_back(c: &Conn, l: &Local, (group, m): (&LinkGroup, &Memory)) -> Result<(), Reason> {
    let Some(_g) = lock::lock(&c.tx.lock) else {
        return Ok(());
    };
    let fd = l.fd.load(Relaxed);
    if !attached::is_still(c, group, m) || !table::is_at(c, fd) {
        return Ok(()); // closed meanwhile
    }
    let port = Sock::new(fd, group);
    let was = c.tx.is_up();
    let step = match c.tx.awaits(m) && is_orphaned(c) {
        true => c.tx.reclaim(m, &port),
        false => c.tx.look(m, &port),
    };
    if was && !c.tx.is_up() {
        probes::went_down(c, Cause::TakenOver);
    }
    c.tx.end_late(&port);
    step.map(drop)
}

/// Has the daemon ended that was at work for the process whose lane it is? (What another process's control connection says
/// counts for that one only, as long as it lives.)
pub fn is_orphaned(c: &Conn) -> bool {
    let owner = c.owner_pid.load(Relaxed);
    daemon::has_ended() && (owner == pids::me() || pids::is_gone(owner))
}

/// If the daemon has ended while it had this connection's direction, or has just given it back: goes on with it. Called
/// with no lock held.
pub fn reclaim(i: u32, c: &Conn) {
    let l = table::local(i);
    let Some((group, m)) = attached::of(c, l).filter(|(g, _)| !g.is_remote()) else {
        return;
    };
    let orphaned = || c.tx.awaits(&m) && is_orphaned(c);
    if !c.tx.is_through(&m) && !orphaned() {
        return;
    }
    if let Err(r) = take_back(c, l, (group, &m)) {
        crate::tcp::reset_if_open(c, l, r);
    }
    waiters::look(i);
    sets::notify(i);
}
