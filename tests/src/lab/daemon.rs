//! An `underpassd` on a node of the lab, with a runtime directory of its own.

use super::guest::{Guest, Running};
use super::node::Node;
use super::{quoted, PATIENCE};
use crate::harness::paths::{self, Build};
use crate::harness::until;
use anyhow::{bail, Context, Result};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use underpass_admin::{Request, Response, Row, Stats, ADMIN_SOCK};

/// A daemon runs as long as a test may need it.
const LIFE: Duration = Duration::from_secs(3600);

/// Dropping it kills the daemon.
pub struct Daemon {
    guest: Guest,
    dir: String,
    running: Running,
}

impl Daemon {
    /// Starts one on a node; `args` come after `--dir`.
    pub fn start(node: &Node, args: &str) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let dir = format!("/run/lab-daemon{}", NEXT.fetch_add(1, Ordering::Relaxed));
        Self::start_in(node, Build::This, &dir, args)
    }

    /// The same of a build, in a runtime directory that an earlier one may have used.
    pub fn start_in(node: &Node, build: Build, dir: &str, args: &str) -> Result<Self> {
        let program = quoted(&build.bin("underpassd").to_string_lossy());
        let guest = node.guest()?;
        let running = guest
            .sh(format!("exec {program} --dir {dir} {args}"))
            .limit(LIFE)
            .spawn()?;
        let d = Daemon {
            guest,
            dir: dir.into(),
            running,
        };
        d.running.until("the daemon answers", PATIENCE, || {
            d.ask(&Request::Ping).is_ok()
        })?;
        Ok(d)
    }

    /// The environment of programs under the shim.
    pub fn shim(&self) -> Vec<(String, String)> {
        Self::env(Build::This, &self.dir, false)
    }

    /// The same, and every connection is promoted as early as possible.
    pub fn eager(&self) -> Vec<(String, String)> {
        Self::env(Build::This, &self.dir, true)
    }

    /// The environment of programs whose daemon has this runtime directory, or had, or will have.
    pub fn env(build: Build, dir: &str, eager: bool) -> Vec<(String, String)> {
        let mut env = vec![
            ("LD_PRELOAD".into(), build.shim().to_string_lossy().into()),
            ("UNDERPASS_DIR".into(), dir.into()),
        ];
        if eager {
            env.push(("UNDERPASS".into(), "eager".into()));
        }
        env
    }

    /// One question over the admin socket.
    pub fn ask(&self, request: &Request) -> Result<Response> {
        let line = serde_json::to_string(request)?;
        let socket = format!("{}/{ADMIN_SOCK}", self.dir);
        let answer = self.guest.ask(&socket, &line)?;
        let said = || format!("answer {:?}", String::from_utf8_lossy(&answer));
        match serde_json::from_slice(&answer).with_context(said)? {
            Response::Error { message } => bail!("the daemon says: {message}"),
            r => Ok(r),
        }
    }

    /// What the tool prints, for example `tool("ss -e")`.
    pub fn tool(&self, args: &str) -> Result<String> {
        let tool = quoted(&paths::bin("underpass").to_string_lossy());
        let script = format!("{tool} {args}");
        self.guest
            .sh(script)
            .env("UNDERPASS_DIR", &self.dir)
            .check()
    }

    pub fn ss(&self) -> Result<Vec<Row>> {
        match self.ask(&Request::Ss)? {
            Response::Ss { rows } => Ok(rows),
            other => bail!("ss answered {other:?}"),
        }
    }

    pub fn stats(&self) -> Result<Stats> {
        match self.ask(&Request::Stats)? {
            Response::Stats { stats } => Ok(*stats),
            other => bail!("stats answered {other:?}"),
        }
    }

    /// Waits until the connections' ends satisfy `f`.
    pub fn await_ss(&self, what: &str, f: impl Fn(&[Row]) -> bool) -> Result<()> {
        until(what, PATIENCE, || self.ss().is_ok_and(|rows| f(&rows)))
            .with_context(|| self.picture())
    }

    /// What it has said about itself so far.
    pub fn said(&self) -> String {
        self.running.stderr()
    }

    /// For the messages of failed tests.
    pub fn picture(&self) -> String {
        let rows = self.tool("ss -e").unwrap_or_else(|e| format!("{e:#}"));
        let log = self.tool("log").unwrap_or_else(|e| format!("{e:#}"));
        format!("{rows}{:?}\n{log}{}", self.stats(), self.said())
    }
}
