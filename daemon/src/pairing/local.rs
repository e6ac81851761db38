//! Which two registered ends are one connection.
//!
//! The daemon itself has read these ends from sockets that it was handed; nothing that a shim says decides. The
//! first end waits for the second. An end that does not fit is given up together with the one it was compared
//! with, and both may always try again: otherwise a forged mirror of an end's addresses could keep the real peer
//! away.
//!
//! Only ends of this node are here. Those whose other end may be on another node are at the same time sought there
//! (`nodes::peers::pairing`).

use crate::clients::ids::{ClientId, ConnRef};
use crate::clients::limits::Waits;
use crate::os::system::Clock;
use crate::pairing::socket::{consistent, End};
use crate::pairing::unprovable::{Seen, LOOKS, PATIENCE, UNPROVABLE_MAX};
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::ops::Bound::{Excluded, Unbounded};
use std::time::Duration;

/// What became of a registration.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Wait,
    /// The other end of this connection, which had waited, and its socket's cookie.
    Pair(ConnRef, u64),
    /// The addresses fit, but nothing proves that it is one connection: neither end goes on waiting. The other
    /// end, which had waited.
    Unproven(ConnRef),
    /// Another process has registered the same socket.
    Shared,
}

/// Ends that a step of a sweep looks at.
const SWEEP_STEP: usize = 256;

type TupleKey = (u64, SocketAddr, SocketAddr);

/// The ends that wait.
#[derive(Default)]
pub struct Waiting {
    /// In an order, so that those of one client are together, and a sweep can be made in steps.
    ends: BTreeMap<(ClientId, u32), (ConnRef, End)>,
    /// The last end that the sweep under way has looked at.
    swept: Option<(ClientId, u32)>,
    /// Ends without a record whose mirror has not been seen: since when, and how often it was missed.
    unprovable: HashMap<(ClientId, u32), (Duration, u8)>,
    clock: Clock,
    /// By network namespace, local and peer address.
    tuples: HashMap<TupleKey, Vec<(ClientId, u32)>>,
    /// By local and peer address alone.
    bare: HashMap<(SocketAddr, SocketAddr), Vec<(ClientId, u32)>>,
    /// By the key of the record.
    records: HashMap<(u32, u32), Vec<(ClientId, u32)>>,
    cookies: HashMap<u64, (ClientId, u32)>,
    /// For whom they are counted.
    seats: HashMap<(ClientId, u32), Waits>,
}

impl Waiting {
    pub fn new(clock: Clock) -> Waiting {
        Waiting {
            clock,
            ..Waiting::default()
        }
    }

    /// Takes a registration and says what to do. `alive` tells whether an end that waits is still
    /// the connection that was registered. On `Pair` and `Unproven` neither end waits any more.
    pub fn register(
        &mut self,
        who: ConnRef,
        end: End,
        alive: impl Fn(&ConnRef) -> bool,
    ) -> Verdict {
        self.remove(who.client, who.conn);
        if let Some(&(p, c)) = self.cookies.get(&end.cookie) {
            if self.ends.get(&(p, c)).is_some_and(|(w, _)| alive(w)) {
                return Verdict::Shared;
            }
            self.remove(p, c);
        }
        loop {
            let Some(key) = self.candidate(&end) else {
                self.insert(who, end);
                return Verdict::Wait;
            };
            let Some((other, peer)) = self.remove(key.0, key.1) else {
                continue;
            };
            if !alive(&other) {
                continue; // its connection is gone: look for another end
            }
            return if proven(&end, &peer) {
                Verdict::Pair(other, peer.cookie)
            } else {
                Verdict::Unproven(other)
            };
        }
    }

    /// The end that could be the other one of this connection, best evidence first.
    fn candidate(&self, end: &End) -> Option<(ClientId, u32)> {
        let record = |k: &(ClientId, u32)| self.ends.get(k).and_then(|(_, e)| e.record.as_ref());
        if let Some(r) = &end.record {
            let fits = |k: &&(ClientId, u32)| record(k).is_some_and(|p| r.proves(p));
            if let Some(k) = self
                .records
                .get(&r.mirror())
                .and_then(|v| v.iter().find(fits))
            {
                return Some(*k);
            }
        }
        // Two records that do not fit belong to two connections, whatever the addresses say.
        let mirror = self.tuples.get(&(end.netns_cookie, end.peer, end.local));
        let open = |k: &&(ClientId, u32)| end.record.is_none() || record(k).is_none();
        if let Some(k) = mirror.and_then(|v| v.iter().find(open)) {
            return Some(*k);
        }
        let remote = self.bare.get(&(end.peer, end.local));
        let bare = |k: &&(ClientId, u32)| end.record.is_none() && record(k).is_none();
        remote.and_then(|v| v.iter().find(bare)).copied()
    }

