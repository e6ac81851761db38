//! Promotion: evidence, registration, the daemon's answers, and going down for reasons outside of a send or
//! receive.
//!
//! Here it is decided when a connection gets a lane, uses it, and loses it. Nothing here waits for the daemon, and only
//! `leave` waits for the peer: until all is settled, a connection stays where it is.

mod commands;
mod deaf;
mod died;
pub mod dispatch;
pub mod family;
pub mod full;
mod leave;
pub mod received;
mod register;
mod remote;
mod retire;
pub(crate) mod takeover;

pub use commands::command;
pub use deaf::bring_unread;
pub use died::holder_died;
pub use lane::half::leave::LEAVE_MS;
pub use leave::{all_left, await_all, leave, leave_all, lend, set_off, yield_lane};
pub use register::{daemon_lost, declined};
pub use remote::greeted;
pub use retire::{end_lane, lane_gone, yielded};
pub use takeover::{given_back, is_orphaned};

use crate::state::groups::LinkGroup;
use crate::state::table::{self, set_reason, Local};
use crate::state::{attached, fuse, waiters};
use crate::sys::{self, env, lock, pids};
use crate::tcp::port::{self, Sock};
use crate::tcp::{self, ends, probes};
use crate::{daemon, sets};
use core::sync::atomic::Ordering::*;
use lane::abi::{Epoch, Loc, LocWord, EPOCHS};
use lane::family::{flag, state, Cause, Conn};
use lane::half::Memory;
use lane::num;
use lane::proto::reason::Reason;

/// Number of hooked calls after which a connection is worth promoting; and a number of bytes that suffices as
/// well.
const CALLS: u32 = 8;
const BYTES: u64 = 64 << 10;

/// Flags with any of which a connection is not registered.
const UNREGISTRABLE: u32 = flag::LANE | flag::REGISTERED | flag::DISQUALIFIED | flag::HELD;

/// Called before each native send or receive: counts one more call as evidence.
#[inline(always)]
pub fn evidence(i: u32, fd: i32, c: &Conn) {
    if family::is_wanted() {
        family::used();
    }
    if c.flags.load(Relaxed) & UNREGISTRABLE != 0 {
        if c.flags.load(Relaxed) & (flag::REMOTE | flag::LEFT | flag::GIVEN_BACK) != 0 {
            retire::retire(i, c);
        }
        watched(i, c);
        // Without lanes, nothing reads the control connection: look at it now and then.
        if c.calls.fetch_add(1, Relaxed) & 0xff == 0xff {
            crate::preserving_errno(|| {
                daemon::pump();
                register::disown(c);
                table::forget_zombies(c);
            });
        }
        if daemon::lost() {
            find_daemon();
        }
        return;
    }
    if c.flags.load(Relaxed) & flag::PROMOTED != 0 && daemon::lost() {
        find_daemon(); // it was on a lane in another process before, and must be shown
    }
    let n = c.calls.fetch_add(1, Relaxed);
    let many = n >= CALLS
        || c.tx.tcp_pos.load(Relaxed).get() + c.rx.tcp_pos.load(Relaxed).get() >= BYTES
        || env::eager();
    if many {
        consider(i, fd, c);
    }
}

/// Called before a large transfer, which is sufficient evidence by itself.
pub fn consider_large(i: u32, fd: i32, c: &Conn) {
    if c.flags.load(Relaxed) & UNREGISTRABLE == 0 {
        consider(i, fd, c);
    }
}

/// Eager mode registers a connection as soon as a thread is about to wait for it. No call waits for the lane,
/// because this thread may be the one that serves the other end.
#[inline(always)]
pub fn expected(i: u32, fd: i32, c: &Conn) {
    if env::eager() && c.flags.load(Relaxed) & UNREGISTRABLE == 0 {
        consider(i, fd, c);
    }
}

/// A thread waits for the first time in a set that watches this connection: does now what was refused until then.
pub fn awaited(i: u32, c: &Conn) {
    if c.reason.load(Relaxed) != Reason::EpollShared.code() {
        return;
    }
    watched_now(i, c);
    let due = env::eager() || c.calls.load(Relaxed) >= CALLS;
    if due && c.flags.load(Relaxed) & UNREGISTRABLE == 0 {
        consider(i, table::local(i).fd.load(Relaxed), c);
    }
}

