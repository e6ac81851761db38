//! What wakes the thread that moves lanes' bytes out of its sleep.

use rustix::event::EventfdFlags;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// What wakes the task from anywhere: an eventfd in the set.
pub(super) fn new_kick() -> Option<Arc<OwnedFd>> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    rustix::event::eventfd(0, flags).ok().map(Arc::new)
}

pub(super) fn kick(kick: Option<&OwnedFd>) {
    // EAGAIN: kicked already.
    kick.map(|fd| rustix::io::write(fd, &1u64.to_ne_bytes()));
}
