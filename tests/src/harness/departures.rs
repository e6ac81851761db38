//! `departures.c`, and what its lines may say.

use super::c;
use anyhow::{ensure, Result};
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

/// Number of its cells.
pub const CELLS: u64 = 1785;

/// Far more than it takes on one machine.
pub const LIMIT: Duration = Duration::from_secs(300);

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

    /// What it printed bare and on lanes is the same, but for the cells of which the number is returned.
    pub fn lost(&self, cells: u64, said: [&str; 2]) -> Result<u64> {
        let [bare, ours] = said.map(|s| s.lines().collect::<Vec<_>>());
        let told = || said.join("\n\n");
        let all = [bare.len(), ours.len()] == [usize::try_from(cells)?; 2];
        ensure!(all, "{} {}\n{}", bare.len(), ours.len(), told());
        let mut lost = 0;
        for (bare, ours) in bare.into_iter().zip(ours) {
            if bare != ours {
                ensure!(is_lost(ours), "bare {bare}\nours {ours}\n{}", told());
                lost += 1;
            }
        }
        Ok(lost)
    }
}

/// The one case in which the application sees something else: the peer was killed with bytes on its ring, and the
/// connection goes to where only TCP is read. It is told by an error, never by a short stream that ends cleanly.
fn is_lost(line: &str) -> bool {
    let unread = line.contains("/killed/unread-") && !line.contains("/unread-0/");
    unread && line.contains("READ ") && line.contains("ECONNRESET")
}
