//! Forks count their child as a holder before it exists. Which entries a fork has counted is written down in
//! [`COUNTED`], of which the child has a copy: so it takes back exactly that, whatever other threads of its parent
//! have closed or made between the count and the copy.

use super::{births, conn, free_unheld, lending, local, table, Local};
use crate::sys::{lock, pids};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use lane::family::{Conn, CONNS};

/// For each entry, the forks under way that have counted it, a bit each. (Beside each other and not in [`Local`]: what parent
/// and child write here costs each of them few copies of pages.)
static COUNTED: [AtomicU64; CONNS] = [const { AtomicU64::new(0) }; CONNS];

fn counted(i: u32) -> &'static AtomicU64 {
    &COUNTED[i as usize & (CONNS - 1)]
}

/// Held while a fork counts an entry, and while the last descriptor of an entry goes.
static COUNTING: AtomicU32 = AtomicU32::new(0);

/// Counts the child of a fork, whose bit this is, as a holder of all that this process has.
pub fn count_child(bit: u64) {
    each_used(|i, c, l| {
        // Acquire: pairs with the Release in `take`, before which nothing has counted the new connection.
        let held = || l.refs.load(Acquire) != 0;
        if held() {
            let _g = lock::lock(&COUNTING);
            if held() {
                counted(i).fetch_or(bit, Relaxed);
                c.forks.fetch_add(1, SeqCst);
            }
        }
    });
}

/// Calls `f` for each entry that this fork has counted.
pub fn each_counted(bit: u64, mut f: impl FnMut(u32, &Conn)) {
    each_used(|i, c, _| {
        if counted(i).load(Relaxed) & bit != 0 {
            f(i, c);
        }
    });
}

fn each_used(mut f: impl FnMut(u32, &Conn, &Local)) {
    let Some(t) = table() else { return };
    for i in 0..t.header.used.load(Acquire) {
        f(i, conn(i), local(i));
    }
}

/// In the child, which has entered itself wherever it holds something, or in the parent if there is no child: takes back
/// what the fork has counted. What has no holder now was closed between the count and the copy.
pub fn uncount_child(bit: u64) {
    each_counted(bit, |i, c| {
        // As long as it is counted, the entry cannot be given to another connection.
        let (gen, s) = (c.gen.load(Relaxed), c.state.load(Relaxed));
        let _ = c.forks.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1));
        if !c.holders.iter().any(|h| h.load(Relaxed) == pids::me()) {
            free_unheld(i, gen, s);
        }
    });
}

/// In the parent: the fork is no longer under way.
pub fn forget_fork(bit: u64) {
    each_counted(bit, |i, _| _ = counted(i).fetch_and(!bit, Relaxed));
}

/// No fork has counted this entry.
pub(super) fn forget_counts(i: u32) {
    if counted(i).load(Relaxed) != 0 {
        counted(i).store(0, Relaxed);
    }
}

/// In the child: no fork is under way, and no other thread is anywhere.
pub fn after_fork() {
    each_used(|i, _, l| {
        forget_counts(i);
        if l.leaving.load(Relaxed) != 0 {
            l.leaving.store(0, Relaxed);
        }
    });
    lending::none_lends();
    births::no_child();
}

/// In the child, before anything is closed there: whoever had the lock is a thread of the parent.
pub fn unlock_counts() {
    COUNTING.store(0, Relaxed);
}

/// A descriptor of the connection goes. True: it was this process's last one.
pub fn let_go(l: &Local) -> bool {
    let others = |n: u32| (n > 1).then(|| n - 1);
    if l.refs.fetch_update(SeqCst, SeqCst, others).is_ok() {
        return false;
    }
    // From now on no fork of this process counts the entry; who has counted it before is seen.
    let _g = lock::lock(&COUNTING);
    l.refs.fetch_sub(1, SeqCst) == 1
}
