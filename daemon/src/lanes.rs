//! Link groups and the lanes in them, from their offer until nobody holds their sockets any more.
//!
//! The state machine does no I/O, and what takes time (who holds a socket?) is a function for a helper thread. The
//! bytes of lanes, and their directions, are none of this room's business.

pub(crate) mod capture;
pub mod groups;
pub(crate) mod holders;
pub(crate) mod inherited;
pub(crate) mod sock;
pub(crate) mod takeover;
pub(crate) mod unseen;
