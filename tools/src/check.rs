//! `underpass check HOST PORT`: which mode does a connection from here to there get?
//!
//! Not a guess from tables: a real connection is opened under the shim (by [`probe`], this program
//! again, with the library preloaded), and the daemon is asked about both its ends until they are
//! promoted or it is clear that they will not be. Nothing is ever sent to the service.

pub mod probe;

use crate::cli;
use crate::client::{self, Places};
use crate::out::{self, clean, Failure, Outcome};
use crate::{run, shimlib, ss};
use link::reason::Reason;
use probe::Event;
use serde_json::{json, Value};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use underpassd::admin::{Request, Response, Row};

/// Exit status when the connection stays on TCP, and when the test itself failed.
const ON_TCP: u8 = 1;
const FAILED: u8 = 2;
/// Between two questions to the daemon.
const STEP: Duration = Duration::from_millis(50);
/// So many equal answers make a lasting reason final.
const FINAL: u32 = 4;

/// The open connection: lives as long as this value.
struct Connection {
    child: Child,
    events: BufReader<ChildStdout>,
    local: String,
    peer: String,
}

impl Connection {
    fn open(o: &cli::Check, lib: &Path, dir: &Path) -> Result<Self, Failure> {
        let me = std::env::current_exe().map_err(Failure::new)?;
        let mut command = Command::new(me);
        command.arg("__probe").arg(&o.host).arg(o.port.to_string());
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

    /// Closes the connection; says whether the service had closed it before.
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

/// What the daemon knows.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    here: Option<Row>,
    there: Option<Row>,
    verdict: String,
}

impl Answer {
    fn promoted(&self) -> bool {
        [&self.here, &self.there]
            .into_iter()
            .flatten()
            .any(ss::promoted)
    }

    /// Each end's reason, where it is known.
    fn reasons(&self) -> [Option<u32>; 2] {
        let here = self.here.as_ref();
        let told = here.map(|r| r.peer_reason).filter(|&c| c != 0);
        let there = self.there.as_ref().map(|r| r.reason);
        [here.map(|r| r.reason), there.or(told)]
    }

    /// Not promoted yet, but nothing stands against it.
    fn promotable(&self) -> bool {
        let passes = |r: Option<u32>| r.is_some_and(passes);
        self.there.is_some() && self.reasons().into_iter().all(passes)
    }

    /// Will waiting longer change nothing?
    fn lasting(&self) -> bool {
        let mut known = self.reasons().into_iter().flatten();
        known.any(|r| !passes(r) && lasts(r))
    }

    fn mode(&self) -> String {
        match &self.here {
            Some(r) if !r.mode.is_empty() => clean(&r.mode),
            _ => "TCP".into(),
        }
    }
}

/// Reasons with which a connection is merely not promoted yet.
fn passes(code: u32) -> bool {
    matches!(
        Reason::from_code(code),
        Some(Reason::None | Reason::Young | Reason::Waiting)
    )
}

/// All reasons but those that may go away within seconds, as that of a busy daemon.
fn lasts(code: u32) -> bool {
    !matches!(
        Reason::from_code(code),
        Some(
            Reason::PeerDeclined
                | Reason::NoDaemon
                | Reason::TimeoutDaemon
                | Reason::NotEstablished
                | Reason::RingFull
        )
    )
}

pub fn run(dir: Option<PathBuf>, o: &cli::Check) -> Outcome {
    let failed = |f: Failure| f.with_code(FAILED);
    let lib = shimlib::find().map_err(failed)?;
    let places = Places::here(dir);
    let dir = std::path::absolute(places.choose()).map_err(|e| failed(Failure::new(e)))?;
    places.check_owner(&dir).map_err(failed)?;
    let connection = Connection::open(o, &lib, &dir).map_err(failed)?;
    let (local, peer) = (connection.local.clone(), connection.peer.clone());
    let (answer, no_daemon) = match watch(&connection, &dir, o.wait) {
        Ok(a) => (a, None),
        Err(f) => (Answer::default(), Some(f.message)),
    };
    let closed = connection.close();
    let good = answer.promoted() || answer.promotable();
    if o.json {
        out::print_json(&report_json(
            &local,
            &peer,
            &answer,
            no_daemon.as_deref(),
            closed,
        ))
        .map_err(failed)?;
    } else {
        out::print(&report(
            &local,
            &peer,
            &answer,
            no_daemon.as_deref(),
            closed,
        ))
        .map_err(failed)?;
    }
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(ON_TCP)
    })
}

/// Asks until the answer is final or time is up. Fails if no daemon answers.
fn watch(c: &Connection, dir: &Path, wait_s: u64) -> Result<Answer, Failure> {
    let deadline = Instant::now() + Duration::from_secs(wait_s);
    let question = Request::Check {
        local: c.local.clone(),
        peer: c.peer.clone(),
    };
    let (mut last, mut same) = (Answer::default(), 0);
    loop {
        let answer = match client::ask_in(dir, &question)? {
            Response::Check {
                local,
                peer,
                verdict,
            } => Answer {
                here: local,
                there: peer,
                verdict,
            },
            other => return Err(client::unexpected(&other)),
        };
        same = if answer == last { same + 1 } else { 0 };
        last = answer;
        if last.promoted() || (last.lasting() && same >= FINAL) || Instant::now() >= deadline {
            return Ok(last);
        }
        std::thread::sleep(STEP);
    }
}

