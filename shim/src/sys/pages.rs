//! Bad pointers. The kernel returns EFAULT where a copy of ours would end the program. So the application's memory
//! is proven before it is touched: a system call that changes nothing asks the kernel, and the page is remembered.
//! Buffers that are used again cost one load, a new page about 0.1 µs.
//!
//! Pages that are unmapped or protected through the C library are forgotten (`hooks::memory`). Other changes (an
//! inlined call, `free` of a large block, a file that another process truncates) are noticed when the proof has
//! expired, after some milliseconds ([`age`]); until then, a bad pointer is SIGSEGV or SIGBUS.

use crate::sys;
use core::sync::atomic::{AtomicUsize, Ordering::*};

const PAGE: usize = 4096;
const ENTRIES: usize = 2048;
const WRITE: usize = 1;
const READ: usize = 2;
/// Bits of a page's number, with five levels of page tables. (A pointer beyond them is always bad.)
const NUMBER: u32 = 44;
/// Position of the period in an entry.
const PERIOD: u32 = NUMBER + 2;
/// Length of a period in ticks, as a power of two: 5 to 17 ms.
const PERIOD_LOG2: u32 = 24;

/// Proven pages, each at its number modulo the table's size: period, number × 4, READ, and WRITE if the page may
/// be written. Each entry stands for itself; no other data is published with it.
static PROVEN: [AtomicUsize; ENTRIES] = [const { AtomicUsize::new(0) }; ENTRIES];

/// The present period, shifted to its position in an entry. Proofs of other periods are not valid.
static NOW: AtomicUsize = AtomicUsize::new(0);

/// Sets the present period. Called by code that reads the clock anyway: each call asks for a few pages, and
/// reading the clock costs more than all of them.
#[inline(always)]
pub fn age(ticks: u64) {
    let now = ((ticks >> PERIOD_LOG2) as usize) << PERIOD;
    if NOW.load(Relaxed) != now {
        NOW.store(now, Relaxed);
    }
}

/// May `n` bytes be read there?
#[inline(always)]
pub fn readable<T>(p: *const T, n: usize) -> bool {
    proven(p as usize, n, READ)
}

/// May `n` bytes be written there?
#[inline(always)]
pub fn writable<T>(p: *const T, n: usize) -> bool {
    proven(p as usize, n, READ | WRITE)
}

/// May a `T` be read there, if it is there at all?
#[inline(always)]
pub fn readable_or_null<T>(p: *const T) -> bool {
    p.is_null() || readable(p, size_of::<T>())
}

#[inline(always)]
fn proven(at: usize, n: usize, how: usize) -> bool {
    let first = at / PAGE;
    let last = at.wrapping_add(n.wrapping_sub(1)) / PAGE;
    n == 0 || (first == last && is_known(first, how)) || prove(at, n, how)
}

#[inline(always)]
fn is_known(page: usize, how: usize) -> bool {
    let entry = PROVEN[page % ENTRIES].load(Relaxed);
    let all = NOW.load(Relaxed) | page << 2 | READ | WRITE;
    entry | WRITE == all && entry & how == how && page >> NUMBER == 0
}

#[cold]
fn prove(at: usize, n: usize, how: usize) -> bool {
    let Some(end) = at.checked_add(n - 1) else {
        return false;
    };
    let unknown = |page: &usize| !is_known(*page, how);
    let Some(first) = (at / PAGE..=end / PAGE).find(unknown) else {
        return true;
    };
    let last = end / PAGE;
    let now = NOW.load(Relaxed); // before it is asked
                                 // Many pages at once, if the kernel can; page by page if it is too old, or a page
                                 // is special or bad.
    let from = (first * PAGE) as *mut u8;
    let whole =
        last > first && sys::populate_for(from, (last - first + 1) * PAGE, how & WRITE != 0);
    for page in first..=last {
        if unknown(&page) {
            if !whole && !probe((page * PAGE).max(at), how) {
                return false;
            }
            PROVEN[page % ENTRIES].store(now | page << 2 | how, Relaxed);
        }
    }
    true
}

fn probe(at: usize, how: usize) -> bool {
    match how & WRITE {
        0 => sys::is_readable(at),
        _ => sys::is_writable(at),
    }
}

/// The application has changed the mapping of some memory.
pub fn forget(at: usize, n: usize) {
    let (first, pages) = (at / PAGE, n.div_ceil(PAGE) + 1);
    if pages >= ENTRIES {
        return forget_all();
    }
    for page in first..first + pages {
        let e = &PROVEN[page % ENTRIES];
        if e.load(Relaxed) << (64 - PERIOD) >> (64 - NUMBER) == page {
            e.store(0, Relaxed);
        }
    }
}

/// The same, if nobody knows how much has changed.
pub fn forget_all() {
    PROVEN.iter().for_each(|e| e.store(0, Relaxed));
}
