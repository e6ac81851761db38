//! The bytes of a ring. Under loom they are loom atomics, read and written Relaxed, so that loom notices when a byte
//! can be seen too early or too late.

use crate::abi::Cursor;
#[cfg(not(loom))]
use crate::num;

/// A ring in mapped memory. `mask + 1` bytes at `base` are mapped.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    base: *mut u8,
    mask: u64,
}

impl Ring {
    /// # Safety
    /// `bytes`, a power of two, are mapped at `base` for as long as the ring is used.
    #[inline(always)]
    pub unsafe fn new(base: *mut u8, bytes: usize) -> Self {
        Ring {
            base,
            mask: bytes as u64 - 1,
        }
    }

    /// Size of the ring in bytes, a power of two.
    #[inline(always)]
    pub fn size(self) -> u64 {
        self.mask + 1
    }

    /// The contiguous run of at most `want` bytes that starts at cursor `at`: pointer and length.
    #[cfg(not(loom))]
    #[inline(always)]
    pub fn run(self, at: Cursor, want: u64) -> (*mut u8, usize) {
        let i = at.get() & self.mask;
        // SAFETY: `i <= mask`, inside the mapping by the type's invariant.
        (
            unsafe { self.base.add(num::size(i)) },
            num::size(want.min(self.size() - i)),
        )
    }
}

/// Copies from the application into a ring: `len` bytes at cursor `at`.
///
/// # Safety
/// `src` is readable for `len` bytes (the application's promise); `len <= ring.size()`.
#[cfg(not(loom))]
#[inline(always)]
pub unsafe fn copy_in(ring: Ring, at: Cursor, src: *const u8, len: usize) {
    let (p, n) = ring.run(at, len as u64);
    // SAFETY: `run` stays inside the mapping; the rest wraps to the start and is below the size.
    unsafe {
        core::ptr::copy_nonoverlapping(src, p, n);
        if n < len {
            core::ptr::copy_nonoverlapping(src.add(n), ring.base, len - n);
        }
    }
}

/// Copies out of a ring. The peer may overwrite the bytes meanwhile: then the application gets what it wrote, which
/// spoils only that peer's own stream.
///
/// # Safety
/// `dst` is writable for `len` bytes (the application's promise); `len <= ring.size()`.
#[cfg(not(loom))]
#[inline(always)]
pub unsafe fn copy_out(ring: Ring, at: Cursor, dst: *mut u8, len: usize) {
    let (p, n) = ring.run(at, len as u64);
    // SAFETY: as in `copy_in`.
    unsafe {
        core::ptr::copy_nonoverlapping(p, dst, n);
        if n < len {
            core::ptr::copy_nonoverlapping(ring.base, dst.add(n), len - n);
        }
    }
}

#[cfg(loom)]
pub use checked::{copy_in, copy_out};

#[cfg(loom)]
mod checked {
    use super::{Cursor, Ring};
    use loom::sync::atomic::{AtomicU8, Ordering::Relaxed};

    impl Ring {
        fn cell(&self, at: Cursor) -> &AtomicU8 {
            // SAFETY: under loom rings are arrays of `AtomicU8`, `mask + 1` of them.
            unsafe {
                &*self
                    .base
                    .cast::<AtomicU8>()
                    .add((at.get() & self.mask) as usize)
            }
        }

        /// A copy of one byte, since nobody can point into loom's atomics. Valid until the next call.
        pub fn run(self, at: Cursor, want: u64) -> (*mut u8, usize) {
            thread_local!(static BYTE: core::cell::Cell<u8> = const { core::cell::Cell::new(0) });
            let b = self.cell(at).load(Relaxed);
            BYTE.with(|c| {
                c.set(b);
                (c.as_ptr(), want.min(1) as usize)
            })
        }
    }

    /// # Safety
    /// As outside of loom.
    pub unsafe fn copy_in(ring: Ring, at: Cursor, src: *const u8, len: usize) {
        for i in 0..len {
            // SAFETY: by this function's contract.
            let b = unsafe { *src.add(i) };
            ring.cell(at + i as u64).store(b, Relaxed);
        }
    }

    /// # Safety
    /// As outside of loom.
    pub unsafe fn copy_out(ring: Ring, at: Cursor, dst: *mut u8, len: usize) {
        for i in 0..len {
            let b = ring.cell(at + i as u64).load(Relaxed);
            // SAFETY: by this function's contract.
            unsafe { *dst.add(i) = b };
        }
    }
}
