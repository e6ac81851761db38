//! The first file system of a lab machine: a cpio archive in the kernel's `newc` format with
//! busybox, a script and a few modules.

use super::kernel::Kernel;
use anyhow::{Context, Result};
use std::path::Path;

/// Busybox without dependencies, of Debian's `busybox-static`.
pub const BUSYBOX: &str = "/bin/busybox";
const INIT: &str = include_str!("../../lab/guest/init.sh");

/// The archive for machines whose agent is this program of the host.
pub fn image(kernel: &Kernel, agent: &Path) -> Result<Vec<u8>> {
    let mut a = Archive::default();
    for d in [
        "bin", "sbin", "mods", "proc", "sys", "dev", "host", "layer", "root",
    ] {
        a.directory(d);
    }
    a.file(
        "bin/busybox",
        0o755,
        &std::fs::read(BUSYBOX).context(BUSYBOX)?,
    );
    a.file("init", 0o755, INIT.as_bytes());
    let conf = format!(
        "MODULES={}\nKERNEL={}\nAGENT={}\n",
        quoted(&kernel.root.to_string_lossy()),
        quoted(&kernel.version),
        quoted(&agent.to_string_lossy())
    );
    a.file("lab.conf", 0o644, conf.as_bytes());
    // The shell inserts them in the order of their names.
    for (i, m) in kernel.first_modules()?.iter().enumerate() {
        a.file(&format!("mods/{i:03}.ko"), 0o644, m);
    }
    Ok(a.finish())
}

/// A word for the shell.
pub fn quoted(s: &str) -> String {
    format!("'{}'", s.replace('\'', r"'\''"))
}

#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn directory(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    fn file(&mut self, name: &str, mode: u32, data: &[u8]) {
        self.entry(name, 0o100_000 | mode, data);
    }

    fn entry(&mut self, name: &str, mode: u32, data: &[u8]) {
        self.entries += 1;
        // inode, mode, uid, gid, links, mtime, size, device and rdevice (two each), length of the
        // name with its zero byte, checksum (none in this format).
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            data.len() as u32,
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for f in fields {
            self.bytes.extend_from_slice(format!("{f:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(data);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }
}
