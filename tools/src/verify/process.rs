//! What can be found out about one process, its library and its daemon.

use super::{connected, within};
use lane::proto::reason::Reason;
use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use underpass_admin::elf::{self, Elf};
use underpass_admin::environ;
use underpass_admin::{Request, Response, CONTROL_SOCK};

const LIBRARY: &str = "libunderpass";
/// Type of the entry of the auxiliary vector that tells the loader not to trust the caller (secure execution).
const AT_SECURE: u64 = 23;

/// Why the library is not loaded, or does nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The program is statically linked, so no loader runs.
    Static,
    /// The program has more privileges than its caller.
    Secure(&'static str),
    /// The process that started it removed LD_PRELOAD from the environment, or never had it.
    NoPreload,
    /// LD_PRELOAD names other libraries only.
    Overwritten(String),
    /// The library's file is not where LD_PRELOAD says, in this process's file system.
    Absent(String),
    /// The program is for another architecture, or another word size.
    Architecture,
    /// The loader had everything it needs, but did not load the library.
    Loader(String),
    /// `UNDERPASS=off`.
    Off,
    /// The loader is still working, or the process is ending.
    Starting,
    /// It is a kernel thread.
    Kernel,
    /// We have no permission to look.
    Hidden,
}

impl Cause {
    pub fn name(&self) -> &'static str {
        match self {
            Cause::Static => "static",
            Cause::Secure(_) => "secure",
            Cause::NoPreload => "no-preload",
            Cause::Overwritten(_) => "preload-overwritten",
            Cause::Absent(_) => "library-absent",
            Cause::Architecture => "architecture",
            Cause::Loader(_) => "loader",
            Cause::Off => "off",
            Cause::Starting => "starting",
            Cause::Kernel => "kernel-thread",
            Cause::Hidden => "hidden",
        }
    }

    pub fn text(&self) -> String {
        match self {
            Cause::Static => "the program is linked statically: no loader, so no preloaded library".into(),
            Cause::Secure(why) => format!("the program has more rights than its caller ({why}): the loader ignores LD_PRELOAD, or the library stays out of the way"),
            Cause::NoPreload => "its environment has no LD_PRELOAD: cleaned by the program that started it (sudo, env -i, a service manager), or started without Underpass".into(),
            Cause::Overwritten(v) => format!("LD_PRELOAD was overwritten; it names {v} only"),
            Cause::Absent(p) => format!("{p} does not exist in its root directory and mount namespace (chroot, container)"),
            Cause::Architecture => "the program is for another architecture, or 32 bits, and the library is not".into(),
            Cause::Loader(l) => format!("its loader ({l}) did not load the library; try LD_DEBUG=libs"),
            Cause::Off => "UNDERPASS=off in its environment".into(),
            Cause::Starting => "it is just starting or ending".into(),
            Cause::Kernel => "a thread of the kernel's: there is no program".into(),
            Cause::Hidden => "may not be looked at; ask as root".into(),
        }
    }
}

/// State of the connection to the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Daemon {
    Connected,
    /// A daemon answers there, but nothing has made the library connect to it yet.
    Reachable,
    /// There is no socket where the library looks, in this process's file system.
    Absent(String),
    /// The socket is there, but no daemon answers.
    Silent(String),
    /// This process's user has no permission for the socket, or for a directory above it.
    Forbidden(String),
    /// The library found no daemon although one answers, and a seccomp filter is installed.
    Seccomp,
    /// Without the library there is no daemon.
    None,
}

impl Daemon {
    pub fn name(&self) -> &'static str {
        match self {
            Daemon::Connected => "connected",
            Daemon::Reachable => "reachable",
            Daemon::Absent(_) => "absent",
            Daemon::Silent(_) => "silent",
            Daemon::Forbidden(_) => "forbidden",
            Daemon::Seccomp => "seccomp",
            Daemon::None => "-",
        }
    }

    pub fn text(&self) -> String {
        match self {
            Daemon::Connected => String::new(),
            Daemon::Reachable => "a daemon answers; the library speaks to it when a connection is used".into(),
            Daemon::Absent(d) => format!("no daemon's socket in {d}, as this process sees files (not started, chroot, container)"),
            Daemon::Silent(d) => format!("nobody answers in {d}: the daemon has ended or is stopped"),
            Daemon::Forbidden(d) => format!("the daemon's socket in {d} is closed to this process's user"),
            Daemon::Seccomp => "a daemon answers, and the library did not reach it: a filter of system calls is installed (it needs socket, connect, sendmsg with descriptors, memfd_create)".into(),
            Daemon::None => String::new(),
        }
    }
}

/// Daemons that answered, with their processes; asked once per look at all processes.
pub struct Daemons {
    answers: HashMap<PathBuf, Option<Vec<u32>>>,
    /// The runtime directory of this command: used for processes whose environment names none.
    usual: PathBuf,
}

impl Daemons {
    pub fn new(usual: PathBuf) -> Self {
        Daemons {
            answers: HashMap::new(),
            usual,
        }
    }

    pub fn forget(&mut self) {
        self.answers.clear();
    }

