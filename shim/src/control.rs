//! The control connection to the daemon, worked off from inside hooks: the shim has no thread.
//!
//! A page that the daemon writes tells with one load whether there is a message; whoever sees it
//! first, and gets the lock, reads them all. Nothing here blocks, and without a daemon everything
//! just stays where it is.

mod datagram;
mod dial;
mod greeting;
mod handover;
mod moving;

pub use datagram::Fds;
pub use handover::{settle as settle_registrations, take_back};
pub use moving::{can_move, moved, part};

use crate::links::{self, Link};
use crate::{fdtab, lock, process, sys, table};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use link::msg::{ToDaemon, ToShim, MAX};
use link::reason::Reason;
use std::sync::OnceLock;

/// Who is told what. (Told itself when the library is loaded, so that this knows nobody who uses it.)
pub struct Listener {
    /// A message came.
    pub said: fn(ToShim, &mut Fds),
    /// The daemon has answered our hello.
    pub greeted: fn(),
    /// The connection is over.
    pub lost: fn(),
}

static LISTENER: OnceLock<Listener> = OnceLock::new();

pub fn listen(l: Listener) {
    let _ = LISTENER.set(l);
}

static FD: AtomicI32 = AtomicI32::new(-1);
/// The connection before that, which is over. It keeps its number until there is a new one: an application that has
/// come to the end of its numbers would get it, where without us it goes on hearing EMFILE.
static FORMER: AtomicI32 = AtomicI32::new(-1);
static LOCK: AtomicU32 = AtomicU32::new(0);
static READY: AtomicU32 = AtomicU32::new(0);
static NOTICE: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
static NOTICE_SEEN: AtomicU32 = AtomicU32::new(0);
static GENERATION: AtomicU32 = AtomicU32::new(0);
static CREDITS: AtomicI32 = AtomicI32::new(0);
static NEXT_TRY_MS: AtomicU64 = AtomicU64::new(0);
/// Milliseconds to the next try to dial, after one in vain; 0: the least.
static BACKOFF_MS: AtomicU64 = AtomicU64::new(0);
const DIAL_BACKOFF_MIN_MS: u64 = 100;
const DIAL_BACKOFF_MAX_MS: u64 = 1000;
/// The process the connection belongs to; a forked child makes its own.
static OWNER: AtomicU32 = AtomicU32::new(0);
static RING_LOG2: AtomicU32 = AtomicU32::new(16);
static RING_MAX_LOG2: AtomicU32 = AtomicU32::new(20);

static PROBE_S: AtomicU32 = AtomicU32::new(0);
/// Reason code with which the last daemon refused us; 0: it did not.
static REFUSED: AtomicU32 = AtomicU32::new(0);
static SILENT: AtomicU32 = AtomicU32::new(0);

/// First and largest ring size, log2 of bytes.
pub fn ring_sizes() -> (u32, u32) {
    (RING_LOG2.load(Relaxed), RING_MAX_LOG2.load(Relaxed))
}

/// Seconds for which TCP below a busy lane may be silent; 0: for ever.
pub fn probe_s() -> u32 {
    PROBE_S.load(Relaxed)
}

/// Grows with each connection made: descriptors come again with the same number.
pub fn generation() -> u32 {
    GENERATION.load(Relaxed)
}

/// Was there a connection, and is there none now that has been greeted?
#[inline(always)]
pub fn lost() -> bool {
    READY.load(Relaxed) == 0 && GENERATION.load(Relaxed) != 0
}

/// The control descriptor, for waits to include; -1 if there is none.
pub fn fd() -> i32 {
    if OWNER.load(Relaxed) == process::me() && !crate::env::off() {
        FD.load(Relaxed)
    } else {
        -1
    }
}

fn notice() -> &'static AtomicU32 {
    // SAFETY: null, or the notice page, which stays mapped for good.
    unsafe { NOTICE.load(Acquire).as_ref() }.unwrap_or(&SILENT)
}

/// Is there a message? One load of a page nobody here writes.
#[inline(always)]
pub fn pending() -> bool {
    notice().load(Relaxed) != NOTICE_SEEN.load(Relaxed)
}

/// After a fork, in the child: the connection is the parent's.
pub fn after_fork() {
    let fd = FD.swap(-1, Relaxed);
    fdtab::close_ours(fd);
    READY.store(0, Relaxed);
    // (Not unmapped: a handler that we do not stand before may have forked between two of our loads.)
    let notice = NOTICE.swap(core::ptr::null_mut(), Relaxed);
    if !notice.is_null() {
        sys::blank(notice.cast(), 4096);
    }
    NOTICE_SEEN.store(0, Relaxed);
    NEXT_TRY_MS.store(0, Relaxed);
    BACKOFF_MS.store(0, Relaxed);
    LOCK.store(0, Relaxed);
    handover::after_fork();
}

