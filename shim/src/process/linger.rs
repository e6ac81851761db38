//! SO_LINGER: what the application wants of its close, and where the kernel's close has to be a reset.

use crate::state::table::Local;
use crate::sys;
use core::sync::atomic::Ordering::Relaxed;

/// `struct linger` that makes a close reset the connection: on, with a time of 0.
const RESET_AT_CLOSE: [u8; 8] = [1, 0, 0, 0, 0, 0, 0, 0];

/// How long the application wants its close to wait, in milliseconds; 0: the close is to be a reset.
pub fn linger_ms(fd: i32) -> Option<u64> {
    let mut b = [[0u8; 4]; 2];
    sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, b.as_flattened_mut()).ok()?;
    let [on, seconds] = b.map(u32::from_ne_bytes);
    (on != 0).then_some(u64::from(seconds) * 1000) // the kernel takes the number as unsigned
}

/// Makes the kernel's close of this socket a reset.
pub fn reset_at_close(fd: i32) {
    let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &RESET_AT_CLOSE);
}

/// The same for a socket whose close is the kernel's own; it may still not come to that.
pub fn prepare_reset(l: &Local, fd: i32) {
    let mut was = [0u8; 8];
    if sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &mut was).is_ok()
        && was != RESET_AT_CLOSE
    {
        l.lingered.store(u64::from_ne_bytes(was) | KEPT, Relaxed);
        reset_at_close(fd);
    }
}

/// In `Local::lingered`: there is a value. (In what the kernel says, the first number is 0 or 1.)
const KEPT: u64 = 2;

/// Somebody goes on with a connection after that, or closes it by himself: it has the application's SO_LINGER again.
pub fn restore(l: &Local, fd: i32) {
    let was = l.lingered.swap(0, Relaxed);
    if was != 0 {
        let was = (was & !KEPT).to_ne_bytes();
        let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &was);
    }
}
