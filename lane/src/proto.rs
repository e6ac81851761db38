//! What two clients of a link group, and a client and its daemon, say to each other apart from shared memory: control
//! messages, the frame in the TCP stream, and the reasons why a connection is on TCP.
//!
//! It must never trust what it decodes: any bytes may come from a peer.

pub mod frame;
pub mod msg;
pub mod reason;
