//! Makes sure that a daemon runs: the system's if it answers, otherwise one of this user's (root's is the system's),
//! which is started if there is none. The daemon stays as long as the program that is started.
//!
//! The daemon must not be a child of the program that `underpass run` becomes (the program would find an unknown
//! child when it waits), must not hold any of its descriptors open, and must not die with its terminal. So a helper
//! process ([`detach`]) leaves the session, closes what it inherited, starts the daemon, prints its pid and ends.

use crate::out::{complain, Failure};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::Mode;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use underpass_admin::client::{hold, Presence};
use underpass_admin::places::Places;
use underpass_admin::places::DIR_ENV;

const DAEMON: &str = "underpassd";
/// Seconds without any program after which a daemon that we started ends.
const IDLE_EXIT: &str = "30";
/// Locked while a daemon is being started, so that two `run` processes do not start two.
const LOCK: &str = "start.lock";
/// Maximum length of a runtime directory's path, also for shims: a socket address has 108 bytes, which include the
/// socket's name and the terminating NUL.
const LONGEST: usize = 94;
const LOG: &str = "underpassd.log";
/// Time that a daemon may take to start, or another `run` process to start it.
const PATIENCE: Duration = Duration::from_secs(15);
const STEP: Duration = Duration::from_millis(10);

/// Returns the absolute runtime directory of a running daemon. Starts one if necessary; it stays as long as this
/// process lives.
pub fn ensure(dir: Option<PathBuf>) -> Result<PathBuf, Failure> {
    let places = Places::here(dir);
    // Programs change their directory, and the socket is looked up later, so the path must be absolute.
    let dir = std::path::absolute(places.choose()).map_err(Failure::new)?;
    places.check_owner(&dir)?;
    if dir.as_os_str().len() > LONGEST {
        return Err(Failure::new(format_args!(
            "the runtime directory {} is too long: at most {LONGEST} bytes fit into a socket's address",
            dir.display()
        )));
    }
    if running(&dir) {
        return Ok(dir);
    }
    let cannot = |e| Failure::new(format_args!("cannot create {}: {e}", dir.display()));
    let fresh = !dir.exists();
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&dir)
        .map_err(cannot)?;
    if fresh && dir == places.system {
        // The node's daemon serves every user, whatever umask root has.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).map_err(cannot)?;
    }
    places.check_owner(&dir)?; // another user may have been faster and made the directory
    let _lock = lock(&dir)?;
    if !running(&dir) {
        start(&dir)?;
    }
    Ok(dir)
}

/// Is a daemon there? One that is there but does not answer (stopped, overloaded) counts: the shim copes with it, and
/// a second one could only do harm.
fn running(dir: &Path) -> bool {
    match hold(dir) {
        Presence::Answers => true,
        Presence::Silent => {
            complain(format_args!(
                "underpassd in {} does not answer (stopped?); connections stay on TCP until it does",
                dir.display()
            ));
            true
        }
        Presence::Absent => false,
    }
}

fn lock(dir: &Path) -> Result<Flock<File>, Failure> {
    let path = dir.join(LOCK);
    let fail = |e: &dyn std::fmt::Display| {
        Failure::new(format_args!("cannot lock {}: {e}", path.display()))
    };
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(|e| fail(&e))?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(l) => return Ok(l),
            Err((f, Errno::EWOULDBLOCK | Errno::EINTR)) if Instant::now() < deadline => file = f,
            Err((_, Errno::EWOULDBLOCK)) => {
                return Err(fail(&"another `underpass run` has held it for too long"))
            }
            Err((_, e)) => return Err(fail(&e)),
        }
        std::thread::sleep(STEP);
    }
}

