//! Leaving a lane beside an end that does nothing: the daemon brings that end's ring to TCP in its stead.

use anyhow::{bail, ensure, Context, Result};
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

/// What a call with which connections leave may wait, however many they are: each wait is a round for all of them, and the
/// later ones are longer. (Commonly there are two.)
const WAITS: u32 = 40;
const WAYS: [&str; 6] = ["system", "popen", "spawn", "fork", "rights", "unshare"];

/// The thread that calls `system` once, hands its connections over, or parts from its other threads, has a thousand lanes to
/// peers that do nothing, or never read: no connection is reset, none loses a byte, and it waits no more often than with
/// five. (There are seats for 1,024 takeovers at a time.)
#[test]
fn no_more_waits_for_a_thousand() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let program = dir.path().join("many");
    c::compile("many", &program)?;
    let run = |place: &Place, args: &str| -> Result<Vec<u32>> {
        let out = Program::new(&program, place).words(args).run(LIMIT)?;
        let ok = out.status.success() && out.stdout.contains("result ok");
        ensure!(ok, "{args}: {}\n{}\n{}", out.status, out.stdout, out.stderr);
        let words = out.stdout.split_whitespace();
        Ok(words.filter_map(|w| w.parse().ok()).collect())
    };
    let d = Daemon::start()?;
    let few =
        ["asleep", "stopped", "hostile"].map(|how| WAYS.map(|way| (5, format!("5 1 {how} {way}"))));
    let many = [
        (1000, "1000 1 asleep system"),
        (1000, "1000 1 stopped popen"),
        (1000, "1000 1 hostile fork"),
        (2000, "2000 2 hostile spawn"),
        (1000, "1000 1 asleep rights"),
        (1000, "1000 1 hostile unshare"),
    ];
    let many = many.map(|(n, args)| (n, args.to_owned()));
    for (n, args) in few.into_iter().flatten().chain(many) {
        if n == 5 {
            run(&Place::bare(), &args).context("bare")?;
        }
        let said = run(&d.eager(), &args).with_context(|| d.picture())?;
        println!("{args}: {said:?}");
        let [lanes, waits, _ms] = said[..] else {
            bail!("{args}: {said:?}");
        };
        ensure!(lanes == n && waits <= WAITS, "{args}: {said:?}");
    }
    let s = d.stats()?;
    let whole = !d.log()?.join("\n").contains("(fuse)");
    ensure!(
        s.resets == 0 && whole && s.taken_over > 4000,
        "{}",
        d.picture()
    );
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
