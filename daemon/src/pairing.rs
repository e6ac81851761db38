//! Which two sockets are the two ends of one connection: what the kernel says about a registered socket, what was
//! recorded when its connection was made, and the table of ends of this node that wait for their other end.
//!
//! A pair must never be made of addresses alone: they prove nothing across network namespaces. Ends on other nodes
//! are paired in `nodes`, with the same proof.

pub(crate) mod bpf;
pub(crate) mod local;
pub mod proof;
pub mod socket;
pub(crate) mod unprovable;
