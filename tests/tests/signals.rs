//! Signals: handlers that call hooks inside of hooks, and what they do to calls that sleep; cancellation;
//! the order in which `epoll_wait` lists; and how much stack hooks need.

use anyhow::Result;
use underpass_tests::harness::c::both_ways;

#[test]
fn handlers_call_hooks_inside_of_hooks() -> Result<()> {
    both_ways("handlers", &["4", "1"], 30, 1_000_000)
}

#[test]
fn interrupted_calls_end_or_go_on_as_the_handler_has_it() -> Result<()> {
    both_ways("interrupts", &[], 2, 1_000)
}

#[test]
fn what_came_first_is_listed_first() -> Result<()> {
    both_ways("order", &[], 90, 2_000)
}

/// Among the kernel's events, too, for who slept when they came.
#[test]
fn what_wakes_a_sleeper_is_listed_first() -> Result<()> {
    both_ways("asleep_order", &[], 2, 500)
}

#[test]
fn cancelled_threads_leave_nothing_behind() -> Result<()> {
    both_ways("cancelled", &[], 16, 100_000)
}

#[test]
fn handlers_that_take_their_time_keep_no_other_thread_waiting() -> Result<()> {
    both_ways("slow", &[], 4, 100)
}

/// Threads with the smallest stack, and handlers on an alternate one of the usual size, make every call.
#[test]
fn hooks_need_little_stack() -> Result<()> {
    both_ways("stack", &["4608"], 4, 1_000)
}

/// Threads that never say what a call has moved on TCP: the connection goes up all the same. (It looks for itself
/// whether it is on a lane; without one it would not end well.)
#[test]
fn what_nobody_counted_keeps_no_connection_down() -> Result<()> {
    both_ways("uncounted", &[], 48, 5_000_000)
}

/// A wait that looks and spins before it sleeps lets in what its mask does when the kernel would.
#[test]
fn masks_of_waits() -> Result<()> {
    both_ways("let_in", &["1000"], 2, 4_000)
}
