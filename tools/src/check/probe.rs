//! Starts the probe, under the shim or without, and reads what it says.
//!
//! The probe is this program again (`__probe`). Where this is the tool for containers, into which nothing can be
//! preloaded, it is the program that the tool carries: it is put into memory and started by the dynamic linker of the
//! image, which is whatever the image's own programs use.

use crate::out::{clean, Failure};
use crate::{run, shimlib};
use rustix::fs::{memfd_create, MemfdFlags};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use underpass_admin::elf;

/// Programs whose dynamic linker is taken: the container's first one, and those that most images have.
const PROGRAMS: [&str; 3] = ["/proc/1/exe", "/bin/sh", "/bin/busybox"];
/// Dynamic linkers at their usual places: musl's first, since glibc's may be an imitation where both are.
const LOADERS: [&str; 2] = ["/lib/ld-musl-x86_64.so.1", "/lib64/ld-linux-x86-64.so.2"];

/// How probes are started.
pub struct Probes {
    /// The library, if there is one; and the runtime directory.
    pub lib: Option<PathBuf>,
    pub dir: PathBuf,
    carried: Option<Carried>,
}

/// The program that the tool for containers carries, in memory, and what starts it.
struct Carried {
    program: File,
    loader: PathBuf,
}

impl Carried {
    fn new(bytes: &[u8]) -> Result<Self, Failure> {
        let fail = |e: &dyn std::fmt::Display| {
            Failure::new(format_args!("cannot put the probe into memory: {e}"))
        };
        let loader = loader().ok_or_else(|| {
            Failure::new(
                "this image has no dynamic linker (all its programs are static), so nothing in it can be on a lane",
            )
        })?;
        // (It is inherited by the probe, whose dynamic linker opens it by its number.)
        let fd = memfd_create("underpass-probe", MemfdFlags::empty()).map_err(|e| fail(&e))?;
        let mut program = File::from(fd);
        program.write_all(bytes).map_err(|e| fail(&e))?;
        Ok(Carried { program, loader })
    }

    fn command(&self) -> Command {
        let mut c = Command::new(&self.loader);
        c.arg(format!("/proc/self/fd/{}", self.program.as_raw_fd()));
        c
    }
}

fn loader() -> Option<PathBuf> {
    let named = PROGRAMS
        .iter()
        .filter_map(|p| Some(PathBuf::from(elf::read(Path::new(p))?.interpreter?)));
    let usual = LOADERS.iter().map(PathBuf::from);
    named.chain(usual).find(|l| l.is_file())
}

impl Probes {
    pub fn new(
        lib: Option<PathBuf>,
        dir: PathBuf,
        carried: Option<&[u8]>,
    ) -> Result<Self, Failure> {
        let carried = carried.map(Carried::new).transpose()?;
        Ok(Probes { lib, dir, carried })
    }

    /// A probe with these arguments. With the shim if `shim` is set and there is one.
    pub fn command(&self, args: &[&str], shim: bool) -> Result<Command, Failure> {
        let mut c = match &self.carried {
            Some(carried) => carried.command(),
            None => {
                let mut c = Command::new(std::env::current_exe().map_err(Failure::new)?);
                c.args(["__probe", "--"]);
                c
            }
        };
        c.args(args);
        match (&self.lib, shim) {
            (Some(lib), true) => run::prepare(&mut c, lib, &self.dir, true),
            _ => {
                match shimlib::without(std::env::var_os("LD_PRELOAD").as_deref()) {
                    Some(rest) => c.env("LD_PRELOAD", rest),
                    None => c.env_remove("LD_PRELOAD"),
                };
                c.env("UNDERPASS", "off");
            }
        }
        Ok(c)
    }
}

/// This process is the probe.
pub fn be(args: &[OsString]) -> ExitCode {
    let args: Vec<&str> = args.iter().filter_map(|a| a.to_str()).collect();
    let status = underpass_probe::run(&args);
    ExitCode::from(u8::try_from(status).unwrap_or(1))
}

