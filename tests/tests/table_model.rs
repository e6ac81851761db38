//! Random operations on descriptors of connections: every result and every byte as bare.
//!
//! A failure names the seed: `table_model.py SEED 1 FILE` does the same again, and `SEEDS="SEED 1"` tests it.

use anyhow::{bail, Context, Result};
use std::path::Path;
use std::time::Duration;
use underpass_tests::harness::{Daemon, Place, Program};

const LIMIT: Duration = Duration::from_secs(300);
const SEEDS: &str = "1 80";

fn transcript(seeds: &str, place: &Place, out: &Path) -> Result<Vec<String>> {
    let o = Program::python("table_model.py", place)
        .words(seeds)
        .arg(out)
        .spawn()?
        .wait(LIMIT);
    let text = std::fs::read_to_string(out).unwrap_or_default();
    let tail = || text[text.len().saturating_sub(500)..].to_string();
    let o = o.with_context(tail)?;
    if !o.status.success() {
        bail!("{}\n{}\n{}", o.status, o.stderr, tail());
    }
    Ok(text.lines().map(String::from).collect())
}

/// The first line that differs, with its seed and what was done before.
fn same(mode: &str, bare: &[String], got: &[String]) -> Result<()> {
    let differs = |i: &usize| bare.get(*i) != got.get(*i);
    let Some(at) = (0..bare.len().max(got.len())).find(differs) else {
        return Ok(());
    };
    let seed = bare[..=at.min(bare.len() - 1)]
        .iter()
        .rposition(|l| l.starts_with("seed "))
        .context("no seed")?;
    bail!(
        "{mode}, {}: bare {:?}, here {:?}; before that\n{}",
        bare[seed],
        bare.get(at),
        got.get(at),
        bare[seed.max(at.saturating_sub(30))..at].join("\n")
    );
}

#[test]
fn descriptors_as_bare() -> Result<()> {
    let seeds = std::env::var("SEEDS").unwrap_or_else(|_| SEEDS.into());
    let count: usize = seeds.split(' ').nth(1).context("SEEDS")?.parse()?;
    let dir = tempfile::tempdir()?;
    let out = dir.path().join("out");
    let bare = transcript(&seeds, &Place::bare(), &out)?;
    let d = Daemon::start()?;
    let small = Daemon::with(&["--ring-log2", "12", "--ring-max-log2", "12"])?;
    let modes = [
        ("default", &d, d.place()),
        ("eager", &d, d.eager()),
        ("one page", &small, small.eager()),
    ];
    for (mode, d, place) in modes {
        let before = d.stats()?.promoted;
        let got = transcript(&seeds, &place, &out)?;
        same(mode, &bare, &got)?;
        // Twelve ends with each seed, four of them in two processes; on a busy machine one or the
        // other comes too late.
        let promoted = d.stats()?.promoted - before;
        if (promoted as usize) < 6 * count {
            bail!("{mode}: only {promoted} ends were promoted");
        }
        println!("{mode}: {promoted} ends were promoted");
    }
    Ok(())
}
