//! Sockets on their way to the daemon, which can be taken back until the daemon has read them.
//!
//! A copy of a socket in the queue of a slow or stopped daemon would hold back the FIN when the application
//! closes. `shutdown` cannot replace the close, because it ends the connection for all processes that hold it, and
//! nobody here knows them all. So a registration carries one end of a socket pair in whose queue the socket lies,
//! and we keep a descriptor of that end, too: whoever reads it first gets the socket. The daemon shuts the end down once
//! it has closed the socket, and a close waits for that: the FIN would come late, and for bytes that arrive meanwhile a
//! reset would come instead of it.

use super::datagram;
use crate::state::fdtab;
use crate::sys;
use core::sync::atomic::{AtomicI32, AtomicU32, Ordering::*};
use lane::num;

/// Number of registrations that may be under way, or over but without a message from the daemon since then. (It
/// usually gives fewer credits.)
const MAX: usize = 64;
/// Value of `Slot::end` while the slot is being filled or emptied.
const BUSY: i32 = -1;

/// A registration whose socket can still be taken back.
struct Slot {
    /// 0: free; [`BUSY`]; else our descriptor of the receiving end, plus 1.
    end: AtomicI32,
    conn: AtomicU32,
    gen: AtomicU32,
}

static SLOTS: [Slot; MAX] = [const {
    Slot {
        end: AtomicI32::new(0),
        conn: AtomicU32::new(0),
        gen: AtomicU32::new(0),
    }
}; MAX];

/// A socket in the queue of a pair, and the slot in which our descriptor of the receiving end is kept.
pub struct Handover {
    slot: &'static Slot,
    end: i32,
}

impl Handover {
    /// `None`: no slot or no descriptor is free.
    pub fn new(conn: u32, gen: u32, fd: i32) -> Option<Self> {
        let free = |s: &&Slot| s.end.compare_exchange(0, BUSY, Acquire, Relaxed).is_ok();
        let slot = SLOTS.iter().find(free).or_else(|| {
            settle(false); // frees what the daemon is done with since its last message
            SLOTS.iter().find(free)
        })?;
        let Some(end) = fill(fd) else {
            slot.end.store(0, Release);
            return None;
        };
        slot.conn.store(conn, Relaxed);
        slot.gen.store(gen, Relaxed);
        Some(Handover { slot, end })
    }

    /// The descriptor to send to the daemon.
    pub fn end(&self) -> i32 {
        self.end
    }

    /// The daemon has the end in its queue: from now on the socket can be taken back.
    pub fn sent(self) {
        // Publishes the slot with its contents. SeqCst: the caller looks next whether the connection was closed
        // meanwhile, and a closer first marks it as closed, then looks here.
        self.slot.end.swap(self.end + 1, SeqCst);
    }

    /// The registration could not be sent.
    pub fn drop_it(self) {
        fdtab::close_ours(self.end);
        self.slot.end.store(0, Release);
    }
}

/// Numbers below the limit that must be free if our descriptors count against it.
const SPARE: usize = 64;

/// Does our descriptor take one of the last numbers that the application may have? Then it is given up, so that
/// the application gets EMFILE only where it would without us.
fn is_scarce(end: i32) -> bool {
    let limit = num::size(sys::rlimit_nofile().min(i32::MAX as u64));
    if num::word(end) >= limit {
        return false;
    }
    let last = limit.saturating_sub(SPARE);
    match sys::fcntl(end, libc::F_DUPFD_CLOEXEC, last) {
        Ok(n) => {
            sys::close(n);
            num::word(n) != last
        }
        Err(_) => true,
    }
}

/// Makes a socket pair with `fd` in its queue; returns the receiving end, as a hidden descriptor.
fn fill(fd: i32) -> Option<i32> {
    let flags = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let (from, to) = sys::socketpair(libc::AF_UNIX, flags).ok()?;
    let sent = datagram::send(from, &[0], &[fd]);
    sys::close(from);
    if sent.is_err() {
        sys::close(to);
        return None;
    }
    let end = fdtab::hide(to);
    if is_scarce(end) {
        fdtab::close_ours(end); // with the socket in its queue
        return None;
    }
    Some(end)
}

/// The connection is about to be closed here, and the daemon must not hold it back: takes its socket back, or waits
/// until the daemon has closed it.
pub fn take_back(conn: u32, gen: u32) {
    for s in &SLOTS {
        let end = s.end.load(SeqCst); // pairs with `sent`
        let same = s.conn.load(Relaxed) == conn && s.gen.load(Relaxed) == gen;
        if end > 0 && same && s.end.compare_exchange(end, BUSY, AcqRel, Relaxed).is_ok() {
            if !empty(end - 1) {
                await_closed(end - 1);
            }
            fdtab::close_ours(end - 1);
            s.end.store(0, Release);
        }
    }
}

/// How long a close waits for a daemon that reads the socket, which takes it microseconds; more only if it is not
/// given a processor meanwhile, or is stopped.
const CLOSED_WAIT_MS: u64 = 100;

/// Returns when the daemon has closed what it took out of the queue.
fn await_closed(end: i32) {
    let until = sys::now_ms() + CLOSED_WAIT_MS;
    loop {
        let left = until.saturating_sub(sys::now_ms());
        let r = sys::poll_ms(end, 0, left.min(CLOSED_WAIT_MS) as u32);
        if left == 0 || r != Err(libc::EINTR) {
            return;
        }
    }
}

/// Takes the socket out of the queue. False: the daemon was faster.
fn empty(end: i32) -> bool {
    datagram::receive(end, &mut [0]).is_ok()
}

/// The daemon has sent something, and may be done with registrations; their ends show which. `all`: gives up all of
/// them, because the daemon is gone or this program is about to be replaced. (A daemon that is still there
/// declines a registration without a socket, and may be asked again.)
pub fn settle(all: bool) {
    for s in &SLOTS {
        let end = s.end.load(Acquire); // pairs with `sent`
        if end > 0
            && (all || sys::poll1(end - 1, 0) & libc::POLLHUP != 0)
            && s.end.compare_exchange(end, BUSY, AcqRel, Relaxed).is_ok()
        {
            empty(end - 1);
            fdtab::close_ours(end - 1);
            s.end.store(0, Release);
        }
    }
}

/// In a forked child: the ends, and what lies in their queues, are the parent's.
pub fn after_fork() {
    for s in &SLOTS {
        let end = s.end.swap(0, Relaxed);
        if end > 0 {
            fdtab::close_ours(end - 1);
        }
    }
}
