//! Rails cut, carriers lost, devices removed, all under load.

use super::{new_ones_are_promoted, Load, ON, RATE};
use anyhow::{ensure, Context, Result};
use underpass_tests::harness::until;
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::streams::{Plan, Streams};
use underpass_tests::lab::{Lab, PATIENCE};

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
