//! Daemons killed under load, of one node, of the other, of both; and what daemons hold when
//! nothing is left to do.

use super::{new_ones_are_promoted, Load};
use anyhow::{ensure, Result};
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::streams::{Plan, Streams, CLIENT, SERVER};
use underpass_tests::lab::Lab;

/// Whatever dies, the load goes on; and with daemons again, all runs over RDMA again.
pub fn daemons_killed_under_load(lab: &mut Lab) -> Result<()> {
    let mut c = Cluster::start(lab)?;
    let load = Load::start(lab, &c)?;
    for dead in [&[0][..], &[1], &[0, 1]] {
        load.await_smcr(&c)?;
        for &n in dead {
            c.kill_daemon(n);
        }
        load.goes_on()?;
        for &n in dead {
            c.start_daemon(lab, n)?;
        }
        c.await_channels()?;
        new_ones_are_promoted(lab, &c)?;
    }
    load.await_smcr(&c)?;
    load.finish()
}

/// The daemons die just before the last bytes are sent and the connections end.
pub fn daemons_killed_before_the_end(lab: &mut Lab) -> Result<()> {
    const ALL: u64 = 600_000;
    const LAST: u64 = 40_000;
    let mut c = Cluster::start(lab)?;
    for dead in [&[0][..], &[1], &[0, 1]] {
        let gate = format!("/run/gate{dead:?}");
        let plan = Plan::bytes(8, ALL, c.eager()).gate(LAST, &gate);
        let s = Streams::start(lab, plan)?;
        s.await_sent(CLIENT, ALL - LAST)?;
        s.await_received(SERVER, ALL - LAST)?;
        c.await_smcr(s.port, 8)?;
        for &n in dead {
            c.kill_daemon(n);
        }
        lab.node(1).guest()?.touch(&gate)?;
        ensure!(s.complete()? == 2 * 8 * ALL);
        for &n in dead {
            c.start_daemon(lab, n)?;
        }
        c.await_channels()?;
    }
    Ok(())
}

/// Connections and processes come and go; what the daemons hold afterwards is what they held before.
pub fn nothing_is_left_over(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    // Links between nodes and what daemons load once may stay.
    new_ones_are_promoted(lab, &c)?;
    let before = [c.idle(lab, 0)?, c.idle(lab, 1)?];
    for round in 0..3 {
        let load = Load::start(lab, &c)?;
        load.await_smcr(&c)?;
        if round == 1 {
            // Killed, both of them.
            drop(load);
        } else {
            load.finish()?;
        }
    }
    for (n, held) in before.iter().enumerate() {
        c.await_no_more(lab, n, held)?;
    }
    Ok(())
}
