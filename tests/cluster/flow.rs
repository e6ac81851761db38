//! A stream between two pods, of which every byte is compared, while the cluster's parts are killed, restarted and replaced
//! (`tests/programs/flow.py`). The pods are in a namespace that the tests leave alone, on the first node.

use crate::cluster::{Cluster, FIRST};
use crate::kinds;
use crate::things::{are_on, rows_of, service, Workload};
use crate::{deploy, remove, SOON};
use anyhow::{ensure, Context, Result};
use underpass_tests::harness::until;

const NAMESPACE: &str = "machines";
const AT: &str = "10.96.7.12";
const PORT: u16 = 7002;
/// Blocks of 64 KiB that have to come back before it counts as going on.
const SOME: u64 = 64;

fn workloads() -> [Workload; 2] {
    let python = |name, line: String| {
        let line = format!("exec python3.11 -B /srv/flow.py {line}");
        let mut w = Workload::new(name, line).of(crate::images::PYTHON);
        w.namespace = NAMESPACE;
        w.node = Some(FIRST.name);
        w.annotated(crate::ENABLED, "true")
    };
    [
        python("sink", format!("serve {PORT}")),
        python("flow", format!("ask {AT} {PORT}")),
    ]
}

/// How far it is.
pub struct Flow {
    blocks: u64,
    /// How often either pod's container was started again.
    restarts: u32,
}

/// Starts it, on a lane.
pub fn start(c: &mut Cluster) -> Result<()> {
    kinds::prepared(c)?;
    c.apply(&service(NAMESPACE, "sink", AT, PORT))?;
    workloads().iter().try_for_each(|w| deploy(c, w))?;
    c.flows = true;
    is_on_a_lane(c)
}

/// Its pods were made anew.
pub fn restarted(c: &Cluster) -> Result<()> {
    if !c.flows {
        return Ok(());
    }
    for w in workloads() {
        c.rolled_out(NAMESPACE, w.name)?;
    }
    is_on_a_lane(c)
}

pub fn stop(c: &mut Cluster) -> Result<()> {
    if !std::mem::take(&mut c.flows) {
        return Ok(());
    }
    // (The client first: it must not find an end.)
    let [sink, flow] = workloads();
    remove(c, &flow).and_then(|()| remove(c, &sink))
}

fn is_on_a_lane(c: &Cluster) -> Result<()> {
    let on = || -> Result<bool> {
        let said = c.underpass(&["--node", FIRST.name, "ss", "-n", NAMESPACE, "-ej"])?;
        let on = |w: &Workload| rows_of(&said, w.name).is_ok_and(|r| are_on(&r, "SMCD"));
        Ok(workloads().iter().all(on))
    };
    until("the stream is on a lane", SOON, || on().unwrap_or(false))
}

/// `None`: it was not started.
pub fn count(c: &Cluster) -> Result<Option<Flow>> {
    if !c.flows {
        return Ok(None);
    }
    let mut blocks = None;
    until("the stream has begun", SOON, || {
        blocks = blocks_of(c).ok();
        blocks.is_some()
    })?;
    Ok(Some(Flow {
        blocks: blocks.context("a number")?,
        restarts: restarts(c)?,
    }))
}

fn blocks_of(c: &Cluster) -> Result<u64> {
    let said = c.exec(NAMESPACE, "flow", &["cat", "/tmp/flowed"])?;
    Ok(said.trim().parse()?)
}

fn restarts(c: &Cluster) -> Result<u32> {
    let of = |w: &Workload| c.restarts(NAMESPACE, w.name);
    workloads().iter().try_fold(0, |all, w| Ok(all + of(w)?))
}

/// Every block since then came back as it was sent, in the same connection, which is on its lane.
pub fn goes_on(c: &Cluster, before: Option<&Flow>) -> Result<()> {
    let Some(before) = before else { return Ok(()) };
    until("the stream goes on", SOON, || {
        blocks_of(c).is_ok_and(|n| n > before.blocks + SOME)
    })?;
    // (Who began anew would have ended before, or have counted from 0.)
    let now = restarts(c)?;
    ensure!(now == before.restarts, "the stream has ended: {now} starts");
    is_on_a_lane(c)
}
