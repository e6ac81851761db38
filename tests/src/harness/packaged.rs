//! Programs as they are packaged, served, loaded and stopped by `programs/packaged.sh`.

use super::program::Output;
use super::web::noise;
use super::{free_port, paths, until, Daemon, Place, Program, Running, PATIENCE};
use anyhow::{bail, ensure, Context, Result};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use tempfile::TempDir;
use underpass_admin::Row;

/// Longest that anything of it may take.
pub const LIMIT: Duration = Duration::from_secs(120);

/// So many go over lanes at least.
const BYTES: u64 = 10 << 20;

/// What is known of a program.
pub struct Known {
    pub name: &'static str,
    /// Connection ends that are on lanes under its load, at least.
    pub ends: usize,
    /// It stays on TCP, or part of it does.
    pub tcp: Option<OnTcp>,
}

/// Why a program is not on lanes.
pub struct OnTcp {
    /// What must be seen of it: a reason of its connections, or of a process that has no library.
    pub sign: &'static str,
    pub why: &'static str,
}

const fn lanes(name: &'static str, ends: usize) -> Known {
    Known {
        name,
        ends,
        tcp: None,
    }
}

const fn tcp(name: &'static str, sign: &'static str, why: &'static str) -> Known {
    Known {
        name,
        ends: 0,
        tcp: Some(OnTcp { sign, why }),
    }
}

const SSHD: &str = "its sandboxed child, which holds the connection while the user logs in, may not do what lanes need";

pub const PROGRAMS: &[Known] = &[
    lanes("nginx", 16),
    lanes("haproxy", 16),
    lanes("apache-event", 16),
    lanes("apache-prefork", 16),
    lanes("varnish", 16),
    lanes("gunicorn", 16),
    lanes("grpc", 2),
    lanes("node", 16),
    lanes("redis", 16),
    lanes("postgres", 18),
    lanes("mariadb", 18),
    lanes("memcached", 8),
    lanes("rabbitmq", 4),
    lanes("java", 8),
    lanes("openmpi", 12),
    lanes("gloo", 2),
    lanes("zeromq", 8),
    lanes("dask", 6),
    lanes("ray", 20),
    lanes("grpc-cpp", 2),
    lanes("squid-single", 16),
    tcp(
        "squid",
        "squid: secure",
        "its worker is executed with other effective than real users, so that the loader ignores LD_PRELOAD",
    ),
    tcp(
        "rsync",
        "shared",
        "its client forks: one process reads the connection, and another one writes it",
    ),
    tcp("ssh", "seccomp", SSHD),
    tcp("ssh-rsync", "seccomp", SSHD),
];

/// One program with a directory of its own.
pub struct Packaged<'a> {
    pub known: &'static Known,
    place: &'a Place,
    dir: TempDir,
    port: u16,
    /// For what some programs have behind them.
    back: u16,
}

impl<'a> Packaged<'a> {
    pub fn new(name: &str, place: &'a Place) -> Result<Self> {
        let known = PROGRAMS.iter().find(|k| k.name == name);
        let dir = tempfile::tempdir()?;
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755))?;
        let www = dir.path().join("www");
        fs::create_dir(&www)?;
        fs::write(www.join("small"), "x".repeat(612))?;
        fs::write(www.join("big"), noise(3 << 20))?;
        Ok(Packaged {
            known: known.with_context(|| format!("no program {name}"))?,
            place,
            dir,
            port: free_port()?,
            back: free_port()?,
        })
    }

    pub fn act(&self, action: &str) -> Program {
        Program::new(paths::script("packaged.sh"), self.place)
            .args([self.known.name, action])
            .arg(self.dir.path())
            .arg(self.port.to_string())
            .arg(self.back.to_string())
    }

    pub fn version(name: &str) -> Result<String> {
        let said = Program::new(paths::script("packaged.sh"), &Place::bare())
            .args([name, "version"])
            .check(LIMIT)?;
        Ok(said.trim().to_owned())
    }

    /// Starts it, and waits until it listens.
    pub fn serve(&self) -> Result<Running> {
        let mut server = self.act("serve").spawn()?;
        let waited = until("it listens", LIMIT, || {
            server.has_ended() || self.listens(&server)
        });
        let said = || {
            format!(
                "{}: {}{}",
                self.known.name,
                server.stdout(),
                server.stderr()
            )
        };
        waited.with_context(said)?;
        if server.has_ended() {
            bail!(
                "{}: {}{}",
                self.known.name,
                server.stdout(),
                server.stderr()
            );
        }
        Ok(server)
    }

    /// In the server's network namespace, where it is another one.
    fn listens(&self, server: &Running) -> bool {
        if self.dir.path().join("served").exists() {
            return true;
        }
        let wanted = format!(":{:04X}", self.port);
        ["tcp", "tcp6"].iter().any(|f| {
            let path = format!("/proc/{}/net/{f}", server.pid());
            super::listens_in(&fs::read_to_string(path).unwrap_or_default(), &wanted)
        })
    }

    /// Starts the traffic, and waits until it flows.
    pub fn load(&self) -> Result<Running> {
        let mut load = self.act("load").spawn()?;
        let begun = self.dir.path().join("begun");
        until("the load begins", LIMIT, || {
            begun.exists() || load.has_ended()
        })
        .with_context(|| format!("{}: {}{}", self.known.name, load.stdout(), load.stderr()))?;
        Ok(load)
    }

    /// Ends load and server; what the load got must have been right. How much it did per second, and
    /// of what.
    pub fn finish(&self, load: Running, server: Running) -> Result<(f64, String)> {
        fs::write(self.dir.path().join("stop"), "")?;
        let said = load.wait(LIMIT).and_then(Output::ok);
        self.act("stop").check(LIMIT)?;
        let more = || {
            format!(
                "{}: {}{}",
                self.known.name,
                server.stdout(),
                server.stderr()
            )
        };
        let said = said.with_context(more)?;
        ensure!(said.ends_with("ok\n"), "{}: {said}", self.known.name);
        let rate = said.lines().find_map(|l| l.strip_prefix("rate "));
        let (number, unit) = rate.and_then(|r| r.split_once(' ')).context("no rate")?;
        Ok((number.parse()?, unit.to_owned()))
    }

    /// Rows of both ends of connections to the program.
    pub fn rows(&self, d: &Daemon) -> Vec<Row> {
        let port = format!(":{}", self.port);
        let mut rows = d.ss().unwrap_or_default();
        rows.retain(|r| {
            r.state == "ACTIVE" && (r.local.ends_with(&port) || r.peer.ends_with(&port))
        });
        rows
    }

    /// Serves traffic until both ends of all its lasting connections have been on lanes at one time.
    pub fn runs_on_lanes(&self, d: &Daemon) -> Result<()> {
        let server = self.serve()?;
        let load = self.load()?;
        // (Of the connections that last for a moment, one may be young.)
        let on_lanes = || {
            let rows = self.rows(d);
            let smcd = rows.iter().filter(|r| r.mode == "SMCD").count();
            let carried = d.stats().is_ok_and(|s| s.lane_tx_bytes >= BYTES);
            carried && smcd >= self.known.ends && smcd + 4 >= rows.len()
        };
        let promoted = until("both ends of its connections are SMCD", PATIENCE, on_lanes)
            .with_context(|| format!("{}\n{}", self.known.name, d.picture()));
        let said = self.finish(load, server);
        promoted?;
        said?;
        d.assert_promoted(self.known.ends as u64, BYTES)?;
        Ok(())
    }
}
