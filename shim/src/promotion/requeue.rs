//! The other end's process is gone, what it sent is unread on its ring, and this end leaves the lane for where only TCP
//! is read: the daemon puts these bytes into the socket's receive queue, before the FIN, where they would be without a
//! lane. (It takes a permission that this process has not.)

use crate::daemon;
use crate::state::groups::LinkGroup;
use crate::state::{attached, fdtab, table};
use crate::sys::{self, lock};
use crate::tcp::port::Sock;
use crate::tcp::{ends, CLOSE_WAIT};
use core::sync::atomic::{AtomicU64, Ordering::*};
use lane::family::Conn;
use lane::half::rx::How;
use lane::half::{Iov, Memory, Received};
use lane::num;

/// What came of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Requeued {
    /// The bytes are on TCP, and so is the direction.
    Yes,
    /// Nothing was done: the daemon cannot be asked yet, or a send is in progress.
    Later,
    /// It cannot be done.
    No,
}

/// Milliseconds for the daemon to begin, and then to end. (It takes less than one; more only if it gets no processor, or is
/// stopped.)
const BEGIN_MS: u64 = 500;
const END_MS: u64 = 1000;

/// After a daemon that has not answered, the others of a call that leaves with many connections do not wait for it.
const REST_MS: u64 = 2000;
/// Until then (ms) it is not asked.
static RESTS_UNTIL: AtomicU64 = AtomicU64::new(0);

/// Tries it. Called with no lock held. (The locks of both directions are held while the daemon is at work: what another
/// thread sends or receives on TCP meanwhile would go to the wrong place.) `soon`: whether the other end is gone may be known
/// in a moment.
pub fn requeue(i: u32, fd: i32, soon: bool) -> Requeued {
    let (c, l) = (table::conn(i), table::local(i));
    let Some((group, m)) = attached::of(c, l).filter(|(g, _)| !g.is_remote()) else {
        return Requeued::No;
    };
    let rests = sys::now_ms() < RESTS_UNTIL.load(Relaxed);
    if rests || sys::tcp_state(fd) != Some(CLOSE_WAIT) {
        return Requeued::No;
    }
    if !(ends::is_dead(l) || group.is_dead()) {
        return if soon { Requeued::Later } else { Requeued::No };
    }
    // (A vfork child has its parent's connection.)
    if !table::is_vfork_child() && !daemon::ensure() {
        return if daemon::fd() >= 0 {
            Requeued::Later
        } else {
            Requeued::No
        };
    }
    let (Some(_t), Some(_r)) = (lock::lock(&c.tx.lock), lock::lock(&c.rx.lock)) else {
        return Requeued::No;
    };
    let told = c.has_error() || c.rx.shut.load(Relaxed) != 0;
    if told || !c.rx.go_on(&m) {
        return Requeued::No;
    }
    if !c.tx.stop_native() {
        return Requeued::Later;
    }
    let done = by_daemon((i, c), fd, (group, &m));
    if done {
        c.rx.abandon();
    }
    c.tx.allow_native();
    match done {
        true => Requeued::Yes,
        false => Requeued::No,
    }
}

/// Both locks are held, and no native send is in progress.
fn by_daemon((i, c): (u32, &Conn), fd: i32, (group, m): (&LinkGroup, &Memory)) -> bool {
    let port = Sock::new(fd, group);
    let Some(bytes) = c.rx.unread(m, &port).filter(|n| *n > 0) else {
        return false;
    };
    let Some(file) = File::of(num::size(bytes), |to, n| peek(c, m, &port, to, n)) else {
        return false;
    };
    let queued = || sys::ioctl_i32(fd, libc::FIONREAD).is_ok_and(|n| n > 0);
    // What is in the queue, or repeats the ring, is in the file. Until it is in the queue again, who goes on with the
    // connection in our place must not see the end of TCP for that of the stream.
    let emptied = queued();
    if emptied {
        c.rx.error.put(libc::ECONNRESET);
        while sys::recv(fd, core::ptr::null_mut(), 1 << 30, libc::MSG_TRUNC).is_ok_and(|n| n > 0) {}
    }
    let done = file.give((i, c.gen.load(Relaxed)), bytes, fd);
    if emptied && done {
        c.rx.error.take();
    }
    done
}

/// All that is unread, in the order of the stream.
fn peek(c: &Conn, m: &Memory, port: &Sock, to: *mut u8, n: usize) -> bool {
    let v = [libc::iovec {
        iov_base: to.cast(),
        iov_len: n,
    }];
    let how = How {
        peek: true,
        look: true,
        ..How::default()
    };
    c.rx.recv(m, port, &mut Iov::new(&v), how) == Received::Bytes(n)
}

/// A memory file with the bytes.
struct File(i32);

impl Drop for File {
    fn drop(&mut self) {
        fdtab::close_ours(self.0);
    }
}

impl File {
    fn of(bytes: usize, fill: impl FnOnce(*mut u8, usize) -> bool) -> Option<File> {
        if sys::rlimit_fsize() < bytes as u64 {
            return None;
        }
        let file = File(fdtab::hide(sys::memfd(c"underpass-unread").ok()?));
        sys::ftruncate(file.0, bytes).ok()?;
        let to = sys::map(file.0, bytes, true).ok()?;
        let filled = fill(to, bytes);
        sys::unmap(to, bytes);
        filled.then_some(file)
    }

    /// Gives it to the daemon. True: it has put the bytes into the queue of `fd`.
    fn give(&self, who: (u32, u32), bytes: u64, fd: i32) -> bool {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let Ok((ours, theirs)) = sys::socketpair(libc::AF_UNIX, kind) else {
            return false;
        };
        let ours = fdtab::hide(ours);
        let asked = daemon::requeue(who, bytes, [fd, self.0, theirs]);
        sys::close(theirs);
        let done = asked && self.answer(ours);
        fdtab::close_ours(ours);
        done
    }

    /// The daemon's answer. If it has not begun in time, it must not begin any more: it seals the file first.
    fn answer(&self, from: i32) -> bool {
        let until = sys::now_ms() + BEGIN_MS;
        if let Some(done) = answer(from, until) {
            return done;
        }
        RESTS_UNTIL.store(until + REST_MS, Relaxed);
        sys::ftruncate(self.0, 0).is_err() && answer(from, until + END_MS).unwrap_or(false)
    }
}

/// `None`: there is none until then.
fn answer(from: i32, until: u64) -> Option<bool> {
    loop {
        let mut b = 0u8;
        match sys::recv(from, &mut b, 1, 0) {
            Ok(n) => return Some(n == 1 && b == 1),
            Err(libc::EAGAIN) => {}
            Err(_) => return Some(false),
        }
        let left = until.saturating_sub(sys::now_ms());
        if left == 0 {
            return None;
        }
        let _ = sys::poll_ms(
            from,
            libc::POLLIN,
            num::small(num::size(left.min(BEGIN_MS))),
        );
    }
}
