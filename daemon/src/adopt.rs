//! Families that were there before this daemon: found in `/proc` when it starts, so that its view is
//! complete at once. A program that is inside no hooked call says nothing for as long as it sleeps.
//!
//! Nobody is believed more than in a hello: the table is checked in the same way and its content is
//! anybody's. Beyond that a process counts only if it has the table mapped, as a shim does (a daemon
//! that has been shown it only has it open), if the table says that its daemon was one of this
//! directory, and if the memory belongs to the process's user, or to root. What is found is shown,
//! never acted on; what an operator wants of it is kept until
//! its hello, with which it ends, as it does with its processes.
//!
//! Everything here may be made to hang by whom it looks at: each process has a helper of its own,
//! and a time limit.

use crate::commands::PendingCommands;
use crate::family;
use crate::fds::Foreign;
use crate::limits::Member;
use crate::memfd::{self, Ident};
use crate::process::ProcId;
use crate::random::random;
use link::family::{Home, TABLE_BYTES};
use rustix::fs::{Mode, OFlags};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use underpass_admin::proc;

/// Name under which shims make their tables, as `/proc` shows it.
const NAME: &str = "/memfd:underpass-family";

/// A process of a family that has not said hello to this daemon.
#[derive(Debug)]
pub struct Recovered {
    pub ident: Ident,
    pub id: ProcId,
    pub own_pid: u32,
    pub uid: u32,
    pub netns: u64,
    pub comm: String,
    pub commands: PendingCommands,
    /// Counts it for its cgroup.
    pub member: Member,
}

/// What the look at one process found.
pub struct Found {
    pub ident: Ident,
    pub table: Foreign,
    pub id: ProcId,
    pub own_pid: u32,
    pub uid: u32,
    pub netns: u64,
    pub comm: String,
    pub cgroup: String,
}

/// What shims write into their tables of the runtime directory. Its number is kept in its file `lock`, once and for
/// all daemons: when the directory is removed, the next one may get its inode.
pub fn identity(dir: &Path, lock: &OwnedFd) -> Option<Home> {
    let m = std::fs::metadata(dir).ok()?;
    let mut kept = [0u8; 4];
    let number = match rustix::io::pread(lock, &mut kept, 0) {
        Ok(4) if kept != [0; 4] => u32::from_ne_bytes(kept),
        _ => {
            let new = (random() as u32).max(1);
            rustix::io::pwrite(lock, &new.to_ne_bytes(), 0).ok()?;
            new
        }
    };
    Some([m.dev(), m.ino(), number.into()])
}

/// Is it this directory that a table speaks of? One that was told no number (by an older daemon, or none yet) is believed
/// without.
pub fn is_home(home: Home, said: Home) -> bool {
    said[..2] == home[..2] && (said[2] == home[2] || said[2] == 0)
}

/// Processes that may be ours: as root all, else those of this user.
pub fn pids() -> Vec<u32> {
    let me = rustix::process::geteuid();
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mine = all.filter_map(|e| {
        let pid: u32 = e.file_name().to_str()?.parse().ok()?;
        let owner = e.metadata().ok()?.uid();
        ((me.is_root() || owner == me.as_raw()) && pid != std::process::id()).then_some(pid)
    });
    mine.collect()
}

/// The look at one process. For a helper.
pub fn look_into(pid: u32, home: Home) -> Option<Found> {
    let start = proc::start_time(pid)?;
    let of = proc::living(pid)?;
    let maps = std::fs::read_to_string(of.join("maps")).ok()?;
    let uid = std::fs::metadata(&of).ok()?.uid();
    let (ident, table) = table(&of, &maps, uid)?;
    let found = Found {
        ident,
        id: ProcId { pid, start },
        own_pid: own_pid(pid)?,
        uid,
        netns: proc::netns(pid).unwrap_or(0),
        comm: proc::comm(pid).unwrap_or_default(),
        cgroup: proc::cgroup(pid).unwrap_or_default(),
        table,
    };
    let ours = family::home(&found.table).is_some_and(|said| is_home(home, said));
    // All this was read by number: it must still be the same process.
    let same = proc::start_time(pid) == Some(start);
    (ours && same).then_some(found)
}

/// The family table of a process of `uid`, which must have it mapped and open. `of`: see `proc::living`.
pub fn table(of: &Path, maps: &str, uid: u32) -> Option<(Ident, Foreign)> {
    let mapped = maps.lines().find(|l| l.contains(NAME))?;
    // address, rights, offset, device, inode, name
    let inode: u64 = mapped.split_ascii_whitespace().nth(4)?.parse().ok()?;
    let mut fds = std::fs::read_dir(of.join("fd")).ok()?.flatten();
    let is = |e: &std::fs::DirEntry| {
        std::fs::read_link(e.path()).is_ok_and(|l| l.to_string_lossy().starts_with(NAME))
    };
    let path = fds.find(is)?.path();
    // Not to be blocked by what may have taken the number meanwhile.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let table = Foreign::new(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    let ident = memfd::check_fixed(&table, TABLE_BYTES).filter(|i| i.ino == inode)?;
    let owner = rustix::fs::fstat(&table).ok()?.st_uid;
    (owner == uid || owner == 0).then_some((ident, table))
}

/// The number of a process in its own pid namespace.
pub fn own_pid(pid: u32) -> Option<u32> {
    proc::status(pid, "NSpid:")?.last().copied()
}
