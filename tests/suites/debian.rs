//! Sources of Debian packages (and others), for the tests in them. They are kept under `target/suites`.

use anyhow::{bail, Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use underpass_tests::harness::paths;

/// The sources of a package, unpacked and made ready by `prepare`, once.
pub fn source(package: &str, prepare: impl Fn(&Path) -> Result<()>) -> Result<PathBuf> {
    once(package, |dir| {
        download(dir, package)?;
        let unpacked = std::fs::read_dir(dir)?.flatten();
        let mut dirs = unpacked.filter(|e| {
            let name = e.file_name();
            name.to_string_lossy().starts_with(&format!("{package}-")) && e.path().is_dir()
        });
        let dir = dirs.next().context("nothing was unpacked")?.path();
        prepare(&dir).with_context(|| format!("making {package} ready"))?;
        Ok(dir)
    })
}

/// What `make` leaves in the directory that it names, once: under this name.
pub fn once(name: &str, make: impl Fn(&Path) -> Result<PathBuf>) -> Result<PathBuf> {
    let home = paths::target().join("suites");
    std::fs::create_dir_all(&home)?;
    let home = home.canonicalize()?;
    let done = home.join(name);
    if !done.exists() {
        let new = tempfile::Builder::new().prefix("new-").tempdir_in(&home)?;
        std::fs::rename(make(new.path())?, &done)?;
    }
    Ok(done)
}

/// By `apt-get source`, with the machine's own archives: of their lists only the binary part may be
/// switched on.
fn download(dir: &Path, package: &str) -> Result<()> {
    const SCRIPT: &str = r#"
set -eu
mkdir -p apt/lists/partial apt/parts
for f in /etc/apt/sources.list.d/*.sources; do
  [ ! -e "$f" ] || sed 's/^Types:.*/Types: deb-src/' "$f" >"apt/parts/$(basename "$f")"
done
for f in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
  [ ! -e "$f" ] || sed -n 's/^deb /deb-src /p' "$f" >"apt/parts/$(basename "$f" .list).list"
done
o="-q -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$PWD/apt/parts
   -o Dir::State::lists=$PWD/apt/lists -o APT::Sandbox::User=root"
apt-get $o update
apt-get $o source "$1"
"#;
    run(dir, "sh", &["-c", SCRIPT, "sh", package])
}

/// Runs a command, which must succeed.
pub fn run(dir: &Path, program: &str, args: &[&str]) -> Result<()> {
    let out = Command::new(program).args(args).current_dir(dir).output()?;
    if !out.status.success() {
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        let tail = said.lines().rev().take(20).collect::<Vec<_>>();
        let tail = tail.into_iter().rev().collect::<Vec<_>>().join("\n");
        bail!(
            "{program} {args:?}: {}\n{tail}\n{}",
            out.status,
            String::from_utf8_lossy(&out.stderr)
        );
    }
    Ok(())
}

/// Without what steers a terminal's colours.
pub fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("\x1b[") {
        out.push_str(&rest[..at]);
        rest = &rest[at + 2..];
        rest = rest.find('m').map_or("", |m| &rest[m + 1..]);
    }
    out + rest
}
