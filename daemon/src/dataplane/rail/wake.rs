//! An eventfd that wakes the thread that moves lanes' bytes.

use rustix::event::EventfdFlags;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// An eventfd for the data plane's set; any thread may write to it.
pub(super) fn new_wake() -> Option<Arc<OwnedFd>> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    rustix::event::eventfd(0, flags).ok().map(Arc::new)
}

pub(super) fn wake(wake: Option<&OwnedFd>) {
    // EAGAIN would mean that it is readable already.
    wake.map(|fd| rustix::io::write(fd, &1u64.to_ne_bytes()));
}
