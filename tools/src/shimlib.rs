//! Finding libunderpass.so.

use crate::out::Failure;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

const NAME: &str = "libunderpass.so";
/// Environment variable with the path of the library.
const LIB_ENV: &str = "UNDERPASS_LIB";
/// The directory in which packages install it.
const SYSTEM: &str = "/usr/lib/underpass";

/// The library to preload.
pub fn find() -> Result<PathBuf, Failure> {
    let named = std::env::var_os(LIB_ENV)
        .filter(|v| !v.is_empty())
        .map(PathBuf::from);
    let exe = std::env::current_exe().ok();
    let lib = search(named, exe.as_deref())?;
    if lib
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|b| b" :\t\n".contains(b))
    {
        // The dynamic linker splits LD_PRELOAD at these characters and has no way to quote them.
        return Err(Failure::new(format_args!(
            "{}: a path with a space or a colon cannot be preloaded; move it, or name a link to it in {LIB_ENV}",
            lib.display()
        )));
    }
    Ok(lib)
}

fn search(named: Option<PathBuf>, exe: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(p) = named {
        // Programs change their directory: only an absolute path means the same to all of them.
        return match std::path::absolute(&p) {
            Ok(abs) if abs.is_file() => Ok(abs),
            _ => Err(Failure::new(format_args!(
                "{LIB_ENV} names {}, which is not a file",
                p.display()
            ))),
        };
    }
    let candidates = candidates(exe.and_then(Path::parent));
    match candidates.iter().find(|p| p.is_file()) {
        Some(p) => Ok(p.clone()),
        None => {
            let list: Vec<_> = candidates
                .iter()
                .map(|p| format!("  {}", p.display()))
                .collect();
            Err(Failure::new(format_args!(
                "{NAME} is in none of these places (build it with `make`, or name it in {LIB_ENV}):\n{}",
                list.join("\n")
            )))
        }
    }
}

fn candidates(dir: Option<&Path>) -> Vec<PathBuf> {
    let mut v = Vec::new();
    if let Some(d) = dir {
        v.push(d.join(NAME)); // a package in one directory, or cargo's target directory
        v.push(d.join("deps").join(NAME)); // cargo build, before the library is copied up
        if let Some(up) = d.parent() {
            v.push(up.join("lib").join(NAME));
            v.push(up.join("lib/underpass").join(NAME));
            v.push(up.join("underpass/lib").join(NAME)); // target/release beside target/underpass
            if d.ends_with("deps") || d.ends_with("examples") {
                v.push(up.join(NAME));
            }
        }
    }
    v.push(Path::new(SYSTEM).join(NAME));
    v
}

/// A value for LD_PRELOAD without the shim, wherever it is; `None`: nothing else is in it.
pub fn without(old: Option<&OsStr>) -> Option<OsString> {
    let old = old.map(OsStrExt::as_bytes).unwrap_or_default();
    let ours = |entry: &&[u8]| Path::new(OsStr::from_bytes(entry)).ends_with(NAME);
    let kept = old.split(|b| b" :\t".contains(b));
    let kept: Vec<_> = kept.filter(|e| !e.is_empty() && !ours(e)).collect();
    (!kept.is_empty()).then(|| OsString::from_vec(kept.join(&b':')))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use underpass_admin::environ::preload;

    #[test]
    fn the_shim_comes_behind_an_existing_preload() {
        let lib = Path::new("/l/libunderpass.so");
        let p = |old: &str| preload(lib, Some(OsStr::new(old))).into_string().unwrap();
        assert_eq!(preload(lib, None), "/l/libunderpass.so");
        assert_eq!(p(""), "/l/libunderpass.so");
        assert_eq!(p("/a.so:/b.so"), "/a.so:/b.so:/l/libunderpass.so");
        assert_eq!(p(" /a.so  /b.so"), "/a.so:/b.so:/l/libunderpass.so");
        assert_eq!(
            p("/l/libunderpass.so:/a.so"),
            "/a.so:/l/libunderpass.so",
            "nested runs load it once"
        );
        let w = |old: &str| without(Some(OsStr::new(old)));
        assert_eq!(
            w("/a.so /x/libunderpass.so:/b.so"),
            Some("/a.so:/b.so".into())
        );
        assert_eq!((w(":/x/libunderpass.so"), without(None)), (None, None));
    }

    #[test]
    fn the_nearest_library_is_taken() {
        let t = tempfile::tempdir().unwrap();
        let exe = t.path().join("bin/underpass");
        for d in ["bin/deps", "lib/underpass", "underpass/lib"] {
            fs::create_dir_all(t.path().join(d)).unwrap();
        }
        let mut expected = Vec::new();
        for place in ["underpass/lib", "lib/underpass", "lib", "bin/deps", "bin"] {
            let p = t.path().join(place).join(NAME);
            fs::write(&p, "").unwrap();
            expected.push(p.clone());
            assert_eq!(search(None, Some(&exe)).unwrap(), p);
        }
        let named = expected[0].clone();
        assert_eq!(search(Some(named.clone()), Some(&exe)).unwrap(), named);
        assert!(
            search(Some(t.path().join("none")), Some(&exe)).is_err(),
            "a wrong name is an error, not ignored"
        );
        assert_eq!(
            search(None, Some(&t.path().join("bin/deps/test-123"))).unwrap(),
            t.path().join("bin/deps").join(NAME)
        );
    }
}
