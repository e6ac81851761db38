//! Connections that came to their process from another one, by exec or in a message: does another process still
//! hold them? No shim can tell, because the other process need not have one. The kernel can: `/proc` is read for
//! all ends that ask at the same time, and then the search rests for much longer than it took.
//!
//! The question is whether the process is the only holder, with no more descriptors than its shim counts. Not
//! every process may be inspected; then it is sufficient that the process from which the connection came may be,
//! or is gone. (A descriptor in the queue of a Unix socket is visible nowhere: see docs/limits.md.)

use crate::clients::ids::{ClientId, ConnRef};
use crate::pairing::socket::End;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use tokio::sync::Notify;
use underpass_admin::proc;

/// Where a connection came from, as its shim says.
#[derive(Clone, Copy, Debug)]
pub struct Came {
    /// Pid of the source, in the shim's pid namespace. 0: unknown.
    pub from: u32,
    /// How many descriptors of it the process has, including those of the shim. (Some may be closed by now.)
    pub copies: u32,
}

/// An end that another process may hold, too.
pub struct Asked {
    pub who: ConnRef,
    pub end: End,
    pub came: Came,
    pub eager: bool,
    pub miscounted: bool,
    pub pid: u32,
    /// The shim is in the daemon's pid namespace, so its pids can be used.
    pub known_pids: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Alone,
    /// That process has a descriptor that the shim does not count.
    Held(u32),
    /// It cannot be seen who else may hold one.
    Unseen,
}

#[derive(Default)]
pub struct Holders {
    /// One for each table entry: registering the same entry again replaces the question.
    pub asked: HashMap<(ClientId, u32), Asked>,
    /// By inode, the other process that was seen to hold the socket; it is looked at first the next time.
    pub others: HashMap<u64, u32>,
    /// Notified when ends were added.
    pub news: Rc<Notify>,
}

/// Looks for the holders of all these ends. Runs on a helper thread.
pub(crate) fn look(all: Vec<Asked>, others: &HashMap<u64, u32>) -> Vec<(Asked, Verdict)> {
    let mut seen = Seen {
        inodes: all.iter().map(|a| a.end.inode).collect(),
        ..Seen::default()
    };
    let early: Vec<Option<Verdict>> = all.iter().map(|a| seen.at_once(a, others)).collect();
    let rest: HashSet<u64> = all
        .iter()
        .zip(&early)
        .filter_map(|(a, v)| v.is_none().then_some(a.end.inode))
        .collect();
    if !rest.is_empty() {
        seen.everybody(&rest);
    }
    let verdict = |(a, v): (Asked, Option<Verdict>)| {
        let v = v.unwrap_or_else(|| seen.judge(&a));
        (a, v)
    };
    all.into_iter().zip(early).map(verdict).collect()
}

/// What was seen in `/proc`.
#[derive(Default)]
struct Seen {
    /// Sockets in question. Others are not stored, because a process may have a million of them.
    inodes: HashSet<u64>,
    /// Per process, the number of its descriptors of each of these. `None`: it may not be inspected.
    of: HashMap<u32, Option<HashMap<u64, u32>>>,
    holders: HashMap<u64, Vec<u32>>,
    /// Processes that may not be inspected.
    blind: HashSet<u32>,
}

impl Seen {
    fn copies(&mut self, pid: u32, inode: u64) -> Option<u32> {
        let inodes = &self.inodes;
        let all = self.of.entry(pid).or_insert_with(|| {
            let mut all = HashMap::new();
            let sockets = proc::visible_sockets(pid)?.into_iter();
            for s in sockets.filter(|s| inodes.contains(s)) {
                *all.entry(s).or_insert(0) += 1;
            }
            Some(all)
        });
        Some(all.as_ref()?.get(&inode).copied().unwrap_or(0))
    }

    /// The verdict, if it can be given without looking at all processes.
    fn at_once(&mut self, a: &Asked, others: &HashMap<u64, u32>) -> Option<Verdict> {
        let inode = a.end.inode;
        match self.copies(a.pid, inode) {
            None => return Some(Verdict::Unseen),
            Some(n) if n > a.came.copies => return Some(Verdict::Held(a.pid)),
            Some(_) => {}
        }
        let other = *others.get(&inode).filter(|p| **p != a.pid)?;
        let holds = self.copies(other, inode).is_some_and(|n| n > 0);
        holds.then_some(Verdict::Held(other))
    }

