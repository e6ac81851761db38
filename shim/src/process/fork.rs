//! What a fork means for the tables, in the parent and in the child.

use crate::promotion::family;
use crate::state::{fdtab, groups, table, waiters};
use crate::sys::{self, env, lock, pids, thread};
use crate::{daemon, sets, tcp};
use core::sync::atomic::Ordering::*;
use lane::family::flag;

/// Called before a fork: children count as holders before they exist, so that nothing is promoted meanwhile.
pub fn before_fork() {
    if table::table().is_some() {
        table::expect_child();
    }
    let bit = pids::fork_begins();
    thread::begin_fork(bit);
    fdtab::limit_settled();
    if table::table().is_some() {
        family::forks();
        table::count_child(bit);
        table::each_counted(bit, |_, c| {
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

/// After a fork, in the parent. The child has entered itself as a holder, or does so soon, unless it is killed before. `None`:
/// there is none.
pub fn after_fork_parent(child: Option<u32>) {
    let bit = thread::fork_bit();
    match child {
        Some(_) => sets::after_fork_parent(),
        None => table::uncount_child(bit),
    }
    if !child.is_some_and(|p| table::await_birth(bit, p)) {
        table::forget_fork(bit);
        pids::forget_bit(bit);
    }
    thread::begin_fork(0);
    pids::fork_ends();
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
    let (counted, bit) = (pids::fork_ended(), thread::fork_bit());
    thread::begin_fork(0);
    if table::table().is_none() {
        return;
    }
    table::unlock_counts();
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
    if counted {
        table::born(bit);
    }
    if counted && known {
        table::uncount_child(bit);
    }
    table::after_fork();
    tcp::call::after_fork();
    daemon::after_fork();
    groups::after_fork();
    waiters::after_fork();
    sets::after_fork();
    family::begun();
}
