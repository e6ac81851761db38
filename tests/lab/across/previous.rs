//! Two nodes of which one has the previous build, in every way: under load, byte by byte (`make previous`).

use super::{EACH, ON, RATE};
use anyhow::Result;
use underpass_tests::harness::paths::Build::{self, Previous, This};
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::streams::{Plan, Streams};
use underpass_tests::lab::Lab;

/// Whose daemons the nodes have, one after the other; at each step one is replaced.
const STEPS: [[Build; 2]; 5] = [
    [Previous, Previous],
    [This, Previous],
    [This, This],
    [Previous, This],
    [Previous, Previous],
];

/// Connections of both builds' programs; a daemon is replaced by the other build's at each step. Each time all of them are on
/// RDMA again, and so are new ones.
pub fn builds_on_two_nodes(lab: &mut Lab) -> Result<()> {
    let mut c = Cluster::prepare(lab)?;
    let mut loads: Vec<Streams> = Vec::new();
    let mut now = [None, None];
    for step in STEPS {
        for n in [0, 1] {
            if now[n].replace(step[n]) != Some(step[n]) {
                c.replace_daemon(lab, n, step[n])?;
            }
        }
        c.await_channels()?;
        c.await_links()?;
        for shims in [[This, Previous], [Previous, This]] {
            // (Old ones stay for all later steps; a few each, since everything is emulated.)
            let plan = Plan::endless(EACH / 4, RATE, c.eager_of(shims));
            loads.push(Streams::start(lab, plan)?);
        }
        for s in &loads {
            c.await_smcr(s.port, EACH as usize / 4)?;
            s.await_beyond(&s.mark(), ON)?;
        }
    }
    for s in loads {
        s.finish()?;
    }
    c.no_resets()
}
