//! Closes that no hook sees. A process may close a connection by an inlined system call; the kernel ends it with
//! its last descriptor, of which we have one where the lane leads to another node. So lanes on which nothing happens
//! are looked at: does a process still hold the socket? For most of them that is one link in `/proc` to be read.

use crate::family::Family;
use crate::ids::ConnRef;
use crate::view;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use underpass_admin::proc;

/// An idle end on a lane to another node.
pub struct Idle {
    pub who: ConnRef,
    pub at: (u64, u32),
    pub inode: u64,
}

/// The same for a helper.
pub struct Held {
    pub idle: Idle,
    pub pid: u32,
    pub family: Arc<Family>,
}

/// Those that no process holds, as far as can be seen: one whose descriptors cannot be read may. For a helper.
pub fn closed(all: Vec<Held>) -> Vec<Idle> {
    let mut of: HashMap<u32, Option<HashSet<u64>>> = HashMap::new();
    let mut held = |h: &Held| {
        let fd = h.family.view(h.idle.who.conn).map_or(0, |v| v.fd);
        let hint = || proc::socket_at(h.pid, fd.checked_sub(1)?);
        if hint() == Some(h.idle.inode) {
            return true;
        }
        // (None at all are those of a process whose first thread has ended before the others.)
        let sockets = of.entry(h.pid).or_insert_with(|| {
            let all = proc::sockets(h.pid);
            (!all.is_empty()).then(|| all.into_iter().collect())
        });
        sockets.as_ref().is_none_or(|s| s.contains(&h.idle.inode))
    };
    let gone: Vec<Idle> = all
        .into_iter()
        .filter_map(|h| (!held(&h)).then_some(h.idle))
        .collect();
    if gone.is_empty() {
        return gone;
    }
    let me = std::process::id();
    let elsewhere = view::holders_of(&gone.iter().map(|i| i.inode).collect());
    let others = |i: &Idle| {
        elsewhere
            .get(&i.inode)
            .is_some_and(|all| all.iter().any(|p| *p != me))
    };
    gone.into_iter().filter(|i| !others(i)).collect()
}
