//! The sockets of every process that has the shim loaded, as the kernel lists them: what `underpass ss` shows must
//! not depend on what shims have entered into their tables. A process may hold sockets whose creation its shim has
//! not seen, and may have had no reason to contact the daemon yet.
//!
//! A process belongs here if it is connected to this daemon, or if it has the library mapped and either its table
//! names this runtime directory or its environment leads to this daemon. A process that has overwritten its
//! environment (to show a title) belongs here if its parent does. What is found is shown, but nothing acts on it.
//!
//! Files in `/proc` may hang, depending on the process they belong to. So each process gets a helper thread of its
//! own, there is a time limit for all, which tenants share ([`turns`]), and helpers that hang are counted. All who ask
//! during a census share the next one.

mod ends;
mod kernel;
pub(crate) mod rows;
mod turns;

use self::turns::Turns;
use crate::clients::adopt;
use crate::clients::family;
use crate::clients::tenant;
use crate::core::{Core, Shared};
use crate::os::fds::Foreign;
use crate::os::memfd::Ident;
use crate::os::process::ProcId;
use lane::family::Home;
use lane::proto::reason::Reason;
use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use underpass_admin::environ;
use underpass_admin::proc;

/// Longest time for all processes together; what has not been found by then is not shown.
const LIMIT: Duration = Duration::from_secs(4);
/// Longest wait for one process.
const LIMIT_ONE: Duration = Duration::from_secs(1);
/// Processes that are looked at concurrently.
const AT_ONCE: usize = 4;
/// Most ancestors that are asked about a process that has no usable environment (`inherited`).
const ANCESTORS_MAX: usize = 16;
/// Most helpers in progress, hanging ones included; at this number no further process is looked at.
const HANGING_MAX: usize = 32;

/// Helpers that have begun and not ended.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// A process that carries the shim.
pub(crate) struct Carrier {
    pub id: ProcId,
    pub own_pid: u32,
    pub netns: u64,
    pub comm: String,
    /// Is the library mapped? If not, only the sockets in its table are shown.
    pub mapped: bool,
    /// Why the shim is inactive in this process, if it is.
    pub out: Option<Reason>,
    /// Connected, or found when the daemon started: its table was not looked for.
    known: bool,
    /// Its family table, if it has one.
    pub table: Option<(Ident, Foreign)>,
    /// Descriptors that are sockets, with inodes.
    pub sockets: Vec<(u32, u64)>,
    /// Whose processes it is among.
    pub tenant: String,
}

/// Every process that was looked at.
#[derive(Default)]
pub(crate) struct Census {
    pub carriers: Vec<Carrier>,
    /// Processes that do not use this daemon; true if they have the library mapped (and may use another daemon).
    pub unmanaged: HashMap<u32, bool>,
}

/// What the look at one process found.
enum Look {
    Ours(Box<Carrier>),
    Stranger { carries: bool },
    Unknown,
}

/// What a look needs to know of this daemon: its directory, and the processes that it knows.
#[derive(Clone)]
struct Us {
    dir: PathBuf,
    homes: Vec<Home>,
    pods: Arc<crate::pods::known::Known>,
    known: HashSet<u32>,
}

impl Us {
    /// Is the process in a container that has the shim from this daemon? (What its environment calls the directory is the
    /// container's name for it.)
    fn gave_it_to(&self, pid: u32) -> bool {
        let now = proc::now_ticks();
        self.pods
            .of_process(pid, now)
            .is_some_and(|w| self.pods.is_injected(&w.id))
    }
}

/// Processes that the daemon knows: connected, or found when it started.
fn known(core: &Core) -> HashSet<u32> {
    let connected = core.clients.values().filter(|p| p.control.is_some());
    let recovered = core.recovered.iter().map(|r| r.id.pid);
    connected.map(|p| p.proc_id.pid).chain(recovered).collect()
}

/// Looks at every process that the daemon may inspect.
pub(crate) async fn take(shared: &Shared) -> Census {
    let mut us = {
        let core = shared.borrow();
        let Some(dir) = core.dir.clone() else {
            return Census::default();
        };
        Us {
            homes: core.homes.clone(),
            pods: core.pods.clone(),
            dir: dir.canonicalize().unwrap_or(dir),
            known: known(&core),
        }
    };
    let mut census = Census::default();
    let all = async {
        let mut pids: Vec<u32> = tokio::task::spawn_blocking(pids).await.unwrap_or_default();
        while !pids.is_empty() {
            let of_us = us.known.clone();
            let work = move || {
                let one = |p| (p, tenant(p), of_us.contains(&p));
                Turns::new(pids.into_iter().map(one))
            };
            let turns = tokio::task::spawn_blocking(work).await.unwrap_or_default();
            take_all(Arc::new(us.clone()), turns, &mut census).await;
            // Processes that have disconnected meanwhile are ending, or have executed another program: no
            // connected process confirms their tables any more, so they are looked at again.
            us.known = known(&shared.borrow());
            let left = |c: &Carrier| c.known && !us.known.contains(&c.id.pid);
            pids = census
                .carriers
                .extract_if(.., |c| left(c))
                .map(|c| c.id.pid)
                .collect();
        }
    };
    if tokio::time::timeout(LIMIT, all).await.is_err() {
        tracing::warn!("some processes cannot be looked at: they hang");
    }
    census
}

