//! The host's end of an agent: starts programs in a machine and collects what becomes of them.

use super::talk::{Bytes, End, Order, Report, Stream};
use crate::harness::until;
use anyhow::{anyhow, bail, ensure, Context, Result};
use nix::sys::signal::Signal;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest that a program may run that was given no other limit.
const LIMIT: Duration = Duration::from_secs(120);
/// How much later than a program's own limit the agent may report its end.
const SLACK: Duration = Duration::from_secs(60);

/// A machine's agent. Clones are the same one.
#[derive(Clone)]
pub struct Guest(Arc<Inner>);

struct Inner {
    name: String,
    /// Held while a line is written: lines do not mix.
    port: Mutex<UnixStream>,
    state: Mutex<State>,
    /// `state` has changed.
    news: Condvar,
}

#[derive(Default)]
struct State {
    hello: bool,
    /// Why no more reports come.
    gone: Option<String>,
    runs: HashMap<u64, Run>,
    last: u64,
    /// What ran and how it ended, for the messages of failed tests: script, entry, and how many
    /// times in a row (of what is asked again and again, the last time is enough).
    story: Vec<(String, String, u32)>,
}

#[derive(Default)]
struct Run {
    script: String,
    /// Its success is no part of the story.
    quiet: bool,
    out: Vec<u8>,
    err: Vec<u8>,
    end: Option<End>,
}

