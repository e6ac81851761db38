//! What a tenant may have if the configuration does not say it: by the machine. Small enough that one tenant at all of its
//! limits does not use up what the daemon has; and enough for a service with ten thousand connections, each with a process of
//! its own, on a machine with 16 GiB.

use super::Limits;

/// What there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Machine {
    /// Memory, in bytes.
    pub memory: u64,
    /// Memory that this daemon may use, in bytes.
    pub own_memory: u64,
    /// Descriptors that this daemon may have.
    pub files: u64,
    pub processors: u64,
}

const KIB: u64 = 1 << 10;
const GIB: u64 = 1 << 30;

/// By a part of what there is, within bounds.
fn part(of: u64, part: u64, least: u32, most: u32) -> u32 {
    let n = u32::try_from(of / part).unwrap_or(most);
    n.clamp(least, most)
}

impl std::fmt::Display for Limits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Limits {
            lanes,
            memory,
            pinned,
            clients,
            waiting,
            ..
        } = self;
        let (mib, pinned) = (memory >> 20, pinned >> 20);
        write!(
            f,
            "lanes = {lanes}, memory_mib = {mib}, pinned_mib = {pinned}, processes = {clients}, waiting = {waiting}"
        )
    }
}

impl Limits {
    pub(crate) fn of(m: &Machine) -> Limits {
        Limits {
            // Some hundred bytes of ours each. (The rings are the programs' memory, and theirs to limit.)
            lanes: part(m.memory, 64 * KIB, 16_384, 262_144),
            // Address space, which costs nothing, but for a descriptor per 16 MiB.
            memory: m.memory.saturating_mul(32).clamp(64 * GIB, 1024 * GIB),
            // An eighth, which is really taken. (8 MiB for a process and a node.)
            pinned: (m.memory / 8).clamp(GIB / 4, 64 * GIB),
            // Each has some four descriptors here: a control connection, a table, one to wait for its end, one to dial.
            clients: part(m.files, 16, 64, 16_384),
            // A kilobyte of ours each: a 256th of what we may use.
            waiting: part(m.own_memory, 256 * KIB, 4_096, 65_536),
            // They are busy, or waiting for a file; a sixteenth of all helpers at most.
            jobs: part(m.processors.saturating_mul(16), 1, 32, 64),
        }
    }
}

/// Connections that have not said hello, of all tenants: an eighth of our descriptors.
pub(crate) fn newcomers(m: &Machine) -> usize {
    usize::try_from(part(m.files, 8, 64, 4_096)).unwrap_or(64)
}

impl Machine {
    /// This one.
    pub(crate) fn here() -> Machine {
        // SAFETY: plain queries.
        let (pages, size) = unsafe {
            (
                libc::sysconf(libc::_SC_PHYS_PAGES),
                libc::sysconf(libc::_SC_PAGESIZE),
            )
        };
        let of = |n: i64| u64::try_from(n).unwrap_or(0);
        let memory = of(pages).saturating_mul(of(size));
        // (At its start the daemon takes as many as it may have: `os::fds::raise_limit`.)
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
        let processors = std::thread::available_parallelism();
        Machine {
            memory,
            own_memory: crate::os::cgroup2::own_memory_max().map_or(memory, |m| m.min(memory)),
            files: files.unwrap_or(u64::MAX),
            processors: processors.map_or(1, |n| u64::try_from(n.get()).unwrap_or(1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(gib: u64, files: u64, processors: u64) -> Machine {
        Machine {
            memory: gib * GIB,
            own_memory: gib * GIB,
            files,
            processors,
        }
    }

    #[test]
    fn small_machines_and_large_ones() {
        let small = Limits::of(&machine(1, 1024, 1));
        assert_eq!((small.lanes, small.clients), (16_384, 64));
        assert_eq!(
            (small.memory, small.waiting, small.jobs),
            (64 * GIB, 4_096, 32)
        );
        let large = Limits::of(&machine(512, 1 << 20, 128));
        assert_eq!((large.lanes, large.clients), (262_144, 16_384));
        assert_eq!(
            (large.memory, large.waiting, large.jobs),
            (1024 * GIB, 65_536, 64)
        );
        let places = |files| newcomers(&machine(1, files, 1));
        assert_eq!((places(64), places(1024), places(1 << 20)), (64, 128, 4096));
        assert_eq!(
            small.to_string(),
            "lanes = 16384, memory_mib = 65536, pinned_mib = 256, processes = 64, waiting = 4096"
        );
        // Nothing is known of it.
        let none = Limits::of(&machine(0, 0, 0));
        assert!(none.lanes > 0 && none.clients > 0 && none.memory > 0 && none.jobs > 0);
    }

    /// A database in one pod: ten thousand connections, a process for each, and as many programs at the other ends.
    #[test]
    fn one_large_service_is_served() {
        for files in [524_288, 1 << 20] {
            let mut m = machine(16, files, 4);
            m.own_memory = 4 * GIB; // as the chart limits it
            let l = Limits::of(&m);
            assert!(l.lanes >= 10_000 && l.clients >= 10_000 && l.waiting >= 10_000);
            let link_group = 2 * (lane::abi::CONTROL_BYTES + lane::abi::CHUNK_BYTES) as u64;
            assert!(l.memory / link_group >= 10_000, "{}", l.memory / link_group);
        }
    }
}
