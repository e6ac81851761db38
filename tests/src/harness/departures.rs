//! `departures.c`, and what its lines may say.

use super::c;
use anyhow::{ensure, Context, Result};
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

/// Number of its cells.
pub const CELLS: u64 = 1956;

/// Far more than it takes on one machine.
pub const LIMIT: Duration = Duration::from_secs(300);

/// Most waits of one leaving call beside a daemon that works, and of the first use after it; without the shim they are up to 3.
/// (15 were seen, on two processors with other work. They grow from 1 ms to 32: a call that waits for the peer's program
/// until its two seconds are over makes 70.)
pub const WAITS: u64 = 32;

/// The most waits that a run tells of.
pub fn most_waits(stderr: &str) -> Result<u64> {
    let n = stderr.split_once("most waits ").map(|(_, n)| n);
    let n = n.and_then(|n| n.split_once(" (")).context("no waits")?.0;
    Ok(n.parse()?)
}

pub struct Matrix(TempDir);

impl Matrix {
    pub fn compile() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        c::compile("departures", &dir.path().join("departures"))?;
        Ok(Matrix(dir))
    }

    pub fn program(&self) -> PathBuf {
        self.0.path().join("departures")
    }

    /// What it printed bare and on lanes, of one node or `across` two, is the same, but for the cells of which the number is
    /// returned.
    pub fn lost(&self, across: bool, cells: u64, said: [&str; 2]) -> Result<u64> {
        let [bare, ours] = said.map(|s| s.lines().collect::<Vec<_>>());
        let told = || said.join("\n\n");
        let all = [bare.len(), ours.len()] == [usize::try_from(cells)?; 2];
        ensure!(all, "{} {}\n{}", bare.len(), ours.len(), told());
        let mut lost = 0;
        for (bare, ours) in bare.into_iter().zip(ours) {
            if bare != ours {
                ensure!(
                    is_lost(across, ours),
                    "bare {bare}\nours {ours}\n{}",
                    told()
                );
                lost += 1;
            }
        }
        Ok(lost)
    }
}

/// Ways after which somebody reads TCP alone. (After the others this end's shim reads its ring to the end.)
pub const GOES_AWAY: [&str; 13] = [
    "dup2",
    "system",
    "popen",
    "spawn",
    "vfork",
    "fork-exec",
    "fork-exec-kept",
    "fork-exec-bare",
    "fork-exec-bare-kept",
    "exec",
    "exec-bare",
    "rights",
    "fdopen",
];

/// Across nodes: other ways that are reset where a frame lies behind unread bytes of TCP.
const FRAMED: [&str; 4] = ["splice", "lowat", "dprintf", "async"];

/// The two cases in which the application sees something else: the peer was killed with bytes on its ring, and the
/// connection goes to where only TCP is read; or, across nodes, it has ended its stream, or itself, with bytes on its ring and
/// before those unread ones on TCP. It is told by an error, never by a short stream that ends cleanly.
fn is_lost(across: bool, line: &str) -> bool {
    let of: Vec<_> = line.split('/').collect();
    let ["", way, peer, unread, _, says] = of[..] else {
        return false;
    };
    let alone = GOES_AWAY.contains(&way);
    let may = match (peer, unread) {
        ("killed", _) => alone && unread != "unread-0",
        ("exited", "unread-mixed") => across && alone,
        ("half" | "both" | "closed", "unread-mixed") => across && (alone || FRAMED.contains(&way)),
        _ => false,
    };
    may && says.contains("READ ") && says.contains("ECONNRESET")
}
