//! What a process that has ended leaves to others: a program that connects, forks and exits to become
//! a daemon goes on in its child, with the same connections.
//!
//! The child takes such a lane down to TCP when it uses the connection, as any second process does; for
//! that the other end must not take it for dead, nor the lane go. So links stay until nobody
//! holds their sockets any more. The family's table tells who may have inherited them; from then on the kernel
//! is asked (`/proc`), for all together, and for most of them only whether the process that held the
//! socket the last time still does.

use crate::family::Family;
use crate::ids::ConnRef;
use crate::limits::Group;
use crate::party::Party;
use crate::view;
use link::family::flag;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::Notify;
use underpass_admin::proc;

/// So many lanes of a dead process are asked for their holders at once; if any has others, the rest is
/// taken for like it until the first look.
const ASKED: u32 = 1024;

/// An end whose process has ended, and which others may hold.
pub struct Inherited {
    pub who: ConnRef,
    pub at: (u64, u32),
    pub far: bool,
    family: Arc<Family>,
    inode: u64,
    /// The process that has ended. `None`: in another pid namespace than ours.
    ended: Option<Ended>,
    /// Who held it at the last look.
    pub holder: Option<u32>,
    /// Nobody did: once more, and nobody does.
    pub missed: bool,
}

/// A process that has ended, to tell those who have inherited from it from those that have got their numbers.
#[derive(Clone, Copy)]
struct Ended {
    pid: u32,
    uid: u32,
    /// In the unit of [`proc::start_time`].
    at: u64,
}

/// InheritedEnds begin before that one ends, or in the seconds after it (who becomes a daemon forks twice).
const FORKS_S: u64 = 10;

impl Ended {
    /// May this process, whose descriptors we may not see, have inherited from it?
    fn may_leave_to(&self, pid: u32) -> bool {
        let late = self.at + FORKS_S * rustix::param::clock_ticks_per_second();
        proc::visible_sockets(pid).is_none()
            && proc::start_time(pid).is_some_and(|t| t <= late)
            && proc::uid(pid) == Some(self.uid)
    }
}

impl Inherited {
    pub fn far(who: ConnRef, at: (u64, u32), left: &Left<'_>, inode: u64) -> Self {
        Inherited {
            who,
            at,
            far: true,
            family: left.family.clone(),
            inode,
            ended: left.ended,
            holder: None,
            missed: false,
        }
    }

    pub fn near(who: ConnRef, at: (u64, u32), left: &Left<'_>, inode: u64) -> Self {
        Inherited {
            far: false,
            ..Inherited::far(who, at, left, inode)
        }
    }

    /// The same for a helper.
    pub fn copy(&self) -> Self {
        Inherited {
            family: self.family.clone(),
            ..*self
        }
    }

    /// A process has taken a far lane back to TCP for good: our copy of the socket is in its way.
    fn has_left(&self) -> bool {
        let v = self.family.view(self.who.conn);
        self.far && v.is_none_or(|v| v.gen != self.who.gen || v.flags & flag::LANE == 0)
    }

    /// Who holds it, of those whose descriptors we may not see: as the table says.
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

/// All of them.
#[derive(Default)]
pub struct InheritedEnds {
    pub all: Vec<Inherited>,
    /// There are more.
    pub news: Rc<Notify>,
}

/// Counts a lane of the dead for its cgroup until dropped.
pub struct Counted(Arc<Group>);

impl Counted {
    /// `None`: at the limit.
    pub fn new(group: &Arc<Group>) -> Option<Self> {
        group.take_lane().then(|| Counted(group.clone()))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.give_lane();
    }
}

/// What a process that has ended has left: entries of a table, and lanes that are counted.
pub struct Left<'a> {
    pub family: &'a Arc<Family>,
    pub group: &'a Arc<Group>,
    ended: Option<Ended>,
}

/// Who may hold the connections of a process that has just ended.
pub struct Inheritance<'a> {
    party: &'a Party,
    asked: Cell<u32>,
    any: Cell<bool>,
}

impl<'a> Inheritance<'a> {
    pub fn of(party: &'a Party) -> Self {
        Inheritance {
            party,
            asked: Cell::new(0),
            any: Cell::new(false),
        }
    }

    /// `None`: no other process holds this connection.
    pub fn left(&self, who: &ConnRef) -> Option<Left<'a>> {
        let held = if self.asked.get() < ASKED {
            self.asked.set(self.asked.get() + 1);
            self.party.others_hold(who.conn, who.gen)
        } else {
            self.any.get()
        };
        self.any.set(self.any.get() || held);
        let p = self.party;
        held.then(|| Left {
            family: &p.family,
            group: p.group(),
            ended: (p.own_pid == p.proc_id.pid).then(|| Ended {
                pid: p.own_pid,
                uid: p.uid,
                at: proc::now_ticks(),
            }),
        })
    }
}

/// A process other than this one that holds each of them and may still use it. For a helper: it may look
/// at every process.
pub fn look(all: &[Inherited]) -> Vec<Option<u32>> {
    let me = std::process::id();
    let known: HashSet<u32> = all.iter().filter_map(|i| i.holder).collect();
    let mut holders: HashMap<u64, u32> = HashMap::new();
    for pid in known {
        holders.extend(proc::sockets(pid).into_iter().map(|s| (s, pid)));
    }
    // (Who was found by the table the last time, and still stands there, is not searched for again.)
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
        let table = crate::memfd::make("t", link::family::TABLE_BYTES).unwrap();
        let ident = crate::memfd::Ident { dev: 1, ino: 1 };
        let family = Arc::new(Family::new(ident, crate::fds::Foreign::new(table)));
        let who = ConnRef {
            party: crate::ids::PartyId(1),
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
        let group = crate::limits::for_tests(1, 1);
        let left = Left {
            family: &family,
            group: &group,
            ended: None,
        };
        let inherited = |inode, far: bool| match far {
            true => Inherited::far(who, (0, 0), &left, inode),
            false => Inherited::near(who, (0, 0), &left, inode),
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
