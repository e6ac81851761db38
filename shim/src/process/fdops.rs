//! Descriptors that come and go: what close, dup, connect, accept, fork and exec mean for the tables.

mod far;
mod shutdown;
mod unseen;

pub use shutdown::{after_shutdown, before_shutdown, Left};
pub use unseen::{not_ours, replaced, vanished};

use crate::promotion::{self, family};
use crate::state::fdtab::{self, Fd};
use crate::state::{lane, table, uring, waiters};
use crate::sys::{self, lock, pids, thread};
use crate::tcp::port::Sock;
use crate::{daemon, sets, tcp};
use core::sync::atomic::Ordering::*;
use link::family::{flag, state, Conn};
use link::reason::Reason;
use shutdown::{flush, take_frame};

/// A new TCP socket. `nonblock`: as the application asked for it.
pub fn socket_made(fd: i32, nonblock: bool, open: bool, client: bool) {
    let flags = if nonblock { flag::NONBLOCK } else { 0 } | if client { flag::CLIENT } else { 0 };
    let entered = enter(fd, flags, open);
    if let Some(i) = entered.filter(|_| open && crate::sys::env::eager()) {
        crate::preserving_errno(|| promotion::consider(i, fd, table::conn(i)));
    }
}

/// A TCP socket gets an entry with these flags.
pub fn enter(fd: i32, flags: u32, open: bool) -> Option<u32> {
    // (The descriptor table comes first: it must know the descriptors that are made for the other table.)
    if crate::sys::env::off() || !fdtab::init() || !table::init() {
        return None;
    }
    replaced(fd);
    let i = table::alloc(fd, flags)?;
    let c = table::conn(i);
    if flags & flag::NEW != 0 {
        crate::promotion::received::begin_anew(c);
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
    give_up(fd, Reason::NotEstablished);
}

/// `connect` succeeded or is under way.
pub fn connected(fd: i32, i: u32, unspec: bool) {
    let c = table::conn(i);
    if unspec {
        // From now on, the socket is another connection, whose counts continue: it stays on TCP.
        table::disqualify(c, Reason::NotEstablished);
        waiters::look(i);
        return;
    }
    c.flags.fetch_or(flag::CLIENT, Relaxed);
    c.state.store(state::OPEN, Release);
    if crate::sys::env::eager() {
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
/// a lane any more; a lane that it has leaves when that program is executed.
pub fn copied_for_another(old: i32, new: i32) {
    fdtab::reach(new); // `before_exec` looks for it among the numbers that survive
    if let Some(i) = fdtab::conn(old) {
        let c = table::conn(i);
        if c.flags.load(Relaxed) & flag::LANE == 0 {
            table::disqualify(c, Reason::Left);
        }
    }
}

/// Called before a descriptor of the application is closed (or replaced by dup2). If the connection lingers,
/// returns the argument for [`closed`].
pub fn before_close(fd: i32) -> Option<usize> {
    match fdtab::get(fd) {
        Fd::Set(s) => {
            fdtab::set(fd, Fd::Other);
            sets::closed(s);
        }
        Fd::Ring(r) => {
            fdtab::set(fd, Fd::Other);
            uring::closed(r);
        }
        Fd::Conn(i) if tcp::proven(fd) == Some(i) => return release(fd, i, fd),
        // (It is another file by now.)
        Fd::Conn(_) | Fd::Other | Fd::Ours => {}
    }
    None
}

/// After a close that lingers: the number is free already, as it is in the kernel during the wait.
pub fn closed(what: usize) {
    crate::preserving_errno(|| tcp::call::closed(what));
}

/// `fd` does not stand for the connection any more. `sock`: the descriptor itself, or -1 if it is gone already. If
/// the connection lingers, returns the argument for [`closed`].
fn release(fd: i32, i: u32, sock: i32) -> Option<usize> {
    match sock >= 0 {
        true => fdtab::changes(fd), // until the caller has closed it
        false => _ = fdtab::set(fd, Fd::Other),
    }
    let l = table::local(i);
    if l.refs.fetch_sub(1, SeqCst) == 1 {
        return last_close(sock, i);
    }
    if sock >= 0 {
        sets::copy_closed(i, sock);
    }
    if l.fd.load(Relaxed) == fd || sock < 0 {
        // Another descriptor stands for the connection now.
        if let Some(f) = (0..=fdtab::high()).find(|f| fdtab::conn(*f) == Some(i)) {
            moved(i, f);
        }
    }
    None
}

/// From now on, `fd` is the connection's descriptor: threads that sleep with another descriptor of it look again.
fn moved(i: u32, fd: i32) {
    let (c, l) = (table::conn(i), table::local(i));
    {
        let (_t, _r) = (lock::lock(&c.tx.lock), lock::lock(&c.rx.lock));
        l.fd.store(fd, SeqCst);
        c.fd.store(fd as u32 + 1, Relaxed);
    }
    waiters::look_again(i);
}

/// The last descriptor of this process is closed. If calls of other threads sleep on the connection, they keep it,
/// as in the kernel, and the last of them finishes the close. A close that lingers is finished by [`closed`].
fn last_close(fd: i32, i: u32) -> Option<usize> {
    let (c, l) = (table::conn(i), table::local(i));
    let held = {
        let (_t, _r) = (lock::lock(&c.tx.lock), lock::lock(&c.rx.lock));
        tcp::call::close(i, l)
    };
    let lingers = !held && far::lingers(c, fd);
    if lingers {
        sets::forget(i, sole_holder(c)); // as the kernel does before it waits
    }
    if held || lingers {
        if let Some(hidden) = fdtab::hidden_copy(fd) {
            moved(i, hidden);
            if lingers {
                return Some(tcp::call::defer_to_self(i, l));
            }
            if tcp::call::defer(l) {
                sets::copy_closed(i, fd); // sets continue to report it
                return None;
            }
            fdtab::close_ours(hidden);
        }
    }
    // While the number is still the connection's. (A registration ends with the last descriptor of the socket.)
    sets::forget(i, sole_holder(c));
    finish(fd, i);
    None
}

fn finish(fd: i32, i: u32) {
    let inherited = family::closing(table::local(i));
    end(fd, i);
    family::closed(inherited);
}

/// The last call that slept on a connection has ended, and the connection's last descriptor is closed.
pub fn finish_close(i: u32) {
    sets::forget(i, sole_holder(table::conn(i)));
    let hidden = table::local(i).fd.load(Relaxed);
    finish(hidden, i);
    fdtab::close_ours(hidden);
}

/// Is this process the only holder?
fn sole_holder(c: &Conn) -> bool {
    let me = pids::me();
    table::holders(c) == c.holders.iter().filter(|h| h.load(Relaxed) == me).count()
}

/// The connection ends in this process; the caller closes `fd` next.
fn end(fd: i32, i: u32) {
    let c = table::conn(i);
    let l = table::local(i);
    // (This process stays a holder until the end, so that no other process considers itself the only one, or the
    // entry free, too early. If two processes close at once, each may see the other, and neither has anything to
    // announce: the kernel reports the end.)
    let alone = sole_holder(c);
    let mine = c.owner_pid.load(Relaxed) == pids::me();
    // The daemon may not have read the registration yet, and its copy would hold back the FIN of the last close.
    // (Which close is the last is not known here, whatever `alone` says; so the socket is never shut down.)
    if c.flags.load(Relaxed) & flag::REGISTERED != 0 {
        daemon::take_back(i, c.gen.load(Relaxed));
    }
    if !alone {
        if mine_registered(c) {
            // The offer would come to this process; the remaining holders register the connection themselves.
            daemon::forget(i, c.gen.load(Relaxed));
            c.flags.fetch_and(!flag::REGISTERED, Relaxed);
        }
        // Other processes hold it: a lane that only this process used goes down, so that they can use the
        // connection and get a lane of their own.
        if mine && c.flags.load(Relaxed) & flag::LANE != 0 {
            let whole = promotion::yield_lane(i, fd);
            promotion::end_lane(i, whole);
            promotion::yielded(c);
        }
        return table::give_up(i);
    }
    if let Some((link, m)) = lane::of(c, l).filter(|(k, _)| k.is_far()) {
        far::close(c, link, &m, fd);
    } else if c.flags.load(Relaxed) & flag::LEFT != 0 && !lane::engaged(c) {
        // The connection does not end: another program has it. The kernel reports what there is to report.
    } else if let Some((link, m)) = lane::of(c, l) {
        let port = Sock { fd, link };
        let _t = lock::lock(&c.tx.lock);
        let _r = lock::lock(&c.rx.lock);
        let whole = flush(c, &m, &port, fd);
        let for_no_time = far::lingers_for_no_time(fd);
        // (Bytes that a reset would discard need not be sent.)
        let clean = whole && !for_no_time && c.rx.ring_unread(&m) == 0;
        let repeated = if clean {
            c.tx.repeat_unread(&m, &port)
        } else {
            None
        };
        // Close first, then look: a sender publishes first, then looks whether we have closed.
        c.rx.close(&m, &port, c.tx.kpos.load(Relaxed));
        take_frame(c, &m, &port, true);
        let reset = !whole || c.rx.ring_unread(&m) > 0;
        if reset {
            // Unread bytes at close make it a reset, as in TCP (RFC 1122, 4.2.2.13), also after a SHUT_RD. So do
            // sent bytes that did not get onto TCP: the peer must not take the end for a clean one.
            let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &RESET_AT_CLOSE);
        }
        let in_kernel = || sys::ioctl_i32(fd, libc::FIONREAD).is_ok_and(|n| n > 0);
        if reset || for_no_time || in_kernel() {
            c.rx.announce_reset(&m, &port);
        }
        c.tx.shut(&m, &port, repeated);
    }
    // Count before the entry disappears from readers' view, because telling the daemon takes time.
    table::table().iter().for_each(|t| t.count_ended(c));
    c.state.store(state::BUSY, Relaxed);
    promotion::end_lane(i, false);
    table::remove_holder(c, pids::me());
    table::free(i);
}

/// Is a registration of this connection in progress, made by this process?
fn mine_registered(c: &Conn) -> bool {
    c.flags.load(Relaxed) & flag::REGISTERED != 0 && c.owner_pid.load(Relaxed) == pids::me()
}

/// `struct linger` that makes a close reset the connection: on, with a time of 0.
const RESET_AT_CLOSE: [u8; 8] = [1, 0, 0, 0, 0, 0, 0, 0];

/// Called before a fork: children count as holders before they exist, so that nothing is promoted meanwhile.
pub fn before_fork() {
    pids::fork_begins();
    fdtab::limit_settled();
    if table::table().is_some() {
        family::forks();
        table::each_fd(|_, _, c| {
            c.forks.fetch_add(1, SeqCst);
            // If another thread is attaching a lane, wait until it has: it looks at the holders under these locks.
            if c.flags.load(Acquire) & flag::REGISTERED != 0 {
                drop(lock::lock_within(&c.tx.lock, SETTLE_MS));
                drop(lock::lock_within(&c.rx.lock, SETTLE_MS));
            }
        });
        crate::state::links::before_fork();
    }
}

/// Milliseconds that a fork waits for a lock of a connection, whose holder may be stopped.
const SETTLE_MS: u32 = 50;

/// Called before a thread gets a descriptor table of its own: a number may then mean one thing to it and another
/// to the other threads, so no connection can be carried any more.
pub fn before_split() {
    // (A single thread splits from nobody; a vfork child has its own descriptors already.)
    if !table::is_vfork_child() && !sys::is_single_threaded() {
        step_out(Reason::Shared);
    }
}

/// All connections leave their lanes for good, and from now on the shim ignores all descriptors of this process.
pub fn step_out(why: Reason) {
    if crate::sys::env::off() || table::is_vfork_child() {
        return;
    }
    crate::preserving_errno(|| {
        let all = || {
            table::each_fd(|fd, i, _| {
                promotion::leave(i, fd, why);
            })
        };
        all();
        crate::sys::env::switch_off();
        all(); // once more, for what another thread has made meanwhile
        fdtab::forget_all();
    });
}

/// After a fork, in the parent. The child has entered itself as a holder, or does so soon.
pub fn after_fork_parent(failed: bool) {
    pids::fork_ends();
    if !failed {
        sets::after_fork_parent();
    }
    if failed && table::table().is_some() {
        table::each_fd(|_, _, c| {
            c.forks.fetch_sub(1, SeqCst);
        });
    }
}

/// After a fork, in the child: it gets a control connection of its own (when needed) and its own list of sleepers.
/// Lanes are the parent's until the child uses them.
///
/// Handlers of `pthread_atfork` run before `fork` returns, and may close what they have inherited: the first hook
/// that notices the fork calls this, and later calls find nothing to do.
pub fn after_fork_child() {
    if crate::sys::env::off() || !pids::enter_process() {
        return;
    }
    thread::forget_tid();
    let me = sys::getpid();
    pids::set_pid(me);
    let counted = pids::fork_ended();
    if table::table().is_none() {
        return;
    }
    fdtab::forget_changes();
    let mut last = u32::MAX;
    let known = table::same_pid_namespace();
    family::begin();
    table::each_fd(|_, i, c| {
        family::inherit(i);
        table::local(i).regs_lock.store(0, Relaxed);
        if !known {
            return; // stays counted among the forks
        }
        // A duplicated descriptor was counted once per descriptor before the fork.
        if last != i && !c.holders.iter().any(|h| h.load(Relaxed) == me) {
            table::add_holder(c, me);
        }
        last = i;
        if counted {
            c.forks.fetch_sub(1, SeqCst);
        }
    });
    tcp::call::after_fork();
    daemon::after_fork();
    crate::state::links::after_fork();
    waiters::after_fork();
    sets::after_fork();
    family::begun();
}

/// Before the program is replaced: every lane on a descriptor that survives leaves. If one cannot in time, its
/// connection is reset, so that the new program does not lose bytes silently.
pub fn before_exec() {
    if table::table().is_none() || crate::sys::env::off() {
        return;
    }
    let vfork_child = sys::getpid() != pids::pid();
    if !vfork_child {
        // The FIN of a connection that the exec closes must not wait until the daemon has read its copy.
        daemon::settle_registrations(true);
    }
    // By the kernel's own view: a vfork child has moved descriptors without changing our tables, and `dup2` clears
    // close-on-exec.
    let mut lanes = false;
    table::each_fd(|_, _, c| lanes |= c.flags.load(Relaxed) & flag::LANE != 0);
    if lanes {
        for fd in 0..=fdtab::high().max(1024) {
            if fdtab::get(fd) == Fd::Ours
                || !sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC == 0)
            {
                continue;
            }
            let Ok((inode, _)) = sys::inode(fd) else {
                continue;
            };
            table::each_fd(|_, i, c| {
                if c.flags.load(Relaxed) & flag::LANE != 0
                    && c.inode.load(Relaxed) == inode
                    && (lane::engaged(c) || c.flags.load(Relaxed) & flag::DISQUALIFIED == 0)
                {
                    promotion::leave(i, fd, Reason::Left);
                }
            });
        }
    }
    table::each_fd(|fd, i, c| {
        let kept = sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC == 0);
        let lane = lane::of(c, table::local(i));
        // (The daemon's copy of a far connection's socket would outlive the descriptor that exec closes.)
        let far = lane.is_some_and(|(k, _)| k.is_far());
        if far || kept && lane.is_some() {
            promotion::leave(i, fd, Reason::Left);
        } else if kept {
            table::disqualify(c, Reason::Left);
        } else if !vfork_child {
            table::remove_holder(c, pids::me());
        }
        if kept && !vfork_child {
            sets::deactivate(i); // our inner sets, and what they report, end at the exec
        }
    });
}

