//! `underpass check` against real programs that do nothing, under the shim and without.

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use std::time::Duration;
use underpass_tests::harness::peers::Echo;
use underpass_tests::harness::redis::Redis;
use underpass_tests::harness::web::Nginx;
use underpass_tests::harness::{paths, Daemon, Place, Program};

fn check(d: &Daemon, port: u16) -> Result<Value> {
    let out = Program::new(paths::bin("underpass"), &Place::bare())
        .arg("--dir")
        .arg(d.dir())
        .words(&format!("check -j --wait 10 127.0.0.1 {port}"))
        .env("UNDERPASS_LIB", paths::shim())
        .run(Duration::from_secs(60))?;
    serde_json::from_str(&out.stdout).with_context(|| format!("{out:?}"))
}

/// It got a lane, and both ends are known to the daemon, without a reason against it.
fn promoted(d: &Daemon, what: &str, port: u16) -> Result<()> {
    // The second connection meets a process that has spoken to the daemon already.
    for round in 0..2 {
        let v = check(d, port).with_context(|| what.to_string())?;
        let fine = v["mode"] == "SMCD"
            && v["promoted"] == true
            && v["here"]["reason"]["code"] == "0x00000000"
            && v["there"]["reason"]["code"] == "0x00000000"
            && v["there"]["known"] == true;
        ensure!(fine, "{what}, round {round}: {v:#}\n{}", d.picture());
    }
    Ok(())
}

#[test]
fn idle_servers_are_promoted() -> Result<()> {
    let d = Daemon::start()?;
    let redis = Redis::start(&d.place())?;
    promoted(&d, "redis", redis.port)?;
    // A master that listens, and a worker that sleeps in epoll_wait without a time-out.
    let web = Nginx::start(&d.place())?;
    promoted(&d, "nginx", web.port)?;
    ensure!(d.stats()?.resets == 0);
    Ok(())
}

#[test]
fn idle_event_loops_are_promoted() -> Result<()> {
    let d = Daemon::start()?;
    for mode in ["epoll", "edge", "poll", "select"] {
        let echo = Echo::serve(mode, "127.0.0.1", &d.place())?;
        promoted(&d, mode, echo.port()?)?;
        // Nothing is lost for those that come after.
        echo.client(&d.place(), 2, 50, None)?
            .finish(Duration::from_secs(60))
            .with_context(|| mode.to_string())?;
    }
    Ok(())
}

/// Nobody can be woken that sleeps in a blocking `recv`: it says what such a connection would get.
#[test]
fn an_idle_blocking_server_is_promotable() -> Result<()> {
    let d = Daemon::start()?;
    let echo = Echo::serve("threads", "127.0.0.1", &d.place())?;
    let v = check(&d, echo.port()?)?;
    ensure!(
        v["mode"] == "SMCD" && v["promotable"] == true && v["promoted"] == false,
        "{v:#}\n{}",
        d.picture()
    );
    Ok(())
}

#[test]
fn a_server_without_the_shim_has_its_reason() -> Result<()> {
    let d = Daemon::start()?;
    let redis = Redis::start(&Place::bare())?;
    let v = check(&d, redis.port)?;
    ensure!(
        v["promoted"] == false
            && v["promotable"] == false
            && v["there"]["reason"]["name"] == "peer-no-shim"
            && v["there"]["comm"] == "redis-server",
        "{v:#}"
    );
    let off = Redis::start(&d.place().off())?;
    let v = check(&d, off.port)?;
    ensure!(v["there"]["reason"]["name"] == "config", "{v:#}");
    Ok(())
}