fn headline(a: &Answer) -> &'static str {
    if a.promoted() {
        "promoted"
    } else if a.promotable() {
        "on TCP now; promoted after some use"
    } else {
        "stays on TCP"
    }
}

/// Why an end is unknown to the daemon.
fn unknown_here(no_daemon: bool) -> Reason {
    if no_daemon {
        Reason::NoDaemon
    } else {
        Reason::Waiting
    }
}

fn report(local: &str, peer: &str, a: &Answer, no_daemon: Option<&str>, closed: bool) -> String {
    let mut t = format!(
        "connection {local} -> {peer}\nmode       {} ({})\n",
        a.mode(),
        headline(a)
    );
    match &a.here {
        Some(r) => describe("here", r, &mut t),
        None => ss::end("here", unknown_here(no_daemon.is_some()).code(), &mut t),
    }
    match &a.there {
        Some(r) => describe("peer", r, &mut t),
        None => match a.reasons()[1] {
            Some(code) => ss::end("peer", code, &mut t),
            None => t.push_str(UNKNOWN_PEER),
        },
    }
    if let Some(m) = no_daemon {
        t.push_str(&format!("note       {}\n", clean(m)));
    }
    if !a.verdict.is_empty() {
        t.push_str(&format!("verdict    {}\n", clean(&a.verdict)));
    }
    if closed {
        t.push_str("note       the service closed the connection during the test\n");
    }
    t
}

const UNKNOWN_PEER: &str = "    peer  not known here: on another node, or not under Underpass\n";

fn describe(label: &str, r: &Row, t: &mut String) {
    if ss::promoted(r) {
        t.push_str(&format!(
            "    {label:<5} {} (pid {}): {}\n",
            clean(&r.comm),
            r.pid,
            clean(&r.mode)
        ));
    } else {
        ss::end(label, r.reason, t);
        t.push_str(&format!(
            "          program: {} (pid {})\n",
            clean(&r.comm),
            r.pid
        ));
    }
}

fn report_json(
    local: &str,
    peer: &str,
    a: &Answer,
    no_daemon: Option<&str>,
    closed: bool,
) -> Value {
    let end = |r: &Option<Row>, unknown: Option<Reason>| match (r, unknown) {
        (Some(r), _) => json!({
            "known": true, "mode": r.mode, "pid": r.pid, "comm": r.comm, "up": r.up,
            "reason": ss::Said::of(r.reason).json(),
        }),
        (None, Some(u)) => json!({ "known": false, "reason": ss::Said::of(u.code()).json() }),
        (None, None) => json!({ "known": false, "reason": null }),
    };
    json!({
        "local": local,
        "peer": peer,
        "mode": a.mode(),
        "promoted": a.promoted(),
        "promotable": a.promoted() || a.promotable(),
        "here": end(&a.here, Some(unknown_here(no_daemon.is_some()))),
        "there": end(&a.there, a.reasons()[1].and_then(Reason::from_code)),
        "verdict": a.verdict,
        "daemon": no_daemon.is_none(),
        "closed": closed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(mode: &str, reason: Reason) -> Option<Row> {
        Some(Row {
            mode: mode.into(),
            reason: reason.code(),
            ..Row::default()
        })
    }

    #[test]
    fn verdicts_follow_from_both_ends() {
        let tcp = |here, there| Answer {
            here: row("TCP", here),
            there: row("TCP", there),
            verdict: String::new(),
        };
        let a = Answer {
            here: row("SMCD", Reason::None),
            there: None,
            verdict: String::new(),
        };
        assert!(a.promoted());
        let a = tcp(Reason::Waiting, Reason::Young);
        assert!(!a.promoted() && a.promotable() && !a.lasting());
        let a = tcp(Reason::Waiting, Reason::Bypassed);
        assert!(
            !a.promotable() && a.lasting(),
            "the other end will not do it"
        );
        let a = tcp(Reason::TimeoutDaemon, Reason::Young);
        assert!(
            !a.promotable() && !a.lasting(),
            "a busy daemon gets less busy"
        );
        let a = Answer {
            here: row("TCP", Reason::Waiting),
            ..Answer::default()
        };
        assert!(
            !a.promotable() && !a.lasting(),
            "an end that nobody knows yet may still accept"
        );
        let mut here = row("TCP", Reason::Waiting);
        here.iter_mut()
            .for_each(|r| r.peer_reason = Reason::PeerNoShim.code());
        let a = Answer {
            here,
            ..Answer::default()
        };
        assert!(
            !a.promotable() && a.lasting(),
            "the daemon knows that it is another program"
        );
        let a = Answer {
            here: row("TCP", Reason::Unproven),
            ..Answer::default()
        };
        assert!(a.lasting());
    }
}
