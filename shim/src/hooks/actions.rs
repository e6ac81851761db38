//! What `posix_spawn` will do in the child: copies of descriptors, which are made inside libc, unseen.

use crate::fdtab::MAX_FD;
use crate::real;
use crate::{fdops, table};
use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use link::reason::Reason;

/// Numbers that lists of actions copy: the list, and the number plus one. (A list may be made long before the
/// connection has that number.) Whoever uses a list from two threads orders that himself.
static COPIES: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];
/// Not 0: there were more than there is room for, and nobody knows which.
static MORE: AtomicU32 = AtomicU32::new(0);

const FD_MASK: u64 = MAX_FD as u64 - 1;

/// Of an aligned address of 47 bits, what leaves room for a descriptor.
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
    if fd < 0 || fd as u64 >= FD_MASK || of(list).any(|(_, known)| known == fd) {
        return;
    }
    let v = key(list) | (fd as u64 + 1);
    let free = |c: &AtomicU64| c.compare_exchange(0, v, Relaxed, Relaxed).is_ok();
    if !COPIES.iter().any(free) {
        MORE.store(1, Relaxed);
    }
}

fn forget(list: *const c_void) {
    of(list).for_each(|(c, _)| c.store(0, Relaxed));
}

/// What a spawned program will get as one of its descriptors leaves its lane.
pub fn before_spawn(list: *const c_void) {
    if list.is_null() {
        return;
    }
    of(list).for_each(|(_, fd)| fdops::give_up(fd, Reason::Left));
    if MORE.load(Relaxed) != 0 {
        table::each_fd(|fd, _, _| fdops::give_up(fd, Reason::Left));
    }
}

#[no_mangle]
pub unsafe extern "C" fn posix_spawn_file_actions_adddup2(
    list: *mut c_void,
    fd: i32,
    to: i32,
) -> i32 {
    remember(list, fd);
    fdops::give_up(fd, Reason::Left);
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
