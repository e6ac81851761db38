//! Probes on the TCP connection below a busy lane, which would otherwise look idle to conntrack, address
//! translation and load balancers while the lane carries the bytes. The kernel sends them: keepalive with the
//! daemon's `lanes.probe_s`, from about a second after the sending direction went up until it goes down.
//!
//! The application's options must be in place whenever the application, or the next owner of the socket, can see
//! them. So its values are restored before it reads or sets one of them, and before the connection leaves its lane
//! or its process. If its own keepalive is frequent enough, nothing is changed. Our probes must not end a
//! connection that the kernel would have kept: if the application has no keepalive, the user time-out is switched
//! off meanwhile.
//!
//! An unanswered probe takes the direction down. TCP then decides about the connection by the application's
//! options, and the direction goes up again when TCP's bytes are acknowledged. Senders check that themselves.
//! Directions on which nobody sends any more are checked by any thread that sleeps: their unanswered probes are
//! only switched off, because TCP has nothing to send there and would never find out.

use crate::daemon;
use crate::state::attached;
use crate::state::groups::LinkGroup;
use crate::state::table::{self, Local};
use crate::sys::{self, lock, pids};
use crate::tcp::port::Sock;
use core::sync::atomic::{AtomicU64, Ordering::*};
use lane::family::{flag, Cause, Conn};
use lane::num;
use lane::proto::reason::Reason;
use libc::{IPPROTO_TCP, SOL_SOCKET, SO_KEEPALIVE, TCP_INFO};
use libc::{TCP_KEEPCNT, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_USER_TIMEOUT};

/// Milliseconds between two checks of a direction.
const LOOK_MS: u64 = 1000;
/// Milliseconds within which a probe must be answered.
const ANSWER_MS: u32 = 1000;
/// Number of unanswered probes after which the kernel gives up (`MAX_TCP_KEEPCNT`).
const COUNT: u32 = 127;

/// Idle directions that are checked in one pass, for about a microsecond each.
const IDLE: u32 = 64;
/// When the next pass is due (`now_ms`). 0: this process has not set any probes yet. No other data depends on it:
/// a thread that misses a value checks later.
static IDLE_DUE_MS: AtomicU64 = AtomicU64::new(0);

/// In the order in which they are stored. SO_KEEPALIVE is set last, and restored first.
const OPTIONS: [(i32, i32); 5] = [
    (IPPROTO_TCP, TCP_USER_TIMEOUT),
    (IPPROTO_TCP, TCP_KEEPCNT),
    (IPPROTO_TCP, TCP_KEEPINTVL),
    (IPPROTO_TCP, TCP_KEEPIDLE),
    (SOL_SOCKET, SO_KEEPALIVE),
];

// Values of `Conn::probes`.
const OFF: u32 = 0;
/// Our values are set, and the application's are in `Conn::options`.
const OURS: u32 = 1;
/// The application's own keepalive is frequent enough.
const ITS_OWN: u32 = 2;

fn get(fd: i32) -> Option<[u32; OPTIONS.len()]> {
    let mut all = [0; OPTIONS.len()];
    for (value, (level, name)) in all.iter_mut().zip(OPTIONS) {
        *value = sys::getsockopt_u32(fd, level, name).ok()?;
    }
    Some(all)
}

/// The values to set, or `None` if the socket's own will do; and after how many seconds of silence a probe is
/// sent.
fn wanted(
    [timeout, count, gap, idle, on]: [u32; OPTIONS.len()],
    probe_s: u32,
) -> (Option<[u32; OPTIONS.len()]>, u32) {
    // (The user time-out is in ms. If half of it is used to notice, the other half is enough for TCP.)
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
    // The connection must end when it would have ended: with the last of as many probes, spread over the remaining
    // time.
    let rest = (idle - most) / count.max(1);
    (
        Some([timeout, count, gap.saturating_add(rest).min(32767), most, 1]),
        most,
    )
}

