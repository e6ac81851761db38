//! Families that are older than this daemon: found in `/proc` when it starts, so that its view is complete at
//! once. A program that makes no hooked call for a long time sends no hello.
//!
//! A table found here is trusted no more than one in a hello: it is checked in the same way, and its content may
//! be forged. In addition, a process counts only if it has the table mapped, as a shim does (a daemon that was
//! handed a table only has it open), if the table names a daemon of this runtime directory, and if the memory
//! belongs to the process's user, or to root. What is found is shown, but nothing acts on it. Operator commands
//! for such a process are kept until its hello, which replaces the entry; the entry also ends with the process.
//!
//! Any file read here may hang, depending on the process that it belongs to; so each process gets a helper thread
//! of its own, and a time limit.

use crate::clients::commands::PendingCommands;
use crate::clients::family;
use crate::clients::limits::Member;
use crate::os::fds::Foreign;
use crate::os::memfd::{self, Ident};
use crate::os::process::ProcId;
use crate::os::random::random;
use lane::family::{Home, TABLE_BYTES};
use lane::num;
use rustix::fs::{Mode, OFlags};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use underpass_admin::proc;

/// Name under which shims make their tables, as `/proc` shows it.
const NAME: &str = "/memfd:underpass-family";

/// A process of such a family that has sent no hello to this daemon yet.
#[derive(Debug)]
pub struct Recovered {
    pub ident: Ident,
    pub id: ProcId,
    pub own_pid: u32,
    pub uid: u32,
    pub netns: u64,
    pub comm: String,
    pub commands: PendingCommands,
    /// Counts the process against its cgroup's limits.
    pub member: Member,
}

/// Result of the look at one process.
pub struct Found {
    pub ident: Ident,
    pub table: Foreign,
    pub id: ProcId,
    pub own_pid: u32,
    pub uid: u32,
    pub netns: u64,
    pub comm: String,
    /// All that `/proc/PID/cgroup` says.
    pub cgroups: String,
}

/// Identity of the runtime directory, as shims write it into their tables. The third number is kept in the file
/// `lock` and is the same for all daemons of the directory: if the directory is removed, a later one may get its
/// inode.
/// `pods`: the directory in which containers find this daemon, if there is one. It outlives the other (which has the number)
/// and is not made anew, so that device and inode say which it is.
pub(crate) fn identities(dir: &Path, lock: &OwnedFd, pods: &Path) -> Vec<Home> {
    let of = |d: &Path, number: u64| {
        let m = std::fs::metadata(d).ok()?;
        Some([m.dev(), m.ino(), number])
    };
    let number = number(lock).map(u64::from);
    let all = [number.and_then(|n| of(dir, n)), of(pods, 0)];
    all.into_iter().flatten().collect()
}

fn number(lock: &OwnedFd) -> Option<u32> {
    let mut kept = [0u8; 4];
    match rustix::io::pread(lock, &mut kept, 0) {
        Ok(4) if kept != [0; 4] => Some(u32::from_ne_bytes(kept)),
        _ => {
            let new = num::low32(random()).max(1);
            rustix::io::pwrite(lock, &new.to_ne_bytes(), 0).ok()?;
            Some(new)
        }
    }
}

/// Does this table name a directory of ours? A table without a number (from an older daemon, or not told yet) is
/// accepted by device and inode.
pub(crate) fn is_home(homes: &[Home], said: Home) -> bool {
    let is = |home: &Home| {
        said[..2] == home[..2] && (said[2] == home[2] || said[2] == 0 || home[2] == 0)
    };
    homes.iter().any(is)
}

/// Processes that may be ours: for root all, otherwise those of the daemon's user.
pub(crate) fn pids() -> Vec<u32> {
    let me = rustix::process::geteuid();
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mine = all.filter_map(|e| {
        let pid: u32 = e.file_name().to_str()?.parse().ok()?;
        let owner = e.metadata().ok()?.uid();
        ((me.is_root() || owner == me.as_raw()) && pid != std::process::id()).then_some(pid)
    });
    mine.collect()
}

/// Looks at one process. Runs on a helper thread.
pub(crate) fn look_into(pid: u32, homes: &[Home]) -> Option<Found> {
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
        cgroups: proc::cgroups(pid).unwrap_or_default(),
        table,
    };
    let ours = family::home(&found.table).is_some_and(|said| is_home(homes, said));
    // All this was read by pid: check that it is still the same process.
    let same = proc::start_time(pid) == Some(start);
    (ours && same).then_some(found)
}

/// The family table of a process of `uid`, which must have it mapped and open. `of`: see `proc::living`.
pub(crate) fn table(of: &Path, maps: &str, uid: u32) -> Option<(Ident, Foreign)> {
    let mapped = maps.lines().find(|l| l.contains(NAME))?;
    // address, rights, offset, device, inode, name
    let inode: u64 = mapped.split_ascii_whitespace().nth(4)?.parse().ok()?;
    let mut fds = std::fs::read_dir(of.join("fd")).ok()?.flatten();
    let is = |e: &std::fs::DirEntry| {
        std::fs::read_link(e.path()).is_ok_and(|l| l.to_string_lossy().starts_with(NAME))
    };
    let path = fds.find(is)?.path();
    // The number may mean another file by now, whose open must not block.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let table = Foreign::new(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    let ident = memfd::check_fixed(&table, TABLE_BYTES).filter(|i| i.ino == inode)?;
    let owner = rustix::fs::fstat(&table).ok()?.st_uid;
    (owner == uid || owner == 0).then_some((ident, table))
}

/// The pid of a process in its own pid namespace.
pub(crate) fn own_pid(pid: u32) -> Option<u32> {
    proc::status(pid, "NSpid:")?.last().copied()
}
