//! The lane of a connection as this process has it mapped, and its statistics.

use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::sys::lock;
use core::sync::atomic::Ordering::*;
use lane::family::{flag, Conn};
use lane::half::{rx, tx, Memory};

/// The lane of a connection as this process has it mapped.
#[inline(always)]
pub fn of<'a>(c: &'a Conn, l: &'a Local) -> Option<(&'a LinkGroup, Memory<'a>)> {
    // SAFETY: null, or a slot of the link group table, which is never unmapped.
    let group = unsafe { l.group.load(Acquire).as_ref() }?;
    Memory::new(&group.own, &group.peer, c.lane.load(Relaxed))
        .map(|m| (group, m.across(group.is_remote())))
}

/// Is either half off TCP?
pub fn engaged(c: &Conn) -> bool {
    c.tx.mode.load(Relaxed) != tx::mode::TCP || c.rx.mode.load(Relaxed) != rx::mode::TCP
}

/// Is the sending half off TCP?
#[inline(always)]
pub fn engaged_tx(c: &Conn) -> bool {
    c.tx.mode.load(Relaxed) != tx::mode::TCP
}

/// Is another thread, which is alive, working on the sending half?
pub fn is_attended(c: &Conn) -> bool {
    c.tx.lock.load(Relaxed) != 0 && lock::try_or_inherit(&c.tx.lock).is_none()
}

/// A sending half has gone up.
pub fn counted_up(c: &Conn) {
    if let Some(t) = table::table() {
        t.header.stats.ups.fetch_add(1, Relaxed);
    }
    promoted(c);
}

/// The connection is on its lane in at least one direction: counted once.
#[inline(always)]
pub fn promoted(c: &Conn) {
    if c.flags.load(Relaxed) & flag::PROMOTED != 0 {
        return;
    }
    if let Some(t) = table::table() {
        if c.flags.fetch_or(flag::PROMOTED, Relaxed) & flag::PROMOTED == 0 {
            t.header.stats.promoted.fetch_add(1, Relaxed);
        }
    }
}
