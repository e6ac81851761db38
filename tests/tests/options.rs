//! Socket options that put something beside the bytes: what is left to read (`TCP_INQ`), completions of
//! `MSG_ZEROCOPY`.
//!
//! Each case first runs bare, then promoted, where it must not leave its lane.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::peers::Pair;
use underpass_tests::harness::Daemon;

const LIMIT: Duration = Duration::from_secs(60);

/// Runs a case bare, so that it is known to be what TCP does, and then on lanes, to which it keeps.
fn on_lanes(case: &str) -> Result<()> {
    let program = "options.py";
    Pair::bare(program, case)?.finish(LIMIT).context("bare")?;
    let d = Daemon::start()?;
    let p = Pair::promoted(program, case, &d)?;
    p.finish(LIMIT).with_context(|| d.picture())?;
    let s = d.assert_promoted(2, 1000)?;
    ensure!(s.downs == 0, "it left its lane\n{}", d.picture());
    Ok(())
}

macro_rules! options {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() -> Result<()> {
            on_lanes(stringify!($name))
        }
    )*};
}

options! { inq inq_before shutrd }
