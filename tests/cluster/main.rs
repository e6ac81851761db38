//! Pods of a real Kubernetes cluster, asked for through its API only (`make cluster`). Needs root. The cluster is started
//! once; one test runs after the other.

mod cluster;
mod keys;

use anyhow::{Context, Result};
use cluster::Cluster;
use libtest_mimic::{Arguments, Failed, Trial};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

type Test = fn(&mut Cluster) -> Result<()>;

const TESTS: [(&str, Test); 1] = [("up", up)];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads = Some(1);
    let cluster = Arc::new(Mutex::new(None));
    let all = TESTS.map(|(name, test)| {
        let cluster = cluster.clone();
        Trial::test(name, move || {
            // (After a test that failed, the next one still has the cluster.)
            let mut cluster = cluster.lock().unwrap_or_else(|e| e.into_inner());
            run(&mut cluster, test).map_err(|e| Failed::from(format!("{e:?}")))
        })
    });
    let done = libtest_mimic::run(&args, all.into());
    drop(cluster.lock().unwrap_or_else(|e| e.into_inner()).take());
    done.exit_code()
}

fn run(cluster: &mut Option<Cluster>, test: Test) -> Result<()> {
    if cluster.is_none() {
        *cluster = Some(Cluster::start()?);
    }
    let cluster = cluster.as_mut().context("the cluster")?;
    test(cluster).with_context(|| cluster.picture())
}

fn up(c: &mut Cluster) -> Result<()> {
    println!("{}", c.kubectl(&["get", "nodes,pods", "-A", "-o", "wide"])?);
    Ok(())
}
