//! What programs do with a promoted connection besides sending and receiving: copies of its
//! descriptor, half-close, hand-over to programs that have no shim, death.
//!
//! Each case also runs bare, so that it is known to be what TCP does.

use anyhow::{ensure, Context, Result};
use nix::sys::signal::Signal;
use std::time::Duration;
use underpass_tests::harness::peers::Pair;
use underpass_tests::harness::{until, Daemon};

const LIMIT: Duration = Duration::from_secs(60);

const PROGRAM: &str = "cases.py";

fn promoted(d: &Daemon, case: &str) -> Result<Pair> {
    Pair::promoted(PROGRAM, case, d)
}

fn bare(case: &str) -> Result<Pair> {
    Pair::bare(PROGRAM, case)
}

macro_rules! cases {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() -> Result<()> {
            Pair::both_ways(PROGRAM, stringify!($name), LIMIT)
        }
    )*};
}

cases! {
    dup over flags halfclose bigwrites sendfile reset exec spawn inetd rights bothfork daemonize
    reinit etshort resetseen resetafter peeks atfork restart stdio
}

/// A process that is killed leaves every byte it sent.
#[test]
fn killed_with_unread_bytes() -> Result<()> {
    for with_shim in [false, true] {
        let d = Daemon::start()?;
        let mut p = if with_shim {
            promoted(&d, "killed")?
        } else {
            bare("killed")?
        };
        p.await_mark("sent")?;
        p.server.signal(Signal::SIGKILL)?;
        until("the server is dead", LIMIT, || p.server.has_ended())?;
        p.mark("killed")?;
        p.finish_client(LIMIT)
            .with_context(|| format!("shim: {with_shim}\n{}", d.picture()))?;
        if with_shim {
            d.assert_promoted(2, 30_000)?;
        }
    }
    Ok(())
}

/// Whoever waits for a process that is killed wakes up.
#[test]
fn killed_while_the_peer_waits() -> Result<()> {
    killed_while_waiting("killedwaiting", |_| Ok(()))
}

/// The same of the child of a process that has ended.
#[test]
fn child_killed_while_the_peer_waits() -> Result<()> {
    killed_while_waiting("heirkilled", |p| {
        until("the parent has ended", LIMIT, || p.server.has_ended())?;
        std::thread::sleep(Duration::from_millis(100)); // the daemon knows by now, or not yet
        ensure!(
            !p.client.has_ended(),
            "its end was taken for the connection's"
        );
        Ok(())
    })
}

fn killed_while_waiting(case: &str, before: impl Fn(&mut Pair) -> Result<()>) -> Result<()> {
    for with_shim in [false, true] {
        let d = Daemon::start()?;
        let mut p = if with_shim {
            promoted(&d, case)?
        } else {
            bare(case)?
        };
        p.await_mark("waiting")?;
        std::thread::sleep(Duration::from_millis(100)); // likely asleep now; right either way
        before(&mut p).with_context(|| format!("shim: {with_shim}"))?;
        p.server.kill();
        p.finish_client(LIMIT)
            .with_context(|| format!("shim: {with_shim}\n{}", d.picture()))?;
        if with_shim {
            d.assert_promoted(2, 1000)?;
            until("nothing is left of it", LIMIT, || {
                d.stats().is_ok_and(|s| (s.links, s.lanes) == (0, 0))
            })?;
        }
    }
    Ok(())
}

/// Killing one of two clients leaves the other undisturbed.
#[test]
fn killed_beside_others() -> Result<()> {
    use underpass_tests::harness::peers::Echo;
    let d = Daemon::start()?;
    let echo = Echo::serve("epoll", "127.0.0.1", &d.eager())?;
    let stop = tempfile::tempdir()?;
    let file = stop.path().join("stop");
    let good = echo.client(&d.eager(), 4, 0, Some(&file))?;
    for _ in 0..5 {
        let mut bad = echo.client(&d.eager(), 4, 1_000_000, None)?;
        d.await_promoted(16)?;
        bad.running.kill();
        until("only the good ones are left", LIMIT, || {
            d.promoted_now() == 8
        })
        .with_context(|| d.picture())?;
    }
    std::fs::write(&file, b"")?;
    let (bytes, _) = good.finish(LIMIT)?;
    d.assert_promoted(8, bytes)?;
    Ok(())
}
