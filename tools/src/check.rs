//! `underpass check HOST PORT`: which mode does a connection from here to that service get?
//!
//! This is no guess from tables: a real connection is opened under the shim (by a [`probe`], a process of its own with
//! the library preloaded), and the daemon is asked about both its ends until they are promoted or it is clear that they
//! will not be. Nothing is ever sent to the service.
//!
//! With `--measure` the service is `underpass check --serve` ([`serve`]), and the connection is measured ([`measure`]).

mod measure;
mod peer;
pub mod probe;
mod report;
mod serve;

use crate::cli;
use crate::client;
use crate::out::{self, Failure, Outcome};
use crate::{shimlib, verify};
use lane::proto::reason::Reason;
use probe::{Connection, Probes};
use report::{End, Finding};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
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
/// Seconds to wait for the promotion. A measurement is worth more patience.
const WAIT_S: u64 = 2;
const MEASURE_WAIT_S: u64 = 10;

/// `carried`: the probe as a program, if this one cannot be its own.
pub fn run(dir: Option<PathBuf>, o: &cli::Check, carried: Option<&[u8]>) -> Outcome {
    let failed = |f: Failure| f.with_code(FAILED);
    if let Some(pid) = o.pid {
        let dir = Places::here(dir).choose().to_owned();
        return verify::check(pid, o.json, dir);
    }
    let lib = match o.serve {
        Some(_) => shimlib::find().ok(),
        None => Some(shimlib::find().map_err(failed)?),
    };
    let places = Places::here(dir);
    let dir = std::path::absolute(places.choose()).map_err(|e| failed(Failure::new(e)))?;
    places.check_owner(&dir).map_err(|e| failed(e.into()))?;
    let probes = Probes::new(lib, dir, carried).map_err(failed)?;
    if let Some(at) = o.serve {
        return serve::run(at, o.once, &probes).map_err(failed);
    }
    let to = match (&o.host, o.port) {
        (Some(host), Some(port)) => (host.as_str(), port),
        _ => return Err(failed(Failure::new("no service"))), // the parser refuses this
    };
    match o.measure {
        true => measure::run(to, o, &probes),
        false => look(to, o, &probes),
    }
    .map_err(failed)
}

/// Which mode does a connection to any service get?
fn look(to: (&str, u16), o: &cli::Check, probes: &Probes) -> Outcome {
    let args = ["idle", to.0, &to.1.to_string()];
    let mut connection = Connection::open(probes, &args, true)?;
    let pause = |_: &mut Connection| {
        std::thread::sleep(STEP);
        Ok(())
    };
    let wait = o.wait.unwrap_or(WAIT_S);
    let mut found = watch(&mut connection, &probes.dir, wait, pause)?;
    found.closed = connection.close();
    match o.json {
        true => out::print_json(&found.json())?,
        false => out::print(&found.text())?,
    }
    match found.promoted() || found.promotable() {
        true => Ok(ExitCode::SUCCESS),
        false => Ok(ExitCode::from(ON_TCP)),
    }
}

/// Asks the daemon until the answer is final or time is up, with a pause between two questions.
fn watch(
    c: &mut Connection,
    dir: &Path,
    wait_s: u64,
    mut pause: impl FnMut(&mut Connection) -> Result<(), Failure>,
) -> Result<Finding, Failure> {
    let deadline = Instant::now() + Duration::from_secs(wait_s);
    let (mut last, mut same) = (Finding::default(), 0);
    loop {
        let now = ask(c, dir);
        if now.promoted() || now.no_daemon.is_some() {
            return Ok(now);
        }
        same = if now == last { same + 1 } else { 0 };
        let time_up = Instant::now() >= deadline;
        // The search is expensive, so it is done only when the daemon reports nothing new.
        if time_up || same % LOOK == FINAL {
            let mut now = now.clone();
            if now.there.row.is_none() && now.across.is_none() && !now.one_sided {
                let told = now.here.row.as_ref().map_or(0, |r| r.peer_reason);
                now.there = End::seen(peer::look(&c.local, &c.peer), told);
            }
            if time_up || now.lasting() {
                return Ok(now);
            }
        }
        last = now;
        pause(c)?;
    }
}

/// What the daemon says of both ends now.
fn ask(c: &Connection, dir: &Path) -> Finding {
    let question = Request::Check {
        local: c.local.clone(),
        peer: c.peer.clone(),
    };
    let (here, there, across) = match client::ask_in(dir, &question) {
        Ok(Response::Check {
            local,
            peer,
            across,
            ..
        }) => (local, peer, across),
        Ok(other) => return alone(c, client::unexpected(&other)),
        Err(f) => return own_row(c, dir).unwrap_or_else(|| alone(c, f)),
    };
    let told = here.as_ref().map_or(0, |r| r.peer_reason);
    Finding {
        local: c.local.clone(),
        peer: c.peer.clone(),
        here: End::here(here),
        there: match &across {
            Some(_) => End::remote(told),
            None => End::there(there, told),
        },
        across,
        ..Finding::default()
    }
}

/// Containers are shown their own connections, and nothing else is answered there. `None`: not even that.
fn own_row(c: &Connection, dir: &Path) -> Option<Finding> {
    let Ok(Response::Ss { rows }) = client::ask_in(dir, &Request::Ss) else {
        return None;
    };
    let mut rows = rows.into_iter();
    let here = rows.find(|r| r.local == c.local && r.peer == c.peer);
    let told = here.as_ref().map_or(0, |r| r.peer_reason);
    Some(Finding {
        local: c.local.clone(),
        peer: c.peer.clone(),
        here: End::here(here),
        there: End::hidden(told),
        one_sided: true,
        ..Finding::default()
    })
}

/// The finding if no daemon can be asked.
fn alone(c: &Connection, why: Failure) -> Finding {
    Finding {
        local: c.local.clone(),
        peer: c.peer.clone(),
        here: End {
            reason: Some(Reason::NoDaemon.code()),
            ..End::default()
        },
        there: End::seen(peer::look(&c.local, &c.peer), 0),
        no_daemon: Some(why.message),
        ..Finding::default()
    }
}
