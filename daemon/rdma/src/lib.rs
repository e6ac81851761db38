//! RDMA for the daemon.
//!
//! This crate keeps everything that knows verbs apart from the daemon's control plane: it has no tokio, starts no
//! threads and opens no sockets. The engine works over the traits in [`verbs`], so it runs the same over real devices
//! (the crate `underpass-ibv`) and over a simulation ([`sim`]).

#![warn(missing_docs, unreachable_pub)]

pub mod devices;
pub mod engine;
pub mod sim;
pub mod verbs;
pub mod wire;
