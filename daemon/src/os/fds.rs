//! Descriptors that came from outside, and where they are closed.
//!
//! A descriptor that another process sent may make `close` block for as long as that process likes: a socket with
//! SO_LINGER, or a file of a FUSE server that does not answer. So received descriptors are closed by threads that do nothing else
//! ([`pool::CLOSES`]), or by a helper in its tenant's share, never on the thread that serves everybody. The same holds for a
//! control socket, because closing it also closes the descriptors that lie unread in its queue.

use crate::os::held::{Account, Held};
use crate::os::pool;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;

/// What `poll` says of a descriptor now; nothing if it cannot tell.
pub fn events(fd: &impl AsFd, wanted: PollFlags) -> PollFlags {
    let mut p = [PollFd::new(fd, wanted)];
    let told = rustix::event::poll(&mut p, Some(&Timespec::default()));
    told.map_or(PollFlags::empty(), |_| p[0].revents())
}

/// A descriptor received from a process we do not trust.
#[derive(Debug)]
pub struct Foreign(Option<Held>);

impl Foreign {
    pub fn new(fd: OwnedFd) -> Self {
        Foreign(Some(Held::new(fd, None)))
    }

    /// It is counted for this one.
    pub(crate) fn received(fd: OwnedFd, payer: Option<Arc<Account>>) -> Self {
        Foreign(Some(Held::new(fd, payer)))
    }

    /// From now on it is counted for this one, and so is what is received from it.
    pub(crate) fn charge(&mut self, payer: &Arc<Account>) {
        if let Some(held) = &mut self.0 {
            held.charge(payer);
        }
    }

    pub(crate) fn payer(&self) -> Option<&Arc<Account>> {
        self.0.as_ref().and_then(Held::payer)
    }

    /// Is there room for what comes beside a message that is read from it?
    pub(crate) fn has_room(&self) -> bool {
        self.payer().is_none_or(|a| a.has_room())
    }

    /// Closes at once, in this thread, which must be one of the blocking pool.
    pub fn close(mut self) {
        drop(self.0.take());
    }
}

impl AsFd for Foreign {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Some(held) => held.fd.as_fd(),
            None => unreachable!("emptied only by drop"),
        }
    }
}

impl AsRawFd for Foreign {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(held) = self.0.take() {
            pool::CLOSES.start(held.payer().cloned(), move || drop(held));
        }
    }
}

/// Closes these one after the other, at some time: what came together keeps one thread from its work.
pub fn close_all(fds: Vec<Foreign>) {
    let all: Vec<Held> = fds.into_iter().filter_map(|mut f| f.0.take()).collect();
    let Some(payer) = all.first().map(|h| h.payer().cloned()) else {
        return;
    };
    pool::CLOSES.start(payer, move || drop(all));
}

/// Types that own one descriptor.
///
/// # Safety
/// `as_raw_fd` must return the same open descriptor until the value is dropped.
pub unsafe trait Keeps: AsRawFd {}
// SAFETY: an `OwnedFd` never changes its descriptor.
unsafe impl Keeps for OwnedFd {}
// SAFETY: as above; nobody can take the value out of an `Arc` that we hold.
unsafe impl Keeps for std::sync::Arc<OwnedFd> {}
// SAFETY: `close` and `drop`, which take the descriptor out, consume the value.
unsafe impl Keeps for Foreign {}

/// Watches a descriptor that the caller gives up. Must be called inside the runtime.
pub fn watch<T: Keeps>(fd: T, interest: Interest) -> std::io::Result<AsyncFd<T>> {
    // SAFETY: by `Keeps`, the descriptor stays open and the same until `fd` is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// Raises the soft limit of open files to the hard one: if there is no room for a received descriptor, the kernel
/// drops it, which may block our thread.
pub fn raise_limit() {
    use rustix::process::{getrlimit, setrlimit, Resource};
    let mut l = getrlimit(Resource::Nofile);
    l.current = l.maximum;
    if let Err(e) = setrlimit(Resource::Nofile, l) {
        tracing::warn!("cannot raise the limit of open files: {e}");
    }
}
