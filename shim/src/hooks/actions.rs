//! What `posix_spawn` will do in the child: it duplicates descriptors inside libc, where there are no hooks.

use crate::process;
use crate::state::fdtab::MAX_FD;
use crate::state::table;
use crate::sys::real;
use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use lane::num;

/// Descriptors that lists of file actions duplicate: the key of the list, and the number plus one. A list may be made
/// long before its number belongs to a connection. (An application that uses one list in two threads must synchronize
/// itself.)
static COPIES: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];
/// Not 0 if there was no room for an entry; then any descriptor may be in a list.
static MORE: AtomicU32 = AtomicU32::new(0);

const FD_MASK: u64 = MAX_FD as u64 - 1;

/// The key of a list: its aligned 47-bit address, shifted to leave room for a descriptor.
fn key(list: *const c_void) -> u64 {
    (list as u64) >> 3 << MAX_FD.trailing_zeros()
}

fn of(list: *const c_void) -> impl Iterator<Item = (&'static AtomicU64, i32)> {
    let list = key(list);
    COPIES.iter().filter_map(move |c| {
        let v = c.load(Relaxed);
        (v != 0 && v & !FD_MASK == list).then_some((c, (v & FD_MASK) as i32 - 1))
    })
}

fn remember(list: *const c_void, fd: i32) {
    if fd < 0 || num::word(fd) as u64 >= FD_MASK || of(list).any(|(_, known)| known == fd) {
        return;
    }
    let v = key(list) | (num::word(fd) as u64 + 1);
    let free = |c: &AtomicU64| c.compare_exchange(0, v, Relaxed, Relaxed).is_ok();
    if !COPIES.iter().any(free) {
        MORE.store(1, Relaxed);
    }
}

fn forget(list: *const c_void) {
    of(list).for_each(|(c, _)| c.store(0, Relaxed));
}

/// Connections that a spawned program will get as its descriptors begin to leave their lanes.
pub fn before_spawn(list: *const c_void) {
    if list.is_null() {
        return;
    }
    of(list).for_each(|(_, fd)| process::lend(fd));
    if MORE.load(Relaxed) != 0 {
        table::each_fd(|fd, _, _| process::lend(fd));
    }
}

#[no_mangle]
pub unsafe extern "C" fn posix_spawn_file_actions_adddup2(
    list: *mut c_void,
    fd: i32,
    to: i32,
) -> i32 {
    remember(list, fd);
    process::lend(fd);
    process::all_left();
    // SAFETY: see the module above.
    unsafe { real::posix_spawn_file_actions_adddup2(list, fd, to) }
}

#[no_mangle]
pub unsafe extern "C" fn posix_spawn_file_actions_init(list: *mut c_void) -> i32 {
    forget(list);
    // SAFETY: see the module above.
    unsafe { real::posix_spawn_file_actions_init(list) }
}

#[no_mangle]
pub unsafe extern "C" fn posix_spawn_file_actions_destroy(list: *mut c_void) -> i32 {
    forget(list);
    // SAFETY: see the module above.
    unsafe { real::posix_spawn_file_actions_destroy(list) }
}
