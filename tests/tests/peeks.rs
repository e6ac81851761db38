//! What there is to read, before, on and behind a lane. The program asserts what the kernel does by itself: it runs bare
//! first, then on lanes.

use anyhow::Result;
use underpass_tests::harness::c::both_ways;

#[test]
fn peeks_and_counts_at_switches() -> Result<()> {
    both_ways("peeks", &["1", "150"], 300, 5_000)
}
