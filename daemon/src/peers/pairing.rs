//! Which end on this node and which end on another are one connection: a state machine without
//! I/O.
//!
//! Of two nodes, the one with the smaller name is the *maker*, the other the *taker*. The taker
//! sends a `Seek` for each of its ends that may have its other end at the maker's node; the maker
//! keeps them, knows by which digest the Seek for each of its own ends would come, and answers the
//! one that comes with `Make`. Both check the proof and the other's claim; `Made` makes it a pair.
//! It does not matter which end registers first, and a Seek that fits no end changes nothing.
//!
//! Where an end is looked for: at the node that the directory gives its peer's address to; if it
//! gives it to none (translated on the way, or outside), at all; if to this node, at none.
//!
//! For whom a node may speak: the claimed local address of its end must be one of the node's. Where
//! an end's own address is nobody's (a private one behind translation), the peer address that our
//! own kernel has for our end must be one of the node's. An address of another node is a lie, or
//! two directories that disagree: never a pair.
//!
//! Everything that a peer can make us keep is bounded per peer.

use super::digest::Key;
use super::directory::{Directory, Name, Owner};
use super::msg::{Claim, Msg};
use crate::pairing::ConnRef;
use crate::party::PartyId;
use crate::socket::End;
use claim::{claim, hint, judge};
pub use hurry::Asked;
use link::reason::Reason;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use table::{Seek, Table};

mod claim;
mod hurry;
mod table;

/// Seeks that are kept for one peer, and sent to one.
pub const SEEKS: usize = 16_384;
/// A `Make` is answered in this time, or is void.
const MAKE_NS: u64 = 5_000_000_000;
/// Where more ends wait than may be sought at a time, they take turns of at least this long.
const TURN_NS: u64 = 10_000_000_000;
/// Both ends see the handshake end within this time; see `proof`.
const APART_NS: u64 = 60_000_000_000;

/// Is an end still the connection that was registered?
pub type Alive<'a> = &'a dyn Fn(&ConnRef) -> bool;

/// Which part a node has in making what joins the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Maker,
    Taker,
}

/// Two ends are one connection, and both nodes know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paired {
    pub who: ConnRef,
    pub node: Name,
    pub part: Part,
    /// Number of the pair on the channel, given by the maker.
    pub pair: u64,
    /// Cookie of the end's socket.
    pub cookie: u64,
    /// Why the other node makes no lane, and why this one makes none; 0: it would.
    pub refusal: u32,
    pub own_refusal: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Out {
    Send(Name, Msg),
    Paired(Paired),
    /// A node looks for a program of ours.
    Hurry(Name, Asked),
}

/// Why an end that waits is on TCP: reason codes of both ends, 0 where nothing is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    pub local: u32,
    pub peer: u32,
}

type EndKey = (PartyId, u32);
type Tuple = (SocketAddr, SocketAddr);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Scope {
    Node(Name),
    All,
}

impl Scope {
    fn covers(&self, node: &Name) -> bool {
        match self {
            Scope::Node(n) => n == node,
            Scope::All => true,
        }
    }
}

/// An end of this node that waits.
struct Sought {
    who: ConnRef,
    end: End,
    scope: Scope,
    note: Shown,
    /// What another node has said of its other end, when it was looked for in a hurry.
    seen: u32,
}

/// An end for which a `Make` is under way.
struct Making {
    sought: Sought,
    until_ns: u64,
    /// What the other node was told of us.
    refusal: u32,
}

pub struct Pairing {
    directory: Rc<dyn Directory>,
    /// Why this node makes no lanes to another; 0: it does.
    refusals: HashMap<Name, u32>,
    /// The same for all that are not listed.
    refusal: u32,
    ends: HashMap<EndKey, Sought>,
    /// By local and peer address, for hints only.
    tuples: HashMap<Tuple, EndKey>,
    tables: HashMap<Name, Table>,
    next: u64,
}

