//! `underpass run --verify` and `underpass check --pid`: do a program and its children carry the library and reach a
//! daemon, and if not, why?
//!
//! Everything is read from `/proc` or asked from the daemon; the processes are not changed.

mod process;
mod report;
mod tree;

use crate::cli;
use crate::client;
use crate::out::{self, Failure, Outcome};
use process::{Daemons, Seen};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// Exit status if something is missing, and if that could not be found out.
const MISSING: u8 = 1;
const FAILED: u8 = 2;
/// Interval between two looks at the processes of a program.
const STEP: Duration = Duration::from_millis(20);
/// Time that a program may take to end after it was told to.
const GRACE: Duration = Duration::from_secs(3);

/// `check --pid`: a running process and its descendants.
pub fn check(pid: u32, json: bool, dir: PathBuf) -> Outcome {
    let mut daemons = Daemons::new(dir);
    let all: Vec<Seen> = tree::descendants(pid)
        .into_iter()
        .filter_map(|p| Seen::look(p, &mut daemons))
        .collect();
    if all.first().is_none_or(|s| s.pid != pid) {
        return Err(Failure::new(absence(pid)).with_code(FAILED));
    }
    match json {
        true => out::print_json(&report::json(&all)).map_err(|f| f.with_code(FAILED))?,
        false => out::print(&report::text(&all)).map_err(|f| f.with_code(FAILED))?,
    }
    Ok(code(&all))
}

/// Why there is no process to look at.
fn absence(pid: u32) -> String {
    match underpass_admin::proc::of_thread(pid) {
        Some(p) if p != pid => format!("{pid} is no process, but a thread of process {p}"),
        _ if underpass_admin::proc::is_zombie(pid) => {
            format!("process {pid} has ended; its parent has not waited for it yet")
        }
        _ => format!("there is no process {pid}"),
    }
}

fn code(all: &[Seen]) -> ExitCode {
    match all.iter().all(Seen::fine) {
        _ if all.is_empty() => ExitCode::from(FAILED),
        true => ExitCode::SUCCESS,
        false => ExitCode::from(MISSING),
    }
}

/// `run --verify`: runs the program as a child and watches it and its descendants until they end or time is up. The
/// report goes to standard error, because standard output belongs to the program.
pub fn run(mut command: Command, o: &cli::Run, dir: PathBuf) -> Outcome {
    // Descendants whose parents end become our children (subreaper), so that we still see them.
    let _ = nix::sys::prctl::set_child_subreaper(true);
    let mut child = match command.spawn() {
        Ok(c) => c,
        Err(e) => return Err(Failure::cannot_run(&o.command, &e)),
    };
    let end = Instant::now() + Duration::from_secs(o.wait);
    let mut daemons = Daemons::new(dir);
    let mut seen: BTreeMap<process::Key, Seen> = BTreeMap::new();
    let mut status = None;
    loop {
        look(child.id(), &mut daemons, &mut seen);
        if status.is_none() {
            status = child.try_wait().map_err(Failure::new)?;
        }
        // Processes that the program left running are watched until they end, too.
        if Instant::now() >= end || (status.is_some() && tree::children().is_empty()) {
            break;
        }
        std::thread::sleep(STEP);
    }
    let ended = status.is_some();
    tree::end_all(GRACE);
    let status = match status {
        Some(s) => Some(s),
        None => child.try_wait().ok().flatten(),
    };
    let all: Vec<Seen> = seen.into_values().filter(Seen::settled).collect();
    let text = match o.json {
        true => serde_json::to_string_pretty(&report::json(&all)).map_err(Failure::new)? + "\n",
        false => report::text(&all) + &report::ending(status, ended, o.wait),
    };
    eprint!("{text}");
    Ok(code(&all))
}

/// Looks at all descendants. The latest finding is kept for each program that a process executed; if it ever had the
/// library, that suffices.
fn look(child: u32, daemons: &mut Daemons, seen: &mut BTreeMap<process::Key, Seen>) {
    daemons.forget();
    let ours = tree::descendants(child);
    let left = tree::children().into_iter().flat_map(tree::descendants);
    let mut all: Vec<u32> = ours.into_iter().chain(left).collect();
    all.sort_unstable();
    all.dedup();
    for s in all.into_iter().filter_map(|p| Seen::look(p, daemons)) {
        let key = s.key();
        match seen.get(&key) {
            Some(old) if !s.better_than(old) => {}
            _ => {
                seen.insert(key, s);
            }
        }
    }
}

/// The processes connected to the daemon in this directory; `None`: no daemon answers there.
fn connected(dir: &std::path::Path) -> Option<Vec<u32>> {
    use underpass_admin::client::{presence, Presence};
    use underpass_admin::{Request, Response};
    match client::ask_in(dir, &Request::Clients) {
        Ok(Response::Clients { pids }) => Some(pids),
        Ok(_) => Some(Vec::new()),
        Err(_) => matches!(presence(dir), Presence::Answers).then(Vec::new),
    }
}

/// The path `inner` as seen by a process (its root). `of`: its directory in `/proc`, or that of one of its threads.
fn within(of: &std::path::Path, inner: &std::path::Path) -> PathBuf {
    let inner = inner.strip_prefix("/").unwrap_or(inner);
    of.join("root").join(inner)
}
