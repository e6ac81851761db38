//! What this process shares with its family, and how it stops sharing.
//!
//! A forked child inherits the family's table and its parent's link groups, as it inherits descriptors, and it loses
//! them in the same way: a link group with its last descriptor of a connection on that link group; the table with the
//! last descriptor that it has inherited, or when its user changes. Then it *moves out*: the entries that it alone
//! holds continue at the same place in a table of its own, which the rest of the family does not know.
//!
//! It does not move out while it holds a connection together with others of the family, because each of them must
//! see what the others do with it. After a change of user, the first use of such a connection ends that: it stays
//! on TCP for good, which needs no coordination. (A child that only executes a program never gets there, and
//! changes nothing for its parent.)

use crate::state::groups::{self, LinkGroup};
use crate::state::table::{self, Local, KIN};
use crate::state::{attached, fdtab, fuse};
use crate::sys::{self, lock, pids};
use crate::{daemon, sets};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use lane::family::{flag, state, Conn, Table, CONNS, DOMAINS, TABLE_BYTES};
use lane::num;
use lane::proto::reason::Reason;

/// Number of connections that this process has held since the fork that made it.
static INHERITED: AtomicU32 = AtomicU32::new(0);
/// Number of forks in this process's line of ancestors, by which [`Local::came`] tells this process's fork from
/// others.
static LINE: AtomicU32 = AtomicU32::new(0);
/// When the next use of a connection tries to move out again (CLOCK_MONOTONIC, ms).
static NEXT_MS: AtomicU64 = AtomicU64::new(0);
/// Milliseconds between two such tries.
const TRY_MS: u64 = 10;
/// When the daemon was last told of a move (CLOCK_MONOTONIC, ms), and the shortest time between two such messages.
static TOLD_MS: AtomicU64 = AtomicU64::new(0);
const TELL_MS: u64 = 200;
static LOCK: AtomicU32 = AtomicU32::new(0);

/// Called before a fork: from now on, the table is shared.
pub fn forks() {
    KIN.shared.store(1, Relaxed);
}

/// In a forked child, before [`inherit`] is called for its connections.
pub fn begin() {
    LOCK.store(0, Relaxed); // its holder was a thread of the parent
    LINE.fetch_add(1, Relaxed);
    INHERITED.store(0, Relaxed);
    table::HELD.store(0, Relaxed);
    KIN.shared.store(1, Relaxed);
    KIN.guest.store(1, Relaxed);
}

/// In a forked child, for each of its descriptors: counts the connection as inherited.
pub fn inherit(i: u32) {
    let line = LINE.load(Relaxed);
    if table::local(i).came.swap(line, Relaxed) != line {
        INHERITED.fetch_add(1, Relaxed);
        table::HELD.fetch_add(1, Relaxed);
    }
}

/// In a forked child that has entered itself as a holder everywhere: gives up what it has no part in.
pub fn begun() {
    retire_inherited_groups();
    if INHERITED.load(Relaxed) == 0 {
        move_out(false);
    }
}

/// The connection is about to be closed in this process for good. The result is the argument of [`closed`].
pub fn closing(l: &Local) -> bool {
    let came = l.came.swap(0, Relaxed);
    came != 0 && came == LINE.load(Relaxed)
}

/// The connection was closed.
pub fn closed(inherited: bool) {
    table::HELD.fetch_sub(1, SeqCst);
    if inherited {
        INHERITED.fetch_sub(1, Relaxed);
    }
    retire_inherited_groups();
    let stranger = KIN.guest.load(Relaxed) != 0 && INHERITED.load(Relaxed) == 0;
    if stranger || is_wanted() {
        move_out(false);
    }
}

/// The user of this process is about to change. (Called before the change, so that the new table belongs to the
/// old user: a process that was root's and becomes nobody's is still root's in `/proc`, where the daemon finds
/// it.)
pub fn before_user_change() {
    if KIN.shared.load(Relaxed) != 0 {
        move_out(false);
    }
}

/// The user has changed.
pub fn user_changed() {
    if KIN.shared.load(Relaxed) != 0 {
        NEXT_MS.store(0, Relaxed);
        KIN.wanted.store(1, Relaxed);
    }
}

