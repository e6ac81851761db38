//! The `underpass` command: starts programs under the shim, shows their connections, and controls them.
//!
//! It is a client of the daemon and keeps no state. It must never crash because of a daemon, a terminal or a closed
//! pipe, and `run` must leave nothing behind in the program that it becomes.

#![forbid(unsafe_code)]
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

mod addr;
mod ask;
mod capture;
mod certs;
mod check;
mod cli;
mod client;
mod devices;
mod diag;
mod out;
mod peers;
mod plugin;
mod pods;
mod rules;
mod run;
mod shimlib;
mod ss;
mod start;
mod top;
mod verify;

use clap::{CommandFactory, Parser};
use cli::{Cli, Command};
use out::{Failure, Outcome};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use underpass_admin::rules::Action;

/// The other name of `underpass ss`, of the program that it stands for.
const SMCSS: &str = "smcss";

/// The command as a whole.
pub fn main() -> ExitCode {
    run_command(Some(top::run), None)
}

/// The command for containers: without `top`, whose terminal would be much of its size. (The linker leaves out what only
/// `main` names.) No shim can be loaded into it, so it carries the probe of `check` as a program.
pub fn main_in_container(probe: Option<&'static [u8]>) -> ExitCode {
    run_command(None, probe)
}

type Top = fn(Option<PathBuf>, &cli::Top) -> Outcome;

fn run_command(top: Option<Top>, probe: Option<&'static [u8]>) -> ExitCode {
    if underpass_nri::launched::is_launched() {
        return ended(plugin::run());
    }
    let args = arguments(std::env::args_os().collect());
    let Cli { dir, command } = Cli::parse_from(args);
    let outcome = match command {
        Command::Run(o) => run::run(dir, &o),
        Command::Ss(o) => ss::run(dir, &o),
        Command::Top(o) => match top {
            Some(top) => top(dir, &o),
            None => Err(Failure::new(
                "this build for containers has no `top`: run it on the node, or see `ss --watch` here",
            )),
        },
        Command::Stats(o) => ask::stats(dir, &o),
        Command::Reasons(o) => ask::reasons(&o),
        Command::Down(o) => ask::steer(dir, &o, true),
        Command::Up(o) => ask::steer(dir, &o, false),
        Command::Deny(o) => rules::add(dir, Action::Deny, &o),
        Command::Allow(o) => rules::add(dir, Action::Allow, &o),
        Command::Rules(o) => rules::rules(dir, &o),
        Command::Capture(o) => capture::run(dir, &o),
        Command::Log(o) => ask::log(dir, &o),
        Command::Peers(o) => peers::run(dir, &o),
        Command::Pods(o) => pods::run(dir, &o),
        Command::Devices(o) => devices::run(&o),
        Command::Certs(o) => certs::run(&o),
        Command::Check(o) => check::run(dir, &o, probe),
        Command::Completions { shell } => completions(shell),
        Command::Man { page, out } => man(page, out),
        Command::StartDaemon {
            program,
            runtime_dir,
        } => start::detach(&program, &runtime_dir).map(|()| ExitCode::SUCCESS),
        Command::Probe { args } => Ok(check::probe::be(&args)),
    };
    ended(outcome)
}

fn ended(outcome: Outcome) -> ExitCode {
    outcome.unwrap_or_else(|f| {
        out::complain(&f.message);
        ExitCode::from(f.code)
    })
}

/// Under the name `smcss` it is `underpass ss`.
fn arguments(mut args: Vec<OsString>) -> Vec<OsString> {
    let name = args.first().map(Path::new).and_then(Path::file_name);
    if name.is_some_and(|n| n == SMCSS) {
        args[0] = "underpass".into();
        args.insert(1, "ss".into());
    }
    args
}

fn completions(shell: clap_complete::Shell) -> Outcome {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "underpass", &mut text);
    out::print(&String::from_utf8_lossy(&text))?;
    Ok(ExitCode::SUCCESS)
}

fn man(page: Option<String>, dir: Option<PathBuf>) -> Outcome {
    let mut root = Cli::command();
    root.build();
    if let Some(dir) = dir {
        let fail = |e| Failure::new(format_args!("{}: {e}", dir.display()));
        std::fs::create_dir_all(&dir).map_err(fail)?;
        clap_mangen::generate_to(root, &dir).map_err(fail)?;
        return Ok(ExitCode::SUCCESS);
    }
    let command = match page {
        None => root,
        Some(name) => {
            let sub = root
                .get_subcommands()
                .find(|c| !c.is_hide_set() && c.get_name() == name)
                .cloned();
            let full: &'static str = format!("underpass-{name}").leak(); // clap keeps names for ever
            sub.ok_or_else(|| {
                Failure::new(format_args!("there is no command `{name}`")).with_code(2)
            })?
            .name(full)
        }
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(command)
        .render(&mut text)
        .map_err(Failure::new)?;
    out::print(&String::from_utf8_lossy(&text))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_names() {
        let of = |line: &str| arguments(line.split(' ').map(OsString::from).collect());
        assert_eq!(of("/run/underpass/smcss -a"), ["underpass", "ss", "-a"]);
        assert_eq!(
            of("/run/underpass/underpass -a"),
            ["/run/underpass/underpass", "-a"]
        );
        assert!(arguments(Vec::new()).is_empty());
    }
}
