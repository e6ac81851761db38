//! What one cgroup (a pod) may have: lanes, reserved ring memory, clients. Not per uid: in
//! containers everybody is root.

pub(crate) mod defaults;

use crate::os::held::Account;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

/// Tables of ended processes that are kept until they were read once more, for each process that there may be.
const KEPT: u32 = 4;

/// Limits per cgroup, from the configuration or by the machine ([`defaults`]).
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub lanes: u32,
    pub memory: u64,
    /// Of that, memory that devices read and write, which has all of its pages.
    pub pinned: u64,
    pub clients: u32,
    /// Ends that wait for their other ends.
    pub waiting: u32,
    /// Helper jobs (reading and closing descriptors) that may be under way; while they are, its control connections are not
    /// read.
    pub jobs: u32,
}

/// What limits refuse, in the order of [`Limit::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    Lanes,
    Memory,
    /// Of a link group: it has as many chunks as there may be.
    Chunks,
    Processes,
    Dialing,
    Takeovers,
    Inherited,
    Hellos,
    Nodes,
    Tools,
    Descriptors,
    Waiting,
    Pinned,
    /// Of the memory cgroup of a process, or of one above it: it is nearly full.
    Room,
}

impl Limit {
    /// All of them, by the names that monitoring shows.
    pub const ALL: [(Limit, &str); 14] = [
        (Limit::Lanes, "lanes"),
        (Limit::Memory, "memory"),
        (Limit::Chunks, "chunks"),
        (Limit::Processes, "processes"),
        (Limit::Dialing, "dialing"),
        (Limit::Takeovers, "takeovers"),
        (Limit::Inherited, "inherited"),
        (Limit::Hellos, "hellos"),
        (Limit::Nodes, "nodes"),
        (Limit::Tools, "tools"),
        (Limit::Descriptors, "descriptors"),
        (Limit::Waiting, "waiting"),
        (Limit::Pinned, "pinned"),
        (Limit::Room, "room"),
    ];
}

/// How often each limit has refused something. Statistics only: they order nothing, so all of them are `Relaxed`.
#[derive(Debug, Default)]
pub struct Refusals([AtomicU64; Limit::ALL.len()]);

impl Refusals {
    pub fn count(&self, limit: Limit) {
        self.0[limit as usize].fetch_add(1, Relaxed);
    }

    /// In the order of [`Limit::ALL`].
    pub fn all(&self) -> [u64; Limit::ALL.len()] {
        std::array::from_fn(|i| self.0[i].load(Relaxed))
    }
}

/// What one cgroup uses now. Taken on the core's thread, and possibly given back on the data plane's. The counters
/// order no other memory, so all of them are `Relaxed`.
#[derive(Debug)]
pub struct Cgroup {
    pub name: String,
    limits: Limits,
    lanes: AtomicU32,
    memory: AtomicU64,
    /// All that it was ever granted of that; it may wrap.
    granted: AtomicU64,
    pinned: AtomicU64,
    clients: AtomicU32,
    kept: AtomicU32,
    dialing: AtomicU32,
    jobs: AtomicU32,
    takeovers: AtomicU32,
    waiting: AtomicU32,
    /// Descriptors that its processes have sent, or that are connections of theirs.
    pub descriptors: Arc<Account>,
    refused: Arc<Refusals>,
    pub resume: tokio::sync::Notify,
}

/// Takes one more, up to `most`; `false` at the limit.
fn take(count: &AtomicU32, most: u32) -> bool {
    let more = |n: u32| (n < most).then(|| n + 1);
    count.fetch_update(Relaxed, Relaxed, more).is_ok()
}

fn give(count: &AtomicU32) {
    let less = |n: u32| Some(n.saturating_sub(1));
    let _ = count.fetch_update(Relaxed, Relaxed, less); // `less` never returns `None`
}

impl Cgroup {
    /// Takes one lane; `false` at the limit.
    pub fn take_lane(&self) -> bool {
        self.count(Limit::Lanes, take(&self.lanes, self.limits.lanes))
    }

