//! The measure itself: `lab-stream` over plain TCP.

use anyhow::{ensure, Result};
use underpass_tests::lab::stream::Last;
use underpass_tests::lab::streams::{Plan, Streams, CLIENT, SERVER};
use underpass_tests::lab::{Family, Lab};

pub fn streams_over_tcp(lab: &mut Lab) -> Result<()> {
    let bare = || [vec![], vec![]];
    // What has an end of its own, and what is stopped; each I/O style once with each family.
    for (family, other) in [(Family::V4, Family::V6), (Family::V6, Family::V4)] {
        let threads = Plan::bytes(8, 500_000, bare()).family(family);
        let threads = Streams::start(lab, threads)?;
        let endless = Plan::endless(8, 80_000, bare()).family(other).epoll();
        let endless = Streams::start(lab, endless)?;
        endless.await_more(150_000)?;
        ensure!(threads.complete()? == 2 * 8 * 500_000);
        ensure!(endless.finish()? >= 2 * 8 * 150_000);
    }
    // An end that is killed: its peer has all that its calls took.
    let plan = Plan::one_way(4, u64::MAX, Last::Shutdown, bare()).rate(200_000);
    let mut dies = Streams::start(lab, plan)?;
    dies.await_more(200_000)?;
    dies.kill(CLIENT)?;
    let report = dies.report(SERVER)?;
    let taken = dies.progress(CLIENT)?;
    super::all_arrived(&report, &taken)?;
    Ok(())
}
