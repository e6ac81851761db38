//! Numbers whose meaning was changed by inlined system calls or by another process.

use super::close::release;
use super::fork::after_fork_child;
use crate::sets;
use crate::state::fdtab::{self, Fd};
use crate::state::table;
use crate::sys::{self, pids, thread};
use core::sync::atomic::Ordering::*;

/// Is this a vfork child? It shares our memory but not our descriptors, so what it does to them must not change
/// our tables.
pub fn not_ours() -> bool {
    if pids::is_new_process() {
        crate::preserving_errno(after_fork_child);
    }
    sys::getpid() != pids::pid()
}

/// A new descriptor has a number for which the table has an entry: the old descriptor was closed unseen.
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

/// A number does not stand for the connection in the table any more: an inlined system call has closed it, or put
/// something else in its place. Does the same as `close`, but does not touch what has the number now. (A vfork
/// child has descriptors of its own.)
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
