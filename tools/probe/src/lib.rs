//! The connections of `underpass check`. This runs with the shim preloaded, or without, so that connecting, sending,
//! reading and closing go through its hooks as in any program.
//!
//! The tool runs it as itself (`underpass __probe`). The tool for containers has no libraries, so no shim can be
//! preloaded into it: it carries [`main.rs`](../main.rs) as a program, and starts that with the image's own dynamic
//! linker. So this crate needs nothing but a C library, and of that only what glibc 2.17 has in `libc.so.6`, and musl:
//! not the standard library's streams, threads and names of hosts.

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

use std::fmt::Display;

pub use sock::named;

/// Exit statuses: it did what it was to do, it could not, and arguments that no tool of this version gives.
const SUCCESS: i32 = 0;
const FAILURE: i32 = 1;
const USAGE: i32 = 2;

/// Does what the arguments say: `idle HOST PORT`, `measure HOST PORT tcp|lane`, or `serve=IP,…`, whose listening
/// socket is standard input, and which turns clients of these addresses away. Returns an exit status.
pub fn run(args: &[&str]) -> i32 {
    match *args {
        ["idle", host, port] => with_port(port, |p| idle::run(host, p)),
        ["measure", host, port, path] => match wire::Path::named(path) {
            Some(path) => with_port(port, |p| client::run(host, p, path)),
            None => USAGE,
        },
        [server::PLAIN] => server::plain(),
        [one] => one
            .strip_prefix(server::SERVE)
            .map_or(USAGE, server::accept),
        _ => USAGE,
    }
}

fn with_port(port: &str, f: impl FnOnce(u16) -> i32) -> i32 {
    port.parse().map_or(USAGE, f)
}

/// Prints a line for the tool. If nobody reads any more, standard input ends, too.
fn say(line: impl Display) {
    sock::print(&format!("{line}\n"));
}

/// Prints why the probe cannot go on.
fn failed(message: impl Display) -> i32 {
    say(format_args!("failed {message}"));
    FAILURE
}
