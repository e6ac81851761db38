//! What nobody sees: calls that a program makes with the processor's own instruction, and what the C library does
//! inside with descriptors and memory.

use anyhow::{Context, Result};
use lane::proto::reason::Reason;
use underpass_tests::harness::{c::both_ways, paths, until, Daemon, Program, PATIENCE};

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

/// A set that is polled itself cannot be served; its connections say so, also where they have a lane already.
#[test]
fn a_set_that_is_polled() -> Result<()> {
    let d = Daemon::start()?;
    let _running = Program::new("python3", &d.eager())
        .arg(paths::script("polled_set.py"))
        .spawn()?;
    let says = |role: &str, r: Reason| {
        let rows = d.ss().unwrap_or_default();
        rows.iter().any(|e| e.role == role && e.reason == r.code())
    };
    until("the reason", PATIENCE, || {
        says("server", Reason::EpollShared)
    })
    .with_context(|| d.picture())
}
