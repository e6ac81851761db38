//! The processes that have the shim: how the daemon names them, what it says to them, what they may use, and what
//! their family tables show.
//!
//! Nothing here waits for a client or believes one: what waits to be sent is bounded, and tables are read as hostile
//! bytes. What a client's message does is decided in `core`, which this room must not know.

pub(crate) mod adopt;
pub(crate) mod client;
pub(crate) mod commands;
pub mod control;
pub(crate) mod families;
pub mod family;
pub(crate) mod idle;
pub mod ids;
pub mod limits;
pub(crate) mod looks;
pub(crate) mod notice;
pub(crate) mod places;
pub(crate) mod tenant;
pub(crate) mod view;
