//! How clients and their connections are named.

/// Number of a client, never given twice by one daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u64);

impl ClientId {
    /// Of processes that are shown but have not said hello: never given to a client.
    pub const NOBODY: ClientId = ClientId(0);

    /// This daemon, as the other client of the link groups for peer node number `n`.
    pub fn remote(n: u32) -> ClientId {
        ClientId(1 << 63 | u64::from(n))
    }

    pub fn is_remote(self) -> bool {
        self.0 >> 63 == 1
    }
}

/// A registered connection of a client: index and generation in its family table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnRef {
    pub client: ClientId,
    pub conn: u32,
    pub gen: u32,
}
