//! Readiness is told as the kernel tells it: numbers that change hands, several threads at one registration,
//! sets in sets, sets closed under their waiters. Each case runs bare first, then on lanes.

use anyhow::Result;
use underpass_tests::harness::c::both_ways;

macro_rules! ready {
    ($($name:ident $case:literal, $ends:literal;)*) => {$(
        #[test]
        fn $name() -> Result<()> {
            both_ways("ready", &[$case], $ends, 64)
        }
    )*};
}

ready! {
    masks "masks", 2;
}
