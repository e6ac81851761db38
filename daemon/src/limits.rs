//! What one cgroup (a pod) may have: lanes, reserved ring memory, parties. Not per uid: in
//! containers everybody is root.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};

/// Most helper jobs (reading and closing descriptors) that may be under way for one cgroup; while
/// they are, its control connections are not read.
const JOBS: u32 = 64;

/// Limits per cgroup, from the configuration.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub lanes: u32,
    pub memory: u64,
    pub parties: u32,
}

/// What one cgroup uses now.
#[derive(Debug)]
pub struct Group {
    pub name: String,
    limits: Limits,
    lanes: Cell<u32>,
    memory: Cell<u64>,
    parties: Cell<u32>,
    dialing: Cell<u32>,
    jobs: Cell<u32>,
    pub resume: tokio::sync::Notify,
}

impl Group {
    /// Takes one lane; `false` at the limit.
    pub fn take_lane(&self) -> bool {
        let ok = self.lanes.get() < self.limits.lanes;
        if ok {
            self.lanes.set(self.lanes.get() + 1);
        }
        ok
    }

    pub fn give_lane(&self) {
        self.lanes.set(self.lanes.get().saturating_sub(1));
    }

    /// Reserves memory; `false` at the limit.
    pub fn take_memory(&self, bytes: u64) -> bool {
        let sum = self.memory.get().saturating_add(bytes);
        let ok = sum <= self.limits.memory;
        if ok {
            self.memory.set(sum);
        }
        ok
    }

    pub fn give_memory(&self, bytes: u64) {
        self.memory.set(self.memory.get().saturating_sub(bytes));
    }

    #[cfg(test)]
    pub fn memory_taken(&self) -> u64 {
        self.memory.get()
    }

    /// May another party of this cgroup connect? Counted until the guard is dropped.
    pub fn enter(self: &Rc<Self>) -> Option<Member> {
        (self.parties.get() < self.limits.parties).then(|| {
            self.parties.set(self.parties.get() + 1);
            Member(self.clone())
        })
    }

    /// May another dialing descriptor of this cgroup be served? As many as it may have parties.
    /// Counted until the guard is dropped.
    pub fn seat(self: &Rc<Self>) -> Option<Seat> {
        (self.dialing.get() < self.limits.parties).then(|| {
            self.dialing.set(self.dialing.get() + 1);
            Seat(self.clone())
        })
    }

    /// Counts a helper job until the guard is dropped.
    pub fn job(self: &Rc<Self>) -> Job {
        self.jobs.set(self.jobs.get() + 1);
        Job(self.clone())
    }

    /// Are so many jobs under way that no more may be started?
    pub fn saturated(&self) -> bool {
        self.jobs.get() >= JOBS
    }
}

/// The group of this daemon as a party of far lanes: each of them costs it a descriptor, and half of
/// what it may have is for everything else.
pub fn far() -> Rc<Group> {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let lanes = files.map_or(u32::MAX, |n| u32::try_from(n / 2).unwrap_or(u32::MAX));
    let limits = Limits {
        lanes,
        memory: u64::MAX,
        parties: u32::MAX,
    };
    Groups::new(limits).get("")
}

/// A party of a cgroup.
#[derive(Debug)]
pub struct Member(pub Rc<Group>);

impl Drop for Member {
    fn drop(&mut self) {
        self.0.parties.set(self.0.parties.get().saturating_sub(1));
    }
}

/// A dialing descriptor of a cgroup.
#[derive(Debug)]
pub struct Seat(Rc<Group>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.dialing.set(self.0.dialing.get().saturating_sub(1));
    }
}

/// A helper job of a cgroup.
#[derive(Debug)]
pub struct Job(Rc<Group>);

impl Drop for Job {
    fn drop(&mut self) {
        self.0.jobs.set(self.0.jobs.get().saturating_sub(1));
        self.0.resume.notify_waiters();
    }
}

/// All cgroups that use anything.
pub struct Groups {
    limits: Limits,
    groups: RefCell<HashMap<String, Weak<Group>>>,
}

impl Groups {
    pub fn new(limits: Limits) -> Self {
        Groups {
            limits,
            groups: RefCell::default(),
        }
    }

    pub fn get(&self, name: &str) -> Rc<Group> {
        let mut groups = self.groups.borrow_mut();
        if let Some(g) = groups.get(name).and_then(Weak::upgrade) {
            return g;
        }
        groups.retain(|_, g| g.strong_count() > 0);
        let g = Rc::new(Group {
            name: name.to_owned(),
            limits: self.limits,
            lanes: Cell::new(0),
            memory: Cell::new(0),
            parties: Cell::new(0),
            dialing: Cell::new(0),
            jobs: Cell::new(0),
            resume: tokio::sync::Notify::new(),
        });
        groups.insert(name.to_owned(), Rc::downgrade(&g));
        g
    }
}

#[cfg(test)]
pub fn for_tests(lanes: u32, memory: u64) -> Rc<Group> {
    Groups::new(Limits {
        lanes,
        memory,
        parties: 10,
    })
    .get("/test")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_and_come_back() {
        let all = Groups::new(Limits {
            lanes: 2,
            memory: 100,
            parties: 1,
        });
        let g = all.get("/a");
        assert!(g.take_lane() && g.take_lane() && !g.take_lane());
        g.give_lane();
        assert!(g.take_lane());
        assert!(g.take_memory(100) && !g.take_memory(1));
        g.give_memory(1);
        assert!(g.take_memory(1) && !g.take_memory(u64::MAX));
        let m = g.enter().unwrap();
        assert!(g.enter().is_none());
        drop(m);
        assert!(g.enter().is_some());
        assert!(Rc::ptr_eq(&g, &all.get("/a")));
        assert!(all.get("/b").take_lane(), "another cgroup has its own");
    }

    #[test]
    fn jobs_saturate() {
        let g = for_tests(1, 1);
        let jobs: Vec<_> = (0..JOBS).map(|_| g.job()).collect();
        assert!(g.saturated());
        drop(jobs);
        assert!(!g.saturated());
    }
}
