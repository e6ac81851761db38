//! Large calls: one blocking send, receive or file of a hundred megabytes goes onto the lane in its
//! middle, and says what the kernel says of time-outs, signals and errors.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::{c::both_ways, Daemon, Place, Program, PATIENCE};

const LIMIT: Duration = Duration::from_secs(60);

/// What both ends of a case of `large.py` say.
fn pair(case: &str, server: &Place, client: &Place) -> Result<[String; 2]> {
    let mut s = Program::python("large.py", server)
        .args([case, "serve", "127.0.0.1"])
        .spawn()?;
    let port = s.line("port ", PATIENCE)?;
    let c = Program::python("large.py", client)
        .args([case, "connect", "127.0.0.1", &port])
        .check(LIMIT)
        .with_context(|| format!("{case}: client"))?;
    let s = s.wait(LIMIT)?.ok().context("server")?;
    let results = |t: &str| t.lines().filter(|l| l.starts_with("result")).collect();
    Ok([results(&s), results(&c)])
}

/// The same bytes and counts as without the shim, and a part of the bytes on the lane: the call was under
/// way when it went up. (On a busy machine a full ring goes down for a while.)
fn goes_up(case: &str, bytes: u64) -> Result<()> {
    some_go_up(case, bytes, 2)
}

/// At least so many ends are on a ring.
fn some_go_up(case: &str, bytes: u64, ends: u64) -> Result<()> {
    let bare = pair(case, &Place::bare(), &Place::bare())?;
    let d = Daemon::start()?;
    let shim = pair(case, &d.place(), &d.place())?;
    ensure!(shim == bare, "{case}: {shim:?}, bare: {bare:?}");
    d.assert_promoted(ends, bytes / 16)?;
    Ok(())
}

const BULK: u64 = 128 << 20;

#[test]
fn one_send() -> Result<()> {
    goes_up("send", BULK)
}

#[test]
fn one_send_that_sleeps_meanwhile() -> Result<()> {
    goes_up("late", BULK)
}

/// The call keeps a descriptor of its own meanwhile, which is nobody else's.
#[test]
fn one_send_on_a_connection_from_another_process() -> Result<()> {
    // (Its reader is slow, so that its ring is full again and again, and goes to TCP before the reader has come to it.)
    some_go_up("handed", BULK / 8, 1)
}

#[test]
fn one_vector() -> Result<()> {
    goes_up("vector", BULK)
}

#[test]
fn one_file() -> Result<()> {
    goes_up("file", BULK)
}

#[test]
fn one_receive_that_waits_for_all() -> Result<()> {
    goes_up("waitall", BULK)
}

#[test]
fn requests_and_answers() -> Result<()> {
    goes_up("turns", 60 * 400_000)
}

/// What ends a call that has moved a part: as without the shim, with a peer that has none (so that the
/// call stays a candidate's) and with one that has.
#[test]
fn ends_of_large_calls() -> Result<()> {
    for case in [
        "timeout",
        "signal",
        "restart",
        "reset",
        "gone",
        "part",
        "part_signal",
        "part_restart",
        "part_timeout",
        "mark",
        "nonblock",
    ] {
        let bare = pair(case, &Place::bare(), &Place::bare())?;
        let d = Daemon::start()?;
        let both = matches!(case, "restart" | "reset" | "part_restart" | "mark");
        let servers = [Place::bare(), d.place()];
        for server in &servers[..1 + usize::from(both)] {
            let shim = pair(case, server, &d.place())?;
            ensure!(shim == bare, "{case}: {shim:?}, bare: {bare:?}");
        }
        let s = d.stats()?;
        ensure!(
            (s.registered > 0 || case == "nonblock") && s.resets == 0,
            "{case}: {s:?}"
        );
    }
    Ok(())
}

/// What the other end's kernel answers to the first part of a large send does not cut the rest off.
#[test]
fn a_send_to_who_has_closed() -> Result<()> {
    both_ways("late_send", &["60", "0"], 0, 0)?;
    both_ways("late_send", &["60", "12"], 120, 1_000)
}

/// The daemon's copy of a socket that it reads does not hold back a close.
#[test]
fn a_close_while_the_daemon_looks() -> Result<()> {
    both_ways("handed_in", &["3000"], 0, 0)
}

/// Three gigabytes asked for: two are moved, less a page.
#[test]
fn no_more_than_the_kernel_moves_in_one_call() -> Result<()> {
    both_ways("most", &[], 2, 1 << 30)
}
