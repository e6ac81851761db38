//! A ring that is full for long: the direction goes down to TCP.

use crate::state::groups::LinkGroup;
use crate::state::table::{set_reason, Local};
use crate::sys::{self, lock};
use crate::tcp::port::Sock;
use crate::tcp::probes;
use core::sync::atomic::Ordering::*;
use lane::family::{flag, Cause, Conn};
use lane::half::Memory;
use lane::proto::reason::Reason;

/// If the reader takes nothing from a full ring for so many milliseconds, the direction goes down: the kernel's
/// buffers hold megabytes, and programs that write before they read rely on that. The time is longer than the
/// delay of a reader that is merely not scheduled.
pub const FULL_MS: u64 = 20;
/// The same limit as [`FULL_MS`] for a remote reader, whose progress is reported late.
const FULL_REMOTE_MS: u64 = 200;

/// The ring is full: has it been full for long without the reader taking anything, and would TCP take more?
pub fn full_for_long(c: &Conn, l: &Local, m: &Memory) -> bool {
    if c.tx.is_bounded(m) {
        return false;
    }
    let (since, now) = (c.tx.full_since_ms.load(Relaxed), sys::now_ms());
    let consumed = c.tx.consumed();
    if since == 0 || l.full_at.swap(consumed, Relaxed) != consumed {
        l.full_at.store(consumed, Relaxed);
        c.tx.full_since_ms.store(now, Relaxed);
        return false;
    }
    let most = match c.flags.load(Relaxed) & flag::REMOTE {
        0 => FULL_MS,
        _ => FULL_REMOTE_MS,
    };
    now.saturating_sub(since) > most
}

/// A ring that was full for long: the direction goes down, and up again only later. `ours`, asked under the lock:
/// is this still the connection that was looked at?
pub fn go_down_full(c: &Conn, l: &Local, group: &LinkGroup, m: &Memory, ours: impl Fn() -> bool) {
    // Only try the lock: this may run under the lock of an epoll set, which is later in the order of locks.
    let Some(_g) = lock::try_lock(&c.tx.lock) else {
        return;
    };
    if ours() && c.tx.is_up() {
        full_down(c, l);
        let fd = l.fd.load(Relaxed);
        let _ = c.tx.down(m, &Sock::new(fd, group));
        probes::went_down(c, Cause::Full);
    }
}

/// Milliseconds for which a lane whose ring was full stays down the first time.
const FULL_PAUSE_MS: u64 = 10;

/// A lane was taken down because its ring was full for too long. It goes up again after a pause that doubles each
/// time up to 640 ms, unless the lane has been of use for much longer than it was down.
fn full_down(c: &Conn, l: &Local) {
    set_reason(c, Reason::RingFull);
    let (now, before) = (sys::now_ms(), l.fulls.load(Relaxed));
    let up_since = c.not_before_ms.load(Relaxed);
    let fulls = match now.saturating_sub(up_since) > 8 * (FULL_PAUSE_MS << before) {
        true => 0,
        false => before,
    };
    l.fulls.store((fulls + 1).min(6), Relaxed);
    c.not_before_ms
        .store(now + (FULL_PAUSE_MS << fulls), Relaxed);
}
