//! Numbers that inlined calls, or another process, have given another meaning.

use super::{after_fork_child, release};
use crate::fdtab::{self, Fd};
use crate::{process, sets, sys, table, thread};
use core::sync::atomic::Ordering::*;

/// A vfork child shares our memory but not our descriptors: what it does to them is its own affair.
pub fn not_ours() -> bool {
    if process::is_new_process() {
        crate::preserving_errno(after_fork_child);
    }
    sys::getpid() != process::pid()
}

/// A new descriptor has a number that the table still has something for: that was closed unseen.
#[inline(always)]
pub fn replaced(fd: i32) {
    if fdtab::get(fd) != Fd::Other && !not_ours() {
        forgotten(fd);
    }
    fdtab::is_new(fd);
}

#[cold]
fn forgotten(fd: i32) {
    let _inside = thread::enter();
    match fdtab::get(fd) {
        Fd::Conn(i) => vanished(fd, i),
        Fd::Set(s) => {
            fdtab::set(fd, Fd::Other);
            sets::closed(s);
        }
        Fd::Other | Fd::Ours | Fd::Ring(_) => {}
    }
}

/// A number is no more the connection that the table says: an inlined system call has closed it, or has
/// put something else in its place. As `close`, but what has the number now is not touched. (A vfork child has
/// descriptors of its own.)
#[cold]
pub fn vanished(fd: i32, i: u32) {
    if not_ours() {
        return;
    }
    crate::preserving_errno(|| {
        sets::lost(i, fd);
        let l = table::local(i);
        let _ = l.fd.compare_exchange(fd, -1, Relaxed, Relaxed);
        if fdtab::conn(fd) == Some(i) {
            release(fd, i, -1);
        }
    });
}
