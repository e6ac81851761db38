//! What the daemon does for ends that cannot do it themselves: see `lane::half::tx::takeover`.
//!
//! An end that has shut down, closed or died leaves its ring to the daemon. When everything has arrived, the
//! daemon says so on TCP (`Fin`); otherwise it puts the ring back on TCP (`Down`). Only then does it shut the
//! socket down. An end that is asleep outside every hook when its rails fail does not see that it is asked to go
//! down; after a moment the daemon does it instead.

use super::area::Areas;
use super::inherited::LOOK_NS;
use super::lanes::{Ending, Lane, Stage, Takeover};
use super::{Finished, Key, Rails};
use crate::lanes::sock::{disconnect, unread, Sock};
use crate::os::fds::Foreign;
use crate::os::system::System;
use lane::abi::{marks, rx, tx, Epoch, TcpPos, TxPhase, TxWord};
use lane::half::tx::{claim, is_done, mode, release, Adopted, Awaited};
use lane::half::{Memory, TxState};
use lane::proto::reason::Reason;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::*;
use std::sync::Arc;
use underpass_rdma::verbs::Provider;

/// How long an end may take to go down by itself.
pub(super) const LATE_NS: u64 = 20_000_000;
/// Time between two looks while something is in progress.
const TICK_NS: u64 = 5_000_000;
/// How long bytes on the ring may take to arrive over the rails, before they are put on TCP after all.
const FLUSH_NS: u64 = 2_000_000_000;
/// How long a reader may rest before what it has not read of a ring that ends goes to TCP: should it leave its lane later,
/// nobody could put it there.
const READ_NS: u64 = 10_000_000;
/// How long a reset, or the last close of a socket, waits until what was sent before it has arrived.
const ARRIVE_NS: u64 = 1_000_000_000;
/// If the peer takes nothing from TCP for this long, it does not get the rest, as with any orphan (tcp(7),
/// tcp_orphan_retries).
const ORPHAN_NS: u64 = 100_000_000_000;

/// What a helper has to do to a socket. The socket's lock may be held for as long as its owner likes (a send whose
/// buffer faults into a file system of its own), so the daemon's own threads do nothing to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// Find out how far the process has got.
    Adopt,
    /// Say where the stream ends, if everything has arrived.
    Fin,
    /// Put the ring back on TCP.
    Down,
    /// Only shut the socket down, if that is due: the direction is on TCP.
    End,
}

pub(super) struct Job {
    at: Key,
    work: Work,
    areas: Arc<Areas>,
    sock: Arc<Foreign>,
    system: Arc<dyn System>,
    tag: u64,
    epoch: Epoch,
    tx: Box<TxState>,
    /// `fin`: then shut the socket down for sending; `over`: it is closed after that; `reset`: by a reset.
    fin: bool,
    over: bool,
    reset: bool,
    /// It was shut down before.
    shut: bool,
    /// The end has waited for long enough.
    late: bool,
    /// The reader asks for what is unread, because it leaves. (Without a rail every reader does, and there may be many.)
    leaves: bool,
}

/// Result of a job.
pub(super) enum Found {
    /// The remote node has not answered the switch yet.
    Asking,
    Held(Box<TxState>),
    /// The direction is on TCP, and the socket was shut down if that was due. How the sender came down, and whether the
    /// last close has to wait until what was sent before it has arrived.
    Down(TxPhase, bool),
    Failed(Reason),
}

/// A finished job.
pub(super) struct Done {
    at: Key,
    work: Work,
    epoch: Epoch,
    fin: bool,
    over: bool,
    found: Found,
}

impl Job {
    fn run(self) -> Done {
        let (at, work, epoch) = (self.at, self.work, self.epoch);
        let (fin, over) = (self.fin, self.over);
        let found = match self.find() {
            Some(f) => f,
            None => Found::Held(self.tx),
        };
        Done {
            at,
            work,
            epoch,
            fin,
            over,
            found,
        }
    }

    /// Is something still on its way to the other end's kernel, and may it take time?
    fn waits(&self) -> bool {
        !self.late && self.system.tcp_outstanding(self.sock.as_fd())
    }

