//! Expedited ends: a shim that registers a connection eagerly (`underpass check` does) wants an answer now, while
//! the program at the other end may make no calls. So that program's shim is looked for, and asked to register,
//! too. If the other end may be on another node, that node's daemon is asked to do the same (see
//! `nodes::peers::pairing::expedited`), and does it here.
//!
//! Pairing does not depend on it: both ends must register, and the proof is the usual one. The search reads tables
//! and `/proc` on the blocking pool, one search at a time for all ends that wait, and then rests ten times as long
//! as it took.

use crate::clients::ids::{ClientId, ConnRef};
use crate::clients::view::{self, Entry, Snapshot};
use crate::nodes::peers::directory::Name;
use crate::nodes::peers::pairing::Asked;
use crate::os::diag::{self, Pair};
use crate::os::translated::{self, Leaving};
use crate::os::{namespaces, tcp};
use lane::num;
use lane::proto::msg::op;
use lane::proto::reason::Reason;
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::rc::Rc;
use tokio::sync::Notify;
use underpass_admin::proc;

/// Most ends that are looked for at once; others wait without a search.
pub(crate) const ENDS_MAX: usize = 256;
/// Most ends that are looked for at once on behalf of one other node.
const REMOTE_MAX: usize = 32;
/// Most ends that are noted as paired beside one question of another node.
const PAIRED_MAX: usize = 256;
/// Most searches for one end (one that is only asked about has been there for long), and how often its other end is asked.
pub(crate) const TRIES: u32 = 20;
pub(crate) const TRIES_ASKED: u32 = 2;
pub(crate) const ASKS: u32 = 3;
/// The searches at which other nodes are asked: more than once, because a message may be lost with its channel.
pub(crate) const TELL: [u32; 3] = [1, 4, 12];
/// The ends that are looked for.
#[derive(Default)]
pub struct Lookup {
    pub ends: Vec<Sought>,
    pub remote: Vec<Remote>,
    /// Notified when there is something to look for.
    pub wake: Rc<Notify>,
}

/// One of our ends, whose other end is looked for.
pub struct Sought {
    pub who: ConnRef,
    pub tries: u32,
    pub asked: u32,
    /// How often other nodes were told.
    pub told: usize,
}

/// An end that another node wants looked for. Asked once: the other node repeats itself.
pub struct Remote {
    pub node: Name,
    pub asked: Asked,
    pub tries: u32,
    /// Ends of this node that were paired with one of that node since it asked, and the inodes of their sockets.
    paired: Vec<(ConnRef, u64)>,
}

impl Remote {
    /// Was what is found here paired since the question came? Then that was the answer, and the end that was looked for waits
    /// no more. (That node asks only about ends that wait, and its messages are in order.)
    pub(crate) fn is_answered(&self, f: &Found) -> bool {
        self.paired.iter().any(|(who, inode)| match f.op {
            op::EAGER_FD => num::low32(*inode) == f.gen,
            _ => (who.client, who.conn, who.gen) == (f.client, f.conn, f.gen),
        })
    }
}

/// Where the other end of an end was found: which shim to ask, and how to name the connection to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub client: ClientId,
    pub conn: u32,
    pub gen: u32,
    pub op: u32,
}

/// What was found for another node: why the connection is on TCP, and which shim to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundRemote {
    pub reason: u32,
    pub ask: Option<Found>,
}

impl Lookup {
    /// Looks for an end that another node asks about.
    pub fn remote(&mut self, node: Name, asked: Asked) {
        if let Some(f) = self.remote.iter_mut().find(|f| f.asked == asked) {
            // (Asked again: of what was paired before, its end waits anew.)
            if f.node == node {
                f.paired.clear();
            }
            return;
        }
        let of_node = self.remote.iter().filter(|f| f.node == node);
        if of_node.count() >= REMOTE_MAX {
            return;
        }
        self.remote.push(Remote {
            node,
            asked,
            tries: 0,
            paired: Vec::new(),
        });
        self.wake.notify_one();
    }

    /// This end, whose socket has this inode, is paired with one of that node.
    pub fn paired(&mut self, node: &Name, who: ConnRef, inode: u64) {
        let of = self.remote.iter_mut().filter(|f| f.node == *node);
        of.filter(|f| f.paired.len() < PAIRED_MAX)
            .for_each(|f| f.paired.push((who, inode)));
    }
}

