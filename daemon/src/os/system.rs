//! What the daemon's logic needs of the machine besides verbs and descriptors: the time, helper threads for what
//! may wait, random numbers that nobody can guess, processes, and the TCP of connections that it takes over. Tests
//! have an implementation of their own.

use crate::os::locality::Locality;
use crate::os::pool::{self, Payer};
use crate::os::{random, sockopt};
use lane::num;
use lane::os::room;
use rustix::net::SendFlags;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use underpass_admin::proc;

pub trait System: Send + Sync {
    /// Monotonic time, in ns: CLOCK_MONOTONIC, by which proofs are recorded.
    fn now(&self) -> u64;
    /// Since 1970, as files and the log have it.
    fn wall(&self) -> Duration {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        now.unwrap_or_default()
    }
    /// As `/proc/PID/stat` has the start of a process.
    fn ticks(&self) -> u64 {
        proc::now_ticks()
    }
    /// Runs on another thread what may wait for a lock or a file.
    fn help(&self, job: Box<dyn FnOnce() + Send>);
    /// The same for what has to do with a descriptor that came from outside, in the share of the one that it is counted for.
    fn help_for(&self, _payer: Payer, job: Box<dyn FnOnce() + Send>) {
        self.help(job);
    }
    fn random(&self) -> u64;
    /// Is there a process of this number in the daemon's pid namespace?
    fn lives(&self, pid: u32) -> bool;
    /// Sends on a connection's socket without blocking. An error is an errno.
    fn tcp_send(&self, sock: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, i32>;
    /// The same beyond what the socket's buffer is meant to hold ([`lane::os::room`]).
    fn tcp_send_more(&self, sock: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, i32> {
        self.tcp_send(sock, bytes)
    }
    /// Are there bytes that the other end's kernel has not acknowledged?
    fn tcp_outstanding(&self, _sock: BorrowedFd<'_>) -> bool {
        false
    }
    /// Where a connection's end is, by its address, the network namespace of its socket, and its process.
    fn locality(&self, _at: Option<BorrowedFd<'_>>, _address: IpAddr, _pid: u32) -> Locality {
        Locality::default()
    }
    /// Sequence numbers that the kernel has taken on a connection's socket; `None` if it cannot tell now.
    fn tcp_sent(&self, sock: BorrowedFd<'_>) -> Option<u64>;
}

/// This machine.
pub struct Machine;

impl System for Machine {
    fn now(&self) -> u64 {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        num::natural(t.tv_sec) * 1_000_000_000 + num::natural(t.tv_nsec)
    }

    /// On the runtime's blocking pool: inside the runtime only.
    fn help(&self, job: Box<dyn FnOnce() + Send>) {
        tokio::task::spawn_blocking(job);
    }

    fn help_for(&self, payer: Payer, job: Box<dyn FnOnce() + Send>) {
        pool::LANES.start(payer, job);
    }

    fn random(&self) -> u64 {
        random::random()
    }

    fn lives(&self, pid: u32) -> bool {
        std::path::Path::new(&format!("/proc/{pid}")).exists()
    }

    fn tcp_send(&self, sock: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, i32> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        rustix::net::send(sock, bytes, flags).map_err(|e| e.raw_os_error())
    }

    fn tcp_send_more(&self, sock: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, i32> {
        room::with_more(&sockopt::Of(sock), true, || self.tcp_send(sock, bytes))
    }

    fn tcp_outstanding(&self, sock: BorrowedFd<'_>) -> bool {
        sockopt::outstanding(sock).is_ok_and(|n| n > 0)
    }

    fn locality(&self, at: Option<BorrowedFd<'_>>, address: IpAddr, pid: u32) -> Locality {
        Locality::of(at, address, pid)
    }

    fn tcp_sent(&self, sock: BorrowedFd<'_>) -> Option<u64> {
        sockopt::tcp_position(sock).ok().map(|p| p.sent)
    }
}

/// The time, for parts that need nothing else of the machine. By default this machine's.
#[derive(Clone)]
pub struct Clock(Arc<dyn System>);

impl Clock {
    pub fn of(system: &Arc<dyn System>) -> Clock {
        Clock(system.clone())
    }

    /// Monotonic, since some moment in the past.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.0.now())
    }

    /// Time since `at`, which this clock has said.
    pub fn since(&self, at: Duration) -> Duration {
        self.now().saturating_sub(at)
    }
}

impl Default for Clock {
    fn default() -> Clock {
        Clock(Arc::new(Machine))
    }
}
