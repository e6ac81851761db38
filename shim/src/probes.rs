//! Probes on the TCP connection below a busy lane, which would otherwise look idle to conntrack, address translation
//! and load balancers for as long as the lane carries the bytes. The kernel sends them: keepalive, at the daemon's
//! `lanes.probe_s`, from about a second after the sending direction went up until it goes down.
//!
//! The application's options are in place whenever it, or whoever gets the socket after it, can see them: before it
//! asks for one or sets one, and before the connection leaves its lane or its process, what was there is
//! restored. Where its own keepalive is frequent enough, nothing is changed. Ours must not end a connection that
//! the kernel would have kept: without a keepalive of its own the user time-out is set aside meanwhile.
//!
//! A probe that is not answered takes the direction down. What becomes of the connection is TCP's to decide then, by
//! the application's options; up again it goes when TCP's bytes are acknowledged. That is found out by who sends. Of
//! directions on which nobody sends any more whoever sleeps looks after them: TCP would have nothing to send there, and
//! never find out, so their probes are only taken back.

use crate::links::Link;
use crate::port::Sock;
use crate::table::{self, Local};
use crate::{control, lane, lock, process, sys};
use core::sync::atomic::{AtomicU64, Ordering::*};
use libc::{IPPROTO_TCP, SOL_SOCKET, SO_KEEPALIVE, TCP_INFO};
use libc::{TCP_KEEPCNT, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_USER_TIMEOUT};
use link::family::{flag, Conn};
use link::reason::Reason;

/// Milliseconds between two looks at a direction.
const LOOK_MS: u64 = 1000;
/// Milliseconds that an answer may take.
const ANSWER_MS: u32 = 1000;
/// Most probes that the kernel sends in vain (`MAX_TCP_KEEPCNT`).
const COUNT: u32 = 127;

/// Idle directions that are looked at in a row, for about a microsecond each.
const IDLE: u32 = 64;
/// When those are due (`now_ms`). 0: this process has not set any probes yet. Read and written alone: a thread that misses
/// a value looks later.
static IDLE_DUE_MS: AtomicU64 = AtomicU64::new(0);

/// In the order in which they are stored; SO_KEEPALIVE is set last, and taken back first.
const OPTIONS: [(i32, i32); 5] = [
    (IPPROTO_TCP, TCP_USER_TIMEOUT),
    (IPPROTO_TCP, TCP_KEEPCNT),
    (IPPROTO_TCP, TCP_KEEPINTVL),
    (IPPROTO_TCP, TCP_KEEPIDLE),
    (SOL_SOCKET, SO_KEEPALIVE),
];

// Values of `Conn::probes`.
const OFF: u32 = 0;
/// Ours are set, and the application's in `Conn::options`.
const OURS: u32 = 1;
/// Its own are frequent enough.
const ITS_OWN: u32 = 2;

fn get(fd: i32) -> Option<[u32; OPTIONS.len()]> {
    let mut all = [0; OPTIONS.len()];
    for (value, (level, name)) in all.iter_mut().zip(OPTIONS) {
        *value = sys::getsockopt_u32(fd, level, name).ok()?;
    }
    Some(all)
}

/// What the connection needs, and how many seconds of silence that allows; `None`: what it has will do.
fn wanted(
    [timeout, count, gap, idle, on]: [u32; OPTIONS.len()],
    probe_s: u32,
) -> (Option<[u32; OPTIONS.len()]>, u32) {
    // (The user time-out is in ms. Found out in half of it, the rest is enough for TCP.)
    let most = match timeout {
        0 => probe_s,
        ms => probe_s.min((ms / 2000).max(1)),
    };
    if on == 0 {
        return (Some([0, COUNT, most, most, 1]), most);
    }
    if idle <= most {
        return (None, idle);
    }
    // It ends when it would have ended: with the last of as many probes, the rest of the time between them.
    let rest = (idle - most) / count.max(1);
    (
        Some([timeout, count, gap.saturating_add(rest).min(32767), most, 1]),
        most,
    )
}

/// Called now and then by who sends: one more look at the direction is due, or not.
pub fn tick(c: &Conn, l: &Local, link: &Link) {
    let (now, due) = (sys::now_ms(), l.probe_due_ms.load(Relaxed));
    let probe_s = control::probe_s();
    if probe_s == 0 || now < due {
        return;
    }
    l.probe_due_ms.store(now + LOOK_MS, Relaxed);
    if due != 0 && look(c, l, link, probe_s) {
        table::set_reason(c, Reason::Unanswered);
        c.not_before_ms.store(now + LOOK_MS, Relaxed);
    }
}

/// False: all is well.
#[cold]
fn look(c: &Conn, l: &Local, link: &Link, probe_s: u32) -> bool {
    let Some(_g) = lock::try_lock(&c.tx.lock) else {
        return false;
    };
    // Asked for without the lock: it may be closed by now, and the entry another connection's.
    let Some((now, m)) = lane::of(c, l) else {
        return false;
    };
    let fd = l.fd.load(Relaxed);
    let same =
        core::ptr::eq(now, link) && c.flags.load(Relaxed) & flag::LANE != 0 && table::is_at(c, fd);
    if !same || !c.tx.is_up() || c.owner_pid.load(Relaxed) != process::me() {
        return false;
    }
    if c.probes.load(Relaxed) == OFF {
        arm(c, fd, probe_s);
    }
    if !is_unanswered(c, fd) {
        return false;
    }
    l.unanswered.store(1, Relaxed);
    let _ = c.tx.down(&m, &Sock { fd, link });
    went_down(c);
    true
}

