//! Descriptors that are made, and what becomes of their connections: socket, accept, connect, listen, dup.

use super::disown::force_tcp;
use super::unseen::{not_ours, replaced};
use crate::promotion::{self, family, received};
use crate::state::fdtab::{self, Fd};
use crate::state::{table, uring, waiters};
use crate::sys::{self, env};
use crate::{daemon, sets, tcp};
use core::sync::atomic::Ordering::*;
use lane::family::{flag, state};
use lane::proto::reason::Reason;

/// A new TCP socket. `nonblock`: as the application asked for it.
pub fn socket_made(fd: i32, nonblock: bool, open: bool, client: bool) {
    let flags = if nonblock { flag::NONBLOCK } else { 0 } | if client { flag::CLIENT } else { 0 };
    let entered = enter(fd, flags, open);
    if let Some(i) = entered.filter(|_| open && env::eager()) {
        crate::preserving_errno(|| promotion::consider(i, fd, table::conn(i)));
    }
}

/// A TCP socket gets an entry with these flags.
pub(super) fn enter(fd: i32, flags: u32, open: bool) -> Option<u32> {
    // (The descriptor table comes first: it must know the descriptors that are made for the other table.)
    if env::off() || !fdtab::init() || !table::init() {
        return None;
    }
    replaced(fd);
    let i = table::alloc(fd, flags)?;
    let c = table::conn(i);
    if flags & flag::NEW != 0 {
        received::begin_anew(c);
    }
    if open {
        c.state.store(state::OPEN, Release);
    }
    if !fdtab::set(fd, Fd::Conn(i)) {
        table::free(i);
        family::closed(false);
        return None;
    }
    Some(i)
}

/// Is a stream socket of one of the internet families?
pub fn is_tcp(domain: i32, ty: i32, proto: i32) -> bool {
    (domain == libc::AF_INET || domain == libc::AF_INET6)
        && ty & 0xf == libc::SOCK_STREAM
        && (proto == 0 || proto == libc::IPPROTO_TCP)
}

/// `connect(AF_UNSPEC)` is about to be made: calls that sleep on the connection end, and leave its error to
/// others.
pub fn disconnects(fd: i32, i: u32) {
    table::local(i).disconnects.fetch_add(1, SeqCst);
    force_tcp(fd, Reason::NotEstablished);
}

/// `connect` succeeded or is under way.
pub fn connected(fd: i32, i: u32, unspec: bool) {
    let c = table::conn(i);
    if unspec {
        // From now on, the socket is another connection, whose counts continue: it stays on TCP.
        table::disqualify(c, Reason::NotEstablished);
        c.tx.shut.store(0, Relaxed); // (of the connection before)
        waiters::look(i);
        return;
    }
    c.flags.fetch_or(flag::CLIENT, Relaxed);
    c.state.store(state::OPEN, Release);
    if env::eager() {
        crate::preserving_errno(|| promotion::consider(i, fd, c));
    }
}

pub fn listening(fd: i32, i: u32) {
    let c = table::conn(i);
    c.state.store(state::LISTEN, Release);
    // So the daemon learns of servers before their first connection is busy: `ss -l`, `check`.
    crate::preserving_errno(|| {
        table::name(i, fd);
        daemon::ensure();
    });
}

/// Another descriptor for the same description.
pub fn duplicated(old: i32, new: i32) {
    replaced(new);
    match fdtab::get(old) {
        Fd::Conn(i) if tcp::proven(old) == Some(i) => {
            table::local(i).refs.fetch_add(1, Relaxed);
            if !fdtab::set(new, Fd::Conn(i)) {
                // The number is beyond the table: it is used natively from now on.
                promotion::leave(i, old, Reason::Table);
            } else if new <= libc::STDERR_FILENO {
                // The hooks do not see the reads and writes of the C library's own streams.
                promotion::leave(i, old, Reason::Standard);
            }
        }
        Fd::Set(s) => {
            sets::duplicated(s);
            fdtab::set(new, Fd::Set(s));
        }
        Fd::Ring(r) => {
            uring::duplicated(r);
            fdtab::set(new, Fd::Ring(r));
        }
        _ => {}
    }
}

/// A new descriptor, which may be a copy of one of ours.
pub fn taken(new: i32) {
    if table::table().is_none() || not_ours() || !sys::is_tcp(new) {
        return;
    }
    let Ok(identity) = sys::inode(new) else {
        return;
    };
    let same = |f: &i32| fdtab::conn(*f).is_some() && sys::inode(*f) == Ok(identity);
    if let Some(old) = (0..=fdtab::high()).find(same) {
        duplicated(old, new);
    }
}

/// A vfork child has made a copy, usually for the program that it is about to execute. The connection must not get
/// a lane meanwhile; a lane that it has leaves when that program is executed.
pub fn copied_for_another(old: i32, new: i32) {
    fdtab::reach(new); // `before_exec` looks for it among the numbers that survive
    if let Some(i) = fdtab::conn(old) {
        let c = table::conn(i);
        if c.flags.load(Relaxed) & flag::LANE == 0 {
            table::lend(c);
        }
    }
}