/// The exec failed: we are still here.
pub fn exec_failed() {
    if table::table().is_some() && !crate::sys::env::off() && sys::getpid() == pids::pid() {
        table::each_fd(|fd, _, c| {
            if !c.holders.iter().any(|h| h.load(Relaxed) == pids::me()) {
                table::add_holder(c, pids::me());
            }
            sets::tell_error(fd);
        });
    }
}

/// Before `posix_spawn`, `system`, `popen`: the child inherits what is not closed on exec.
pub fn before_spawn() {
    if table::table().is_none() {
        return;
    }
    table::each_fd(|fd, i, c| {
        if c.state.load(Relaxed) != state::LISTEN
            && sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC == 0)
        {
            promotion::leave(i, fd, Reason::Left);
        }
    });
}

/// The descriptor now belongs to code that the hooks do not see (stdio): TCP for good. It is forgotten, because
/// its number may get another meaning unnoticed.
pub fn disown(fd: i32) {
    let _inside = thread::enter();
    if let Some(i) = tcp::proven(fd) {
        crate::preserving_errno(|| {
            promotion::leave(i, fd, Reason::Bypassed);
            fdtab::set(fd, Fd::Other);
            let l = table::local(i);
            if l.refs.fetch_sub(1, AcqRel) == 1 {
                let inherited = family::closing(l);
                // As in `end`; we shall not notice its close.
                daemon::take_back(i, table::conn(i).gen.load(Relaxed));
                sets::disowned(i);
                promotion::end_lane(i, false);
                table::give_up(i);
                family::closed(inherited);
            }
        });
    }
}

/// A descriptor is used in a way that no lane can serve: the connection goes back to TCP for good.
pub fn give_up(fd: i32, why: Reason) {
    if fdtab::conn(fd).is_none() {
        return;
    }
    let _inside = thread::enter();
    if let Some(i) = crate::preserving_errno(|| tcp::proven(fd)) {
        crate::preserving_errno(|| promotion::leave(i, fd, why));
    }
}