    /// Counts a refusal. Returns whether it was none.
    fn count(&self, limit: Limit, granted: bool) -> bool {
        if !granted {
            self.refused(limit);
        }
        granted
    }

    /// Another limit than those that are kept here has refused something that this cgroup wanted.
    pub fn refused(&self, limit: Limit) {
        self.refused.count(limit);
    }

    pub fn give_lane(&self) {
        give(&self.lanes);
    }

    /// Reserves memory, `pinned` or not; `false` at the limit.
    pub fn take_memory(&self, bytes: u64, pinned: bool) -> bool {
        let sum = |count: &AtomicU64, most: u64| {
            let more = |n: u64| Some(n.saturating_add(bytes)).filter(|n| *n <= most);
            count.fetch_update(Relaxed, Relaxed, more).is_ok()
        };
        if !self.count(Limit::Memory, sum(&self.memory, self.limits.memory)) {
            return false;
        }
        let held = !pinned || self.count(Limit::Pinned, sum(&self.pinned, self.limits.pinned));
        if !held {
            self.give_memory(bytes, false);
        }
        if held {
            self.granted.fetch_add(bytes, Relaxed);
        }
        held
    }

    pub fn give_memory(&self, bytes: u64, pinned: bool) {
        let less = |n: u64| Some(n.saturating_sub(bytes));
        let _ = self.memory.fetch_update(Relaxed, Relaxed, less); // `less` never returns `None`
        if pinned {
            let _ = self.pinned.fetch_update(Relaxed, Relaxed, less);
        }
    }

    pub fn memory_taken(&self) -> u64 {
        self.memory.load(Relaxed)
    }

    /// All that was ever granted. It only grows, and may wrap.
    pub fn memory_granted(&self) -> u64 {
        self.granted.load(Relaxed)
    }

    /// Lanes that it has, for tests.
    pub fn lanes_taken(&self) -> u32 {
        self.lanes.load(Relaxed)
    }

    /// May another client of this cgroup connect? Counted until the guard is dropped.
    pub fn enter(self: &Arc<Self>) -> Option<Member> {
        let taken = take(&self.clients, self.limits.clients);
        self.count(Limit::Processes, taken)
            .then(|| Member(self.clone()))
    }

    /// May the table of another process that has ended be kept for this cgroup? Counted until the guard is dropped.
    pub(crate) fn keep(self: &Arc<Self>) -> Option<Kept> {
        take(&self.kept, self.limits.clients.saturating_mul(KEPT)).then(|| Kept(self.clone()))
    }

    /// May another dialing descriptor of this cgroup be served? As many as it may have clients.
    /// Counted until the guard is dropped.
    pub fn seat(self: &Arc<Self>) -> Option<Seat> {
        let taken = take(&self.dialing, self.limits.clients);
        self.count(Limit::Dialing, taken)
            .then(|| Seat(self.clone()))
    }

    /// May another lane whose other end leaves be brought to TCP for this cgroup? Counted until the guard is dropped.
    pub fn takeover(self: &Arc<Self>) -> Option<TakeoverSeat> {
        let taken = take(&self.takeovers, TAKEOVERS);
        self.count(Limit::Takeovers, taken)
            .then(|| TakeoverSeat(self.clone()))
    }

    /// May another end wait for its other end for this cgroup? Counted until the guard is dropped.
    pub fn waits(self: &Arc<Self>) -> Option<Waits> {
        let taken = take(&self.waiting, self.limits.waiting);
        self.count(Limit::Waiting, taken)
            .then(|| Waits(self.clone()))
    }

    /// Returns when a job may be started.
    pub async fn unsaturated(&self) {
        loop {
            let resumed = self.resume.notified();
            if !self.saturated() {
                return;
            }
            resumed.await;
        }
    }

