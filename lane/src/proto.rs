//! What is said beside shared memory: control messages between shim and daemon, the frame in the TCP stream, and the
//! reasons why a connection is on TCP.
//!
//! It must never trust what it decodes: any bytes may come from a peer.

pub mod frame;
pub mod msg;
pub mod reason;
