//! Two or three nodes on a simulated wire.

mod expedited;
mod failing;
mod finding;
mod translated;

use super::super::directory::{Directory, FileDirectory, Listed};
use super::*;
use crate::nodes::peers::digest::Key;
use crate::nodes::peers::msg::Claim;
use crate::pairing::proof::{Record, Role};
use crate::pairing::socket::Counts;
use proptest::prelude::*;
use std::collections::{HashSet, VecDeque};
use std::time::Instant;

const S: u64 = 1_000_000_000;

struct Node {
    name: Name,
    p: Pairing,
    paired: Vec<Paired>,
    asked: Vec<(Name, Asked)>,
    dead: HashSet<ConnRef>,
}

/// Nodes with the addresses 10.N.0.0/16, where N is 1 for `a`, 2 for `b`, 3 for `c`.
struct Net {
    nodes: Vec<Node>,
    /// In flight, per direction.
    wire: HashMap<(usize, usize), VecDeque<Msg>>,
    now: u64,
    up: HashSet<(usize, usize)>,
}

const NAMES: [&str; 3] = ["a", "b", "c"];

fn pairing(own: usize, n: usize) -> Pairing {
    let d = directory(own, n);
    let names: Vec<Name> = d.peers().into_iter().map(|p| p.name).collect();
    Pairing::new(Rc::new(d), names.into_iter(), Reason::NoDevice.code())
}

fn directory(own: usize, n: usize) -> FileDirectory {
    let nets: Vec<Vec<String>> = (1..=n).map(|i| vec![format!("10.{i}.0.0/16")]).collect();
    let listed: Vec<Listed<'_>> = (0..n)
        .filter(|i| *i != own)
        .map(|i| Listed {
            name: NAMES[i],
            control: "192.0.2.1",
            addresses: &nets[i],
        })
        .collect();
    FileDirectory::new(NAMES[own], &nets[own], &listed).unwrap()
}

impl Net {
    fn new(n: usize) -> Net {
        let node = |i: usize| Node {
            name: NAMES[i].into(),
            p: pairing(i, n),
            paired: Vec::new(),
            asked: Vec::new(),
            dead: HashSet::new(),
        };
        let mut net = Net {
            nodes: (0..n).map(node).collect(),
            wire: HashMap::new(),
            now: 1000 * S,
            up: HashSet::new(),
        };
        for i in 0..n {
            for j in i + 1..n {
                net.join(i, j);
            }
        }
        net
    }

    /// Makes a step of the pairing of node `i`, and carries out the results.
    fn at<T>(
        &mut self,
        i: usize,
        f: impl FnOnce(&mut Pairing, u64, Alive, &mut Vec<Out>) -> T,
    ) -> T {
        let mut out = Vec::new();
        let n = &mut self.nodes[i];
        let dead = &n.dead;
        let r = f(&mut n.p, self.now, &|w| !dead.contains(w), &mut out);
        for o in out {
            match o {
                Out::Paired(p) => self.nodes[i].paired.push(p),
                Out::Expedited(n, a) => self.nodes[i].asked.push((n, a)),
                Out::Send(to, m) => {
                    let j = NAMES.iter().position(|n| *n == &*to).unwrap();
                    if self.up.contains(&(i.min(j), i.max(j))) {
                        self.wire.entry((i, j)).or_default().push_back(m);
                    }
                }
            }
        }
        r
    }

    fn join(&mut self, i: usize, j: usize) {
        self.up.insert((i, j));
        let key = Key::new(&[(i * 3 + j) as u8; 32]);
        for (x, y) in [(i, j), (j, i)] {
            let (name, key) = (self.nodes[y].name.clone(), key.clone());
            self.at(x, |p, now, alive, out| {
                p.channel_up(&name, key, LOOKUPS_MAX, now, alive, out)
            });
        }
    }

    fn part(&mut self, i: usize, j: usize) {
        self.up.remove(&(i, j));
        for (x, y) in [(i, j), (j, i)] {
            self.wire.remove(&(x, y));
            let name = self.nodes[y].name.clone();
            self.at(x, |p, now, alive, out| {
                p.channel_down(&name, Reason::PeerDaemon, now, alive, out)
            });
        }
    }

    /// Delivers one message, if there is one.
    fn deliver(&mut self, i: usize, j: usize) -> bool {
        let Some(m) = self.wire.get_mut(&(i, j)).and_then(VecDeque::pop_front) else {
            return false;
        };
        let from = self.nodes[i].name.clone();
        self.at(j, |p, now, alive, out| p.message(&from, m, now, alive, out))
            .unwrap();
        true
    }

    fn settle(&mut self) {
        let n = self.nodes.len();
        while (0..n).any(|i| (0..n).any(|j| self.deliver(i, j))) {}
    }

    fn lookup(&mut self, i: usize, who: ConnRef, end: End) {
        self.at(i, |p, now, alive, out| p.lookup(who, end, now, alive, out));
    }

    fn shown(&self, i: usize, who: ConnRef) -> Option<(Option<Reason>, Option<Reason>)> {
        let s = self.nodes[i].p.shown(&who)?;
        Some((Reason::from_code(s.local), Reason::from_code(s.peer)))
    }

    /// Are all tables of all nodes empty?
    fn is_clean(&self) -> bool {
        self.nodes.iter().all(|n| {
            n.p.ends.is_empty()
                && n.p.tuples.is_empty()
                && n.p.tables.values().all(|t| {
                    t.expected.is_empty()
                        && t.digests.is_empty()
                        && t.lookups.is_empty()
                        && t.by_proof.is_empty()
                        && t.by_tuple.is_empty()
                        && t.makes.is_empty()
                        && t.sent.is_empty()
                        && t.numbers.is_empty()
                        && t.parked.is_empty()
                })
        })
    }
}

fn who(conn: u32) -> ConnRef {
    ConnRef {
        client: ClientId(1),
        conn,
        gen: 1,
    }
}

fn end(local: &str, peer: &str, record: Option<(u32, u32, Role)>) -> End {
    let t = Instant::now();
    End {
        local: local.parse().unwrap(),
        peer: peer.parse().unwrap(),
        cookie: 1,
        netns_cookie: 1,
        inode: 0,
        record: record.map(|(snd, rcv, role)| Record {
            snd,
            rcv,
            role,
            at_ns: 999 * S,
        }),
        client: None,
        guess: None,
        counts: Counts {
            from: t,
            until: t,
            sent: 0,
            acked: 0,
            received: 0,
        },
    }
}

const A: &str = "10.1.0.1:1000";
const B: &str = "10.2.0.1:80";

fn client(local: &str, peer: &str) -> End {
    end(local, peer, Some((100, 200, Role::Active)))
}

fn server(local: &str, peer: &str) -> End {
    end(local, peer, Some((200, 100, Role::Passive)))
}

fn both_paired(net: &Net) -> bool {
    let one = |i: usize, j: usize, part| {
        let n = &net.nodes[i];
        matches!(&n.paired[..], [p] if p.node == net.nodes[j].name && p.part == part
            && p.refusal == Reason::NoDevice.code())
    };
    one(0, 1, Part::Initiator) && one(1, 0, Part::Responder)
}