/// Ends with their addresses (local, peer).
pub(crate) type Ends = Vec<(ConnRef, SocketAddr, SocketAddr)>;

/// What is to be looked for now.
pub struct Task {
    pub ends: Ends,
    pub remote: Vec<Asked>,
    pub families: Vec<Snapshot>,
}

/// What a search has found.
pub struct Results {
    pub ends: Vec<(ConnRef, Found)>,
    pub remote: Vec<(Asked, FoundRemote)>,
}

impl Task {
    /// Runs on a helper thread.
    pub fn run(self) -> Results {
        let all = view::entries(&self.families);
        let rows: Vec<Option<Found>> = self.ends.iter().map(|e| by_row(&e.0, &all)).collect();
        let lost = self.ends.iter().zip(&rows).filter(|(_, row)| row.is_none());
        let mut exact: Vec<Pair> = lost.map(|((_, local, peer), _)| (*peer, *local)).collect();
        let remote = Wanted::all(&self.remote);
        let unseen = remote.iter().filter(|w| hits(w, &all).next().is_none());
        let unseen: Vec<&Wanted> = unseen.collect();
        exact.extend(unseen.iter().map(|w| (w.asked.local, w.asked.peer)));
        exact.extend(unseen.iter().filter_map(|w| w.inside));
        let unnamed = Unnamed::new(&self.families, exact, &unseen);
        let one = |(end, row): (&(ConnRef, SocketAddr, SocketAddr), &Option<Found>)| {
            let found = row.or_else(|| unnamed.find(end.0.client, end.1, end.2));
            Some((end.0, found?))
        };
        Results {
            ends: self.ends.iter().zip(&rows).filter_map(one).collect(),
            remote: look_remote(&remote, &all, &unnamed),
        }
    }
}

/// The other end of an end whose shim has named both.
fn by_row(who: &ConnRef, all: &[Entry]) -> Option<Found> {
    let mine = all
        .iter()
        .find(|e| (e.client, e.conn, e.gen) == (who.client, who.conn, who.gen))?;
    Some(by_entry(&all[mine.other?]))
}

fn by_entry(e: &Entry) -> Found {
    Found {
        client: e.client,
        conn: e.conn,
        gen: e.gen,
        op: op::EAGER,
    }
}

/// A connection that another node asks about.
#[derive(Clone, Copy)]
struct Wanted {
    asked: Asked,
    /// How the program has it, if this node translates its addresses on the way: local and peer.
    inside: Option<Pair>,
}

impl Wanted {
    fn all(asked: &[Asked]) -> Vec<Self> {
        let node = proc::own_netns().unwrap_or(0);
        // (What comes in is here for the end that sends it.)
        let coming = asked.iter().map(|a| Leaving {
            netns: node,
            pid: std::process::id(),
            local: a.peer,
            peer: a.local,
        });
        let inside = translated::look(&coming.collect::<Vec<_>>());
        let one = |(asked, inside): (&Asked, _)| Wanted {
            asked: *asked,
            inside,
        };
        asked.iter().zip(inside).map(one).collect()
    }

    fn is(&self, local: SocketAddr, peer: SocketAddr) -> bool {
        let Wanted { asked, inside } = self;
        let plain = peer == asked.peer && (local == asked.local || !asked.certain);
        plain || *inside == Some((local, peer))
    }
}

/// The rows of that connection.
fn hits<'a>(wanted: &'a Wanted, all: &'a [Entry]) -> impl Iterator<Item = &'a Entry> {
    let hit = |e: &&Entry| e.addresses().is_some_and(|(l, p)| wanted.is(l, p));
    all.iter().filter(hit)
}

