//! The tasks around the core: each waits for one kind of thing (a client's message, a peer's, a helper's result) and
//! gives it to the core.
//!
//! They do the waiting and the I/O, and hold no state that outlives a connection: what to do is decided in `core`,
//! which knows none of them.

pub mod channels;
pub(crate) mod lookups;
pub(crate) mod readings;
pub(crate) mod seal;
pub mod server;
pub(crate) mod takeover;
