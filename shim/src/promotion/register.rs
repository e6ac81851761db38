//! Registration with the daemon: when it is made, and what happens if it is not answered with a lane.

use super::{takeover, unwatched, UNREGISTRABLE};
use crate::promotion::received;
use crate::state::fuse;
use crate::state::table::{self, set_reason};
use crate::sys::{self, env, lock, pids};
use crate::{daemon, sets, tcp};
use core::sync::atomic::Ordering::*;
use lane::abi::TcpPos;
use lane::family::{flag, state, Conn};
use lane::os::TcpInfo;
use lane::proto::msg::register;
use lane::proto::reason::Reason;

/// Milliseconds between two looks whether an operator has mended the fuse.
pub(super) const FUSE_MS: u64 = 1000;

/// May the connection be registered, as far as that can be told without its locks? If not, the reason is noted.
fn may_register(i: u32, c: &Conn) -> bool {
    if !daemon::ensure() {
        if env::eager() {
            daemon::await_greeting();
        }
        if !daemon::ensure() {
            match daemon::fd() >= 0 {
                true => table::later(c, Reason::TimeoutDaemon, 2), // a greeting was sent, and the answer comes soon
                false => table::later(c, daemon::absence(), 50),
            }
            return false;
        }
    }
    if !daemon::has_credit() || !daemon::settle() {
        table::later(c, Reason::TimeoutDaemon, 20);
    } else if fuse::is_blown() {
        if fuse::is_news() {
            daemon::fuse_blown();
        }
        table::later(c, Reason::Fuse, FUSE_MS);
    } else if table::holders(c) != 1 {
        table::forget_zombies(c);
        table::settle_births(true);
        table::later(c, Reason::Shared, 100);
    } else if sets::unservable(i) {
        table::later(c, Reason::EpollShared, 1000);
    } else if unwatched(c) || sets::unwaited(i) {
        set_reason(c, Reason::EpollShared); // until the first poll, registration or wait
    } else if received::is_twice(i, c) {
        table::later(c, Reason::HeldElsewhere, 2000);
    } else {
        return true;
    }
    false
}

/// Registers the connection if nothing forbids it now.
pub(super) fn try_register(i: u32, fd: i32, c: &Conn) {
    if !may_register(i, c) {
        return;
    }
    let (Some(_t), Some(_r)) = (lock::try_lock(&c.tx.lock), lock::try_lock(&c.rx.lock)) else {
        return;
    };
    if c.flags.load(Relaxed) & UNREGISTRABLE != 0 {
        return;
    }
    // (In a child, this may be the link group of its parent, which has given the lane back.)
    table::local(i).group.store(core::ptr::null_mut(), Release);
    if !received::is_evident(c, table::local(i)) {
        return table::later(c, Reason::Young, 5);
    }
    if c.tx.uncounted() || c.rx.uncounted() {
        tcp::recount(c, table::local(i));
    }
    let (tx_tcp_pos, rx_tcp_pos) = (c.tx.tcp_pos.load(SeqCst), c.rx.tcp_pos.load(SeqCst));
    let client = c.flags.load(Relaxed) & flag::CLIENT != 0;
    for _ in 0..3 {
        let Some(k) = sys::tcp_position(fd) else {
            return table::later(c, Reason::Young, 5); // its counters never stood still
        };
        if k.state != TcpInfo::ESTABLISHED {
            return table::later(
                c,
                Reason::NotEstablished,
                if env::eager() { 1 } else { 100 },
            );
        }
        if k.tx_pos(client) == tx_tcp_pos && k.rx_pos() == rx_tcp_pos {
            return send((i, fd), c, [tx_tcp_pos, rx_tcp_pos], 0);
        }
    }
    // Other threads may be moving bytes natively right now; if not, the hooks were bypassed. (A call that was in
    // progress when the kernel was asked still is, or has added its bytes to the count.)
    let counted = [c.tx.tcp_pos.load(SeqCst), c.rx.tcp_pos.load(SeqCst)];
    let position = sys::tcp_position(fd);
    let quiet = c.tx.native_calls.load(SeqCst) == 0
        && c.rx.native_calls.load(SeqCst) == 0
        && [c.tx.tcp_pos.load(SeqCst), c.rx.tcp_pos.load(SeqCst)] == counted;
    let sent = position.is_some_and(|k| k.tx_pos(client) != counted[0]);
    let taken = position.is_some_and(|k| k.rx_pos() != counted[1]);
    match c.flags.load(Relaxed) & flag::RECEIVED {
        0 if quiet && sent => table::disqualify(c, Reason::Bypassed),
        // The process that handed the connection on may continue to use it for a while.
        flag::RECEIVED if quiet && (sent || taken) => {
            received::begin_anew(c);
            send((i, fd), c, counted, register::MISCOUNTED);
        }
        _ => table::later(c, Reason::Young, 5),
    }
}

