//! Atomics, swapped for loom's when the crate is built with `--cfg loom`, so that the code that
//! is checked is the code that runs.

#[cfg(not(target_arch = "x86_64"))]
use crate::num;
#[cfg(not(loom))]
pub use core::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
#[cfg(loom)]
pub use loom::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};

/// The full fence that must follow a publish (see [`crate::notify::publish`]).
///
/// On x86-64 the read-modify-write just before it is already a full barrier (Intel SDM vol. 3,
/// 9.2.3.9), so nothing is emitted; loom and weaker machines get the real fence.
#[inline(always)]
pub(crate) fn fence_after_rmw() {
    #[cfg(any(loom, not(target_arch = "x86_64")))]
    fence(Ordering::SeqCst);
    #[cfg(all(not(loom), target_arch = "x86_64"))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
}

/// One pause of a spin loop.
#[inline(always)]
pub fn pause() {
    #[cfg(not(loom))]
    core::hint::spin_loop();
    #[cfg(loom)]
    loom::thread::yield_now();
}

/// A monotonic tick counter for bounding how often something dear is done. Not a clock: the
/// unit is whatever the processor counts (TSC cycles on x86-64).
#[inline(always)]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: RDTSC has no preconditions on x86-64 and reads no memory.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let mut ts = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `ts` is a valid out pointer for the whole call.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
        num::natural(ts.tv_sec)
            .wrapping_mul(1_000_000_000)
            .wrapping_add(num::natural(ts.tv_nsec))
    }
}

/// Number of the processor this thread runs on right now, and [`ticks`].
#[inline(always)]
pub fn cpu_and_ticks() -> (u32, u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as in `cpu`.
    unsafe {
        let mut aux = 0u32;
        let t = core::arch::x86_64::__rdtscp(&mut aux);
        (aux & 0xfff, t)
    }
    #[cfg(not(target_arch = "x86_64"))]
    (cpu(), ticks())
}

/// Number of the processor this thread runs on right now.
#[inline(always)]
pub fn cpu() -> u32 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: RDTSCP is present on every x86-64 processor this runs on (the daemon's minimum
    // kernel, 5.14, loads IA32_TSC_AUX with `node << 12 | cpu`); it writes only `aux`.
    unsafe {
        let mut aux = 0u32;
        core::arch::x86_64::__rdtscp(&mut aux);
        aux & 0xfff
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        // SAFETY: no arguments, no memory.
        num::bits(unsafe { libc::sched_getcpu() })
    }
}
