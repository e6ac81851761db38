//! The processes that have the shim: how the daemon names them, what it says to them, what they may use, and what
//! their family tables show.
//!
//! Nothing here waits for a client or believes one: what waits to be sent is bounded, and tables are read as hostile
//! bytes. What a client's message does is decided in `core`, which this room must not know.

pub mod adopt;
pub mod commands;
pub mod control;
pub mod families;
pub mod family;
pub mod idle;
pub mod ids;
pub mod limits;
pub mod notice;
pub mod party;
pub mod view;
