//! Rails whose devices speak iWARP.

use super::Load;
use anyhow::{ensure, Result};
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::{Lab, Soft};

fn devices(lab: &mut Lab, rail: usize, kind: Soft) -> Result<()> {
    (0..2).try_for_each(|n| lab.set_devices(n, rail, &[kind]))
}

/// Both rails are iWARP: they are used, one is cut, then both, and they are used again.
pub fn over_iwarp(lab: &mut Lab) -> Result<()> {
    devices(lab, 1, Soft::Siw)?;
    devices(lab, 2, Soft::Siw)?;
    let c = Cluster::start(lab)?;
    let load = Load::start(lab, &c)?;
    for rail in [1, 2] {
        c.await_traffic(lab, rail)?;
    }
    let shown = c.daemon(0)?.tool("devices")?;
    ensure!(shown.matches("iWARP").count() == 2, "{shown}");
    lab.rail(1).cut()?;
    load.goes_on()?;
    load.await_smcr(&c)?;
    lab.rail(2).cut()?;
    load.await_tcp(&c)?;
    load.goes_on()?;
    lab.rail(1).mend()?;
    lab.rail(2).mend()?;
    load.await_smcr(&c)?;
    for rail in [1, 2] {
        c.await_traffic(lab, rail)?;
    }
    load.finish()?;
    c.no_resets()
}

/// One rail of each kind: lanes move from one to the other.
pub fn iwarp_beside_roce(lab: &mut Lab) -> Result<()> {
    devices(lab, 1, Soft::Siw)?;
    let c = Cluster::start(lab)?;
    let load = Load::start(lab, &c)?;
    for (rail, other) in [(1, 2), (2, 1)] {
        c.await_traffic(lab, rail)?;
        lab.rail(rail).cut()?;
        load.goes_on()?;
        load.await_smcr(&c)?;
        c.await_traffic(lab, other)?;
        lab.rail(rail).mend()?;
    }
    load.await_smcr(&c)?;
    load.finish()?;
    c.no_resets()
}