    /// `None`: the direction is not on TCP yet.
    fn find(&self) -> Option<Found> {
        let Some(m) = self.areas.for_takeover(self.at.1) else {
            return Some(Found::Failed(Reason::Internal));
        };
        let port = Sock {
            fd: self.sock.as_fd(),
            system: &*self.system,
            leaves: self.fin || self.over || self.leaves,
        };
        let done = match self.work {
            Work::End => Ok(()),
            Work::Adopt => match self.tx.adopt(&m, &port, self.tag) {
                Ok(Adopted::Asking) => return Some(Found::Asking),
                Ok(_) => Ok(()), // if it is on TCP already, `mode` is `TCP` below
                Err(r) => Err(r),
            },
            Work::Fin => self.tx.finish(&m, &port).map(drop),
            Work::Down => self.tx.down(&m, &port).map(drop),
        };
        match done {
            Err(r) => Some(Found::Failed(r)),
            Ok(()) if self.tx.mode.load(Relaxed) != mode::TCP => None,
            Ok(()) => {
                // (A lane that is only given back is not shut down: its socket's next owner reads what there is, errors too.)
                let shuts = (self.fin || self.shut) && !self.reset;
                let unread = shuts && self.over && unread(port.fd, self.tag);
                // A frame of the other end's that meets a closed socket would be answered with a reset, and what is on its
                // way there would be lost.
                let ends = self.reset || shuts && !unread;
                if self.fin && !self.reset && !unread {
                    let _ = rustix::net::shutdown(port.fd, rustix::net::Shutdown::Write);
                }
                let waits = self.over && ends && self.waits();
                if self.reset && !waits {
                    disconnect(port.fd);
                }
                // Pairs with the Release in `TxState::say`: its end may have been quicker.
                let said = m.own_tx().state.load(Acquire).phase();
                let phase = match self.work {
                    Work::Adopt | Work::End if said > tx::DOWNING => said,
                    _ => self.tx.phase(),
                };
                Some(Found::Down(phase, waits))
            }
        }
    }
}

impl<V: Provider> Rails<V> {
    /// Looks after all lanes if that is due. Returns when to look next, if anything is in progress.
    pub(super) fn tend(&mut self, now: u64) -> Option<u64> {
        self.take_jobs();
        if now < self.tend_at {
            return Some(self.tend_at);
        }
        self.sweep_making(now);
        let all: Vec<Key> = self.lanes.keys().copied().collect();
        let mut more = false;
        for k in all {
            more |= self.tend_one(k, now);
        }
        let making = self.lanes.values().any(|l| l.stage == Stage::Making);
        let dt = match (more, making || self.has_orphaned()) {
            (true, _) => TICK_NS,
            (false, _) if now < self.busy_until => LATE_NS,
            (false, true) => LOOK_NS,
            _ => u64::MAX - now,
        };
        self.tend_at = now + dt;
        (dt < u64::MAX - now).then_some(self.tend_at)
    }

    /// Looks after one lane. Returns whether something is in progress.
    fn tend_one(&mut self, at: Key, now: u64) -> bool {
        let Some(l) = self.lanes.get_mut(&at) else {
            return false;
        };
        let (Stage::Offered, Some(remote_group)) = (l.stage, self.groups.get(&at.0)) else {
            return false;
        };
        if l.working || now < l.look_at {
            return true; // (the helper wakes us when it is done)
        }
        let areas = remote_group.area.areas();
        let Some(m) = areas.for_takeover(at.1) else {
            return false;
        };
        let node = self
            .nodes
            .get(&l.node)
            .filter(|n| n.era == remote_group.era);
        let rail = node.is_some_and(|n| n.up);
        let state = m.own_tx().state.load(Acquire); // pairs with the Release in `TxState::say`
        match l.is_due(&m, state, rail, now) {
            None => return false,
            Some(false) => return true,
            Some(true) => {}
        }
        let Some(sock) = l.sock.clone() else {
            // The process never gave us its socket; without that the lane was never invited to go up.
            match l.ending {
                Some(Ending::Over) => self.leave(at),
                _ => l.ending = None,
            }
            return false;
        };
        // A close with bytes unread (`shim/src/process/remote.rs`).
        l.reset |= l.is_over() && m.own_rx().marks.load(Acquire) & marks::RESET != 0;
        let (work, tx) = match l.next_work(&m, state, rail, now) {
            Next::Work(work, tx) => (work, tx),
            Next::Waits => return true,
            Next::Withdrawn => {
                // An end that has seen our claim in that moment must learn that it is withdrawn.
                if remote_group.area.publish(at.1) {
                    lane::notify::doorbell::ring(remote_group.bell.as_fd());
                }
                return true;
            }
            Next::Stalled => {
                self.fail(at, Reason::Stalled);
                return false;
            }
        };
        if let (Some(n), Some(id)) = (self.nodes.get_mut(&l.node), l.engine) {
            if work == Work::Down {
                n.pair.take_down(id, state.epoch());
            } else if l.ending.is_some() {
                n.pair.finish(id); // nothing will follow
            }
        }
        l.working = true;
        let leaves = rail && is_asked(&m, state, rail);
        let job = Job {
            at,
            work,
            areas,
            sock,
            system: self.system.clone(),
            tag: l.tag,
            epoch: state.epoch(),
            tx,
            fin: l.fin,
            over: l.is_over(),
            reset: l.reset,
            shut: l.shut,
            late: now >= l.ending_since + ARRIVE_NS,
            leaves,
        };
        self.start(job);
        true
    }

