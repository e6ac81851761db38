//! Ends whose addresses this node translates: a service's address (kube-proxy) is no node's, and behind a node's port the client
//! has that node's address. The core looks the real ones up in the kernel, once for each end that waits (`os::translated`).
//!
//! Pairing does not depend on it where an end is sought at all nodes anyway: the proof is in no address. But an end that seems to
//! be this node's own would be sought nowhere; and only one certain node can be asked why an end waits.

use super::{Alive, Out, Pairing, Scope, Sought, Tuple};
use crate::clients::ids::ConnRef;
use crate::os::address::normal;

/// An end waits this long before its real addresses are looked up: most find their other end at once.
pub(super) const LOOK_NS: u64 = 1_000_000_000;
/// Most ends in one look.
const LOOKS_MAX: usize = 1024;

impl Sought {
    /// Connected to its own address, as within a container: this node's, even if nobody lists it. (Or to a loopback address.)
    pub(super) fn is_to_itself(&self) -> bool {
        let (here, there) = (self.end.local.ip(), self.end.peer.ip());
        here == there || there.is_loopback()
    }
}

impl Pairing {
    /// Ends whose real addresses are to be looked up now, each once: local and peer address.
    pub fn untranslated(&mut self, now: u64) -> Vec<(ConnRef, Tuple)> {
        let due = self.ends.values_mut();
        let due = due.filter(|s| s.look_ns.is_some_and(|t| t <= now));
        let due = due.take(LOOKS_MAX).map(|s| {
            s.look_ns = None;
            (s.who, (s.end.local, s.end.peer))
        });
        due.collect()
    }

    /// An end was looked up. `there`: its other end's local and peer address, if they are others.
    pub fn translated(
        &mut self,
        who: ConnRef,
        there: Option<Tuple>,
        now: u64,
        alive: Alive,
        out: &mut Vec<Out>,
    ) {
        let key = (who.client, who.conn);
        let Some(s) = self.ends.get(&key).filter(|s| s.who == who) else {
            return; // paired meanwhile, or closed
        };
        if there.is_none() && (s.scope != Scope::Own || self.changes) {
            return;
        }
        let Some(mut s) = self.take(key, out) else {
            return;
        };
        s.look_ns = None;
        if let Some((local, peer)) = there {
            s.there = (normal(local), normal(peer));
        }
        self.place(s, now, alive, out);
    }
}
