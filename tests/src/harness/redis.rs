//! Redis, unmodified: a server that keeps nothing on disk, and redis-benchmark.

use super::{free_port, until, Place, Program, Running, PATIENCE};
use anyhow::{bail, Context, Result};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use tempfile::TempDir;

pub struct Redis {
    pub running: Running,
    pub host: String,
    pub port: u16,
    dir: TempDir,
}

/// What redis-benchmark is asked to do.
#[derive(Clone, Copy)]
pub struct Load {
    /// `get` or `set`.
    pub test: &'static str,
    pub clients: u32,
    pub pipeline: u32,
    pub requests: u64,
    /// A new connection for every request.
    pub reconnect: bool,
}

impl Redis {
    /// On the loopback address of this namespace.
    pub fn start(place: &Place) -> Result<Self> {
        let r = Self::at(place, "127.0.0.1", free_port()?)?;
        until("redis answers", PATIENCE, || r.ping().is_ok())
            .with_context(|| r.running.stdout())?;
        Ok(r)
    }

    /// Anywhere; returns once the server says that it is ready.
    pub fn at(place: &Place, host: &str, port: u16) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let mut running = Program::new("redis-server", place)
            .words(&format!(
                "--port {port} --bind {host} --appendonly no --daemonize no --protected-mode no"
            ))
            .args(["--save", "", "--dir"])
            .arg(dir.path())
            .arg("--unixsocket")
            .arg(dir.path().join("redis.sock"))
            .spawn()?;
        until("redis is ready", PATIENCE, || {
            running.has_ended() || running.stdout().contains("Ready to accept connections")
        })
        .with_context(|| running.stdout())?;
        if running.has_ended() {
            bail!("redis-server ended: {}", running.stdout());
        }
        Ok(Redis {
            running,
            host: host.into(),
            port,
            dir,
        })
    }

    /// Over TCP from this process, which is not under the shim.
    fn ping(&self) -> Result<()> {
        let mut s = TcpStream::connect((self.host.as_str(), self.port))?;
        s.set_read_timeout(Some(Duration::from_secs(5)))?;
        s.write_all(b"PING\r\n")?;
        let mut b = [0; 7];
        s.read_exact(&mut b)?;
        if &b != b"+PONG\r\n" {
            bail!("redis said {b:?}");
        }
        Ok(())
    }

    /// Requests per second over TCP, to the address the server has.
    pub fn benchmark(&self, place: &Place, load: Load) -> Result<f64> {
        benchmark(
            place,
            &[
                "-h".into(),
                self.host.clone(),
                "-p".into(),
                self.port.to_string(),
            ],
            load,
        )
    }

    /// Requests per second over the server's Unix socket.
    pub fn benchmark_unix(&self, place: &Place, load: Load) -> Result<f64> {
        let path = self
            .dir
            .path()
            .join("redis.sock")
            .to_string_lossy()
            .into_owned();
        benchmark(place, &["-s".into(), path], load)
    }

    /// One command through redis-cli, as lines.
    pub fn cli(&self, place: &Place, args: &[&str]) -> Result<String> {
        Program::new("redis-cli", place)
            .words(&format!("-h {} -p {}", self.host, self.port))
            .args(args)
            .check(Duration::from_secs(60))
    }
}

fn benchmark(place: &Place, to: &[String], load: Load) -> Result<f64> {
    let line = format!(
        "--csv -t {} -c {} -P {} -n {} -r 1000 -k {}",
        load.test,
        load.clients,
        load.pipeline,
        load.requests,
        u8::from(!load.reconnect)
    );
    let text = Program::new("redis-benchmark", place)
        .args(to)
        .words(&line)
        .check(Duration::from_secs(180))?;
    text.lines()
        .rev()
        .find_map(|l| {
            let mut f = l.split(',').map(|f| f.trim_matches('"'));
            f.next()?
                .eq_ignore_ascii_case(load.test)
                .then(|| f.next()?.parse().ok())?
        })
        .with_context(|| format!("redis-benchmark printed {text:?}"))
}
