//! Which other processes have the family table.

use core::sync::atomic::{AtomicU32, Ordering::*};

/// How other processes are related to our table.
pub struct Kin {
    /// Not 0: other processes may have the table.
    pub shared: AtomicU32,
    /// Not 0: the table was another process's before.
    pub guest: AtomicU32,
    /// Not 0: this process has changed its user, but could not move out of the table yet.
    pub wanted: AtomicU32,
}

pub static KIN: Kin = Kin {
    shared: AtomicU32::new(0),
    guest: AtomicU32::new(0),
    wanted: AtomicU32::new(0),
};

impl Kin {
    /// This process has got a table that no other process knows.
    pub fn clear(&self) {
        for w in [&self.shared, &self.guest, &self.wanted] {
            w.store(0, Relaxed);
        }
    }
}
