//! Which end on this node and which end on another are one connection: a state machine without
//! I/O.
//!
//! Of two nodes, the one with the smaller name is the *initiator*, the other the *responder*. The responder sends
//! a `Lookup` for each of its ends that may have its other end at the initiator's node. The initiator stores the
//! lookups. For each of its own ends it knows the digest that the fitting Lookup would have, and answers that Lookup
//! with `Make`. Both nodes check the proof and the other's claim; `Made` makes it a pair. It does not matter which
//! end registers first, and a Lookup that fits no end changes nothing.
//!
//! Where an end is looked for: at the node to which the directory assigns its peer's address; at all nodes if it
//! assigns it to none (translated on the way, or outside); at none if it is this node's. If it still waits after a while, the
//! core finds out whether this node translates its addresses; if so, the peer's real address counts (`translated`).
//!
//! What a node may claim: the claimed local address of its end must be one of the node's. If the directory assigns
//! that address to no node (a private one behind translation), the peer address that our own kernel has for our
//! end must be one of the node's. If the address belongs to another node, the claim is a lie, or two directories
//! disagree: such ends never become a pair.
//!
//! Everything that a peer can make us keep is bounded per peer.

use super::directory::{Directory, Name, Owner};
use super::msg::Msg;
use crate::clients::ids::{ClientId, ConnRef};
use crate::pairing::socket::End;
use claim::{claim, hint, judge};
pub(crate) use expedited::Asked;
use lane::proto::reason::Reason;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::ops::Bound::{Excluded, Unbounded};
use std::rc::Rc;
use table::Table;

mod claim;
mod expedited;
mod members;
mod received;
mod table;
mod translated;

/// Most lookups that are kept for one peer, or sent to one.
pub(crate) const LOOKUPS_MAX: usize = 16_384;
/// A `Make` without an answer is void after this time.
const MAKE_NS: u64 = 5_000_000_000;
/// If more ends wait than may be sought at a time, they take turns of at least this length.
const TURN_NS: u64 = 10_000_000_000;
/// Ends that are looked at in one step of a sweep.
const SWEEP_STEP: usize = 256;
/// Both ends see the handshake end within this time; see `pairing::proof`.
const APART_NS: u64 = 60_000_000_000;

/// Is an end still the connection that was registered?
pub(crate) type Alive<'a> = &'a dyn Fn(&ConnRef) -> bool;

/// A node's role in making the pair and its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Initiator,
    Responder,
}

/// Two ends are one connection, and both nodes know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paired {
    pub who: ConnRef,
    pub node: Name,
    pub part: Part,
    /// Number of the pair on the channel, given by the initiator.
    pub pair: u64,
    /// Local address of the end.
    pub local: std::net::IpAddr,
    /// Cookie of the end's socket.
    pub cookie: u64,
    /// Sequence numbers of the first byte that it sends, and of the first one that it receives.
    pub firsts: [Option<u32>; 2],
    /// Why the other node makes no lane, and why this one makes none; 0: it would.
    pub refusal: u32,
    pub own_refusal: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Out {
    Send(Name, Msg),
    Paired(Paired),
    /// A node asks us to look for a program on this node.
    Expedited(Name, Asked),
}

/// Why an end that waits is on TCP: reason codes of both ends, 0 where nothing is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    pub local: u32,
    pub peer: u32,
    /// It is on one certain other node.
    pub elsewhere: bool,
}

type EndKey = (ClientId, u32);
type Tuple = (SocketAddr, SocketAddr);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Scope {
    /// On no other node, as long as the directory does not say otherwise.
    Own,
    Node(Name),
    All,
}

impl Scope {
    fn covers(&self, node: &Name) -> bool {
        match self {
            Scope::Own => false,
            Scope::Node(n) => n == node,
            Scope::All => true,
        }
    }
}

/// An end of this node that waits.
struct Sought {
    who: ConnRef,
    end: End,
    /// Local and peer address of its other end, as far as this node knows.
    there: Tuple,
    /// When that is to be found out; `None`: it was.
    look_ns: Option<u64>,
    scope: Scope,
    note: Shown,
    /// What another node has said of its other end, when that was looked for.
    seen: u32,
    /// When that node is asked, and how often it was.
    ask_ns: u64,
    asks: u32,
}

/// An end for which a `Make` is under way.
struct Making {
    sought: Sought,
    until_ns: u64,
    /// The refusal that the other node was told.
    refusal: u32,
}