    fn insert(&mut self, who: ConnRef, end: End) {
        let k = (who.client, who.conn);
        self.tuples
            .entry((end.netns_cookie, end.local, end.peer))
            .or_default()
            .push(k);
        self.bare.entry((end.local, end.peer)).or_default().push(k);
        if let Some(r) = &end.record {
            self.records.entry(r.key()).or_default().push(k);
        }
        self.cookies.insert(end.cookie, k);
        if end.record.is_none() {
            self.unprovable.insert(k, (self.clock.now(), 0));
        }
        self.ends.insert(k, (who, end));
    }

    /// An end no longer waits.
    pub fn remove(&mut self, client: ClientId, conn: u32) -> Option<(ConnRef, End)> {
        let k = (client, conn);
        let (who, end) = self.ends.remove(&k)?;
        self.seats.remove(&k);
        self.unprovable.remove(&k);
        drop_from(
            &mut self.tuples,
            &(end.netns_cookie, end.local, end.peer),
            k,
        );
        drop_from(&mut self.bare, &(end.local, end.peer), k);
        if let Some(r) = &end.record {
            drop_from(&mut self.records, &r.key(), k);
        }
        self.cookies.remove(&end.cookie);
        Some((who, end))
    }

    /// An end that waits is counted by this guard.
    pub fn count(&mut self, who: &ConnRef, seat: Waits) {
        if self.end(who).is_some() {
            self.seats.insert((who.client, who.conn), seat);
        }
    }

    /// What is known of an end that waits.
    pub fn end(&self, who: &ConnRef) -> Option<&End> {
        let (w, end) = self.ends.get(&(who.client, who.conn))?;
        (w == who).then_some(end)
    }

    /// Ends that may wait in vain, see `pairing::unprovable`.
    pub fn unprovable(&self) -> impl Iterator<Item = (&ConnRef, &End)> {
        let old = self.unprovable.iter();
        let old = old.filter(|d| self.clock.since(d.1 .0) >= PATIENCE);
        let ends = old.filter_map(|(k, _)| self.ends.get(k));
        ends.map(|(w, e)| (w, e)).take(UNPROVABLE_MAX)
    }

    /// An end's mirror was looked for. `true`: it has been missed often enough, and the end does not
    /// wait any more.
    pub fn looked_for(&mut self, who: &ConnRef, seen: Seen) -> bool {
        let k = (who.client, who.conn);
        if self.end(who).is_none() {
            return false;
        }
        let Some((_, missed)) = self.unprovable.get_mut(&k) else {
            return false;
        };
        *missed += 1;
        if seen != Seen::Missing {
            self.unprovable.remove(&k);
            return false;
        }
        *missed >= LOOKS && self.remove(who.client, who.conn).is_some()
    }

    /// An end has closed, unless another connection already took its place in the table.
    pub fn forget(&mut self, who: ConnRef) {
        if self
            .ends
            .get(&(who.client, who.conn))
            .is_some_and(|(w, _)| *w == who)
        {
            self.remove(who.client, who.conn);
        }
    }

    /// A client is gone.
    pub fn remove_client(&mut self, client: ClientId) {
        let its = self.ends.range((client, 0)..=(client, u32::MAX));
        let gone: Vec<u32> = its.map(|(k, _)| k.1).collect();
        for conn in gone {
            self.remove(client, conn);
        }
    }

    /// Drops ends whose connections were passed on, or ended without a message: a step of it, because each takes a look into
    /// a table. `true`: there are further ones.
    pub fn sweep(&mut self, alive: impl Fn(&ConnRef) -> bool) -> bool {
        let from = self.swept.map_or(Unbounded, Excluded);
        let step = self.ends.range((from, Unbounded)).take(SWEEP_STEP);
        let step: Vec<_> = step.map(|(k, e)| (*k, alive(&e.0))).collect();
        self.swept = step
            .last()
            .map(|s| s.0)
            .filter(|_| step.len() == SWEEP_STEP);
        for ((client, conn), _) in step.iter().filter(|s| !s.1) {
            self.remove(*client, *conn);
        }
        self.swept.is_some()
    }