/// Has this process changed its user while it still shares the family's table?
#[inline(always)]
pub fn is_wanted() -> bool {
    KIN.wanted.load(Relaxed) != 0
}

/// Such a process is about to use a connection on TCP: tries to move out.
#[cold]
pub fn used() {
    let now = sys::now_ms();
    if now >= NEXT_MS.load(Relaxed) {
        NEXT_MS.store(now + TRY_MS, Relaxed);
        crate::preserving_errno(|| move_out(true));
    }
}

/// Moves to a table of our own, if that is possible now. `cut`: shared connections that are on TCP stay there for
/// good.
#[cold]
fn move_out(cut: bool) {
    let Some(_g) = lock::try_lock(&LOCK) else {
        return;
    };
    let alone = match table::HELD.load(SeqCst) {
        // (The daemon is not told: a process that holds nothing says hello again when it holds something.)
        0 => {
            sets::release_inherited();
            let blown = fuse::is_blown();
            let cleared = daemon::part(table::clear);
            if cleared && blown {
                fuse::take_along();
            }
            cleared
        }
        // Another thread could be in the middle of changing an entry.
        _ if !sys::is_single_threaded() => false,
        _ => {
            // So could a handler that is not behind our trampoline.
            let mask = sys::block_signals();
            let moved = Move::plan(cut).is_some_and(|m| m.carry_out().is_some());
            sys::set_signal_mask(mask);
            moved
        }
    };
    if alone {
        KIN.clear();
    }
}

/// Is an entry held by this process?
fn is_mine(c: &Conn) -> bool {
    !matches!(c.state.load(Acquire), state::FREE | state::BUSY)
        && c.holders.iter().any(|h| h.load(Relaxed) == pids::me())
}

/// The entries that this process holds, by index.
fn mine(t: &'static Table) -> impl Iterator<Item = (u32, &'static Conn)> {
    let used = t.header.used.load(Acquire).min(num::small(CONNS));
    let all = (0..used).map(|i| (i, table::conn(i)));
    all.filter(|(_, c)| is_mine(c))
}

/// Is this a connection that other processes hold, too, so that each must see what the others do?
fn is_tied(c: &Conn) -> bool {
    c.state.load(Relaxed) != state::LISTEN && table::holders(c) > 1
}

/// A move that nothing we know of prevents.
struct Move {
    old: &'static Table,
    /// Must the daemon be told?
    tell: bool,
}

impl Move {
    fn plan(cut: bool) -> Option<Move> {
        let old = table::table()?;
        let mut known = true;
        table::each_fd(|_, _, c| known &= is_mine(c));
        let mut served = false;
        for (_, c) in mine(old) {
            let flags = c.flags.load(Relaxed);
            let tied = is_tied(c);
            // (The daemon reads the table while it has taken over a direction of a remote lane.)
            known &= flags & flag::REMOTE == 0 && (!tied || cut && !attached::engaged(c));
            known &= tied || !is_ending(c);
            let asked = flags & (flag::LANE | flag::REGISTERED) != 0;
            served |= !tied && asked && c.owner_pid.load(Relaxed) == pids::me();
        }
        let tell = daemon::can_move();
        if !known || (served && !tell) {
            return None;
        }
        // (A server that forks and changes its user all the time tells the daemon only now and then.)
        let (now, last) = (sys::now_ms(), TOLD_MS.load(Relaxed));
        if tell {
            if last != 0 && now < last + TELL_MS {
                return None;
            }
            TOLD_MS.store(now, Relaxed);
        }
        (tell || daemon::part(|| true)).then_some(Move { old, tell })
    }

