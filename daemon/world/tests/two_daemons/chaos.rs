//! What happens to the world.

use super::family::{Life, Shared};
use super::leaving::Why;
use super::node::RAILS;
use super::process::Process;
use super::seen::{note, tell};
use super::{tcp, World};
use std::cell::RefCell;
use std::rc::Rc;

/// Most processes that a node ever has.
const PROCESSES_MAX: usize = 6;

/// An end of a process.
type Place = (Rc<RefCell<Process>>, usize);

#[derive(Clone, Copy)]
enum Act {
    Wire(bool),
    Channel(bool),
    Nap,
    Fork,
    Exec,
    /// One who shares connections closes one of them.
    Close,
    Leave,
    Tcp,
    Helpers,
    Kill,
    Restart,
}

impl World {
    /// Something happens.
    pub(super) fn chaos(&self) {
        let how = &self.how;
        let mut all: Vec<(Act, u64)> = Vec::new();
        let mut may = |yes: bool, acts: &[(Act, u64)]| {
            if yes {
                all.extend(acts);
            }
        };
        may(how.wires, &[(Act::Wire(false), 2), (Act::Wire(true), 3)]);
        may(
            how.wires,
            &[(Act::Channel(false), 1), (Act::Channel(true), 2)],
        );
        may(how.naps, &[(Act::Nap, 2), (Act::Helpers, 1)]);
        may(
            how.forks,
            &[(Act::Fork, 3), (Act::Exec, 1), (Act::Close, 2)],
        );
        may(how.leaves, &[(Act::Leave, 8)]);
        may(how.full, &[(Act::Tcp, 4)]);
        may(how.kills, &[(Act::Kill, 1)]);
        may(how.restarts, &[(Act::Restart, 1)]);
        let mut n = self.below(all.iter().map(|a| a.1).sum());
        for (act, weight) in all {
            if n < weight {
                return self.happen(act);
            }
            n -= weight;
        }
    }

    fn happen(&self, act: Act) {
        let n = self.below(2) as usize;
        let rail = self.below(RAILS as u64) as usize;
        let processes = self.nodes[n].processes.borrow().len() as u64;
        let p = self.below(processes) as usize;
        let process = self.nodes[n].process(p);
        match act {
            Act::Wire(up) => self.set_wire(rail, up),
            Act::Channel(up) => self.set_channel(up),
            Act::Nap => self.nap(&mut process.borrow_mut()),
            Act::Fork => self.fork(n, p),
            Act::Exec => self.exec(&mut process.borrow_mut()),
            Act::Close => self.close(n),
            Act::Leave => self.leave(n),
            Act::Tcp => {
                let conns = self.conns.borrow();
                let k = self.below(conns.len() as u64) as usize;
                if let Some(c) = conns.get(k) {
                    tcp::disturb(c.cookies[n], &mut self.dice());
                    note("a way of TCP is disturbed");
                }
            }
            Act::Helpers => {
                let ns = [1_000_000, 50_000_000][self.below(2) as usize];
                self.nodes[n]
                    .machine
                    .helpers_sleep(self.now.get() + self.below(ns));
                note("helpers are late");
            }
            Act::Kill => self.kill(n, p),
            Act::Restart => self.restart(n),
        }
    }

    fn nap(&self, p: &mut Process) {
        // (Who leaves its lane does nothing else.)
        if p.is_leaving() || p.killed {
            return;
        }
        tell!("{} {} naps", self.now.get(), p.name);
        let ns = [1_000_000, 100_000_000, 3_000_000_000][self.below(3) as usize];
        p.busy_until = self.now.get() + self.below(ns);
        note("a process sleeps");
    }

    fn awake(&self, p: &Process) -> bool {
        !p.killed && !p.foreign && !p.unborn && p.busy_until <= self.now.get()
    }

    /// A process forks; now and then it ends at once, and its child goes on.
    fn fork(&self, n: usize, p: usize) {
        let parent = self.nodes[n].process(p);
        let few = self.nodes[n].processes.borrow().len() < PROCESSES_MAX;
        let may = few && self.awake(&parent.borrow()) && parent.borrow().may_fork();
        if !may {
            return;
        }
        let (name, pid) = self.name(n);
        let mut child = parent.borrow().fork(name, pid);
        if self.one_in(2) {
            self.nap(&mut child);
        }
        let mut all = self.nodes[n].processes.borrow_mut();
        all.push(Rc::new(RefCell::new(child)));
        drop(all);
        if self.one_in(3) {
            note("a parent ends, and its child goes on");
            self.kill(n, p);
        }
    }

    fn exec(&self, p: &mut Process) {
        if self.awake(p) && !p.is_leaving() {
            p.exec();
        }
    }

