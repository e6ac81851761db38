//! The close of a descriptor, and the end of a connection in this process.

use super::linger;
use super::remote;
use super::shutdown::{flush, take_frame, Flushed};
use crate::promotion::{self, family};
use crate::state::fdtab::{self, Fd};
use crate::state::groups::LinkGroup;
use crate::state::{attached, table, uring, waiters};
use crate::sys::{self, lock, pids};
use crate::tcp::port::Sock;
use crate::{daemon, sets, tcp};
use core::sync::atomic::Ordering::*;
use lane::family::{flag, state, Conn};
use lane::half::Memory;
use lane::num;
use lane::proto::reason::Reason;

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
pub(super) fn release(fd: i32, i: u32, sock: i32) -> Option<usize> {
    match sock >= 0 {
        true => fdtab::changes(fd), // until the caller has closed it
        false => _ = fdtab::set(fd, Fd::Other),
    }
    let l = table::local(i);
    if table::let_go(l) {
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
        c.fd.store(num::bits(fd) + 1, Relaxed);
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
    let lingers = !held && remote::lingers(c, fd);
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
pub(super) fn sole_holder(c: &Conn) -> bool {
    let me = pids::me();
    table::holders(c) == c.holders.iter().filter(|h| h.load(Relaxed) == me).count()
}

/// The connection ends in this process; the caller closes `fd` next.
fn end(fd: i32, i: u32) {
    let c = table::conn(i);
    let l = table::local(i);
    linger::restore(l, fd);
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
        return table::release(i);
    }
    if c.flags.load(Relaxed) & flag::LEFT != 0 && !attached::engaged(c) {
        // The connection does not end: another program has it. The kernel reports what there is to report.
    } else if let Some((group, m)) = attached::of(c, l) {
        match group.is_remote() {
            true => remote::close(c, group, &m, fd),
            false => on_node(c, (group, &m), fd),
        }
    }
    // Count before the entry disappears from readers' view, because telling the daemon takes time.
    table::table().iter().for_each(|t| t.count_ended(c));
    c.state.store(state::BUSY, Relaxed);
    promotion::end_lane(i, false);
    table::remove_holder(c, pids::me());
    table::free(i);
}

/// The end of a connection whose lane is within the node.
fn on_node(c: &Conn, (group, m): (&LinkGroup, &Memory), fd: i32) {
    let port = Sock::leaving(fd, group);
    let (_t, _r) = (lock::lock(&c.tx.lock), lock::lock(&c.rx.lock));
    if !attached::is_still(c, group, m) {
        // Another thread has given the lane back, because the other end has left it: all is on TCP, and the words may be
        // the next connection's. (Number and entry are ours until the caller has closed the one and freed the other.)
        return;
    }
    let linger_ms = linger::linger_ms(fd);
    let for_no_time = linger_ms == Some(0);
    // (What the daemon has taken over it finishes without us; it has a copy of the socket, and the FIN follows.)
    // (A close that lingers waits for that first, and the kernel's close then for the rest.)
    let patience = linger_ms.unwrap_or(0).min(promotion::LEAVE_MS);
    let flushed = flush(c, m, &port, patience);
    let late = flushed == Flushed::Late;
    // Close first, then look: a sender publishes first, then looks whether we have closed. (A native call of another thread
    // keeps the socket open until it returns: no FIN follows before that.)
    let kept = c.rx.inside() + c.tx.inside() > 0;
    let sent = c.tx.sent_at_fin(kept || flushed == Flushed::ByDaemon);
    c.rx.close(m, &port, sent);
    take_frame(c, m, &port, true, &mut None);
    if late && !for_no_time {
        tcp::count_reset(c, fd, Reason::Stalled);
    }
    let reset = late || c.rx.ring_unread(m) > 0;
    if reset {
        // Unread bytes at close make it a reset, as in TCP (RFC 1122, 4.2.2.13), also after a SHUT_RD. So do
        // sent bytes that did not get onto TCP: the peer must not take the end for a clean one.
        linger::reset_at_close(fd);
    }
    let in_kernel = || sys::ioctl_i32(fd, libc::FIONREAD).is_ok_and(|n| n > 0);
    let reset = reset || for_no_time || in_kernel();
    if reset && !kept {
        c.rx.announce_reset(m, &port);
    }
    match flushed {
        Flushed::OnTcp(repeated) => c.tx.shut(m, &port, repeated),
        Flushed::Late => c.tx.shut(m, &port, None),
        Flushed::ByDaemon if reset => tcp::disconnect(fd), // not when it is done
        Flushed::ByDaemon => {}
    }
}

/// Is a registration of this connection in progress, made by this process?
fn mine_registered(c: &Conn) -> bool {
    c.flags.load(Relaxed) & flag::REGISTERED != 0 && c.owner_pid.load(Relaxed) == pids::me()
}
