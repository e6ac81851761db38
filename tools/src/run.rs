//! `underpass run`: becomes the program, with the shim preloaded and a daemon running.
//!
//! The program must find nothing changed: the same pid, descriptors and exit status, and no process of ours as its
//! child.

use crate::cli;
use crate::out::{Failure, Outcome};
use crate::{shimlib, start, verify};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use underpass_admin::environ;
use underpass_admin::places::DIR_ENV;

/// Exit status for a failure of our own, as with `env` and `nohup`.
const OURS: u8 = 125;

/// Sets the environment that makes a program run under the shim.
pub fn prepare(command: &mut Command, lib: &Path, runtime_dir: &Path, eager: bool) {
    command.env(
        "LD_PRELOAD",
        environ::preload(lib, std::env::var_os("LD_PRELOAD").as_deref()),
    );
    command.env(
        environ::ASAN,
        environ::asan_options(std::env::var_os(environ::ASAN).as_deref()),
    );
    command.env(DIR_ENV, runtime_dir);
    if eager {
        command.env("UNDERPASS", "eager");
    }
}

pub fn run(dir: Option<PathBuf>, o: &cli::Run) -> Outcome {
    let ours = |f: Failure| f.with_code(OURS);
    let (program, args) = o
        .command
        .split_first()
        .ok_or_else(|| Failure::new("no program").with_code(OURS))?;
    let lib = shimlib::find().map_err(ours)?;
    let runtime_dir = start::ensure(dir).map_err(ours)?;
    let mut command = Command::new(program);
    command.args(args);
    prepare(&mut command, &lib, &runtime_dir, o.eager);
    if o.verify {
        return verify::run(command, o, runtime_dir);
    }
    let e = command.exec(); // returns only if it failed
    Err(Failure::cannot_run(&o.command, &e))
}
