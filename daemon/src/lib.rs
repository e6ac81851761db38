//! underpassd: the per-node daemon.
//!
//! It pairs the two ends of TCP connections, makes the links they use, and then is not needed any more: lanes
//! between processes of one node work without it. Lanes to other nodes are carried by the daemon itself (`rail`).
//! It trusts no shim and no peer: every decision is based on what it reads from the kernel.

pub mod admin_server;
pub mod adopt;
pub mod bpf;
pub mod census;
pub mod channels;
pub mod commands;
pub mod config;
pub mod control;
pub mod core;
pub mod daemon;
pub mod dataplane;
pub mod elsewhere;
pub mod events;
pub mod families;
pub mod family;
pub mod fds;
pub mod holders;
pub mod idle;
pub mod ids;
pub mod inherited;
pub mod limits;
pub mod links;
pub mod looks;
pub mod memfd;
pub mod notice;
pub mod pairing;
pub mod party;
pub mod peers;
pub mod process;
pub mod proof;
pub mod rail;
pub mod rail_view;
mod random;
pub mod seek;
pub mod server;
pub mod socket;
pub mod sockopt;
pub mod system;
pub mod tasks;
pub mod tcp;
pub mod unseen;
pub mod view;
pub mod wire;
