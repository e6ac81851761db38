//! Which containers of a node get the shim, and what they are given: what their pods ask for, what the cluster says of
//! those, and what lies ready on the node. Shared by the daemon and by the plugin that the container runtime starts itself.

#![warn(unreachable_pub)]
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

pub mod cluster;
pub mod files;
pub mod left;
pub mod place;
pub mod policy;
