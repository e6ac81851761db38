//! What a fork means for the tables, in the parent and in the child.

use crate::promotion::family;
use crate::state::{fdtab, groups, table, waiters};
use crate::sys::{self, env, lock, pids, thread};
use crate::{daemon, sets, tcp};
use core::sync::atomic::Ordering::*;
use lane::family::{flag, Conn};

/// Calls `f` for each connection that this fork counts: this process had it when the fork began. What other threads get
/// meanwhile, their children hold too, or not, and enter it themselves; nobody has counted it. (What they close meanwhile
/// stays counted, if others hold it.)
fn each_counted(mut f: impl FnMut(&Conn)) {
    let Some(t) = table::table() else { return };
    let begun = thread::fork_began();
    for i in 0..t.header.used.load(Acquire) {
        let l = table::local(i);
        // Acquire: pairs with the Release in `table::take`, before which `born` says that nothing counts it.
        if l.refs.load(Acquire) != 0 && l.born.load(Relaxed) < begun {
            f(table::conn(i));
        }
    }
}

/// One fork is no longer under way.
fn uncount(c: &Conn) {
    let _ = c.forks.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1));
}

/// Called before a fork: children count as holders before they exist, so that nothing is promoted meanwhile.
pub fn before_fork() {
    thread::begin_fork(pids::fork_begins());
    fdtab::limit_settled();
    if table::table().is_some() {
        family::forks();
        each_counted(|c| {
            c.forks.fetch_add(1, SeqCst);
            // If another thread is attaching a lane, wait until it has: it looks at the holders under these locks.
            if c.flags.load(Acquire) & flag::REGISTERED != 0 {
                drop(lock::lock_within(&c.tx.lock, SETTLE_MS));
                drop(lock::lock_within(&c.rx.lock, SETTLE_MS));
            }
        });
        groups::before_fork();
    }
}

/// Milliseconds that a fork waits for a lock of a connection, whose holder may be stopped.
const SETTLE_MS: u32 = 50;

/// After a fork, in the parent. The child has entered itself as a holder, or does so soon.
pub fn after_fork_parent(failed: bool) {
    pids::fork_ends();
    if !failed {
        sets::after_fork_parent();
    }
    if failed {
        each_counted(uncount);
    }
}

/// After a fork, in the child: it gets a control connection of its own (when needed) and its own list of sleepers.
/// Lanes are the parent's until the child uses them.
///
/// Handlers of `pthread_atfork` run before `fork` returns, and may close what they have inherited: the first hook
/// that notices the fork calls this, and later calls find nothing to do.
pub fn after_fork_child() {
    if env::off() || !pids::enter_process() {
        return;
    }
    thread::forget_tid();
    let me = sys::getpid();
    pids::set_pid(me);
    let counted = pids::fork_ended();
    if table::table().is_none() {
        return;
    }
    fdtab::forget_changes();
    let mut last = u32::MAX;
    let known = table::same_pid_namespace();
    family::begin();
    table::each_fd(|_, i, c| {
        family::inherit(i);
        table::local(i).regs_lock.store(0, Relaxed);
        if !known {
            return; // stays counted among the forks
        }
        if last != i && !c.holders.iter().any(|h| h.load(Relaxed) == me) {
            table::add_holder(c, me);
        }
        last = i;
    });
    if counted && known {
        each_counted(uncount);
    }
    // (All of it was there before any fork of this process.)
    table::each_fd(|_, i, _| table::local(i).born.store(0, Relaxed));
    tcp::call::after_fork();
    daemon::after_fork();
    groups::after_fork();
    waiters::after_fork();
    sets::after_fork();
    family::begun();
}
