//! Programs of `tests/programs` that write a line for each of many cases, the same bare and on lanes.

use super::{c, Place, Program};
use anyhow::{anyhow, ensure, Result};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// Far more than any of them takes.
const LIMIT: Duration = Duration::from_secs(200);
/// Milliseconds after which a call counts as one that sleeps on; and if more time is given.
const WAIT_MS: u32 = 30;
const WAIT_AGAIN_MS: u32 = 400;

/// The cases of one process: `PROGRAM FILE WAIT_MS ARGS CASES`.
pub struct Part {
    /// Where they are on lanes.
    pub place: Place,
    pub args: String,
    pub cases: String,
}

/// Lines, by the number of the case that they begin with.
type Lines = BTreeMap<String, String>;

/// Each part says on lanes what it says bare. (What differs is asked again, with more time: it may be the machine's load.)
pub fn same_lines(name: &str, parts: Vec<Part>) -> Result<()> {
    same_in(
        name,
        parts,
        &[WAIT_MS, WAIT_AGAIN_MS, WAIT_AGAIN_MS, WAIT_AGAIN_MS],
    )
}

/// The same, with more time, and nothing is asked again.
pub fn same_lines_at_once(name: &str, parts: Vec<Part>) -> Result<()> {
    same_in(name, parts, &[WAIT_AGAIN_MS])
}

/// `turns`: after how many milliseconds a call counts as one that sleeps on.
fn same_in(name: &str, mut parts: Vec<Part>, turns: &[u32]) -> Result<()> {
    let dir = tempfile::tempdir()?;
    c::compile(name, &dir.path().join(name))?;
    for (turn, ms) in turns.iter().enumerate() {
        let bare = lines(dir.path(), name, &parts, *ms, false)?;
        let lanes = lines(dir.path(), name, &parts, *ms, true)?;
        let differs: Vec<_> = bare
            .iter()
            .filter(|(case, says)| lanes.get(*case) != Some(says))
            .map(|(case, says)| (case, says, lanes.get(case)))
            .collect();
        if differs.is_empty() {
            return Ok(());
        }
        let last = turn + 1 == turns.len();
        ensure!(!last && differs.len() < 100, "{differs:#?}");
        println!("once more: {differs:#?}");
        let share = differs.len().div_ceil(parts.len());
        parts.truncate(differs.len().div_ceil(share));
        for (part, differs) in parts.iter_mut().zip(differs.chunks(share)) {
            let cases: Vec<&str> = differs.iter().map(|d| d.0.as_str()).collect();
            part.cases = cases.join(" ");
        }
    }
    Ok(())
}

/// What all parts say, which run at the same time.
fn lines(dir: &Path, name: &str, parts: &[Part], ms: u32, on_lanes: bool) -> Result<Lines> {
    let run = |k: usize, part: &Part| -> Result<Lines> {
        let out = dir.join(format!("{k}.{on_lanes}"));
        let bare = Place::bare();
        let place = if on_lanes { &part.place } else { &bare };
        let said = Program::new(dir.join(name), place)
            .arg(&out)
            .arg(ms.to_string())
            .words(&part.args)
            .words(&part.cases)
            .run(LIMIT)?
            .ok()?;
        let text = std::fs::read_to_string(&out)?;
        let lines: Lines = text
            .lines()
            .filter_map(|l| l.split_once(' '))
            .map(|(case, says)| (case.into(), says.into()))
            .collect();
        let lanes = if on_lanes { lines.len() } else { 0 };
        ensure!(said.trim_end().ends_with(&format!(" {lanes}")), "{said}");
        Ok(lines)
    };
    std::thread::scope(|s| {
        let parts = parts.iter().enumerate();
        let all: Vec<_> = parts.map(|(k, p)| s.spawn(move || run(k, p))).collect();
        let mut lines = Lines::new();
        for part in all {
            lines.extend(part.join().map_err(|e| anyhow!("{e:?}"))??);
        }
        Ok(lines)
    })
}
