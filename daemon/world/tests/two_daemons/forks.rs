//! Processes that descend from each other by fork, as in the shim (`fdops`, `family`): a child holds what its parent
//! holds. The lanes stay the parent's; who else uses one takes it down.

use super::family::{add_holder, is_holder, Entry};
use super::process::{Call, End, Process};
use super::seen::{note, tell};
use lane::half::tx;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use underpassd::os::system::System;

impl Process {
    /// May it fork now? (Its thread must be the one that does it.)
    pub fn may_fork(&self) -> bool {
        let free = |e: &End| match e.entry.try_borrow() {
            Ok(known) => {
                let c = self.family.conn(known.index);
                c.holders.iter().any(|h| h.load(Relaxed) == 0)
            }
            Err(_) => false,
        };
        let well = !self.killed && !self.foreign && !self.unborn;
        well && !self.is_leaving() && self.ends.iter().all(free)
    }

    /// A child is counted before it exists, and enters itself when it first runs.
    pub fn fork(&self, name: String, pid: u32) -> Process {
        tell!("{} forks {name}", self.name);
        note("fork");
        let mut child = Process::new(name, pid, self.family.clone(), self.machine.clone());
        child.groups = self.groups.iter().map(|(id, l)| (*id, l.fork())).collect();
        for e in self.ends.iter().filter(|e| e.sock.is_some()) {
            let c = self.family.conn(e.entry.borrow().index);
            c.forks.fetch_add(1, Relaxed);
            let sock = e.sock.as_ref().map(|s| Rc::new(s.try_clone().unwrap()));
            self.machine.opens(pid, c.inode.load(Relaxed));
            child.ends.push(End {
                name: e.name,
                entry: e.entry.clone(),
                sock,
            });
        }
        child.unborn = true;
        child
    }

    /// A child that runs for the first time.
    pub fn enter(&mut self) {
        self.unborn = false;
        for e in &self.ends {
            let Ok(known) = e.entry.try_borrow() else {
                self.unborn = true; // its parent is in the middle of a call
                return;
            };
            let c = self.family.conn(known.index);
            if !is_holder(c, self.pid) {
                add_holder(c, self.pid);
                c.forks.fetch_sub(1, Relaxed);
            }
        }
    }

    /// Before a call on another process's lane: it is to go down, in both directions (`promote::take_down`).
    pub fn visit(&self, e: &mut Entry, c: &Call<'_>) {
        let engaged = e.app.tx.mode.load(Relaxed) != tx::mode::TCP || e.app.rx.engaged();
        if !engaged {
            return;
        }
        note(match self.machine.lives(e.owner) {
            true => "a second process uses a lane",
            false => "a lane is used by one who inherited it",
        });
        let held = e.app.lock_tx();
        let done = e.app.tx.down(&c.m, &c.port);
        drop(held);
        assert!(done.is_ok(), "no way down: {done:?}");
        let _held = e.app.lock_rx();
        e.app.rx.want_down(&c.m, &c.port);
    }
}
