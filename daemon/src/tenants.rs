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
const LIBRARY: &str = "libunderpass";
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

fn environment(process: &Path) -> Option<Vec<u8>> {
    let mut env = Vec::new();
    let file = std::fs::File::open(process.join("environ")).ok()?;
    file.take(LONGEST).read_to_end(&mut env).ok()?;
    Some(env)
}

/// Does a program with this environment, run by `uid`, use the daemon in `dir`?
fn uses(env: &[u8], dir: &Path, uid: u32) -> bool {
    let var = |name: &str| {
        let mut all = env.split(|b| *b == 0);
        all.find_map(|v| v.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
            .filter(|v| !v.is_empty())
    };
    let loads = |v: &[u8]| v.windows(LIBRARY.len()).any(|w| w == LIBRARY.as_bytes());
    if !var("LD_PRELOAD").is_some_and(loads) || var("UNDERPASS") == Some(b"off") {
        return false;
    }
    let is = |p: PathBuf| p == dir || p.canonicalize().is_ok_and(|p| p == dir);
    let path = |b: &[u8]| PathBuf::from(OsStr::from_bytes(b));
    match var(DIR_ENV) {
        Some(d) => is(path(d)),
        None => {
            let own = match var("XDG_RUNTIME_DIR") {
                Some(x) => path(x).join("underpass"),
                None => format!("/tmp/underpass-{uid}").into(),
            };
            is(SYSTEM_DIR.into()) || is(own)
        }
    }
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