/// Sends the registration to the daemon. `flags`: in addition to the usual ones.
fn send((i, fd): (u32, i32), c: &Conn, tcp_pos: [TcpPos; 2], flags: u32) {
    let (me, l) = ((i, c.gen.load(Relaxed)), table::local(i));
    let m = received::registration(c, l, me, tcp_pos, flags);
    // Before the message: another thread may read the answer the next moment.
    set_reason(c, Reason::Waiting);
    c.peer_reason.store(0, Relaxed); // (that of a former registration)
    c.owner_pid.store(pids::me(), Relaxed);
    c.flags.fetch_or(flag::REGISTERED, SeqCst);
    l.hope_ms.store(sys::now_ms(), Relaxed);
    if !daemon::register(&m, me, fd) {
        c.flags.fetch_and(!flag::REGISTERED, SeqCst);
        table::later(c, Reason::TimeoutDaemon, 20);
    } else if l.refs.load(SeqCst) == 0 {
        daemon::take_back(i, me.1); // another thread has closed it without seeing the flag
    }
}

/// The registration was answered with a lane that is not wanted now. The connection may register again later.
pub(super) fn unregister(c: &Conn, gen: u32) {
    if c.gen.load(Relaxed) == gen && c.owner_pid.load(Relaxed) == pids::me() {
        c.flags.fetch_and(!flag::REGISTERED, Relaxed);
    }
}

/// The process that registered an inherited connection has ended without an answer: the registration is void.
pub(super) fn disown(c: &Conn) {
    let owner = c.owner_pid.load(Relaxed);
    if c.flags.load(Relaxed) & (flag::REGISTERED | flag::LANE) == flag::REGISTERED
        && owner != pids::me()
        && pids::is_gone(owner)
    {
        c.flags.fetch_and(!flag::REGISTERED, Relaxed);
    }
}

/// The daemon's answer: no lane. `retry_ms`: when to ask again; 0: not at all.
pub fn declined(i: u32, gen: u32, local: u32, peer: u32, retry_ms: u32) {
    if i as usize >= lane::family::CONNS {
        return;
    }
    let c = table::conn(i);
    // (A parent that has closed its copy does not decide for its child.)
    let ours = c.owner_pid.load(Relaxed) == pids::me();
    if c.gen.load(Relaxed) != gen || c.state.load(Relaxed) != state::OPEN || !ours {
        return;
    }
    c.reason.store(local, Relaxed);
    c.peer_reason.store(peer, Relaxed);
    if retry_ms == 0 {
        c.flags.fetch_or(flag::DISQUALIFIED, Relaxed);
    } else if c.flags.load(Relaxed) & flag::NEW == 0 {
        // (If it was lent again since it was registered, the answer is about what was before that.)
        let ms = match local == Reason::HeldElsewhere.code() {
            true => table::held_ms(c, retry_ms),
            false => retry_ms.into(),
        };
        c.not_before_ms.store(sys::now_ms() + ms, Relaxed);
    }
    c.flags.fetch_and(!flag::REGISTERED, Relaxed);
}

/// The daemon is gone: connections that waited for its answer may ask the next one, and what it had taken over is
/// finished here.
pub fn daemon_lost() {
    table::each(|i, c| {
        takeover::reclaim(i, c);
        let ours = c.owner_pid.load(Relaxed) == pids::me();
        if ours && c.flags.fetch_and(!flag::REGISTERED, Relaxed) & flag::REGISTERED != 0 {
            set_reason(c, daemon::absence());
        }
    });
}
