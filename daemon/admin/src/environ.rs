//! Does a program carry the shim, and which daemon will it look for? As its environment says, which `/proc` shows. A
//! program that has written over its own (to change its title) is not recognised.

use crate::places::{user_dir, DIR_ENV, SYSTEM_DIR, XDG_ENV};
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Name of the shim's library, up to where a version may follow.
pub const LIBRARY: &str = "libunderpass";
/// Longest environment that is read; the kernel allows 6 MiB with the arguments.
const LONGEST: u64 = 8 << 20;

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

/// A value for LD_PRELOAD that puts `lib` once, after what was there: some preloaded libraries have to come first
/// (the runtimes of GCC's sanitizers abort otherwise), and none has to come last.
pub fn preload(lib: &Path, old: Option<&OsStr>) -> OsString {
    let mut new = OsString::new();
    let old = old.map(OsStrExt::as_bytes).unwrap_or_default();
    for entry in old.split(|b| b" :\t".contains(b)) {
        if !entry.is_empty() && entry != lib.as_os_str().as_bytes() {
            new.push(OsStr::from_bytes(entry));
            new.push(":");
        }
    }
    new.push(lib);
    new
}

/// Options of the AddressSanitizer's runtime.
pub const ASAN: &str = "ASAN_OPTIONS";

/// A value for ASAN_OPTIONS with which a program linked with GCC's AddressSanitizer accepts a library that is
/// preloaded before its runtime; the runtime works nevertheless. A setting of the user's for that stays.
pub fn asan_options(old: Option<&OsStr>) -> OsString {
    const ORDER: &[u8] = b"verify_asan_link_order";
    let old = old.unwrap_or_default();
    if old.as_bytes().windows(ORDER.len()).any(|w| w == ORDER) {
        return old.to_owned();
    }
    let mut new = old.to_owned();
    if !new.is_empty() {
        new.push(":");
    }
    new.push(OsStr::from_bytes(ORDER));
    new.push("=0");
    new
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
            let own = user_dir(variable(env, XDG_ENV).map(OsStr::from_bytes), uid);
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
pub fn uses(env: &[u8], dir: &Path, uid: u32) -> bool {
    preloads(env) && !off(env) && leads(env, dir, uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asan_options_are_kept() {
        let o = |old: &str| asan_options(Some(OsStr::new(old))).into_string().unwrap();
        assert_eq!(asan_options(None), "verify_asan_link_order=0");
        assert_eq!(o(""), "verify_asan_link_order=0");
        assert_eq!(
            o("detect_leaks=0"),
            "detect_leaks=0:verify_asan_link_order=0"
        );
        assert_eq!(o("verify_asan_link_order=1"), "verify_asan_link_order=1");
    }

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
        let t = tempfile::tempdir().unwrap();
        let xdg = format!("{lib} XDG_RUNTIME_DIR={}", t.path().display()).replace(' ', "\0");
        assert!(super::uses(xdg.as_bytes(), &t.path().join("underpass"), 7));
    }
}
