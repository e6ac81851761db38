//! The fuse: once the shim had to reset a connection, new ones of that program stay on TCP until an operator has seen it.

use anyhow::{ensure, Context, Result};
use lane::proto::reason::Reason;
use std::time::Duration;
use underpass_admin::Target;
use underpass_tests::harness::{c, until, Daemon, Program, PATIENCE};

/// A connection is closed, and its place in the table taken by another, before the daemon hears of it.
const CLOSED: Duration = Duration::from_millis(50);
const LIMIT: Duration = Duration::from_secs(90);

#[test]
fn new_connections_stay_on_tcp_until_up() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let [program, go, frozen] = ["fuse", "go", "frozen"].map(|n| dir.path().join(n));
    c::compile("fuse", &program)?;
    let d = Daemon::start()?;
    d.expect_resets();
    for place in [d.place(), d.eager()] {
        let p = Program::new(&program, &place).arg(&go);
        let mut p = p.arg(&frozen).spawn()?;
        p.line("unread", LIMIT).with_context(|| d.picture())?;
        d.freeze()?;
        std::fs::write(&frozen, b"")?;
        let lost = p.line("lost", LIMIT);
        std::fs::remove_file(&frozen)?; // it closes the connection
        std::thread::sleep(CLOSED);
        d.thaw()?;
        lost.with_context(|| d.picture())?;
        p.line("tcp", LIMIT).with_context(|| d.picture())?;
        until("both ends say so", PATIENCE, || {
            let fuse = |code: u32| code == Reason::Fuse.code();
            let rows = d.ss().unwrap_or_default();
            rows.iter().filter(|r| fuse(r.reason)).count() == 2
        })
        .with_context(|| d.picture())?;
        let log = d.log()?.join("\n");
        for says in ["] reset ", ": foreign-bytes", ": stalled"] {
            ensure!(log.contains(says), "{says} is not in\n{log}");
        }
        // What an operator looks for.
        let of = "TCP after a reset of 127.0.0.1:";
        let blown = log.lines().find(|l| l.contains("(fuse)"));
        ensure!(blown.is_some_and(|l| l.contains(of)), "no addresses: {log}");
        d.up(Target::All)?;
        d.await_promoted(4)?; // those that kept their lanes, and those that have one now
        std::fs::write(&go, b"")?;
        let out = p.wait(LIMIT)?;
        ensure!(
            out.stdout.contains("result ok"),
            "{}\n{}\n{}",
            out.stdout,
            out.stderr,
            d.picture()
        );
        std::fs::remove_file(&go)?;
    }
    ensure!(d.stats()?.resets == 4, "{}", d.picture());
    Ok(())
}
