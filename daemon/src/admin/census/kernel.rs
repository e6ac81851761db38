//! The TCP sockets that the kernel lists in some network namespaces.

use crate::clients::ids::ClientId;
use crate::os::diag::{self, Namespace, Pair};
use crate::os::translated::{self, Leaving};
use crate::os::{namespaces, tcp};
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use underpass_admin::proc;

/// The TCP sockets of all namespaces that have processes with rows, and what has been looked for in others.
#[derive(Default)]
pub(crate) struct Kernel {
    /// With a process in each.
    read: HashMap<u64, u32>,
    /// With the namespace that each is in.
    by_inode: HashMap<u64, (u64, tcp::Socket)>,
    by_pair: HashMap<(SocketAddr, SocketAddr), Vec<(u64, tcp::Socket)>>,
    /// Other ends that know one of the two addresses by another, by the addresses of this end.
    by_translated: HashMap<(SocketAddr, SocketAddr), (u64, tcp::Socket)>,
}

/// An end whose other end is in no namespace that has processes with rows.
pub(crate) struct Lost {
    /// The row's process and connection.
    pub who: (ClientId, u32, u32),
    pub netns: u64,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub is_client: bool,
}

impl Kernel {
    /// `namespaces`: for each namespace a process in it, through whose `/proc` it is looked at.
    pub(crate) fn read(namespaces: &HashMap<u64, u32>) -> Self {
        let mut k = Kernel::default();
        let look = |netns, n: &Namespace| (netns, n.sockets());
        k.read.clone_from(namespaces);
        for (netns, sockets) in diag::each(namespaces, look) {
            for s in sockets {
                if s.inode != 0 {
                    k.by_inode.insert(s.inode, (netns, s.clone()));
                }
                k.enter(netns, s);
            }
        }
        k
    }

    /// With these sockets: their namespaces and inodes.
    #[cfg(test)]
    pub(super) fn of<const N: usize>(sockets: [(u64, u64); N]) -> Kernel {
        let none = SocketAddr::from(([0, 0, 0, 0], 0));
        let socket = |inode| tcp::Socket {
            state: tcp::state::ESTABLISHED,
            local: none,
            peer: none,
            uid: 0,
            inode,
        };
        Kernel {
            by_inode: sockets.map(|(n, i)| (i, (n, socket(i)))).into(),
            ..Kernel::default()
        }
    }

    fn enter(&mut self, netns: u64, s: tcp::Socket) {
        if s.state != tcp::state::LISTEN {
            let all = self.by_pair.entry((s.local, s.peer)).or_default();
            all.push((netns, s));
        }
    }

    /// Looks in all other namespaces of this node, whose programs have no shim, for the other ends of these.
    pub(crate) fn look_elsewhere(&mut self, of: &[Lost]) {
        let beyond = self.beyond(of);
        let real = beyond.iter().flatten().flat_map(|p| [p.0, p.1]);
        let ends = of.iter().flat_map(|l| [l.local, l.peer]).chain(real);
        let ends: HashSet<SocketAddr> = ends.collect();
        let look = |netns, n: &Namespace| {
            let mut all = n.sockets();
            all.retain(|s| ends.contains(&s.local) || ends.contains(&s.peer));
            (netns, all)
        };
        let read = self.read.keys().copied().collect();
        for (netns, sockets) in diag::each(&namespaces::others(&read), look) {
            for s in sockets {
                self.enter(netns, s);
            }
        }
        let node = proc::own_netns();
        let mut found = HashMap::new();
        {
            let ends = Established::of(self.by_pair.values().flatten());
            for (l, there) in of.iter().zip(beyond) {
                let certain = there.and_then(|(local, peer)| self.other_end(l.netns, peer, local));
                let between = || ends.translated(l).filter(|_| Some(l.netns) != node);
                let pods = || between().filter(|o| o.0 != l.netns && Some(o.0) != node);
                if let Some(o) = certain.or_else(pods) {
                    found.insert((l.local, l.peer), o.clone());
                }
            }
        }
        self.by_translated = found;
    }

    /// How the other ends of these have them, where this node translates them.
    fn beyond(&self, of: &[Lost]) -> Vec<Option<Pair>> {
        let leaving = of.iter().map(|l| Leaving {
            netns: l.netns,
            pid: self.read.get(&l.netns).copied().unwrap_or(0),
            local: l.local,
            peer: l.peer,
        });
        translated::look(&leaving.collect::<Vec<_>>())
    }

    /// Are there processes with rows in this namespace?
    pub(crate) fn has_rows(&self, netns: u64) -> bool {
        self.read.contains_key(&netns)
    }

    pub(crate) fn socket(&self, inode: u64) -> Option<&tcp::Socket> {
        self.by_inode.get(&inode).map(|s| &s.1)
    }

    /// Is there such a socket in this namespace?
    pub(crate) fn has(&self, netns: u64, inode: u64) -> bool {
        self.by_inode.get(&inode).is_some_and(|s| s.0 == netns)
    }

    /// The other end of the connection that has these addresses in this namespace: the one in the same namespace, otherwise the
    /// only one in all namespaces.
    pub(crate) fn other_end(
        &self,
        netns: u64,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Option<&(u64, tcp::Socket)> {
        let Some(all) = self.by_pair.get(&(peer, local)) else {
            return self.by_translated.get(&(local, peer));
        };
        let here = all.iter().find(|s| s.0 == netns);
        here.or_else(|| all.first().filter(|_| all.len() == 1))
    }
}

/// Established sockets by one of their addresses; `None`: several have it.
struct Established<'a> {
    by_local: HashMap<SocketAddr, Option<&'a (u64, tcp::Socket)>>,
    by_peer: HashMap<SocketAddr, Option<&'a (u64, tcp::Socket)>>,
}

impl<'a> Established<'a> {
    fn of(all: impl Iterator<Item = &'a (u64, tcp::Socket)>) -> Self {
        let (mut by_local, mut by_peer) = (HashMap::new(), HashMap::new());
        for s in all.filter(|s| s.1.state == tcp::state::ESTABLISHED) {
            for (map, at) in [(&mut by_local, s.1.local), (&mut by_peer, s.1.peer)] {
                map.entry(at)
                    .and_modify(|one| *one = None)
                    .or_insert(Some(s));
            }
        }
        Established { by_local, by_peer }
    }

    /// The other end of a connection of which the server's address is translated on its way (a service's): it has, or knows, the
    /// client by the same address as this end. Only if there is one, and only between pods: in the place of their addresses,
    /// the node's may stand for many; and those of the loopback interface are in each namespace.
    fn translated(&self, l: &Lost) -> Option<&'a (u64, tcp::Socket)> {
        if l.local.ip().is_loopback() || l.peer.ip().is_loopback() {
            return None;
        }
        let found = match l.is_client {
            true => self.by_peer.get(&l.local),
            false => self.by_local.get(&l.peer),
        };
        *found?
    }
}
