//! Family tables: where the count of each begins. (Their readings: [`crate::tasks::readings`].)

use super::Core;
use crate::clients::families::Reading;
use crate::clients::family::{Family, Totals};
use crate::os::fds::Foreign;
use crate::os::memfd::{self, Ident};
use crate::os::process::ProcId;
use crate::os::system::System;
use std::sync::Arc;
use std::time::Duration;
use underpass_rdma::verbs::Provider;

/// When the daemon began.
pub(crate) struct Began {
    /// Since 1970, as memory files have it.
    time: Duration,
    /// As processes have it.
    ticks: u64,
}

impl Began {
    pub(super) fn now(system: &dyn System) -> Began {
        Began {
            time: system.wall(),
            ticks: system.ticks(),
        }
    }

    /// Is this table, of this process, older than the daemon? (A process that is older may have loaded the shim later,
    /// so the process is asked only if the kernel does not keep when the memory was made.)
    fn is_after(&self, table: &Foreign, of: ProcId) -> bool {
        match memfd::made_at(table) {
            Some(t) => t < self.time,
            None => of.start < self.ticks,
        }
    }
}

impl<V: Provider> Core<V> {
    /// A process with this table; what was found in it; and all that `/proc/PID/cgroup` says of the process.
    pub(super) fn join_family(
        &mut self,
        (ident, table): (Ident, Foreign),
        found: Option<Totals>,
        of: ProcId,
        cgroups: &str,
    ) -> Arc<Family> {
        let (now, older) = (self.now(), self.began.is_after(&table, of));
        let family = self.families.join(ident, table, (now, older));
        if let Some(t) = found {
            self.families.found(ident, t);
        }
        self.families.came_from(ident, cgroups);
        family
    }

    /// Does the count of this table's family begin with what is in it? Then it is older than this daemon, and was not read
    /// yet.
    pub(crate) fn begins(&self, (ident, table): (Ident, &Foreign), of: ProcId) -> bool {
        !self.families.is_counted(ident) && self.began.is_after(table, of)
    }

    /// Families were read, for the sums.
    pub(crate) fn was_read(&mut self, all: &[Reading]) {
        let now = self.now();
        for r in all {
            self.families.was_read(r, now);
        }
    }

    /// Ended families were read for the last time.
    pub(crate) fn faded(&mut self, all: &[Reading]) {
        let now = self.now();
        all.iter().for_each(|r| self.families.faded(r, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::system::Machine;

    #[test]
    fn what_was_made_before() {
        let table = || Foreign::new(memfd::make("t", 4096).unwrap());
        let of = |start| ProcId { pid: 1, start };
        let before = table();
        std::thread::sleep(Duration::from_millis(30)); // times of files are those of the last tick
        let began = Began::now(&Machine);
        std::thread::sleep(Duration::from_millis(30));
        let after = table();
        assert!(began.is_after(&before, of(began.ticks + 1)));
        assert!(!began.is_after(&after, of(began.ticks - 1)));
    }
}