    /// Counts a helper job until the guard is dropped.
    pub fn job(self: &Arc<Self>) -> Job {
        self.jobs.fetch_add(1, Relaxed);
        Job(self.clone())
    }

    /// Are so many jobs under way that no more may be started?
    pub fn saturated(&self) -> bool {
        self.jobs.load(Relaxed) >= self.limits.jobs
    }
}

/// What this daemon may have as the other client of remote link groups. Each lane takes one of its descriptors, and
/// half of its descriptors are reserved for everything else.
pub(crate) fn remote(refused: &Arc<Refusals>) -> Arc<Cgroup> {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let lanes = files.map_or(u32::MAX, |n| u32::try_from(n / 2).unwrap_or(u32::MAX));
    let limits = Limits {
        lanes,
        memory: u64::MAX,
        pinned: u64::MAX,
        clients: u32::MAX,
        waiting: u32::MAX,
        jobs: u32::MAX,
    };
    let own = Cgroups {
        refused: refused.clone(),
        ..Cgroups::new(limits)
    };
    own.get("")
}

/// A client of a cgroup.
#[derive(Debug)]
pub struct Member(pub Arc<Cgroup>);

impl Drop for Member {
    fn drop(&mut self) {
        give(&self.0.clients);
    }
}

/// A table of a process that has ended. Each is a descriptor.
#[derive(Debug)]
pub(crate) struct Kept(Arc<Cgroup>);

impl Drop for Kept {
    fn drop(&mut self) {
        give(&self.0.kept);
    }
}

/// A dialing descriptor of a cgroup.
#[derive(Debug)]
pub struct Seat(Arc<Cgroup>);

impl Drop for Seat {
    fn drop(&mut self) {
        give(&self.0.dialing);
    }
}

/// Most takeovers within the node that are under way for a cgroup. (Each takes two descriptors and three mappings.)
const TAKEOVERS: u32 = 1024;

/// A takeover of a cgroup.
#[derive(Debug)]
pub struct TakeoverSeat(Arc<Cgroup>);

impl Drop for TakeoverSeat {
    fn drop(&mut self) {
        give(&self.0.takeovers);
    }
}

/// An end that waits.
#[derive(Debug)]
pub struct Waits(Arc<Cgroup>);

impl Drop for Waits {
    fn drop(&mut self) {
        give(&self.0.waiting);
    }
}

/// A helper job of a cgroup.
#[derive(Debug)]
pub struct Job(Arc<Cgroup>);

impl Drop for Job {
    fn drop(&mut self) {
        give(&self.0.jobs);
        self.0.resume.notify_waiters();
    }
}

/// A cgroup that uses something. Its descriptors may be the last that there is of it, as long as their closes wait: whoever
/// comes from there again goes on with them.
struct Known(Weak<Cgroup>, Weak<Account>);

/// All cgroups that use anything.
pub struct Cgroups {
    limits: Limits,
    cgroups: RefCell<HashMap<String, Known>>,
    pub refused: Arc<Refusals>,
}

impl Cgroups {
    pub fn new(limits: Limits) -> Self {
        Cgroups {
            limits,
            cgroups: RefCell::default(),
            refused: Arc::default(),
        }
    }

    pub fn get(&self, name: &str) -> Arc<Cgroup> {
        let mut cgroups = self.cgroups.borrow_mut();
        let known = cgroups.get(name);
        if let Some(g) = known.and_then(|k| k.0.upgrade()) {
            return g;
        }
        let descriptors = known.and_then(|k| k.1.upgrade()).unwrap_or_default();
        cgroups.retain(|_, k| k.1.strong_count() > 0);
        let g = Arc::new(Cgroup {
            name: name.to_owned(),
            limits: self.limits,
            lanes: AtomicU32::new(0),
            memory: AtomicU64::new(0),
            granted: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
            clients: AtomicU32::new(0),
            kept: AtomicU32::new(0),
            dialing: AtomicU32::new(0),
            jobs: AtomicU32::new(0),
            takeovers: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            descriptors,
            refused: self.refused.clone(),
            resume: tokio::sync::Notify::new(),
        });
        let known = Known(Arc::downgrade(&g), Arc::downgrade(&g.descriptors));
        cgroups.insert(name.to_owned(), known);
        g
    }
}

