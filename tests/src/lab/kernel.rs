//! The kernel of the lab machines: Debian's, unpacked by `tools/install-deps.sh lab`, and the
//! modules that a machine needs before it has a file system to load others from.

use crate::harness::paths;
use anyhow::{ensure, Context, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Modules for the first file system and the network, and those of RDMA: `rdma_rxe` computes its
/// checksums by `crc32_generic` and does not say so in its dependencies.
const MODULES: &[&str] = &[
    "virtio_net",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32_generic",
    "crc32c_generic",
    "rdma_rxe",
    "ib_uverbs",
    "rdma_ucm",
];

pub struct Kernel {
    pub image: PathBuf,
    /// Has `lib/modules/VERSION`.
    pub root: PathBuf,
    pub version: String,
}

impl Kernel {
    pub fn find() -> Result<Self> {
        let root = paths::target().join("lab/kernel");
        let modules = root.join("lib/modules");
        let version = std::fs::read_dir(&modules)
            .ok()
            .and_then(|mut d| d.next()?.ok()?.file_name().into_string().ok())
            .with_context(|| format!("no kernel in {}", root.display()))?;
        let image = root.join("boot").join(format!("vmlinuz-{version}"));
        ensure!(image.exists(), "{} is missing", image.display());
        Ok(Kernel {
            image,
            root,
            version,
        })
    }

    /// The modules that the machine's first process inserts, unpacked, in the order to insert them.
    pub fn first_modules(&self) -> Result<Vec<Vec<u8>>> {
        let mut files: Vec<PathBuf> = Vec::new();
        for m in MODULES {
            let mut c = Command::new("/sbin/modprobe");
            c.arg("-d").arg(&self.root);
            let out = output(c.args(["-S", &self.version, "--show-depends", m]))?;
            // Lines are `insmod PATH` or, for what the kernel has without a module, `builtin NAME`.
            for l in String::from_utf8(out.stdout)?.lines() {
                if let Some(path) = l.strip_prefix("insmod ").map(|p| PathBuf::from(p.trim())) {
                    if !files.contains(&path) {
                        files.push(path);
                    }
                }
            }
        }
        files.iter().map(|f| unpacked(f)).collect()
    }
}

fn unpacked(module: &Path) -> Result<Vec<u8>> {
    if module.extension().is_some_and(|e| e == "xz") {
        Ok(output(Command::new("xz").arg("-dc").arg(module))?.stdout)
    } else {
        Ok(std::fs::read(module)?)
    }
}

fn output(c: &mut Command) -> Result<Output> {
    let out = c.output().with_context(|| format!("{c:?}"))?;
    ensure!(
        out.status.success(),
        "{c:?}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(out)
}
