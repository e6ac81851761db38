//! Time limits of a socket, the negative ones as well, and the options of its keepalive: what a program sets and
//! reads is the kernel's, on a lane as on TCP.

use anyhow::{ensure, Result};
use std::time::Duration;
use underpass_tests::harness::peers::Pair;
use underpass_tests::harness::Daemon;

const PROGRAM: &str = "limits.py";
/// `Pair` names a case; here is one.
const CASE: &str = "limits";
const LIMIT: Duration = Duration::from_secs(60);

fn start(d: Option<&Daemon>) -> Result<Pair> {
    match d {
        None => Pair::bare(PROGRAM, CASE),
        Some(d) => Pair::promoted(PROGRAM, CASE, d),
    }
}

/// What both ends said, the client's first.
fn said(p: Pair) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for out in [p.client.wait(LIMIT), p.server.wait(LIMIT)] {
        let out = out?.ok()?;
        ensure!(out.contains("result ok"), "{out}");
        all.extend(
            out.lines()
                .filter(|l| l.starts_with("said"))
                .map(str::to_string),
        );
    }
    Ok(all)
}

#[test]
fn as_without_the_shim() -> Result<()> {
    let bare = said(start(None)?)?;
    let d = Daemon::start()?;
    let ours = said(start(Some(&d))?)?;
    for (b, o) in bare.iter().zip(&ours) {
        ensure!(b == o, "bare: {b}\nshim: {o}");
    }
    ensure!(bare.len() == ours.len() && bare.len() > 50);
    d.assert_promoted(2, 1000)?;
    Ok(())
}