#[cfg(test)]
pub(crate) fn for_tests(lanes: u32, memory: u64) -> Arc<Cgroup> {
    Cgroups::new(small(lanes, memory, 10)).get("/test")
}

#[cfg(test)]
fn small(lanes: u32, memory: u64, clients: u32) -> Limits {
    Limits {
        lanes,
        memory,
        pinned: memory,
        clients,
        waiting: 2,
        jobs: 64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_and_come_back() {
        let all = Cgroups::new(Limits {
            pinned: 50,
            ..small(2, 100, 1)
        });
        let g = all.get("/a");
        assert!(g.take_lane() && g.take_lane() && !g.take_lane());
        g.give_lane();
        assert!(g.take_lane());
        assert!(g.take_memory(100, false) && !g.take_memory(1, false));
        g.give_memory(1, false);
        assert!(g.take_memory(1, false) && !g.take_memory(u64::MAX, false));
        g.give_memory(60, false);
        assert!(g.take_memory(50, true) && !g.take_memory(1, true));
        assert!(g.take_memory(10, false), "what was refused is not counted");
        g.give_memory(50, true);
        assert!(!g.take_memory(51, false) && g.take_memory(50, true));
        let m = g.enter().unwrap();
        assert!(g.enter().is_none());
        drop(m);
        assert!(g.enter().is_some());
        assert!(Arc::ptr_eq(&g, &all.get("/a")));
        assert!(all.get("/b").take_lane(), "another cgroup has its own");
    }

    /// Nobody gets rid of descriptors whose closes wait by leaving and coming again.
    #[test]
    fn descriptors_stay_counted() {
        let all = Cgroups::new(small(2, 100, 1));
        let left = all.get("/a").descriptors.clone();
        assert!(Arc::ptr_eq(&left, &all.get("/a").descriptors));
        all.get("/b");
        assert!(Arc::ptr_eq(&left, &all.get("/a").descriptors));
        drop(left);
        all.get("/b");
        assert_eq!(all.cgroups.borrow().len(), 1);
    }

    /// Each limit counts what it refuses, and nothing else.
    #[test]
    fn refusals_are_counted() {
        let all = Cgroups::new(Limits {
            pinned: 50,
            ..small(1, 100, 1)
        });
        for (n, (limit, name)) in Limit::ALL.into_iter().enumerate() {
            assert_eq!(limit as usize, n, "{name}");
        }
        let g = all.get("/a");
        let (_m, _s) = (g.enter(), g.seat());
        assert!(g.take_lane() && g.take_memory(50, true) && g.take_memory(50, false));
        let _t: Vec<_> = (0..TAKEOVERS).map(|_| g.takeover()).collect();
        assert_eq!(all.refused.all(), [0; Limit::ALL.len()]);
        let _ = (g.enter(), g.seat(), g.takeover(), g.take_lane());
        let _w = (g.waits(), g.waits(), g.waits());
        let b = all.get("/b");
        let _ = (g.take_memory(1, false), b.take_memory(101, true));
        let _ = (b.take_memory(51, true), b.refused(Limit::Room));
        drop(_w);
        assert!(g.waits().is_some());
        let own = remote(&all.refused);
        own.refused(Limit::Inherited);
        let of = |limit: Limit| all.refused.all()[limit as usize];
        let shown = Limit::ALL.map(|l| of(l.0));
        assert_eq!(shown, [1, 2, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]);
    }

    #[test]
    fn jobs_saturate() {
        let g = for_tests(1, 1);
        let jobs: Vec<_> = (0..64).map(|_| g.job()).collect();
        assert!(g.saturated());
        drop(jobs);
        assert!(!g.saturated());
    }
}