    /// Gives a job to a helper.
    fn start(&self, job: Job) {
        let (tell, wake) = (self.jobs.0.clone(), self.wake.clone());
        let payer = job.sock.payer().cloned();
        let work = move || {
            let _ = tell.send(Finished::Takeover(job.run()));
            super::wake::wake(wake.as_deref());
        };
        self.system.help_for(payer, Box::new(work));
    }

    /// Handles the jobs that helpers have finished.
    fn take_jobs(&mut self) {
        while let Ok(done) = self.jobs.1.try_recv() {
            match done {
                Finished::Takeover(done) => {
                    self.tend_at = 0;
                    self.job_done(done);
                }
                Finished::Locality(at, who, locality) => self.locality_found(at, who, locality),
            }
        }
    }

    fn job_done(&mut self, done: Done) {
        let (at, now) = (done.at, self.system.now());
        let awaited = |l: &&mut Lane| l.working && l.stage == Stage::Offered;
        let Some(l) = self.lanes.get_mut(&at).filter(awaited) else {
            return; // the lane has left meanwhile
        };
        l.working = false;
        let Some(remote_group) = self.groups.get(&at.0) else {
            return;
        };
        let areas = remote_group.area.areas();
        let Some(m) = areas.for_takeover(at.1) else {
            return;
        };
        let engine = (self.nodes.get_mut(&l.node), l.engine);
        match done.found {
            Found::Asking => release(&m, done.epoch),
            Found::Failed(r) => self.fail(at, r),
            Found::Held(tx) => {
                if let ((Some(n), Some(id)), Work::Fin) = (engine, done.work) {
                    if !tx.is_up() {
                        n.pair.take_down(id, done.epoch); // its frame is under way
                    }
                }
                let last = l.takeover.as_ref();
                let moved = last.map_or((TcpPos::default(), now), |c| c.moved);
                let read = last.map_or((tx.consumed(), now), |c| c.read);
                let stuck = match done.work {
                    Work::Down => tx.tcp_pos.load(Relaxed) == moved.0,
                    // What was sent last is usually there at once.
                    Work::Fin => tx.is_up(),
                    Work::Adopt | Work::End => false,
                };
                let next = if stuck { now + TICK_NS } else { now };
                l.takeover = Some(Box::new(Takeover {
                    tx,
                    moved,
                    next,
                    read,
                }));
            }
            Found::Down(phase, waits) => {
                if done.work == Work::Adopt {
                    release(&m, done.epoch);
                }
                if l.takeover.take().is_some() && remote_group.area.publish(at.1) {
                    lane::notify::doorbell::ring(remote_group.bell.as_fd());
                }
                if let (Some(n), Some(id)) = engine {
                    n.pair.take_down(id, done.epoch);
                    n.pair.is_down(id, done.epoch, phase);
                }
                l.late_since = None;
                l.fin &= !done.fin;
                l.shut |= done.fin;
                // The process may have ended further since the job began: then there is another look.
                match l.ending {
                    _ if l.fin => {}
                    Some(Ending::Over) if !done.over => {}
                    Some(Ending::Over) if waits => l.look_at = now + TICK_NS,
                    Some(Ending::Over) => self.leave(at),
                    _ => l.ending = None,
                }
            }
        }
    }
}