fn look_remote(
    wanted: &[Wanted],
    all: &[Entry],
    unnamed: &Unnamed<'_>,
) -> Vec<(Asked, FoundRemote)> {
    let mut found = Vec::new();
    let mut bare: Vec<(Asked, u64)> = Vec::new();
    for w in wanted {
        let a = &w.asked;
        let mut named = hits(w, all);
        match (named.next(), named.next()) {
            (Some(e), None) => {
                let ask = Some(by_entry(e));
                let reason = e.row.reason;
                found.push((*a, FoundRemote { reason, ask }));
            }
            (Some(_), Some(_)) => {} // in two namespaces: nobody knows which
            (None, _) => match unnamed.find_remote(w) {
                Some((_, ask @ Some(_))) => {
                    let reason = Reason::Young.code();
                    found.push((*a, FoundRemote { reason, ask }));
                }
                Some((inode, None)) => bare.push((*a, inode)),
                None => {}
            },
        }
    }
    if !bare.is_empty() {
        let inodes: HashSet<u64> = bare.iter().map(|b| b.1).collect();
        let strange = view::unmanaged(&inodes);
        let reason = Reason::PeerNoShim.code();
        let told = bare.into_iter().filter(|b| strange.contains(&b.1));
        found.extend(told.map(|(a, _)| (a, FoundRemote { reason, ask: None })));
    }
    found
}

/// The search for connections that their shims have not named yet: a socket with these addresses in
/// one of the namespaces of connected processes, and a descriptor of one of these that refers to it.
struct Unnamed<'a> {
    families: &'a [Snapshot],
    /// By namespace: established connections that may be those, with inodes.
    tables: Tables,
}

type Tables = HashMap<u64, HashMap<Pair, u64>>;

impl<'a> Unnamed<'a> {
    /// `exact`: what is looked for; `asked`: those of it that other nodes ask about. For these all namespaces are searched, also
    /// those in which no program has a shim, since that is an answer.
    fn new(families: &'a [Snapshot], exact: Vec<Pair>, asked: &[&Wanted]) -> Self {
        let mut tables = HashMap::new();
        if !exact.is_empty() {
            let holders = families.iter().flat_map(|f| &f.holders);
            let mut all: HashMap<u64, u32> = holders.map(|h| (h.netns, h.pid)).collect();
            if !asked.is_empty() {
                let own = proc::own_netns().map(|own| (own, std::process::id()));
                all.extend(own);
                all.extend(namespaces::others(&all.keys().copied().collect()));
            }
            let whole = asked.iter().any(|w| !w.asked.certain);
            tables.extend(diag::each(&all, |netns, n| {
                let found = match whole {
                    true => n.connections(),
                    false => n.these(&exact),
                };
                let is = |s: &tcp::Socket| s.state == tcp::state::ESTABLISHED;
                let found = found.into_iter().filter(|(_, s)| is(s));
                (netns, found.map(|(pair, s)| (pair, s.inode)).collect())
            }));
        }
        Unnamed { families, tables }
    }

    fn find(&self, seeker: ClientId, local: SocketAddr, peer: SocketAddr) -> Option<Found> {
        let mut holders = self.families.iter().flat_map(|f| &f.holders);
        let home = holders.find(|h| h.client == seeker)?.netns;
        let in_ns = |ns: &u64| self.tables.get(ns)?.get(&(peer, local)).copied();
        // In the end's own namespace an address pair means one socket; in others it must be the only one.
        let inode = in_ns(&home).or_else(|| {
            let mut hits = self.tables.keys().filter_map(in_ns);
            hits.next().filter(|_| hits.next().is_none())
        });
        self.by_inode(inode.filter(|i| *i != 0)?)
    }

    fn by_inode(&self, inode: u64) -> Option<Found> {
        let mut holders = self.families.iter().flat_map(|f| &f.holders);
        holders.find_map(|h| {
            Some(Found {
                client: h.client,
                conn: descriptor_of(h.pid, inode)?,
                gen: num::low32(inode),
                op: op::EAGER_FD,
            })
        })
    }

