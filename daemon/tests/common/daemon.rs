//! The daemon under test, in a directory of its own.

use super::PATIENCE;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use underpass_admin::{client, Request, Response, Row, Stats};

/// What a shim gets of a plain daemon.
pub const CREDITS: u32 = 3;

pub struct Daemon {
    pub dir: PathBuf,
    child: Child,
    _tmp: Option<tempfile::TempDir>,
}

impl Daemon {
    pub fn start(args: &[&str]) -> Daemon {
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().join("run");
        let mut d = Daemon::start_in(&dir, args);
        d._tmp = Some(tmp);
        d
    }

    /// Without BPF, whatever this machine can do, and so that each credit comes back alone.
    pub fn plain() -> Daemon {
        let tmp = tempfile::tempdir().unwrap();
        let config = tmp.path().join("config.toml");
        std::fs::write(&config, format!("credits = {CREDITS}\n")).unwrap();
        let args = ["--no-bpf", "--config", config.to_str().unwrap()];
        let mut d = Daemon::start_in(&tmp.path().join("run"), &args);
        d._tmp = Some(tmp);
        d
    }

    pub fn start_in(dir: &Path, args: &[&str]) -> Daemon {
        Daemon::of(dir, Daemon::spawn(dir, args))
    }

    /// This one, as soon as it answers.
    pub fn of(dir: &Path, child: Child) -> Daemon {
        let mut d = Daemon {
            dir: dir.to_owned(),
            child,
            _tmp: None,
        };
        let end = Instant::now() + PATIENCE;
        while !matches!(d.try_ask(&Request::Ping), Some(Response::Pong { pid, .. }) if pid == d.pid())
        {
            let left = d.child.try_wait().unwrap();
            assert!(left.is_none(), "the daemon has left: {left:?}");
            if Instant::now() >= end {
                let state = |f| std::fs::read_to_string(format!("/proc/{}/{f}", d.pid()));
                panic!(
                    "the daemon does not answer: {:?} {:?}",
                    state("wchan"),
                    state("stack")
                );
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        d
    }

    pub fn spawn(dir: &Path, args: &[&str]) -> Child {
        Daemon::command(dir, args).spawn().unwrap()
    }

    pub fn command(dir: &Path, args: &[&str]) -> Command {
        let mut c = Command::new(env!("CARGO_BIN_EXE_underpassd"));
        c.arg("--dir").arg(dir).args(args);
        c.env("UNDERPASSD_TEST_PANICS", "1");
        c
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn try_ask(&self, r: &Request) -> Option<Response> {
        ask_at(&self.dir, r)
    }

    pub fn ask(&self, r: &Request) -> Response {
        self.try_ask(r).expect("an answer")
    }

    pub fn rows(&self) -> Vec<Row> {
        match self.ask(&Request::Ss) {
            Response::Ss { rows } => rows,
            r => panic!("{r:?}"),
        }
    }

    pub fn stats(&self) -> Stats {
        match self.ask(&Request::Stats) {
            Response::Stats { stats } => *stats,
            r => panic!("{r:?}"),
        }
    }

    pub fn log(&self) -> Vec<String> {
        match self.ask(&Request::Log) {
            Response::Log { lines } => lines,
            r => panic!("{r:?}"),
        }
    }

    /// Waits until the counters are as they should be.
    pub fn until(&self, what: &str, ok: impl Fn(&Stats) -> bool) -> Stats {
        let end = Instant::now() + PATIENCE;
        loop {
            let s = self.stats();
            if ok(&s) {
                return s;
            }
            assert!(Instant::now() < end, "waited in vain for {what}: {s:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn signal(&self, sig: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, sig).unwrap();
    }

    /// Stops it, for certain: a signal takes its time.
    pub fn stop(&self) {
        self.signal(rustix::process::Signal::STOP);
        let stat = format!("/proc/{}/stat", self.pid());
        let stopped = || std::fs::read_to_string(&stat).unwrap().contains(") T ");
        let end = Instant::now() + PATIENCE;
        while !stopped() {
            assert!(Instant::now() < end, "the daemon does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn resume(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    pub fn wait(&mut self) -> std::process::ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(s) = self.child.try_wait().unwrap() {
                return s;
            }
            assert!(Instant::now() < end, "the daemon does not leave");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn ask_at(dir: &Path, r: &Request) -> Option<Response> {
    match client::ask(dir, r) {
        Ok(r) => Some(r),
        Err(client::Error::Refused(message)) => Some(Response::Error { message }),
        Err(_) => None,
    }
}
