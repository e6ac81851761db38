//! The fuse: after the shim had to reset a connection of a program, the program's new connections stay on TCP.
//!
//! A reset is the one thing that an application notices, so a program in which it has happened is better off without
//! new lanes until somebody has looked. It blows for resets that the kernel's TCP would not have made (`stalled`,
//! `in-doubt`, `internal`), but not for those that a peer makes with its words or bytes (`bad-peer`, `sync`,
//! `foreign-bytes`): a liar must not keep everybody else of a server on TCP. A peer that stands still while a
//! connection leaves its lane can blow it all the same.
//!
//! It is part of the family's table, so a child that resets a connection between fork and exec blows the fuse of its
//! parent, and an operator who tells one process tells all. A program that is started anew has a new table.

use super::table;
use core::sync::atomic::{AtomicU32, Ordering::*};
use lane::family::Stats;

/// Not 0: it had blown in the table that this process has given up (`table::clear`).
static BLOWN_BEFORE: AtomicU32 = AtomicU32::new(0);

fn stats() -> Option<&'static Stats> {
    table::table().map(|t| &t.header.stats)
}

/// Do new connections stay on TCP?
pub fn is_blown() -> bool {
    stats().is_some_and(Stats::is_blown) || BLOWN_BEFORE.load(Relaxed) != 0
}

/// Has no process of the family said so yet?
pub fn is_news() -> bool {
    stats().is_some_and(Stats::is_news)
}

/// An operator has looked.
pub fn mend() {
    BLOWN_BEFORE.store(0, Relaxed);
    if let Some(s) = stats() {
        s.mend_fuse();
    }
}

/// This process has given up a table in which it had blown.
pub fn take_along() {
    BLOWN_BEFORE.store(1, Relaxed);
}
