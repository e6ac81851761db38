//! The matrix of `departures.c`: each way to leave a lane, beside a peer that sleeps, computes, is stopped, has shut down,
//! closed, exited or was killed, with bytes unread either way. Each line is the one that it prints without the shim.

use anyhow::{ensure, Result};
use underpass_tests::harness::departures::{most_waits, Matrix, CELLS, GOES_AWAY, LIMIT, WAITS};
use underpass_tests::harness::{Daemon, Place, Pods, Program};

/// Of so many cells one is tried with the usual rules as well, or all with `CELLS=""` (as in the lab).
const EVERY: usize = 7;
/// Where the peer is killed, something may be lost and its connection reset (see [`Matrix::lost`]).
const KILLED: &str = "/killed/";

/// `lost`: so many cells of each way may lose what a peer that was killed has left on its ring.
fn every_cell_is_as_bare(
    within: impl Fn(Place) -> Place,
    env: &[(&str, String)],
    lost: usize,
) -> Result<()> {
    let most_lost = (GOES_AWAY.len() * lost) as u64;
    let matrix = Matrix::compile()?;
    let run = |place: Place, every: usize, filter: &[String]| {
        let p = Program::new(matrix.program(), &within(place));
        let p = p.env("EVERY", every.to_string()).args(filter);
        let p = env.iter().fold(p, |p, (name, value)| p.env(name, value));
        p.run(LIMIT)
    };
    let bare = run(Place::bare(), 1, &[])?;
    let bare_waits = most_waits(&bare.stderr)?;
    let all = bare.stdout.lines().count() as u64;
    ensure!(
        bare.status.success() && all == CELLS,
        "{}\n{}",
        bare.stderr,
        bare.stdout
    );
    let every = std::env::var_os("CELLS").map_or(EVERY, |_| 1);
    for (eager, every) in [(true, 1), (false, every)] {
        let d = Daemon::start()?;
        d.expect_resets(); // (where peers are killed; they are counted below)
        let mut cells = 0;
        for killed in [false, true] {
            let filter = [format!("{}{KILLED}", if killed { "" } else { "!" })];
            let place = if eager { d.eager() } else { d.place() };
            let before = d.stats()?;
            let ours = run(place, every, &filter)?;
            println!("{} (bare {bare_waits})", ours.stderr.trim());
            let told = || format!("{}\n{}\n{}", ours.stderr, ours.stdout, d.picture());
            ensure!(ours.status.success(), "{}", told());
            let waits = most_waits(&ours.stderr)?;
            ensure!(waits <= bare_waits + WAITS, "{}", told());
            let lines = bare.stdout.lines().filter(|l| l.contains(KILLED) == killed);
            let lines = lines.step_by(every).map(|l| format!("{l}\n"));
            let lines: String = lines.collect();
            let some = lines.lines().count() as u64;
            let lost = matrix.lost(false, some, [&lines, &ours.stdout])?;
            let after = d.stats()?;
            let (resets, deaths) = (after.resets - before.resets, after.deaths - before.deaths);
            // (What a killed peer has left on its ring is lost to who reads TCP alone: docs/limits.md.)
            let most = if killed { most_lost } else { 0 };
            let good = lost <= most && resets <= lost && (deaths > 0 || !killed);
            ensure!(good, "{lost} {resets} {deaths} {}", told());
            cells += some;
        }
        // (Each cell's connection has two ends on lanes; most ways leave beside a peer that does nothing, and need the
        // daemon.)
        let s = d.stats()?;
        ensure!(
            s.promoted >= 2 * cells && s.taken_over > cells / 8,
            "{}",
            d.picture()
        );
    }
    Ok(())
}

#[test]
fn every_way_out_is_as_bare() -> Result<()> {
    // (Of what is more than a ring takes, all is on TCP.)
    every_cell_is_as_bare(|p| p, &[], 7)
}

/// Between two pods of a node. (With an MTU of 1,500 bytes TCP holds less than a ring, and a ring grows.)
#[test]
fn root_between_two_namespaces() -> Result<()> {
    let pods = Pods::new()?;
    let other = format!("/run/netns/{}", pods.b());
    let env = [("OTHER_NS", other), ("ADDRESS", Pods::B.into())];
    every_cell_is_as_bare(|p| p.netns(pods.a()), &env, 8)
}
