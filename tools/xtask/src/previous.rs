//! The previous version, which this one must get along with: `target/previous` has its sources (`src`) and what a build of
//! them installs (`underpass`).

use crate::package::run;
use crate::Tree;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

/// The commit that stands for it. A release takes its place as soon as there is one.
const COMMIT: &str = "f7907624eb37ee20e2a569a05e79b9255c9b7deb";

/// What its build finds where ours does: the linker, and Debian's packages in the image.
const SHARED: [&str; 2] = ["venv", "image/debian"];

/// Once for a commit. It is built as it was then: with its own `Cargo.lock` and its own build program.
pub fn make(tree: &Tree) -> Result<(), String> {
    let at = tree.target.join("previous");
    let (src, installed, done) = (at.join("src"), at.join("underpass"), at.join("commit"));
    if fs::read_to_string(&done).is_ok_and(|c| c == COMMIT) {
        return Ok(());
    }
    let say = |e: io::Error| format!("{}: {e}", at.display());
    // (Sources that are there are not of another commit: `commit` would name it.)
    if !src.join(".unpacked").exists() || done.exists() {
        fs::remove_dir_all(&at).or_else(absent).map_err(say)?;
        fs::create_dir_all(&src).map_err(say)?;
        unpack(tree, &src)?;
        fs::write(src.join(".unpacked"), "").map_err(say)?;
    }
    for name in SHARED {
        let link = src.join("target").join(name);
        fs::create_dir_all(link.parent().unwrap_or(&src)).map_err(say)?;
        fs::remove_file(&link).or_else(absent).map_err(say)?;
        symlink(tree.target.join(name), link).map_err(say)?;
    }
    let mut c = Command::new("cargo");
    c.args(["run", "--quiet", "-p", "xtask", "--", "image"]);
    run(c.current_dir(&src).env_remove("CARGO_TARGET_DIR"))?;
    fs::remove_dir_all(&installed)
        .or_else(absent)
        .map_err(say)?;
    fs::rename(src.join("target/underpass"), &installed).map_err(say)?;
    fs::write(done, COMMIT).map_err(say)?;
    fs::remove_dir_all(src.join("target")).map_err(say)
}

fn absent(e: io::Error) -> io::Result<()> {
    match e.kind() {
        io::ErrorKind::NotFound => Ok(()),
        _ => Err(e),
    }
}

fn unpack(tree: &Tree, to: &Path) -> Result<(), String> {
    let mut git = tree.command("git", &["archive", COMMIT]);
    let mut git = git
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| e.to_string())?;
    let files = git.stdout.take().ok_or("git archive has no output")?;
    let mut tar = Command::new("tar");
    let unpacked = run(tar.arg("-x").arg("-C").arg(to).stdin(files));
    match git.wait() {
        Ok(s) if s.success() => unpacked,
        _ => Err(format!(
            "git has no commit {COMMIT}: is this a shallow clone?"
        )),
    }
}
