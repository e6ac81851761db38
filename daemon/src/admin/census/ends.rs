//! Who is at the other end of each row, as far as this node can tell.

use super::kernel::{Kernel, Lost};
use crate::clients::view::{self, Entry};
use crate::os::tcp;
use lane::proto::reason::Reason;
use std::collections::{HashMap, HashSet};
use underpass_admin::proc;

/// Rows whose other ends are still to be named.
#[derive(Default)]
pub(crate) struct Unnamed {
    pub all: Vec<Entry>,
    pub kernel: Kernel,
    /// Processes that have rows.
    pub ours: HashSet<u32>,
    /// Other processes, and whether they have the library mapped.
    pub unmanaged: HashMap<u32, bool>,
    /// There are no other nodes, whose daemons would report their ends themselves.
    pub alone: bool,
    /// Ends to look for in namespaces that have no rows: those of other nodes are to be taken out.
    pub lost: Vec<Lost>,
}

impl Unnamed {
    /// Looks for ends in other namespaces, and names all.
    pub(crate) fn named(mut self) -> Vec<Entry> {
        if !self.lost.is_empty() {
            self.kernel.look_elsewhere(&self.lost);
        }
        let (kernel, ours) = (&self.kernel, &self.ours);
        name(&mut self.all, kernel, ours, &self.unmanaged, self.alone);
        self.all
    }
}

/// Rows whose other ends are in none of the namespaces that were read.
pub(crate) fn lost(all: &[Entry], kernel: &Kernel) -> Vec<Lost> {
    let open = all.iter().filter(|e| e.other.is_none() && !e.row.remote);
    let lost = open.filter_map(|e| {
        let (local, peer) = e.addresses()?;
        let known = kernel.other_end(e.row.netns, local, peer).is_some();
        (!known).then(|| Lost {
            who: (e.client, e.conn, e.gen),
            netns: e.row.netns,
            local,
            peer,
            is_client: e.row.role == "client",
        })
    });
    lost.collect()
}

/// Enters the other end of each connection, and why it is on TCP, from what is visible now. Where nothing is
/// visible, the reason that its shim was told earlier stays.
fn name(
    all: &mut [Entry],
    kernel: &Kernel,
    ours: &HashSet<u32>,
    unmanaged: &HashMap<u32, bool>,
    alone: bool,
) {
    let mut open: Vec<(usize, u64, bool)> = Vec::new();
    for i in 0..all.len() {
        if let Some(o) = all[i].other {
            let o = &all[o].row;
            let (pid, comm, netns) = (o.pid, o.comm.clone(), o.netns);
            let e = &mut all[i];
            (e.row.peer_pid, e.row.peer_comm, e.peer_netns) = (pid, comm, netns);
            e.peer_here = true;
            continue;
        }
        let e = &mut all[i];
        // A remote lane has its other end on another node.
        let Some((local, peer)) = e.addresses().filter(|_| !e.row.remote) else {
            continue;
        };
        match kernel.other_end(e.row.netns, local, peer) {
            Some((netns, s)) if s.inode != 0 => {
                e.peer_netns = *netns;
                // (Of another node's programs that node's daemon tells.)
                open.push((i, s.inode, alone || kernel.has_rows(*netns)));
            }
            Some((_, s)) if s.state == tcp::state::ESTABLISHED => {
                e.row.peer_reason = Reason::NotAccepted.code();
                e.peer_here = true;
            }
            // Closed by its program; the kernel is still ending the connection.
            Some(_) => {}
            None => {
                let own = kernel.socket(e.row.inode);
                if alone
                    && e.row.peer_reason == 0
                    && e.row.up == "none"
                    && own.is_some_and(|s| s.state == tcp::state::ESTABLISHED)
                {
                    e.row.peer_reason = Reason::Unreachable.code();
                }
            }
        }
    }
    if !open.is_empty() {
        name_unmanaged(all, &open, ours, unmanaged);
    }
    for e in all {
        view::set_mode(&mut e.row);
    }
}

/// Handles rows whose other end is a socket of this node without a row of its own. (Index of the row, the socket's inode, and
/// whether it tells something if its program has the library, and another daemon.)
fn name_unmanaged(
    all: &mut [Entry],
    open: &[(usize, u64, bool)],
    ours: &HashSet<u32>,
    unmanaged: &HashMap<u32, bool>,
) {
    let holders = view::holders_of(&open.iter().map(|o| o.1).collect());
    let reasons = all.iter().map(|e| (e.row.inode, e.row.reason));
    let reasons: HashMap<u64, u32> = reasons.filter(|r| r.1 != 0).collect();
    for (i, inode, tells) in open {
        let Some(pids) = holders.get(inode) else {
            continue; // a process that we may not look at
        };
        let e = &mut all[*i];
        let row = &mut e.row;
        if let Some(pid) = pids.first() {
            row.peer_pid = *pid;
            row.peer_comm = proc::comm(*pid).unwrap_or_default();
        }
        if pids.iter().any(|p| ours.contains(p)) {
            // Its address was translated, or the socket is newer than our look at its process.
            e.peer_here = true;
            row.peer_reason = reasons.get(inode).copied().unwrap_or(row.peer_reason);
            continue;
        }
        let bare = |p: &u32| unmanaged.get(p) == Some(&false);
        let reason = match pids.iter().all(bare) {
            true => Reason::PeerNoShim,
            // The library is loaded, but uses another daemon.
            false if *tells && pids.iter().any(|p| unmanaged.get(p) == Some(&true)) => {
                Reason::Unreachable
            }
            false => continue,
        };
        row.peer_reason = reason.code();
        e.peer_here = reason == Reason::PeerNoShim;
    }
}