impl Pairing {
    pub fn new(directory: Rc<dyn Directory>, refusal: u32) -> Pairing {
        let own = directory.own().clone();
        let table = |n: Name| (n.clone(), Table::new(&own, n));
        let tables = directory.peers().into_iter().map(|p| table(p.name));
        Pairing {
            tables: tables.collect(),
            directory,
            refusal,
            refusals: HashMap::new(),
            ends: HashMap::new(),
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

    /// An end waits: look for its other end where it may be.
    pub fn seek(&mut self, who: ConnRef, end: End, now: u64, alive: Alive, out: &mut Vec<Out>) {
        self.remove(who.party, who.conn, out);
        let scope = match self.directory.owner(end.peer.ip()) {
            Owner::Own => return,
            Owner::Peer(n) => Scope::Node(n),
            // A container's own address, say, on a node that lists none.
            Owner::Nobody if end.local.ip() == end.peer.ip() => return,
            Owner::Nobody => Scope::All,
        };
        let sought = Sought {
            who,
            end,
            scope,
            note: Shown::default(),
            seen: 0,
        };
        self.place(sought, now, alive, out);
    }

    /// Enters an end wherever it is sought and there is a channel.
    fn place(&mut self, s: Sought, now: u64, alive: Alive, out: &mut Vec<Out>) {
        let key = (s.who.party, s.who.conn);
        self.tuples.insert((s.end.local, s.end.peer), key);
        let nodes: Vec<Name> = match &s.scope {
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
        if t.part == Part::Taker {
            // What cannot be proven is told only to whom it concerns.
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
            return t.send(Msg::Seek { id, claim }, out);
        }
        let near = t.by_tuple.get(&(s.end.peer, s.end.local)).copied();
        let Some(r) = &s.end.record else {
            if let Some(seek) = near {
                s.note = hint(t, seek, &s.end, out);
            }
            return;
        };
        // The numbers of the end that would fit, as its node would show them.
        let digest = channel.digest(node, r.rcv, r.snd);
        t.expected.insert(digest, key);
        t.digests.insert(key, digest);
        match (t.by_proof.get(&digest).copied(), near) {
            (Some(seek), _) => self.found(key, node, seek, now, alive, out),
            (None, Some(seek)) => s.note = hint(t, seek, &s.end, out),
            (None, None) => {}
        }
    }

    /// A Seek of `node` has the digest that fits our end `key`.
    fn found(
        &mut self,
        key: EndKey,
        node: &Name,
        seek: u64,
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
        let (Some(k), Some(record), Some(theirs)) = (&t.channel, &s.end.record, t.seeks.get(&seek))
        else {
            return;
        };
        let evidence = (&theirs.claim, theirs.at_ns);
        if let Err(r) = judge(&*self.directory, node, evidence, (&s.end, record), now) {
            s.note.local = r.code();
            t.lies += u64::from(r == Reason::WrongNode);
            let reason = r.code();
            return t.send(Msg::Hint { seek, reason }, out);
        }
        let claim = claim(&own, k, &s.end, now);
        t.unseek(seek);
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
                seek,
                make,
                claim,
                refusal,
            },
            out,
        );
    }

    /// Takes an end out of everything.
    fn take(&mut self, key: EndKey, out: &mut Vec<Out>) -> Option<Sought> {
        let s = self.ends.remove(&key)?;
        let t = (s.end.local, s.end.peer);
        if self.tuples.get(&t) == Some(&key) {
            self.tuples.remove(&t);
        }
        match &s.scope {
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
    pub fn remove(&mut self, party: PartyId, conn: u32, out: &mut Vec<Out>) {
        let key = (party, conn);
        self.take(key, out);
        for t in self.tables.values_mut() {
            let is = |m: &Making| (m.sought.who.party, m.sought.who.conn) == key;
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
            .get((who.party, who.conn))
            .is_some_and(|s| s.who == who)
        {
            self.remove(who.party, who.conn, out);
        }
    }

    /// Ends for which this holds no longer wait.
    pub fn drop_if(&mut self, gone: impl Fn(&ConnRef) -> bool, out: &mut Vec<Out>) {
        let makes = self.tables.values().flat_map(|t| t.makes.values());
        let all = self.ends.values().chain(makes.map(|m| &m.sought));
        let gone: Vec<ConnRef> = all.map(|s| s.who).filter(|w| gone(w)).collect();
        for w in gone {
            self.remove(w.party, w.conn, out);
        }
    }

    fn get(&self, key: EndKey) -> Option<&Sought> {
        let is = |s: &&Sought| (s.who.party, s.who.conn) == key;
        let making = || {
            let makes = self.tables.values().flat_map(|t| t.makes.values());
            makes.map(|m| &m.sought).find(is)
        };
        self.ends.get(&key).or_else(making)
    }

    /// There is a channel to `node` now, which keeps `room` Seeks for us.
    pub fn channel_up(
        &mut self,
        node: &Name,
        key: Key,
        room: usize,
        now: u64,
        alive: Alive,
        out: &mut Vec<Out>,
    ) {
        let Some(t) = self.tables.get_mut(node) else {
            return;
        };
        t.channel = Some(key);
        t.room = room.min(SEEKS);
        let mine = self.ends.iter().filter(|(_, s)| s.scope.covers(node));
        let mut mine: Vec<EndKey> = mine.map(|(k, _)| *k).collect();
        mine.sort_unstable();
        for k in mine {
            if let Some(s) = self.ends.get_mut(&k) {
                s.note = Shown::default(); // it was about what the former channel brought
                s.seen = 0;
            }
            self.enter(k, node, now, alive, out);
        }
    }

    /// There is none any more: what it was asked, and what it asked, is void.
    pub fn channel_down(
        &mut self,
        node: &Name,
        why: Reason,
        now: u64,
        alive: Alive,
        out: &mut Vec<Out>,
    ) {
        let own = self.directory.own().clone();
        let Some(t) = self.tables.get_mut(node) else {
            return;
        };
        let old = std::mem::replace(t, Table::new(&own, node.clone()));
        t.down = why;
        t.lies = old.lies;
        for m in old.makes.into_values() {
            self.place(m.sought, now, alive, out);
        }
    }

    /// A message of `node`. `Err`: it makes no sense; the channel must end.
    pub fn message(
        &mut self,
        node: &Name,
        msg: Msg,
        now: u64,
        alive: Alive,
        out: &mut Vec<Out>,
    ) -> Result<(), &'static str> {
        let Some(t) = self.tables.get_mut(node) else {
            return Ok(());
        };
        match (t.part, msg) {
            (_, Msg::Hurry { local, peer }) => {
                self.hurried(node, local, peer, out);
                Ok(())
            }
            (
                _,
                Msg::Seen {
                    local,
                    peer,
                    reason,
                },
            ) => {
                self.seen(node, local, peer, reason);
                Ok(())
            }
            (Part::Maker, Msg::Seek { id, claim }) => self.sought(node, id, claim, now, alive, out),
            (Part::Maker, Msg::Unseek { id }) => {
                t.unseek(id);
                Ok(())
            }
            (Part::Maker, Msg::Made { make, refusal }) => {
                let Some(m) = t.makes.remove(&make) else {
                    // Too late: the other end must not rely on it.
                    let reason = Reason::TimeoutDaemon.code();
                    t.send(Msg::Fail { make, reason }, out);
                    return Ok(());
                };
                out.push(Out::Paired(Paired {
                    who: m.sought.who,
                    node: node.clone(),
                    part: Part::Maker,
                    pair: make,
                    cookie: m.sought.end.cookie,
                    refusal,
                    own_refusal: m.refusal,
                }));
                Ok(())
            }
            (Part::Maker, Msg::Fail { make, reason }) => {
                if let Some(mut m) = t.makes.remove(&make) {
                    m.sought.note.peer = reason;
                    self.place(m.sought, now, alive, out);
                }
                Ok(())
            }
            (
                Part::Taker,
                Msg::Make {
                    seek,
                    make,
                    claim,
                    refusal,
                },
            ) => {
                self.make(node, (seek, make, refusal), &claim, now, alive, out);
                Ok(())
            }
            (Part::Taker, Msg::Hint { seek, reason }) => {
                if let Some(s) = t.sent.get(&seek).and_then(|(k, _)| self.ends.get_mut(k)) {
                    s.note.peer = reason;
                    if reason == Reason::WrongNode.code() {
                        s.note.local = reason;
                    }
                }
                Ok(())
            }
            // The maker did not wait for our answer.
            (Part::Taker, Msg::Fail { .. }) => Ok(()),
            (Part::Maker, Msg::Make { .. } | Msg::Hint { .. }) => {
                Err("a maker's message to the maker")
            }
            (Part::Taker, Msg::Seek { .. } | Msg::Unseek { .. } | Msg::Made { .. }) => {
                Err("a taker's message to the taker")
            }
            (_, Msg::Hello { .. }) => Err("a second hello"),
            (_, _) => Ok(()),
        }
    }

    /// A Seek has come in.
    fn sought(
        &mut self,
        node: &Name,
        id: u64,
        claim: Claim,
        now: u64,
        alive: Alive,
        out: &mut Vec<Out>,
    ) -> Result<(), &'static str> {
        let Some(t) = self.tables.get_mut(node) else {
            return Ok(());
        };
        if t.seeks.len() >= SEEKS {
            return Err("more seeks than there is room for");
        }
        if t.seeks.contains_key(&id) {
            return Err("a seek's number is used twice");
        }
        let owner = self.directory.owner(claim.local.ip());
        if owner != Owner::Nobody && owner != Owner::Peer(node.clone()) {
            t.lies += 1;
            let reason = Reason::WrongNode.code();
            // Kept, so that its number stays taken; it never fits.
            t.send(Msg::Hint { seek: id, reason }, out);
        }
        let tuple = (claim.local, claim.peer);
        let proof = claim.proof;
        t.by_tuple.insert(tuple, id);
        if let Some(d) = proof {
            t.by_proof.entry(d).or_insert(id);
        }
        t.seeks.insert(id, Seek { claim, at_ns: now });
        if let Some(key) = proof.and_then(|d| t.expected.get(&d)).copied() {
            self.found(key, node, id, now, alive, out);
        } else if let Some(key) = self.tuples.get(&(tuple.1, tuple.0)) {
            if let Some(s) = self.ends.get_mut(key).filter(|s| s.scope.covers(node)) {
                s.note = hint(t, id, &s.end, out);
            }
        }
        Ok(())
    }

    /// The maker has found the other end of our Seek.
    fn make(
        &mut self,
        node: &Name,
        (seek, make, refusal): (u64, u64, u32),
        claim: &Claim,
        now: u64,
        alive: Alive,
        out: &mut Vec<Out>,
    ) {
        let Some(t) = self.tables.get_mut(node) else {
            return;
        };
        let fail = |r: Reason| Msg::Fail {
            make,
            reason: r.code(),
        };
        let sent = t.sent.get(&seek).copied();
        let found = sent.and_then(|(key, _)| Some((key, self.ends.get_mut(&key)?)));
        let Some((key, s)) = found else {
            return t.send(fail(Reason::NotEstablished), out); // our Unseek is on its way
        };
        let (Some(k), Some(record)) = (&t.channel, &s.end.record) else {
            return t.send(fail(Reason::Unproven), out);
        };
        let proven = claim.proof == Some(k.digest(node, record.rcv, record.snd));
        let verdict = match proven {
            true => judge(&*self.directory, node, (claim, now), (&s.end, record), now),
            false => Err(Reason::Unproven),
        };
        if let Err(r) = verdict {
            s.note.local = r.code();
            t.lies += u64::from(r == Reason::WrongNode);
            return t.send(fail(r), out);
        }
        let (who, cookie) = (s.who, s.end.cookie);
        // Our Seek is answered: no need to take it back.
        t.numbers.remove(&key);
        t.sent.remove(&seek);
        if !alive(&who) {
            t.send(fail(Reason::NotEstablished), out);
            return self.remove(key.0, key.1, out);
        }
        self.take(key, out);
        let own = self.refusal(node);
        if let Some(t) = self.tables.get(node) {
            t.send(Msg::Made { make, refusal: own }, out);
        }
        out.push(Out::Paired(Paired {
            who,
            node: node.clone(),
            part: Part::Taker,
            pair: make,
            cookie,
            refusal,
            own_refusal: own,
        }));
    }

    /// What time brings: answers that did not come, and turns.
    pub fn tick(&mut self, now: u64, alive: Alive, out: &mut Vec<Out>) {
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
            // Who was sought long enough makes room for who waits for a turn.
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
                t.send(Msg::Unseek { id }, out);
                t.parked.push_back(key);
            }
            let free = t.room.saturating_sub(t.sent.len()).min(t.parked.len());
            let next: Vec<EndKey> = t.parked.drain(..free).collect();
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
        let s = self.get((who.party, who.conn)).filter(|s| s.who == *who)?;
        let table = match &s.scope {
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
        // What was said about a claim is about this very connection, what was seen came before it.
        let peer = match s.note.peer {
            0 => s.seen,
            p => p,
        };
        Some(Shown { local, peer })
    }

    /// Ends that wait for one of another node.
    pub fn waiting(&self) -> usize {
        self.ends.len()
    }

    /// Seeks that `node` has with us or we have with it, and its claims about others' addresses.
    pub fn counts(&self, node: &str) -> (usize, u64) {
        let t = self.tables.get(node);
        t.map_or((0, 0), |t| (t.seeks.len() + t.sent.len(), t.lies))
    }
}

#[cfg(test)]
mod tests;
