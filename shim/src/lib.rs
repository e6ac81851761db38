//! `libunderpass.so` stands between unmodified programs and the socket calls of their C library, and moves their
//! TCP connections onto lanes if possible.
//!
//! The shim is a guest. It starts no thread, handles no signal of its own, prints nothing, and never panics or
//! unwinds into the application; what it cannot do on a lane, it does on TCP. [`hooks`] is the C side: one
//! function per name, which looks the descriptor up, and then makes the native call or calls the modules below.
//! [`io`], [`epoll`], [`poll`] and [`fdops`] hold the logic; [`promote`] decides when a connection gets or loses
//! its lane; [`control`] talks to the daemon; [`signals`] keeps signal handlers from running in the middle of a
//! hook.
//!
//! Modules name only those below them. If a lower module notices something that a higher one must act upon, it
//! calls a listener, which [`load`] has set.

mod arrivals;
mod control;
mod dispatch;
mod ends;
mod env;
mod epoll;
mod family;
mod fdops;
mod fdtab;
mod few;
mod filter;
mod hooks;
mod io;
mod lane;
mod links;
mod lock;
mod pages;
mod poll;
mod port;
mod probes;
mod process;
mod promote;
mod real;
mod received;
mod sets;
mod signals;
mod sys;
mod table;
mod tcp;
mod thread;
mod uring;
mod wait;

/// Runs when the library is loaded. Other libraries' constructors may have called hooks before; until then, no
/// daemon is known, and everything stays on TCP.
#[ctor::ctor(unsafe)]
fn load() {
    lock::of_family(lock::Family {
        is_direction: table::is_direction,
        holder_died: promote::holder_died,
    });
    control::listen(control::Listener {
        said: dispatch::said,
        greeted: promote::greeted,
        lost: promote::daemon_lost,
    });
    links::listen(promote::link_gone);
    tcp::listen(tcp::Listener {
        finish_close: fdops::finish_close,
        vanished: fdops::vanished,
    });
    env::init();
    real::find_early();
    process::set_pid(sys::getpid());
    wait::cycles_per_us();
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
