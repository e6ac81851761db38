//! What nobody sees: calls that a program makes with the processor's own instruction, and what the C library does
//! inside with descriptors and memory.

use anyhow::Result;
use underpass_tests::harness::c::both_ways;

/// A number that an inlined call has closed belongs to what has it next, however soon that is.
#[test]
fn numbers_of_connections_that_were_closed() -> Result<()> {
    both_ways("reused", &["1"], 100, 200)
}

#[test]
fn streams_of_the_c_library() -> Result<()> {
    both_ways("streams", &[], 8, 8)
}

/// A set that is waited on by calls that nobody sees holds connections that stay on TCP, until one is seen.
#[test]
fn waits_on_a_set() -> Result<()> {
    both_ways("inlined_wait", &["3000"], 2, 2)
}

#[test]
fn memory_that_was_good_before() -> Result<()> {
    both_ways("pages", &[], 2, 10_000)
}