    /// All ends that wait.
    pub fn ends(&self) -> impl Iterator<Item = ConnRef> + '_ {
        self.ends.values().map(|(w, _)| *w)
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

fn drop_from<K: std::hash::Hash + Eq>(
    map: &mut HashMap<K, Vec<(ClientId, u32)>>,
    key: &K,
    who: (ClientId, u32),
) {
    if let Some(v) = map.get_mut(key) {
        v.retain(|k| *k != who);
        if v.is_empty() {
            map.remove(key);
        }
    }
}

/// Are these the two ends of one connection, beyond doubt?
fn proven(a: &End, b: &End) -> bool {
    let same = match (&a.record, &b.record) {
        (Some(x), Some(y)) => x.proves(y),
        // Inside one network namespace an established 4-tuple exists once.
        (None, None) => a.netns_cookie == b.netns_cookie && a.local == b.peer && a.peer == b.local,
        // Only one has a record: either recording began between the two, or one of them is not what it seems.
        // Nobody can tell which.
        _ => false,
    };
    let sides = a.confirmed(Some(b)) && b.confirmed(Some(a));
    same && sides && a.cookie != b.cookie && consistent(&a.counts, &b.counts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairing::proof::{Record, Role};
    use crate::pairing::socket::Counts;
    use std::time::Instant;

    fn end(local: &str, peer: &str, cookie: u64, netns: u64) -> End {
        let t = Instant::now();
        End {
            local: local.parse().unwrap(),
            peer: peer.parse().unwrap(),
            cookie,
            netns_cookie: netns,
            inode: 0,
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
        }
    }

    fn rec(mut e: End, snd: u32, rcv: u32, role: Role) -> End {
        e.record = Some(Record {
            snd,
            rcv,
            role,
            at_ns: 5,
        });
        e
    }

    fn who(client: u64, conn: u32) -> ConnRef {
        ConnRef {
            client: ClientId(client),
            conn,
            gen: 1,
        }
    }

    const A: &str = "10.0.0.1:1000";
    const B: &str = "10.0.0.2:80";

    #[test]
    fn mirrors_in_one_namespace_pair() {
        let mut w = Waiting::default();
        assert_eq!(
            w.register(who(1, 0), end(A, B, 1, 7), |_| true),
            Verdict::Wait
        );
        assert_eq!(
            w.register(who(2, 0), end(B, A, 2, 7), |_| true),
            Verdict::Pair(who(1, 0), 1)
        );
        assert!(w.is_empty() && w.tuples.is_empty() && w.bare.is_empty() && w.cookies.is_empty());
    }

    #[test]
    fn mirrors_in_two_namespaces_do_not() {
        let mut w = Waiting::default();
        w.register(who(1, 0), end(A, B, 1, 7), |_| true);
        assert_eq!(
            w.register(who(2, 0), end(B, A, 2, 8), |_| true),
            Verdict::Unproven(who(1, 0))
        );
        assert!(w.is_empty());
    }

    /// A forged mirror elsewhere does not take the place of the real one here.
    #[test]
    fn the_local_mirror_is_preferred() {
        let mut w = Waiting::default();
        w.register(who(2, 0), end(B, A, 2, 8), |_| true);
        w.register(who(3, 0), end(B, A, 3, 7), |_| true);
        assert_eq!(
            w.register(who(1, 0), end(A, B, 1, 7), |_| true),
            Verdict::Pair(who(3, 0), 3)
        );
        assert_eq!(w.len(), 1);
    }

    #[test]
    fn an_end_whose_mirror_is_missed_twice_stops_waiting() {
        let mut w = Waiting::default();
        let c = who(1, 0);
        w.register(c, end(A, B, 1, 7), |_| true);
        assert!(!w.looked_for(&c, Seen::Missing), "once is not enough");
        assert!(w.looked_for(&c, Seen::Missing));
        assert!(w.is_empty() && w.unprovable.is_empty());
        // Once a mirror has been seen, it is never looked for again.
        w.register(c, end(A, B, 1, 7), |_| true);
        assert!(!w.looked_for(&c, Seen::Missing));
        assert!(!w.looked_for(&c, Seen::Here));
        assert!(!w.looked_for(&c, Seen::Missing) && !w.looked_for(&c, Seen::Missing));
        assert_eq!(w.len(), 1);
        // With a record the other end may be anywhere.
        let d = who(2, 0);
        w.register(
            d,
            rec(end("10.0.0.9:1", B, 5, 7), 1, 2, Role::Active),
            |_| true,
        );
        assert!(!w.looked_for(&d, Seen::Missing) && !w.looked_for(&d, Seen::Missing));
        assert_eq!(w.len(), 2);
    }

    #[test]
    fn records_pair_across_nat_and_namespaces() {
        let mut w = Waiting::default();
        let c = rec(end(A, "10.96.0.1:443", 1, 7), 100, 200, Role::Active);
        let forged = rec(end("10.96.0.1:443", A, 3, 7), 200, 101, Role::Passive);
        let s = rec(
            end("10.0.0.2:8080", "10.0.0.9:5", 2, 8),
            200,
            100,
            Role::Passive,
        );
        assert_eq!(w.register(who(1, 0), c, |_| true), Verdict::Wait);
        assert_eq!(
            w.register(who(3, 0), forged, |_| true),
            Verdict::Wait,
            "fits nobody"
        );
        assert_eq!(
            w.register(who(2, 0), s, |_| true),
            Verdict::Pair(who(1, 0), 1)
        );
        assert_eq!(w.len(), 1);
    }

    #[test]
    fn a_record_needs_a_record() {
        let mut w = Waiting::default();
        let with = || rec(end(A, B, 1, 7), 1, 2, Role::Active);
        w.register(who(1, 0), with(), |_| true);
        assert_eq!(
            w.register(who(2, 0), end(B, A, 2, 7), |_| true),
            Verdict::Unproven(who(1, 0))
        );
        w.register(who(2, 0), end(B, A, 2, 7), |_| true);
        assert_eq!(
            w.register(who(1, 0), with(), |_| true),
            Verdict::Unproven(who(2, 0))
        );
        w.register(who(2, 0), end(B, A, 2, 8), |_| true);
        assert_eq!(
            w.register(who(1, 0), with(), |_| true),
            Verdict::Wait,
            "a stranger elsewhere"
        );
    }

    #[test]
    fn impossible_counts_do_not_pair() {
        let mut w = Waiting::default();
        let mut a = end(A, B, 1, 7);
        a.counts.acked = 1000;
        w.register(who(1, 0), a, |_| true);
        assert_eq!(
            w.register(who(2, 0), end(B, A, 2, 7), |_| true),
            Verdict::Unproven(who(1, 0))
        );
    }

    #[test]
    fn the_same_socket_twice_is_shared() {
        let mut w = Waiting::default();
        w.register(who(1, 0), end(A, B, 1, 7), |_| true);
        assert_eq!(
            w.register(who(2, 4), end(A, B, 1, 7), |_| true),
            Verdict::Shared
        );
        assert_eq!(
            w.register(who(1, 0), end(A, B, 1, 7), |_| true),
            Verdict::Wait,
            "again itself"
        );
        assert_eq!(
            w.register(who(2, 4), end(A, B, 1, 7), |_| false),
            Verdict::Wait,
            "first is gone"
        );
        assert_eq!(w.len(), 1);
    }

    #[test]
    fn dead_ends_are_passed_over() {
        let mut w = Waiting::default();
        w.register(who(1, 0), end(A, B, 1, 7), |_| true);
        w.register(who(1, 5), end(A, B, 4, 7), |_| true); // the tuple used again
        let alive = |c: &ConnRef| c.conn == 5;
        assert_eq!(
            w.register(who(2, 0), end(B, A, 2, 7), alive),
            Verdict::Pair(who(1, 5), 4)
        );
        w.register(who(1, 9), end(A, B, 1, 7), |_| true);
        assert!(!w.sweep(|_| false));
        assert!(w.is_empty());
    }

    /// However many there are, a step looks at so many; and those of one client are found without the others.
    #[test]
    fn a_sweep_has_steps() {
        let mut w = Waiting::default();
        let all = 10 * SWEEP_STEP as u32 + 1;
        for n in 0..all {
            let end = End {
                cookie: u64::from(n),
                ..end(A, B, 1, 7)
            };
            let who = who(1 + u64::from(n % 3), n);
            w.insert(who, end);
        }
        let looked = std::cell::Cell::new(0);
        let odd = |c: &ConnRef| {
            looked.set(looked.get() + 1);
            c.conn % 2 == 1
        };
        let mut steps = 1;
        while w.sweep(odd) {
            assert_eq!(looked.get(), steps * SWEEP_STEP);
            steps += 1;
        }
        assert_eq!((steps, looked.get()), (11, all as usize));
        assert!(w.ends().all(|c| c.conn % 2 == 1) && w.len() as u32 == all / 2);
        let before = w.len();
        let its = w.ends().filter(|c| c.client == ClientId(2)).count();
        w.remove_client(ClientId(2));
        assert_eq!(w.len(), before - its);
    }
}
