//! `select` instead of a `poll` that a limit refuses: see `few`.

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use libc::{fd_set, pollfd, POLLIN, POLLNVAL, POLLOUT, POLLPRI, POLLRDHUP};

const READ: i16 = POLLIN | POLLRDHUP | libc::POLLRDNORM;
const WRITE: i16 = POLLOUT | libc::POLLWRNORM;
/// The poll events that each of the three sets stands for.
pub const EVENTS: [i16; 3] = [READ, WRITE, POLLPRI];

/// Has a poll been refused? (`now`: this one was.) Then a later one may be refused, too.
pub fn refused_once(now: bool) -> bool {
    static SEEN: AtomicBool = AtomicBool::new(false);
    if now {
        SEEN.store(true, Relaxed);
    }
    SEEN.load(Relaxed)
}

/// Three sets of descriptors, in a mapping of their own.
pub struct Sets {
    at: *mut u8,
    /// Bytes of one set.
    bytes: usize,
    pub end: i32,
}

impl Sets {
    /// `None`: there is no memory for them.
    pub fn of(fds: &[pollfd]) -> Option<Sets> {
        let end = fds.iter().map(|p| p.fd).max().unwrap_or(-1) + 1;
        let bytes = (end as usize).div_ceil(64).max(1) * 8;
        let at = super::map_private(3 * bytes).ok()?;
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

    pub fn set(&self, k: usize) -> *mut fd_set {
        self.at.wrapping_add(k * self.bytes).cast()
    }

    /// Stores the result `r` of a select in the entries, and frees the sets.
    pub fn told(self, fds: &mut [pollfd], r: Result<usize, i32>) -> Result<usize, i32> {
        let mut n = 0;
        for p in fds.iter_mut() {
            p.revents = match r {
                Ok(_) if p.fd >= 0 => (0..3).fold(0, |found, k| {
                    let (byte, bit) = self.bit(k, p.fd);
                    // SAFETY: as in `of`.
                    let has = unsafe { *byte } & bit != 0;
                    found | if has { p.events & EVENTS[k] } else { 0 }
                }),
                // EBADF does not say which descriptor is meant.
                Err(libc::EBADF) if p.fd >= 0 && super::fcntl(p.fd, libc::F_GETFD, 0).is_err() => {
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

    pub fn give(&self) {
        super::unmap(self.at, 3 * self.bytes);
    }
}

/// As `super::poll_now`, after that was refused, with a time-out of `ms` milliseconds.
#[cold]
pub fn now(fds: &mut [pollfd], ms: u32) -> Result<usize, i32> {
    refused_once(true);
    let sets = Sets::of(fds).ok_or(libc::ENOMEM)?;
    let r = super::select(sets.end, [0, 1, 2].map(|k| sets.set(k)), ms);
    sets.told(fds, r)
}
