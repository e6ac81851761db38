//! The state of pairing with one peer. As initiator: the peer's lookups, and our ends that may fit them. As responder:
//! our lookups, and ends that wait for a turn. Every map here is bounded by `LOOKUPS_MAX` or by the number of our own
//! ends.

use super::{EndKey, Making, Out, Part, Tuple};
use crate::nodes::peers::digest::Key;
use crate::nodes::peers::directory::Name;
use crate::nodes::peers::msg::{Claim, Digest, Msg};
use lane::proto::reason::Reason;
use std::collections::{BTreeMap, HashMap};

/// A Lookup of a peer.
pub(super) struct Lookup {
    pub claim: Claim,
    pub at_ns: u64,
}

/// Ends that wait for a turn, in their order. One of them goes without a look at the others: a program may have many, and
/// close them all.
#[derive(Default)]
pub(super) struct Parked {
    next: u64,
    order: BTreeMap<u64, EndKey>,
    numbers: HashMap<EndKey, u64>,
}

impl Parked {
    pub(super) fn push_back(&mut self, key: EndKey) {
        self.remove(&key);
        self.order.insert(self.next, key);
        self.numbers.insert(key, self.next);
        self.next += 1;
    }

    pub(super) fn pop_front(&mut self) -> Option<EndKey> {
        let (_, key) = self.order.pop_first()?;
        self.numbers.remove(&key);
        Some(key)
    }

    pub(super) fn remove(&mut self, key: &EndKey) {
        if let Some(number) = self.numbers.remove(key) {
            self.order.remove(&number);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}

/// The state of pairing with one peer.
pub(super) struct Table {
    pub name: Name,
    pub part: Part,
    /// Key of the channel, while there is one.
    pub channel: Option<Key>,
    /// Why there is none.
    pub down: Reason,
    /// How many lookups the peer keeps for us.
    pub room: usize,
    // As initiator.
    pub expected: HashMap<Digest, EndKey>,
    pub digests: HashMap<EndKey, Digest>,
    pub lookups: HashMap<u64, Lookup>,
    pub by_proof: HashMap<Digest, u64>,
    pub by_tuple: HashMap<Tuple, u64>,
    pub makes: HashMap<u64, Making>,
    // As responder. Numbers of lookups only grow: the first is the oldest.
    pub sent: BTreeMap<u64, (EndKey, u64)>,
    pub numbers: HashMap<EndKey, u64>,
    pub parked: Parked,
    /// Claims about addresses that are not the peer's.
    pub false_claims: u64,
    /// The refusal that the peer told last.
    pub said: Option<u32>,
}

impl Table {
    pub(super) fn new(own: &Name, name: Name) -> Table {
        Table {
            part: if *own < name {
                Part::Initiator
            } else {
                Part::Responder
            },
            name,
            channel: None,
            down: Reason::PeerDaemon,
            room: 0,
            expected: HashMap::new(),
            digests: HashMap::new(),
            lookups: HashMap::new(),
            by_proof: HashMap::new(),
            by_tuple: HashMap::new(),
            makes: HashMap::new(),
            sent: BTreeMap::new(),
            numbers: HashMap::new(),
            parked: Parked::default(),
            false_claims: 0,
            said: None,
        }
    }

    pub(super) fn send(&self, msg: Msg, out: &mut Vec<Out>) {
        out.push(Out::Send(self.name.clone(), msg));
    }

    pub(super) fn lookup_done(&mut self, id: u64) -> Option<Lookup> {
        let s = self.lookups.remove(&id)?;
        if let Some(d) = s.claim.proof {
            if self.by_proof.get(&d) == Some(&id) {
                self.by_proof.remove(&d);
            }
        }
        let t = (s.claim.local, s.claim.peer);
        if self.by_tuple.get(&t) == Some(&id) {
            self.by_tuple.remove(&t);
        }
        Some(s)
    }

    /// An end no longer waits, or no longer for this peer.
    pub(super) fn withdraw(&mut self, key: EndKey, out: &mut Vec<Out>) {
        if let Some(d) = self.digests.remove(&key) {
            self.expected.remove(&d);
        }
        if let Some(id) = self.numbers.remove(&key) {
            self.sent.remove(&id);
            self.send(Msg::LookupDone { id }, out);
        } else {
            self.parked.remove(&key);
        }
    }
}
