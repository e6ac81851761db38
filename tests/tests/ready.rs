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
    a_copy_is_closed "copy-closed", 80;
    a_watched_copy_is_closed "copy-watched", 80;
    a_set_moves "set-moves", 40;
    adding_and_changing "ctl-race", 2;
    one_shot_in_two_threads "once", 2;
    one_shot_is_spent "spent", 16;
    a_set_is_nested "nested", 2;
    turns_with_the_kernel "turns", 2;
    masks "masks", 2;
    a_set_is_closed_under_its_waiter "closed-set", 20;
    refusals "refusals", 2;
    a_set_goes_on_in_a_child "forked", 48;
    exclusive "exclusive", 12;
}

/// Several threads in one set, and connections that just get, use and lose their lanes.
fn crowd(case: &str) -> Result<()> {
    both_ways("crowd", &[case], 40, 100_000)
}

#[test]
fn crowd_of_one_shots() -> Result<()> {
    crowd("once")
}

#[test]
fn crowd_of_edges() -> Result<()> {
    crowd("edge")
}

#[test]
fn crowd_in_two_sets_and_by_copies() -> Result<()> {
    crowd("both")
}

#[test]
fn crowd_of_numbers_that_change() -> Result<()> {
    crowd("churn")
}

/// Two threads, of which one may be away, and what happens while a connection gets its lane.
#[test]
fn who_is_told_stays_away() -> Result<()> {
    both_ways("heard", &["away"], 60, 10_000)
}

/// A set with connections to 650 other processes, all on lanes, and later to others instead of some of them; every byte is
/// compared.
#[test]
fn very_many_processes_in_a_set() -> Result<()> {
    both_ways("heard", &["many"], 1500, 160_000)
}

/// By a vfork child, which does not have the set that watches it.
#[test]
fn leaves_unseen_by_its_set() -> Result<()> {
    both_ways("late_exec", &[], 10, 10)
}