/// What is to be done for a lane that needs its daemon.
enum Next {
    Work(Work, Box<TxState>),
    /// The last attempt came to nothing, and the next one is due later.
    Waits,
    /// The end works, after all: our claim is withdrawn.
    Withdrawn,
    /// The peer has taken nothing for too long.
    Stalled,
}

/// What the reader of a ring that ends does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// It has read everything.
    Done,
    /// It reads, or something has yet to land.
    Reads,
    /// It has read nothing for a while.
    Rests,
}

impl Takeover {
    fn reader(&mut self, m: &Memory<'_>, now: u64) -> Reader {
        let awaited = match self.tx.is_up() {
            // (The next attempt fails if the end's words are wrong.)
            true => self.tx.awaited(m).unwrap_or(Awaited::Nothing),
            false => Awaited::Bytes,
        };
        let at = self.tx.consumed();
        if awaited == Awaited::Bytes || at != self.read.0 {
            self.read = (at, now);
        }
        match awaited {
            Awaited::Nothing => Reader::Done,
            Awaited::Reader if now >= self.read.1 + READ_NS => Reader::Rests,
            _ => Reader::Reads,
        }
    }
}

impl Lane {
    fn is_over(&self) -> bool {
        self.ending == Some(Ending::Over)
    }

    /// Is it the daemon's turn: does the lane end, is it taken over, or is its end late? As [`Lane::is_overdue`].
    fn is_due(&mut self, m: &Memory<'_>, state: TxWord, rail: bool, now: u64) -> Option<bool> {
        let untouched = |l: &Lane| l.ending.is_none() && l.takeover.is_none();
        if untouched(self) && self.is_left(m) {
            self.end(now, Ending::Over, false);
        }
        match untouched(self) {
            true => self.is_overdue(m, state, rail, now),
            false => Some(true),
        }
    }

    /// Has its end had the time that it may take to go down by itself? `None`: it does not have to.
    fn is_overdue(&mut self, m: &Memory<'_>, state: TxWord, rail: bool, now: u64) -> Option<bool> {
        let phase = state.phase();
        let late = phase == tx::DOWNING || phase == tx::UP && is_asked(m, state, rail);
        if !late || is_done(m, state) || self.sock.is_none() {
            self.late_since = None;
            return None;
        }
        let since = *self.late_since.get_or_insert(now);
        Some(now >= since + LATE_NS)
    }

    /// What a helper is to do next. Claims the direction, if it is not claimed.
    fn next_work(&mut self, m: &Memory<'_>, state: TxWord, rail: bool, now: u64) -> Next {
        let over = self.is_over();
        let (who, family) = (self.who, self.family.clone());
        let busy = || family.sending(who.conn, who.gen);
        let Some(c) = &mut self.takeover else {
            if is_done(m, state) {
                return Next::Work(Work::End, Box::default());
            }
            return match claim(m, state, || !over && busy()) {
                true => Next::Work(Work::Adopt, Box::default()),
                false => Next::Withdrawn,
            };
        };
        let at_kernel = c.tx.tcp_pos.load(Relaxed);
        if c.moved.0 != at_kernel {
            c.moved = (at_kernel, now);
        }
        if over && now >= c.moved.1 + ORPHAN_NS {
            return Next::Stalled;
        }
        let reader = c.reader(m, now);
        if now < c.next && reader != Reader::Done {
            return Next::Waits;
        }
        let tx = std::mem::take(&mut c.tx);
        let waits = reader != Reader::Rests && now < self.ending_since + FLUSH_NS;
        let fin = self.fin && rail && waits && !self.reset;
        match fin && tx.is_up() {
            true => Next::Work(Work::Fin, tx),
            false => Next::Work(Work::Down, tx),
        }
    }
}

/// Is an end that is on its ring in this state's epoch to come down?
fn is_asked(m: &Memory<'_>, state: TxWord, rail: bool) -> bool {
    let word = m.peer_rx().word.load(Relaxed); // our own word
    let up = word.epoch() == state.epoch() && word.has(rx::ACCEPTED);
    up && (!rail || word.has(rx::WANT_DOWN | rx::REVOKED))
}
