//! Connections that a parent and its children use at the same time: what one of them does, also when it is killed in
//! the middle of it, costs the others no byte, and nobody sleeps for ever. `tests/programs/kin.c` says what it expects.

use anyhow::{ensure, Context, Result};
use lane::family::{state, Conn, Table};
use std::mem::offset_of;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use underpass_tests::harness::c::{both_ways, compile};
use underpass_tests::harness::{Daemon, Program, PATIENCE};

/// Who is killed with the lock of a direction, or in the system call that moves its bytes, leaves what the others can
/// go on with.
#[test]
fn children_that_send_are_killed() -> Result<()> {
    both_ways("kin", &["writers", "40"], 60, 50_000)
}

#[test]
fn a_child_goes_on_when_its_parent_is_killed() -> Result<()> {
    both_ways("kin", &["children", "150"], 150, 50_000)
}

/// Numbers of processes and threads are no identity where each has a namespace of its own.
#[test]
fn parent_and_child_are_process_1() -> Result<()> {
    both_ways("kin", &["namespaces", "3000"], 2, 10_000)
}

/// Each record is taken once, by who waits in whatever way.
#[test]
fn both_wait_and_take() -> Result<()> {
    both_ways("kin", &["readers", "10000"], 2, 2_000)
}

/// A child that watches the connection in an epoll set of its own is told of what lies on the ring, though nobody sends.
#[test]
fn both_wait_in_sets_of_their_own() -> Result<()> {
    both_ways("kin", &["epoll", "10000"], 2, 2_000)
}

/// The same in the set that a child has inherited: nobody waits for the sender, and nothing is reset.
#[test]
fn a_child_waits_in_its_parents_set() -> Result<()> {
    both_ways("kin", &["adopted", "12"], 24, 10_000)
}

/// A child that has ended has no descriptors, though its parent may never wait for it.
#[test]
fn zombies_hold_nothing() -> Result<()> {
    both_ways("kin", &["zombies", "10"], 20, 5_000)
}

/// Nor have those that ended while nobody asked who holds the connection.
#[test]
fn children_that_have_ended_leave_room() -> Result<()> {
    both_ways("kin", &["many", "5"], 10, 1_000)
}

/// Both close what they share at the same moments, while other threads of the parent make and use new connections.
#[test]
fn parent_and_child_close_at_once() -> Result<()> {
    both_ways("partings", &["40"], 20, 500)
}

/// Forks in a process whose other threads are anywhere in the shim.
#[test]
fn forks_while_lanes_are_attached() -> Result<()> {
    both_ways("kin", &["promotion", "300"], 300, 100_000)
}

/// Rings of a connection that others have inherited stay where those have them mapped.
#[test]
fn rings_that_grow_are_found_by_children() -> Result<()> {
    both_ways("kin", &["rings"], 60, 100 << 20)
}

/// What one thread makes while others fork is not shared for good when their children have ended.
#[test]
fn forks_while_connections_are_made() -> Result<()> {
    both_ways("born", &[], 600, 500)
}

/// Children that are killed before their first own instruction hold nothing.
#[test]
fn who_is_never_born_holds_nothing() -> Result<()> {
    both_ways("stillborn", &["5"], 10, 20)
}

/// Number of connections in a program's table.
fn entries(pid: u32) -> Result<usize> {
    let is_table = |p: &PathBuf| {
        let name = std::fs::read_link(p).unwrap_or_default();
        name.to_string_lossy().contains("underpass-family")
    };
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd"))?;
    let mut paths = fds.filter_map(|e| Some(e.ok()?.path()));
    let table = std::fs::File::open(paths.find(is_table).context("a table")?)?;
    let taken = |k: &usize| {
        let mut word = [0; 4];
        let at = offset_of!(Table, conns) + k * size_of::<Conn>() + offset_of!(Conn, state);
        let read = table.read_exact_at(&mut word, at as u64);
        read.is_ok() && u32::from_ne_bytes(word) != state::FREE
    };
    Ok((0..ENTRIES).filter(taken).count())
}

/// More than the program makes.
const ENTRIES: usize = 1000;

/// What is closed after a fork has counted its child as a holder, and before there is one, is nobody's.
#[test]
fn closed_while_a_fork_begins() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (program, end) = (dir.path().join("prepared"), dir.path().join("end"));
    compile("prepared", &program)?;
    let d = Daemon::start()?;
    let mut p = Program::new(&program, &d.eager())
        .arg("20")
        .arg(&end)
        .spawn()?;
    p.line("closed", PATIENCE)?;
    ensure!(entries(p.pid())? <= 1, "more than the listener is left");
    std::fs::write(&end, b"")?;
    let out = p.wait(PATIENCE)?;
    ensure!(out.status.success(), "{}\n{}", out.stdout, out.stderr);
    d.assert_promoted(40, 40).map(|_| ())
}

/// A child that has not noticed that its parent has given a lane back leaves alone what is in its place, and is left alone.
#[test]
fn places_of_lanes_are_used_anew() -> Result<()> {
    both_ways("replaced", &[], 20, 1_000)
}

/// Many threads fork, spawn and have connections of which this process has both ends; a grandchild goes on with one.
#[test]
fn grandchildren_go_on() -> Result<()> {
    both_ways("grandchildren", &["16", "3"], 20, 1_000)
}
