//! What the daemon's logic needs of the machine besides verbs and descriptors: the time, helper threads for what
//! may wait, and random numbers that nobody can guess. Tests have an implementation of their own.

use crate::random;

pub trait System: Send + Sync {
    /// Monotonic time, in ns: CLOCK_MONOTONIC, by which proofs are recorded.
    fn now(&self) -> u64;
    /// Runs on another thread what may wait for a lock or a file.
    fn help(&self, job: Box<dyn FnOnce() + Send>);
    fn random(&self) -> u64;
}

/// This machine.
pub struct Machine;

impl System for Machine {
    fn now(&self) -> u64 {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
    }

    /// On the runtime's blocking pool: inside the runtime only.
    fn help(&self, job: Box<dyn FnOnce() + Send>) {
        tokio::task::spawn_blocking(job);
    }

    fn random(&self) -> u64 {
        random::random()
    }
}
