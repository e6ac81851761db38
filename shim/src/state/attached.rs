//! The lane of a connection as this process has it mapped, and its statistics.

use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::sys::lock;
use core::sync::atomic::Ordering::*;
use lane::family::{flag, Conn};
use lane::half::{rx, tx, Memory};

/// The lane of a connection as this process has it mapped. `None`: it has none, or none any more: another process of the
/// family may have given it back, and its place is another connection's by now.
pub fn of<'a>(c: &'a Conn, l: &'a Local) -> Option<(&'a LinkGroup, Memory<'a>)> {
    mapped(c, l).filter(|(group, _)| is_on(c, group))
}

/// The same for who asks the modes of the directions first, or with a lock: off TCP, the lane is there. (A direction on TCP
/// uses none of these words: they may be those of another connection.)
#[inline(always)]
pub fn mapped<'a>(c: &'a Conn, l: &'a Local) -> Option<(&'a LinkGroup, Memory<'a>)> {
    // SAFETY: null, or a slot of the link group table, which is never unmapped.
    let group = unsafe { l.group.load(Acquire).as_ref() }?;
    Memory::new(&group.own, &group.peer, c.lane.load(Relaxed))
        .map(|m| (group, m.across(group.is_remote())))
}

/// Is the connection's lane on this link group?
pub fn is_on(c: &Conn, group: &LinkGroup) -> bool {
    c.flags.load(Relaxed) & flag::LANE != 0
        && c.group.load(Relaxed) == group.id.load(Relaxed)
        && c.side.load(Relaxed) == group.side.load(Relaxed)
}

/// Under a lock of the connection, which was looked up without it: is it still on this lane, and will be until the lock is
/// released? (It may be closed by now, and the entry may be another one's.)
pub fn is_still(c: &Conn, group: &LinkGroup, m: &Memory) -> bool {
    is_on(c, group)
        && Memory::new(&group.own, &group.peer, c.lane.load(Relaxed))
            .is_some_and(|now| core::ptr::eq(now.own_tx(), m.own_tx()))
}

/// The same for a connection that is known not to be closed, where every nanosecond counts.
#[inline(always)]
pub fn is_its(c: &Conn, l: &Local, group: &LinkGroup, m: &Memory) -> bool {
    core::ptr::eq(l.group.load(Relaxed), group) && m.is_lane(c.lane.load(Relaxed))
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
