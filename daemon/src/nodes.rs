//! Other nodes: which there are, what their daemons say, and connections whose other end is one of theirs.
//!
//! State and messages only; the channels themselves are tasks around the core. Nothing that a peer says is believed
//! beyond what the directory and the proof allow it to say.

pub(crate) mod expedite;
pub mod peers;
