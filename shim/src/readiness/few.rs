//! Waits for more entries than the limit on descriptors (RLIMIT_NOFILE) allows. A program may lower the limit
//! after it has opened what it needs. `poll` then refuses calls with more entries than the limit, which may be so
//! because of ours. `select` ignores the limit, and only needs descriptors within the process's descriptor table.

use crate::sys::sets::{refused_once, Sets, EVENTS};
use crate::sys::{self, real, thread};
use lane::num;
use libc::{pollfd, sigset_t, timespec};

/// Polls with more entries than this first check whether the limit allows them.
const MANY: usize = 32;
/// Milliseconds of a wait for events that no set of `select` reports (errors alone).
const UNHEARD_MS: i64 = 5;

/// Would the application's poll of `n` entries be refused because of the limit?
pub fn refuses(n: usize) -> bool {
    (n > MANY || refused_once(false)) && n as u64 > sys::rlimit_nofile()
}

/// Does the work of a `ppoll` of the C library that was refused, and returns the same. `asleep` makes the call.
/// `ms` is shortened if some events cannot be waited for.
#[cold]
pub fn poll(
    fds: &mut [pollfd],
    ms: &mut i64,
    mask: *const sigset_t,
    asleep: impl FnOnce(&dyn Fn() -> i32) -> i32,
) -> i32 {
    refused_once(true);
    let sets = Sets::of(fds);
    let all: i16 = EVENTS.iter().fold(0, |a, e| a | e);
    let deaf = fds.iter().any(|p| p.fd >= 0 && p.events & all == 0);
    if (deaf || sets.is_none()) && !(0..=UNHEARD_MS).contains(ms) {
        *ms = UNHEARD_MS;
    }
    let t = timespec {
        tv_sec: *ms / 1000,
        tv_nsec: *ms % 1000 * 1_000_000,
    };
    let t = if *ms < 0 {
        core::ptr::null()
    } else {
        &raw const t
    };
    let (end, [r, w, e]) = match &sets {
        Some(s) => (s.end, [0, 1, 2].map(|k| s.set(k))),
        None => (0, [core::ptr::null_mut(); 3]),
    };
    // SAFETY: null, or our sets with `end` bits; the mask is null or the application's.
    let select = || unsafe { real::pselect(end, r, w, e, t, mask) };
    let undo = || sets.iter().for_each(Sets::give);
    let n = thread::or_undo(&undo, || asleep(&select));
    let said = match n {
        -1 => Err(crate::errno()),
        n => Ok(num::word(n)),
    };
    match sets.map_or(said, |s| s.told(fds, said)) {
        Ok(n) => num::int(n as u64),
        Err(e) => {
            crate::set_errno(e);
            -1
        }
    }
}
