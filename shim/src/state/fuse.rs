//! The fuse: after the shim had to reset a connection of a program, the program's new connections stay on TCP.
//!
//! A reset is the one thing that an application notices, so a program in which it has happened is better off without
//! lanes until somebody has looked. What the words of a hostile peer are the cause of does not count: otherwise any
//! peer could keep a server on TCP.
//!
//! The resets are counted in the family's table, so a child that resets a connection between fork and exec trips the
//! fuse of its parent. Each process remembers up to which count the operator has cleared it; a fork inherits that. A
//! program that is started anew has a new table.

use super::table;
use core::sync::atomic::{AtomicU32, Ordering::*};

/// Faults that an operator has cleared.
static CLEARED: AtomicU32 = AtomicU32::new(0);
/// Faults that the daemon was told of.
static TOLD: AtomicU32 = AtomicU32::new(0);

fn faults() -> u32 {
    table::table().map_or(0, |t| t.header.stats.faults())
}

/// Do new connections stay on TCP?
pub fn is_blown() -> bool {
    faults() != CLEARED.load(Relaxed)
}

/// Has it blown since this was asked last? (So it is said once for each fault.)
pub fn is_news() -> bool {
    let now = faults();
    TOLD.swap(now, Relaxed) != now
}

/// An operator has seen it.
pub fn clear() {
    CLEARED.store(faults(), Relaxed);
}

/// The next table of this process is a new one.
pub fn forget() {
    CLEARED.store(0, Relaxed);
    TOLD.store(0, Relaxed);
}
