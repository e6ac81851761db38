//! The second way by which pods get the shim, for container runtimes without NRI: the chart's webhook, and the daemons as a
//! CSI driver.

use crate::cluster::{Cluster, FIRST};
use crate::things::{counts, Workload};
use crate::{await_mode, counted, deploy, has_shim, remove, still_counts, ENABLED, REDIS_AT, SOON};
use anyhow::{ensure, Result};
use underpass_tests::harness::until;

/// A volume of the driver, as the node's mounts name it.
const VOLUMES: &str = "/volumes/kubernetes.io~csi/";

/// The node's mounts of the driver's volumes.
fn mounts(c: &Cluster) -> Result<usize> {
    let pid = c.node(FIRST.name).machine.pid();
    let all = std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
    Ok(all.lines().filter(|l| l.contains(VOLUMES)).count())
}

/// NRI is switched off, the webhook and the driver on: connections go on, pods get the shim and are on lanes; who says no
/// has nothing; nothing is left of a volume when its pod is gone.
pub fn without_nri(c: &mut Cluster) -> Result<()> {
    let before = counted(c)?;
    let namespace = format!("/proc/{}/ns/mnt", c.node(FIRST.name).machine.pid());
    let values = [
        "paths.nri=",
        "csi.enabled=true",
        "webhook.enabled=true",
        &format!("csi.namespace={namespace}"),
    ];
    c.upgrade(&values)?;
    still_counts(c, &before)?;
    let w = Workload::new("volume", counts(REDIS_AT));
    deploy(c, &w)?;
    ensure!(has_shim(c, "shop", "volume")?, "the webhook gave nothing");
    let path = "jsonpath={.items[0].spec.volumes[*].csi.driver}";
    let driver = c.kubectl(&["get", "pods", "-n", "shop", "-l", "app=volume", "-o", path])?;
    ensure!(driver == "csi.underpass.io", "{driver}");
    await_mode(c, "shop", "volume", "SMCD")?;
    let said = c.exec("shop", "volume", &["/run/underpass/smcss"])?;
    ensure!(said.contains("SMCD"), "{said}");
    let no = Workload::new("no", counts(REDIS_AT)).annotated(ENABLED, "false");
    deploy(c, &no)?;
    ensure!(!has_shim(c, "shop", "no")?, "it said no");
    ensure!(mounts(c)? == 1, "{} mounts", mounts(c)?);
    // The daemon is away, and another one comes: the volume stays as it is.
    let before = counted(c)?;
    c.kill_daemon()?;
    c.rolled_out_daemons()?;
    still_counts(c, &before)?;
    await_mode(c, "shop", "volume", "SMCD")?;
    for w in [&w, &no] {
        remove(c, w)?;
    }
    until("nothing is mounted", SOON, || {
        mounts(c).is_ok_and(|n| n == 0)
    })
}