    /// Any of the ends on this node of which this is true, and whose process can do something.
    fn any(&self, n: usize, is: impl Fn(&Process, usize) -> bool) -> Option<Place> {
        let mut found = Vec::new();
        for p in self.nodes[n].processes.borrow().iter() {
            let process = p.borrow();
            let can = self.awake(&process) && !process.is_leaving();
            let held = |i: &usize| process.ends[*i].sock.is_some() && is(&process, *i);
            let ends = (0..process.ends.len()).filter(|_| can).filter(held);
            found.extend(ends.map(|i| (p.clone(), i)));
        }
        let k = self.below(found.len() as u64) as usize;
        (!found.is_empty()).then(|| found.swap_remove(k))
    }

    fn close(&self, n: usize) {
        let shared = |p: &Process, i: usize| {
            let open = {
                let e = p.ends[i].entry.borrow();
                e.life == Life::Open && !e.foreign
            };
            open && self.held_by_others(p, i)
        };
        if let Some((p, i)) = self.any(n, shared) {
            p.borrow_mut().close(i, self.now.get());
        }
    }

    /// An end leaves its lane.
    fn leave(&self, n: usize) {
        if let Some((p, i)) = self.any(n, Process::may_leave) {
            let end = p.borrow().ends[i].entry.clone();
            p.borrow_mut().leave(i, Why::Left);
            note("a connection leaves");
            self.see_both_leave(n, &end);
        }
    }

    /// Does a living process besides this one hold its `i`th end?
    fn held_by_others(&self, process: &Process, i: usize) -> bool {
        let inode = process.ends[i].entry.borrow().inode;
        process
            .machine
            .holders(inode)
            .iter()
            .any(|h| *h != process.pid)
    }

    /// The daemon of a node is killed, and another one started. What ended processes had left to it ends in its middle.
    pub fn restart(&self, n: usize) {
        tell!("{} node {n} restarts", self.now.get());
        note("a daemon is killed");
        if self.nodes[n].has_orphans() {
            note("a daemon is killed that had connections to finish");
            for c in self.conns.borrow().iter() {
                if !self.is_held(n, &c.ends[n]) {
                    c.ends[1 - n].borrow_mut().excused = true;
                }
            }
        }
        self.set_channel(false);
        self.nodes[n].restart(&mut self.dice());
        self.set_channel(true);
    }

    /// Does a living process hold this end?
    fn is_held(&self, n: usize, entry: &Shared) -> bool {
        let e = entry.borrow();
        e.life != Life::Closed && !self.nodes[n].machine.holders(e.inode).is_empty()
    }

    /// Processes have closed ends because others held them. Do they still?
    pub(super) fn see_given_up(&self) {
        for (n, node) in self.nodes.iter().enumerate() {
            let processes = node.processes.borrow();
            let all = processes
                .iter()
                .flat_map(|p| std::mem::take(&mut p.borrow_mut().given_up));
            for entry in all {
                if entry.borrow().life != Life::Closed && !self.is_held(n, &entry) {
                    note("the last of those who held a connection is gone");
                    self.is_no_more(n, &entry, false);
                }
            }
        }
    }

    /// Nobody holds an end any more, which has perhaps not sent and read everything. `nobody`: nor brings a daemon to TCP
    /// what is not there.
    fn is_no_more(&self, n: usize, entry: &Shared, nobody: bool) {
        let own = &mut *entry.borrow_mut();
        own.life = Life::Closed;
        let conns = self.conns.borrow();
        let c = conns.iter().find(|c| Rc::ptr_eq(&c.ends[n], entry));
        let peer = &mut *c.expect("known").ends[1 - n].borrow_mut();
        let all = own.app.received == own.app.expected;
        peer.app.expected = own.app.sent;
        peer.excused |= !all || own.excused || nobody;
    }

    /// A process is killed. Where TCP would have kept what it had sent, nothing of it may be lost: where it had
    /// read everything, and nothing comes after it. (Not if its daemon died before it: then its peer is reset.) Where
    /// others hold the connection, nothing happens to it at all.
    pub fn kill(&self, n: usize, p: usize) {
        let shared = self.nodes[n].process(p);
        let mut process = shared.borrow_mut();
        if process.killed {
            return;
        }
        note("a process is killed");
        for i in 0..process.ends.len() {
            if process.ends[i].sock.is_none() {
                continue;
            }
            let others = self.held_by_others(&process, i);
            let own = process.ends[i].entry.clone();
            if others {
                note(match own.borrow().lane.is_some() {
                    true => "the owner of a lane is killed, or one who shares it",
                    false => "one who shares a connection is killed",
                });
                continue;
            }
            let nobody = process.has_nobody(i);
            self.is_no_more(n, &own, nobody);
        }
        process.kill();
        let pid = process.pid;
        drop(process);
        self.nodes[n].ended(pid, &mut self.dice());
    }
}
