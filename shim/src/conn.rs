//! Sending and receiving: one engine for all the calls of that family.
//!
//! Each call passes its buffers as an iovec, and a closure that makes the native call. If the direction is on TCP,
//! the closure runs and its bytes are counted; otherwise the lane is used.
//!
//! A byte goes either way, never both, and in order. A call that the application makes non-blocking never sleeps here
//! for longer than the moments named below.

mod parts;
mod recv;
mod send;
mod sendfile;
pub mod short;
pub mod zerocopy;

pub use recv::recv;
pub use send::send;
pub use sendfile::sendfile;

use crate::state::table::Local;
use crate::state::{attached, table, waiters};
use crate::sys::{lock, pages, real};
use crate::tcp::*;
use crate::{daemon, sets};
use call::Call;
use core::sync::atomic::Ordering::*;
use lane::family::Conn;
use lane::num;
use lane::proto::reason::Reason;
use libc::iovec;

/// Minimal microseconds between two looks at TCP by threads that find the ring empty.
const LOOK_US: u64 = 20;
/// Microseconds after which a sender checks again whether the peer's TCP end is still there.
const CHECK_US: u64 = 2000;

/// Milliseconds that a non-blocking send waits for the remote node's answer to a switch.
const ASK_MS: i64 = 2;

/// What SIOCOUTQ reports for the lane, in addition to the kernel's count: bytes that the application has sent and
/// that the peer's node does not have yet. On one node, the bytes of the ring are at the peer's node already, as
/// if in its receive queue, and they outlive this process and a close. So only those bytes count that the queue
/// would not have taken yet.
pub fn outstanding(i: u32) -> i32 {
    let c = table::conn(i);
    if !attached::engaged_tx(c) {
        return 0;
    }
    let Some((_, m)) = attached::of(c, table::local(i)) else {
        return 0;
    };
    let Some(_g) = lock::lock(&c.tx.lock) else {
        return 0;
    };
    num::int(c.tx.outstanding(&m))
}

/// Resets the connection of this call, which has no lock of it.
#[cold]
fn reset_of(call: &Call, c: &Conn, l: &Local, r: Reason) {
    // Until the lock is released, no other thread can end a close, after which number and entry are another connection's.
    // (Of a lock whose holder is stopped that is as true.)
    let _g = lock_for(&c.tx.lock, true);
    if call.current(c, l) {
        reset(c, call.fd(l), r);
    }
}

/// The application has set the size of a buffer: threads that wait for room look again.
#[cold]
pub fn resized(i: u32) {
    let (c, l) = (table::conn(i), table::local(i));
    {
        // Under both locks: a lane that is attached already is updated here, and a later one reads the new sizes
        // itself.
        let (Some(_t), Some(_r)) = (lock::lock(&c.tx.lock), lock::lock(&c.rx.lock)) else {
            return;
        };
        let Some((_, m)) = attached::of(c, l) else {
            return;
        };
        bufs::sync(c, &m, l.fd.load(Relaxed));
    }
    sets::notify(i);
    waiters::look(i);
}