/// Called by senders now and then: checks the direction if that is due.
pub fn tick(c: &Conn, l: &Local, group: &LinkGroup) {
    let (now, due) = (sys::now_ms(), l.probe_due_ms.load(Relaxed));
    let probe_s = daemon::probe_s();
    if probe_s == 0 || now < due {
        return;
    }
    l.probe_due_ms.store(now + LOOK_MS, Relaxed);
    if due != 0 && look(c, l, group, probe_s) {
        table::set_reason(c, Reason::Unanswered);
        c.not_before_ms.store(now + LOOK_MS, Relaxed);
    }
}

/// True: a probe was unanswered, and the direction went down.
#[cold]
fn look(c: &Conn, l: &Local, group: &LinkGroup, probe_s: u32) -> bool {
    let Some(_g) = lock::try_lock(&c.tx.lock) else {
        return false;
    };
    // The connection was looked up without the lock: it may be closed by now, and the entry may be another one's.
    let Some((now, m)) = attached::of(c, l) else {
        return false;
    };
    let fd = l.fd.load(Relaxed);
    let same =
        core::ptr::eq(now, group) && c.flags.load(Relaxed) & flag::LANE != 0 && table::is_at(c, fd);
    if !same || !c.tx.is_up() || c.owner_pid.load(Relaxed) != pids::me() {
        return false;
    }
    if c.probes.load(Relaxed) == OFF {
        arm(c, fd, probe_s);
    }
    if !is_unanswered(c, fd) {
        return false;
    }
    l.unanswered.store(1, Relaxed);
    let _ = c.tx.down(&m, &Sock::new(fd, group));
    went_down(c, Cause::Unanswered);
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

/// Has a probe been unanswered for too long?
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

/// Milliseconds that a thread may sleep before idle directions must be checked. If that is due now, checks them.
pub fn sleep_ms() -> i64 {
    let due = IDLE_DUE_MS.load(Relaxed);
    if due == 0 {
        // (Another thread may set probes meanwhile.)
        return match daemon::probe_s() {
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
    num::long(left.clamp(1, i32::MAX as u64))
}

/// Checks the directions that no sender has checked for as long as they may be silent.
#[cold]
fn look_at_idle(now: u64) {
    let most = u64::from(daemon::probe_s().max(1)) * 1000;
    let mut left = IDLE;
    table::each(|i, c| {
        let l = table::local(i);
        let due = l.probe_due_ms.load(Relaxed) + most;
        if c.probes.load(Relaxed) == OURS && now >= due && left > 0 {
            l.probe_due_ms.store(now, Relaxed);
            left -= 1;
            if let Some(_g) = lock::try_lock(&c.tx.lock) {
                let fd = l.fd.load(Relaxed);
                // (Another process that owns the lane checks it itself.)
                if c.owner_pid.load(Relaxed) == pids::me()
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

/// May the direction go up as far as TCP is concerned? After an unanswered probe, only when everything is
/// acknowledged.
pub fn allow_up(l: &Local, fd: i32) -> bool {
    if l.unanswered.load(Relaxed) != 0 {
        if sys::ioctl_i32(fd, libc::TIOCOUTQ) != Ok(0) {
            return false;
        }
        l.unanswered.store(0, Relaxed);
    }
    true
}

/// Restores the application's options. The direction's lock is held.
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
    // Another process that holds the socket may have restored them, and set others.
    let (level, name) = OPTIONS[3];
    let ours = sys::getsockopt_u32(fd, level, name) == Ok(c.probe_idle_s.load(Relaxed));
    if ours {
        for ((level, name), value) in OPTIONS.iter().zip(&c.options).rev() {
            let value = value.load(Relaxed).to_ne_bytes();
            let _ = sys::setsockopt(fd, *level, *name, &value);
        }
    }
}

/// Before the application reads or sets an option: restores its own values.
pub fn before_option(i: u32, level: i32, name: i32) {
    let (c, l) = (table::conn(i), table::local(i));
    if c.probes.load(Relaxed) == OURS && OPTIONS.contains(&(level, name)) {
        let _g = lock::lock(&c.tx.lock);
        restore(c, l);
    }
}

/// A sending half has gone down. Its lock is held.
pub fn went_down(c: &Conn, why: Cause) {
    restore(c, table::local_of(c));
    if let Some(t) = table::table() {
        t.count_down(why);
    }
}
