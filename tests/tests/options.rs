//! Socket options that put something beside the bytes: what is left to read (`TCP_INQ`), completions of
//! `MSG_ZEROCOPY`. Bad pointers. And children that close what they inherit.
//!
//! Each case first runs bare, then promoted, where it must not leave its lane.

use anyhow::Result;
use std::time::Duration;
use underpass_tests::harness::peers::Pair;

const LIMIT: Duration = Duration::from_secs(60);

macro_rules! options {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() -> Result<()> {
            Pair::both_ways_kept("options.py", stringify!($name), LIMIT)
        }
    )*};
}

/// (It leaves its lane on purpose.)
#[test]
fn zerocopy_left() -> Result<()> {
    Pair::both_ways("options.py", "zerocopy_left", LIMIT)
}

options! { inq inq_before shutrd helper zerocopy zerocopy_before zerocopy_late fault arrays }
