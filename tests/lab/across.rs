//! Connections between nodes under load: the way they go is cut, daemons, programs and nodes die,
//! and every byte is compared. `rails`: devices and wires; `daemons`; `programs`: how programs end;
//! `nodes`: machines and the wire of control; `left`: who has no lanes, and why; `unmodified`:
//! programs that nobody here wrote.
//!
//! The machines are emulated: TCP moves about 30 MB/s between them, RDMA a third of that. A test
//! moves some ten megabytes in all, paced so that the machines can still answer.

pub mod plain;

use anyhow::{ensure, Result};
use underpass_tests::lab::stream::Report;
use underpass_tests::lab::streams::all_or_reset;

/// Bytes per second, connection and direction of loads that last: a few megabytes per second in all.
pub const RATE: u64 = 80_000;

/// Connections of a load; as many again with an event loop.
pub const MANY: u32 = 8;

/// Bytes per connection that show that it goes on.
pub const ON: u64 = 150_000;

/// At every connection either all bytes have come that the other end's calls had taken before it
/// went away, and then the end of file, or it was reset. How many were reset.
pub fn arrived(report: &Report, taken: &[[u64; 2]]) -> Result<usize> {
    ensure!(report.ends.len() == taken.len());
    let mut resets = 0;
    for (end, &[taken, _]) in report.ends.iter().zip(taken) {
        resets += usize::from(!all_or_reset(&end.received, taken)?);
    }
    Ok(resets)
}

/// The same where nothing excuses a reset.
pub fn all_arrived(report: &Report, taken: &[[u64; 2]]) -> Result<()> {
    let resets = arrived(report, taken)?;
    ensure!(resets == 0, "{resets} were reset: {report:?}");
    Ok(())
}