    /// The socket of the connection that another node asks about, and the shim that holds it.
    fn find_remote(&self, wanted: &Wanted) -> Option<(u64, Option<Found>)> {
        let hit = |((local, peer), inode): (&Pair, &u64)| {
            (wanted.is(*local, *peer) && *inode != 0).then_some(*inode)
        };
        let mut hits = self.tables.values().flatten().filter_map(hit);
        let inode = hits.next().filter(|_| hits.next().is_none())?;
        Some((inode, self.by_inode(inode)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    fn asked(local: SocketAddr, peer: SocketAddr, certain: bool) -> Asked {
        Asked {
            local,
            peer,
            certain,
            register: true,
        }
    }

    /// Pairing answers the questions that came before it, of that node, about that end; one that is asked again is a new one.
    #[test]
    fn a_question_is_answered_by_pairing() {
        let (ip, other) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        let a = asked((ip, 1).into(), (other, 2).into(), true);
        let b = asked((ip, 3).into(), (other, 4).into(), true);
        let mut s = Lookup::default();
        s.remote("a".into(), a);
        s.remote("b".into(), b);
        let end = |conn| ConnRef {
            client: ClientId(1),
            conn,
            gen: 5,
        };
        s.paired(&"a".into(), end(7), 99);
        let found = |op, conn, gen| Found {
            client: ClientId(1),
            conn,
            gen,
            op,
        };
        let answered = |s: &Lookup, f| [0, 1].map(|i| s.remote[i].is_answered(&f));
        assert_eq!(answered(&s, found(op::EAGER, 7, 5)), [true, false]);
        assert_eq!(answered(&s, found(op::EAGER_FD, 30, 99)), [true, false]);
        for other in [
            found(op::EAGER, 8, 5),
            found(op::EAGER, 7, 6),
            found(op::EAGER_FD, 7, 5),
        ] {
            assert_eq!(answered(&s, other), [false, false], "{other:?}");
        }
        s.remote("b".into(), a); // (not its question)
        assert_eq!(answered(&s, found(op::EAGER, 7, 5)), [true, false]);
        s.remote("a".into(), a);
        assert_eq!(answered(&s, found(op::EAGER, 7, 5)), [false, false]);
        for n in 0..1000 {
            s.paired(&"a".into(), end(n), 1);
        }
        assert_eq!(s.remote[0].paired.len(), PAIRED_MAX);
    }

    #[test]
    fn what_a_node_may_have_looked_for_is_bounded() {
        let mut s = Lookup::default();
        let a = |port| {
            let ip = [10, 0, 0, 1];
            asked((ip, port).into(), (ip, 1).into(), true)
        };
        for port in 0..1000 {
            s.remote("a".into(), a(port));
            s.remote("a".into(), a(port)); // repeats itself
        }
        assert_eq!(s.remote.len(), REMOTE_MAX);
        s.remote("b".into(), a(5000));
        assert_eq!(
            s.remote.len(),
            REMOTE_MAX + 1,
            "others are not kept waiting"
        );
    }

    /// No program here has a shim, and this test, which holds the socket, has none either: that is the answer.
    #[test]
    fn a_program_without_a_shim_is_told_of_by_its_socket() {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = l.local_addr().unwrap();
        let client = connect_from(([127, 0, 0, 1], 0).into(), here);
        let (server, _) = l.accept().unwrap();
        let from = client.local_addr().unwrap();
        let look = |wanted: &[Asked]| {
            let exact = wanted.iter().map(|a| (a.local, a.peer)).collect();
            let wanted = Wanted::all(wanted);
            let all: Vec<&Wanted> = wanted.iter().collect();
            look_remote(&wanted, &[], &Unnamed::new(&[], exact, &all))
        };
        let elsewhere = SocketAddr::from(([192, 0, 2, 1], 80));
        let (exact, translated) = (asked(here, from, true), asked(elsewhere, from, false));
        let bare = FoundRemote {
            reason: Reason::PeerNoShim.code(),
            ask: None,
        };
        assert_eq!(look(&[exact]), [(exact, bare)]);
        assert_eq!(look(&[translated]), [(translated, bare)]);
        assert_eq!(look(&[asked(elsewhere, from, true)]), []);
        assert_eq!(look(&[asked(here, elsewhere, true)]), []);
        // Two connections come from that address: the translated one is ambiguous.
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let second = connect_from(from, other.local_addr().unwrap());
        let _accepted = other.accept().unwrap();
        assert_eq!(look(&[exact, translated]), [(exact, bare)]);
        drop((server, client, second));
    }

    /// Several connections may come from one address, to different places.
    fn connect_from(from: SocketAddr, to: SocketAddr) -> TcpStream {
        use rustix::net::{bind, connect, socket, sockopt, AddressFamily, SocketType};
        let s = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        sockopt::set_socket_reuseaddr(&s, true).unwrap();
        bind(&s, &from).unwrap();
        connect(&s, &to).unwrap();
        s.into()
    }
}
