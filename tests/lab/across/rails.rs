//! Rails cut, carriers lost, devices removed, all under load.

use super::{new_ones_are_promoted, Load};
use anyhow::Result;
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::streams::{Plan, Streams};
use underpass_tests::lab::Lab;

/// One after the other is cut and mended: lanes go on over the one that is left.
pub fn a_rail_cut_under_load(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let load = Load::start(lab, &c)?;
    load.await_smcr(&c)?;
    for rail in [1, 2] {
        c.await_traffic(lab, rail)?;
    }
    for (rail, other) in [(1, 2), (2, 1)] {
        lab.rail(rail).cut()?;
        load.goes_on()?;
        load.await_smcr(&c)?;
        c.await_traffic(lab, other)?;
        lab.rail(rail).mend()?;
        // It is used again: the next turn of the loop has no other.
        c.await_traffic(lab, rail)?;
        load.await_smcr(&c)?;
    }
    load.finish()?;
    c.no_resets()
}

/// No rail is left: everything goes on over TCP, and over RDMA when there are rails again.
pub fn both_rails_cut_under_load(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let load = Load::start(lab, &c)?;
    load.await_smcr(&c)?;
    load.goes_on()?;
    lab.rail(1).cut()?;
    lab.rail(2).cut()?;
    load.await_tcp(&c)?;
    load.goes_on()?;
    // Who begins now begins and ends on TCP.
    Streams::start(lab, Plan::bytes(4, 300_000, c.eager()))?.complete()?;
    lab.rail(1).mend()?;
    lab.rail(2).mend()?;
    load.await_smcr(&c)?;
    load.goes_on()?;
    load.finish()?;
    c.no_resets()
}

/// A NIC without a carrier: its machine is told, the other one is not.
pub fn a_carrier_lost_under_load(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let load = Load::start(lab, &c)?;
    load.await_smcr(&c)?;
    lab.set_carrier(1, 2, false)?;
    load.goes_on()?;
    load.await_smcr(&c)?;
    c.await_traffic(lab, 1)?;
    lab.set_carrier(1, 2, true)?;
    c.await_traffic(lab, 2)?;
    load.finish()?;
    c.no_resets()
}

/// A device is removed and added again.
pub fn a_device_removed_under_load(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let load = Load::start(lab, &c)?;
    load.await_smcr(&c)?;
    let node = lab.node(0);
    node.check("rdma link delete rxe1")?;
    load.goes_on()?;
    load.await_smcr(&c)?;
    c.await_traffic(lab, 2)?;
    node.check("rdma link add rxe1 type rxe netdev eth1")?;
    c.await_traffic(lab, 1)?;
    load.await_smcr(&c)?;
    new_ones_are_promoted(lab, &c)?;
    load.finish()?;
    c.no_resets()
}
