//! A node that is gone, and nodes that cannot talk to each other's daemons.

use super::{new_ones_are_promoted, Load, ON, RATE};
use anyhow::Result;
use lane::proto::reason::Reason;
use underpass_admin::Row;
use underpass_tests::lab::cluster::{Cluster, PORT};
use underpass_tests::lab::streams::{Plan, Streams, SERVER};
use underpass_tests::lab::Lab;

/// The plug of a node is pulled under load: TCP's own time-outs apply to its peers, nothing else of
/// the surviving node suffers, and nothing of the dead one stays with it.
pub fn a_node_gone_under_load(lab: &mut Lab) -> Result<()> {
    let mut c = Cluster::start(lab)?;
    c.expect_resets(); // (of connections with the node that is gone)
    new_ones_are_promoted(lab, &c)?;
    let before = c.idle(lab, 0)?;
    let mut load = Load::start(lab, &c)?;
    load.goes_on()?;
    lab.kill(1);
    c.kill_daemon(1);
    c.await_channel(0, 1, "down")?;
    // Others on this node are promoted as ever.
    let same_node = [c.eager()[0].clone(), c.eager()[0].clone()];
    let mut plan = Plan::endless(4, RATE, same_node);
    plan.nodes = [0, 0];
    let s = Streams::start(lab, plan)?;
    c.daemon(0)?.await_ss("eight ends in memory", |rows| {
        let up = |r: &&Row| r.mode == "SMCD" && r.up == "both";
        rows.iter().filter(up).count() == 8
    })?;
    s.await_more(ON)?;
    s.finish()?;
    // Of the dead node's connections nobody says that they have ended: they wait, as they do in TCP,
    // or have failed.
    load.no_clean_end(SERVER)?;
    drop(load);
    c.await_no_more(lab, 0, &before)?;

    lab.start(&[1])?;
    c.install(lab, 1)?;
    c.start_daemon(lab, 1)?;
    c.await_channels()?;
    new_ones_are_promoted(lab, &c)
}

/// Only the daemons cannot talk to each other: lanes that are there go on, new connections stay on
/// TCP and say why, and are promoted when the daemons have found each other again.
pub fn control_partitioned_under_load(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let load = Load::start(lab, &c)?;
    lab.node(0).check(format!(
        "nft add table inet lab
         for hook in input output; do
           nft \"add chain inet lab $hook {{ type filter hook $hook priority 0; }}\"
           nft add rule inet lab $hook tcp dport {PORT} drop
           nft add rule inet lab $hook tcp sport {PORT} drop
         done"
    ))?;
    c.await_channel(0, 1, "down")?;
    c.await_channel(1, 0, "down")?;
    load.goes_on()?;
    load.await_smcr(&c)?;
    for rail in [1, 2] {
        c.await_traffic(lab, rail)?;
    }
    let new = Streams::start(lab, Plan::endless(4, RATE, c.eager()))?;
    new.await_more(ON)?;
    for n in [0, 1] {
        c.await_rows(n, new.port, "on TCP, with the reason", |rows| {
            let why = Reason::PeerDaemon.code();
            rows.len() == 4
                && rows
                    .iter()
                    .all(|r| r.mode.starts_with("TCP 0x") && r.reason == why)
        })?;
    }
    lab.node(0).check("nft delete table inet lab")?;
    c.await_channels()?;
    c.await_smcr(new.port, 4)?;
    load.await_smcr(&c)?;
    load.goes_on()?;
    new.finish()?;
    load.finish()?;
    c.no_resets()
}
