//! What exec and spawn mean for connections that the other program gets.

use crate::promotion;
use crate::state::fdtab::{self, Fd};
use crate::state::{attached, table};
use crate::sys::{self, env, pids, thread};
use crate::{daemon, sets, tcp};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use lane::family::flag;

/// Before the program is replaced: every lane on a descriptor that survives leaves. If one cannot in time, its
/// connection is reset, so that the new program does not lose bytes silently.
pub fn before_exec() {
    if table::table().is_none() || env::off() {
        return;
    }
    let vfork_child = sys::getpid() != pids::pid();
    if !vfork_child {
        // The FIN of a connection that the exec closes must not wait until the daemon has read its copy.
        daemon::settle_registrations(true);
    }
    let lending = table::Lending::new();
    // By the kernel's own view: a vfork child has moved descriptors without changing our tables, and `dup2` clears
    // close-on-exec.
    let mut lanes = false;
    table::each_fd(|_, _, c| lanes |= c.flags.load(Relaxed) & flag::LANE != 0);
    if lanes {
        for fd in 0..=fdtab::high().max(1024) {
            if fdtab::get(fd) == Fd::Ours
                || !sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC == 0)
            {
                continue;
            }
            let Ok((inode, _)) = sys::inode(fd) else {
                continue;
            };
            table::each_fd(|_, i, c| {
                if c.flags.load(Relaxed) & flag::LANE != 0
                    && c.inode.load(Relaxed) == inode
                    && (attached::engaged(c) || c.flags.load(Relaxed) & flag::DISQUALIFIED == 0)
                {
                    promotion::lend(i, fd);
                }
            });
        }
    }
    table::each_fd(|fd, i, c| {
        let kept = sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC == 0);
        let lane = attached::of(c, table::local(i));
        // (The daemon's copy of a remote connection's socket would outlive the descriptor that exec closes.)
        let remote = lane.is_some_and(|(k, _)| k.is_remote());
        if remote || kept {
            promotion::lend(i, fd);
        } else if !vfork_child {
            table::remove_holder(c, pids::me());
        }
        if kept && !vfork_child {
            sets::deactivate(i); // our inner sets, and what they report, end at the exec
        }
    });
    promotion::all_left();
    if !vfork_child {
        core::mem::forget(lending); // until the exec fails
    }
}

/// The exec failed: we are still here.
pub fn exec_failed() {
    if table::table().is_some() && !env::off() && sys::getpid() == pids::pid() {
        table::lent_all();
        table::each_fd(|fd, _, c| {
            if !c.holders.iter().any(|h| h.load(Relaxed) == pids::me()) {
                table::add_holder(c, pids::me());
            }
            sets::tell_error(fd);
        });
    }
}

/// Number of threads in `posix_spawn`, `system` or `popen`. (One that is cancelled there stays counted.)
static SPAWNS: AtomicU32 = AtomicU32::new(0);
/// When the last of these calls began (CLOCK_MONOTONIC, ms), and whether it followed another one shortly.
static LAST_MS: AtomicU64 = AtomicU64::new(0);
static OFTEN: AtomicU32 = AtomicU32::new(0);
/// Milliseconds between two such calls that are worth going up in between.
const OFTEN_MS: u64 = 200;

/// Before `posix_spawn`, `system`, `popen`: the child inherits what is not closed on exec.
fn before_spawn() {
    if table::table().is_none() {
        return;
    }
    let now = sys::now_ms();
    let often = now < LAST_MS.swap(now, Relaxed) + OFTEN_MS;
    OFTEN.store(u32::from(often), Relaxed);
    table::each_fd(|fd, i, _| {
        if sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC == 0) {
            promotion::lend(i, fd);
        }
    });
    promotion::all_left();
}

/// A descriptor is about to be given to a program that is spawned: its connection begins to leave its lane. For all of
/// them together, [`all_left`] or [`before_spawn`] waits.
pub fn lend(fd: i32) {
    if fdtab::conn(fd).is_none() {
        return;
    }
    let _inside = thread::enter();
    crate::preserving_errno(|| {
        if let Some(i) = tcp::proven(fd) {
            promotion::lend(i, fd);
        }
    });
}

/// Waits for the connections that [`lend`] was called for.
pub fn all_left() {
    if table::table().is_some() {
        let _inside = thread::enter();
        crate::preserving_errno(promotion::all_left);
    }
}

/// A program was spawned: the daemon is to look first whether that process holds the connections that were lent.
pub fn spawned(pid: u32) {
    if table::table().is_some() {
        table::each_fd(|_, i, c| {
            if table::is_lent(c) {
                table::local(i).from.store(pid, Relaxed);
            }
        });
    }
}

/// Makes `native`, one of these calls, after `first`, which lends what only this call is known to pass on. Nothing that was
/// lent is up again before the child exists: see `table::is_lending`. `waits`: the call returns when the child has ended;
/// for the short time until there is a child, it suffices that what was lent rests. (No other thread's child can get a
/// connection that is on TCP by then, and up again before that child exists: see [`spawned_ended`].)
pub fn spawning<T>(waits: bool, first: impl FnOnce(), native: impl FnOnce() -> T) -> T {
    SPAWNS.fetch_add(1, SeqCst);
    let lending = table::Lending::new();
    crate::preserving_errno(|| {
        first();
        before_spawn();
    });
    let lending = Some(lending).filter(|_| !waits);
    let r = thread::outside(native);
    drop(lending);
    SPAWNS.fetch_sub(1, SeqCst);
    r
}

/// A program that was spawned has ended: what it had may go up again, unless another thread is about to lend it anew, or
/// that happens all the time.
pub fn spawned_ended() {
    let quiet = SPAWNS.load(SeqCst) == 0 && OFTEN.load(Relaxed) == 0;
    if quiet && table::table().is_some() {
        table::each_fd(|_, _, c| table::back(c));
    }
}
