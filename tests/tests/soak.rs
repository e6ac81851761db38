//! Seeded chaos: see `underpass_tests::soak`. A minute in CI, ten in `make soak`.

use anyhow::{ensure, Result};
use std::time::Duration;
use underpass_tests::soak;

/// A number from the environment.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn soak() -> Result<()> {
    let seconds = number("UNDERPASS_SOAK_SECONDS").unwrap_or(60);
    let seed = number("UNDERPASS_SOAK_SEED").unwrap_or(1);
    let tally = soak::run(
        env!("CARGO_BIN_EXE_lab-stream").as_ref(),
        seed,
        Duration::from_secs(seconds),
    )?;
    println!("seed {seed}, {seconds} s\n{tally}");
    // What did not happen was not tested.
    ensure!(tally.daemons_killed >= seconds / 4, "{tally}");
    ensure!(
        tally.promoted > 0 && tally.ups > 0 && tally.downs > 0,
        "{tally}"
    );
    ensure!(
        tally.lane_bytes > 1 << 20 && tally.bytes > 1 << 20,
        "{tally}"
    );
    let d = &tally.disturbed;
    ensure!(d.spawns > 0 && d.systems > 0 && d.forks > 0, "{tally}");
    ensure!(d.handler_closes > 0 && d.inherited > 0, "{tally}");
    ensure!(tally.killed > 0, "{tally}");
    // The limit of lanes was reached, and it held.
    ensure!(tally.refused > 0 && tally.lanes > 0, "{tally}");
    Ok(())
}
