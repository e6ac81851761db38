//! `libunderpass.so` stands between unmodified programs and the socket calls of their C library, and moves their
//! TCP connections onto lanes if possible.
//!
//! The shim is a guest. It starts no thread, handles no signal of its own, prints nothing, and never panics or
//! unwinds into the application; what it cannot do on a lane, it does on TCP.
//!
//! Its rooms, from the top: [`hooks`] is the C side: one function per name, which looks the descriptor up, and then
//! makes the native call or calls the rooms below. [`process`] makes and ends connections: close, fork, exec.
//! [`conn`] sends and receives. [`readiness`] waits: poll, select, epoll. [`promotion`] decides when a connection
//! gets or loses its lane. [`sets`] remembers which epoll sets watch it. [`tcp`] is the socket below the lane.
//! [`daemon`] is the control connection. [`state`] holds the tables, [`sys`] the kernel and the C library.
//!
//! A room names only those below it. If a lower one notices something that a higher one must act upon, it calls a
//! listener, which [`load`] has set.

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

mod conn;
mod daemon;
mod hooks;
mod process;
mod promotion;
mod readiness;
mod sets;
mod state;
mod sys;
mod tcp;

use process::arrivals;
use promotion::dispatch;
use state::{groups, table};
use sys::{clock, env, lock, pids, real};

/// Runs when the library is loaded. Other libraries' constructors may have called hooks before; until then, no
/// daemon is known, and everything stays on TCP.
#[ctor::ctor(unsafe)]
fn load() {
    lock::of_family(lock::Family {
        is_direction: table::is_direction,
        holder_died: promotion::holder_died,
    });
    daemon::listen(daemon::Listener {
        said: dispatch::said,
        greeted: promotion::greeted,
        lost: promotion::daemon_lost,
    });
    groups::listen(promotion::group_gone);
    tcp::listen(tcp::Listener {
        finish_close: process::finish_close,
        vanished: process::vanished,
    });
    env::init();
    real::find_early();
    pids::set_pid(sys::getpid());
    clock::cycles_per_us();
    arrivals::by_exec();
}

/// This thread's errno.
#[inline(always)]
pub(crate) fn errno() -> i32 {
    // SAFETY: the C library's errno location of this thread is always valid.
    unsafe { *libc::__errno_location() }
}

#[inline(always)]
pub(crate) fn set_errno(e: i32) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = e }
}

/// Runs `f` without changing errno.
pub(crate) fn preserving_errno<T>(f: impl FnOnce() -> T) -> T {
    let e = errno();
    let r = f();
    set_errno(e);
    r
}
