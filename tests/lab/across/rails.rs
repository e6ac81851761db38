//! Rails cut, carriers lost, devices removed, all under load.

use super::{new_ones_are_promoted, Load, ON, RATE};
use anyhow::{ensure, Context, Result};
use underpass_admin::Row;
use underpass_tests::harness::until;
use underpass_tests::lab::cluster::Cluster;

use underpass_tests::lab::streams::{Plan, Streams};
use underpass_tests::lab::{Family, Lab, PATIENCE};

/// One after the other is cut and mended: lanes go on over the one that is left.
pub fn a_rail_cut_under_load(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let load = Load::start(lab, &c)?;
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

/// A connection's bytes take the rail whose interface has its address: one of the node's, or a pod's that lies on it,
/// though its address is of another rail's pool. While that rail is cut, they take the other one.
pub fn the_rail_of_the_interface(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    for rail in [1, 2] {
        let mut plan = Plan::endless(4, RATE, c.eager());
        plan.host = Some(lab.node(0).address(rail, Family::V4));
        let s = Streams::start(lab, plan)?;
        await_rail(&c, s.port, rail)?;
        s.await_more(ON)?;
        s.finish()?;
    }
    for n in [0, 1] {
        let node = lab.node(n);
        node.check(format!(
            "ip netns add pod
             ip link add pod0 link eth2 netns pod type macvlan mode bridge
             ip -n pod addr add {}/24 dev pod0
             ip -n pod link set lo up
             ip -n pod link set pod0 up",
            node.pod()
        ))?;
    }
    let mut plan = Plan::endless(4, RATE, c.eager());
    plan.host = Some(lab.node(0).pod());
    plan.within = Some("pod");
    // The connections themselves go over the second rail: it stays.
    let s = Streams::start(lab, plan)?;
    await_rail(&c, s.port, 2)?;
    s.await_more(ON)?;
    for n in [0, 1] {
        lab.node(n).check("rdma link delete rxe2")?;
    }
    await_rail(&c, s.port, 1)?;
    s.await_more(ON)?;
    for n in [0, 1] {
        let add = "rdma link add rxe2 type rxe netdev eth2";
        lab.node(n).check(add)?;
    }
    await_rail(&c, s.port, 2)?;
    s.await_more(ON)?;
    s.finish()?;
    for n in [0, 1] {
        lab.node(n).check("ip netns delete pod")?;
    }
    c.no_resets()
}

/// Waits until both ends of the four connections to this port send over this rail.
fn await_rail(c: &Cluster, port: u16, rail: usize) -> Result<()> {
    let device = format!("rxe{rail}");
    for n in [0, 1] {
        c.await_rows(n, port, &format!("over {device}"), |rows| {
            let over =
                |r: &Row| r.mode == "SMCR" && r.rail.as_ref().is_some_and(|r| r.device == device);
            rows.len() == 4 && rows.iter().all(over)
        })?;
    }
    Ok(())
}

/// No rail is left: everything goes on over TCP, and over RDMA when there are rails again.
pub fn both_rails_cut_under_load(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let load = Load::start(lab, &c)?;
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

/// The one round trip in which a switch up is in doubt: the rails are cut by the very packet that
/// asks for it, or by the one that answers. The end that asked learns from the other daemon which it
/// was, goes on over TCP without it, and over RDMA when there are rails again.
pub fn rails_cut_in_doubt(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    // The clients are on node 1. Kinds and length of messages: see the wire format.
    for (node, message, became) in [(1, 0x812c, "it never came"), (0, 0x822c, "it stands")] {
        let n = lab.node(node);
        // Bytes of the UDP header: 8, of RoCEv2's base transport header: 12, the first of them the
        // operation, 4 for a whole message.
        n.check(format!(
            "nft -f - <<'end'
             table inet lab {{
               set cut {{ type inet_service; size 1; flags dynamic; }}
               chain output {{
                 type filter hook output priority 0;
                 udp dport 4791 @th,64,8 4 @th,160,16 {message:#x} add @cut {{ udp dport }}
                 udp dport @cut drop
               }}
               chain input {{
                 type filter hook input priority 0;
                 udp dport @cut drop
               }}
             }}
end"
        ))?;
        let before = c.daemon(1)?.said().len();
        let s = Streams::start(lab, Plan::endless(8, RATE, c.eager()))?;
        let settled = format!("a switch was in doubt: {became}");
        until(&settled, PATIENCE, || {
            c.daemon(1)
                .is_ok_and(|d| d.said()[before..].contains(&settled))
        })
        .with_context(|| c.picture())?;
        let cut = n.check("nft list set inet lab cut")?;
        ensure!(cut.contains("4791"), "{cut}");
        c.await_tcp(s.port, 8)?;
        s.await_more(ON)?;
        n.check("nft delete table inet lab")?;
        c.await_smcr(s.port, 8)?;
        s.await_more(ON)?;
        s.finish()?;
    }
    c.no_resets()
}