    fn everybody(&mut self, inodes: &HashSet<u64>) {
        let me = std::process::id();
        for pid in proc::all().filter(|p| *p != me) {
            match proc::visible_sockets(pid) {
                None => {
                    self.blind.insert(pid);
                }
                Some(all) => {
                    for s in all.into_iter().filter(|s| inodes.contains(s)) {
                        self.holders.entry(s).or_default().push(pid);
                    }
                }
            }
        }
    }

    fn judge(&self, a: &Asked) -> Verdict {
        let mut all = self.holders.get(&a.end.inode).into_iter().flatten();
        if let Some(other) = all.find(|p| **p != a.pid) {
            return Verdict::Held(*other);
        }
        // (If the connection came over a socket pair that the process itself made, the real sender is unknown.)
        let said = a.known_pids && a.came.from != 0 && a.came.from != a.pid;
        let known = said && !self.blind.contains(&a.came.from);
        match known && !proc::is_hidden(a.came.from)
            || self.blind.is_empty() && proc::in_first_pid_namespace()
        {
            true => Verdict::Alone,
            false => Verdict::Unseen,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairing::socket::Counts;
    use std::os::fd::OwnedFd;
    use std::process::{Command, Stdio};
    use std::time::Instant;

    fn asked(pid: u32, inode: u64, came: Came) -> Asked {
        let (t, any) = (Instant::now(), ([127, 0, 0, 1], 1).into());
        Asked {
            who: ConnRef {
                client: ClientId(1),
                conn: 0,
                gen: 0,
            },
            end: End {
                local: any,
                peer: any,
                cookie: 1,
                netns_cookie: 1,
                inode,
                record: None,
                client: None,
                guess: None,
                counts: Counts {
                    from: t,
                    until: t,
                    sent: 0,
                    acked: 0,
                    received: 0,
                },
            },
            came,
            eager: false,
            miscounted: false,
            pid,
            known_pids: true,
        }
    }

    fn verdict(a: Asked, others: &HashMap<u64, u32>) -> Verdict {
        look(vec![a], others)[0].1
    }

    #[test]
    fn who_else_holds_it() {
        let (kept, given) = std::os::unix::net::UnixStream::pair().unwrap();
        let inode = rustix::fs::fstat(&given).unwrap().st_ino;
        let child = |given: &std::os::unix::net::UnixStream| {
            Command::new("sleep")
                .arg("1000")
                .stdin(Stdio::from(OwnedFd::from(given.try_clone().unwrap())))
                .spawn()
                .unwrap()
        };
        let (mut a, mut b) = (child(&given), child(&given));
        drop(given); // (this process's own copies do not count: it plays the daemon)
        let came = |copies| Came {
            from: std::process::id(),
            copies,
        };
        let none = HashMap::new();
        let ask = |copies| asked(a.id(), inode, came(copies));
        assert_eq!(verdict(ask(1), &none), Verdict::Held(b.id()));
        let known = HashMap::from([(inode, b.id())]);
        assert_eq!(verdict(ask(1), &known), Verdict::Held(b.id()));
        assert_eq!(
            verdict(ask(0), &none),
            Verdict::Held(a.id()),
            "one that its shim does not have"
        );
        b.kill().unwrap();
        b.wait().unwrap();
        assert_eq!(verdict(ask(1), &known), Verdict::Alone);
        assert_eq!(
            verdict(ask(2), &none),
            Verdict::Alone,
            "one is closed by now"
        );
        a.kill().unwrap();
        a.wait().unwrap();
        drop(kept);
    }

    #[test]
    fn who_may_not_be_seen() {
        let mut seen = Seen::default();
        let me = std::process::id();
        let from = |from| asked(7, 1, Came { from, copies: 1 });
        seen.blind.insert(5);
        assert_eq!(seen.judge(&from(5)), Verdict::Unseen);
        assert_eq!(seen.judge(&from(0)), Verdict::Unseen);
        assert_eq!(seen.judge(&from(7)), Verdict::Unseen, "from itself");
        assert_eq!(seen.judge(&from(me)), Verdict::Alone);
        let elsewhere = Asked {
            known_pids: false,
            ..from(me)
        };
        assert_eq!(seen.judge(&elsewhere), Verdict::Unseen);
        seen.holders.insert(1, vec![7, 9]);
        assert_eq!(seen.judge(&from(me)), Verdict::Held(9));
    }
}
