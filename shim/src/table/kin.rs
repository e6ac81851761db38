//! Who else has the table.

use core::sync::atomic::{AtomicU32, Ordering::*};

/// What other processes have to do with our table.
pub struct Kin {
    /// Not 0: others may have it.
    pub shared: AtomicU32,
    /// Not 0: it was another process's before.
    pub guest: AtomicU32,
    /// Not 0: this process has changed its user and could not move out.
    pub wanted: AtomicU32,
}

pub static KIN: Kin = Kin {
    shared: AtomicU32::new(0),
    guest: AtomicU32::new(0),
    wanted: AtomicU32::new(0),
};

impl Kin {
    /// This process has a table of which nobody else knows.
    pub fn clear(&self) {
        for w in [&self.shared, &self.guest, &self.wanted] {
            w.store(0, Relaxed);
        }
    }
}
