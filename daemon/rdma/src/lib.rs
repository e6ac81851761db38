//! RDMA for the daemon.
//!
//! This crate keeps everything that knows verbs apart from the daemon's control plane: it has no tokio, starts no
//! threads and opens no sockets. The engine works over the traits in [`verbs`], so it runs the same over real devices
//! (the crate `underpass-ibv`) and over a simulation ([`sim`]).

#![warn(missing_docs, unreachable_pub)]
// `as` only where a lint exception says why. Tests may: what they lose, they notice.
#![cfg_attr(
    not(test),
    warn(
        clippy::as_ptr_cast_mut,
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        clippy::ptr_as_ptr,
        clippy::ref_as_ptr
    )
)]

pub mod devices;
pub mod engine;
pub mod sim;
pub mod verbs;
pub mod wire;
