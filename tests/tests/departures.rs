//! The matrix of `departures.c`: each way to leave a lane, beside a peer that sleeps, computes, is stopped, has shut down,
//! closed, exited or was killed, with bytes unread either way. Each line is the one that it prints without the shim.

use anyhow::{ensure, Result};
use std::time::Duration;
use underpass_tests::harness::{c, Daemon, Place, Program};

const LIMIT: Duration = Duration::from_secs(300);

/// The one case in which the application sees something else: the peer was killed with bytes on its ring, and the
/// connection goes to where only TCP is read. It is told by an error, never by a short stream that ends cleanly.
fn is_lost(line: &str) -> bool {
    line.contains("/killed/unread-") && !line.contains("/unread-0/")
}

#[test]
fn every_way_out_is_as_bare() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("departures");
    c::compile("departures", &path)?;
    let run = |place: &Place| Program::new(&path, place).run(LIMIT);
    let bare = run(&Place::bare())?;
    let d = Daemon::start()?;
    let ours = run(&d.eager())?;
    let told = format!("{}\n{}\n{}", ours.stderr, ours.stdout, d.picture());
    ensure!(bare.status.success() && ours.status.success(), "{told}");
    let (bare, ours) = (bare.stdout.lines(), ours.stdout.lines());
    ensure!(
        bare.clone().count() == 1466 && ours.clone().count() == 1466,
        "{told}"
    );
    let mut lost = 0;
    for (bare, ours) in bare.zip(ours) {
        if bare == ours {
            continue;
        }
        let errs = is_lost(ours) && ours.contains("READ ") && ours.contains("ECONNRESET");
        ensure!(errs, "bare {bare}\nours {ours}\n{told}");
        lost += 1;
    }
    let s = d.stats()?;
    // Resets are of those alone. (Each cell's connection has two ends on lanes; most ways leave beside a peer that does
    // nothing, and need the daemon.)
    ensure!(lost <= 100 && s.resets <= lost + 5, "{lost} {told}");
    ensure!(s.promoted >= 2 * 1466 && s.taken_over > 200, "{told}");
    Ok(())
}
