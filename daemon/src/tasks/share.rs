//! How much of a processor a search may take that is made again whenever somebody asks.

use std::time::{Duration, Instant};

/// The search rests for this many times as long as it takes.
const REST: u32 = 20;
/// What may be rested later, so that those who ask while a look is under way do not wait for all of its rest; and no rest is
/// longer.
const LATER: Duration = Duration::from_secs(5);

pub(super) struct Share {
    /// When everything is rested.
    rested: Instant,
}

impl Share {
    pub(super) fn new(now: Instant) -> Self {
        Share { rested: now }
    }

    /// A look has taken so much processor time. How long there is none now.
    pub(super) fn rest(&mut self, now: Instant, took: Duration) -> Duration {
        let due = self.rested.saturating_duration_since(now) + took * REST;
        let rest = due.saturating_sub(LATER).min(LATER);
        self.rested = now + due.min(rest + LATER);
        rest
    }
}

/// The time for which the thread has had a processor. (Others may have had it for much longer meanwhile.)
pub(super) fn thread_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(t).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);
    const LONG: Duration = Duration::from_millis(200);

    /// Four connections come one after the other: one before the first look, the others during it.
    #[test]
    fn who_asks_during_a_look_does_not_wait_for_its_rest() {
        let now = Instant::now();
        let mut share = Share::new(now);
        assert_eq!(share.rest(now, LONG), Duration::ZERO);
        assert_eq!(share.rest(now + LONG, LONG), 3 * S - LONG);
    }

    #[test]
    fn it_takes_its_share_in_the_long_run_and_no_more() {
        for took in [1, 30, 200, 249].map(Duration::from_millis) {
            let begin = Instant::now();
            let (mut now, mut share, mut all) = (begin, Share::new(begin), Duration::ZERO);
            while now < begin + 1000 * S {
                all += took;
                now += took;
                now += share.rest(now, took);
            }
            let share = all.as_secs_f64() / 1000.0;
            assert!((0.046..0.051).contains(&share), "{took:?}: {share}");
        }
    }

    #[test]
    fn no_rest_is_long() {
        let mut now = Instant::now();
        let mut share = Share::new(now);
        for _ in 0..10 {
            let rest = share.rest(now, 60 * S);
            assert_eq!(rest, LATER);
            now += 60 * S + rest;
        }
        now += 2 * LATER;
        assert_eq!(share.rest(now, LONG), Duration::ZERO);
    }
}
