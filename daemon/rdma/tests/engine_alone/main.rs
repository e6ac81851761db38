//! The engine of one daemon, without another one: every message of the peer is chosen, every word of the application is
//! written by hand, and what the engine says, shows and reports is compared.

mod bench;
mod close;
mod credits;
mod epochs;
mod inn;
mod iwarp;
mod leave;
mod links;
mod moves;
mod out;
mod peer;
mod reach;
mod rest;
mod sides;
mod stuck;
mod tapped;
mod tokens;
mod waiting;
