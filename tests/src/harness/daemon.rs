//! A daemon with a runtime directory of its own, and its admin socket.

use super::paths::Build;
use super::program::{Output, Place, Program, Running};
use super::{until, PATIENCE};
use anyhow::{bail, ensure, Context, Result};
use nix::sys::signal::Signal;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use underpass_admin::{client, Request, Response, Row, Stats, Target};

pub struct Daemon {
    dir: TempDir,
    args: Vec<String>,
    preload: Option<PathBuf>,
    build: Build,
    running: Option<Running>,
    /// Connections that shims have reset, as daemons said that were killed since.
    resets: u64,
    /// Is there a peer here beside whom a connection cannot always be kept?
    hostile: AtomicBool,
}

impl Daemon {
    pub fn start() -> Result<Self> {
        Self::with(&[])
    }

    /// With arguments after `--dir`.
    pub fn with(args: &[&str]) -> Result<Self> {
        let mut d = Self::absent()?;
        d.args = args.iter().map(|s| s.to_string()).collect();
        d.restart()?;
        Ok(d)
    }

    /// With this library preloaded.
    pub fn preloaded(library: &Path) -> Result<Self> {
        let mut d = Self::absent()?;
        d.preload = Some(library.to_path_buf());
        d.restart()?;
        Ok(d)
    }

