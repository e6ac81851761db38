//! Peers that reset the connection, or die with bytes unread, while either direction is on a lane, on TCP or in
//! between: what had come is told, then ECONNRESET, never an end at once.

use anyhow::Result;
use underpass_tests::harness::c::{both_ways, in_small_rings};

#[test]
fn a_reset_is_told_after_what_had_come() -> Result<()> {
    both_ways("resets", &["1", "60"], 60, 100_000)
}

/// Much of what had come is on TCP, behind the frame, when the error is known.
#[test]
fn in_small_rings_too() -> Result<()> {
    in_small_rings("resets", &["25", "10"], 10, 50_000)
}