pub struct Pairing {
    directory: Rc<dyn Directory>,
    /// It may say something else later.
    changes: bool,
    /// Why this node makes no lanes to another; 0: it does.
    refusals: HashMap<Name, u32>,
    /// The refusal for all nodes that are not in `refusals`.
    refusal: u32,
    ends: BTreeMap<EndKey, Sought>,
    /// How far a sweep that is under way has come in it.
    swept: Option<EndKey>,
    /// By local and peer address as the other end sees them, for hints only.
    tuples: HashMap<Tuple, EndKey>,
    tables: HashMap<Name, Table>,
    next: u64,
}

impl Pairing {
    pub fn new(
        directory: Rc<dyn Directory>,
        nodes: impl Iterator<Item = Name>,
        refusal: u32,
    ) -> Pairing {
        let own = directory.own().clone();
        let table = |n: Name| (n.clone(), Table::new(&own, n));
        let tables = nodes.map(table);
        Pairing {
            tables: tables.collect(),
            changes: directory.changes().is_some(),
            directory,
            refusal,
            refusals: HashMap::new(),
            ends: BTreeMap::new(),
            swept: None,
            tuples: HashMap::new(),
            next: 1,
        }
    }

    /// From now on lanes to this node are refused for this reason; 0: they are made.
    pub fn set_refusal(&mut self, node: &Name, code: u32) {
        self.refusals.insert(node.clone(), code);
    }