/// The daemon is gone: looks for the next one now and then, so that it learns what connections we have.
#[cold]
pub fn find_daemon() {
    crate::preserving_errno(daemon::ensure);
}

/// Milliseconds until the next look whether this process still lends connections to a child.
const LENDING_MS: u64 = 20;

/// Registers the connection if nothing forbids it.
#[cold]
pub fn consider(i: u32, fd: i32, c: &Conn) {
    if c.state.load(Relaxed) != state::OPEN || env::off() {
        return;
    }
    let not_before = c.not_before_ms.load(Relaxed);
    if not_before != 0 && sys::now_ms() < not_before {
        return;
    }
    if table::is_lending() {
        return table::later(c, Reason::Left, LENDING_MS);
    }
    let errno = crate::errno();
    table::name(i, fd);
    let new = c.flags.load(Relaxed) & flag::NEW != 0;
    if !new || received::begin(fd, c, table::local(i)) && env::eager() {
        register::try_register(i, fd, c);
    }
    crate::set_errno(errno);
}

/// Is this a non-blocking connection whose readiness no hook was ever asked for? Then the application waits for it
/// in a way that we do not see (an inlined system call), and would not notice what comes on a ring.
///
/// It need not be watched now: servers take a connection out of their set while a worker has it.
fn unwatched(c: &Conn) -> bool {
    c.flags.load(Relaxed) & (flag::NONBLOCK | flag::WATCHED) == flag::NONBLOCK
}

/// The connection has just been made non-blocking while no hook watches it: the application's waiting will be
/// unseen, so it must happen on TCP.
pub fn made_nonblocking(i: u32) {
    let c = table::conn(i);
    if c.flags.load(Relaxed) & flag::LANE != 0 && unwatched(c) {
        set_reason(c, Reason::EpollShared);
        take_down(i, Cause::Watched);
    }
}

/// From now on, a hook may watch this connection.
#[inline(always)]
pub fn watched(i: u32, c: &Conn) {
    if c.reason.load(Relaxed) == Reason::EpollShared.code() {
        watched_now(i, c);
    }
}

/// A connection that [`made_nonblocking`] took down is watched now, and may use its lane again.
#[cold]
fn watched_now(i: u32, c: &Conn) {
    if unwatched(c) || sets::unservable(i) || c.flags.load(Relaxed) & flag::LANE == 0 {
        return;
    }
    if sets::unwaited(i) {
        return; // see `awaited`
    }
    let l = table::local(i);
    if let Some((group, m)) = attached::of(c, l) {
        if let Some(_g) = lock::try_lock(&c.rx.lock) {
            let fd = l.fd.load(Relaxed);
            c.rx.unwant_down(&m, &Sock::new(fd, group));
            set_reason(c, Reason::None);
        }
    }
}

/// Milliseconds after which a link group whose memory could not be mapped may be asked for again. (The daemon waits as
/// long.)
const MAP_AGAIN_MS: u64 = 10_000;

