//! Waits under a limit of descriptors (RLIMIT_NOFILE) below the number of their entries. A program may lower it
//! when it has opened what it needs; `poll` then refuses what has too many entries for it, ours among them.
//! `select` looks at no limit, only at how far the table of descriptors reaches.

use crate::sys::sets::{refused_once, Sets, EVENTS};
use crate::{real, sys, thread};
use libc::{pollfd, sigset_t, timespec};

/// A poll of more entries asks first whether the limit allows it.
const MANY: usize = 32;
/// Milliseconds of a wait for events of which no set tells (an error alone).
const UNHEARD_MS: i64 = 5;

/// Does the limit refuse a poll of so many entries to the application?
pub fn refuses(n: usize) -> bool {
    (n > MANY || refused_once(false)) && n as u64 > sys::rlimit_nofile()
}

/// As `ppoll` of the C library, which was refused, and as what it says. `asleep` makes the call. `ms` becomes
/// shorter where something could not be heard.
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
        n => Ok(n as usize),
    };
    match sets.map_or(said, |s| s.told(fds, said)) {
        Ok(n) => n as i32,
        Err(e) => {
            crate::set_errno(e);
            -1
        }
    }
}
