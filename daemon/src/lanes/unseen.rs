//! Closes that no hook sees. A process may close a connection by an inlined system call. The kernel ends the connection
//! with its last descriptor; of a lane to another node, the daemon has one. So it looks at lanes on which nothing
//! happens: does a process still hold the socket? For most of them this takes reading one symbolic link in `/proc`.

use crate::clients::family::Family;
use crate::clients::ids::ConnRef;
use crate::clients::view;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use underpass_admin::proc;

/// An idle end on a lane to another node.
pub struct Idle {
    pub who: ConnRef,
    pub at: (u64, u32),
    pub inode: u64,
}

/// An idle end, and what a helper needs to look for its holders.
pub struct Held {
    pub idle: Idle,
    pub pid: u32,
    pub family: Arc<Family>,
}

/// Ends whose socket no process is seen to hold. (A process whose descriptors cannot be read may hold it.) Runs on
/// a helper thread.
pub(crate) fn closed(all: Vec<Held>) -> Vec<Idle> {
    let mut of: HashMap<u32, Option<HashSet<u64>>> = HashMap::new();
    let mut held = |h: &Held| {
        let fd = h.family.view(h.idle.who.conn).map_or(0, |v| v.fd);
        let hint = || proc::socket_at(h.pid, fd.checked_sub(1)?);
        if hint() == Some(h.idle.inode) {
            return true;
        }
        // No sockets at all: the descriptors cannot be read, or the process is ending. Then it counts as a holder.
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
