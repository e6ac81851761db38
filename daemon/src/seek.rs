//! Ends in a hurry: a shim that registers a connection eagerly (`underpass check` does) wants an
//! answer now, and the other end may be idle. Its shim is looked for and asked to register, too.
//!
//! Only asked: whether both are one connection is decided as ever, when both have registered. The
//! search reads tables and `/proc` on the blocking pool, one search at a time for all who wait, and
//! rests ten times as long as it took.

use crate::core::Shared;
use crate::pairing::ConnRef;
use crate::party::PartyId;
use crate::view::{self, Snapshot};
use link::msg::op;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Most ends that are looked for at once; more wait without.
const MOST: usize = 256;
/// Searches for one end; and how often its other end is asked.
const TRIES: u32 = 20;
const ASKS: u32 = 3;
/// Before the first search: two ends in a hurry usually find each other.
const FIRST: Duration = Duration::from_millis(50);
/// Longest rest between two searches.
const REST: Duration = Duration::from_secs(5);

/// Who is looked for.
#[derive(Default)]
pub struct Seek {
    ends: Vec<Sought>,
    running: bool,
}

struct Sought {
    who: ConnRef,
    tries: u32,
    asked: u32,
}

/// Where the other end of one was found: which shim to ask, and how to name the connection to it.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    party: PartyId,
    conn: u32,
    gen: u32,
    op: u32,
}

/// Looks for the other end of a connection that has been registered eagerly, if it still waits.
pub fn start(shared: &Shared, who: ConnRef) {
    let mut core = shared.borrow_mut();
    if core.waiting.end(&who).is_none() || core.seek.ends.len() >= MOST {
        return;
    }
    core.seek.ends.retain(|s| s.who != who);
    core.seek.ends.push(Sought {
        who,
        tries: 0,
        asked: 0,
    });
    if !std::mem::replace(&mut core.seek.running, true) {
        tokio::task::spawn_local(run(shared.clone()));
    }
}

async fn run(shared: Shared) {
    let mut rest = FIRST;
    loop {
        tokio::time::sleep(rest).await;
        let Some((ends, families)) = task(&shared) else {
            return;
        };
        let began = Instant::now();
        let work = move || {
            let found = look(&ends, &families);
            (ends, found)
        };
        let done = tokio::task::spawn_blocking(work).await;
        rest = (began.elapsed() * 10).clamp(FIRST, REST);
        let Ok((ends, found)) = done else { continue };
        let mut core = shared.borrow_mut();
        for ((who, ..), found) in ends.iter().zip(found) {
            let Some(f) = found else { continue };
            if core.command(f.party, f.conn, f.gen, f.op) {
                let s = core.seek.ends.iter_mut().find(|s| s.who == *who);
                s.into_iter().for_each(|s| s.asked += 1);
            }
        }
    }
}

/// Ends with their addresses (local, peer).
type Ends = Vec<(ConnRef, SocketAddr, SocketAddr)>;

/// What is to be looked for now; `None`: nothing any more.
fn task(shared: &Shared) -> Option<(Ends, Vec<Snapshot>)> {
    let mut core = shared.borrow_mut();
    let core = &mut *core;
    let mut ends = Vec::new();
    core.seek.ends.retain_mut(|s| {
        s.tries += 1;
        let end = core
            .waiting
            .end(&s.who)
            .filter(|_| s.tries <= TRIES && s.asked < ASKS);
        ends.extend(end.map(|e| (s.who, e.local, e.peer)));
        end.is_some()
    });
    if ends.is_empty() {
        core.seek.running = false;
        return None;
    }
    Some((ends, core.snapshot()))
}

fn look(ends: &Ends, families: &[Snapshot]) -> Vec<Option<Found>> {
    let all = view::entries(families);
    let row = |who: &ConnRef| {
        let mine = all
            .iter()
            .find(|e| (e.party, e.conn, e.gen) == (who.party, who.conn, who.gen))?;
        let e = &all[mine.other?];
        Some(Found {
            party: e.party,
            conn: e.conn,
            gen: e.gen,
            op: op::EAGER,
        })
    };
    let mut found: Vec<_> = ends.iter().map(|(who, ..)| row(who)).collect();
    if found.iter().any(Option::is_none) {
        let mut unnamed = Unnamed::new(families);
        for (f, (who, local, peer)) in found.iter_mut().zip(ends) {
            if f.is_none() {
                *f = unnamed.find(who.party, *local, *peer);
            }
        }
    }
    found
}

/// The search for connections that their shims have not named yet: a socket with these addresses in
/// one of the namespaces of connected processes, and a descriptor of one of these that refers to it.
struct Unnamed<'a> {
    families: &'a [Snapshot],
    /// By namespace: its connections, with inodes.
    tables: HashMap<u64, HashMap<(SocketAddr, SocketAddr), u64>>,
}

impl<'a> Unnamed<'a> {
    fn new(families: &'a [Snapshot]) -> Self {
        let mut tables = HashMap::new();
        for h in families.iter().flat_map(|f| &f.holders) {
            tables
                .entry(h.netns)
                .or_insert_with(|| view::tcp_table(h.pid));
        }
        Unnamed { families, tables }
    }

    fn find(&mut self, seeker: PartyId, local: SocketAddr, peer: SocketAddr) -> Option<Found> {
        let holders = || self.families.iter().flat_map(|f| &f.holders);
        let home = holders().find(|h| h.party == seeker)?.netns;
        let in_ns = |ns: &u64| self.tables.get(ns)?.get(&(peer, local)).copied();
        // At home an address pair means one socket; elsewhere only if there is no doubt.
        let inode = in_ns(&home).or_else(|| {
            let mut hits = self.tables.keys().filter_map(in_ns);
            hits.next().filter(|_| hits.next().is_none())
        });
        let inode = inode.filter(|i| *i != 0)?;
        holders().find_map(|h| {
            Some(Found {
                party: h.party,
                conn: descriptor_of(h.pid, inode)?,
                gen: inode as u32,
                op: op::EAGER_FD,
            })
        })
    }
}

/// A descriptor of this process that refers to this socket.
fn descriptor_of(pid: u32, inode: u64) -> Option<u32> {
    let name = format!("socket:[{inode}]");
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let mut own =
        fds.filter(|e| std::fs::read_link(e.path()).is_ok_and(|l| l.as_os_str() == name.as_str()));
    own.next()?.file_name().to_str()?.parse().ok()
}
