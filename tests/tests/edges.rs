//! Calls that are rare and to which the kernel has an exact answer: times that it refuses, vectors and
//! messages of no length, messages that are sent in part, ioctls and options that receive or look.
//!
//! Each case first runs bare, then promoted.

use anyhow::Result;
use std::time::Duration;
use underpass_tests::harness::peers::Pair;

const LIMIT: Duration = Duration::from_secs(60);

macro_rules! edges {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() -> Result<()> {
            Pair::both_ways("edges.py", stringify!($name), LIMIT)
        }
    )*};
}

edges! { times empty short nothing end rights refused sigio mark zerocopy unblock }
