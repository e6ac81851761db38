//! How parties and their connections are named.

/// Number of a party, never given twice by one daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PartyId(pub u64);

impl PartyId {
    /// Of processes that are shown but have not said hello: never given to a party.
    pub const NOBODY: PartyId = PartyId(0);

    /// This daemon, as the other party of link groups to peer node number `n`.
    pub fn far(n: u32) -> PartyId {
        PartyId(1 << 63 | u64::from(n))
    }

    pub fn is_far(self) -> bool {
        self.0 >> 63 == 1
    }
}

/// A registered connection of a party: index and generation in its family table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnRef {
    pub party: PartyId,
    pub conn: u32,
    pub gen: u32,
}