async fn take_all(us: Arc<Us>, mut turns: Turns, census: &mut Census) {
    let mut looks = JoinSet::new();
    loop {
        while looks.len() < AT_ONCE && UNDER_WAY.load(Relaxed) < HANGING_MAX {
            let Some((pid, tenant)) = turns.next() else {
                break;
            };
            let us = us.clone();
            UNDER_WAY.fetch_add(1, Relaxed);
            let began = Instant::now();
            let helper = tokio::task::spawn_blocking(move || {
                let found = look(pid, &us);
                UNDER_WAY.fetch_sub(1, Relaxed);
                found
            });
            looks.spawn_local(async move {
                let found = tokio::time::timeout(LIMIT_ONE, helper).await;
                let found = found.ok().and_then(Result::ok).unwrap_or(Look::Unknown);
                (pid, found, tenant, began.elapsed())
            });
        }
        let Some(ended) = looks.join_next().await else {
            return;
        };
        let Ok((pid, found, tenant, took)) = ended else {
            continue;
        };
        turns.done(&tenant, took);
        match found {
            Look::Ours(c) => census.carriers.push(*c),
            Look::Stranger { carries } => {
                census.unmanaged.insert(pid, carries);
            }
            Look::Unknown => {}
        }
    }
}

/// All processes but this daemon. Unless it is root, it can read nothing of other users' processes.
fn pids() -> Vec<u32> {
    proc::all().filter(|p| *p != std::process::id()).collect()
}

/// Whose time a look at this process takes.
fn tenant(pid: u32) -> String {
    let cgroups = proc::cgroups(pid).unwrap_or_default();
    tenant::user_of(&cgroups, proc::uid(pid).unwrap_or(0))
}

fn look(pid: u32, us: &Us) -> Look {
    let Some(start) = proc::start_time(pid) else {
        return Look::Unknown;
    };
    let Some(proc) = proc::living(pid) else {
        return Look::Unknown;
    };
    let known = us.known.contains(&pid);
    let maps = match std::fs::read(proc.join("maps")) {
        Ok(m) => String::from_utf8_lossy(&m).into_owned(),
        Err(_) if known => String::new(),
        Err(_) => return Look::Unknown,
    };
    let mapped = maps.contains(environ::LIBRARY);
    if !known && !mapped {
        return Look::Stranger { carries: false };
    }
    let Some(uid) = std::fs::metadata(&proc).ok().map(|m| m.uid()) else {
        return Look::Unknown;
    };
    let mut table = (!known).then(|| adopt::table(&proc, &maps, uid)).flatten();
    let env = environ::environment(&proc).unwrap_or_default();
    let ours = || ours(us, pid, table.as_ref().map(|t| &t.1), &env, uid);
    if !known && !ours().unwrap_or_else(|| inherited(us, pid)) {
        return Look::Stranger { carries: true };
    }
    let Some(sockets) = proc::descriptors(pid) else {
        return Look::Unknown;
    };
    if table.is_none() && !known && !sockets.is_empty() {
        // The process may have made its table and a socket after `maps` was read.
        let maps = std::fs::read(proc.join("maps")).unwrap_or_default();
        table = adopt::table(&proc, &String::from_utf8_lossy(&maps), uid);
    }
    let out = || match environ::off(&env) {
        true => Some(Reason::Config),
        false => proc::is_cramped(pid).then_some(Reason::Cramped),
    };
    let carrier = Carrier {
        id: ProcId { pid, start },
        own_pid: adopt::own_pid(pid).unwrap_or(pid),
        netns: proc::netns(pid).unwrap_or(0),
        comm: proc::comm(pid).unwrap_or_default(),
        mapped,
        out: (!known && table.is_none()).then(out).flatten(),
        known,
        table,
        sockets,
        tenant: tenant(pid),
    };
    // All this was read by pid: check that it is still the same process.
    match proc::start_time(pid) == Some(start) {
        true => Look::Ours(Box::new(carrier)),
        false => Look::Unknown,
    }
}

/// Does this process use our daemon, or would it? `None`: it has the library, but neither a table nor an
/// environment that names a daemon, because it has overwritten its environment.
fn ours(us: &Us, pid: u32, table: Option<&Foreign>, env: &[u8], uid: u32) -> Option<bool> {
    match table.and_then(family::home) {
        Some(said) if said[..2] != [0, 0] => Some(adopt::is_home(&us.homes, said)),
        _ if environ::preloads(env) => {
            Some(environ::leads(env, Path::new(&us.dir), uid) || us.gave_it_to(pid))
        }
        _ => None,
    }
}

/// The same question for a process without an answer of its own: asks its ancestors, which may have none either
/// (sshd executes itself again for each connection, and all of them show titles).
fn inherited(us: &Us, pid: u32) -> bool {
    let mut pid = pid;
    for _ in 0..ANCESTORS_MAX {
        let Some(parent) = proc::parent(pid) else {
            return false;
        };
        if us.known.contains(&parent) {
            return true;
        }
        let Some(proc) = proc::living(parent) else {
            return false;
        };
        let (Ok(maps), Ok(of)) = (std::fs::read(proc.join("maps")), std::fs::metadata(&proc))
        else {
            return false;
        };
        let maps = String::from_utf8_lossy(&maps);
        if !maps.contains(environ::LIBRARY) {
            return false;
        }
        let table = adopt::table(&proc, &maps, of.uid());
        let env = environ::environment(&proc).unwrap_or_default();
        match ours(us, parent, table.as_ref().map(|t| &t.1), &env, of.uid()) {
            Some(yes) => return yes,
            None => pid = parent,
        }
    }
    false
}
