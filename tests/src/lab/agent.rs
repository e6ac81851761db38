//! The agent inside a lab machine: starts programs for the host, many at a time, and reports what
//! they print and how they end.
//!
//! It must outlive whatever its programs do, and never leave one behind: every program has a
//! process group, which is killed when its first process has ended or its time is over.

use super::talk::{Bytes, End, Order, Report, Stream, PORT};
use anyhow::{Context, Result};
use nix::sys::signal::{killpg, Signal};
use nix::sys::wait::{waitid, Id, WaitPidFlag};
use nix::unistd::Pid;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{channel, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long output may still come from processes that left the group before the end is reported.
const GRACE: Duration = Duration::from_secs(1);

/// Most output that one report carries.
const PIECE: usize = 16 << 10;

/// Serves the host until it hangs up.
pub fn serve() -> Result<()> {
    let path = port()?;
    let open = || File::options().read(true).write(true).open(&path);
    let port = open().with_context(|| path.display().to_string())?;
    let agent = Arc::new(Agent {
        port: Mutex::new(port.try_clone()?),
        groups: Mutex::default(),
    });
    agent.report(&Report::Hello);
    for line in BufReader::new(port).lines() {
        match serde_json::from_str(&line?)? {
            Order::Signal { id, signal } => agent.signal(id, signal),
            Order::Run {
                id,
                argv,
                env,
                stdin,
                limit_ms,
            } => {
                let agent = Arc::clone(&agent);
                let limit = Duration::from_millis(limit_ms);
                std::thread::spawn(move || {
                    let end = agent
                        .run(id, &argv, env, stdin, limit)
                        .unwrap_or_else(|e| End::Failed(format!("{e:#}")));
                    agent.report(&Report::Exit { id, end });
                });
            }
            Order::Ask { id, socket, line } => {
                let agent = Arc::clone(&agent);
                std::thread::spawn(move || agent.answer(id, ask(&socket, &line)));
            }
            Order::Read { id, path } => {
                let agent = Arc::clone(&agent);
                std::thread::spawn(move || {
                    let read = std::fs::read(&path);
                    agent.answer(id, read.with_context(|| path.display().to_string()));
                });
            }
            Order::Touch { id, path } => {
                let made = std::fs::write(&path, "").map(|()| Vec::new());
                agent.answer(id, made.with_context(|| path.display().to_string()));
            }
        }
    }
    Ok(())
}

/// Sends one line to a Unix socket; the line that comes back.
fn ask(socket: &Path, line: &str) -> Result<Vec<u8>> {
    let mut s = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
    s.set_read_timeout(Some(Duration::from_secs(30)))?;
    s.write_all(format!("{line}\n").as_bytes())?;
    let mut answer = Vec::new();
    BufReader::new(s).read_until(b'\n', &mut answer)?;
    Ok(answer)
}

/// The device of the port; without udev it has only its number for a name.
fn port() -> Result<PathBuf> {
    for e in std::fs::read_dir("/sys/class/virtio-ports")? {
        let e = e?;
        if std::fs::read_to_string(e.path().join("name"))?.trim() == PORT {
            return Ok(Path::new("/dev").join(e.file_name()));
        }
    }
    anyhow::bail!("no virtio port is called {PORT}")
}

struct Agent {
    port: Mutex<File>,
    /// Process groups whose leader has not been reaped, so that their numbers are still theirs.
    groups: Mutex<HashMap<u64, Pid>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Agent {
    fn report(&self, r: &Report) {
        let Ok(mut line) = serde_json::to_vec(r) else {
            return;
        };
        line.push(b'\n');
        // A host that is gone is noticed by the reader.
        let _ = lock(&self.port).write_all(&line);
    }

    /// The result of what needed no program.
    fn answer(&self, id: u64, result: Result<Vec<u8>>) {
        let end = match result {
            Ok(data) => {
                for piece in data.chunks(PIECE) {
                    let data = Bytes(piece.to_vec());
                    let stream = Stream::Out;
                    self.report(&Report::Output { id, stream, data });
                }
                End::Code(0)
            }
            Err(e) => End::Failed(format!("{e:#}")),
        };
        self.report(&Report::Exit { id, end });
    }

    fn signal(&self, id: u64, signal: i32) {
        // Not reaped while it is in the table, and the table is locked: the number is still its own.
        if let (Some(&group), Ok(s)) = (lock(&self.groups).get(&id), Signal::try_from(signal)) {
            let _ = killpg(group, s);
        }
    }

    fn run(
        self: &Arc<Self>,
        id: u64,
        argv: &[String],
        env: Vec<(String, String)>,
        stdin: Bytes,
        limit: Duration,
    ) -> Result<End> {
        let (program, args) = argv.split_first().context("no program")?;
        let mut child = Command::new(program)
            .args(args)
            .env_clear()
            .env(
                "PATH",
                "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            )
            .env("HOME", "/root")
            .env("LC_ALL", "C.UTF-8")
            .envs(env)
            .current_dir("/run")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| program.clone())?;
        let group = Pid::from_raw(child.id() as i32);
        lock(&self.groups).insert(id, group);
        if let Some(mut pipe) = child.stdin.take() {
            // A program need not read what it is given.
            std::thread::spawn(move || pipe.write_all(&stdin.0));
        }
        let (done, ends) = channel();
        let streams = [
            child
                .stdout
                .take()
                .map(|p| self.copy(id, Stream::Out, p, &done)),
            child
                .stderr
                .take()
                .map(|p| self.copy(id, Stream::Err, p, &done)),
        ];
        let (exited, exit) = channel();
        std::thread::spawn(move || {
            // Leaves the zombie, which keeps the group's number from being given to another.
            let _ = waitid(Id::Pid(group), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
            let _ = exited.send(());
        });
        let timed_out = exit.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
        {
            let mut groups = lock(&self.groups);
            let _ = killpg(group, Signal::SIGKILL);
            if timed_out {
                let _ = exit.recv();
            }
            groups.remove(&id);
        }
        let status = child.wait()?;
        for _ in streams.iter().flatten() {
            let _ = ends.recv_timeout(GRACE);
        }
        Ok(match (timed_out, status.code(), status.signal()) {
            (true, ..) => End::TimedOut,
            (_, Some(code), _) => End::Code(code),
            (_, None, signal) => End::Signal(signal.unwrap_or(0)),
        })
    }

    fn copy(
        self: &Arc<Self>,
        id: u64,
        stream: Stream,
        mut pipe: impl Read + Send + 'static,
        done: &Sender<()>,
    ) {
        let (agent, done) = (Arc::clone(self), done.clone());
        std::thread::spawn(move || {
            let mut buffer = vec![0; PIECE];
            while let Ok(n @ 1..) = pipe.read(&mut buffer) {
                let data = Bytes(buffer[..n].to_vec());
                agent.report(&Report::Output { id, stream, data });
            }
            let _ = done.send(());
        });
    }
}
