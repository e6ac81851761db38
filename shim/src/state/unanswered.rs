//! What a call asked of another process in vain. The next one that asks the same process waits less, so that many calls
//! beside one that is stopped do not take the time of each; but one that was only late has time to answer the next.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// For so many milliseconds it counts that nobody has answered.
const COUNTS_MS: u64 = 2000;
/// Log2 of the divisor for each call in vain: together they take a third more than the first alone.
const QUARTER_LOG2: u32 = 2;
/// Calls in vain, one after the other. (Threads that count at the same time may count one less.)
pub struct Unanswered {
    times: AtomicU32,
    /// When the last of them gave up (CLOCK_MONOTONIC, ms).
    last_ms: AtomicU64,
}

impl Unanswered {
    /// None.
    pub const fn none() -> Self {
        Unanswered {
            times: AtomicU32::new(0),
            last_ms: AtomicU64::new(0),
        }
    }

    /// The milliseconds that a call waits now, where the first of them waits `most` and none less than `least`. (That much
    /// has to be enough for one that is not late, so that it is seen when it answers again.)
    pub fn patience(&self, most: u64, least: u64, now: u64) -> u64 {
        let shift = QUARTER_LOG2 * self.recent(now).min(31);
        (most >> shift).max(least.min(most))
    }

    /// A call has given up.
    pub fn add(&self, now: u64) {
        self.times.store(self.recent(now) + 1, Relaxed);
        self.last_ms.store(now, Relaxed);
    }

    /// It was answered.
    pub fn clear(&self) {
        if self.times.load(Relaxed) != 0 {
            self.times.store(0, Relaxed);
        }
    }

    fn recent(&self, now: u64) -> u32 {
        match now < self.last_ms.load(Relaxed).saturating_add(COUNTS_MS) {
            true => self.times.load(Relaxed),
            false => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_late_once_has_time_for_the_next() {
        let u = Unanswered::none();
        assert_eq!(u.patience(1000, 5, 5000), 1000);
        u.add(6000);
        assert_eq!(u.patience(1000, 5, 6001), 250);
        assert_eq!(u.patience(2500, 50, 6001), 625);
        u.clear();
        assert_eq!(u.patience(1000, 5, 6002), 1000);
        u.add(7000);
        assert_eq!(u.patience(1000, 5, 8999), 250);
        assert_eq!(u.patience(1000, 5, 9000), 1000);
    }

    #[test]
    fn many_calls_in_vain_take_little_more_than_one() {
        let (u, mut now, first) = (Unanswered::none(), 1000, 1000);
        for _ in 0..100 {
            now += u.patience(first, 5, now);
            u.add(now);
        }
        assert!(now - 1000 < first * 3 / 2 + 100 * 5, "{now}");
        assert_eq!(u.patience(first, 5, now), 5);
        assert_eq!(u.patience(3, 5, now), 3);
    }
}
