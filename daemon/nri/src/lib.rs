//! The Node Resource Interface (NRI) of container runtimes (containerd from 1.7 on, CRI-O): a plugin's end of it.
//!
//! A plugin connects to the runtime's Unix socket. Two connections of ttrpc share it (`frames`): on one the plugin calls
//! the runtime, once, to register; on the other the runtime calls the plugin, before it makes a container and when pods
//! come and go ([`serve`]). The runtime waits for each answer, and makes no container meanwhile: a [`Plugin`] must answer
//! from what it has.
//!
//! Source: `pkg/api/api.proto`, `pkg/net/multiplex` of github.com/containerd/nri; `PROTOCOL.md` of
//! github.com/containerd/ttrpc.

// But for one descriptor that is known by its number.
#![deny(unsafe_code)]
#![warn(missing_docs, unreachable_pub)]

pub mod frames;
pub mod launched;
pub mod messages;
mod plugin;

pub use plugin::{serve, Error, Plugin};