fn arm(c: &Conn, fd: i32, probe_s: u32) {
    let Some(before) = get(fd) else { return };
    let (ours, idle) = wanted(before, probe_s);
    c.probe_idle_s.store(idle, Relaxed);
    let Some(ours) = ours else {
        return c.probes.store(ITS_OWN, Relaxed);
    };
    for (at, value) in c.options.iter().zip(before) {
        at.store(value, Relaxed);
    }
    c.probes.store(OURS, Relaxed);
    let due = sys::now_ms() + u64::from(probe_s) * 1000;
    let _ = IDLE_DUE_MS.compare_exchange(0, due, Relaxed, Relaxed);
    for ((level, name), value) in OPTIONS.into_iter().zip(ours) {
        let _ = sys::setsockopt(fd, level, name, &value.to_ne_bytes());
    }
}

/// Has a probe been out for too long?
fn is_unanswered(c: &Conn, fd: i32) -> bool {
    let mut info = [0u8; 60];
    if sys::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &mut info) != Ok(info.len()) {
        return false;
    }
    // `tcpi_probes`, and `tcpi_last_ack_recv` in ms.
    let silent = u32::from_ne_bytes([info[56], info[57], info[58], info[59]]);
    let allowed = c.probe_idle_s.load(Relaxed).saturating_mul(1000);
    info[3] > 0 && silent > allowed.saturating_add(ANSWER_MS)
}

/// Milliseconds that a thread may sleep before idle directions are to be looked at. If they are now, it does.
pub fn sleep_ms() -> i64 {
    let due = IDLE_DUE_MS.load(Relaxed);
    if due == 0 {
        // (Another thread may set some meanwhile.)
        return match control::probe_s() {
            0 => i64::from(i32::MAX),
            s => (i64::from(s) * 1000).min(i64::from(i32::MAX)),
        };
    }
    let now = sys::now_ms();
    if now >= due {
        let next = now + LOOK_MS;
        if IDLE_DUE_MS.compare_exchange(due, next, Relaxed, Relaxed) == Ok(due) {
            crate::preserving_errno(|| look_at_idle(now));
        }
    }
    let left = IDLE_DUE_MS.load(Relaxed).saturating_sub(now);
    left.clamp(1, i32::MAX as u64) as i64
}

/// Those that nobody who sends has looked at for as long as they may be silent.
#[cold]
fn look_at_idle(now: u64) {
    let most = u64::from(control::probe_s().max(1)) * 1000;
    let mut left = IDLE;
    table::each(|i, c| {
        let l = table::local(i);
        let due = l.probe_due_ms.load(Relaxed) + most;
        if c.probes.load(Relaxed) == OURS && now >= due && left > 0 {
            l.probe_due_ms.store(now, Relaxed);
            left -= 1;
            if let Some(_g) = lock::try_lock(&c.tx.lock) {
                let fd = l.fd.load(Relaxed);
                // (Another process that works the lane looks by itself.)
                if c.owner_pid.load(Relaxed) == process::me()
                    && table::is_at(c, fd)
                    && is_unanswered(c, fd)
                {
                    restore(c, l);
                }
            }
        }
    });
    if left > 0 {
        IDLE_DUE_MS.store(now + most, Relaxed);
    }
}

/// May the direction go up, as far as TCP is concerned? Not before it has answered.
pub fn allow_up(l: &Local, fd: i32) -> bool {
    if l.unanswered.load(Relaxed) != 0 {
        if sys::ioctl_i32(fd, libc::TIOCOUTQ) != Ok(0) {
            return false;
        }
        l.unanswered.store(0, Relaxed);
    }
    true
}

/// Puts the application's options back in place. The direction's lock is held.
#[inline(always)]
pub fn restore(c: &Conn, l: &Local) {
    l.probe_due_ms.store(0, Relaxed);
    if c.probes.swap(OFF, Relaxed) == OURS {
        put_back(c, l);
    }
}

#[cold]
fn put_back(c: &Conn, l: &Local) {
    let fd = l.fd.load(Relaxed);
    // Another process that holds the socket may have put them back, and set others.
    let (level, name) = OPTIONS[3];
    let ours = sys::getsockopt_u32(fd, level, name) == Ok(c.probe_idle_s.load(Relaxed));
    if ours {
        for ((level, name), value) in OPTIONS.iter().zip(&c.options).rev() {
            let value = value.load(Relaxed).to_ne_bytes();
            let _ = sys::setsockopt(fd, *level, *name, &value);
        }
    }
}

/// The application asks for an option, or sets one: it finds its own.
pub fn before_option(i: u32, level: i32, name: i32) {
    let (c, l) = (table::conn(i), table::local(i));
    if c.probes.load(Relaxed) == OURS && OPTIONS.contains(&(level, name)) {
        let _g = lock::lock(&c.tx.lock);
        restore(c, l);
    }
}

/// A sending half has gone down. Its lock is held.
pub fn went_down(c: &Conn) {
    restore(c, table::local_of(c));
    if let Some(t) = table::table() {
        t.header.stats.downs.fetch_add(1, Relaxed);
    }
}
