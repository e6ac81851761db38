//! Waits under a limit of descriptors (RLIMIT_NOFILE) below the number of their entries. A program may lower it
//! when it has opened what it needs; `poll` then refuses what has too many entries for it, ours among them.
//! `select` looks at no limit, only at how far the table of descriptors reaches.

use crate::{real, signals, sys};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use libc::{fd_set, pollfd, sigset_t, timespec, POLLIN, POLLNVAL, POLLOUT, POLLPRI, POLLRDHUP};

const READ: i16 = POLLIN | POLLRDHUP | libc::POLLRDNORM;
const WRITE: i16 = POLLOUT | libc::POLLWRNORM;
/// What each of the three sets stands for.
const EVENTS: [i16; 3] = [READ, WRITE, POLLPRI];
/// Milliseconds of a wait for events of which no set tells (an error alone).
const UNHEARD_MS: i64 = 5;

/// A poll was refused once: a later one may be, too.
static SEEN: AtomicBool = AtomicBool::new(false);

/// Does the limit refuse a poll of so many entries to the application?
pub fn refuses(n: usize) -> bool {
    (n > super::STACK / 2 || SEEN.load(Relaxed)) && n as u64 > sys::rlimit_nofile()
}

/// Three sets of descriptors, in a mapping of their own.
struct Sets {
    at: *mut u8,
    /// Bytes of one.
    bytes: usize,
    end: i32,
}

impl Sets {
    /// `None`: there is no memory for them.
    fn of(fds: &[pollfd]) -> Option<Sets> {
        let end = fds.iter().map(|p| p.fd).max().unwrap_or(-1) + 1;
        let bytes = (end as usize).div_ceil(64).max(1) * 8;
        let at = sys::map_private(3 * bytes).ok()?;
        let sets = Sets { at, bytes, end };
        for p in fds.iter().filter(|p| p.fd >= 0) {
            for (k, of) in EVENTS.iter().enumerate() {
                if p.events & of != 0 {
                    let (byte, bit) = sets.bit(k, p.fd);
                    // SAFETY: inside the mapping, which has room for all of these descriptors.
                    unsafe { *byte |= bit };
                }
            }
        }
        Some(sets)
    }

    fn bit(&self, set: usize, fd: i32) -> (*mut u8, u8) {
        let byte = self.at.wrapping_add(set * self.bytes + fd as usize / 8);
        (byte, 1 << (fd % 8))
    }

    fn set(&self, k: usize) -> *mut fd_set {
        self.at.wrapping_add(k * self.bytes).cast()
    }

    /// Puts what a select has said, `r`, into the entries, and gives the memory back.
    fn told(self, fds: &mut [pollfd], r: Result<usize, i32>) -> Result<usize, i32> {
        let mut n = 0;
        for p in fds.iter_mut() {
            p.revents = match r {
                Ok(_) if p.fd >= 0 => (0..3).fold(0, |found, k| {
                    let (byte, bit) = self.bit(k, p.fd);
                    // SAFETY: as in `of`.
                    let has = unsafe { *byte } & bit != 0;
                    found | if has { p.events & EVENTS[k] } else { 0 }
                }),
                // Of one it does not say which.
                Err(libc::EBADF) if p.fd >= 0 && sys::fcntl(p.fd, libc::F_GETFD, 0).is_err() => {
                    POLLNVAL
                }
                _ => 0,
            };
            n += usize::from(p.revents != 0);
        }
        self.give();
        match r {
            Err(libc::EBADF) | Ok(_) => Ok(n),
            e => e,
        }
    }

    fn give(&self) {
        sys::unmap(self.at, 3 * self.bytes);
    }
}

/// As `sys::poll_now`, which was refused, and for at most so many milliseconds.
#[cold]
pub fn now(fds: &mut [pollfd], ms: u32) -> Result<usize, i32> {
    SEEN.store(true, Relaxed);
    let sets = Sets::of(fds).ok_or(libc::ENOMEM)?;
    let r = sys::select(sets.end, [0, 1, 2].map(|k| sets.set(k)), ms);
    sets.told(fds, r)
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
    SEEN.store(true, Relaxed);
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
    let n = signals::or_undo(&undo, || asleep(&select));
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
