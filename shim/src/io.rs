//! Sending and receiving: one engine for all the calls of that family.
//!
//! Each call passes its buffers as an iovec, and a closure that makes the native call. If the direction is on TCP,
//! the closure runs and its bytes are counted; otherwise the lane is used.

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

/// If the reader takes nothing from a full ring for so many milliseconds, the direction goes down: the kernel's
/// buffers hold megabytes, and programs that write before they read rely on that. The time is longer than the
/// delay of a reader that is merely not scheduled.
pub const FULL_MS: u64 = 20;
/// Minimal microseconds between two looks at TCP by threads that find the ring empty.
const LOOK_US: u64 = 20;
/// Microseconds after which a sender checks again whether the peer's TCP end is still there.
const CHECK_US: u64 = 2000;

/// Milliseconds that a non-blocking send waits for the far node's answer to a switch.
const ASK_MS: i64 = 2;

/// What SIOCOUTQ reports for the lane, in addition to the kernel's count: bytes that the application has sent and
/// that the peer's node does not have yet. On one node, the bytes of the ring are at the peer's node already, as
/// if in its receive queue, and they outlive this process and a close. So only those bytes count that the queue
/// would not have taken yet.
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
