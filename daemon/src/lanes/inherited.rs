//! What an ended process leaves to others: a program that connects, forks and exits to become a daemon goes on in
//! its child, with the same connections.
//!
//! When the child uses such a connection, it takes the lane down to TCP, as any second process does. Until then
//! the other end must not consider its peer dead, and the lane must stay. So link groups stay until nobody holds their
//! sockets any more. At first the family's table tells who may have inherited them; from then on `/proc` is read,
//! for all of them together, and for most only to see whether the holder of the last look still has the socket.

use crate::clients::client::Client;
use crate::clients::family::Family;
use crate::clients::ids::ConnRef;
use crate::clients::limits::Cgroup;
use crate::clients::view;
use crate::os::system::System;
use lane::family::flag;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::Notify;
use underpass_admin::proc;

/// Other holders are looked up for at most this many lanes of an ended process. If any of them has other holders,
/// the remaining lanes count as held until the first look.
const ASKED: u32 = 1024;

/// An end whose process has ended, and which other processes may hold.
pub struct Inherited {
    pub who: ConnRef,
    pub at: (u64, u32),
    pub remote: bool,
    family: Arc<Family>,
    /// The inode of its socket.
    pub inode: u64,
    /// The process that has ended. `None`: it was in another pid namespace than the daemon's.
    ended: Option<Ended>,
    /// The holder that the last look found.
    pub holder: Option<u32>,
    /// The last look found no holder; if the next one finds none either, the end is given up.
    pub missed: bool,
}

/// A process that has ended: what tells processes that inherited from it from later ones that got the same pid.
#[derive(Clone, Copy)]
struct Ended {
    pid: u32,
    uid: u32,
    /// In the unit of [`proc::start_time`].
    at: u64,
}

/// Who inherits was started before the process ended, or within this time after it (a program forks twice to become a
/// daemon).
const FORKS_S: u64 = 10;

impl Ended {
    /// May this process, whose descriptors we cannot read, have inherited from the ended one?
    fn may_leave_to(&self, pid: u32) -> bool {
        let late = self.at + FORKS_S * rustix::param::clock_ticks_per_second();
        proc::visible_sockets(pid).is_none()
            && proc::start_time(pid).is_some_and(|t| t <= late)
            && proc::uid(pid) == Some(self.uid)
    }
}

impl Inherited {
    pub fn remote(who: ConnRef, at: (u64, u32), left: &Left<'_>, inode: u64) -> Self {
        Inherited {
            who,
            at,
            remote: true,
            family: left.family.clone(),
            inode,
            ended: left.ended,
            holder: None,
            missed: false,
        }
    }

    pub fn local(who: ConnRef, at: (u64, u32), left: &Left<'_>, inode: u64) -> Self {
        Inherited {
            remote: false,
            ..Inherited::remote(who, at, left, inode)
        }
    }

    /// A copy for a helper thread.
    pub fn copy(&self) -> Self {
        Inherited {
            family: self.family.clone(),
            ..*self
        }
    }

    /// Has a process taken this remote lane back to TCP for good? Then the daemon must no longer keep its copy of the
    /// socket.
    pub fn has_left(&self) -> bool {
        let v = self.family.view(self.who.conn);
        self.remote && v.is_none_or(|v| v.gen != self.who.gen || v.flags & flag::LANE == 0)
    }

    /// A holder according to the table, among the processes whose descriptors we cannot read.
    fn unseen_holder(&self, unseen: &mut HashMap<u32, bool>) -> Option<u32> {
        let ended = self.ended?;
        let v = self.family.view(self.who.conn);
        let holders = v.filter(|v| v.gen == self.who.gen)?.holders;
        let mut others = holders.into_iter().filter(|h| *h != ended.pid);
        others.find(|pid| {
            let hidden = || ended.may_leave_to(*pid);
            *unseen.entry(*pid).or_insert_with(hidden)
        })
    }
}

/// All inherited ends.
#[derive(Default)]
pub struct InheritedEnds {
    pub all: Vec<Inherited>,
    /// Notified when ends were added.
    pub news: Rc<Notify>,
}

/// Counts a lane of an ended process against its cgroup until dropped.
pub(crate) struct Counted(Arc<Cgroup>);

impl Counted {
    /// `None`: at the limit.
    pub(crate) fn new(cgroup: &Arc<Cgroup>) -> Option<Self> {
        cgroup.take_lane().then(|| Counted(cgroup.clone()))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.give_lane();
    }
}

/// What an ended process leaves: entries of its family's table, and lanes that still count against its cgroup.
pub struct Left<'a> {
    pub family: &'a Arc<Family>,
    pub cgroup: &'a Arc<Cgroup>,
    ended: Option<Ended>,
}