    /// Moves. `None`: something was missing, and nothing has changed.
    fn carry_out(self) -> Option<()> {
        let before = table::memfd();
        let old = fdtab::is_ours(before).then(|| sys::map(before, TABLE_BYTES, true).ok())??;
        let Some((fd, new)) = table::make(core::ptr::null_mut()) else {
            sys::unmap(old, TABLE_BYTES);
            return None;
        };
        let fd = fdtab::hide(fd);
        // SAFETY: both were just mapped, TABLE_BYTES long, and are unmapped at the end of this function.
        let (there, here) = unsafe { (&*old.cast::<Table>(), &*new) };
        let told = self.fill(here) && (!self.tell || daemon::moved(fd));
        let done = told && sys::map_over(table::address(), TABLE_BYTES, fd).is_ok();
        if done {
            table::moved_to(fd);
            fdtab::close_ours(before);
            self.leave_behind(there);
        } else {
            fdtab::close_ours(fd);
            if told {
                daemon::part(|| true); // the daemon would read a table that nobody uses
            }
        }
        sys::unmap(old, TABLE_BYTES);
        sys::unmap(new.cast(), TABLE_BYTES);
        done.then_some(())
    }

    /// Copies the entries that we hold. False: a shared connection has gone onto a lane, or is about to.
    fn fill(&self, new: &Table) -> bool {
        let mut used = 0;
        for (i, c) in mine(self.old) {
            let tied = is_tied(c);
            let lane = c.flags.load(Relaxed) & flag::LANE != 0;
            if tied && lane && !stays_on_tcp(c) || !tied && is_ending(c) {
                return false;
            }
            let to = &new.conns[i as usize & (CONNS - 1)];
            table::copy(c, to);
            if c.flags.load(Relaxed) & flag::PROMOTED != 0 && !tied {
                new.header.stats.promoted.fetch_add(1, Relaxed);
            }
            match c.state.load(Relaxed) {
                state::LISTEN => alone(to),
                _ if tied => {
                    alone(to);
                    shared_for_good(to);
                }
                _ => {}
            }
            used = i + 1;
        }
        new.header.used.store(used, Relaxed);
        self.keep_native_calls(new);
        new.header.set_home(self.old.header.home());
        new.header.stats.set_fuse(&self.old.header.stats);
        true
    }

    /// A handler may move out while a native call of this thread waits below it, on a connection that is closed by
    /// now. Its entry stays unused until that call has returned. (Entries with calls of other processes stay
    /// unused for good.)
    fn keep_native_calls(&self, new: &Table) {
        let used = self.old.header.used.load(Relaxed) as usize;
        let all = self.old.conns.iter().zip(&new.conns).take(used);
        for (from, to) in all.filter(|(from, _)| !is_mine(from)) {
            for (from, to) in [
                (&from.tx.native_calls, &to.tx.native_calls),
                (&from.rx.native_calls, &to.rx.native_calls),
            ] {
                if from.load(Relaxed) != 0 {
                    to.store(from.load(Relaxed), Relaxed);
                }
            }
        }
    }

    /// Updates the entries in the family's table, `there`, after ours have replaced them. This process stays noted
    /// as a holder there until it ends, so that no other process considers an entry free, or itself the only
    /// holder, while another one is about to give it up.
    fn leave_behind(&self, there: &Table) {
        for (i, c) in mine(self.old) {
            let was = &there.conns[i as usize & (CONNS - 1)];
            if c.forks.load(Relaxed) != 0 {
                give_lane_back(i, was);
            } else if c.state.load(Relaxed) != state::LISTEN {
                let before = was.flags.swap(flag::DISQUALIFIED, Relaxed);
                if before & flag::PROMOTED != 0 {
                    there.header.stats.promoted.fetch_sub(1, Relaxed);
                }
                // The connection is counted and shown in the new table now.
                was.fd.store(0, Relaxed);
                was.tx.ring_bytes.store(0, Relaxed);
                was.rx.ring_bytes.store(0, Relaxed);
            }
        }
        retire_inherited_groups();
    }
}

/// The process whose lane or registration it was is not a holder any more, but is still busy ending the connection
/// on its side.
fn is_ending(c: &Conn) -> bool {
    let owner = c.owner_pid.load(Relaxed);
    c.flags.load(Relaxed) & (flag::LANE | flag::REGISTERED) != 0
        && owner != pids::me()
        && owner != 0
        && !pids::is_gone(owner)
        && (pids::is_foreign(owner) || !sys::is_zombie(owner & !DOMAINS))
}