    /// The directories in which a process with this environment looks for its daemon.
    fn directories(&self, env: &[u8], uid: u32) -> Vec<PathBuf> {
        match environ::preloads(env) {
            true => environ::directories(env, uid),
            // The process has the library, so it has overwritten its environment since (to show a title).
            false => vec![self.usual.clone()],
        }
    }

    fn ask(&mut self, dir: &Path) -> Option<&[u32]> {
        let known = self.answers.entry(dir.to_owned());
        known.or_insert_with(|| connected(dir)).as_deref()
    }
}

/// A process, and the program that it executes.
pub type Key = (u32, u64, String);

/// One process.
#[derive(Clone, Debug)]
pub struct Seen {
    pub pid: u32,
    pub comm: String,
    pub program: String,
    start: u64,
    /// The path from which the library was loaded.
    pub library: Option<String>,
    pub cause: Option<Cause>,
    pub daemon: Daemon,
}

impl Seen {
    pub fn look(pid: u32, daemons: &mut Daemons) -> Option<Seen> {
        let start = underpass_admin::proc::start_time(pid)?;
        let of = underpass_admin::proc::living(pid)?;
        let at = |f: &str| of.join(f);
        let program = fs::read_link(at("exe"));
        let mut s = Seen {
            pid,
            start,
            comm: underpass_admin::proc::comm(pid).unwrap_or_default(),
            program: program.map_or_else(|_| String::new(), |p| p.display().to_string()),
            library: None,
            cause: None,
            daemon: Daemon::None,
        };
        if underpass_admin::proc::is_kernels(pid) {
            s.cause = Some(Cause::Kernel);
            return Some(s);
        }
        let uid = fs::metadata(&of).ok()?.uid();
        let maps = match fs::read(at("maps")) {
            Err(e) if e.kind() == ErrorKind::PermissionDenied => {
                s.cause = Some(Cause::Hidden);
                return Some(s);
            }
            m => m.unwrap_or_default(),
        };
        if maps.is_empty() || s.program.is_empty() {
            s.cause = Some(Cause::Starting); // or it is ending: it has no memory
            return Some(s);
        }
        let env = environ::environment(&of).unwrap_or_default();
        let maps = String::from_utf8_lossy(&maps);
        s.library = maps.lines().find_map(|l| {
            let path = l.get(l.find('/')?..)?;
            path.contains(LIBRARY).then(|| path.to_owned())
        });
        let secure = secure(&of);
        s.cause = match &s.library {
            Some(_) => secure.or_else(|| environ::off(&env).then_some(Cause::Off)),
            None => Some(why_not(&of, &maps, &env, secure)),
        };
        if s.cause.is_none() {
            s.daemon = daemon((pid, &of), uid, &env, daemons);
        }
        (underpass_admin::proc::start_time(pid) == Some(start)).then_some(s)
    }

    pub fn key(&self) -> Key {
        (self.pid, self.start, self.program.clone())
    }

    /// Does the process carry the library, and reach a daemon?
    pub fn fine(&self) -> bool {
        self.cause.is_none() && matches!(self.daemon, Daemon::Connected | Daemon::Reachable)
    }

    /// Was the process there long enough to be judged?
    pub fn settled(&self) -> bool {
        self.cause != Some(Cause::Starting)
    }

    /// Does this look at a process say more than an earlier one? (When a process ends, it loses its memory, and then
    /// its daemon, before it disappears.)
    pub fn better_than(&self, old: &Seen) -> bool {
        let rank = |s: &Seen| match (&s.cause, &s.daemon) {
            (Some(Cause::Starting | Cause::Hidden), _) => 0,
            (Some(_), _) => 1,
            (None, Daemon::Connected) => 5,
            (None, Daemon::Seccomp) => 4,
            (None, Daemon::Reachable) => 3,
            (None, _) => 2,
        };
        rank(self) > rank(old)
    }
}

/// Does the process have more privileges than its caller, and why?
fn secure(of: &Path) -> Option<Cause> {
    let words = fs::read(of.join("auxv")).ok()?;
    let word = |b: &[u8]| u64::from_ne_bytes(b.try_into().unwrap_or_default());
    let mut pairs = words
        .chunks_exact(16)
        .map(|p| (word(&p[..8]), word(&p[8..])));
    pairs.find(|p| *p == (AT_SECURE, 1))?;
    let exe = of.join("exe");
    let mode = fs::metadata(&exe).map_or(0, |m| m.mode());
    let mut value = [0u8; 64];
    let capable = rustix::fs::getxattr(&exe, "security.capability", &mut value[..]).is_ok();
    Some(Cause::Secure(match (mode & 0o4000, mode & 0o2000) {
        (0, 0) if capable => "file capabilities",
        (0, 0) => "by its security module or its caller's rights",
        (0, _) => "set-group-id",
        _ => "set-user-id",
    }))
}

