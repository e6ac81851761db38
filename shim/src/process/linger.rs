//! SO_LINGER where the kernel's close has to be a reset.

use crate::state::table::Local;
use crate::sys;
use core::sync::atomic::Ordering::Relaxed;

/// `struct linger` that makes a close reset the connection: on, with a time of 0.
pub const RESET_AT_CLOSE: [u8; 8] = [1, 0, 0, 0, 0, 0, 0, 0];

/// Makes the kernel's close of this socket a reset.
pub fn prepare_reset(l: &Local, fd: i32) {
    let mut was = [0u8; 8];
    if sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &mut was).is_ok()
        && was != RESET_AT_CLOSE
    {
        l.lingered.store(u64::from_ne_bytes(was) | KEPT, Relaxed);
        let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &RESET_AT_CLOSE);
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
