//! What there is to read, before, on and behind a lane, and who tells of it when its descriptor is closed. Each program
//! asserts what the kernel does by itself: it runs bare first, then on lanes.

use anyhow::Result;
use underpass_tests::harness::c::both_ways;

#[test]
fn peeks_and_counts_at_switches() -> Result<()> {
    // (An end whose peer has gone up and down again before it reads has never been on its ring.)
    both_ways("peeks", &["1", "150"], 220, 5_000)
}

/// Sets go on telling of a connection whose last descriptor was closed while a call sleeps on it.
#[test]
fn sets_tell_while_a_call_sleeps() -> Result<()> {
    both_ways("closing", &["24"], 36, 1_000)
}
