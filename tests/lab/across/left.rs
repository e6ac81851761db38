//! Who stays on TCP between nodes, and what both ends say about it.

use super::{new_ones_are_promoted, ON, RATE};
use anyhow::{ensure, Result};
use lane::proto::reason::Reason;
use underpass_admin::Row;
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::streams::{Env, Plan, Streams};
use underpass_tests::lab::Lab;

const EACH: u32 = 4;

fn start(lab: &Lab, env: [Env; 2]) -> Result<Streams> {
    let s = Streams::start(lab, Plan::endless(EACH, RATE, env))?;
    s.await_more(ON)?;
    Ok(s)
}

/// All ends on a node are on TCP, and `f` likes their reason and their peers'.
fn says(c: &Cluster, n: usize, s: &Streams, f: impl Fn(u32, u32) -> bool) -> Result<()> {
    c.await_rows(n, s.port, "on TCP, with the reason", |rows| {
        let good = |r: &Row| r.mode.starts_with("TCP 0x") && f(r.reason, r.peer_reason);
        rows.len() == EACH as usize && rows.iter().all(good)
    })
}

pub fn who_stays_on_tcp(lab: &mut Lab) -> Result<()> {
    let mut c = Cluster::start(lab)?;
    let [at_server, at_client] = c.eager();

    // The client, or the server, runs without the shim: the other end waits for it.
    let waits = |here, _| here == Reason::Waiting.code() || here == Reason::PeerNoShim.code();
    let s = start(lab, [at_server.clone(), vec![]])?;
    says(&c, 0, &s, waits)?;
    s.finish()?;
    let s = start(lab, [vec![], at_client.clone()])?;
    says(&c, 1, &s, waits)?;
    s.finish()?;

    // No daemon on the client's node. As soon as there is one, they are promoted.
    c.kill_daemon(1);
    c.await_channel(0, 1, "down")?;
    let s = start(lab, [at_server.clone(), at_client.clone()])?;
    says(&c, 0, &s, |here, _| here == Reason::PeerDaemon.code())?;
    c.start_daemon(lab, 1)?;
    c.await_smcr(s.port, EACH as usize)?;
    s.finish()?;

    // No device on the client's node.
    let devices = |change: &str| -> Result<()> {
        for rail in 1..=lab.rails() {
            lab.node(1).check(change.replace('N', &rail.to_string()))?;
        }
        Ok(())
    };
    devices("rdma link delete rxeN")?;
    let s = start(lab, [at_server, at_client])?;
    let none = Reason::NoDevice.code();
    says(&c, 1, &s, |here, _| here == none)?;
    says(&c, 0, &s, |here, there| here == none || there == none)?;
    s.finish()?;
    devices("rdma link add rxeN type rxe netdev ethN")?;
    new_ones_are_promoted(lab, &c)?;
    for n in [0, 1] {
        ensure!(c.daemon(n)?.stats()?.resets == 0, "{}", c.picture());
    }
    Ok(())
}