    /// Why lanes to this node are refused; 0: they are not.
    pub fn refusal(&self, node: &Name) -> u32 {
        self.refusals.get(node).copied().unwrap_or(self.refusal)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// Where an end's other end may be.
    fn scope(&self, s: &Sought) -> Scope {
        match self.directory.place(s.there.0.ip()) {
            Owner::Own => Scope::Own,
            Owner::Peer(n) => Scope::Node(n),
            Owner::Nobody if s.is_to_itself() => Scope::Own,
            Owner::Nobody => Scope::All,
        }
    }

    /// An end waits: look for its other end where it may be.
    pub fn lookup(&mut self, who: ConnRef, end: End, now: u64, alive: Alive, out: &mut Vec<Out>) {
        self.remove(who.client, who.conn, out);
        let sought = Sought {
            who,
            there: (end.peer, end.local),
            look_ns: Some(now + translated::LOOK_NS),
            end,
            scope: Scope::Own, // until it is placed
            note: Shown::default(),
            seen: 0,
            ask_ns: now + expedited::ASK_NS,
            asks: 0,
        };
        self.place(sought, now, alive, out);
    }

    /// Enters an end wherever it is sought and there is a channel.
    fn place(&mut self, mut s: Sought, now: u64, alive: Alive, out: &mut Vec<Out>) {
        let key = (s.who.client, s.who.conn);
        s.scope = self.scope(&s); // (it may come back from a Make, and the directory have changed)
        if s.is_to_itself() {
            s.look_ns = None;
        }
        if s.scope == Scope::Own && !self.changes && s.look_ns.is_none() {
            return; // nor will it ever be on another node
        }
        self.tuples.insert((s.there.1, s.there.0), key);
        let nodes: Vec<Name> = match &s.scope {
            Scope::Own => Vec::new(),
            Scope::Node(n) => vec![n.clone()],
            Scope::All => self.tables.keys().cloned().collect(),
        };
        self.ends.insert(key, s);
        for node in nodes {
            self.enter(key, &node, now, alive, out);
        }
    }

    fn enter(&mut self, key: EndKey, node: &Name, now: u64, alive: Alive, out: &mut Vec<Out>) {
        let own = self.directory.own().clone();
        let (Some(s), Some(t)) = (self.ends.get_mut(&key), self.tables.get_mut(node)) else {
            return;
        };
        let Some(channel) = &t.channel else { return };
        if t.part == Part::Responder {
            // An end without a record cannot be proven: tell only the node that has the peer's address.
            if s.end.record.is_none() && s.scope == Scope::All {
                return;
            }
            if t.sent.len() >= t.room {
                return t.parked.push_back(key);
            }
            let claim = claim(&own, channel, &s.end, now);
            let id = self.number();
            let Some(t) = self.tables.get_mut(node) else {
                return;
            };
            t.sent.insert(id, (key, now));
            t.numbers.insert(key, id);
            return t.send(Msg::Lookup { id, claim }, out);
        }
        let by_addresses = t.by_tuple.get(&s.there).copied();
        let Some(r) = &s.end.record else {
            if let Some(lookup) = by_addresses {
                s.note = hint(t, lookup, &s.end, out);
            }
            return;
        };
        // The digest that the node of a fitting end would send: its numbers are ours, swapped.
        let digest = channel.digest(node, r.rcv, r.snd);
        t.expected.insert(digest, key);
        t.digests.insert(key, digest);
        match (t.by_proof.get(&digest).copied(), by_addresses) {
            (Some(lookup), _) => self.found(key, node, lookup, now, alive, out),
            (None, Some(lookup)) => s.note = hint(t, lookup, &s.end, out),
            (None, None) => {}
        }
    }

    /// A Lookup of `node` has the digest that fits our end `key`.
    fn found(
        &mut self,
        key: EndKey,
        node: &Name,
        lookup: u64,
        now: u64,
        alive: Alive,
        out: &mut Vec<Out>,
    ) {
        let own = self.directory.own().clone();
        let (Some(s), Some(t)) = (self.ends.get_mut(&key), self.tables.get_mut(node)) else {
            return;
        };
        if !alive(&s.who) {
            self.remove(key.0, key.1, out);
            return;
        }
        let (Some(k), Some(record), Some(theirs)) =
            (&t.channel, &s.end.record, t.lookups.get(&lookup))
        else {
            return;
        };
        let evidence = (&theirs.claim, theirs.at_ns);
        if let Err(r) = judge(&*self.directory, node, evidence, (&s.end, record), now) {
            s.note.local = r.code();
            t.false_claims += u64::from(r == Reason::WrongNode);
            let reason = r.code();
            return t.send(Msg::Hint { lookup, reason }, out);
        }
        let claim = claim(&own, k, &s.end, now);
        t.lookup_done(lookup);
        let Some(sought) = self.take(key, out) else {
            return;
        };
        let make = self.number();
        let refusal = self.refusal(node);
        let Some(t) = self.tables.get_mut(node) else {
            return;
        };
        let until_ns = now + MAKE_NS;
        let making = Making {
            sought,
            until_ns,
            refusal,
        };
        t.makes.insert(make, making);
        t.send(
            Msg::Make {
                lookup,
                make,
                claim,
                refusal,
            },
            out,
        );
    }

    /// Removes an end from all tables.
    fn take(&mut self, key: EndKey, out: &mut Vec<Out>) -> Option<Sought> {
        let s = self.ends.remove(&key)?;
        let t = (s.there.1, s.there.0);
        if self.tuples.get(&t) == Some(&key) {
            self.tuples.remove(&t);
        }
        match &s.scope {
            Scope::Own => {}
            Scope::Node(n) => {
                if let Some(t) = self.tables.get_mut(n) {
                    t.withdraw(key, out);
                }
            }
            Scope::All => self.tables.values_mut().for_each(|t| t.withdraw(key, out)),
        }
        Some(s)
    }

    /// An end no longer waits.
    pub fn remove(&mut self, client: ClientId, conn: u32, out: &mut Vec<Out>) {
        let key = (client, conn);
        if self.take(key, out).is_some() {
            return; // so there is no Make for it
        }
        for t in self.tables.values_mut() {
            let is = |m: &Making| (m.sought.who.client, m.sought.who.conn) == key;
            let ended = t.makes.iter().find(|(_, m)| is(m)).map(|(n, _)| *n);
            if let Some(make) = ended {
                t.makes.remove(&make);
                let reason = Reason::NotEstablished.code();
                t.send(Msg::Fail { make, reason }, out);
            }
        }
    }

    /// An end has closed, unless another connection already took its place in the table.
    pub fn forget(&mut self, who: ConnRef, out: &mut Vec<Out>) {
        if self
            .get((who.client, who.conn))
            .is_some_and(|s| s.who == who)
        {
            self.remove(who.client, who.conn, out);
        }
    }

    /// Ends for which a `Make` is under way.
    fn made_for(&self) -> impl Iterator<Item = ConnRef> + '_ {
        let makes = self.tables.values().flat_map(|t| t.makes.values());
        makes.map(|m| m.sought.who)
    }

    /// A client's ends no longer wait.
    pub fn forget_client(&mut self, id: ClientId, out: &mut Vec<Out>) {
        let own = self.ends.range((id, 0)..=(id, u32::MAX));
        let own = own.map(|(key, _)| *key);
        let makes = self.made_for().filter(|w| w.client == id);
        let gone: Vec<EndKey> = own.chain(makes.map(|w| (w.client, w.conn))).collect();
        for (client, conn) in gone {
            self.remove(client, conn, out);
        }
    }

