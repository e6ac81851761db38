//! A connection leaves its lane, as the shim's `io::leave` and `yield_lane` make it (exec, SCM_RIGHTS, `system`; a close
//! of one who shares it): its thread does nothing else meanwhile, and resets it if it takes too long.

use super::family::{Life, Shared};
use super::process::Process;
use super::seen::{note, tell};
use super::World;
use lane::half::{rx, Progress};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use underpassd::os::system::System;

/// How long a call waits that leaves a lane to another node, as in the shim.
pub const LEAVE_NS: u64 = lane::half::leave::leave_ms(true) * 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It never gets a lane again.
    Left,
    /// The same, and then the process executes another program.
    Exec,
    /// This process closes it, and others go on with it.
    Yield,
}

/// An end that is to leave.
#[derive(Clone, Copy, Debug)]
pub struct Leave {
    i: usize,
    why: Why,
    /// When it is given up. `None`: it has not begun.
    until: Option<u64>,
}

impl Leave {
    pub fn yields(i: usize, now: u64) -> Leave {
        Leave {
            i,
            why: Why::Yield,
            until: Some(now + LEAVE_NS),
        }
    }
}

/// How leaving goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    Waits,
    Done,
    /// It had to be reset: a frame that the sender has written by itself lies behind what nobody has read on TCP.
    Framed,
    /// It had to be reset: what the connection would need is on the ring alone.
    Stalled,
    /// It had to be reset because it took too long.
    Late,
}

impl World {
    /// An end on this node is to leave. Does the other one leave just then?
    pub(super) fn see_both_leave(&self, n: usize, end: &Shared) {
        let conns = self.conns.borrow();
        let c = conns.iter().find(|c| Rc::ptr_eq(&c.ends[n], end));
        let other = &c.expect("known").ends[1 - n];
        let processes = self.nodes[1 - n].processes.borrow();
        if processes.iter().any(|p| p.borrow().leaves(other)) {
            note("both ends leave at once");
        }
    }
}

impl Process {
    /// May this end begin to leave?
    pub fn may_leave(&self, i: usize) -> bool {
        let Ok(e) = self.ends[i].entry.try_borrow() else {
            return false;
        };
        let usable = e.life == Life::Open && e.lane.is_some() && !e.given_back && !e.reset;
        let ours = self.ends[i].sock.is_some() && !self.foreign && !self.unborn;
        usable && ours && self.leaving.is_empty() && !e.excused && !e.left
    }

    pub fn leave(&mut self, i: usize, why: Why) {
        tell!("{}[{i}] leaves: {why:?}", self.name);
        let until = None;
        self.leaving.push_back(Leave { i, why, until });
    }

    /// Executes another program, which has no shim: all its lanes leave, one after the other.
    pub fn exec(&mut self) {
        tell!("{} executes another program", self.name);
        for i in 0..self.ends.len() {
            self.leave(i, Why::Exec);
        }
        self.executing = true;
    }

    /// Goes on with it.
    pub fn go_on_leaving(&mut self, now: u64) -> Left {
        let Some(l) = self.leaving.front_mut() else {
            return self.go_on_executing(Left::Done);
        };
        let until = *l.until.get_or_insert(now + LEAVE_NS);
        let (i, why) = (l.i, l.why);
        self.wake_up();
        let done = self.leave_one(i, why, now > until);
        if done == Left::Waits {
            return Left::Waits;
        }
        self.leaving.pop_front();
        if done != Left::Done {
            self.abort(i);
        } else if why == Why::Yield && self.ends[i].sock.is_some() {
            let family = self.family.clone();
            let index = self.ends[i].entry.borrow().index;
            self.release(i, family.conn(index));
            self.given_up.push(self.ends[i].entry.clone());
        }
        match self.leaving.is_empty() {
            true => self.go_on_executing(done),
            false => done,
        }
    }

    /// Does it leave the lane of this end, or is it about to?
    pub fn leaves(&self, end: &Shared) -> bool {
        let mut ends = self.leaving.iter().map(|l| &self.ends[l.i].entry);
        ends.any(|e| Rc::ptr_eq(e, end))
    }

    /// Does nothing but leave lanes, or execute another program.
    pub fn is_leaving(&self) -> bool {
        self.executing || !self.leaving.is_empty()
    }

    /// All lanes have left, the last of them so. If it was for another program, that goes on.
    fn go_on_executing(&mut self, done: Left) -> Left {
        if !self.executing {
            return done;
        }
        let held = || self.ends.iter().filter(|e| e.sock.is_some());
        if held().any(|e| e.entry.try_borrow_mut().is_err()) {
            // Another process of the family is in the middle of a call.
            return match done {
                Left::Done => Left::Waits,
                _ => done,
            };
        }
        self.executing = false;
        self.foreign = true;
        self.control = None;
        self.wake_up();
        self.groups.clear();
        note("another program goes on");
        for e in self.ends.iter().filter(|e| e.sock.is_some()) {
            let e = &mut *e.entry.borrow_mut();
            e.foreign = true;
            e.registered &= e.owner != self.pid;
        }
        done
    }

    fn leave_one(&mut self, i: usize, why: Why, late: bool) -> Left {
        let shared = self.ends[i].entry.clone();
        let Ok(mut entry) = shared.try_borrow_mut() else {
            return Left::Waits;
        };
        let (e, name) = (&mut *entry, self.name.clone());
        let Some(sock) = &self.ends[i].sock else {
            return Left::Done;
        };
        e.left |= why != Why::Yield;
        let Some(c) = self.call(e, sock.as_fd()) else {
            return Left::Done;
        };
        let at = c.at;
        let held = e.app.lock_tx();
        let sent = !matches!(e.app.tx.come_down(&c.m, &c.port), Ok(Progress::Blocked));
        drop(held);
        let held = e.app.lock_rx();
        let revoked = e.app.rx.revoke(&c.m, &c.port);
        drop(held);
        let stuck = match revoked {
            Ok(rx::Revoked::Clear) if sent => {
                tell!("{name}[{i}] has left {at:x?}");
                note(match why {
                    Why::Left => "a connection has left its lane",
                    Why::Exec => "a connection has left for another program",
                    Why::Yield => "a lane was yielded",
                });
                self.give_back(e);
                if why == Why::Yield {
                    e.not_before = self.machine.now() + super::ending::AGAIN_NS;
                }
                return Left::Done;
            }
            Ok(rx::Revoked::Clear | rx::Revoked::Pending) => late,
            Ok(rx::Revoked::Impossible) | Err(_) => true,
        };
        if !stuck {
            return Left::Waits;
        }
        let rx_mode = e.app.rx.mode.load(Relaxed);
        tell!("{name}[{i}] cannot leave {at:x?}, receiver {rx_mode}, late {late}");
        match rx_mode {
            rx::mode::PREFIX if !late => Left::Framed,
            rx::mode::FIN if !late => Left::Stalled,
            _ => Left::Late,
        }
    }
}
