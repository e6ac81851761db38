//! The matrix of `departures.c`: each way to leave a lane, beside a peer that sleeps, computes, is stopped, has shut down,
//! closed, exited or was killed, with bytes unread either way. Each line is the one that it prints without the shim.

use anyhow::{ensure, Result};
use underpass_tests::harness::departures::{Matrix, CELLS, LIMIT};
use underpass_tests::harness::{Daemon, Place, Pods, Program};

fn every_cell_is_as_bare(within: impl Fn(Place) -> Place, env: &[(&str, String)]) -> Result<()> {
    let matrix = Matrix::compile()?;
    let run = |place: Place| {
        let p = Program::new(matrix.program(), &within(place));
        let p = env.iter().fold(p, |p, (name, value)| p.env(name, value));
        p.run(LIMIT)
    };
    let bare = run(Place::bare())?;
    let d = Daemon::start()?;
    let ours = run(d.eager())?;
    let told = format!("{}\n{}\n{}", ours.stderr, ours.stdout, d.picture());
    ensure!(bare.status.success() && ours.status.success(), "{told}");
    let lost = matrix.lost(CELLS, [&bare.stdout, &ours.stdout])?;
    let s = d.stats()?;
    // Resets are of those alone. (Each cell's connection has two ends on lanes; most ways leave beside a peer that does
    // nothing, and need the daemon.)
    ensure!(lost <= 26 && s.resets <= lost + 5, "{lost} {told}");
    ensure!(s.promoted >= 2 * CELLS && s.taken_over > 200, "{told}");
    Ok(())
}

#[test]
fn every_way_out_is_as_bare() -> Result<()> {
    every_cell_is_as_bare(|p| p, &[])
}

/// Between two pods of a node. (With an MTU of 1,500 bytes TCP holds less than a ring.)
#[test]
fn between_two_namespaces() -> Result<()> {
    let pods = Pods::new()?;
    let other = format!("/run/netns/{}", pods.b());
    let env = [("OTHER_NS", other), ("ADDRESS", Pods::B.into())];
    every_cell_is_as_bare(|p| p.netns(pods.a()), &env)
}
