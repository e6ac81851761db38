//! The halves of a lane, each without the other: every word that the other end or a daemon can have stored is written by
//! hand, every answer of TCP is chosen, and all that follows is compared, looks and publishes included.

#![cfg(not(loom))]

mod attempts;
mod bring;
mod counts;
mod died;
mod down;
mod end;
mod ends;
mod goes_on;
mod leaving;
mod past;
mod receive;
mod sends;
mod taken;
mod undecided;
mod up;
mod work;
