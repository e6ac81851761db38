//! What happens to descriptors and to the process: close, dup, shutdown, fork, exec, spawn, and what comes from other
//! processes.
//!
//! Here connections enter the tables and leave them, so this room is above all others but the hooks. It never waits for
//! the daemon, and for a peer only as long as that gets to take its bytes back.

pub mod arrivals;
mod fdops;

pub use fdops::*;
