//! Processes: fork, exec, spawn, and raw system calls.

use crate::{fdops, io, real, sys, table};
use core::ffi::{c_char, c_void};
use link::reason::Reason;

fn forked(native: impl Fn() -> i32) -> i32 {
    io::quietly(fdops::before_fork);
    let r = native();
    if r == 0 {
        io::quietly(fdops::after_fork_child);
    } else {
        io::quietly(|| fdops::after_fork_parent(r < 0));
    }
    r
}

#[no_mangle]
pub unsafe extern "C" fn fork() -> i32 {
    // SAFETY: see the module above (all calls in this file).
    forked(|| unsafe { real::fork() })
}

#[no_mangle]
pub unsafe extern "C" fn _Fork() -> i32 {
    // SAFETY: see above.
    forked(|| unsafe { real::_Fork() })
}

#[no_mangle]
pub unsafe extern "C" fn daemon(a: i32, b: i32) -> i32 {
    io::quietly(fdops::before_fork);
    // SAFETY: see above. The parent exits inside; what returns is the child, or a failure.
    let r = unsafe { real::daemon(a, b) };
    if sys::getpid() != table::pid() {
        io::quietly(fdops::after_fork_child);
    } else {
        io::quietly(|| fdops::after_fork_parent(true));
    }
    r
}

macro_rules! exec {
    ($($name:ident($($a:ident: $t:ty),*);)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name($($a: $t),*) -> i32 {
            io::quietly(fdops::before_exec);
            // SAFETY: see above.
            let r = unsafe { real::$name($($a),*) };
            io::quietly(fdops::exec_failed);
            r
        }
    )*};
}

exec! {
    execve(p: *const c_char, a: *const *const c_char, e: *const *const c_char);
    execv(p: *const c_char, a: *const *const c_char);
    execvp(p: *const c_char, a: *const *const c_char);
    execvpe(p: *const c_char, a: *const *const c_char, e: *const *const c_char);
    execveat(d: i32, p: *const c_char, a: *const *const c_char, e: *const *const c_char, f: i32);
    fexecve(fd: i32, a: *const *const c_char, e: *const *const c_char);
}

macro_rules! spawn {
    ($($name:ident($($a:ident: $t:ty),*) -> $r:ty;)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name($($a: $t),*) -> $r {
            io::quietly(fdops::before_spawn);
            // SAFETY: see above.
            unsafe { real::$name($($a),*) }
        }
    )*};
}

spawn! {
    posix_spawn(pid: *mut i32, p: *const c_char, fa: *const c_void, at: *const c_void, a: *const *const c_char, e: *const *const c_char) -> i32;
    posix_spawnp(pid: *mut i32, p: *const c_char, fa: *const c_void, at: *const c_void, a: *const *const c_char, e: *const *const c_char) -> i32;
    system(c: *const c_char) -> i32;
    popen(c: *const c_char, t: *const c_char) -> *mut c_void;
}

/// `syscall(2)`: a raw call on a descriptor of ours goes by the hooks; such a connection goes back
/// to TCP first. The first argument of every call that moves bytes is the descriptor.
#[no_mangle]
pub unsafe extern "C" fn syscall(
    n: i64,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> i64 {
    match n {
        libc::SYS_read
        | libc::SYS_write
        | libc::SYS_readv
        | libc::SYS_writev
        | libc::SYS_sendto
        | libc::SYS_recvfrom
        | libc::SYS_sendmsg
        | libc::SYS_recvmsg
        | libc::SYS_sendmmsg
        | libc::SYS_recvmmsg
        | libc::SYS_preadv2
        | libc::SYS_pwritev2
        | libc::SYS_sendfile
        | libc::SYS_splice => {
            fdops::give_up(a as i32, Reason::Bypassed);
            if n == libc::SYS_splice {
                fdops::give_up(c as i32, Reason::Bypassed);
            }
        }
        libc::SYS_close => {
            // SAFETY: as close(2).
            return i64::from(unsafe { super::fd::close(a as i32) });
        }
        _ => {}
    }
    // SAFETY: see above.
    unsafe { real::syscall(n, a, b, c, d, e, f) }
}
