//! The processor's counter as a clock.

use crate::sys;
use core::sync::atomic::{AtomicU64, Ordering::*};
use lane::prim::ticks;

/// Cycles per microsecond, measured since the library was loaded.
pub fn cycles_per_us() -> u64 {
    static START: AtomicU64 = AtomicU64::new(0);
    static START_NS: AtomicU64 = AtomicU64::new(0);
    static RATE: AtomicU64 = AtomicU64::new(0);
    let r = RATE.load(Relaxed);
    if r != 0 {
        return r;
    }
    if START.load(Relaxed) == 0 {
        START_NS.store(sys::now_ns(), Relaxed);
        START.store(ticks(), Relaxed);
        return 2000;
    }
    let ns = sys::now_ns().saturating_sub(START_NS.load(Relaxed));
    if ns < 5_000_000 {
        return 2000;
    }
    let rate = (ticks()
        .wrapping_sub(START.load(Relaxed))
        .saturating_mul(1000)
        / ns)
        .max(1);
    RATE.store(rate, Relaxed);
    rate
}
