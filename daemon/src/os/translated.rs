//! How the other ends of connections have the addresses that this node translates on the way: in the program's own namespace (a
//! proxy beside it), then in the node's (kube-proxy). What is translated after that, elsewhere, nobody here knows.

use super::diag::{self, Pair};
use std::collections::HashMap;
use std::net::SocketAddr;
use underpass_admin::proc;

/// An end: its network namespace, a process there, its local and peer address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leaving {
    pub netns: u64,
    pub pid: u32,
    pub local: SocketAddr,
    pub peer: SocketAddr,
}

/// For each of these: local and peer address of its other end. `None`: nothing is translated on this node. For a helper.
pub(crate) fn look(of: &[Leaving]) -> Vec<Option<Pair>> {
    if of.is_empty() {
        return Vec::new();
    }
    let node = proc::own_netns();
    let mut out: Vec<Pair> = of.iter().map(|l| (l.local, l.peer)).collect();
    let foreign = of.iter().filter(|l| Some(l.netns) != node);
    let own: HashMap<u64, u32> = foreign.map(|l| (l.netns, l.pid)).collect();
    step(&own, &mut out, |netns, i| of[i].netns == netns);
    let here = node.map(|n| (n, std::process::id())).into_iter().collect();
    step(&here, &mut out, |_, _| true);
    let translated =
        |(l, now): (&Leaving, Pair)| (now != (l.local, l.peer)).then_some((now.1, now.0));
    of.iter().zip(out).map(translated).collect()
}

/// Takes those that go through these namespaces to their other sides.
fn step(through: &HashMap<u64, u32>, out: &mut [Pair], goes: impl Fn(u64, usize) -> bool + Sync) {
    if through.is_empty() {
        return;
    }
    let before = &*out;
    let moved = diag::each(through, |netns, n| {
        let of: Vec<usize> = (0..before.len()).filter(|i| goes(netns, *i)).collect();
        let pairs: Vec<Pair> = of.iter().map(|i| before[*i]).collect();
        of.into_iter().zip(n.beyond(&pairs)).collect::<Vec<_>>()
    });
    for (i, beyond) in moved.into_iter().flatten() {
        if let Some((local, peer)) = beyond {
            out[i] = (peer, local);
        }
    }
}
