//! The contract between the two clients of a link group.
//!
//! A *link group* is what two clients share: for each client one memory area that it alone writes and
//! the other maps read-only, plus one doorbell each way. It carries many *lanes*; a lane is the
//! pair of rings that carry one promoted TCP connection. A client is a shim or a daemon: nothing
//! here assumes that the other side is a process of this node.
//!
//! What this crate must never do: allocate, block, panic on what the other side wrote, or take a
//! word from the other side's memory twice. Everything read from a peer is read once and checked.

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

#[macro_use]
mod named;

pub mod abi;
pub mod family;
pub mod half;
pub mod notify;
pub mod num;
pub mod os;
pub mod prim;
pub mod proto;

/// Version of the memory layout and of the control messages. Clients whose ranges `[MIN_VERSION, VERSION]` overlap
/// work together; others stay on TCP with [`proto::reason::Reason::VersionMismatch`].
///
/// 5: a daemon goes on with plain bytes that an end has recorded, also if none of them is on TCP yet ([`abi::marks::PASSES`]).
pub const VERSION: u16 = 5;
/// Oldest version this build still speaks.
pub const MIN_VERSION: u16 = 4;