    /// Drops ends that do not wait any more without having said so: a step of it, because each takes a look into a table.
    /// `true`: there are further ones. (A `Make` does not last, and its end is asked for again when it comes back.)
    pub fn sweep(&mut self, alive: Alive, out: &mut Vec<Out>) -> bool {
        let from = self.swept.map_or(Unbounded, Excluded);
        let step = self.ends.range((from, Unbounded)).take(SWEEP_STEP);
        let step: Vec<_> = step.map(|(k, s)| (*k, alive(&s.who))).collect();
        self.swept = step
            .last()
            .map(|s| s.0)
            .filter(|_| step.len() == SWEEP_STEP);
        for ((client, conn), _) in step.into_iter().filter(|s| !s.1) {
            self.remove(client, conn, out);
        }
        self.swept.is_some()
    }

    fn get(&self, key: EndKey) -> Option<&Sought> {
        let is = |s: &&Sought| (s.who.client, s.who.conn) == key;
        let making = || {
            let makes = self.tables.values().flat_map(|t| t.makes.values());
            makes.map(|m| &m.sought).find(is)
        };
        self.ends.get(&key).or_else(making)
    }

    /// Handles what is due: Makes without an answer, turns, and questions.
    pub fn tick(&mut self, now: u64, alive: Alive, out: &mut Vec<Out>) {
        self.ask(now, out);
        let nodes: Vec<Name> = self.tables.keys().cloned().collect();
        for node in nodes {
            let Some(t) = self.tables.get_mut(&node) else {
                continue;
            };
            let late = t.makes.iter().filter(|(_, m)| m.until_ns <= now);
            let late: Vec<u64> = late.map(|(n, _)| *n).collect();
            let mut back = Vec::new();
            for make in late {
                if let Some(mut m) = t.makes.remove(&make) {
                    m.sought.note.local = Reason::TimeoutDaemon.code();
                    back.push(m.sought);
                }
            }
            // Ends that were sought for a whole turn make room for those that wait for one.
            let wanted = t.parked.len();
            while t.room.saturating_sub(t.sent.len()) < wanted {
                let oldest = t.sent.first_key_value().map(|(id, v)| (*id, *v));
                let Some((id, (key, since))) = oldest else {
                    break;
                };
                if now.saturating_sub(since) < TURN_NS {
                    break;
                }
                t.sent.remove(&id);
                t.numbers.remove(&key);
                t.send(Msg::LookupDone { id }, out);
                t.parked.push_back(key);
            }
            let free = t.room.saturating_sub(t.sent.len()).min(t.parked.len());
            let next: Vec<EndKey> = (0..free).map_while(|_| t.parked.pop_front()).collect();
            for key in next {
                self.enter(key, &node, now, alive, out);
            }
            for s in back {
                self.place(s, now, alive, out);
            }
        }
    }

    /// Why an end that waits is on TCP, as far as other nodes have to do with it.
    pub fn shown(&self, who: &ConnRef) -> Option<Shown> {
        let s = self.get((who.client, who.conn)).filter(|s| s.who == *who)?;
        let table = match &s.scope {
            Scope::Own => return None,
            Scope::Node(n) => self.tables.get(n),
            Scope::All => None,
        };
        let local = if let Some(t) = table.filter(|t| t.channel.is_none()) {
            t.down.code()
        } else if s.note.local != 0 {
            s.note.local
        } else if s.end.record.is_none() && table.is_some() {
            Reason::Unproven.code()
        } else if s.scope == Scope::All {
            Reason::UnknownNode.code()
        } else {
            0
        };
        // A hint is about this very connection; what a search has seen is older.
        let peer = match s.note.peer {
            0 => s.seen,
            p => p,
        };
        Some(Shown {
            local,
            peer,
            elsewhere: table.is_some(),
        })
    }

    /// Ends that wait for one of another node.
    pub fn waiting(&self) -> usize {
        self.ends.values().filter(|s| s.scope != Scope::Own).count()
    }

    /// Number of lookups that `node` has with us or we have with it, and of its claims about other nodes' addresses.
    pub fn counts(&self, node: &str) -> (usize, u64) {
        let t = self.tables.get(node);
        t.map_or((0, 0), |t| (t.lookups.len() + t.sent.len(), t.false_claims))
    }

    /// Has this node said that it has RDMA devices which are up?
    pub fn has_rails(&self, node: &str) -> bool {
        let said = self.tables.get(node).and_then(|t| t.said);
        said.is_some_and(|code| code != Reason::NoDevice.code())
    }
}

#[cfg(test)]
mod tests;
