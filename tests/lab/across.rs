//! Connections between nodes under load: the way they go is cut, daemons, programs and nodes die,
//! and every byte is compared.
//!
//! The machines are emulated: TCP moves about 30 MB/s between them, RDMA a third of that. A test
//! moves some ten megabytes in all, paced so that the machines can still answer.

pub mod captured;
pub mod closes;
pub mod daemons;
pub mod departures;
pub mod inherited;
pub mod iwarp;
pub mod left;
pub mod measure;
pub mod nodes;
pub mod plain;
pub mod previous;
pub mod programs;
pub mod rails;
pub mod unmodified;

use anyhow::{ensure, Result};
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::stream::{End, Outcome, Report};
use underpass_tests::lab::streams::{all_or_reset, Plan, Streams};
use underpass_tests::lab::{Family, Lab};

/// Bytes per second, connection and direction: a megabyte or two per second for all.
const RATE: u64 = 50_000;

/// Connections per style.
const EACH: u32 = 8;

/// Bytes per connection and direction that show that it goes on: more than was on the way.
const ON: u64 = 80_000;

/// Many connections that are busy in both directions until they are told to end, half of them in
/// threads over IPv4, half in an event loop over IPv6.
pub struct Load {
    all: [Streams; 2],
}

impl Load {
    /// All of it runs over RDMA when this returns.
    pub fn start(lab: &Lab, c: &Cluster) -> Result<Self> {
        let plan = || Plan::endless(EACH, RATE, c.eager());
        let load = Load {
            all: [
                Streams::start(lab, plan())?,
                Streams::start(lab, plan().epoll().family(Family::V6))?,
            ],
        };
        load.await_smcr(c)?;
        Ok(load)
    }

    /// Waits until all of it runs over RDMA.
    pub fn await_smcr(&self, c: &Cluster) -> Result<()> {
        let mut all = self.all.iter();
        all.try_for_each(|s| c.await_smcr(s.port, EACH as usize))
    }

    /// Waits until all of it runs over TCP.
    pub fn await_tcp(&self, c: &Cluster) -> Result<()> {
        let mut all = self.all.iter();
        all.try_for_each(|s| c.await_tcp(s.port, EACH as usize))
    }

    /// Waits until bytes have arrived on each connection in each direction.
    pub fn goes_on(&self) -> Result<()> {
        let marks = self.all.each_ref().map(Streams::mark);
        let mut all = self.all.iter().zip(&marks);
        all.try_for_each(|(s, mark)| s.await_beyond(mark, ON))
    }

    /// No connection has come to an end of file at this end.
    pub fn no_clean_end(&mut self, end: usize) -> Result<()> {
        for s in &mut self.all {
            if s.running(end).has_ended() {
                let report = s.report(end)?;
                let failed = |e: &End| matches!(e.received.outcome, Outcome::Error(..));
                ensure!(report.ends.iter().all(failed), "{report:?}");
            }
        }
        Ok(())
    }

    /// Ends it; every byte must have arrived.
    pub fn finish(self) -> Result<()> {
        let [a, b] = self.all;
        ensure!(a.finish()? > 0 && b.finish()? > 0);
        Ok(())
    }
}

/// New connections run over RDMA, and well.
pub fn new_ones_are_promoted(lab: &Lab, c: &Cluster) -> Result<()> {
    let s = Streams::start(lab, Plan::endless(4, RATE, c.eager()))?;
    c.await_smcr(s.port, 4)?;
    s.await_more(ON)?;
    s.finish()?;
    Ok(())
}

/// At every connection either all bytes have come that the other end's calls had taken before it
/// went away, and then the end of file, or it was reset. How many were reset.
pub fn arrived(report: &Report, taken: &[[u64; 2]]) -> Result<usize> {
    ensure!(report.ends.len() == taken.len());
    let mut resets = 0;
    for (end, &[taken, _]) in report.ends.iter().zip(taken) {
        resets += usize::from(!all_or_reset(end, taken)?);
    }
    Ok(resets)
}

/// The same where nothing excuses a reset.
pub fn all_arrived(report: &Report, taken: &[[u64; 2]]) -> Result<()> {
    let resets = arrived(report, taken)?;
    ensure!(resets == 0, "{resets} were reset: {report:?}");
    Ok(())
}
