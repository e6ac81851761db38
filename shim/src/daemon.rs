//! The control connection to the daemon. The shim has no thread, so its messages are processed inside hooks.
//!
//! A page that the daemon writes shows with one load whether there is a message; the first thread that sees this,
//! and gets the lock, reads all messages. Nothing here blocks, and without a daemon every connection just stays
//! where it is.
//!
//! What the messages say about connections and link groups is not decided here: a listener is called
//! (`promotion::dispatch`).

mod datagram;
mod dial;
mod greeting;
mod handover;
mod moving;

pub use datagram::Fds;
pub use handover::{settle as settle_registrations, take_back};
pub use moving::{can_move, moved, part};

use crate::state::groups::{self, LinkGroup};
use crate::state::{fdtab, table};
use crate::sys::{self, lock, pids};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use lane::family::Conn;
use lane::num;
use lane::proto::msg::{ToDaemon, ToShim, MAX};
use lane::proto::reason::Reason;
use std::sync::OnceLock;

/// Functions that are called for messages and events. (They are set when the library is loaded, so that this
/// module need not name its users.)
pub struct Listener {
    /// A message has come.
    pub said: fn(ToShim, &mut Fds),
    /// The daemon has answered our hello.
    pub greeted: fn(),
    /// The connection has ended.
    pub lost: fn(),
}

static LISTENER: OnceLock<Listener> = OnceLock::new();

pub fn listen(l: Listener) {
    let _ = LISTENER.set(l);
}

static FD: AtomicI32 = AtomicI32::new(-1);
/// The previous connection, which has ended. Its descriptor stays open until there is a new one: otherwise an
/// application that has used up its descriptor numbers would get this one, although without us it would go on
/// getting EMFILE.
static FORMER: AtomicI32 = AtomicI32::new(-1);
static LOCK: AtomicU32 = AtomicU32::new(0);
static READY: AtomicU32 = AtomicU32::new(0);
static NOTICE: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
static NOTICE_SEEN: AtomicU32 = AtomicU32::new(0);
static GENERATION: AtomicU32 = AtomicU32::new(0);
static CREDITS: AtomicI32 = AtomicI32::new(0);
static NEXT_TRY_MS: AtomicU64 = AtomicU64::new(0);
/// Milliseconds until the next attempt to connect after a failed one; 0: the minimum.
static BACKOFF_MS: AtomicU64 = AtomicU64::new(0);
const DIAL_BACKOFF_MIN_MS: u64 = 100;
const DIAL_BACKOFF_MAX_MS: u64 = 1000;
/// The process that the connection belongs to; a forked child makes its own.
static OWNER: AtomicU32 = AtomicU32::new(0);
static RING_LOG2: AtomicU32 = AtomicU32::new(16);
static RING_MAX_LOG2: AtomicU32 = AtomicU32::new(20);

static PROBE_S: AtomicU32 = AtomicU32::new(0);
/// Reason code with which the last daemon refused us; 0: it did not refuse us.
static REFUSED: AtomicU32 = AtomicU32::new(0);
static SILENT: AtomicU32 = AtomicU32::new(0);
/// Not 0: the other end of the last control connection is closed.
static ENDED: AtomicU32 = AtomicU32::new(0);

/// Initial and largest ring size, as log2 of bytes.
pub fn ring_sizes() -> (u32, u32) {
    (RING_LOG2.load(Relaxed), RING_MAX_LOG2.load(Relaxed))
}

/// Seconds for which TCP below a busy lane may be silent; 0: without limit.
pub fn probe_s() -> u32 {
    PROBE_S.load(Relaxed)
}

/// Grows with each connection that is made, because descriptor numbers are used again.
pub fn generation() -> u32 {
    GENERATION.load(Relaxed)
}

/// Has there been a connection, and is there no greeted one now?
#[inline(always)]
pub fn lost() -> bool {
    READY.load(Relaxed) == 0 && GENERATION.load(Relaxed) != 0
}

/// The control descriptor, which waits listen to; -1 if there is none.
pub fn fd() -> i32 {
    if OWNER.load(Relaxed) == pids::me() && !crate::sys::env::off() {
        FD.load(Relaxed)
    } else {
        -1
    }
}

fn notice() -> &'static AtomicU32 {
    // SAFETY: null, or the notice page, which stays mapped for good.
    unsafe { NOTICE.load(Acquire).as_ref() }.unwrap_or(&SILENT)
}

