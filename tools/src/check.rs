//! `underpass check HOST PORT`: which mode does a connection from here to that service get?
//!
//! This is no guess from tables: a real connection is opened under the shim (by [`probe`], which is this program
//! again, with the library preloaded), and the daemon is asked about both its ends until they are promoted or it is
//! clear that they will not be. Nothing is ever sent to the service.

mod peer;
pub mod probe;
mod report;

use crate::cli;
use crate::client;
use crate::out::{self, clean, Failure, Outcome};
use crate::{run, shimlib, verify};
use lane::proto::reason::Reason;
use probe::Event;
use report::{End, Finding};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use underpass_admin::places::Places;
use underpass_admin::{Request, Response};

/// Exit status if the connection stays on TCP, and if the test itself failed.
const ON_TCP: u8 = 1;
const FAILED: u8 = 2;
/// Interval between two questions to the daemon.
const STEP: Duration = Duration::from_millis(50);
/// Number of equal answers that make a lasting reason final.
const FINAL: u32 = 4;
/// Number of questions between two searches for the other end's process.
const LOOK: u32 = 10;

/// The open connection, which lives as long as this value.
struct Connection {
    child: Child,
    events: BufReader<ChildStdout>,
    local: String,
    peer: String,
}

impl Connection {
    fn open(to: (&str, u16), lib: &Path, dir: &Path) -> Result<Self, Failure> {
        let me = std::env::current_exe().map_err(Failure::new)?;
        let mut command = Command::new(me);
        command.arg("__probe").arg(to.0).arg(to.1.to_string());
        run::prepare(&mut command, lib, dir, true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command
            .spawn()
            .map_err(|e| Failure::new(format_args!("cannot start the probe: {e}")))?;
        let stdout = child
            .stdout
            .take()
            .ok_or_else(|| Failure::new("the probe has no output"))?;
        let mut c = Connection {
            child,
            events: BufReader::new(stdout),
            local: String::new(),
            peer: String::new(),
        };
        match c.next() {
            Some(Event::Connected { local, peer }) => {
                (c.local, c.peer) = (local, peer);
                Ok(c)
            }
            Some(Event::Failed { message }) => Err(Failure::new(clean(&message))),
            Some(Event::Closed) | None => Err(Failure::new(
                "the probe ended without a word (does libunderpass.so load?)",
            )),
        }
    }

    fn next(&mut self) -> Option<Event> {
        let mut line = String::new();
        self.events.read_line(&mut line).ok()?;
        serde_json::from_str(&line).ok()
    }

    /// Closes the connection; returns whether the service had closed it before.
    fn close(mut self) -> bool {
        drop(self.child.stdin.take());
        matches!(self.next(), Some(Event::Closed))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

pub fn run(dir: Option<PathBuf>, o: &cli::Check) -> Outcome {
    let failed = |f: Failure| f.with_code(FAILED);
    let to = match (o.pid, &o.host, o.port) {
        (Some(pid), ..) => {
            let dir = Places::here(dir).choose().to_owned();
            return verify::check(pid, o.json, dir);
        }
        (_, Some(host), Some(port)) => (host.as_str(), port),
        _ => return Err(failed(Failure::new("no service"))), // the parser refuses this
    };
    let lib = shimlib::find().map_err(failed)?;
    let places = Places::here(dir);
    let dir = std::path::absolute(places.choose()).map_err(|e| failed(Failure::new(e)))?;
    places.check_owner(&dir).map_err(|e| failed(e.into()))?;
    let connection = Connection::open(to, &lib, &dir).map_err(failed)?;
    let mut found = watch(&connection, &dir, o.wait);
    found.local = connection.local.clone();
    found.peer = connection.peer.clone();
    found.closed = connection.close();
    match o.json {
        true => out::print_json(&found.json()).map_err(failed)?,
        false => out::print(&found.text()).map_err(failed)?,
    }
    match found.promoted() || found.promotable() {
        true => Ok(ExitCode::SUCCESS),
        false => Ok(ExitCode::from(ON_TCP)),
    }
}

/// Asks the daemon until the answer is final or time is up.
fn watch(c: &Connection, dir: &Path, wait_s: u64) -> Finding {
    let deadline = Instant::now() + Duration::from_secs(wait_s);
    let question = Request::Check {
        local: c.local.clone(),
        peer: c.peer.clone(),
    };
    let (mut last, mut same) = (Finding::default(), 0);
    loop {
        let (here, there, across) = match client::ask_in(dir, &question) {
            Ok(Response::Check {
                local,
                peer,
                across,
                ..
            }) => (local, peer, across),
            Ok(other) => return alone(c, client::unexpected(&other)),
            Err(f) => return alone(c, f),
        };
        let told = here.as_ref().map_or(0, |r| r.peer_reason);
        let now = Finding {
            here: End::here(here),
            there: match &across {
                Some(_) => End::remote(told),
                None => End::there(there, told),
            },
            across,
            ..Finding::default()
        };
        if now.promoted() {
            return now;
        }
        same = if now == last { same + 1 } else { 0 };
        let time_up = Instant::now() >= deadline;
        // The search is expensive, so it is done only when the daemon reports nothing new.
        if time_up || same % LOOK == FINAL {
            let mut now = now.clone();
            if now.there.row.is_none() && now.across.is_none() {
                now.there = End::seen(peer::look(&c.local, &c.peer), told);
            }
            if time_up || now.lasting() {
                return now;
            }
        }
        last = now;
        std::thread::sleep(STEP);
    }
}

/// The finding if no daemon can be asked.
fn alone(c: &Connection, why: Failure) -> Finding {
    Finding {
        here: End {
            reason: Some(Reason::NoDaemon.code()),
            ..End::default()
        },
        there: End::seen(peer::look(&c.local, &c.peer), 0),
        no_daemon: Some(why.message),
        ..Finding::default()
    }
}