/// A lane is offered for connection `i`. False: it is not taken.
pub fn attach(group: &LinkGroup, lane_no: u32, i: u32, gen: u32, epoch: Epoch, tag: u64) -> bool {
    if i as usize >= lane::family::CONNS {
        return false;
    }
    let c = table::conn(i);
    let l = table::local(i);
    let usable = || {
        c.gen.load(Relaxed) == gen
            && c.state.load(Acquire) == state::OPEN
            && c.flags.load(Relaxed) & flag::REGISTERED != 0
            && l.refs.load(Acquire) > 0
            && c.flags.load(Relaxed) & (flag::DISQUALIFIED | flag::HELD | flag::LANE | flag::NEW)
                == 0
    };
    if has(c, l, group, lane_no, gen) {
        return true;
    }
    if !usable() {
        register::unregister(c, gen);
        return false;
    }
    let (Some(_t), Some(_r)) = (lock::lock(&c.tx.lock), lock::lock(&c.rx.lock)) else {
        return false;
    };
    if !usable() {
        c.flags.fetch_and(!flag::REGISTERED, Relaxed);
        return false;
    }
    let refuse = |why, ms| {
        c.flags.fetch_and(!flag::REGISTERED, Relaxed);
        table::later(c, why, ms);
        false
    };
    let Some(m) = Memory::new(&group.own, &group.peer, lane_no) else {
        return refuse(Reason::Memory, MAP_AGAIN_MS);
    };
    let m = m.across(group.is_remote());
    if table::holders(c) != 1 {
        return refuse(Reason::Shared, 100);
    }
    if table::is_lending() {
        return refuse(Reason::Left, LENDING_MS);
    }
    if fuse::is_blown() {
        return refuse(Reason::Fuse, register::FUSE_MS);
    }
    let Some(loc) = new_ring(group, lane_no) else {
        return refuse(Reason::Memory, 50);
    };
    c.rx.attach(&m, epoch, tag);
    c.tx.attach(&m, epoch, loc); // marks all words as those of this use: see `RxState::said`
    c.tx.set_tag(tag);
    if c.flags.load(Relaxed) & flag::CLIENT != 0 {
        c.rx.mark_client(&m);
    }
    // The daemon completes what this process cannot (takeover), so it must have the socket before anything goes
    // up.
    if group.is_remote() && !daemon::lane_held(group, lane_no, l.fd.load(Relaxed)) {
        return refuse(Reason::TimeoutDaemon, 50); // the ring is freed at the slot's next use
    }
    enter(c, group, lane_no, (epoch, tag));
    l.group
        .store(core::ptr::from_ref(group) as *mut LinkGroup, Release);
    l.verified.store(0, Relaxed);
    table::sync_nonblock(c, l.fd.load(Relaxed));
    tcp::sync_inq(c, l.fd.load(Relaxed));
    tcp::bufs::sync(c, &m, l.fd.load(Relaxed));
    set_reason(c, Reason::None);
    mark_attached(c, group.is_remote());
    sets::activate(i, group);
    ready_locked(i, c, l);
    waiters::look(i);
    true
}

/// The ring of a new use of the slot. Both ends have finished with the previous use: its rings are free.
fn new_ring(group: &LinkGroup, lane_no: u32) -> Option<Loc> {
    let slot = &group.rings[lane_no as usize];
    for r in slot {
        if let Some(loc) = r.swap(LocWord::NONE, Relaxed).loc() {
            group.free(loc);
        }
    }
    let loc = group.alloc(daemon::ring_sizes().0, daemon::want_chunk)?;
    slot[0].store(loc.word(), Relaxed);
    Some(loc)
}

/// Writes down which lane the connection has.
fn enter(c: &Conn, group: &LinkGroup, lane_no: u32, (epoch, tag): (Epoch, u64)) {
    c.tag.store(tag, Relaxed);
    c.epoch.store(epoch, Relaxed);
    c.group.store(group.id.load(Relaxed), Relaxed);
    c.side.store(group.side.load(Relaxed), Relaxed);
    c.lane.store(lane_no, Relaxed);
    c.owner_pid.store(pids::me(), Relaxed);
}

/// The connection has its lane: it is not registered any more, nor lent to another program, because the daemon has found
/// that nobody else holds it.
fn mark_attached(c: &Conn, remote: bool) {
    let registered = flag::REGISTERED | flag::LEFT;
    c.flags.fetch_and(!registered, Release); // pairs with the Acquire in `process::before_fork`
    let remote = if remote { flag::REMOTE } else { 0 };
    let now = c.flags.fetch_or(flag::LANE | remote, AcqRel);
    if now & flag::NEW != 0 {
        c.flags.fetch_or(flag::LEFT, Relaxed); // another thread lends it at this moment: see `table::lend`
    }
}

/// Was this lane offered and taken before? (A registration may be answered twice around the end of a control
/// connection.)
fn has(c: &Conn, l: &Local, group: &LinkGroup, lane_no: u32, gen: u32) -> bool {
    c.gen.load(Relaxed) == gen
        && c.flags.load(Relaxed) & flag::LANE != 0
        && c.lane.load(Relaxed) == lane_no
        && core::ptr::eq(l.group.load(Relaxed), group)
}

