//! The sets of a `select`: bit arrays, which may be shorter than the application says.

use crate::state::fdtab::{self, Fd};
use crate::sys::{self, pages};
use lane::num;
use libc::fd_set;

/// Is `fd` in the set? (A set does not know its own length.)
///
/// # Safety
/// The set is null, or has more than `fd` bits.
pub unsafe fn is_set(set: *const fd_set, fd: i32) -> bool {
    // SAFETY: by contract; sets are arrays of words, little endian, so of bytes as well.
    !set.is_null() && unsafe { *set.cast::<u8>().add(num::word(fd) / 8) } >> (fd % 8) & 1 != 0
}

/// How far the kernel would look into sets of `n` descriptors. It looks no further than the size of the process's
/// descriptor table, and programs rely on that: they pass an `n` larger than their sets (`getdtablesize`). Our own
/// descriptors, at high numbers, make the table larger. So a set ends at the first bit above the application's
/// numbers that is none of the application's descriptors.
pub fn reach(n: i32, sets: [*mut fd_set; 3]) -> i32 {
    let own = table_with(fdtab::high()).max(num::int(libc::FD_SETSIZE as u64));
    if n <= own {
        return n;
    }
    let end = n.min(table_with(fdtab::high_with_ours()));
    let stray = |fd: i32| {
        let closed = || sys::fcntl(fd, libc::F_GETFD, 0).is_err();
        matches!(fdtab::get(fd), Fd::Ours) || closed()
    };
    let first_stray = |word: i32| {
        let mut all = 0u64;
        for s in sets.iter().filter(|s| !s.is_null()) {
            let at = s.cast::<u64>().wrapping_add(num::word(word));
            if !pages::readable(at, 8) {
                return Some(word * 64);
            }
            // SAFETY: just proven.
            all |= unsafe { at.read_unaligned() };
        }
        (0..64)
            .filter(|k| all >> k & 1 != 0)
            .map(|k| word * 64 + k)
            .find(|fd| stray(*fd))
    };
    let found = (own / 64..end.div_euclid(64)).find_map(first_stray);
    found.unwrap_or(end)
}

/// Size of a descriptor table that holds this number.
fn table_with(fd: i32) -> i32 {
    num::signed((num::bits(fd.max(63)) + 1).next_power_of_two())
}
