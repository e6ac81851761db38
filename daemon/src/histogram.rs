//! How often something took how long.

use std::time::Duration;

/// Upper limits of a histogram's parts, in µs; what is above the last is counted, too.
pub const LIMITS_US: [u64; 14] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000,
    10_000_000, 60_000_000,
];

/// How often something took so long.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    /// One for each of [`LIMITS_US`], and one for the rest.
    pub counts: [u64; LIMITS_US.len() + 1],
    pub sum: Duration,
}

impl Histogram {
    pub(crate) fn add(&mut self, time: Duration) {
        let part = LIMITS_US.partition_point(|l| Duration::from_micros(*l) < time);
        self.counts[part] += 1;
        self.sum = self.sum.saturating_add(time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_histogram() {
        let mut h = Histogram::default();
        for us in [0, 100, 101, 60_000_000, 60_000_001] {
            h.add(Duration::from_micros(us));
        }
        let last = h.counts.len() - 1;
        assert_eq!((h.counts[0], h.counts[1]), (2, 1));
        assert_eq!((h.counts[last - 1], h.counts[last]), (1, 1));
        assert_eq!(h.counts.iter().sum::<u64>(), 5);
        assert!(h.sum > Duration::from_secs(120));
    }
}
