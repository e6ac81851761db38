//! Processes and their descendants.

use nix::errno::Errno;
use nix::sys::signal::{kill, Signal};
use nix::sys::wait::{waitpid, WaitPidFlag};
use nix::unistd::Pid;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use underpass_admin::proc;

/// The parent of each process.
fn parents() -> HashMap<u32, u32> {
    proc::all().filter_map(|p| Some((p, parent(p)?))).collect()
}

fn parent(pid: u32) -> Option<u32> {
    // A zombie that waits for its parent does not count.
    let of = proc::living(pid)?;
    proc::stat(&of, 1)?.parse().ok()
}

/// A process and all its descendants, itself first.
pub fn descendants(pid: u32) -> Vec<u32> {
    let parents = parents();
    let mut all = match parents.contains_key(&pid) {
        true => vec![pid],
        false => return Vec::new(),
    };
    let mut at = 0;
    while let Some(p) = all.get(at).copied() {
        let mut below: Vec<u32> = parents.iter().filter(|q| *q.1 == p).map(|q| *q.0).collect();
        below.retain(|q| !all.contains(q));
        below.sort_unstable();
        all.extend(below);
        at += 1;
    }
    all
}

/// Our own children that are alive.
pub fn children() -> Vec<u32> {
    let me = std::process::id();
    let parents = parents();
    parents
        .iter()
        .filter(|q| *q.1 == me)
        .map(|q| *q.0)
        .collect()
}

/// Tells all descendants to end, and kills those that have not ended after `grace`.
pub fn end_all(grace: Duration) {
    let limit = Instant::now() + grace;
    let mut told = std::collections::HashSet::new();
    loop {
        reap();
        let left: Vec<u32> = descendants(std::process::id()).split_off(1);
        if left.is_empty() {
            return;
        }
        let late = Instant::now() >= limit;
        for p in left {
            let Ok(n) = i32::try_from(p) else { continue };
            if late {
                let _ = kill(Pid::from_raw(n), Signal::SIGKILL);
            } else if told.insert(p) {
                let _ = kill(Pid::from_raw(n), Signal::SIGTERM);
            }
        }
        if Instant::now() >= limit + grace {
            return; // it is inside the kernel, where no signal reaches it
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Reaps processes that have become our children and ended.
fn reap() {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(nix::sys::wait::WaitStatus::StillAlive) | Err(Errno::ECHILD) => return,
            Err(_) => return,
            Ok(_) => {}
        }
    }
}