/// What the probe says, one a line.
#[derive(Debug, PartialEq)]
pub enum Event {
    Connected { local: String, peer: String },
    Failed(String),
    Closed,
    Shown(Shown),
}

/// The result of one test: bytes that moved, and how many of these the kernel's TCP carried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shown {
    pub what: What,
    pub moved: u64,
    pub kernel: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum What {
    /// Round trips, in nanoseconds.
    Ping {
        min: u64,
        median: u64,
        p99: u64,
    },
    Bytes {
        bytes: u64,
        ns: u64,
    },
}

impl Event {
    fn read(line: &str) -> Option<Self> {
        let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
        let numbers = || -> Option<Vec<u64>> { rest.split(' ').map(|w| w.parse().ok()).collect() };
        Some(match name {
            "connected" => {
                let (local, peer) = rest.split_once(' ')?;
                Event::Connected {
                    local: local.into(),
                    peer: peer.into(),
                }
            }
            "failed" => Event::Failed(rest.into()),
            "closed" => Event::Closed,
            "ping" => match numbers()?[..] {
                [_, min, median, p99, moved, kernel] => Event::Shown(Shown {
                    what: What::Ping { min, median, p99 },
                    moved,
                    kernel,
                }),
                _ => return None,
            },
            "bytes" => match numbers()?[..] {
                [bytes, ns, moved, kernel] => Event::Shown(Shown {
                    what: What::Bytes { bytes, ns },
                    moved,
                    kernel,
                }),
                _ => return None,
            },
            _ => return None,
        })
    }
}

/// A probe's connection, which lives as long as this value.
pub struct Connection {
    child: Child,
    events: BufReader<ChildStdout>,
    pub local: String,
    pub peer: String,
}

impl Connection {
    /// Starts a probe that connects.
    pub fn open(probes: &Probes, args: &[&str], shim: bool) -> Result<Self, Failure> {
        let mut command = probes.command(args, shim)?;
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
            Some(Event::Failed(message)) => Err(Failure::new(clean(&message))),
            _ => Err(Failure::new(
                "the probe ended without a word (does libunderpass.so load?)",
            )),
        }
    }

    fn next(&mut self) -> Option<Event> {
        let mut line = String::new();
        self.events.read_line(&mut line).ok()?;
        Event::read(line.trim_end_matches('\n'))
    }

    /// Has one test done.
    pub fn test(&mut self, test: &str) -> Result<Shown, Failure> {
        if let Some(stdin) = &mut self.child.stdin {
            // (If the probe has ended, its last words say why.)
            let _ = writeln!(stdin, "{test}");
        }
        match self.next() {
            Some(Event::Shown(s)) => Ok(s),
            Some(Event::Failed(message)) => Err(Failure::new(clean(&message))),
            _ => Err(Failure::new(
                "the measurement broke off: the other end has not answered for too long",
            )),
        }
    }

    /// Closes the connection; returns whether the service had closed it before.
    pub fn close(mut self) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        assert_eq!(
            Event::read("connected 127.0.0.1:1 [::1]:2"),
            Some(Event::Connected {
                local: "127.0.0.1:1".into(),
                peer: "[::1]:2".into()
            })
        );
        assert_eq!(Event::read("failed a b"), Some(Event::Failed("a b".into())));
        let what = What::Ping {
            min: 2,
            median: 3,
            p99: 4,
        };
        assert_eq!(
            Event::read("ping 1 2 3 4 5 6"),
            Some(Event::Shown(Shown {
                what,
                moved: 5,
                kernel: 6
            }))
        );
        for bad in ["", "ping 1 2", "bytes 1 2 3 x", "connected a", "other"] {
            assert_eq!(Event::read(bad), None, "{bad}");
        }
    }

    #[test]
    fn this_machine_has_a_dynamic_linker() {
        assert!(loader().unwrap().is_absolute());
    }
}
