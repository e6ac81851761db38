//! The sockets of every process that carries the shim, as the kernel has them: what `underpass ss`
//! shows must not depend on what shims have entered into their tables. A process may hold sockets that
//! its shim never saw made, and may have had no reason to speak to the daemon yet.
//!
//! A process belongs here if it is connected to this daemon, or if it has the library mapped and
//! either its table names this runtime directory or its environment leads here; one that has written
//! over its environment, to show a title, if the process that started it does. What is found is shown,
//! never acted on.
//!
//! The files read here may be made to hang by the process they belong to, so each process has a
//! helper of its own, the whole has a time limit, and helpers that hang are counted.

pub mod ends;
pub mod rows;

use crate::adopt;
use crate::core::Shared;
use crate::family;
use crate::fds::Foreign;
use crate::memfd::Ident;
use crate::process::{self, ProcId};
use crate::tenants;
use link::family::Home;
use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// Longest time for all processes together; what has not been found by then is not shown.
const LIMIT: Duration = Duration::from_secs(4);
/// Longest time that one process is waited for.
const LIMIT_ONE: Duration = Duration::from_secs(1);
/// Processes looked at at the same time.
const AT_ONCE: usize = 4;
/// Generations that are asked for what a process does not say itself.
const ANCESTORS_MAX: usize = 16;
/// Helpers that may hang in all; with so many nobody is looked at any more.
const HANGING_MAX: usize = 32;

/// Looks that have begun and not ended.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// A process that carries the shim.
pub struct Carrier {
    pub id: ProcId,
    pub own_pid: u32,
    pub netns: u64,
    pub comm: String,
    /// Is the library mapped? If not, only what its table has is shown.
    pub mapped: bool,
    /// The shim was told to stay out of the way.
    pub off: bool,
    /// Its family table, if it has one.
    pub table: Option<(Ident, Foreign)>,
    /// Descriptors that are sockets, with inodes.
    pub sockets: Vec<(u32, u64)>,
}

/// Every process that was looked at.
#[derive(Default)]
pub struct Census {
    pub carriers: Vec<Carrier>,
    /// Does this process, which is none of ours, have the library mapped? (It may use another daemon.)
    pub strangers: HashMap<u32, bool>,
}

/// What the look at one process found.
enum Look {
    Ours(Box<Carrier>),
    Stranger { carries: bool },
    Unknown,
}

/// Where this daemon is, and whom it knows: connected, or found when it started.
struct Us {
    dir: PathBuf,
    home: Option<Home>,
    known: HashSet<u32>,
}

/// Looks at every process that may be looked at.
pub async fn take(shared: &Shared) -> Census {
    let (turn, us) = {
        let core = shared.borrow();
        let Some(dir) = core.dir.clone() else {
            return Census::default();
        };
        let connected = core.parties.values().filter(|p| p.control.is_some());
        let known = connected
            .map(|p| p.proc_id)
            .chain(core.relics.iter().map(|r| r.id));
        let us = Us {
            home: core.home,
            dir: dir.canonicalize().unwrap_or(dir),
            known: known.map(|p| p.pid).collect(),
        };
        (core.census_turn.clone(), Arc::new(us))
    };
    // One at a time, whoever asks.
    let _turn = turn.lock().await;
    let mut census = Census::default();
    let all = take_all(us, &mut census);
    if tokio::time::timeout(LIMIT, all).await.is_err() {
        tracing::warn!("some processes cannot be looked at: they hang");
    }
    census
}

async fn take_all(us: Arc<Us>, census: &mut Census) {
    let pids = tokio::task::spawn_blocking(pids).await.unwrap_or_default();
    let mut pids = pids.into_iter();
    let mut looks = JoinSet::new();
    loop {
        while looks.len() < AT_ONCE && UNDER_WAY.load(Relaxed) < HANGING_MAX {
            let Some(pid) = pids.next() else { break };
            let us = us.clone();
            UNDER_WAY.fetch_add(1, Relaxed);
            let helper = tokio::task::spawn_blocking(move || {
                let found = look(pid, &us);
                UNDER_WAY.fetch_sub(1, Relaxed);
                found
            });
            looks.spawn_local(async move {
                let found = tokio::time::timeout(LIMIT_ONE, helper).await;
                (
                    pid,
                    found.ok().and_then(Result::ok).unwrap_or(Look::Unknown),
                )
            });
        }
        match looks.join_next().await {
            None => return,
            Some(Ok((_, Look::Ours(c)))) => census.carriers.push(*c),
            Some(Ok((pid, Look::Stranger { carries }))) => {
                census.strangers.insert(pid, carries);
            }
            Some(_) => {}
        }
    }
}

