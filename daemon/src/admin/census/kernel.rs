//! The TCP sockets that the kernel lists in some network namespaces.

use crate::os::tcp;
use std::collections::HashMap;
use std::net::SocketAddr;

/// The TCP sockets of all namespaces that have processes with rows.
#[derive(Default)]
pub(crate) struct Kernel {
    by_inode: HashMap<u64, tcp::Socket>,
    by_pair: HashMap<(SocketAddr, SocketAddr), Vec<(u64, tcp::Socket)>>,
}

impl Kernel {
    /// `namespaces`: for each namespace a process in it, through whose `/proc` the tables are read.
    pub(crate) fn read(namespaces: HashMap<u64, u32>) -> Self {
        let mut k = Kernel::default();
        for (netns, pid) in namespaces {
            for s in tcp::sockets(pid) {
                if s.inode != 0 {
                    k.by_inode.insert(s.inode, s.clone());
                }
                if !matches!(s.state, tcp::state::LISTEN | tcp::state::TIME_WAIT) {
                    let all = k.by_pair.entry((s.local, s.peer)).or_default();
                    all.push((netns, s));
                }
            }
        }
        k
    }

    pub(crate) fn socket(&self, inode: u64) -> Option<&tcp::Socket> {
        self.by_inode.get(&inode)
    }

    /// The socket with these addresses: the one in this namespace, otherwise the only one in all namespaces.
    pub(crate) fn pair(
        &self,
        netns: u64,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Option<&(u64, tcp::Socket)> {
        let all = self.by_pair.get(&(local, peer))?;
        let here = all.iter().find(|s| s.0 == netns);
        here.or_else(|| all.first().filter(|_| all.len() == 1))
    }
}
