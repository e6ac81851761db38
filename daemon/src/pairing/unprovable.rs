//! Ends that wait in vain. Without a record of its handshake, an end can only be paired within its own network
//! namespace, where the kernel's table lists the other end's socket under the mirrored addresses. If it does not
//! (the addresses were translated, or the socket is in another namespace or on another node), nothing can ever be
//! proven, so the reason is `unproven`, not `waiting`.
//!
//! Reading a table is not atomic, so an end is given up only when two looks have found itself, but not its mirror.
//! Runs on the blocking pool; each end is looked at twice at most.

use crate::clients::ids::ConnRef;
use crate::os::diag::{self, Pair};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

/// An end waits this long before its mirror is looked for: most find their other end at once.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);
/// Most ends in one look.
pub(crate) const UNPROVABLE_MAX: usize = 4096;
/// Looks that must agree before an end is given up.
pub(crate) const LOOKS: u8 = 2;

/// An end to look for: the process that registered it, its network namespace, local and peer.
pub struct Unprovable {
    pub who: ConnRef,
    pub pid: u32,
    pub netns: u64,
    pub local: SocketAddr,
    pub peer: SocketAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The mirror is there: its owner may yet register it.
    Here,
    Missing,
    /// The end itself is not in the table: it is another namespace's, or has just ended.
    Unknown,
}

/// One look at all of them. For a helper.
pub(crate) fn look(unprovable: &[Unprovable]) -> Vec<Seen> {
    let mut by_namespace: HashMap<u64, Vec<Pair>> = HashMap::new();
    for u in unprovable {
        let pairs = by_namespace.entry(u.netns).or_default();
        pairs.extend([(u.local, u.peer), (u.peer, u.local)]);
    }
    let namespaces = unprovable.iter().map(|u| (u.netns, u.pid)).collect();
    let there = diag::each(&namespaces, |netns, n| {
        let pairs = by_namespace.get(&netns).map_or(&[][..], Vec::as_slice);
        (netns, n.these(pairs))
    });
    let there: HashMap<u64, _> = there.into_iter().collect();
    let one = |u: &Unprovable| {
        let is = |pair: Pair| there.get(&u.netns).is_some_and(|t| t.contains_key(&pair));
        match (is((u.local, u.peer)), is((u.peer, u.local))) {
            (_, true) => Seen::Here,
            (true, false) => Seen::Missing,
            (false, false) => Seen::Unknown,
        }
    };
    unprovable.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::ids::ClientId;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_mirror_is_looked_for_in_the_kernels_table() {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let doubt = |local, peer| Unprovable {
            who: ConnRef {
                client: ClientId(1),
                conn: 0,
                gen: 0,
            },
            pid: std::process::id(),
            netns: 1,
            local,
            peer,
        };
        let (local, peer) = (a.local_addr().unwrap(), a.peer_addr().unwrap());
        let nowhere = "192.0.2.1:9".parse().unwrap();
        // The service has not even accepted: the kernel has the socket.
        assert_eq!(look(&[doubt(local, peer)]), [Seen::Here]);
        assert_eq!(look(&[doubt(nowhere, peer)]), [Seen::Unknown]);
    }
}