/// Gives back the lane of a connection that stays on TCP for good; `was` is its former entry.
fn give_lane_back(i: u32, was: &Conn) {
    let mine = was.owner_pid.load(Relaxed) == pids::me();
    if mine && was.flags.load(Relaxed) & flag::REGISTERED != 0 {
        daemon::forget(i, was.gen.load(Relaxed));
    }
    // SAFETY: null, or a slot of the link group table, which is never unmapped.
    let group = unsafe {
        table::local(i)
            .group
            .swap(core::ptr::null_mut(), AcqRel)
            .as_ref()
    };
    if let Some(group) = group {
        if mine {
            daemon::lane_done(group, was.lane.load(Relaxed));
        }
        sets::deactivate(i);
    }
}

/// Keeps a shared connection that has a lane, but is on TCP, there for good. False: it is on the lane, or about to
/// be.
fn stays_on_tcp(c: &Conn) -> bool {
    let (Some(_t), Some(_r)) = (lock::try_lock(&c.tx.lock), lock::try_lock(&c.rx.lock)) else {
        return false;
    };
    let still = !attached::engaged(c);
    if still {
        table::disqualify(c, Reason::Shared); // a thread that goes up looks at this under the lock
    }
    still
}

/// Makes this process the only holder of an entry of the new table.
fn alone(c: &Conn) {
    for h in &c.holders {
        h.store(0, Relaxed);
    }
    c.forks.store(0, Relaxed);
    table::add_holder(c, pids::me());
    for w in [&c.tx.lock, &c.rx.lock] {
        w.store(0, Relaxed);
    }
    c.tx.native_calls.store(0, Relaxed);
    c.rx.native_calls.store(0, Relaxed);
}

/// Marks a connection as held by processes that this table does not know.
fn shared_for_good(c: &Conn) {
    c.forks.store(1, Relaxed);
    c.owner_pid.store(0, Relaxed);
    c.group.store(0, Relaxed);
    let lane = flag::LANE | flag::REMOTE | flag::REGISTERED;
    c.flags.fetch_and(!lane, Relaxed);
    table::set_reason(c, Reason::Shared);
}

/// Gives up link groups whose other client is gone and that no connection uses any more.
pub fn reap_groups() {
    let gone = |l: &&LinkGroup| l.state.load(Acquire) == groups::GONE && !l.is_waited_on();
    for l in groups::seen().iter().filter(gone) {
        let mut used = false;
        table::each(|i, _| used |= core::ptr::eq(table::local(i).group.load(Relaxed), l));
        if !used {
            retire_group(l);
        }
    }
}

fn retire_group(l: &LinkGroup) {
    sets::unbind(l);
    l.retire();
}

/// In a forked child: gives up the inherited link groups on which none of its connections has a lane any more. With its
/// last descriptor, a process loses what is sent on the link group later, as with TCP.
fn retire_inherited_groups() {
    let inherited = |l: &&LinkGroup| l.state.load(Acquire) != 0 && l.is_inherited();
    if !groups::seen().iter().any(|l| inherited(&l)) {
        return;
    }
    let mut used = [0u64; groups::LINK_GROUPS / 64];
    let mut mark = |i: u32| {
        // SAFETY: null, or a slot of the link group table, which is never unmapped.
        if let Some(l) = unsafe { table::local(i).group.load(Relaxed).as_ref() } {
            let k = groups::index(l);
            used[k / 64] |= 1 << (k % 64);
        }
    };
    // Also connections that calls hold after their last descriptor, and those for which no holder was entered.
    table::each(|i, _| mark(i));
    table::each_fd(|_, i, _| mark(i));
    for (k, l) in groups::seen().iter().enumerate() {
        if inherited(&l) && used[k / 64] & 1 << (k % 64) == 0 {
            retire_group(l);
        }
    }
}

/// Is there a connection on this link group that other processes hold, too?
pub fn is_shared(group: &LinkGroup) -> bool {
    let mut shared = false;
    table::each(|i, c| {
        let here = core::ptr::eq(table::local(i).group.load(Relaxed), group);
        shared |= here && table::holders(c) > 1;
    });
    shared
}
