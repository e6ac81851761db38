//! underpassd: the per-node daemon.
//!
//! It pairs the two ends of TCP connections, makes the link groups they use, and then is not needed any more: lanes
//! between processes of one node work without it. Lanes to other nodes are carried by the daemon itself (`dataplane`).
//! It trusts no shim and no peer: every decision is based on what it reads from the kernel.

#![warn(unreachable_pub)]
// `as` only where a lint exception says why. Tests may: what they lose, they notice.
#![cfg_attr(
    not(test),
    warn(
        clippy::as_ptr_cast_mut,
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        clippy::ptr_as_ptr,
        clippy::ref_as_ptr
    )
)]

mod admin;
pub mod clients;
pub mod config;
pub mod core;
pub mod daemon;
pub mod dataplane;
pub mod histogram;
pub mod lanes;
mod metrics;
pub mod nodes;
pub mod os;
pub mod pairing;
pub mod pods;
pub mod rules;
#[cfg(test)]
#[path = "../tests/common/skip.rs"]
mod skip;
pub mod tasks;
