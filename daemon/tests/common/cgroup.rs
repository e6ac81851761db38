//! Cgroups for tests, of the hierarchy that limits memory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A cgroup of a test's, by which the daemon tells tenants apart.
pub struct TestCgroup(PathBuf);

impl TestCgroup {
    /// `None`: there can be none here.
    pub fn new() -> Option<TestCgroup> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let n = MADE.fetch_add(1, Relaxed);
        let name = format!("underpass-tenant-{}-{n}", std::process::id());
        let top = Path::new("/sys/fs/cgroup");
        // Version 2, or the hierarchy of version 1 that counts.
        let of = ["memory", "."].map(|h| top.join(h));
        let root = of.into_iter().find(|d| d.join("cgroup.procs").exists())?;
        let _ = std::fs::write(root.join("cgroup.subtree_control"), "+memory");
        let own = root.join(name);
        std::fs::create_dir(&own).ok()?;
        // Nothing is swapped out instead.
        for (file, none) in [("memory.swappiness", "0"), ("memory.swap.max", "0")] {
            let _ = std::fs::write(own.join(file), none);
        }
        Some(TestCgroup(own))
    }

    /// Whoever writes `0` to it is in this cgroup from then on.
    pub fn procs(&self) -> std::io::Result<File> {
        let file = self.0.join("cgroup.procs");
        File::options().write(true).open(file)
    }

    /// Its limit of memory, in bytes; `None`: none.
    pub fn limit(&self, bytes: Option<u64>) {
        let one = self.0.join("memory.limit_in_bytes");
        let (file, none) = match one.exists() {
            true => (one, "-1"),
            false => (self.0.join("memory.max"), "max"),
        };
        let text = bytes.map_or(none.into(), |n| n.to_string());
        std::fs::write(file, text).unwrap();
    }

    /// Bytes that are charged to it.
    pub fn used(&self) -> Option<u64> {
        self.number(["memory.usage_in_bytes", "memory.current"])
    }

    /// The most that were ever. `None`: this kernel does not tell.
    pub fn most_used(&self) -> Option<u64> {
        self.number(["memory.max_usage_in_bytes", "memory.peak"])
    }

    /// Processes that the kernel has killed because it was full.
    pub fn killed(&self) -> Option<u64> {
        let of = |f| std::fs::read_to_string(self.0.join(f)).ok();
        let text = ["memory.oom_control", "memory.events"]
            .into_iter()
            .find_map(of)?;
        let kills = |l: &str| l.strip_prefix("oom_kill ")?.trim().parse().ok();
        text.lines().find_map(kills)
    }

    /// What the first of these files that is there says.
    fn number(&self, files: [&str; 2]) -> Option<u64> {
        let of = |f| std::fs::read_to_string(self.0.join(f)).ok();
        files.into_iter().find_map(of)?.trim().parse().ok()
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0); // it is empty by then
    }
}
