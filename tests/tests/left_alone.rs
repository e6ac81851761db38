//! Leaving a lane beside an end that does nothing: the daemon brings that end's ring to TCP in its stead.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::{c, Daemon, Place, Program};

const LIMIT: Duration = Duration::from_secs(60);

struct LeftAlone {
    dir: tempfile::TempDir,
}

impl LeftAlone {
    fn compile() -> Result<LeftAlone> {
        let dir = tempfile::tempdir()?;
        c::compile("left_alone", &dir.path().join("left_alone"))?;
        Ok(LeftAlone { dir })
    }

    fn program(&self, place: &Place, args: [&str; 4]) -> Program {
        Program::new(self.dir.path().join("left_alone"), place).args(args)
    }

    fn run(&self, place: &Place, args: [&str; 4]) -> Result<()> {
        let out = self.program(place, args).run(LIMIT)?;
        let ok = out.status.success() && out.stdout.contains("result ok");
        ensure!(
            ok,
            "{args:?}: {}\n{}\n{}",
            out.status,
            out.stdout,
            out.stderr
        );
        Ok(())
    }
}

const HOW: [&str; 3] = ["sleep", "spin", "stop"];
/// What fits into TCP's buffers, and what does not.
const AMOUNTS: [&str; 2] = ["50000", "400000"];

#[test]
fn beside_one_that_does_nothing() -> Result<()> {
    let t = LeftAlone::compile()?;
    let d = Daemon::start()?;
    let mut n = 0;
    for (how, amount) in HOW.iter().flat_map(|h| AMOUNTS.map(|a| (h, a))) {
        for then in ["go", "quiet", "half", "kill", "early"] {
            let by = if n % 2 == 0 { "exec" } else { "fork" };
            t.run(&Place::bare(), [how, amount, then, by])?;
            t.run(&d.eager(), [how, amount, then, by])
                .with_context(|| d.picture())?;
            n += 1;
            let s = d.assert_promoted(2 * n, 30_000 * n)?;
            ensure!(
                s.taken_over == n,
                "{} of {n}: {}",
                s.taken_over,
                d.picture()
            );
        }
    }
    Ok(())
}

/// The daemon dies while TCP is full, and it may not make the buffer larger: the end goes on with what it had begun, when
/// it comes to it.
#[test]
fn the_daemon_dies_meanwhile() -> Result<()> {
    let t = LeftAlone::compile()?;
    let no_room = t.dir.path().join("no_room.so");
    c::library("no_room", &no_room)?;
    for (how, then) in HOW
        .iter()
        .flat_map(|h| ["go", "quiet", "half"].map(|t| (h, t)))
    {
        let mut d = Daemon::preloaded(&no_room)?;
        let gate = t.dir.path().join(format!("{how}-{then}"));
        let p = t.program(&d.eager(), [how, AMOUNTS[1], then, "exec"]);
        let mut p = p.arg(&gate).spawn()?;
        p.line("ready", LIMIT).with_context(|| d.picture())?;
        ensure!(
            d.stats()?.taken_over == 0,
            "it is not full: {}",
            d.picture()
        );
        d.kill();
        std::fs::write(&gate, b"")?;
        let out = p.wait(LIMIT)?;
        let ok = out.stdout.contains("result ok");
        ensure!(
            ok,
            "{how}, {then}: {}\n{}\n{}",
            out.status,
            out.stdout,
            out.stderr
        );
    }
    Ok(())
}
