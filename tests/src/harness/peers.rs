//! The Python programs of `tests/programs`: echo and transfer pairs that compare every byte.

use super::{until, Daemon, Place, Program, Running, PATIENCE};
use anyhow::{bail, Context, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An echo server of one I/O style: `threads fork poll select epoll edge`.
pub struct Echo {
    pub server: Running,
    host: String,
    port: String,
}

impl Echo {
    pub fn serve(mode: &str, host: &str, place: &Place) -> Result<Self> {
        let mut server = Program::python("echo.py", place)
            .args(["serve", mode, host])
            .spawn()?;
        let port = server.line("port ", PATIENCE)?;
        Ok(Echo {
            server,
            host: host.into(),
            port,
        })
    }

    pub fn port(&self) -> Result<u16> {
        Ok(self.port.parse()?)
    }

    /// Starts a client of so many connections and rounds, or until a file exists.
    pub fn client(
        &self,
        place: &Place,
        conns: u32,
        rounds: u32,
        until: Option<&Path>,
    ) -> Result<EchoClient> {
        self.client_to(&self.host, self.port()?, place, conns, rounds, until)
    }

    /// The same, to another address that leads here.
    pub fn client_to(
        &self,
        host: &str,
        port: u16,
        place: &Place,
        conns: u32,
        rounds: u32,
        until: Option<&Path>,
    ) -> Result<EchoClient> {
        let p = Program::python("echo.py", place)
            .args(["client", host])
            .words(&format!("{port} {conns} {rounds}"))
            .args(until);
        Ok(EchoClient {
            running: p.spawn()?,
        })
    }
}

pub struct EchoClient {
    pub running: Running,
}

impl EchoClient {
    /// Waits for the end; every byte must have come back. Returns bytes sent and rounds.
    pub fn finish(self, limit: Duration) -> Result<(u64, u64)> {
        let out = self.running.wait(limit)?;
        let v = result(&out.stdout).with_context(|| out.stderr.clone())?;
        if v["errors"].as_array().is_none_or(|e| !e.is_empty()) || !out.status.success() {
            bail!("echo client: {} {v}\n{}", out.status, out.stderr);
        }
        Ok((
            v["bytes"].as_u64().context("bytes")?,
            v["rounds"].as_u64().context("rounds")?,
        ))
    }
}

/// Two programs that both send all the time, until told to stop.
pub struct Transfer {
    pub server: Running,
    pub client: Running,
    stop: PathBuf,
    _dir: tempfile::TempDir,
}

/// What a transfer moved, both directions, after the hashes were compared.
#[derive(Debug)]
pub struct Moved {
    pub forth: u64,
    pub back: u64,
    /// SHA-256 in hex of each direction, equal at both ends.
    pub hashes: [String; 2],
}

impl Transfer {
    pub fn start(server: &Place, client: &Place, host: &str) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let stop = dir.path().join("stop");
        let mut server = Program::python("transfer.py", server)
            .args(["serve", host])
            .spawn()?;
        let port = server.line("port ", PATIENCE)?;
        let client = Program::python("transfer.py", client)
            .args(["connect", host, &port])
            .arg(&stop)
            .spawn()?;
        Ok(Transfer {
            server,
            client,
            stop,
            _dir: dir,
        })
    }

    /// Both still run (neither has seen an error).
    pub fn alive(&mut self) -> bool {
        !self.server.has_ended() && !self.client.has_ended()
    }

    /// Bytes that both ends say they have sent.
    pub fn sent(&self) -> u64 {
        let last = |r: &Running| {
            let text = r.stdout();
            text.lines()
                .rev()
                .find_map(|l| l.strip_prefix("sent ")?.parse::<u64>().ok())
                .unwrap_or(0)
        };
        last(&self.server) + last(&self.client)
    }

    /// Waits until so many more bytes were sent, whatever the daemon does.
    pub fn await_sent(&self, more: u64) -> Result<()> {
        let goal = self.sent() + more;
        until("the transfer goes on", PATIENCE, || self.sent() >= goal)
    }

    /// Asks both to end and compares what was sent with what arrived.
    pub fn finish(self, limit: Duration) -> Result<Moved> {
        std::fs::write(&self.stop, b"")?;
        let c = self.client.wait(limit)?;
        let s = self.server.wait(limit)?;
        let (cv, sv) = (result(&c.stdout), result(&s.stdout));
        let (Ok(cv), Ok(sv)) = (cv, sv) else {
            bail!("transfer: {c:?}\n{s:?}")
        };
        if cv["error"] != Value::Null || sv["error"] != Value::Null {
            bail!("transfer failed: client {cv}, server {sv}");
        }
        if cv["sent"] != sv["received"] || sv["sent"] != cv["received"] {
            bail!("BYTES DIFFER: client {cv}, server {sv}");
        }
        let n = |v: &Value| v["sent_bytes"].as_u64().context("sent_bytes");
        let h = |v: &Value| v["sent"].as_str().unwrap_or_default().to_string();
        Ok(Moved {
            forth: n(&cv)?,
            back: n(&sv)?,
            hashes: [h(&cv), h(&sv)],
        })
    }
}