    /// Only the directory: no daemon runs yet.
    pub fn absent() -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("uptest-").tempdir()?;
        Ok(Daemon {
            dir,
            args: Vec::new(),
            preload: None,
            build: Build::This,
            running: None,
            resets: 0,
            hostile: AtomicBool::new(false),
        })
    }

    /// Starts one of this build, now and later; the one that runs is killed.
    pub fn replace(&mut self, build: Build) -> Result<()> {
        self.build = build;
        self.restart()
    }

    /// Starts it (again).
    pub fn restart(&mut self) -> Result<()> {
        self.kill();
        let mut p = Program::new(self.build.bin("underpassd"), &Place::bare())
            .arg("--dir")
            .arg(self.dir.path())
            .args(&self.args);
        if let Some(library) = &self.preload {
            p = p.env("LD_PRELOAD", library);
        }
        let mut p = p.spawn()?;
        let ready = until("the daemon answers", PATIENCE, || {
            p.has_ended() || self.ask(&Request::Ping).is_ok()
        });
        if ready.is_err() || p.has_ended() {
            bail!("underpassd did not start: {}\n{}", p.stdout(), p.stderr());
        }
        self.running = Some(p);
        Ok(())
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Programs that run here are under the shim, promoted by the usual rules.
    pub fn place(&self) -> Place {
        Place::shim(self.dir())
    }

    /// Programs that run here have every connection promoted as early as possible.
    pub fn eager(&self) -> Place {
        self.place().eager()
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.resets += self.resets_now();
        self.running = None;
    }

    /// A peer here is hostile, is stopped for longer than it may, or is killed: connections with it may be reset. Otherwise
    /// a test with a reset has failed, whatever it looked at.
    pub fn expect_resets(&self) {
        self.hostile.store(true, Relaxed); // (this thread reads it)
    }

    /// Those that the daemon knows, if one runs that can answer.
    fn resets_now(&self) -> u64 {
        let runs = |r: &Running| {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", r.pid())).ok()?;
            let state = stat.rsplit_once(") ")?.1.chars().next()?;
            (!"TtZX".contains(state)).then_some(())
        };
        let stats = self.running.as_ref().and_then(runs);
        stats
            .and_then(|()| self.stats().ok())
            .map_or(0, |s| s.resets)
    }

    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    pub fn thaw(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, s: Signal) -> Result<()> {
        self.running.as_ref().context("no daemon runs")?.signal(s)
    }

    pub fn pid(&self) -> Result<u32> {
        Ok(self.running.as_ref().context("no daemon runs")?.pid())
    }

    /// Did it end by itself?
    pub fn has_died(&mut self) -> bool {
        self.running.as_mut().is_some_and(Running::has_ended)
    }

    /// What it printed.
    pub fn said(&self) -> String {
        self.running
            .as_ref()
            .map_or_else(String::new, |r| format!("{}{}", r.stdout(), r.stderr()))
    }

    /// One question over the admin socket.
    pub fn ask(&self, request: &Request) -> Result<Response> {
        Ok(client::ask(self.dir.path(), request)?)
    }

    pub fn stats(&self) -> Result<Stats> {
        match self.ask(&Request::Stats)? {
            Response::Stats { stats } => Ok(*stats),
            other => bail!("stats answered {other:?}"),
        }
    }

    pub fn ss(&self) -> Result<Vec<Row>> {
        match self.ask(&Request::Ss)? {
            Response::Ss { rows } => Ok(rows),
            other => bail!("ss answered {other:?}"),
        }
    }

    pub fn log(&self) -> Result<Vec<String>> {
        match self.ask(&Request::Log)? {
            Response::Log { lines } => Ok(lines),
            other => bail!("log answered {other:?}"),
        }
    }

    pub fn down(&self, target: Target) -> Result<u64> {
        self.told(Request::Down { target })
    }

    pub fn up(&self, target: Target) -> Result<u64> {
        self.told(Request::Up { target })
    }

    fn told(&self, r: Request) -> Result<u64> {
        match self.ask(&r)? {
            Response::Told { ends, later } => Ok(ends + later),
            other => bail!("{r:?} answered {other:?}"),
        }
    }

    /// Runs something while all connections are sent down and up at random.
    pub fn down_and_up<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let seed = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)?
            .as_nanos() as u64
            | 1;
        println!("seed {seed:#x}");
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                let mut x = seed;
                while !stop.load(Relaxed) {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    // Mostly up, so that lanes are used.
                    let told = match x % 4 {
                        0 => self.down(Target::All),
                        _ => self.up(Target::All),
                    };
                    if let Err(e) = told {
                        println!("down or up: {e:#}");
                    }
                    std::thread::sleep(Duration::from_millis(5 + x / 4 % 80));
                }
            });
            let r = f();
            stop.store(true, Relaxed);
            r
        })
    }

    /// Connection ends that are promoted in both directions now.
    pub fn promoted_now(&self) -> usize {
        self.ss().map_or(0, |rows| {
            rows.iter()
                .filter(|r| r.mode == "SMCD" && r.up == "both")
                .count()
        })
    }

    /// Bytes that the living connections have sent on lanes.
    pub fn lane_bytes_now(&self) -> u64 {
        self.ss()
            .map_or(0, |rows| rows.iter().map(|r| r.lane_tx_bytes).sum())
    }

    /// Waits until at least so many ends are promoted in both directions.
    pub fn await_promoted(&self, ends: usize) -> Result<()> {
        until("ends are promoted", PATIENCE, || {
            self.promoted_now() >= ends
        })
        .with_context(|| self.picture())
    }

    /// Waits until a client whose calls have so many ends on lanes is done with them, looks how they went, and lets it
    /// go by the file `seen`. Its output, and the bytes sent on lanes and by TCP.
    pub fn calls(
        &self,
        (server, mut client): (&Running, Running),
        ends: usize,
        seen: &Path,
        limit: Duration,
    ) -> Result<(Output, u64, u64)> {
        self.await_promoted(ends)
            .with_context(|| format!("{}\n{}", server.stderr(), client.stderr()))?;
        until("the calls are made", limit, || {
            client.stdout().contains("result ") || client.has_ended()
        })?;
        let rows = self.ss()?;
        std::fs::write(seen, b"")?;
        let out = client.wait(limit)?;
        ensure!(out.status.success(), "{}\n{}", out.stdout, out.stderr);
        let lane = rows.iter().map(|r| r.lane_tx_bytes).sum();
        let tcp = rows.iter().map(|r| r.tcp_tx_bytes).sum();
        Ok((out, lane, tcp))
    }

    /// Waits until directions have switched up so many times altogether. For bulk transfers, which
    /// fill their rings and then go down for a while by themselves.
    pub fn await_ups(&self, ups: u64) -> Result<()> {
        until("directions switch up", PATIENCE, || {
            self.stats().is_ok_and(|s| s.ups >= ups)
        })
        .with_context(|| self.picture())
    }

    /// Waits until this daemon, which may be a new one, sees so many ends that have used a lane.
    pub fn await_lanes(&self, ends: usize) -> Result<()> {
        until("the view is complete", PATIENCE, || {
            self.ss()
                .is_ok_and(|rows| rows.iter().filter(|r| r.lane_tx_bytes > 0).count() >= ends)
        })
        .with_context(|| self.picture())
    }

    /// At least so many ends reached a lane, carried so many bytes on lanes altogether (sent and
    /// received counted once), and none was reset by the shim.
    pub fn assert_promoted(&self, ends: u64, lane_bytes: u64) -> Result<Stats> {
        let s = self.stats()?;
        if s.promoted < ends || s.lane_tx_bytes.max(s.lane_rx_bytes) < lane_bytes || s.resets != 0 {
            bail!(
                "expected {ends} promoted ends (saw {}), {lane_bytes} bytes on lanes (saw {} sent, {} received), \
                 no reset (saw {})\n{}",
                s.promoted,
                s.lane_tx_bytes,
                s.lane_rx_bytes,
                s.resets,
                self.picture()
            );
        }
        Ok(s)
    }

    /// For the messages of failed tests.
    pub fn picture(&self) -> String {
        let mut out = String::new();
        for r in self.ss().unwrap_or_default() {
            let more = format!(
                "lane {}/{} tcp {}/{}",
                r.lane_tx_bytes, r.lane_rx_bytes, r.tcp_tx_bytes, r.tcp_rx_bytes
            );
            out += &format!(
                "{} {} {} -> {} {} up {} {}[{}] {more}\n",
                r.state, r.role, r.local, r.peer, r.mode, r.up, r.comm, r.pid
            );
        }
        out += &format!("{:?}\n", self.stats());
        for l in self.log().unwrap_or_default().iter().rev().take(40).rev() {
            out += &format!("log: {l}\n");
        }
        out + &self.said()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() || self.hostile.load(Relaxed) {
            return;
        }
        let resets = self.resets + self.resets_now();
        assert!(
            resets == 0,
            "{resets} connections were reset, and no peer here is hostile\n{}",
            self.picture()
        );
    }
}
