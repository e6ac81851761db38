//! Random calls on connections whose both ends one program holds: every result and every byte as bare.
//!
//! A failure names the seed: `SEEDS="SEED 1"` tests it again, and `calls SEED 1 FILE` (the program that is
//! compiled from `tests/programs/calls.c`) makes the same calls; in the mode down and up, `calls SEED 1 FILE tame`.

use anyhow::{bail, ensure, Context, Result};
use std::path::Path;
use std::time::Duration;
use underpass_tests::harness::c::{self, both_ways};
use underpass_tests::harness::lines::{same_lines, Part};
use underpass_tests::harness::{Daemon, Place, Program};

const LIMIT: Duration = Duration::from_secs(200);
const SEEDS: &str = "1 200";

struct Calls {
    dir: tempfile::TempDir,
    seeds: String,
    count: u64,
}

impl Calls {
    /// What the calls said, and how many connections began on a lane. `more`: further arguments.
    fn made(&self, place: &Place, name: &str, more: &str) -> Result<(Vec<String>, u64)> {
        let out = self.dir.path().join(name);
        let o = Program::new(self.dir.path().join("calls"), place)
            .words(&self.seeds)
            .arg(&out)
            .words(more)
            .run(LIMIT);
        let text = std::fs::read_to_string(&out).unwrap_or_default();
        let tail = || text[text.len().saturating_sub(500)..].to_string();
        let said = o.with_context(tail)?.ok().with_context(tail)?;
        let lanes = said.split(' ').nth(3).context("lanes")?.parse()?;
        Ok((text.lines().map(String::from).collect(), lanes))
    }

    fn promoted(&self, d: &Daemon, name: &str, place: &Place, more: &str) -> Result<Vec<String>> {
        let (lines, lanes) = self.made(place, name, more)?;
        let s = d.stats()?;
        // Three quarters wait for it, but not for ever; the others have it when it comes.
        let promoted = s.promoted >= self.count && s.lane_tx_bytes >= 1000 * self.count;
        ensure!(
            promoted && 2 * lanes >= self.count,
            "{name}: {lanes} on lanes: {s:?}"
        );
        println!(
            "{name}: {lanes} began on lanes, {} ups, {} downs",
            s.ups, s.downs
        );
        Ok(lines)
    }
}

/// The first line that differs, with its seed and what was done before.
fn same(mode: &str, path: &Path, bare: &[String], got: &[String]) -> Result<()> {
    let differs = |i: &usize| bare.get(*i) != got.get(*i);
    let Some(at) = (0..bare.len().max(got.len())).find(differs) else {
        return Ok(());
    };
    let seed = bare[..=at.min(bare.len() - 1)]
        .iter()
        .rposition(|l| l.starts_with("seed "))
        .context("no seed")?;
    bail!(
        "{mode}, {} ({}): bare {:?}, here {:?}; before that\n{}",
        bare[seed],
        path.display(),
        bare.get(at),
        got.get(at),
        bare[seed.max(at.saturating_sub(40))..at].join("\n")
    );
}

#[test]
fn calls_as_bare() -> Result<()> {
    let seeds = std::env::var("SEEDS").unwrap_or_else(|_| SEEDS.into());
    let dir = tempfile::tempdir()?;
    c::compile("calls", &dir.path().join("calls"))?;
    let count = seeds.split(' ').nth(1).context("SEEDS")?.parse()?;
    let all = &Calls { dir, seeds, count };
    let d = &Daemon::start()?;
    let chaos = &Daemon::start()?;
    let small = &Daemon::with(&["--ring-log2", "12", "--ring-max-log2", "12"])?;
    std::thread::scope(|s| {
        let bare = s.spawn(|| all.made(&Place::bare(), "bare", ""));
        let tame = s.spawn(|| all.made(&Place::bare(), "tame", "tame"));
        let down_and_up =
            || chaos.down_and_up(|| all.promoted(chaos, "down and up", &chaos.eager(), "tame"));
        let modes = [
            s.spawn(|| all.promoted(d, "eager", &d.eager(), "")),
            s.spawn(|| all.promoted(small, "one page", &small.eager(), "")),
            s.spawn(down_and_up),
        ];
        let join = |e| anyhow::anyhow!("{e:?}");
        let (bare, tame) = (bare.join().map_err(join)??.0, tame.join().map_err(join)??.0);
        for (mode, name) in modes.into_iter().zip(["eager", "one page", "down and up"]) {
            let got = mode.join().map_err(join)??;
            let bare = if name == "down and up" { &tame } else { &bare };
            same(name, all.dir.path(), bare, &got)?;
        }
        Ok(())
    })
}

/// What happens to a connection while a call sleeps on it ends the call or does not, as bare, with what the kernel
/// would say, and leaves what it would.
#[test]
fn calls_that_sleep() -> Result<()> {
    const PARTS: usize = 8;
    let calls = std::env::var("CALLS").unwrap_or_else(|_| "9".into());
    let d = Daemon::start()?;
    let parts = (0..PARTS).map(|k| Part {
        place: d.eager(),
        args: String::new(),
        cases: format!("{k} {PARTS} {calls}"),
    });
    same_lines("sleepers", parts.collect())?;
    let s = d.stats()?;
    ensure!(s.promoted > 400 && s.lane_tx_bytes > 100_000, "{s:?}");
    Ok(())
}

/// A receive that takes bytes and then fails leaves no gap that a lane would wait for.
#[test]
fn receives_that_take_bytes_and_fail() -> Result<()> {
    both_ways("taken", &["60"], 20, 10_000)
}

/// Flags that mean nothing to TCP, and calls with an offset, take no connection from its lane.
#[test]
fn flags_that_tcp_ignores() -> Result<()> {
    both_ways("ignored", &[], 2, 800)
}

/// An urgent byte that was received is no unread byte: the close behind it makes no reset.
#[test]
fn an_urgent_byte_is_read() -> Result<()> {
    both_ways("urgent", &[], 2, 1000)
}
