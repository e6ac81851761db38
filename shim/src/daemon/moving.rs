//! What the daemon is told when this process leaves its family: see `crate::family`.

use super::{drop_connection, fd, send, settle, LOCK, NEXT_TRY_MS, READY};
use crate::sys::lock;
use core::sync::atomic::Ordering::*;
use lane::family::TABLE_BYTES;
use lane::proto::msg::ToDaemon;

/// Ends our connection, if there is one, and calls `then` before a new one can be made. False: another thread is
/// using the connection.
pub fn part(then: impl FnOnce() -> bool) -> bool {
    let Some(_g) = lock::try_lock(&LOCK) else {
        return false;
    };
    if fd() >= 0 {
        drop_connection();
        NEXT_TRY_MS.store(0, Relaxed); // the next connection may be made at once
    }
    then()
}

/// Can the daemon be told that this process has another table from now on?
pub fn can_move() -> bool {
    fd() >= 0 && READY.load(Acquire) != 0
}

/// Tells the daemon which table that is. False: the daemon does not take the message now.
pub fn moved(table: i32) -> bool {
    let m = ToDaemon::Moved {
        table_bytes: TABLE_BYTES as u64,
    };
    settle() && send(&m, &[table]).is_ok()
}
