//! The connections of `underpass check`. This runs with the shim preloaded, or without, so that connecting, sending,
//! reading and closing go through its hooks as in any program.
//!
//! The tool runs it as itself (`underpass __probe`). The tool for containers has no libraries, so no shim can be
//! preloaded into it: it carries [`main.rs`](../main.rs) as a program, and starts that with the image's own dynamic
//! linker. So this crate needs nothing but a C library, and of that only what glibc 2.17 and musl have.

// `as` only where a lint exception says why. Tests may: what they lose, they notice.
#![cfg_attr(
    not(test),
    warn(
        clippy::as_ptr_cast_mut,
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        clippy::ptr_as_ptr,
        clippy::ref_as_ptr
    )
)]

mod client;
mod idle;
mod server;
mod sock;
mod trial;
pub mod wire;

use std::ffi::OsString;
use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

pub use sock::named;

/// Exit status for arguments that no tool of this version gives.
const USAGE: u8 = 2;

/// Does what the arguments say: `idle HOST PORT`, `measure HOST PORT tcp|lane`, or `serve`, whose connection is
/// standard input.
pub fn run(args: impl Iterator<Item = OsString>) -> ExitCode {
    let args: Vec<String> = args.filter_map(|a| a.into_string().ok()).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["idle", host, port] => with_port(port, |p| idle::run(host, p)),
        ["measure", host, port, path] => match wire::Path::named(path) {
            Some(path) => with_port(port, |p| client::run(host, p, path)),
            None => ExitCode::from(USAGE),
        },
        ["serve"] => server::run(),
        _ => ExitCode::from(USAGE),
    }
}

fn with_port(port: &str, f: impl FnOnce(u16) -> ExitCode) -> ExitCode {
    port.parse().map_or(ExitCode::from(USAGE), f)
}

/// Prints a line for the tool. If nobody reads any more, standard input ends, too.
fn say(line: impl Display) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Prints why the probe cannot go on.
fn failed(message: impl Display) -> ExitCode {
    say(format_args!("failed {message}"));
    ExitCode::FAILURE
}
