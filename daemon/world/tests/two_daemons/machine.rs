//! The machine under a daemon: its clock, helpers, processes, and the TCP of its connections.

use super::seen::{note, tell};
use super::tcp;
use lane::proto::frame::{Frame, Kind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::Mutex;
use underpass_rdma::sim::Rng;
use underpassd::os::system::System;

pub type Job = Box<dyn FnOnce() + Send>;

pub struct Machine {
    pub now: AtomicU64,
    jobs: Mutex<VecDeque<Job>>,
    helped: AtomicU64,
    helpers_sleep_until: AtomicU64,
    /// What daemons are told of the bytes that they have put on TCP: have some not arrived?
    pub outstanding: AtomicBool,
    rng: Mutex<Rng>,
    /// Living processes, and the sockets that each of them holds, by inode: what `/proc` says.
    processes: Mutex<BTreeMap<u32, BTreeSet<u64>>>,
}

impl Machine {
    pub fn new(seed: u64) -> Machine {
        Machine {
            now: AtomicU64::new(super::START_NS),
            jobs: Mutex::default(),
            helped: AtomicU64::new(0),
            helpers_sleep_until: AtomicU64::new(0),
            outstanding: AtomicBool::new(false),
            rng: Mutex::new(Rng(seed)),
            processes: Mutex::default(),
        }
    }

    /// Any of the jobs that wait for a helper.
    pub fn job(&self, rng: &mut Rng) -> Option<Job> {
        if self.now() < self.helpers_sleep_until.load(Relaxed) {
            return None;
        }
        let mut jobs = self.jobs.lock().unwrap();
        let n = rng.below(jobs.len() as u64) as usize;
        jobs.remove(n)
    }

    /// Nobody has time to help until then.
    pub fn helpers_sleep(&self, until: u64) {
        self.helpers_sleep_until.store(until, Relaxed);
    }

    /// Jobs that there ever were for helpers.
    pub fn helped(&self) -> u64 {
        self.helped.load(Relaxed)
    }

    pub fn jobs(&self) -> usize {
        self.jobs.lock().unwrap().len()
    }

    /// The daemon has ended, with its helpers.
    pub fn forget_jobs(&self) {
        self.jobs.lock().unwrap().clear();
    }

    pub fn begins(&self, pid: u32) {
        self.processes.lock().unwrap().insert(pid, BTreeSet::new());
    }

    pub fn ends(&self, pid: u32) {
        self.processes.lock().unwrap().remove(&pid);
    }

    pub fn opens(&self, pid: u32, inode: u64) {
        let mut all = self.processes.lock().unwrap();
        all.get_mut(&pid).expect("alive").insert(inode);
    }

    pub fn closes(&self, pid: u32, inode: u64) {
        if let Some(p) = self.processes.lock().unwrap().get_mut(&pid) {
            p.remove(&inode);
        }
    }

    /// A process that holds this socket.
    pub fn holder(&self, inode: u64) -> Option<u32> {
        self.holders(inode).first().copied()
    }

    /// All of them.
    pub fn holders(&self, inode: u64) -> Vec<u32> {
        let all = self.processes.lock().unwrap();
        let of = all.iter().filter(|(_, held)| held.contains(&inode));
        of.map(|(pid, _)| *pid).collect()
    }
}

/// What a daemon puts on TCP in an end's stead.
fn named(bytes: &[u8]) -> &'static str {
    let frame = bytes.try_into().ok().and_then(Frame::decode);
    match frame.map(|f| f.kind) {
        Some(Kind::Down) => "a daemon puts a ring back on TCP",
        Some(Kind::Fin) => "a daemon says where a stream ends",
        None => "a daemon sends bytes of a ring, or the rest of a frame",
    }
}

impl System for Machine {
    fn now(&self) -> u64 {
        self.now.load(Relaxed)
    }

    fn help(&self, job: Job) {
        self.helped.fetch_add(1, Relaxed);
        self.jobs.lock().unwrap().push_back(job);
    }

    fn random(&self) -> u64 {
        self.rng.lock().unwrap().next_u64()
    }

    fn lives(&self, pid: u32) -> bool {
        self.processes.lock().unwrap().contains_key(&pid)
    }

    fn tcp_send(&self, sock: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, i32> {
        let sent = tcp::send(sock, bytes, true);
        if sent.is_ok() {
            note(named(bytes));
        }
        let (now, cookie) = (self.now(), tcp::cookie(sock));
        tell!("{now} a daemon sends {} on {cookie}: {sent:?}", bytes.len());
        sent
    }

    fn tcp_outstanding(&self, _sock: BorrowedFd<'_>) -> bool {
        self.outstanding.load(Relaxed)
    }

    fn tcp_sent(&self, sock: BorrowedFd<'_>) -> Option<u64> {
        tcp::sent(sock, true)
    }
}