/// Connects if there is no connection, at most every so often. True if a daemon is there.
pub fn ensure() -> bool {
    if READY.load(Acquire) != 0 {
        return true;
    }
    if crate::env::off() {
        return false;
    }
    if FD.load(Relaxed) >= 0 {
        pump(); // a greeting may be waiting
        return READY.load(Acquire) != 0;
    }
    let now = sys::now_ms();
    if now < NEXT_TRY_MS.load(Relaxed) {
        return false;
    }
    if !fdtab::is_ours(table::memfd()) {
        return false; // closed unseen: there is nothing to show to a daemon
    }
    let Some(_g) = lock::try_lock(&LOCK) else {
        return false;
    };
    let backoff = BACKOFF_MS.load(Relaxed).max(DIAL_BACKOFF_MIN_MS);
    NEXT_TRY_MS.store(now + backoff, Relaxed);
    if FD.load(Relaxed) >= 0 {
        return false;
    }
    let Some(fd) = dial::connect() else {
        BACKOFF_MS.store((2 * backoff).min(DIAL_BACKOFF_MAX_MS), Relaxed);
        REFUSED.store(0, Relaxed); // that daemon is gone, too
        return false;
    };
    BACKOFF_MS.store(0, Relaxed);
    let fd = fdtab::hide(fd);
    fdtab::close_ours(FORMER.swap(-1, Relaxed));
    OWNER.store(process::me(), Relaxed);
    GENERATION.fetch_add(1, Relaxed);
    FD.store(fd, Release);
    let hello = ToDaemon::Hello {
        version: link::VERSION,
        min_version: link::MIN_VERSION,
        pid: sys::getpid(),
        table_bytes: link::family::TABLE_BYTES as u64,
    };
    let theirs = dial::make();
    let sent = match theirs {
        Some(fd) => send(&hello, &[table::memfd(), fd]),
        None => send(&hello, &[table::memfd()]),
    };
    if let Some(fd) = theirs {
        sys::close(fd);
    }
    if sent.is_err() {
        drop_connection();
    }
    false
}

/// Makes a connection while the daemon can be reached, whether or not this process has a TCP socket: its
/// listeners may have come by exec, and its children may do the accepting.
pub fn take_along() {
    if !crate::env::off() && dial::dialing().is_none() && fdtab::init() && table::init() {
        ensure();
    }
}

/// Why there is no daemon.
pub fn absence() -> Reason {
    Reason::from_code(REFUSED.load(Relaxed))
        .filter(|r| *r != Reason::None)
        .unwrap_or(Reason::NoDaemon)
}

fn drop_connection() {
    READY.store(0, Release);
    let fd = FD.swap(-1, Relaxed);
    if fd >= 0 && fdtab::is_ours(fd) {
        let _ = sys::shutdown(fd, libc::SHUT_RDWR);
        FORMER.store(fd, Relaxed);
    }
    NOTICE.store(core::ptr::null_mut(), Release);
    NOTICE_SEEN.store(0, Relaxed);
    CREDITS.store(0, Relaxed);
    handover::settle(true);
    if let Some(l) = LISTENER.get() {
        (l.lost)();
    }
}

/// Sends a message; a daemon that does not take it is as good as none.
fn send(m: &ToDaemon, fds: &[i32]) -> Result<(), i32> {
    let sock = FD.load(Relaxed);
    if sock < 0 {
        return Err(libc::ENOTCONN);
    }
    let mut buf = [0u8; MAX];
    let n = m.encode(&mut buf);
    let r = match fdtab::is_ours(sock) {
        true => datagram::send(sock, &buf[..n], fds),
        false => Err(libc::ENOTCONN), // closed unseen
    };
    if r.is_err_and(|e| e != libc::EAGAIN) {
        // The daemon is gone: as good as a message, whoever comes next shall look. (Not we: the
        // caller may hold locks.)
        NOTICE_SEEN.store(notice().load(Relaxed).wrapping_sub(1), Relaxed);
    }
    r
}

/// Reads and does everything the daemon has said. Whoever finds the lock taken leaves it.
#[cold]
pub fn pump() {
    if OWNER.load(Relaxed) != process::me() || crate::env::off() {
        return;
    }
    let Some(g) = lock::try_lock(&LOCK) else {
        return;
    };
    let mut spoken = false;
    for _ in 0..1024 {
        NOTICE_SEEN.store(notice().load(Acquire), Relaxed);
        let sock = FD.load(Relaxed);
        if sock < 0 {
            return;
        }
        if !fdtab::is_ours(sock) {
            return drop_connection(); // closed unseen
        }
        let mut buf = [0u8; MAX];
        match datagram::receive(sock, &mut buf) {
            Ok((0, _)) => return drop_connection(),
            Ok((n, mut fds)) => {
                spoken = true;
                if let Ok(m) = ToShim::decode(&buf[..n]) {
                    greeting::met(&m, &mut fds);
                    if let Some(l) = LISTENER.get() {
                        (l.said)(m, &mut fds);
                    }
                }
            }
            Err(libc::EAGAIN) => break,
            // (ECONNRESET: the daemon died with words of ours unread; its own come after that.)
            Err(libc::EINTR | libc::ECONNRESET) => {}
            Err(_) => return drop_connection(),
        }
    }
    if spoken {
        handover::settle(false); // it has read what it answers
    }
    settle();
    drop(g);
}

