//! Programs that will look for this daemon although they have not spoken to it yet: started under
//! the shim with its directory, and without a connection so far.
//!
//! Known by their environment as `/proc` shows it. A program that has written over its own (to
//! change its title) is not recognised; the process that `underpass run` became has asked the daemon
//! to stay, whatever it looks like. Runs on the blocking pool.

use crate::admin::{DIR_ENV, SYSTEM_DIR};
use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Name of the shim's library, up to where a version may follow.
pub const LIBRARY: &str = "libunderpass";
/// Longest environment that is read; the kernel allows 6 MiB with the arguments.
const LONGEST: u64 = 8 << 20;

/// Is there a process of this user that uses, or will use, the daemon in `dir`?
pub fn any(dir: &Path) -> bool {
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
    pids.filter_map(|e| environment(&e.path()))
        .any(|env| uses(&env, &dir, me))
}

/// The environment with which a process was started, if it may be read.
pub fn environment(process: &Path) -> Option<Vec<u8>> {
    let mut env = Vec::new();
    let file = std::fs::File::open(process.join("environ")).ok()?;
    file.take(LONGEST).read_to_end(&mut env).ok()?;
    Some(env)
}

/// A variable that is set and not empty.
pub fn variable<'a>(env: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let mut all = env.split(|b| *b == 0);
    all.find_map(|v| v.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
        .filter(|v| !v.is_empty())
}

/// Does this environment preload the shim?
pub fn preloads(env: &[u8]) -> bool {
    let loads = |v: &[u8]| v.windows(LIBRARY.len()).any(|w| w == LIBRARY.as_bytes());
    variable(env, "LD_PRELOAD").is_some_and(loads)
}

/// Does this environment switch the shim off?
pub fn off(env: &[u8]) -> bool {
    variable(env, "UNDERPASS") == Some(b"off")
}

/// The runtime directories in which a shim with this environment looks for a daemon.
pub fn directories(env: &[u8], uid: u32) -> Vec<PathBuf> {
    let path = |b: &[u8]| PathBuf::from(OsStr::from_bytes(b));
    match variable(env, DIR_ENV) {
        Some(d) => vec![path(d)],
        None => {
            let own = match variable(env, "XDG_RUNTIME_DIR") {
                Some(x) => path(x).join("underpass"),
                None => format!("/tmp/underpass-{uid}").into(),
            };
            vec![SYSTEM_DIR.into(), own]
        }
    }
}

/// Does a shim with this environment look for a daemon in `dir`?
pub fn leads(env: &[u8], dir: &Path, uid: u32) -> bool {
    let is = |p: &PathBuf| p == dir || p.canonicalize().is_ok_and(|p| p == dir);
    directories(env, uid).iter().any(is)
}

/// Does a program with this environment, run by `uid`, use the daemon in `dir`?
fn uses(env: &[u8], dir: &Path, uid: u32) -> bool {
    preloads(env) && !off(env) && leads(env, dir, uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environments() {
        let dir = Path::new("/nowhere/up");
        let uses = |env: &str| super::uses(env.replace(' ', "\0").as_bytes(), dir, 7);
        let lib = "A=b LD_PRELOAD=/x/libfirst.so:/x/libunderpass.so";
        assert!(uses(&format!("{lib} UNDERPASS_DIR=/nowhere/up")));
        for not in [
            "UNDERPASS_DIR=/nowhere/up".into(),
            "LD_PRELOAD=/x/libfirst.so UNDERPASS_DIR=/nowhere/up".into(),
            format!("{lib} UNDERPASS_DIR=/nowhere/upper"),
            format!("{lib} UNDERPASS_DIR=/nowhere/up UNDERPASS=off"),
            format!("{lib} XUNDERPASS_DIR=/nowhere/up"),
            lib.into(),
            String::new(),
        ] {
            assert!(!uses(&not), "{not}");
        }
        let user = Path::new("/tmp/underpass-7");
        assert!(super::uses(&lib.replace(' ', "\0").into_bytes(), user, 7));
        assert!(!super::uses(&lib.replace(' ', "\0").into_bytes(), user, 8));
        let xdg = format!("{lib} XDG_RUNTIME_DIR=/nowhere").replace(' ', "\0");
        assert!(super::uses(
            xdg.as_bytes(),
            Path::new("/nowhere/underpass"),
            7
        ));
    }
}
