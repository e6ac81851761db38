//! Calls that unmap or protect memory: what was known about its accessibility ([`pages`]) is forgotten. They go to
//! the kernel directly, because allocators call them before symbols of the C library can be looked up.
//!
//! Libraries that track mappings (UCX, Open MPI) overwrite the first bytes of the exported functions with a jump to a
//! function of their own, which makes the call with `syscall`. The hook of `syscall` therefore must not run the
//! patched functions: the calls are made in functions that are not exported. (What is left of the exported ones is
//! shorter than such a jump, but functions are aligned to 16 bytes.)

use crate::set_errno;
use crate::sys::{self, pages};
use core::ffi::c_void;
use lane::num;

/// Converts the result of a raw call to that of a C function that returns 0.
fn answer(r: sys::R<usize>) -> i32 {
    match r {
        Ok(_) => 0,
        Err(e) => {
            set_errno(e);
            -1
        }
    }
}

/// The implementations, which the exported functions and the calls by number share.
pub mod by_number {
    use super::{answer, c_void, num, pages, set_errno, sys};

    #[inline(never)]
    pub unsafe extern "C" fn munmap(p: *mut c_void, n: usize) -> i32 {
        pages::forget(p as usize, n);
        answer(sys::memory(libc::SYS_munmap, [p as usize, n, 0, 0, 0]))
    }

    #[inline(never)]
    pub unsafe extern "C" fn mprotect(p: *mut c_void, n: usize, prot: i32) -> i32 {
        pages::forget(p as usize, n);
        let r = sys::memory(libc::SYS_mprotect, [p as usize, n, num::word(prot), 0, 0]);
        pages::forget(p as usize, n); // a send in another thread may have found it accessible meanwhile
        answer(r)
    }

    #[inline(never)]
    pub unsafe extern "C" fn pkey_mprotect(p: *mut c_void, n: usize, prot: i32, key: i32) -> i32 {
        let words = [p as usize, n, num::word(prot), num::word(key), 0];
        pages::forget(p as usize, n);
        let r = sys::memory(libc::SYS_pkey_mprotect, words);
        pages::forget(p as usize, n); // as above
        answer(r)
    }

    /// (Only the kernel knows how much memory it unmaps.)
    #[inline(never)]
    pub unsafe extern "C" fn shmdt(p: *const c_void) -> i32 {
        let r = sys::memory(libc::SYS_shmdt, [p as usize, 0, 0, 0, 0]);
        pages::forget_all();
        answer(r)
    }

    /// (The last argument is present only with MREMAP_FIXED.)
    #[inline(never)]
    pub unsafe extern "C" fn mremap(
        p: *mut c_void,
        old: usize,
        new: usize,
        flags: i32,
        to: usize,
    ) -> *mut c_void {
        pages::forget(p as usize, old);
        let r = sys::memory(
            libc::SYS_mremap,
            [p as usize, old, new, num::word(flags), to],
        );
        r.map_or_else(
            |e| {
                set_errno(e);
                libc::MAP_FAILED
            },
            |p| p as *mut c_void,
        )
    }
}

macro_rules! by_name {
    ($($name:ident($($arg:ident: $t:ty),*) -> $r:ty;)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name($($arg: $t),*) -> $r {
            // SAFETY: the caller's own call.
            unsafe { by_number::$name($($arg),*) }
        }
    )*};
}
by_name! {
    munmap(p: *mut c_void, n: usize) -> i32;
    mprotect(p: *mut c_void, n: usize, prot: i32) -> i32;
    pkey_mprotect(p: *mut c_void, n: usize, prot: i32, key: i32) -> i32;
    shmdt(p: *const c_void) -> i32;
    mremap(p: *mut c_void, old: usize, new: usize, flags: i32, to: usize) -> *mut c_void;
}