/// Why the library is not mapped.
fn why_not(of: &Path, maps: &str, env: &[u8], secure: Option<Cause>) -> Cause {
    let exe = elf::read(&of.join("exe"));
    let Some(exe) = exe else {
        return Cause::Hidden;
    };
    let Some(loader) = &exe.interpreter else {
        return Cause::Static;
    };
    if let Some(c) = secure {
        return c;
    }
    let preload = match environ::variable(env, "LD_PRELOAD") {
        None => return Cause::NoPreload,
        Some(v) => String::from_utf8_lossy(v).into_owned(),
    };
    let mut names = preload.split([':', ' ', '\t', '\n']);
    let Some(name) = names.find(|n| n.contains(LIBRARY)) else {
        return Cause::Overwritten(preload);
    };
    let file = within(of, Path::new(name));
    if name.starts_with('/') && !file.exists() {
        return Cause::Absent(name.to_owned());
    }
    let other = |l: &Elf| (l.class, l.machine) != (exe.class, exe.machine);
    if elf::read(&file).as_ref().is_some_and(other) {
        return Cause::Architecture;
    }
    // Preloaded libraries are mapped before the C library.
    match started(maps, loader) {
        true => Cause::Loader(loader.clone()),
        false => Cause::Starting,
    }
}

/// Has the loader mapped anything besides itself and the program?
fn started(maps: &str, loader: &str) -> bool {
    let loader = Path::new(loader).file_name().unwrap_or_default();
    let library = |path: &str| {
        let name = Path::new(path).file_name().unwrap_or_default();
        name != loader && name.as_bytes().windows(3).any(|w| w == b".so")
    };
    // With musl, the C library is the loader, and the interpreter's name may be that of a link to it, which tells
    // nothing.
    let paths: Vec<&str> = maps.lines().filter_map(|l| l.get(l.find('/')?..)).collect();
    paths.iter().any(|p| library(p)) || loader.as_bytes().starts_with(b"ld-musl")
}

fn daemon((pid, of): (u32, &Path), uid: u32, env: &[u8], daemons: &mut Daemons) -> Daemon {
    let mut worst = Daemon::None;
    for dir in daemons.directories(env, uid) {
        let shown = dir.display().to_string();
        let here = within(of, &dir);
        let socket = here.join(CONTROL_SOCK);
        let there = fs::metadata(&socket).is_ok_and(|m| m.file_type().is_socket());
        let found = match daemons.ask(&here) {
            _ if !there => Daemon::Absent(shown),
            _ if !may_connect(of, &dir) => Daemon::Forbidden(shown),
            None => Daemon::Silent(shown),
            Some(pids) if pids.contains(&pid) => return Daemon::Connected,
            Some(_) if filtered(of) && in_vain(&here, pid) => Daemon::Seccomp,
            Some(_) => return Daemon::Reachable,
        };
        // The first directory that has anything is the most informative.
        if matches!(worst, Daemon::None | Daemon::Absent(_)) {
            worst = found;
        }
    }
    worst
}

/// Effective user and groups, and capabilities that override permissions, from the process's status.
fn may_connect(of: &Path, dir: &Path) -> bool {
    let status = fs::read_to_string(of.join("status")).unwrap_or_default();
    let field = |name: &str| {
        status
            .lines()
            .find_map(|l| l.strip_prefix(name))
            .unwrap_or("")
    };
    let numbers = |s: &str| -> Vec<u32> { s.split_whitespace().flat_map(str::parse).collect() };
    // The fields are: real, effective, saved, file system.
    let (uids, mut groups) = (numbers(field("Uid:")), numbers(field("Groups:")));
    groups.extend(numbers(field("Gid:")).last());
    let capabilities = u64::from_str_radix(field("CapEff:").trim(), 16).unwrap_or(0);
    let (override_all, search_all) = (capabilities & 1 << 1 != 0, capabilities & 1 << 2 != 0);
    let uid = uids.last().copied().unwrap_or(0);
    let allowed = |path: &Path, bit: u32| {
        let Ok(m) = fs::metadata(path) else {
            return false;
        };
        let shift = match (m.uid() == uid, groups.contains(&m.gid())) {
            (true, _) => 6,
            (_, true) => 3,
            _ => 0,
        };
        override_all || m.mode() >> shift & bit == bit
    };
    let mut above = dir.ancestors().filter(|a| *a != Path::new("/"));
    let passes = above.all(|a| search_all || allowed(&within(of, a), 1));
    passes && allowed(&within(of, dir).join(CONTROL_SOCK), 2)
}

/// Is a seccomp filter installed?
fn filtered(of: &Path) -> bool {
    let status = fs::read_to_string(of.join("status")).unwrap_or_default();
    let mode = status.lines().find_map(|l| l.strip_prefix("Seccomp:"));
    mode.is_some_and(|m| m.trim() != "0")
}

/// Has the process's library looked for a daemon and found none, although this one is there?
fn in_vain(dir: &Path, pid: u32) -> bool {
    let none = Reason::NoDaemon.code();
    match crate::client::ask_in(dir, &Request::Ss) {
        Ok(Response::Ss { rows }) => rows
            .iter()
            .any(|r| r.reason == none && r.pids.contains(&pid)),
        _ => false,
    }
}
