//! What the command-line tool is told: rows of sockets, counters, devices, events; and what it may order.
//!
//! Reads the core's state and the kernel's tables. It shows a caller only what that caller may see, and changes
//! nothing but by the core's commands.

mod caller;
mod capture;
mod census;
mod check;
pub(crate) mod gate;
pub(crate) mod rail_view;
mod rules;
pub(crate) mod server;
mod stream;
