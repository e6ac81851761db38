//! Waiting: a call that blocks on a connection, `poll`, `select`, and epoll sets.
//!
//! The shim has no thread, so whoever waits also does what must be done meanwhile: it reads the daemon's messages,
//! switches directions, wakes others. Nothing here moves the application's bytes, sleeps with a lock held, or sleeps
//! before it has entered itself among the sleepers and then looked once more.

pub mod engine;
pub mod epoll;
pub mod few;
pub mod poll;
pub mod room;
pub mod wait;
