//! The C side: one exported function per name. They look at the descriptor table and either call
//! the next definition or go into the shim's own logic; nothing else belongs here.
//!
//! `extern "C"`, never `"C-unwind"`: under `panic=abort` the latter would abort when a thread is
//! cancelled inside a blocking call.
//!
//! Safety, for every function here: it has the contract of the C function of the same name, and
//! passes the application's pointers on to it or to code that treats them the same way.
#![allow(clippy::missing_safety_doc)]

mod actions;
mod fd;
mod make;
mod memory;
mod msg;
mod number;
mod proc;
mod ready;
mod rw;
mod signal;
mod sock;
mod uring;
mod user;
mod variadic;
