//! What the daemon asks of the kernel: sockets and their options, descriptors that came from outside, memory files,
//! `/proc`, the clock.
//!
//! Each module wraps one thing that the kernel offers. None of them knows what a lane, a client or another node is,
//! and none names a module outside this room.

pub(crate) mod address;
pub(crate) mod bpf;
pub(crate) mod cgroup2;
mod conntrack;
pub(crate) mod diag;
pub mod fds;
pub(crate) mod held;
pub(crate) mod locality;
pub mod memfd;
pub mod memory_room;
pub(crate) mod namespaces;
pub(crate) mod panics;
pub(crate) mod pool;
pub mod process;
pub(crate) mod random;
pub mod sockopt;
pub mod system;
pub(crate) mod tcp;
pub(crate) mod translated;
pub mod wire;
