//! Where the build put things.

use std::path::{Path, PathBuf};

/// The workspace.
pub fn root() -> PathBuf {
    let p = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    p.canonicalize().unwrap_or(p)
}

/// Cargo's target directory.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |t| root().join(t))
}

/// The shim that `make build` made: linked for glibc 2.17.
pub fn shim() -> PathBuf {
    target().join("underpass/lib/libunderpass.so")
}

/// `underpass` or `underpassd`.
pub fn bin(name: &str) -> PathBuf {
    target().join("underpass/bin").join(name)
}

/// A program of this workspace that is not installed.
pub fn helper(name: &str) -> PathBuf {
    target().join("release").join(name)
}

/// A script or C source of `tests/programs`.
pub fn script(name: &str) -> PathBuf {
    root().join("tests/programs").join(name)
}

/// A program of the packages of `tests/requirements.txt`.
pub fn packaged(name: &str) -> PathBuf {
    target().join("programs/bin").join(name)
}

/// Debian's Python: the one whose test-suite is installed, whatever PATH says.
pub const PYTHON: &str = "/usr/bin/python3.11";
