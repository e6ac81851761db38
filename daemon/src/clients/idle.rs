//! Programs that will look for this daemon although they have sent no hello yet: started under the shim with the
//! daemon's directory, and without a connection so far.
//!
//! They are recognized by their environment. The process that `underpass run` became has asked the daemon to stay,
//! whatever its environment looks like. Runs on the blocking pool.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use underpass_admin::environ;

/// Is there a process of this user that uses, or will use, the daemon in `dir`?
pub(crate) fn any(dir: &Path) -> bool {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let me = rustix::process::geteuid().as_raw();
    let Ok(proc) = std::fs::read_dir("/proc") else {
        return false;
    };
    let pids = proc.flatten().filter(|e| {
        let name = e.file_name();
        let pid = name.to_str().and_then(|n| n.parse::<u32>().ok());
        pid.is_some_and(|p| p != std::process::id()) && e.metadata().is_ok_and(|m| m.uid() == me)
    });
    pids.filter_map(|e| environ::environment(&e.path()))
        .any(|env| environ::uses(&env, &dir, me))
}
