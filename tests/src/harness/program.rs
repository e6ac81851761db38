//! One program: how it runs, what it said, and that it ends with its handle.

use super::cgroup::TestCgroup;
use super::paths::{self, Build};
use super::until;
use anyhow::{anyhow, bail, Context, Result};
use nix::sys::signal::{kill, killpg, Signal};
use nix::unistd::Pid;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// How and where a program runs.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// Runtime directory of the daemon whose shim is preloaded; `None`: no shim.
    shim: Option<PathBuf>,
    build: Build,
    /// Value of `UNDERPASS`.
    mode: Option<&'static str>,
    /// Name of a network namespace.
    netns: Option<String>,
}

impl Place {
    /// Without the shim.
    pub fn bare() -> Self {
        Self::default()
    }

    /// Under the shim; the daemon, if any, has this runtime directory.
    pub fn shim(dir: &Path) -> Self {
        Place {
            shim: Some(dir.to_path_buf()),
            ..Self::default()
        }
    }

    /// Every connection is promoted as early as possible.
    pub fn eager(mut self) -> Self {
        self.mode = Some("eager");
        self
    }

    /// The shim is loaded and told to stay out of the way.
    pub fn off(mut self) -> Self {
        self.mode = Some("off");
        self
    }

    /// The shim is of this build.
    pub fn of(mut self, build: Build) -> Self {
        self.build = build;
        self
    }

    pub fn netns(mut self, name: &str) -> Self {
        self.netns = Some(name.into());
        self
    }

    pub fn has_shim(&self) -> bool {
        self.shim.is_some()
    }
}

/// A program to be started.
pub struct Program {
    command: Command,
    name: String,
    stdin: Option<Vec<u8>>,
}

impl Program {
    pub fn new(program: impl AsRef<OsStr>, place: &Place) -> Self {
        let name = Path::new(program.as_ref())
            .file_name()
            .unwrap_or(program.as_ref())
            .to_string_lossy()
            .into_owned();
        let mut command = Command::new(program);
        command
            .process_group(0)
            .env_remove("LD_PRELOAD")
            .env_remove("UNDERPASS")
            .env_remove("UNDERPASS_DIR");
        if let Some(dir) = &place.shim {
            command
                .env("LD_PRELOAD", place.build.shim())
                .env("UNDERPASS_DIR", dir);
        }
        if let Some(mode) = place.mode {
            command.env("UNDERPASS", mode);
        }
        let netns = place
            .netns
            .as_ref()
            .map(|n| PathBuf::from("/run/netns").join(n));
        let parent = nix::unistd::getpid();
        let enter = move || {
            if let Some(path) = &netns {
                let ns = File::open(path)?;
                nix::sched::setns(&ns, nix::sched::CloneFlags::CLONE_NEWNET)?;
            }
            // Should this process be killed, its programs do not live on.
            nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
            if nix::unistd::getppid() != parent {
                return Err(std::io::Error::from(nix::errno::Errno::ESRCH));
            }
            Ok(())
        };
        // SAFETY: only system calls and one allocation-free path are used between fork and exec
        // (`File::open` builds a C string; the allocator is fork-safe under glibc).
        unsafe { command.pre_exec(enter) };
        Program {
            command,
            name,
            stdin: None,
        }
    }

    /// `/usr/bin/python3.11` with a script of `tests/programs`.
    pub fn python(script: &str, place: &Place) -> Self {
        Self::new(paths::PYTHON, place)
            .arg("-u")
            .arg(paths::script(script))
    }

    /// The same with a Python that has the packages of `tests/requirements.txt`.
    pub fn packaged_python(script: &str, place: &Place) -> Self {
        Self::new(paths::packaged("python"), place)
            .arg("-u")
            .arg(paths::script(script))
    }

    /// As this user, without other groups.
    pub fn user(mut self, uid: u32) -> Self {
        self.command.uid(uid).gid(uid);
        self
    }

    /// In this cgroup, from before its first instruction on.
    pub fn within(mut self, cgroup: &TestCgroup) -> Result<Self> {
        let procs = cgroup.procs()?;
        let enter = move || (&procs).write_all(b"0");
        // SAFETY: one system call between fork and exec.
        unsafe { self.command.pre_exec(enter) };
        Ok(self)
    }

    pub fn arg(mut self, a: impl AsRef<OsStr>) -> Self {
        self.command.arg(a);
        self
    }

    pub fn args<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(mut self, a: I) -> Self {
        self.command.args(a);
        self
    }

    /// Splits at spaces.
    pub fn words(self, line: &str) -> Self {
        self.args(line.split_whitespace())
    }