/// All processes but ourselves. Those of others show nothing to a daemon that is not root.
fn pids() -> Vec<u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|e| e.file_name().to_str()?.parse().ok())
        .filter(|p| *p != std::process::id())
        .collect()
}

fn look(pid: u32, us: &Us) -> Look {
    let Some(start) = process::start_time(pid) else {
        return Look::Unknown;
    };
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let known = us.known.contains(&pid);
    let maps = match std::fs::read(proc.join("maps")) {
        Ok(m) => String::from_utf8_lossy(&m).into_owned(),
        Err(_) if known => String::new(),
        Err(_) => return Look::Unknown,
    };
    let mapped = maps.contains(tenants::LIBRARY);
    if !known && !mapped {
        return Look::Stranger { carries: false };
    }
    let Some(uid) = std::fs::metadata(&proc).ok().map(|m| m.uid()) else {
        return Look::Unknown;
    };
    let table = (!known).then(|| adopt::table(pid, &maps, uid)).flatten();
    let env = tenants::environment(&proc).unwrap_or_default();
    let ours = || ours(us, table.as_ref().map(|t| &t.1), &env, uid);
    if !known && !ours().unwrap_or_else(|| inherited(us, pid)) {
        return Look::Stranger { carries: true };
    }
    let Some(sockets) = descriptors(pid) else {
        return Look::Unknown;
    };
    let carrier = Carrier {
        id: ProcId { pid, start },
        own_pid: adopt::own_pid(pid).unwrap_or(pid),
        netns: process::netns(pid).unwrap_or(0),
        comm: process::comm(pid).unwrap_or_default(),
        mapped,
        off: !known && table.is_none() && tenants::off(&env),
        table,
        sockets,
    };
    // All this was read by number: it must still be the same process.
    match process::start_time(pid) == Some(start) {
        true => Look::Ours(Box::new(carrier)),
        false => Look::Unknown,
    }
}

/// Does this process use our daemon, or would it? `None`: it has the library, and nothing that says
/// where from. It has written over its environment.
fn ours(us: &Us, table: Option<&Foreign>, env: &[u8], uid: u32) -> Option<bool> {
    match table.and_then(family::home) {
        Some(said) if said[..2] != [0, 0] => Some(us.home.is_some_and(|h| adopt::is_home(h, said))),
        _ if tenants::preloads(env) => Some(tenants::leads(env, Path::new(&us.dir), uid)),
        _ => None,
    }
}

/// The same of one that is as silent as its parents may be (sshd executes itself anew for each
/// connection, and all of them show titles).
fn inherited(us: &Us, pid: u32) -> bool {
    let mut pid = pid;
    for _ in 0..ANCESTORS_MAX {
        let Some(parent) = process::parent(pid) else {
            return false;
        };
        if us.known.contains(&parent) {
            return true;
        }
        let proc = PathBuf::from(format!("/proc/{parent}"));
        let (Ok(maps), Ok(of)) = (std::fs::read(proc.join("maps")), std::fs::metadata(&proc))
        else {
            return false;
        };
        let maps = String::from_utf8_lossy(&maps);
        if !maps.contains(tenants::LIBRARY) {
            return false;
        }
        let table = adopt::table(parent, &maps, of.uid());
        let env = tenants::environment(&proc).unwrap_or_default();
        match ours(us, table.as_ref().map(|t| &t.1), &env, of.uid()) {
            Some(yes) => return yes,
            None => pid = parent,
        }
    }
    false
}

/// Descriptors of a process that are sockets, with inodes. `None`: they may not be looked at.
fn descriptors(pid: u32) -> Option<Vec<(u32, u64)>> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let socket = |e: std::fs::DirEntry| {
        let fd = e.file_name().to_str()?.parse().ok()?;
        let link = std::fs::read_link(e.path()).ok()?;
        let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
        Some((fd, inode.parse().ok()?))
    };
    Some(fds.flatten().filter_map(socket).collect())
}
