//! Programs that give something up while they have connections: calls, by a seccomp filter that kills for what
//! lanes need; and the descriptors that their threads had in common. They never notice.

use anyhow::{ensure, Result};
use std::time::Duration;
use underpass_tests::harness::c::both_ways;
use underpass_tests::harness::{c, Daemon, Program};

#[test]
fn filters_that_kill() -> Result<()> {
    for how in ["strict", "kill", "trap", "error"] {
        both_ways("sandboxed", &[how, "after"], 2, 100_000)?;
    }
    Ok(())
}

/// There is no lane in time, and the peer waits for none.
#[test]
fn filters_from_the_beginning() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let program = dir.path().join("sandboxed");
    c::compile("sandboxed", &program)?;
    let d = Daemon::start()?;
    for how in ["strict", "kill", "trap", "error"] {
        for place in [d.place(), d.eager()] {
            let p = Program::new(&program, &place).args([how, "before"]);
            let said = p.check(Duration::from_secs(60))?;
            ensure!(said.contains("result ok"), "{how}: {said}");
        }
    }
    Ok(())
}

/// All bytes of the rounds behind the filter, and the large ones, are on the lane.
#[test]
fn filters_that_allow_what_lanes_need() -> Result<()> {
    both_ways("sandboxed", &["allow", "after"], 2, 500_000)
}

/// A thread with descriptors of its own.
#[test]
fn split() -> Result<()> {
    ["unshare", "range", "number"]
        .iter()
        .try_for_each(|how| both_ways("split", &[how], 2, 100_000))
}