/// May the connection's directions go up now?
#[inline(always)]
fn open(c: &Conn) -> bool {
    let closed = flag::HELD | flag::DISQUALIFIED | flag::GIVEN_BACK | flag::LEFT | flag::NEW;
    c.flags.load(Relaxed) & (flag::LANE | closed) == flag::LANE
        && c.owner_pid.load(Relaxed) == pids::me()
        && {
            let nb = c.not_before_ms.load(Relaxed);
            nb == 0 || sys::now_ms() >= nb
        }
}

/// Declares the receiving half ready, if it can be. Cheap when there is nothing to do.
#[inline(always)]
pub fn try_ready(i: u32, c: &Conn, l: &Local) {
    if c.flags.load(Relaxed) & flag::LANE != 0 && !c.rx.engaged() && open(c) {
        if let Some(_g) = lock::try_lock(&c.rx.lock) {
            ready_locked(i, c, l);
        }
    }
}

fn ready_locked(i: u32, c: &Conn, l: &Local) {
    if !open(c) || c.rx.shut.load(Relaxed) != 0 {
        return;
    }
    if sets::unservable(i) || unwatched(c) {
        return set_reason(c, Reason::EpollShared);
    }
    if table::holders(c) != 1 {
        table::settle_births(true); // (for the next call)
        return set_reason(c, Reason::Shared);
    }
    if let Some((group, m)) = attached::of(c, l) {
        if c.rx.epoch.load(Relaxed).since(c.epoch.load(Relaxed)) >= EPOCHS - 1 {
            return table::disqualify(c, Reason::RingFull); // further epochs belong to the slot's next use
        }
        if group.state.load(Relaxed) == crate::state::groups::USED {
            // Every set that watches the connection must know the lane first.
            if sets::activate(i, group) {
                if c.rx.uncounted() {
                    tcp::recount(c, l);
                }
                let fd = l.fd.load(Relaxed);
                if received::is_still_counted(c, l) {
                    c.rx.declare_ready(&m, &Sock::new(fd, group));
                }
            } else if sets::unwaited(i) {
                set_reason(c, Reason::EpollShared);
            }
        }
    }
}

/// Switches the sending half up, if the receiver is ready. Cheap when it is not.
#[inline(always)]
pub fn try_up(i: u32, c: &Conn, l: &Local, fd: i32) -> bool {
    if c.flags.load(Relaxed) & flag::LANE == 0 {
        return false;
    }
    let Some((group, m)) = attached::of(c, l) else {
        return false;
    };
    if !c.tx.can_up(&m) || !open(c) || group.state.load(Relaxed) != crate::state::groups::USED {
        return false;
    }
    let Some(_g) = lock::try_lock(&c.tx.lock) else {
        return false;
    };
    if !attached::is_still(c, group, &m) || !open(c) || !sets::activate(i, group) {
        return false; // it changed before we got the lock
    }
    if sys::inode(fd).map_or(0, |(inode, _)| inode) != c.inode.load(Relaxed) {
        return false; // `fd` is another file now: see `tcp::still`
    }
    if !probes::allow_up(l, fd) {
        return false;
    }
    if c.tx.uncounted() {
        tcp::recount(c, l);
    }
    match c.tx.try_up(&m, &Sock::new(fd, group)) {
        Ok(up) => {
            if up {
                attached::counted_up(c);
            }
            up
        }
        Err(r) => {
            // Somebody wrote to the socket without our hooks: both directions stay on TCP.
            table::disqualify(c, r);
            false
        }
    }
}

/// Takes both directions down as far as this end can: the sending half now, the receiving half by a request to the
/// sender. May be called from any hook.
pub fn take_down(i: u32, why: Cause) {
    let c = table::conn(i);
    let l = table::local(i);
    let Some((group, m)) = attached::of(c, l) else {
        return;
    };
    crate::tcp::check(i, l.fd.load(Relaxed)); // no frame to a dead peer: its kernel would send a reset
    let port = Sock::new(l.fd.load(Relaxed), group);
    let still = || attached::is_still(c, group, &m);
    if let Some(_g) = lock::lock(&c.tx.lock).filter(|_| still()) {
        let was = c.tx.is_up();
        let _ = c.tx.down(&m, &port);
        if was {
            probes::went_down(c, why);
        }
    }
    if let Some(_g) = lock::lock(&c.rx.lock).filter(|_| still()) {
        c.rx.want_down(&m, &port);
    }
    port::ring(group);
}

