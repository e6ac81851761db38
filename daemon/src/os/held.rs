//! How many descriptors this process holds that came from outside, in all and on whose account, and whether there is room
//! for more. Counted from the moment the kernel gives them to us until they are closed, which may be long after.
//!
//! If a message is read while there is no room, the kernel drops its descriptors. That may block our thread, and hurts
//! whoever sent it, who need not be the one that uses so many. So nobody is read for whom there might be no room: an account
//! may hold as many as are still free. The more accounts there are, the less each may hold, and there is always room for
//! another one.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// The most descriptors that the kernel puts beside one message.
pub(super) const SCM_MAX_FD: usize = 253;

/// Descriptors that are held on all accounts, and on none.
static ALL: AtomicUsize = AtomicUsize::new(0);
/// Descriptors of our own, when they were counted last.
static OWN: AtomicUsize = AtomicUsize::new(64);

/// Descriptors that are held for one party. Counts only, which order nothing: all of them are `Relaxed`.
#[derive(Debug, Default)]
pub struct Account(AtomicUsize);

impl Account {
    /// Is there room for another message of this party, whatever is beside it?
    pub(crate) fn has_room(&self) -> bool {
        let free = free(limit(), OWN.load(Relaxed), ALL.load(Relaxed));
        fits(self.0.load(Relaxed), free)
    }
}

fn fits(held: usize, free: usize) -> bool {
    free > 0 && held <= free
}

/// Descriptors that may still be received before there is no room for one more message; an eighth of all is kept for our
/// own that are made until they are counted the next time.
fn free(limit: usize, own: usize, held: usize) -> usize {
    (limit - limit / 8).saturating_sub(own + held + SCM_MAX_FD)
}

/// How many this process may have; that does not change after its start.
fn limit() -> usize {
    static LIMIT: OnceLock<usize> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        files.map_or(usize::MAX / 2, |n| {
            usize::try_from(n).unwrap_or(usize::MAX / 2)
        })
    })
}

/// Counts all that this process has. May take long.
pub(crate) fn count() {
    let held = ALL.load(Relaxed);
    let told = rustix::fs::stat("/proc/self/fd").map_or(0, |s| s.st_size);
    let all = match usize::try_from(told) {
        Ok(n) if n > 0 => n,
        // Before Linux 6.2.
        _ => match std::fs::read_dir("/proc/self/fd") {
            Ok(all) => all.count(),
            Err(_) => return,
        },
    };
    OWN.store(all.saturating_sub(held), Relaxed);
}

/// A descriptor that came from outside, and who it is counted for; it is closed before it is not counted any more.
#[derive(Debug)]
pub(crate) struct Held {
    pub(super) fd: OwnedFd,
    charge: Charge,
}

#[derive(Debug)]
struct Charge(Option<Arc<Account>>);

impl Held {
    pub(crate) fn new(fd: OwnedFd, payer: Option<Arc<Account>>) -> Held {
        ALL.fetch_add(1, Relaxed);
        if let Some(a) = &payer {
            a.0.fetch_add(1, Relaxed);
        }
        Held {
            fd,
            charge: Charge(payer),
        }
    }

    pub(crate) fn payer(&self) -> Option<&Arc<Account>> {
        self.charge.0.as_ref()
    }

    /// From now on it is counted for this one.
    pub(crate) fn charge(&mut self, payer: &Arc<Account>) {
        payer.0.fetch_add(1, Relaxed);
        ALL.fetch_add(1, Relaxed); // and one less, with the old charge
        self.charge = Charge(Some(payer.clone()));
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        ALL.fetch_sub(1, Relaxed);
        if let Some(a) = &self.0 {
            a.0.fetch_sub(1, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free() {
        assert_eq!(free(1024, 100, 0), 1024 - 128 - 253 - 100);
        assert_eq!(free(512, 400, 50), 0);
        assert_eq!(free(64, 64, 0), 0);
        assert!(fits(0, 1) && fits(5, 5) && !fits(6, 5) && !fits(0, 0));
    }

    /// Whoever takes all that it may, there is room for another one.
    #[test]
    fn each_leaves_room() {
        let mut held = vec![0_usize; 6];
        let mut all = 0;
        for one in &mut held[..5] {
            while fits(*one, free(10_000, 100, all)) {
                *one += 1;
                all += 1;
            }
        }
        assert!(held[..5].iter().all(|n| *n > 100), "{held:?}");
        assert!(fits(held[5], free(10_000, 100, all)));
    }

    #[test]
    fn counted_until_closed() {
        let (a, b) = (Arc::new(Account::default()), Arc::new(Account::default()));
        let file = || std::fs::File::open("/dev/null").unwrap().into();
        let mut one = Held::new(file(), Some(a.clone()));
        let two = Held::new(file(), Some(a.clone()));
        one.charge(&b);
        assert_eq!((a.0.load(Relaxed), b.0.load(Relaxed)), (1, 1));
        drop((one, two));
        assert_eq!((a.0.load(Relaxed), b.0.load(Relaxed)), (0, 0));
    }
}
