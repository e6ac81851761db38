//! A victim that serves a liar serves everybody else undisturbed.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::peers::{result, Echo};
use underpass_tests::harness::redis::{Load, Redis};
use underpass_tests::harness::{until, Daemon, Place, Program, PATIENCE};

const LIMIT: Duration = Duration::from_secs(90);

fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, |d| d.count())
}

#[test]
fn hostile_peer() -> Result<()> {
    let mut d = Daemon::start()?;
    d.expect_resets();
    let mut redis = Redis::start(&d.place())?;
    let files = (open_files(redis.running.pid()), open_files(d.stats()?.pid));
    let dir = tempfile::tempdir()?;
    let stop = dir.path().join("stop");
    let liar = Program::new(env!("CARGO_BIN_EXE_hostile"), &Place::bare())
        .arg(d.dir())
        .arg(format!("127.0.0.1:{}", redis.port))
        .arg(&stop)
        .spawn()?;
    // Others of the same victim, and of the same daemon.
    let echo = Echo::serve("epoll", "127.0.0.1", &d.eager())?;
    let others = echo.client(&d.eager(), 4, 0, Some(&stop))?;
    let load = Load {
        test: "set",
        clients: 10,
        pipeline: 1,
        requests: 30_000,
        reconnect: false,
    };
    for round in 0..20 {
        let before = d.stats()?.promoted;
        redis
            .benchmark(&d.place(), load)
            .with_context(|| format!("round {round}"))?;
        let after = d.stats()?.promoted;
        // Beside a liar that keeps both processors busy, not each of the short connections is.
        ensure!(
            after >= before + 10,
            "round {round}: {} ends",
            after - before
        );
        ensure!(
            !d.has_died() && !redis.running.has_ended(),
            "somebody died: {}",
            d.said()
        );
    }
    std::fs::write(&stop, b"")?;
    let (bytes, _) = others
        .finish(LIMIT)
        .context("the echo clients beside the liar")?;
    ensure!(bytes > 0);
    let out = liar.wait(LIMIT)?;
    let v = result(&out.stdout).with_context(|| out.stderr.clone())?;
    println!("{v}");
    let n = |k: &str| v[k].as_u64().unwrap_or(0);
    // It must really have been on lanes with the victim, or this test shows nothing.
    ensure!(
        n("episodes") >= 16 && n("offers") >= 40 && n("attacks") >= 40,
        "{v}\n{}",
        out.stderr
    );
    ensure!(
        n("breaches") == 0,
        "the victim's memory could be changed: {v}"
    );
    // Nothing of it stays behind.
    let clean = || {
        let now = (
            open_files(redis.running.pid()),
            open_files(d.stats().map_or(0, |s| s.pid)),
        );
        now.0 <= files.0 + 30 && now.1 <= files.1 + 30
    };
    until("descriptors are given back", PATIENCE, clean).with_context(|| {
        let now = (
            open_files(redis.running.pid()),
            d.stats().map(|s| open_files(s.pid)),
        );
        format!("before {files:?}, now {now:?}")
    })?;
    redis.benchmark(&d.place(), load)?;
    Ok(())
}
