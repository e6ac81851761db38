//! The control connection to the daemon, worked off from inside hooks: the shim has no thread.
//!
//! A page that the daemon writes tells with one load whether there is a message; whoever sees it
//! first, and gets the lock, reads them all. Nothing here blocks, and without a daemon everything
//! just stays where it is.

mod dial;
mod handover;

pub use handover::{settle as settle_registrations, take_back};

use crate::links::{self, Link};
use crate::{fdtab, lock, promote, sys, table};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use link::msg::{feature, ToDaemon, ToShim, MAX, MAX_FDS};
use link::reason::Reason;

static FD: AtomicI32 = AtomicI32::new(-1);
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

/// What the daemon understands: bits of `link::msg::feature`.
static FEATURES: AtomicU32 = AtomicU32::new(0);
/// Reason code with which the last daemon refused us; 0: it did not.
static REFUSED: AtomicU32 = AtomicU32::new(0);
static SILENT: AtomicU32 = AtomicU32::new(0);

/// First and largest ring size, log2 of bytes.
pub fn ring_sizes() -> (u32, u32) {
    (RING_LOG2.load(Relaxed), RING_MAX_LOG2.load(Relaxed))
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
    if OWNER.load(Relaxed) == table::pid() {
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
    NOTICE.store(core::ptr::null_mut(), Relaxed);
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
    OWNER.store(table::pid(), Relaxed);
    GENERATION.fetch_add(1, Relaxed);
    FD.store(fd, Release);
    let hello = ToDaemon::Hello {
        version: link::VERSION,
        min_version: link::MIN_VERSION,
        features: 0,
        pid: sys::getpid(),
        table_bytes: link::family::TABLE_BYTES as u64,
    };
    if send(&hello, Some(table::memfd())).is_err() {
        drop_connection();
    } else if let Some(theirs) = dial::make() {
        let _ = send(&ToDaemon::Dial {}, Some(theirs));
        sys::close(theirs);
    }
    false
}

/// Why there is no daemon.
pub fn absence() -> Reason {
    Reason::from_code(REFUSED.load(Relaxed))
        .filter(|r| *r != Reason::None)
        .unwrap_or(Reason::NoDaemon)
}

fn drop_connection() {
    READY.store(0, Release);
    fdtab::close_ours(FD.swap(-1, Relaxed));
    NOTICE.store(core::ptr::null_mut(), Release);
    NOTICE_SEEN.store(0, Relaxed);
    CREDITS.store(0, Relaxed);
    handover::settle(true);
    promote::daemon_lost();
}

/// Sends a message; a daemon that does not take it is as good as none.
fn send(m: &ToDaemon, fd: Option<i32>) -> Result<(), i32> {
    let sock = FD.load(Relaxed);
    if sock < 0 {
        return Err(libc::ENOTCONN);
    }
    let mut buf = [0u8; MAX];
    let n = m.encode(&mut buf);
    let r = match fdtab::is_ours(sock) {
        true => send_on(sock, &buf[..n], fd),
        false => Err(libc::ENOTCONN), // closed unseen
    };
    if r.is_err_and(|e| e != libc::EAGAIN) {
        // The daemon is gone: as good as a message, whoever comes next shall look. (Not we: the
        // caller may hold locks.)
        NOTICE_SEEN.store(notice().load(Relaxed).wrapping_sub(1), Relaxed);
    }
    r
}

/// Sends one datagram, with a descriptor beside it.
fn send_on(sock: i32, bytes: &[u8], fd: Option<i32>) -> Result<(), i32> {
    let mut iov = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut ctl = Ctl([0; 64]);
    // SAFETY: all-zero is a valid msghdr.
    let mut h: libc::msghdr = unsafe { core::mem::zeroed() };
    h.msg_iov = &mut iov;
    h.msg_iovlen = 1;
    if let Some(fd) = fd {
        h.msg_control = ctl.0.as_mut_ptr().cast();
        h.msg_controllen = ctl.put_fd(fd) as _;
    }
    sys::sendmsg(sock, &h, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL).map(drop)
}

/// Room for control messages, aligned as cmsghdr wants it.
#[repr(C, align(8))]
struct Ctl([u8; 64]);

impl Ctl {
    fn put_fd(&mut self, fd: i32) -> usize {
        // struct cmsghdr on 64-bit: len u64, level i32, type i32, data. musl agrees on little endian.
        self.0[0..8].copy_from_slice(&20u64.to_ne_bytes());
        self.0[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
        self.0[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
        self.0[16..20].copy_from_slice(&fd.to_ne_bytes());
        24
    }

    fn fds(&self, len: usize) -> ([i32; MAX_FDS], usize) {
        let mut out = [-1; MAX_FDS];
        let word = |o: usize| {
            let mut w = [0u8; 4];
            w.copy_from_slice(&self.0[o..o + 4]);
            i32::from_ne_bytes(w)
        };
        if len < 20 || word(8) != libc::SOL_SOCKET || word(12) != libc::SCM_RIGHTS {
            return (out, 0);
        }
        let n = ((word(0) as usize).saturating_sub(16) / 4)
            .min(MAX_FDS)
            .min((len - 16) / 4);
        for (i, o) in out.iter_mut().enumerate().take(n) {
            *o = word(16 + 4 * i);
        }
        (out, n)
    }
}

/// Reads and does everything the daemon has said. Whoever finds the lock taken leaves it.
#[cold]
pub fn pump() {
    if OWNER.load(Relaxed) != table::pid() {
        return;
    }
    let Some(g) = lock::try_lock(&LOCK) else {
        return;
    };
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
        let mut iov = libc::iovec {
            iov_base: buf.as_mut_ptr().cast(),
            iov_len: MAX,
        };
        let mut ctl = Ctl([0; 64]);
        // SAFETY: all-zero is a valid msghdr.
        let mut h: libc::msghdr = unsafe { core::mem::zeroed() };
        h.msg_iov = &mut iov;
        h.msg_iovlen = 1;
        h.msg_control = ctl.0.as_mut_ptr().cast();
        h.msg_controllen = ctl.0.len() as _;
        match sys::recvmsg(sock, &mut h, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) {
            Ok(0) => {
                drop_connection();
                return;
            }
            Ok(n) => {
                let (fds, nfds) = ctl.fds(h.msg_controllen as usize);
                let mut fds = Fds { fds, n: nfds };
                if let Ok(m) = ToShim::decode(&buf[..n]) {
                    handle(m, &mut fds);
                }
                fds.close_rest();
            }
            Err(libc::EAGAIN) => break,
            // (ECONNRESET: the daemon died with words of ours unread; its own come after that.)
            Err(libc::EINTR | libc::ECONNRESET) => {}
            Err(_) => {
                drop_connection();
                return;
            }
        }
    }
    settle();
    drop(g);
}

struct Fds {
    fds: [i32; MAX_FDS],
    n: usize,
}

impl Fds {
    fn take(&mut self, i: usize) -> Option<i32> {
        let f = self.fds.get_mut(i).filter(|_| i < self.n)?;
        (*f >= 0).then(|| core::mem::replace(f, -1))
    }
    fn close_rest(&mut self) {
        for f in self.fds.iter().filter(|f| **f >= 0) {
            sys::close(*f);
        }
    }
}

/// An answer that the daemon waits for. If it cannot be sent, both begin anew. (A daemon that is gone may
/// have said more: that is read first.)
fn reply(m: &ToDaemon) {
    match send(m, None) {
        Ok(()) | Err(libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN) => {}
        Err(_) => drop_connection(),
    }
}

fn handle(m: ToShim, fds: &mut Fds) {
    match m {
        ToShim::HelloAck {
            version: _,
            features,
            party: _,
            daemon: _,
            credits,
            ring_log2,
            ring_max_log2,
        } => {
            let Some(fd) = fds.take(0) else {
                return drop_connection();
            };
            if let Ok(p) = sys::map(fd, 4096, false) {
                NOTICE.store(p.cast(), Release);
            }
            sys::close(fd);
            let range = link::layout::RING_LOG2_MIN..=link::layout::RING_LOG2_MAX;
            let max = u32::from(ring_max_log2).clamp(*range.start(), *range.end());
            RING_MAX_LOG2.store(max, Relaxed);
            RING_LOG2.store(u32::from(ring_log2).clamp(*range.start(), max), Relaxed);
            CREDITS.store(credits.min(1024) as i32, Relaxed);
            REFUSED.store(0, Relaxed);
            FEATURES.store(features, Relaxed);
            READY.store(1, Release);
            promote::greeted();
        }
        ToShim::Refused { reason } => {
            REFUSED.store(reason, Relaxed);
            drop_connection();
            NEXT_TRY_MS.store(sys::now_ms() + 60_000, Relaxed);
        }
        ToShim::Credit { n } => {
            CREDITS.fetch_add(n.min(1024) as i32, Relaxed);
            handover::settle(false);
        }
        ToShim::Decline {
            conn,
            gen,
            local,
            peer,
            retry_ms,
        } => {
            promote::declined(conn, gen, local, peer, retry_ms);
        }
        ToShim::LinkNew {
            link,
            side,
            bytes,
            far,
        } => {
            let (bell, chunk) = (fds.take(0), fds.take(1));
            let ok = match (bell, chunk) {
                (Some(b), Some(c)) => {
                    let ok = links::create(link, side, b, c, bytes as usize, far != 0);
                    sys::close(c);
                    ok
                }
                _ => false,
            };
            reply(&if ok {
                ToDaemon::Mapped {
                    link,
                    side,
                    chunk: 0,
                }
            } else {
                ToDaemon::LinkFailed { link, side }
            });
        }
        ToShim::Chunk {
            link,
            side,
            chunk,
            bytes,
        } => {
            let ok = match (links::find(link, side), fds.take(0)) {
                (Some(l), Some(fd)) => {
                    let ok = l.map_chunk(true, chunk, fd, bytes as usize);
                    sys::close(fd);
                    ok
                }
                _ => false,
            };
            if !ok && chunk > 1 && links::find(link, side).is_some() {
                return; // its lanes make do with what there is; it comes again when we ask again
            }
            reply(&if ok {
                ToDaemon::Mapped { link, side, chunk }
            } else {
                ToDaemon::LinkFailed { link, side }
            });
        }
        ToShim::PeerChunk {
            link,
            side,
            chunk,
            bytes,
        } => {
            let ok = match (links::find(link, side), fds.take(0)) {
                (Some(l), Some(fd)) => {
                    // Only a file that nobody can shrink may be mapped: a fault would kill us.
                    let seals = sys::fcntl(fd, libc::F_GET_SEALS, 0).unwrap_or(0);
                    let size_ok =
                        sys::lseek(fd, 0, libc::SEEK_END).is_ok_and(|n| n as u64 >= bytes);
                    let ok = seals & libc::F_SEAL_SHRINK != 0
                        && size_ok
                        && l.map_chunk(false, chunk, fd, bytes as usize);
                    sys::close(fd);
                    ok
                }
                _ => false,
            };
            if !ok && chunk > 1 && links::find(link, side).is_some() {
                return; // it comes again; nothing lies there until we say that we have it
            }
            reply(&if ok {
                ToDaemon::PeerMapped { link, side, chunk }
            } else {
                ToDaemon::LinkFailed { link, side }
            });
        }
        ToShim::ChunkReady { link, side, chunk } => {
            if let Some(l) = links::find(link, side) {
                l.chunk_ready(chunk);
            }
        }
        ToShim::Offer {
            link,
            side,
            lane,
            conn,
            gen,
            epoch,
            tag,
        } => {
            let taken = links::find(link, side)
                .is_some_and(|l| promote::attach(l, lane, conn, gen, epoch, tag));
            if !taken {
                reply(&ToDaemon::LaneRefused { link, side, lane });
            }
        }
        ToShim::PeerGone { link, side } => {
            if let Some(l) = links::find(link, side) {
                l.gone();
            }
        }
        ToShim::Command { conn, gen, op } => promote::command(conn, gen, op),
        ToShim::LaneGone {
            link,
            side,
            lane,
            conn,
            gen,
        } => {
            if let Some(l) = links::find(link, side) {
                promote::lane_gone(l, lane, conn, gen);
            }
        }
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
/// daemon has read it; a daemon that does not know that, or a process without room for a pair, sends it as
/// it is. (Then a daemon that is slow holds back the FIN.)
pub fn register(m: &ToDaemon, (conn, gen): (u32, u32), fd: i32) -> bool {
    if CREDITS.fetch_sub(1, Relaxed) <= 0 {
        CREDITS.fetch_add(1, Relaxed);
        return false;
    }
    let known = FEATURES.load(Relaxed) & feature::HANDOVER != 0;
    let pair = known
        .then(|| handover::Handover::new(conn, gen, fd))
        .flatten();
    let sent = send(m, Some(pair.as_ref().map_or(fd, |p| p.end()))).is_ok();
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
    send(&m, None).is_ok()
}

/// Gives the daemon a copy of the socket of a lane to another node.
pub fn lane_held(link: &Link, lane: u32, fd: i32) -> bool {
    let m = ToDaemon::LaneHeld {
        link: link.id.load(Relaxed),
        side: link.side.load(Relaxed) as u8,
        lane,
    };
    send(&m, Some(fd)).is_ok()
}

/// The daemon is to shut this lane's socket down when everything has arrived. False: it cannot be
/// told.
pub fn lane_shut(link: &Link, lane: u32) -> bool {
    let m = ToDaemon::LaneShut {
        link: link.id.load(Relaxed),
        side: link.side.load(Relaxed) as u8,
        lane,
    };
    READY.load(Relaxed) != 0 && send(&m, None).is_ok()
}

pub fn forget(conn: u32, gen: u32) {
    let _ = send(&ToDaemon::Forget { conn, gen }, None);
}

pub fn want_chunk(link: &Link) {
    let m = ToDaemon::WantChunk {
        link: link.id.load(Relaxed),
        side: link.side.load(Relaxed) as u8,
    };
    let _ = send(&m, None);
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
