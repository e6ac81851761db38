//! Calls that create descriptors other than connections. The new number may be that of a connection that an inlined
//! system call closed unnoticed; from here on the number no longer stands for that connection.

use crate::process;
use crate::sys::real;
use core::ffi::c_char;
use lane::num;

/// Notes the new descriptors if the call has succeeded.
///
/// # Safety
/// `fds` has `n` numbers then.
unsafe fn made(r: i32, fds: *const i32, n: usize) -> i32 {
    if r >= 0 {
        for k in 0..n {
            // SAFETY: by contract.
            let fd = unsafe { fds.add(k).read_unaligned() };
            crate::preserving_errno(|| process::replaced(fd));
        }
    }
    r
}

macro_rules! makes_one {
    ($($name:ident($($a:ident: $t:ty),*);)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name($($a: $t),*) -> i32 {
            // SAFETY: see the module above; what it says is the number, or -1.
            unsafe {
                let r = real::$name($($a),*);
                made(r, &r, 1)
            }
        }
    )*};
}

// (Variable arguments are passed in registers like fixed ones.)
makes_one! {
    open(path: *const c_char, flags: i32, mode: u32);
    open64(path: *const c_char, flags: i32, mode: u32);
    openat(dir: i32, path: *const c_char, flags: i32, mode: u32);
    openat64(dir: i32, path: *const c_char, flags: i32, mode: u32);
    creat(path: *const c_char, mode: u32);
    creat64(path: *const c_char, mode: u32);
    eventfd(value: u32, flags: i32);
    timerfd_create(clock: i32, flags: i32);
    inotify_init();
    inotify_init1(flags: i32);
}

/// (Made by number, because older C libraries do not have these functions.)
macro_rules! makes_one_by_number {
    ($($name:ident $n:ident($($a:ident: $t:ty),*);)*) => {$(
        #[no_mangle]
        #[allow(clippy::cast_sign_loss, reason = "the sign goes on in the register")]
        pub unsafe extern "C" fn $name($($a: $t),*) -> i32 {
            let mut words = [0; 6];
            for (to, from) in words.iter_mut().zip([$($a as usize),*]) {
                *to = from;
            }
            let [a, b, c, d, e, f] = words;
            // SAFETY: see the module above (all calls in this file).
            unsafe {
                let r = real::call(libc::$n, a, b, c, d, e, f);
                made(r, &r, 1)
            }
        }
    )*};
}

makes_one_by_number! {
    memfd_create SYS_memfd_create(name: *const c_char, flags: u32);
    pidfd_open SYS_pidfd_open(pid: i32, flags: u32);
}

/// A copy of a descriptor of another process, or of this one.
#[no_mangle]
pub unsafe extern "C" fn pidfd_getfd(process: i32, fd: i32, flags: u32) -> i32 {
    let (n, process, fd) = (libc::SYS_pidfd_getfd, num::word(process), num::word(fd));
    // SAFETY: see above.
    unsafe {
        let r = real::call(n, process, fd, flags as usize, 0, 0, 0);
        let r = made(r, &r, 1);
        if r >= 0 {
            crate::preserving_errno(|| process::taken(r));
        }
        r
    }
}

#[no_mangle]
pub unsafe extern "C" fn pipe(fds: *mut i32) -> i32 {
    // SAFETY: see above.
    unsafe { made(real::pipe(fds), fds, 2) }
}

#[no_mangle]
pub unsafe extern "C" fn pipe2(fds: *mut i32, flags: i32) -> i32 {
    // SAFETY: see above.
    unsafe { made(real::pipe2(fds, flags), fds, 2) }
}

#[no_mangle]
pub unsafe extern "C" fn socketpair(domain: i32, ty: i32, proto: i32, fds: *mut i32) -> i32 {
    // SAFETY: see above.
    unsafe { made(real::socketpair(domain, ty, proto, fds), fds, 2) }
}
