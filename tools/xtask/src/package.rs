//! What image and package have in common: where the built files go, and in which form.

use crate::Tree;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version of everything in the workspace, this program included.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Built files, below `target/underpass`, and where they are installed.
const BUILT: [(&str, &str); 4] = [
    ("bin/underpass", "usr/bin/underpass"),
    ("bin/underpassd", "usr/bin/underpassd"),
    ("lib/libunderpass.so", "usr/lib/underpass/libunderpass.so"),
    ("bin/underpass-static", "usr/lib/underpass/underpass-static"),
];

/// The daemon's configuration, in which every value is the default.
const CONFIG: (&str, &str) = ("deploy/underpassd.toml", "etc/underpass/underpassd.toml");

/// Makes a new directory with what is installed everywhere.
pub fn stage(tree: &Tree, root: &Path) -> Result<(), String> {
    anew(root)?;
    for (from, to) in BUILT {
        let to = root.join(to);
        copy(&tree.target.join("underpass").join(from), &to, 0o755)?;
        // As Debian's dh_strip does it. The files that were built keep their symbols.
        let mut strip = Command::new("strip");
        strip.args([
            "--strip-unneeded",
            "--remove-section=.comment",
            "--remove-section=.note",
        ]);
        run(strip.arg(&to))?;
    }
    copy(&tree.root.join(CONFIG.0), &root.join(CONFIG.1), 0o644)
}

/// An empty directory.
pub fn anew(dir: &Path) -> Result<(), String> {
    if dir.exists() {
        fs::remove_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    }
    fs::create_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))
}

/// Copies a file; the directories above it are made.
pub fn copy(from: &Path, to: &Path, mode: u32) -> Result<(), String> {
    let bytes = fs::read(from).map_err(|e| format!("{}: {e}", from.display()))?;
    write(to, bytes, mode)
}

/// Writes a file; the directories above it are made.
pub fn write(to: &Path, bytes: impl AsRef<[u8]>, mode: u32) -> Result<(), String> {
    let parent = to.parent().map_or_else(PathBuf::new, Path::to_path_buf);
    fs::create_dir_all(parent)
        .and_then(|()| fs::write(to, bytes))
        .and_then(|()| fs::set_permissions(to, fs::Permissions::from_mode(mode)))
        .map_err(|e| format!("{}: {e}", to.display()))
}

/// Packs a directory. The same files make the same bytes, whoever packs them, and when.
pub fn tar(dir: &Path, to: &Path) -> Result<(), String> {
    let mut tar = Command::new("tar");
    tar.args([
        "--format=gnu",
        "--sort=name",
        "--mtime=@0",
        "--mode=u=rwX,go=rX",
    ])
    .args(["--owner=0", "--group=0", "--numeric-owner", "-cf"])
    .env("LC_ALL", "C");
    run(tar.arg(to).arg("-C").arg(dir).arg("."))
}

pub fn run(c: &mut Command) -> Result<(), String> {
    match c.status() {
        Ok(s) if s.success() => Ok(()),
        Ok(s) => Err(format!("{c:?}: {s}")),
        Err(e) => Err(format!("{c:?}: {e}")),
    }
}

/// What a program says on its standard output. It must succeed.
pub fn says(c: &mut Command) -> Result<String, String> {
    let out = c.output().map_err(|e| format!("{c:?}: {e}"))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let errors = String::from_utf8_lossy(&out.stderr);
    match out.status.success() {
        true => Ok(text),
        false => Err(format!("{c:?}: {}\n{text}{errors}", out.status)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tar_depends_on_the_files_alone() -> Result<(), String> {
        let at = std::env::temp_dir().join(format!("underpass-tar-{}", std::process::id()));
        let fill = |name: &str, files: &[&str], mode| {
            let dir = at.join(name);
            anew(&dir)?;
            for f in files {
                write(&dir.join(f), f, mode)?;
            }
            let path = dir.join(files[0]);
            let file = fs::File::options().append(true).open(&path);
            file.and_then(|f| {
                f.set_modified(
                    std::time::UNIX_EPOCH + std::time::Duration::from_secs(u64::from(mode)),
                )
            })
            .map_err(|e| e.to_string())?;
            tar(&dir, &at.join("tar"))?;
            fs::read(at.join("tar")).map_err(|e| e.to_string())
        };
        let one = fill("one", &["b/c", "a"], 0o644)?;
        assert!(one == fill("two", &["a", "b/c"], 0o600)?);
        assert!(one != fill("three", &["a", "b/c"], 0o755)?);
        fs::remove_dir_all(&at).map_err(|e| e.to_string())
    }
}
