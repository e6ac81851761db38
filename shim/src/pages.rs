//! Bad pointers. The kernel says EFAULT where a copy of ours would end the program, so memory of the
//! application's is proven before it is touched: a system call that does nothing asks the kernel, and the page
//! is remembered. Buffers that are used again cost one load; a page that is new about 0.1 µs.
//!
//! What is unmapped or protected through the C library is forgotten (`hooks::memory`). What nobody tells us of
//! (an inlined call, `free` of a large block, a file that another process truncates) is found out when the
//! proof is too old, after some milliseconds ([`age`]): in these a bad pointer is SIGSEGV or SIGBUS.

use crate::sys;
use core::sync::atomic::{AtomicUsize, Ordering::*};

const PAGE: usize = 4096;
const ENTRIES: usize = 2048;
const WRITE: usize = 1;
const READ: usize = 2;
/// Bits of a page's number, with five levels of page tables. (A pointer beyond them is never good.)
const NUMBER: u32 = 44;
/// Where an entry has its period.
const PERIOD: u32 = NUMBER + 2;
/// Ticks of a period, as a power of two: 5 to 17 ms.
const PERIOD_LOG2: u32 = 24;

/// Proven pages, each at its number modulo the size: period, number × 4, READ, and WRITE where it may be
/// written. An entry is a fact of its own; nothing is published with it.
static PROVEN: [AtomicUsize; ENTRIES] = [const { AtomicUsize::new(0) }; ENTRIES];

/// The present period, at its place in an entry. Proofs of others hold no more.
static NOW: AtomicUsize = AtomicUsize::new(0);

/// The time. Told by whoever looks at the clock anyway: each call asks for a few pages, and a look costs more
/// than all of them.
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
                                 // Many at once, where the kernel can (it is too old, or one of them is special or bad: each by itself).
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

/// Memory of the application's has changed.
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

/// The same, where nobody knows how much of it.
pub fn forget_all() {
    PROVEN.iter().for_each(|e| e.store(0, Relaxed));
}
