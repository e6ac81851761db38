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

/// Which build of the product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Build {
    /// This tree's, which `make build` made.
    #[default]
    This,
    /// An earlier one's, which `make previous` made.
    Previous,
}

impl Build {
    fn dir(self) -> PathBuf {
        match self {
            Build::This => target().join("underpass"),
            Build::Previous => target().join("previous/underpass"),
        }
    }

    /// The shim: linked for glibc 2.17.
    pub fn shim(self) -> PathBuf {
        self.dir().join("lib/libunderpass.so")
    }

    /// `underpass` or `underpassd`.
    pub fn bin(self, name: &str) -> PathBuf {
        self.dir().join("bin").join(name)
    }

    /// The image of the daemon's containers.
    pub fn image(self) -> PathBuf {
        self.dir().join("image.tar")
    }

    /// The Helm chart.
    pub fn chart(self) -> PathBuf {
        let root = match self {
            Build::This => root(),
            Build::Previous => target().join("previous/src"),
        };
        root.join("deploy/helm/underpass")
    }
}

/// This tree's shim.
pub fn shim() -> PathBuf {
    Build::This.shim()
}

/// This tree's `underpass` or `underpassd`.
pub fn bin(name: &str) -> PathBuf {
    Build::This.bin(name)
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