/// The daemon's executable: beside this one, or in PATH.
fn program() -> Result<PathBuf, Failure> {
    let beside = std::env::current_exe()
        .ok()
        .and_then(|e| Some(e.parent()?.join(DAEMON)));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path)
        .filter(|d| d.is_absolute())
        .map(|d| d.join(DAEMON));
    beside
        .into_iter()
        .chain(in_path)
        .find(|p| p.is_file())
        .ok_or_else(|| {
            Failure::new(format_args!(
            "no daemon is running, and the program {DAEMON} is neither beside this one nor in PATH"
        ))
        })
}

fn start(dir: &Path) -> Result<(), Failure> {
    let daemon = program()?;
    let log_path = dir.join(LOG);
    let fail = |what: &str, e: io::Error| Failure::new(format_args!("cannot {what}: {e}"));
    // A new file each time, so that it contains only the messages of this start.
    let _ = fs::remove_file(&log_path);
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&log_path)
        .map_err(|e| fail(&format!("create {}", log_path.display()), e))?;
    let me = std::env::current_exe().map_err(|e| fail("find this program", e))?;
    let out = Command::new(me)
        .args(["__daemon".as_ref(), daemon.as_os_str(), dir.as_os_str()])
        .stdin(Stdio::null())
        .stderr(log)
        .output()
        .map_err(|e| fail("start the daemon", e))?;
    let pid = String::from_utf8_lossy(&out.stdout)
        .trim()
        .parse::<u32>()
        .ok();
    let deadline = Instant::now() + PATIENCE;
    loop {
        let gone = match pid {
            Some(p) if out.status.success() => ended(p),
            _ => true,
        };
        if matches!(hold(dir), Presence::Answers) {
            return Ok(());
        }
        if gone || Instant::now() > deadline {
            let what = if gone {
                "ended at once"
            } else {
                "does not answer"
            };
            let mut said = String::new();
            let _ = File::open(&log_path).and_then(|mut f| f.read_to_string(&mut said));
            let said: Vec<_> = said.lines().rev().take(5).map(crate::out::clean).collect();
            let said: String = said.iter().rev().map(|l| format!("\n  {l}")).collect();
            return Err(Failure::new(format_args!(
                "the daemon {} {what}; its messages are in {}{said}",
                daemon.display(),
                log_path.display()
            )));
        }
        std::thread::sleep(STEP);
    }
}

/// Has this process ended? Without a reaper of orphans it stays as a zombie.
fn ended(pid: u32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(s) => s
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X'])),
        Err(e) => e.kind() == ErrorKind::NotFound,
    }
}

/// The helper process. Standard input is empty, standard error is the log, standard output a pipe to the waiting
/// `run`.
pub fn detach(program: &Path, dir: &Path) -> Result<(), Failure> {
    let fail = |what: &str, e: &dyn std::fmt::Display| Failure::new(format_args!("{what}: {e}"));
    nix::unistd::setsid().map_err(|e| fail("setsid", &e))?;
    nix::sys::stat::umask(Mode::from_bits_truncate(0o077));
    close_inherited();
    let log = OpenOptions::new()
        .append(true)
        .open(dir.join(LOG))
        .map_err(|e| fail("log", &e))?;
    let child = Command::new(program)
        .args(["--idle-exit", IDLE_EXIT, "--dir"])
        .arg(dir)
        .env(DIR_ENV, dir)
        .env_remove("LD_PRELOAD")
        .env_remove("UNDERPASS")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone().map_err(|e| fail("log", &e))?)
        .stderr(log)
        .spawn()
        .map_err(|e| fail(&format!("cannot start {}", program.display()), &e))?;
    crate::out::print(&format!("{}\n", child.id()))
}

/// Closes every descriptor except the standard three: the daemon must not keep pipes and sockets of the program open.
fn close_inherited() {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else {
        return;
    };
    let fds: Vec<i32> = entries
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
        .filter(|&fd| fd > 2)
        .collect();
    for fd in fds {
        // The directory's own descriptor is in the list and closed already: that error is expected.
        let _ = nix::unistd::close(fd);
    }
}
