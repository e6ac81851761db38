//! The C programs of `tests/programs`. Each asserts by itself what the kernel does: it runs bare first, so
//! that this is known to be so, and then on lanes.

use super::{paths, Daemon, Place, Program};
use anyhow::{ensure, Context, Result};
use std::path::Path;
use std::time::Duration;

/// Far more than any of them takes.
const LIMIT: Duration = Duration::from_secs(120);

/// Compiles a program.
pub fn compile(name: &str, program: &Path) -> Result<()> {
    compile_as(&["-Wl,-z,now"], name, program, &[]) // (lazy binding takes stack)
}

/// Compiles a library, to be preloaded.
pub fn library(name: &str, library: &Path) -> Result<()> {
    compile_as(&["-shared", "-fPIC"], name, library, &[])
}

fn compile_as(how: &[&str], name: &str, to: &Path, with: &[&Path]) -> Result<()> {
    Program::new("cc", &Place::bare())
        .args(["-O1", "-pthread"])
        .args(how)
        .arg("-o")
        .arg(to)
        .arg(paths::script(&format!("{name}.c")))
        .arg("-Wl,--no-as-needed")
        .args(with)
        .check(LIMIT)?;
    Ok(())
}

/// Compiles a program and runs it bare and promoted: at least so many ends, and bytes on lanes.
pub fn both_ways(name: &str, args: &[&str], ends: u64, bytes: u64) -> Result<()> {
    both_ways_in(&[], None, name, args, ends, bytes)
}

/// The same with a program that is linked with this library.
pub fn both_ways_with(
    library: &str,
    name: &str,
    args: &[&str],
    ends: u64,
    bytes: u64,
) -> Result<()> {
    both_ways_in(&[], Some(library), name, args, ends, bytes)
}

/// The same in rings of one page.
pub fn in_small_rings(name: &str, args: &[&str], ends: u64, bytes: u64) -> Result<()> {
    let small = ["--ring-log2", "12", "--ring-max-log2", "12"];
    both_ways_in(&small, None, name, args, ends, bytes)
}

fn both_ways_in(
    daemon: &[&str],
    with: Option<&str>,
    name: &str,
    args: &[&str],
    ends: u64,
    bytes: u64,
) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let program = dir.path().join(name);
    let to = dir.path().join("library.so");
    if let Some(with) = with {
        library(with, &to)?;
    }
    let libraries = with.map(|_| to.as_path());
    compile_as(&["-Wl,-z,now"], name, &program, libraries.as_slice())?;
    let run = |place: &Place| -> Result<()> {
        let out = Program::new(&program, place).args(args).run(LIMIT)?;
        ensure!(
            out.status.success() && out.stdout.contains("result ok"),
            "{}: {}\n{}",
            out.status,
            out.stdout,
            out.stderr
        );
        Ok(())
    };
    run(&Place::bare()).context("bare")?;
    let d = Daemon::with(daemon)?;
    run(&d.eager()).with_context(|| d.picture())?;
    d.assert_promoted(ends, bytes)?;
    Ok(())
}
