//! What the kubelet calls on this node, over sockets of its own: the driver of ephemeral volumes ([`csi`]), and the plugin that
//! hands out devices ([`devices`]). Each is told to the kubelet in its own way, and both answer gRPC (`grpc`), also that of
//! kubelets which say who they call as no standard has it (`authority`).

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

mod authority;
pub mod csi;
pub mod devices;
mod grpc;
#[cfg(test)]
#[path = "../../tests/common/skip.rs"]
mod skip;
