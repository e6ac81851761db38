//! A directory that changes, as a cluster's does.

use std::cell::Cell;
use std::net::IpAddr;
use underpassd::nodes::peers::directory::{Directory, FileDirectory, Name, Owner, Peer};

/// What it says of the other node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    All,
    /// Its name, but none of its addresses.
    Name,
    Nothing,
}

pub struct Listing {
    pub file: FileDirectory,
    pub known: Cell<Known>,
}

impl Directory for Listing {
    fn own(&self) -> &Name {
        self.file.own()
    }

    fn find(&self, node: &str) -> Option<Peer> {
        let known = self.known.get() != Known::Nothing;
        self.file.find(node).filter(|_| known)
    }

    fn peers(&self) -> Vec<Peer> {
        match self.known.get() {
            Known::Nothing => Vec::new(),
            _ => self.file.peers(),
        }
    }

    fn generation(&self) -> u64 {
        self.known.get() as u64
    }

    fn owner(&self, ip: IpAddr) -> Owner {
        match (self.file.owner(ip), self.known.get()) {
            (Owner::Peer(_), Known::Name | Known::Nothing) => Owner::Nobody,
            (owner, _) => owner,
        }
    }
}