impl Guest {
    pub(super) fn new(port: UnixStream, name: &str) -> Result<Self> {
        let reader = BufReader::new(port.try_clone()?);
        let guest = Guest(Arc::new(Inner {
            name: name.into(),
            port: Mutex::new(port),
            state: Mutex::default(),
            news: Condvar::new(),
        }));
        // Ends when qemu does, which closes the port.
        let g = guest.clone();
        std::thread::Builder::new()
            .name(format!("agent of {name}"))
            .spawn(move || g.listen(reader))?;
        Ok(guest)
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// A script for bash, which ends at its first command that fails.
    pub fn sh(&self, script: impl Into<String>) -> Job {
        Job {
            guest: self.clone(),
            script: script.into(),
            env: Vec::new(),
            stdin: Vec::new(),
            limit: LIMIT,
        }
    }

    /// One line to a Unix socket in the machine; the line that comes back. No program is started,
    /// and of what is asked all the time only failures are remembered.
    pub fn ask(&self, socket: &str, line: &str) -> Result<Vec<u8>> {
        let what = format!("(ask {socket} {line})");
        let (socket, line) = (socket.into(), line.into());
        self.without_program(what, |id| Order::Ask { id, socket, line })
    }

    /// What is in a file in the machine, likewise.
    pub fn read(&self, path: &str) -> Result<Vec<u8>> {
        let (what, path) = (format!("(read {path})"), path.into());
        self.without_program(what, |id| Order::Read { id, path })
    }

    /// Makes an empty file in the machine, likewise.
    pub fn touch(&self, path: &str) -> Result<()> {
        let (what, path) = (format!("(touch {path})"), path.into());
        self.without_program(what, |id| Order::Touch { id, path })?;
        Ok(())
    }

    fn without_program(&self, what: String, order: impl FnOnce(u64) -> Order) -> Result<Vec<u8>> {
        let running = Running {
            id: self.register(what, true),
            guest: self.clone(),
            limit: LIMIT,
        };
        let id = running.id;
        self.send(&order(id))?;
        let ended = |r: &Run| r.end.is_some();
        let s = self.wait(LIMIT, |s| s.runs.get(&id).is_none_or(ended));
        let run = s.runs.get(&id).context("unknown")?;
        match &run.end {
            Some(End::Code(0)) => Ok(run.out.clone()),
            end => bail!("in {}: {}", self.0.name, entry(run, &format!("{end:?}"))),
        }
    }

    fn register(&self, script: String, quiet: bool) -> u64 {
        let mut s = self.state();
        s.last += 1;
        let id = s.last;
        let run = Run {
            script,
            quiet,
            ..Run::default()
        };
        s.runs.insert(id, run);
        id
    }

    pub(super) fn wait_hello(&self, limit: Duration) -> Result<()> {
        let s = self.wait(limit, |s| s.hello);
        ensure!(
            s.hello,
            "{} does not boot: {}",
            self.0.name,
            s.gone.as_deref().unwrap_or("no sign of life")
        );
        Ok(())
    }

    /// What ran since the last call, and how it ended.
    pub(super) fn story(&self) -> String {
        let mut s = self.state();
        let mut story = String::new();
        for (_, text, times) in std::mem::take(&mut s.story) {
            story += &text;
            if times > 1 {
                story += &format!("  ({times} times, this is the last)\n");
            }
        }
        for r in s.runs.values().filter(|r| r.end.is_none()) {
            story += &entry(r, "still runs");
        }
        story
    }

    fn listen(&self, reader: BufReader<UnixStream>) {
        let mut why = "its machine is off".to_string();
        for line in reader.lines() {
            let report = line
                .map_err(|e| e.to_string())
                .and_then(|l| serde_json::from_str(&l).map_err(|e| format!("{e}: {l:?}")));
            match report {
                Ok(r) => self.take_report(r),
                Err(e) => {
                    why = e;
                    break;
                }
            }
        }
        self.state().gone = Some(why);
        self.0.news.notify_all();
    }

    fn take_report(&self, r: Report) {
        let mut s = self.state();
        match r {
            Report::Hello => s.hello = true,
            Report::Output { id, stream, data } => {
                if let Some(run) = s.runs.get_mut(&id) {
                    match stream {
                        Stream::Out => run.out.extend(data.0),
                        Stream::Err => run.err.extend(data.0),
                    }
                }
            }
            Report::Exit { id, end } => {
                if let Some(run) = s.runs.get_mut(&id) {
                    let told = entry(run, &format!("{end:?}"));
                    let untold = run.quiet && end == End::Code(0);
                    run.end = Some(end);
                    let script = run.script.clone();
                    match s.story.last_mut() {
                        _ if untold => {}
                        Some(last) if last.0 == script => (last.1, last.2) = (told, last.2 + 1),
                        _ => s.story.push((script, told, 1)),
                    }
                }
            }
        }
        drop(s);
        self.0.news.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done`, the agent is gone, or the time is over; the caller looks which.
    fn wait(&self, limit: Duration, done: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let end = Instant::now() + limit;
        let mut s = self.state();
        while !done(&s) && s.gone.is_none() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.0.news.wait_timeout(s, left);
            s = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        s
    }

    fn send(&self, order: &Order) -> Result<()> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        let mut port = self.0.port.lock().unwrap_or_else(PoisonError::into_inner);
        port.write_all(&line)
            .with_context(|| format!("no agent in {}", self.0.name))
    }
}

fn entry(r: &Run, end: &str) -> String {
    let mut text = format!("$ {}\n", r.script.trim());
    for part in [&r.out, &r.err] {
        text += &tail(&String::from_utf8_lossy(part));
    }
    text + &format!("  => {end}\n")
}

fn tail(s: &str) -> String {
    let mut from = s.len().saturating_sub(3000);
    while !s.is_char_boundary(from) {
        from += 1;
    }
    s[from..].to_string()
}

/// A script that is to run in a machine.
pub struct Job {
    guest: Guest,
    script: String,
    env: Vec<(String, String)>,
    stdin: Vec<u8>,
    limit: Duration,
}

impl Job {
    pub fn env(mut self, key: &str, value: impl Into<String>) -> Self {
        self.env.push((key.into(), value.into()));
        self
    }

    pub fn envs(mut self, all: impl IntoIterator<Item = (String, String)>) -> Self {
        self.env.extend(all);
        self
    }

    /// All that it reads on its standard input.
    pub fn stdin(mut self, data: &[u8]) -> Self {
        self.stdin = data.to_vec();
        self
    }

    /// It is killed if it runs longer.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    pub fn spawn(self) -> Result<Running> {
        let id = self.guest.register(self.script.clone(), false);
        let bash = ["/bin/bash", "-eu", "-o", "pipefail", "-c", &self.script];
        let running = Running {
            guest: self.guest,
            id,
            limit: self.limit,
        };
        running.guest.send(&Order::Run {
            id,
            argv: bash.map(str::to_string).to_vec(),
            env: self.env,
            stdin: Bytes(self.stdin),
            limit_ms: self.limit.as_millis() as u64,
        })?;
        Ok(running)
    }

    /// Runs it to its end.
    pub fn run(self) -> Result<Output> {
        self.spawn()?.wait()
    }

    /// Runs it to its end, which must be success, and returns what it printed.
    pub fn check(self) -> Result<String> {
        self.run()?.ok()
    }
}

/// A script that was started; dropping it kills all its processes.
pub struct Running {
    guest: Guest,
    id: u64,
    limit: Duration,
}

impl Running {
    fn look<T>(&self, f: impl Fn(&Run) -> T) -> Option<T> {
        self.guest.state().runs.get(&self.id).map(f)
    }

    /// What it printed so far.
    pub fn stdout(&self) -> String {
        self.look(|r| lossy(&r.out)).unwrap_or_default()
    }

    pub fn stderr(&self) -> String {
        self.look(|r| lossy(&r.err)).unwrap_or_default()
    }

    pub fn has_ended(&self) -> bool {
        self.look(|r| r.end.is_some()).unwrap_or(true)
    }

    /// To all its processes.
    pub fn signal(&self, s: Signal) -> Result<()> {
        self.guest.send(&Order::Signal {
            id: self.id,
            signal: s as i32,
        })
    }

    /// Waits until it has printed a line that starts with `mark`, and returns the rest of that line.
    pub fn line(&self, mark: &str) -> Result<String> {
        let find = |r: &Run| {
            let text = lossy(&r.out);
            let whole = &text[..text.rfind('\n').map_or(0, |n| n + 1)];
            let line = whole.lines().find_map(|l| l.strip_prefix(mark));
            line.map(|l| l.trim().to_string())
        };
        let s = self.guest.wait(self.limit, |s| {
            let run = s.runs.get(&self.id);
            run.is_none_or(|r| r.end.is_some() || find(r).is_some())
        });
        let run = s.runs.get(&self.id).context("unknown")?;
        find(run).ok_or_else(|| anyhow!("no line {mark:?}\n{}", entry(run, "then")))
    }

    /// Waits for its end.
    pub fn wait(self) -> Result<Output> {
        let limit = self.limit + SLACK;
        self.wait_for(limit)
    }

    /// Waits for its end no longer than this; it is killed when that is over.
    pub fn wait_for(self, limit: Duration) -> Result<Output> {
        let name = &self.guest.0.name;
        let s = self.guest.wait(limit, |s| {
            s.runs.get(&self.id).is_none_or(|r| r.end.is_some())
        });
        let run = s.runs.get(&self.id).context("unknown")?;
        let Some(end) = run.end.clone() else {
            let why = s.gone.clone();
            let why = why.unwrap_or_else(|| format!("no end after {limit:?}"));
            bail!("in {name}: {why}\n{}", entry(run, "no end"));
        };
        Ok(Output {
            name: name.clone(),
            script: run.script.clone(),
            end,
            stdout: lossy(&run.out),
            stderr: lossy(&run.err),
        })
    }

    /// Waits for something that it brings about; fails as soon as it has ended.
    pub fn until(&self, what: &str, limit: Duration, mut f: impl FnMut() -> bool) -> Result<()> {
        let mut yes = false;
        until(what, limit, || {
            yes = f();
            yes || self.has_ended()
        })?;
        ensure!(
            yes,
            "ended before: {what}\n{}{}",
            self.stdout(),
            self.stderr()
        );
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.has_ended() && self.signal(Signal::SIGKILL).is_ok() {
            // Its ports and devices are free when this returns. Of a machine that is off nothing is left.
            let id = self.id;
            let ended = |s: &State| s.runs.get(&id).is_none_or(|r| r.end.is_some());
            drop(self.guest.wait(SLACK, ended));
        }
        self.guest.state().runs.remove(&self.id);
    }
}

fn lossy(b: &[u8]) -> String {
    String::from_utf8_lossy(b).into_owned()
}

/// What a script left.
#[derive(Debug)]
pub struct Output {
    pub name: String,
    pub script: String,
    pub end: End,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    pub fn ok(self) -> Result<String> {
        if self.end != End::Code(0) {
            bail!(
                "in {}: $ {}\n{}{}  => {:?}",
                self.name,
                self.script.trim(),
                tail(&self.stdout),
                tail(&self.stderr),
                self.end
            );
        }
        Ok(self.stdout)
    }
}
