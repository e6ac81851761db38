//! The process at the other end of a control connection: who it is, for certain, and where it belongs. Nothing here
//! trusts what the process says about itself.

use crate::os::fds::{self, Foreign};
use crate::os::sockopt;
use lane::num;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use underpass_admin::proc;

/// A process, distinguishable from a later one with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProcId {
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start: u64,
}

/// The process at the other end of a control connection.
#[derive(Debug)]
pub struct Process {
    pub id: ProcId,
    /// Readable when it is dead.
    pidfd: Option<OwnedFd>,
    pub uid: u32,
    pub netns: u64,
    /// All that `/proc/PID/cgroup` says.
    pub cgroups: String,
    pub comm: String,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("its process is not visible from the daemon's pid namespace")]
    Invisible,
    #[error("its process is gone")]
    Gone,
    #[error(transparent)]
    Os(#[from] Errno),
}

impl Process {
    /// Identifies who connected on `sock`. `accepted` is the tick at which the connection was
    /// accepted: see below.
    pub fn of_peer(sock: BorrowedFd<'_>, accepted: u64) -> Result<Process, Error> {
        let cred = sockopt::peer_cred(sock)?;
        // For a process in a pid namespace that is not visible here, the pid is 0.
        let pid = Pid::from_raw(cred.pid).ok_or(Error::Invisible)?;
        let pidfd = match sockopt::peer_pidfd(sock) {
            Ok(fd) => fd,
            // Before Linux 6.5: by pid. If the pid was reused meanwhile, its new process started after the
            // connection was accepted.
            Err(_) => {
                let fd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
                    .map_err(|_| Error::Gone)?;
                if proc::start_time(num::bits(cred.pid)).is_none_or(|t| t > accepted) {
                    return Err(Error::Gone);
                }
                fd
            }
        };
        let pid = num::bits(cred.pid);
        let cgroups = proc::cgroups(pid).unwrap_or_default();
        let mut process = Process {
            id: ProcId {
                pid,
                start: proc::start_time(pid).ok_or(Error::Gone)?,
            },
            uid: cred.uid,
            netns: proc::netns(pid).unwrap_or(0),
            cgroups,
            comm: proc::comm(pid).unwrap_or_default(),
            pidfd: None,
        };
        // Everything above was read by pid: it is valid only if the process is still alive.
        if is_dead(pidfd.as_fd()) {
            return Err(Error::Gone);
        }
        process.pidfd = Some(pidfd);
        Ok(process)
    }

    pub fn take_pidfd(&mut self) -> Option<OwnedFd> {
        self.pidfd.take()
    }
}

/// A copy of a TCP socket of this process: the one with this cookie, which it may have as descriptor `fd`, and has with
/// this inode. `None`: it has none, or we may not look (it may belong to another user, or have given up being
/// dumpable). Only the cookie is proof: the process says the rest itself, and may have become another program. May take
/// long.
pub fn socket_of(of: ProcId, fd: Option<u32>, inode: u64, cookie: u64) -> Option<Foreign> {
    let pid = Pid::from_raw(num::signed(of.pid))?;
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
    if proc::start_time(of.pid) != Some(of.start) {
        return None; // another process by now
    }
    // (Before it is copied: the close of what is no socket may block.)
    let fd = fd.filter(|fd| proc::socket_at(of.pid, *fd) == Some(inode));
    let fd = fd.or_else(|| {
        let all = proc::descriptors(of.pid)?;
        Some(all.into_iter().find(|(_, i)| *i == inode)?.0)
    })?;
    let none = rustix::process::PidfdGetfdFlags::empty();
    let got = rustix::process::pidfd_getfd(&pidfd, num::signed(fd), none).ok()?;
    let got = Foreign::new(got);
    match sockopt::is_tcp_of(got.as_fd(), cookie) {
        true => Some(got),
        false => {
            got.close();
            None
        }
    }
}

/// Has this process ended?
pub fn is_gone(of: ProcId) -> bool {
    proc::start_time(of.pid) != Some(of.start) || proc::is_zombie(of.pid)
}

/// A pidfd is readable once its process has ended.
pub fn is_dead(pidfd: BorrowedFd<'_>) -> bool {
    !fds::events(&pidfd, PollFlags::IN).is_empty()
}
