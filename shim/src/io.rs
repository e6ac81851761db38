//! Sending and receiving: one engine for all the calls of that family.
//!
//! A call comes with its buffers as an iovec and with a closure that makes the native call. Where
//! the direction is on TCP the closure runs, counted; otherwise the lane is used.

mod leave;
mod parts;
mod recv;
mod send;
mod sendfile;
pub mod short;
pub mod zerocopy;

pub use leave::{leave, yield_lane, LEAVE_MS};
pub use recv::recv;
pub use send::{full_for_long, go_down_full, send};
pub use sendfile::sendfile;

use crate::table;
use crate::tcp::*;
use crate::{control, lane, lock, pages, real};
use call::Call;
use core::sync::atomic::Ordering::*;
use libc::iovec;

/// Milliseconds without any progress of the reader after which a full ring goes down: kernel buffers
/// hold megabytes, and programs that write before they read rely on it. Longer than a reader that
/// is merely not scheduled takes.
pub const FULL_MS: u64 = 20;
/// Microseconds between two looks at TCP by whoever finds the ring empty.
const LOOK_US: u64 = 20;
/// Microseconds between two looks whether the peer's TCP end is still there, by a sender.
const CHECK_US: u64 = 2000;

/// Milliseconds that a non-blocking send waits for the far node's answer to a switch.
const ASK_MS: i64 = 2;

/// Bytes that the application has sent and the peer's node does not have yet, besides what the kernel counts:
/// for SIOCOUTQ. On one node what is on the ring is there already, as in the peer's receive queue, and outlives this
/// process and a close; counted is what that queue would not have taken yet.
pub fn outstanding(i: u32) -> i32 {
    let c = table::conn(i);
    if !lane::engaged_tx(c) {
        return 0;
    }
    let Some((_, m)) = lane::of(c, table::local(i)) else {
        return 0;
    };
    let Some(_g) = lock::lock(&c.tx.lock) else {
        return 0;
    };
    c.tx.outstanding(&m).min(i32::MAX as u64) as i32
}
