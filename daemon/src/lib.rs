//! underpassd: the per-node daemon.

pub mod admin;
