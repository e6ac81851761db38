//! What this process knows: its descriptors, the family's table of connections, the link groups and lanes that it has
//! mapped, its sleepers, the application's rings and signal handlers.
//!
//! Here are the tables, and the rules by which they change; the rooms above decide. Nothing here talks to the daemon,
//! and nothing waits but for a lock.

pub mod attached;
pub mod fdtab;
pub mod fuse;
pub mod groups;
pub mod signals;
pub mod table;
pub mod unanswered;
pub mod uring;
pub mod waiters;
