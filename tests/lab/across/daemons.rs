//! Daemons killed under load, of one node, of the other, of both; and what daemons hold when
//! nothing is left to do.

use super::{new_ones_are_promoted, Load};
use anyhow::Result;
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::Lab;

/// Whatever dies, the load goes on; and with daemons again, all runs over RDMA again.
pub fn daemons_killed_under_load(lab: &mut Lab) -> Result<()> {
    killed_under_load(lab, &[&[0], &[1]])
}

pub fn both_daemons_killed_under_load(lab: &mut Lab) -> Result<()> {
    killed_under_load(lab, &[&[0, 1]])
}

/// The daemons of these nodes, once after the other.
fn killed_under_load(lab: &mut Lab, all: &[&[usize]]) -> Result<()> {
    let mut c = Cluster::start(lab)?;
    let load = Load::start(lab, &c)?;
    for &dead in all {
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

/// The daemons die, and at once the last bytes are sent and the connections end.
pub fn daemons_killed_before_the_end(lab: &mut Lab) -> Result<()> {
    let mut c = Cluster::start(lab)?;
    for dead in [&[0][..], &[1], &[0, 1]] {
        let load = Load::start(lab, &c)?;
        for &n in dead {
            c.kill_daemon(n);
        }
        load.finish()?;
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
    c.expect_resets(); // (where programs are killed)
                       // Links between nodes and what daemons load once may stay.
    new_ones_are_promoted(lab, &c)?;
    let before = [c.idle(lab, 0)?, c.idle(lab, 1)?];
    for round in 0..3 {
        let load = Load::start(lab, &c)?;
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