/// An answer that the daemon waits for. If it cannot be sent, both begin anew. (A daemon that is gone may
/// have said more: that is read first.)
pub fn reply(m: &ToDaemon) {
    match send(m, &[]) {
        Ok(()) | Err(libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN) => {}
        Err(_) => drop_connection(),
    }
}

/// Is there a credit? Without one it is time to look whether the daemon is still there: one that is
/// dead gives none, and where nothing is sent nothing else tells.
pub fn has_credit() -> bool {
    if CREDITS.load(Relaxed) > 0 {
        return true;
    }
    pump();
    READY.load(Acquire) != 0 && CREDITS.load(Relaxed) > 0
}

/// Sends a registration of connection `conn`, if there is a credit. The socket can be taken back until the
/// daemon has read it; a process without room for a pair sends it as it is. (Then a daemon that is slow holds back the
/// FIN.)
pub fn register(m: &ToDaemon, (conn, gen): (u32, u32), fd: i32) -> bool {
    if CREDITS.fetch_sub(1, Relaxed) <= 0 {
        CREDITS.fetch_add(1, Relaxed);
        return false;
    }
    let pair = handover::Handover::new(conn, gen, fd);
    let sent = send(m, &[pair.as_ref().map_or(fd, |p| p.end())]).is_ok();
    if let Some(p) = pair {
        match sent {
            true => p.sent(),
            false => p.drop_it(),
        }
    }
    if !sent {
        CREDITS.fetch_add(1, Relaxed);
        return false;
    }
    if let Some(t) = table::table() {
        t.header.stats.registered.fetch_add(1, Relaxed);
    }
    true
}

/// A daemon that is stopped for a while, or has cut the connection, must still get to know: what cannot
/// be sent now is sent later.
pub fn lane_done(link: &Link, lane: u32) {
    match tell_done(link, lane) {
        true => drop(settle()),
        false => link.owe(lane),
    }
}

/// The same of a connection that goes on elsewhere: the daemon asks the other end to give its lane back as well.
pub fn lane_left(link: &Link, lane: u32) {
    let m = ToDaemon::LaneRefused {
        link: link.id.load(Relaxed),
        side: link.side.load(Relaxed) as u8,
        lane,
    };
    if send(&m, &[]).is_err() {
        link.owe(lane);
    }
}

/// Tells the daemon what it could not be told before. False: it still cannot. It must know before it
/// hears of the same connections again.
pub fn settle() -> bool {
    links::settle_owed(tell_done)
}

fn tell_done(link: &Link, lane: u32) -> bool {
    let m = ToDaemon::LaneDone {
        link: link.id.load(Relaxed),
        side: link.side.load(Relaxed) as u8,
        lane,
    };
    send(&m, &[]).is_ok()
}

/// Gives the daemon a copy of the socket of a lane to another node.
pub fn lane_held(link: &Link, lane: u32, fd: i32) -> bool {
    let m = ToDaemon::LaneHeld {
        link: link.id.load(Relaxed),
        side: link.side.load(Relaxed) as u8,
        lane,
    };
    send(&m, &[fd]).is_ok()
}

/// The daemon is to shut this lane's socket down when everything has arrived. False: it cannot be
/// told.
pub fn lane_shut(link: &Link, lane: u32) -> bool {
    let m = ToDaemon::LaneShut {
        link: link.id.load(Relaxed),
        side: link.side.load(Relaxed) as u8,
        lane,
    };
    READY.load(Relaxed) != 0 && send(&m, &[]).is_ok()
}

pub fn forget(conn: u32, gen: u32) {
    let _ = send(&ToDaemon::Forget { conn, gen }, &[]);
}

pub fn want_chunk(link: &Link) {
    let m = ToDaemon::WantChunk {
        link: link.id.load(Relaxed),
        side: link.side.load(Relaxed) as u8,
    };
    let _ = send(&m, &[]);
}

/// Eager mode: sleeps until our greeting is answered, but only once per connection, and not for long: a
/// daemon that is stopped must not slow every call down.
pub fn await_greeting() {
    static WAITED: AtomicU32 = AtomicU32::new(0);
    let generation = GENERATION.load(Relaxed);
    if fd() >= 0 && WAITED.swap(generation, Relaxed) != generation {
        let _ = sys::poll_ms(fd(), libc::POLLIN, 20);
        pump();
    }
}