/// Who may hold the connections of a process that has just ended.
pub(crate) struct Inheritance<'a> {
    client: &'a Client,
    system: &'a dyn System,
    asked: Cell<u32>,
    any: Cell<bool>,
}

impl<'a> Inheritance<'a> {
    pub(crate) fn of(client: &'a Client, system: &'a dyn System) -> Self {
        Inheritance {
            client,
            system,
            asked: Cell::new(0),
            any: Cell::new(false),
        }
    }

    /// `None`: no other process holds this connection.
    pub(crate) fn left(&self, who: &ConnRef) -> Option<Left<'a>> {
        let held = if self.asked.get() < ASKED {
            self.asked.set(self.asked.get() + 1);
            self.client.others_hold(who.conn, who.gen, self.system)
        } else {
            self.any.get()
        };
        self.any.set(self.any.get() || held);
        let p = self.client;
        held.then(|| Left {
            family: &p.family,
            cgroup: p.cgroup(),
            ended: (p.own_pid == p.proc_id.pid).then(|| Ended {
                pid: p.own_pid,
                uid: p.uid,
                at: proc::now_ticks(),
            }),
        })
    }
}

/// For each end, a process other than this daemon that holds the socket and may still use it. Runs on a helper
/// thread, because it may have to look at every process.
pub(crate) fn look(all: &[Inherited]) -> Vec<Option<u32>> {
    let me = std::process::id();
    let known: HashSet<u32> = all.iter().filter_map(|i| i.holder).collect();
    let mut holders: HashMap<u64, u32> = HashMap::new();
    for pid in known {
        holders.extend(proc::sockets(pid).into_iter().map(|s| (s, pid)));
    }
    // A holder that the last look found by the table, and that is still there, is not searched for again.
    let mut unseen = HashMap::new();
    let mut same = |i: &Inherited| i.holder.is_some() && i.unseen_holder(&mut unseen) == i.holder;
    let lost = |i: &&Inherited| !holders.contains_key(&i.inode);
    let rest = all.iter().filter(lost).filter(|i| !same(i));
    let rest: HashSet<u64> = rest.map(|i| i.inode).collect();
    if !rest.is_empty() {
        for (socket, pids) in view::holders_of(&rest) {
            holders.extend(pids.into_iter().find(|p| *p != me).map(|p| (socket, p)));
        }
    }
    let holder = |i: &Inherited| {
        let seen = holders.get(&i.inode).copied();
        let said = seen.or_else(|| i.unseen_holder(&mut unseen));
        said.filter(|_| !i.has_left())
    };
    all.iter().map(holder).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;
    use std::process::{Command, Stdio};

    /// Sockets of children, one of which ends.
    #[test]
    fn who_holds_a_socket() {
        let table = crate::os::memfd::make("t", lane::family::TABLE_BYTES).unwrap();
        let ident = crate::os::memfd::Ident { dev: 1, ino: 1 };
        let family = Arc::new(Family::new(ident, crate::os::fds::Foreign::new(table)));
        let who = ConnRef {
            client: crate::clients::ids::ClientId(1),
            conn: 0,
            gen: 0,
        };
        let holder = || {
            let (kept, given) = std::os::unix::net::UnixStream::pair().unwrap();
            let inode = rustix::fs::fstat(&given).unwrap().st_ino;
            let child = Command::new("sleep")
                .arg("1000")
                .stdin(Stdio::from(OwnedFd::from(given)))
                .spawn();
            (child.unwrap(), inode, kept)
        };
        let (mut a, mut b) = (holder(), holder());
        let cgroup = crate::clients::limits::for_tests(1, 1);
        let left = Left {
            family: &family,
            cgroup: &cgroup,
            ended: None,
        };
        let inherited = |inode, remote: bool| match remote {
            true => Inherited::remote(who, (0, 0), &left, inode),
            false => Inherited::local(who, (0, 0), &left, inode),
        };
        // The last one has left its lane: its family's table knows no such connection.
        let mut all = [
            inherited(a.1, false),
            inherited(b.1, false),
            inherited(b.1, true),
        ];
        let first = look(&all);
        assert_eq!(first, [Some(a.0.id()), Some(b.0.id()), None]);
        for (i, h) in all.iter_mut().zip(first) {
            i.holder = h;
        }
        b.0.kill().unwrap();
        b.0.wait().unwrap();
        assert_eq!(look(&all), [Some(a.0.id()), None, None]);
        a.0.kill().unwrap();
        a.0.wait().unwrap();
        assert_eq!(look(&all), [None; 3]);
        drop((a.2, b.2));
    }
}
