//! What a direction had counted when an epoch of it began.
//!
//! Within an epoch the application's bytes are on the ring, and TCP gets what is not the application's, or repeats
//! the ring. So the cursor and the position on TCP say at any time what the counts of before the epoch have become: for
//! whoever goes on after a process that died before it had counted, and for a daemon that looks at a connection in the
//! middle of anything.

use crate::abi::{AtomicEpoch, Cursor, Epoch};
use core::sync::atomic::{fence, AtomicU64, Ordering::*};

/// These counts, in the family table. Written under the direction's lock. (Shims of before December 2026 leave it 0.)
#[repr(C)]
#[derive(Default)]
pub struct Baseline {
    epoch: AtomicEpoch,
    again: AtomicU64,
    ring: AtomicU64,
}

/// A copy of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// The epoch that began then.
    pub epoch: Epoch,
    /// Bytes on TCP that were not the application's, or were on a ring as well.
    pub again: u64,
    /// Bytes that were on rings, of this lane and of those before it.
    pub ring: u64,
}

impl Baseline {
    /// `change`: stores the words of the switch to which it belongs.
    pub(super) fn store(&self, c: Counted, change: impl FnOnce()) {
        // (Whoever finds this epoch in two copies has found its counts, and these words, in the first one.)
        self.epoch.store(Epoch::NONE, Relaxed);
        fence(Release);
        change();
        self.again.store(c.again, Relaxed);
        self.ring.store(c.ring, Relaxed);
        self.epoch.store(c.epoch, Release);
    }

    /// What it says now.
    pub fn load(&self) -> Counted {
        Counted {
            epoch: self.epoch.load(Acquire), // pairs with the Release in `store`
            again: self.again.load(Relaxed),
            ring: self.ring.load(Relaxed),
        }
    }

    /// The counts of before this epoch. `None`: nobody has noted them.
    pub(super) fn before(&self, epoch: Epoch) -> Option<Counted> {
        Some(self.load()).filter(|c| c.epoch == epoch)
    }

    /// Counts a ring's bytes again, of which this epoch has moved those from `start` to `now`: a process died that may
    /// not have counted them all.
    pub(super) fn recount(&self, ring: &AtomicU64, epoch: Epoch, start: Cursor, now: Cursor) {
        if let Some(c) = self.before(epoch) {
            ring.store(c.ring.wrapping_add(now.saturating_since(start)), Relaxed);
        }
    }
}