    pub fn env(mut self, k: &str, v: impl Into<OsString>) -> Self {
        self.command.env(k, v.into());
        self
    }

    pub fn dir(mut self, d: &Path) -> Self {
        self.command.current_dir(d);
        self
    }

    /// What the program reads on its standard input (small).
    pub fn stdin(mut self, data: &[u8]) -> Self {
        self.stdin = Some(data.to_vec());
        self
    }

    pub fn spawn(mut self) -> Result<Running> {
        let out = tempfile::tempfile()?;
        let err = tempfile::tempfile()?;
        let stdin = match &self.stdin {
            Some(data) => {
                let mut f = tempfile::tempfile()?;
                f.write_all(data)?;
                f.rewind()?;
                Stdio::from(f)
            }
            None => Stdio::null(),
        };
        self.command
            .stdin(stdin)
            .stdout(out.try_clone()?)
            .stderr(err.try_clone()?);
        let child = self
            .command
            .spawn()
            .with_context(|| format!("cannot start {}", self.name))?;
        Ok(Running {
            child,
            name: self.name,
            out,
            err,
            status: None,
        })
    }

    /// Runs it to its end, which must come within `limit`.
    pub fn run(self, limit: Duration) -> Result<Output> {
        self.spawn()?.wait(limit)
    }

    /// Runs it to its end, which must be success, and returns what it printed.
    pub fn check(self, limit: Duration) -> Result<String> {
        self.run(limit)?.ok()
    }
}

/// What a program left.
#[derive(Debug)]
pub struct Output {
    pub name: String,
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    pub fn ok(self) -> Result<String> {
        if !self.status.success() {
            bail!(
                "{} ended with {}\n{}\n{}",
                self.name,
                self.status,
                tail(&self.stdout),
                tail(&self.stderr)
            );
        }
        Ok(self.stdout)
    }
}

fn tail(s: &str) -> &str {
    let mut from = s.len().saturating_sub(4000);
    while !s.is_char_boundary(from) {
        from += 1;
    }
    &s[from..]
}

/// A started program; dropping it kills its whole process group.
pub struct Running {
    child: Child,
    name: String,
    out: File,
    err: File,
    status: Option<ExitStatus>,
}

impl Running {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn group(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// Sends a signal to the program itself.
    pub fn signal(&self, s: Signal) -> Result<()> {
        Ok(kill(self.group(), s)?)
    }

    pub fn has_ended(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status.is_some()
    }

    pub fn stdout(&self) -> String {
        read(&self.out)
    }

    pub fn stderr(&self) -> String {
        read(&self.err)
    }

    /// Waits until a line that starts with `mark` was printed, and returns the rest of it.
    pub fn line(&mut self, mark: &str, limit: Duration) -> Result<String> {
        let mut found = None;
        let waited = until(&format!("{} prints {mark:?}", self.name), limit, || {
            let ended = self.has_ended();
            let text = self.stdout();
            let whole = &text[..text.rfind('\n').map_or(0, |n| n + 1)];
            found = whole
                .lines()
                .find_map(|l| l.strip_prefix(mark))
                .map(|s| s.trim().to_string());
            found.is_some() || ended
        });
        match found {
            Some(s) => Ok(s),
            None => Err(anyhow!(
                "{}: no {mark:?}: {waited:?}\n{}\n{}",
                self.name,
                tail(&self.stdout()),
                tail(&self.stderr())
            )),
        }
    }

    /// Waits for the end, which must come within `limit`.
    pub fn wait(mut self, limit: Duration) -> Result<Output> {
        let ended = until(&format!("{} ends", self.name), limit, || self.has_ended());
        let (stdout, stderr) = (self.stdout(), self.stderr());
        match self.status {
            Some(status) => Ok(Output {
                name: self.name.clone(),
                status,
                stdout,
                stderr,
            }),
            None => Err(anyhow!("{:?}\n{}\n{}", ended, tail(&stdout), tail(&stderr))),
        }
    }

    /// Kills the process group and waits for the program.
    pub fn kill(&mut self) {
        // Even when the program itself has ended: its children may not have.
        let _ = killpg(self.group(), Signal::SIGKILL);
        if !self.has_ended() {
            self.status = self.child.wait().ok();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The whole of a file that somebody else appends to.
fn read(f: &File) -> String {
    // Opened anew: the position of the descriptor is shared with the program.
    let mut s = Vec::new();
    if let Ok(mut f) = File::open(format!("/proc/self/fd/{}", f.as_raw_fd())) {
        let _ = f.read_to_end(&mut s);
    }
    String::from_utf8_lossy(&s).into_owned()
}
