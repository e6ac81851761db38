//! What comes from other nodes: their channels, and the messages on them.

use super::claim::{hint, judge};
use super::table::{Lookup, Table};
use super::{Alive, EndKey, Making, Out, Paired, Pairing, Part, Shown, LOOKUPS_MAX};
use crate::nodes::peers::digest::Key;
use crate::nodes::peers::directory::{Name, Owner};
use crate::nodes::peers::msg::{Claim, Msg};
use crate::pairing::proof::Record;
use crate::pairing::socket::End;
use lane::proto::reason::Reason;

impl Pairing {
    /// A channel to `node` is up; the node keeps `room` lookups for us.
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
        t.room = room.min(LOOKUPS_MAX);
        let mine = self.ends.iter().filter(|(_, s)| s.scope.covers(node));
        let mut mine: Vec<EndKey> = mine.map(|(k, _)| *k).collect();
        mine.sort_unstable();
        for k in mine {
            if let Some(s) = self.ends.get_mut(&k) {
                s.note = Shown::default(); // it referred to the former channel
                s.seen = 0;
            }
            self.enter(k, node, now, alive, out);
        }
    }

    /// The channel is gone: lookups and Makes of both sides are void.
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
        t.false_claims = old.false_claims;
        for m in old.makes.into_values() {
            self.place(m.sought, now, alive, out);
        }
    }

    /// Handles a message of `node`. `Err`: it makes no sense; the channel must end.
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
        if let Msg::Make { refusal, .. } | Msg::Made { refusal, .. } = msg {
            t.said = Some(refusal);
        }
        match (t.part, msg) {
            (_, Msg::Expedited { local, peer }) => {
                self.hurried(node, (local, peer), true, out);
                Ok(())
            }
            (_, Msg::Ask { local, peer }) => {
                self.hurried(node, (local, peer), false, out);
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
            (Part::Initiator, Msg::Lookup { id, claim }) => {
                self.sought(node, id, claim, now, alive, out)
            }
            (Part::Initiator, Msg::LookupDone { id }) => {
                t.lookup_done(id);
                Ok(())
            }
            (Part::Initiator, Msg::Made { make, refusal }) => {
                self.made(node, make, refusal, out);
                Ok(())
            }
            (Part::Initiator, Msg::Fail { make, reason }) => {
                let failed = t.makes.remove(&make);
                self.failed(failed, reason, now, alive, out);
                Ok(())
            }
            (
                Part::Responder,
                Msg::Make {
                    lookup,
                    make,
                    claim,
                    refusal,
                },
            ) => {
                self.make(node, (lookup, make, refusal), &claim, now, alive, out);
                Ok(())
            }
            (Part::Responder, Msg::Hint { lookup, reason }) => {
                self.hinted(node, lookup, reason);
                Ok(())
            }
            // The initiator has not waited for our answer.
            (Part::Responder, Msg::Fail { .. }) => Ok(()),
            (Part::Initiator, Msg::Make { .. } | Msg::Hint { .. }) => {
                Err("an initiator's message to the initiator")
            }
            (Part::Responder, Msg::Lookup { .. } | Msg::LookupDone { .. } | Msg::Made { .. }) => {
                Err("a responder's message to the responder")
            }
            (_, Msg::Hello { .. }) => Err("a second hello"),
            (_, _) => Ok(()),
        }
    }

    /// The responder has answered our `Make`.
    fn made(&mut self, node: &Name, make: u64, refusal: u32, out: &mut Vec<Out>) {
        let Some(t) = self.tables.get_mut(node) else {
            return;
        };
        let Some(m) = t.makes.remove(&make) else {
            // Too late: the responder must be told that there is no pair.
            let reason = Reason::TimeoutDaemon.code();
            t.send(Msg::Fail { make, reason }, out);
            return;
        };
        out.push(Out::Paired(Paired {
            who: m.sought.who,
            node: node.clone(),
            part: Part::Initiator,
            pair: make,
            local: m.sought.end.local.ip(),
            cookie: m.sought.end.cookie,
            firsts: firsts(&m.sought.end),
            refusal,
            own_refusal: m.refusal,
        }));
    }

    /// The initiator says why a lookup of ours has found nothing yet.
    fn hinted(&mut self, node: &Name, lookup: u64, reason: u32) {
        let Some(t) = self.tables.get(node) else {
            return;
        };
        if let Some(s) = t.sent.get(&lookup).and_then(|(k, _)| self.ends.get_mut(k)) {
            s.note.peer = reason;
            if reason == Reason::WrongNode.code() {
                s.note.local = reason;
            }
        }
    }

    /// The responder has refused our `Make`.
    fn failed(
        &mut self,
        making: Option<Making>,
        reason: u32,
        now: u64,
        alive: Alive,
        out: &mut Vec<Out>,
    ) {
        if let Some(mut m) = making {
            m.sought.note.peer = reason;
            self.place(m.sought, now, alive, out);
        }
    }

    /// A Lookup has come in.
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
        if t.lookups.len() >= LOOKUPS_MAX {
            return Err("more lookups than there is room for");
        }
        if t.lookups.contains_key(&id) {
            return Err("a lookup's number is used twice");
        }
        let owner = self.directory.owner(claim.local.ip());
        if owner != Owner::Nobody && owner != Owner::Peer(node.clone()) {
            t.false_claims += 1;
            let reason = Reason::WrongNode.code();
            // Stored nevertheless, so that its number stays used; it never becomes a pair.
            t.send(Msg::Hint { lookup: id, reason }, out);
        }
        let tuple = (claim.local, claim.peer);
        let proof = claim.proof;
        t.by_tuple.insert(tuple, id);
        if let Some(d) = proof {
            t.by_proof.entry(d).or_insert(id);
        }
        t.lookups.insert(id, Lookup { claim, at_ns: now });
        if let Some(key) = proof.and_then(|d| t.expected.get(&d)).copied() {
            self.found(key, node, id, now, alive, out);
        } else if let Some(key) = self.tuples.get(&(tuple.1, tuple.0)) {
            if let Some(s) = self.ends.get_mut(key).filter(|s| s.scope.covers(node)) {
                s.note = hint(t, id, &s.end, out);
            }
        }
        Ok(())
    }

    /// The initiator has found the other end of our Lookup.
    fn make(
        &mut self,
        node: &Name,
        (lookup, make, refusal): (u64, u64, u32),
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
        let sent = t.sent.get(&lookup).copied();
        let found = sent.and_then(|(key, _)| Some((key, self.ends.get_mut(&key)?)));
        let Some((key, s)) = found else {
            return t.send(fail(Reason::NotEstablished), out); // our Unseek is on its way to the initiator
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
            t.false_claims += u64::from(r == Reason::WrongNode);
            return t.send(fail(r), out);
        }
        let (who, local, cookie) = (s.who, s.end.local.ip(), s.end.cookie);
        let firsts = firsts(&s.end);
        // Our Lookup is answered: no need to take it back.
        t.numbers.remove(&key);
        t.sent.remove(&lookup);
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
            part: Part::Responder,
            pair: make,
            local,
            cookie,
            firsts,
            refusal,
            own_refusal: own,
        }));
    }
}

/// Sequence numbers of the first byte that an end sends, and of the first one that it receives.
fn firsts(end: &End) -> [Option<u32>; 2] {
    let first = |of: fn(&Record) -> u32| end.record.as_ref().map(of);
    [first(|r| r.snd), first(|r| r.rcv)]
}
