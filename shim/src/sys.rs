//! The ground: the kernel and the C library as the shim calls them, locks, the calling thread, the environment.
//!
//! Nothing here knows connections or lanes, and nothing calls a function that the shim itself exports: that would be
//! its own hook.

pub mod clock;
pub mod env;
pub mod filter;
pub mod lock;
mod next;
pub mod pages;
pub mod pids;
mod raw;
pub mod real;
pub mod thread;

pub use raw::*;