/// The JSON after `result ` in what a program printed.
pub fn result(stdout: &str) -> Result<Value> {
    let line = stdout
        .lines()
        .find_map(|l| l.strip_prefix("result "))
        .context("no result line")?;
    Ok(serde_json::from_str(line)?)
}

/// Two ends that do one of `cases.py` or `edges.py` with a connection.
pub struct Pair {
    pub server: Running,
    pub client: Running,
    dir: tempfile::TempDir,
}

impl Pair {
    pub fn start(program: &str, case: &str, server: &Place, client: &Place) -> Result<Self> {
        Self::with(program, &[case], server, client)
    }

    /// A program whose only arguments are role, host and directory.
    pub fn roles(program: &str, server: &Place, client: &Place) -> Result<Self> {
        Self::with(program, &[], server, client)
    }

    fn with(program: &str, args: &[&str], server: &Place, client: &Place) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let host = "127.0.0.1";
        let mut server = Program::python(program, server)
            .args(args)
            .args(["serve", host])
            .arg(dir.path())
            .spawn()?;
        let port = server.line("port ", PATIENCE)?;
        let client = Program::python(program, client)
            .args(args)
            .args(["connect", host, &port])
            .arg(dir.path())
            .spawn()?;
        Ok(Pair {
            server,
            client,
            dir,
        })
    }

    /// Without the shim.
    pub fn bare(program: &str, case: &str) -> Result<Self> {
        let p = Self::start(program, case, &Place::bare(), &Place::bare())?;
        p.mark("warm")?;
        Ok(p)
    }

    /// Waits until both directions of both ends are on lanes, and lets them go on.
    pub fn promoted(program: &str, case: &str, d: &Daemon) -> Result<Self> {
        let p = Self::start(program, case, &d.eager(), &d.eager())?;
        d.await_promoted(2)
            .with_context(|| format!("{}\n{}", p.server.stderr(), p.client.stderr()))?;
        // Until the mark is there they exchange messages: some of them on the lanes.
        until("bytes on the lanes", PATIENCE, || {
            d.stats().is_ok_and(|s| s.lane_tx_bytes >= 1000)
        })?;
        p.mark("warm")?;
        Ok(p)
    }

    /// Runs a case bare, so that it is known to be what TCP does, and then on lanes.
    pub fn both_ways(program: &str, case: &str, limit: Duration) -> Result<()> {
        Self::bare(program, case)?.finish(limit).context("bare")?;
        let d = Daemon::start()?;
        let p = Self::promoted(program, case, &d)?;
        p.finish(limit).with_context(|| d.picture())?;
        d.assert_promoted(2, 1000)?;
        Ok(())
    }

    /// Runs a case bare, so that it is known to be what TCP does, and then on lanes, on which both ends
    /// must still be, and have been all the time, when one of them leaves the mark `kept`.
    pub fn both_ways_kept(program: &str, case: &str, limit: Duration) -> Result<()> {
        let mut p = Self::bare(program, case)?;
        p.await_mark("kept")?;
        p.mark("looked")?;
        p.finish(limit).context("bare")?;
        let d = Daemon::start()?;
        let mut p = Self::promoted(program, case, &d)?;
        p.await_mark("kept").with_context(|| d.picture())?;
        if d.stats()?.downs != 0 || d.promoted_now() != 2 {
            bail!("it left its lane\n{}", d.picture());
        }
        p.mark("looked")?;
        p.finish(limit).with_context(|| d.picture())?;
        d.assert_promoted(2, 1000)?;
        Ok(())
    }

    /// Leaves a mark that the programs wait for.
    pub fn mark(&self, name: &str) -> Result<()> {
        Ok(std::fs::write(self.dir.path().join(name), b"")?)
    }

    /// Waits for a mark that the programs leave.
    pub fn await_mark(&mut self, name: &str) -> Result<()> {
        let path = self.dir.path().join(name);
        let (server, client) = (&mut self.server, &mut self.client);
        until(name, PATIENCE, || {
            path.exists() || server.has_ended() || client.has_ended()
        })?;
        if !path.exists() {
            bail!(
                "{name}: ended early\n{}{}{}{}",
                server.stdout(),
                server.stderr(),
                client.stdout(),
                client.stderr()
            );
        }
        Ok(())
    }

    /// Waits for both ends, which must both be content.
    pub fn finish(self, limit: Duration) -> Result<()> {
        let (c, s) = (self.client.wait(limit), self.server.wait(limit));
        for r in [c, s] {
            content(r?)?;
        }
        Ok(())
    }

    /// Waits for the client only.
    pub fn finish_client(self, limit: Duration) -> Result<()> {
        content(self.client.wait(limit)?)
    }
}

fn content(o: super::Output) -> Result<()> {
    if !o.status.success() || !o.stdout.contains("result ok") {
        bail!("{}: {}\n{}\n{}", o.name, o.status, o.stdout, o.stderr);
    }
    Ok(())
}