/// The process at the other end of a link group is gone: what we send must meet TCP's errors, and what it had published
/// stays readable.
pub fn group_gone(group: &LinkGroup) {
    let fins = sys::now_ms() + FIN_MS;
    // (A process may have it mapped for a connection whose lane another one has given back. Under the lock: no lane is
    // being attached.)
    let is_on = |c: &Conn| {
        let _g = lock::lock(&c.tx.lock);
        attached::is_on(c, group)
    };
    table::each(|i, c| {
        if core::ptr::eq(table::local(i).group.load(Relaxed), group) && is_on(c) {
            if !group.is_remote() {
                return peer_end_gone(i, c, fins);
            }
            remote::gone(i, c, group);
            tell(i);
        }
    });
}

/// Milliseconds within which the FINs of a process that is gone arrive, unless another process holds its ends.
const FIN_MS: u64 = 20;

/// The same for one connection, whose lane is within the node. Waits for a FIN until `fins` (of `now_ms`) at most,
/// which is the limit for all connections of that process together.
fn peer_end_gone(i: u32, c: &Conn, fins: u64) {
    let l = table::local(i);
    let fd = l.fd.load(Relaxed);
    if c.flags.load(Relaxed) & flag::GIVEN_BACK != 0 {
        return retire::retire(i, c); // another program continues with the other end
    }
    l.peer_dead.store(1, Relaxed); // if its FIN does not arrive: see `ends`
    let ended = |ms| sys::poll_ms(fd, libc::POLLRDHUP, ms).is_ok_and(|e| e & libc::POLLRDHUP != 0);
    if let Some((_, m)) = attached::of(c, l).filter(|_| attached::engaged_tx(c)) {
        // The doorbell reports the death before the FIN arrives. Wait for it: bytes sent after it would get
        // another answer.
        let ms = match c.rx.died_unread(&m, true) {
            true => fins.saturating_sub(sys::now_ms()),
            false => 0,
        };
        if ended(num::small(num::size(ms))) && c.rx.notice_death(&m, true) {
            ends::reset_by_death(c, &m, fd);
        }
    }
    if let Some(_g) = lock::lock(&c.tx.lock) {
        if let Some((_, m)) = attached::of(c, l) {
            c.tx.abandon(&m);
        }
        probes::restore(c, l);
    }
    table::disqualify(c, Reason::PeerGone);
    tell(i);
}

/// Whoever waits for the connection looks at it. (A thread that found the link group gone before this connection was told
/// listens to no doorbell, and has no time set.)
fn tell(i: u32) {
    sets::notify(i);
    waiters::look(i);
}

/// May the daemon ask us to register this connection although it is idle? Then threads that wait for it also
/// listen to the daemon.
pub fn on_call(c: &Conn) -> bool {
    c.state.load(Relaxed) == state::OPEN
        && c.calls.load(Relaxed) <= CALLS
        && c.flags.load(Relaxed) & (flag::CLIENT | flag::DISQUALIFIED | flag::HELD) == 0
}

/// Does for the sending half what its receiver requests. Called wherever a thread looks at the lane, because the
/// peer may wait for bytes to come back to TCP while we only read. False: another thread has the direction's lock
/// and should do it.
#[inline(always)]
pub fn service(c: &Conn, group: &LinkGroup, m: &Memory, fd: i32) -> bool {
    !c.tx.has_work(m) || service_slow(c, group, m, fd)
}

#[cold]
fn service_slow(c: &Conn, group: &LinkGroup, m: &Memory, fd: i32) -> bool {
    let g = lock::try_or_inherit(&c.tx.lock);
    if g.is_some() {
        if !attached::is_still(c, group, m) {
            return true;
        }
        let was = c.tx.is_up();
        let port = Sock::new(fd, group);
        let _ = c.tx.look(m, &port);
        if was && !c.tx.is_up() {
            probes::went_down(c, Cause::Peer);
        } else if !was && c.tx.is_up() {
            attached::counted_up(c);
        }
        let gone = || group.state.load(Relaxed) == crate::state::groups::GONE;
        if c.tx.shut.load(Relaxed) != 0 && (!group.is_remote() || gone()) {
            c.tx.end_late(&port);
        }
    }
    g.is_some()
}