/// Is there a message? One load of a page that only the daemon writes.
#[inline(always)]
pub fn pending() -> bool {
    notice().load(Relaxed) != NOTICE_SEEN.load(Relaxed)
}

/// After a fork, in the child: the connection is the parent's.
pub fn after_fork() {
    let fd = FD.swap(-1, Relaxed);
    fdtab::close_ours(fd);
    READY.store(0, Relaxed);
    // (Not unmapped: the fork may have been made by a handler that is not behind our trampoline, between two of
    // our loads.)
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

/// Connects if there is no connection, but not too often. True if there is a daemon that has greeted us.
pub fn ensure() -> bool {
    if READY.load(Acquire) != 0 {
        return true;
    }
    if crate::sys::env::off() {
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
        return false; // closed unseen: there is no table to show to a daemon
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
        REFUSED.store(0, Relaxed); // the daemon that refused us is gone
        return false;
    };
    BACKOFF_MS.store(0, Relaxed);
    let fd = fdtab::hide(fd);
    fdtab::close_ours(FORMER.swap(-1, Relaxed));
    OWNER.store(pids::me(), Relaxed);
    GENERATION.fetch_add(1, Relaxed);
    ENDED.store(0, Relaxed);
    FD.store(fd, Release);
    let hello = ToDaemon::Hello {
        version: lane::VERSION,
        min_version: lane::MIN_VERSION,
        pid: sys::getpid(),
        table_bytes: lane::family::TABLE_BYTES as u64,
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

/// Connects while the daemon can still be reached, even if this process has no TCP socket: its listeners may have
/// come by exec, and its children may do the accepting.
pub fn take_along() {
    if !crate::sys::env::off() && dial::dialing().is_none() && fdtab::init() && table::init() {
        ensure();
    }
}

/// Why there is no daemon.
pub fn absence() -> Reason {
    Reason::from_code(REFUSED.load(Relaxed))
        .filter(|r| *r != Reason::None)
        .unwrap_or(Reason::NoDaemon)
}

/// Did the last daemon end, or cut us, and is it at work for us no more? (A connection that we have given up by
/// ourselves says nothing.)
pub fn has_ended() -> bool {
    let fd = FD.load(Relaxed);
    let hung_up = || fd >= 0 && fdtab::is_ours(fd) && sys::poll1(fd, 0) & libc::POLLHUP != 0;
    OWNER.load(Relaxed) == pids::me() && (ENDED.load(Relaxed) != 0 || hung_up())
}

/// Has the daemon read all that we have said? (Not if there is none.)
pub fn has_read_all() -> bool {
    let fd = FD.load(Relaxed);
    fd >= 0 && fdtab::is_ours(fd) && sys::ioctl_i32(fd, libc::TIOCOUTQ) == Ok(0)
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

/// Sends a message. If the daemon does not take it, callers act as if there were none.
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
        // The daemon is gone: treat that like a message, so that the next thread looks. (Not this one, because the
        // caller may hold locks.)
        NOTICE_SEEN.store(notice().load(Relaxed).wrapping_sub(1), Relaxed);
    }
    r
}

/// Reads and processes all messages of the daemon. A thread that finds the lock taken leaves them to its holder.
#[cold]
pub fn pump() {
    if OWNER.load(Relaxed) != pids::me() || crate::sys::env::off() {
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
            Ok((0, _)) => {
                ENDED.store(1, Relaxed);
                return drop_connection();
            }
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
            // (ECONNRESET: the daemon died with messages of ours unread. Its own messages can be read after that.)
            Err(libc::EINTR | libc::ECONNRESET) => {}
            Err(_) => return drop_connection(),
        }
    }
    if spoken {
        handover::settle(false); // it has read the registrations that it answers
    }
    settle();
    drop(g);
}

/// Sends an answer that the daemon waits for. If it cannot be sent, the connection is dropped, and both sides
/// start again. (If the daemon is gone, it may have sent more, which is read first.)
pub fn reply(m: &ToDaemon) {
    match send(m, &[]) {
        Ok(()) | Err(libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN) => {}
        Err(_) => drop_connection(),
    }
}

/// Is there a credit? If not, checks whether the daemon is still there: a dead one gives no credits, and while
/// nothing is sent, nothing else shows that it is dead.
pub fn has_credit() -> bool {
    if CREDITS.load(Relaxed) > 0 {
        return true;
    }
    pump();
    READY.load(Acquire) != 0 && CREDITS.load(Relaxed) > 0
}

/// Sends a registration of connection `conn`, if there is a credit. The socket can be taken back until the daemon
/// has read it. A process that has no descriptors left for a socket pair sends the socket itself. (Then a slow
/// daemon holds back the FIN.)
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

/// Tells the daemon that we have finished with a lane. It must learn that even if it is stopped for a while or has
/// cut the connection: what cannot be sent now is sent later.
pub fn lane_done(group: &LinkGroup, lane: u32) {
    match tell_done(group, lane) {
        true => drop(settle()),
        false => group.add_pending_done(lane),
    }
}

/// The same for a connection that continues elsewhere: the daemon asks the other end to give its lane back as
/// well.
pub fn lane_left(group: &LinkGroup, lane: u32) {
    let m = ToDaemon::LaneRefused {
        group: group.id.load(Relaxed),
        side: num::low8(group.side.load(Relaxed).into()),
        lane,
    };
    if send(&m, &[]).is_err() {
        group.add_pending_done(lane);
    }
}

/// Tells the daemon what it could not be told before. False: it still cannot be told. It must know this before it
/// hears of the same connections again.
pub fn settle() -> bool {
    groups::send_pending_done(tell_done)
}

fn tell_done(group: &LinkGroup, lane: u32) -> bool {
    let m = ToDaemon::LaneDone {
        group: group.id.load(Relaxed),
        side: num::low8(group.side.load(Relaxed).into()),
        lane,
    };
    send(&m, &[]).is_ok()
}

/// Gives the daemon a copy of the socket of a remote lane.
pub fn lane_held(group: &LinkGroup, lane: u32, fd: i32) -> bool {
    let m = ToDaemon::LaneHeld {
        group: group.id.load(Relaxed),
        side: num::low8(group.side.load(Relaxed).into()),
        lane,
    };
    send(&m, &[fd]).is_ok()
}

/// Asks the daemon to bring to TCP what an end of this lane, which is within the node, has on its ring: we leave it, and
/// the other end does nothing, or TCP does not take what is `ours`. False: it could not be asked.
pub fn take_over(group: &LinkGroup, lane: u32, ours: bool) -> bool {
    let side = num::low8(group.side.load(Relaxed).into());
    let m = ToDaemon::TakeOver {
        group: group.id.load(Relaxed),
        side,
        lane,
        sender: if ours { side } else { 1 - side },
    };
    READY.load(Relaxed) != 0 && send(&m, &[]).is_ok()
}

/// Asks the daemon to shut this lane's socket down when everything has arrived. False: the daemon cannot be told.
pub fn lane_shut(group: &LinkGroup, lane: u32) -> bool {
    let m = ToDaemon::LaneShut {
        group: group.id.load(Relaxed),
        side: num::low8(group.side.load(Relaxed).into()),
        lane,
    };
    READY.load(Relaxed) != 0 && send(&m, &[]).is_ok()
}

/// For the log: the shim has reset this connection. (If no daemon is there, nobody keeps a log.)
pub fn was_reset(conn: u32, c: &Conn, r: Reason) {
    let m = ToDaemon::Reset {
        conn,
        gen: c.gen.load(Relaxed),
        reason: r.code(),
    };
    let _ = send(&m, &[]);
}

/// For the log: new connections of this process stay on TCP.
pub fn fuse_blown() {
    let _ = send(&ToDaemon::FuseBlown {}, &[]);
}

pub fn forget(conn: u32, gen: u32) {
    let _ = send(&ToDaemon::Forget { conn, gen }, &[]);
}

pub fn want_chunk(group: &LinkGroup) {
    let m = ToDaemon::WantChunk {
        group: group.id.load(Relaxed),
        side: num::low8(group.side.load(Relaxed).into()),
    };
    let _ = send(&m, &[]);
}

/// Eager mode: sleeps until our greeting is answered, but only once per connection, and for 20 ms at most, because
/// a stopped daemon must not slow every call down.
pub fn await_greeting() {
    static WAITED: AtomicU32 = AtomicU32::new(0);
    let generation = GENERATION.load(Relaxed);
    if fd() >= 0 && WAITED.swap(generation, Relaxed) != generation {
        let _ = sys::poll_ms(fd(), libc::POLLIN, 20);
        pump();
    }
}
