//! Calls that sleep on a connection while another thread closes its descriptor: they stay with it, as in the
//! kernel, whatever the number means next.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::peers::Pair;
use underpass_tests::harness::{paths, until, Daemon, Place, Program, PATIENCE};

const LIMIT: Duration = Duration::from_secs(90);

fn start(place: &Place) -> Result<(Pair, u64)> {
    let mut p = Pair::roles("blocked.py", place, place)?;
    let n = p.client.line("connections ", PATIENCE)?.parse()?;
    Ok((p, n))
}

/// The kernel's own answers, and those of a shim without a daemon, whose native calls are counted.
#[test]
fn stay_on_tcp() -> Result<()> {
    let d = Daemon::absent()?;
    for place in [Place::bare(), d.place()] {
        let (p, _) = start(&place)?;
        p.mark("warm")?;
        p.finish(LIMIT)?;
    }
    Ok(())
}

fn stay_on_lanes(d: &Daemon, place: &Place) -> Result<()> {
    let (p, n) = start(place)?;
    d.await_promoted(2 * n as usize)?;
    until("bytes on the lanes", PATIENCE, || {
        d.stats().is_ok_and(|s| s.lane_tx_bytes >= 1000 * n)
    })?;
    p.mark("warm")?;
    p.finish(LIMIT).with_context(|| d.picture())?;
    d.assert_promoted(2 * n, 1000 * n)?;
    Ok(())
}

#[test]
fn stay_on_lanes_eager() -> Result<()> {
    let d = Daemon::start()?;
    stay_on_lanes(&d, &d.eager())
}

#[test]
fn stay_on_lanes_default() -> Result<()> {
    let d = Daemon::start()?;
    stay_on_lanes(&d, &d.place())
}

/// Calls that are cancelled, left by `siglongjmp`, interrupted by a handler that closes, or beside a fork:
/// what they say, and that the peer's end comes, is the same bare and on lanes.
#[test]
fn calls_that_do_not_return() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let program = dir.path().join("leaving");
    Program::new("cc", &Place::bare())
        .words("-O1 -Wall -Werror -pthread -o")
        .arg(&program)
        .arg(paths::script("leaving.c"))
        .check(LIMIT)?;
    let said = |place: &Place| -> Result<String> {
        let o = Program::new(&program, place).spawn()?.wait(LIMIT)?;
        ensure!(o.status.success(), "{}\n{}", o.status, o.stderr);
        Ok(o.stdout)
    };
    let bare = said(&Place::bare())?;
    let d = Daemon::start()?;
    for place in [d.place(), d.eager()] {
        let before = d.stats()?.promoted;
        let got = said(&place)?;
        ensure!(got == bare, "bare:\n{bare}\nhere:\n{got}");
        ensure!(d.stats()?.promoted >= before + 12, "not on lanes");
    }
    Ok(())
}
