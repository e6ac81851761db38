//! A cluster that has the previous version is upgraded under load, and goes back (`make previous`).

use crate::cluster::{Cluster, FIRST};
use crate::things::{counts, Workload};
use crate::{await_mode, counted, deploy, prepare, remove, still_counts, REDIS_AT, SOON, SYSTEM};
use anyhow::{ensure, Context, Result};
use serde_json::Value;
use underpass_tests::harness::paths::Build;

/// What both images are called, and what the previous one is called here.
const IMAGE: &str = "docker.io/library/underpass:0.1.0";
const OLD: &str = "docker.io/library/underpass:previous";

/// Connections of the previous version's pods go on, on lanes, under daemons of either version; so do those between pods of
/// both.
pub fn upgraded() -> Result<()> {
    let mut c = Cluster::start()?;
    let done = upgraded_in(&mut c);
    done.map_err(|e| e.context(c.picture()))
}

fn upgraded_in(c: &mut Cluster) -> Result<()> {
    let node = c.node(FIRST.name);
    node.ctr(&["images", "rm", IMAGE])?;
    node.import(&[Build::Previous.image()])?;
    node.ctr(&["images", "tag", IMAGE, OLD])?;
    node.ctr(&["images", "rm", IMAGE])?;
    node.import(&[Build::This.image()])?;
    prepare(c, |c| {
        c.install_of(Build::Previous, &["image.tag=previous"], SOON)
    })?;
    await_mode(c, "shop", "load", "SMCD")?;
    ensure!(image(c)? == OLD, "it is not the previous version");
    let old = shim(c, "load")?;

    // A daemon of the previous version that starts after the upgrade, on a node whose turn has not come.
    let before = counted(c)?;
    let later = "updateStrategy.type=OnDelete,updateStrategy.rollingUpdate=null";
    c.helm_upgrade(Build::This, &["image.tag=", later])?;
    c.kill_daemon(FIRST.name)?;
    await_mode(c, "shop", "load", "SMCD")?;
    ensure!(image(c)? == OLD, "its turn has come");
    still_counts(c, &before)?;

    let before = counted(c)?;
    c.upgrade(&["image.tag="])?;
    ensure!(image(c)? == IMAGE, "it is not this version");
    still_counts(c, &before)?;
    await_mode(c, "shop", "load", "SMCD")?;
    let now = shim(c, "load")?;
    ensure!(now.loaded == old.loaded, "it was started again: {now:?}");
    // (The two may have the same shim.)
    let [a, b] = [Build::This, Build::Previous].map(|b| std::fs::read(b.shim()));
    let differ = a? != b?;
    ensure!((now.hash != old.hash) == differ, "the shim is not replaced");
    // The server has the old shim, the client the new one.
    let newer = Workload::new("newer", counts(REDIS_AT));
    deploy(c, &newer)?;
    await_mode(c, "shop", "newer", "SMCD")?;
    let new = shim(c, "newer")?;
    ensure!(
        (new.loaded != old.loaded) == differ && new.hash == now.hash,
        "{new:?}"
    );
    // The daemon that comes next finds both.
    let before = counted(c)?;
    c.kill_daemon(FIRST.name)?;
    c.rolled_out_daemons()?;
    still_counts(c, &before)?;
    await_mode(c, "shop", "newer", "SMCD")?;

    // And back.
    let before = counted(c)?;
    c.helm(&["rollback", "underpass", "1", "-n", SYSTEM, "--wait"])?;
    c.rolled_out_daemons()?;
    ensure!(image(c)? == OLD, "it did not go back");
    still_counts(c, &before)?;
    for w in ["load", "newer"] {
        await_mode(c, "shop", w, "SMCD")?;
    }
    let older = Workload::new("older", counts(REDIS_AT));
    deploy(c, &older)?;
    await_mode(c, "shop", "older", "SMCD")?;
    let last = shim(c, "older")?;
    ensure!(last.hash == old.hash, "a new pod has the newer shim");
    for w in [&newer, &older] {
        remove(c, w)?;
    }
    Ok(())
}

/// The image of the daemon that runs.
fn image(c: &Cluster) -> Result<String> {
    let id = c.daemon_container(FIRST.name)?;
    let said = c.node(FIRST.name).ctr(&["containers", "info", &id])?;
    let info: Value = serde_json::from_str(&said)?;
    Ok(info["Image"].as_str().context("an image")?.to_owned())
}

/// The shim of a workload.
#[derive(Debug, PartialEq)]
struct Shim {
    /// Inode of what the main process has loaded.
    loaded: u64,
    /// Hash of what a program would load now.
    hash: String,
}

fn shim(c: &Cluster, workload: &str) -> Result<Shim> {
    let maps = c.exec("shop", workload, &["cat", "/proc/1/maps"])?;
    let line = maps.lines().find(|l| l.contains("/libunderpass.so"));
    let inode = line.and_then(|l| l.split_whitespace().nth(4));
    let hash = "sha256sum ${LD_PRELOAD##*[ :]}";
    let said = c.exec("shop", workload, &["sh", "-c", hash])?;
    Ok(Shim {
        loaded: inode.context("no shim is loaded")?.parse()?,
        hash: said.split_whitespace().next().unwrap_or_default().into(),
    })
}
