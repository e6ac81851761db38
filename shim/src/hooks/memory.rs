//! Calls that take memory away: what was proven of it ([`pages`]) is forgotten. They go to the kernel
//! directly, for allocators call them before the C library can be asked for its own.

use crate::{pages, set_errno, sys};
use core::ffi::c_void;

/// The result of a raw call, as the C library gives it.
fn answer(r: sys::R<usize>) -> isize {
    match r {
        Ok(v) => v as isize,
        Err(e) => {
            set_errno(e);
            -1
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn munmap(p: *mut c_void, n: usize) -> i32 {
    pages::forget(p as usize, n);
    answer(sys::memory(libc::SYS_munmap, [p as usize, n, 0, 0, 0])) as i32
}

#[no_mangle]
pub unsafe extern "C" fn mprotect(p: *mut c_void, n: usize, prot: i32) -> i32 {
    pages::forget(p as usize, n);
    let r = sys::memory(libc::SYS_mprotect, [p as usize, n, prot as usize, 0, 0]);
    pages::forget(p as usize, n); // a send of another thread may have proven it meanwhile
    answer(r) as i32
}

#[no_mangle]
pub unsafe extern "C" fn pkey_mprotect(p: *mut c_void, n: usize, prot: i32, key: i32) -> i32 {
    let words = [p as usize, n, prot as usize, key as usize, 0];
    pages::forget(p as usize, n);
    let r = sys::memory(libc::SYS_pkey_mprotect, words);
    pages::forget(p as usize, n); // as above
    answer(r) as i32
}

/// (How much it takes away, only the kernel knows.)
#[no_mangle]
pub unsafe extern "C" fn shmdt(p: *const c_void) -> i32 {
    let r = sys::memory(libc::SYS_shmdt, [p as usize, 0, 0, 0, 0]);
    pages::forget_all();
    answer(r) as i32
}

/// (The last argument is there with MREMAP_FIXED only.)
#[no_mangle]
pub unsafe extern "C" fn mremap(
    p: *mut c_void,
    old: usize,
    new: usize,
    flags: i32,
    to: usize,
) -> *mut c_void {
    pages::forget(p as usize, old);
    let r = sys::memory(libc::SYS_mremap, [p as usize, old, new, flags as usize, to]);
    answer(r) as *mut c_void
}
