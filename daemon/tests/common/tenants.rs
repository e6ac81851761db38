//! Processes of other tenants: another user, in a cgroup of its own.

use super::daemon::Daemon;
use rustix::process::geteuid;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Nobody.
pub const NOBODY: u32 = 65_534;

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
        let own = root.join(name);
        std::fs::create_dir(&own).ok()?;
        Some(TestCgroup(own))
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0); // it is empty by then
    }
}

/// A process of another tenant; it ends with this.
pub struct Stranger {
    pid: i32,
    _cgroup: TestCgroup,
}

impl Stranger {
    /// It does `work` again and again, which may only make system calls: it is a fork of a process with threads. `None`: we
    /// may not make one here.
    pub fn start(mut work: impl FnMut()) -> Option<Stranger> {
        let cgroup = geteuid().is_root().then(TestCgroup::new).flatten()?;
        let procs = std::fs::File::options()
            .write(true)
            .open(cgroup.0.join("cgroup.procs"));
        let procs = procs.ok()?;
        // SAFETY: the child makes system calls only.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            let entered = rustix::io::write(&procs, b"0");
            // SAFETY: plain system calls; with our end, it gets a signal.
            let left = unsafe {
                libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::syscall(libc::SYS_setgroups, 0, 0) == 0
                    && libc::syscall(libc::SYS_setresgid, NOBODY, NOBODY, NOBODY) == 0
                    && libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) == 0
            };
            if entered.is_err() || !left {
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(1) };
            }
            loop {
                work();
            }
        }
        Some(Stranger {
            pid,
            _cgroup: cgroup,
        })
    }

    pub fn lives(&self) -> bool {
        // SAFETY: a process of ours.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), libc::WNOHANG) == 0 }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        // SAFETY: a child of ours, which nobody else waits for.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

impl Daemon {
    /// Root's, at a place where everybody may connect.
    pub fn public(within: &Path, args: &[&str]) -> Daemon {
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(within, open).unwrap();
        Daemon::start_in(&within.join("run"), args)
    }
}
