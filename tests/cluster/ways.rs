//! What the chart leaves out unless it is told: the second way by which pods get the shim, for container runtimes without NRI
//! (the webhook, and the daemons as a CSI driver); and the device plugin.

use crate::cluster::{Cluster, FIRST};
use crate::flow;
use crate::kinds::PLAIN;
use crate::node::{kubernetes, COMMAND};
use crate::things::{counts, Workload};
use crate::{await_mode, counted, deploy, has_shim, remove, still_counts, ENABLED, REDIS_AT, SOON};
use anyhow::{ensure, Context, Result};
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
    c.kill_daemon(FIRST.name)?;
    c.rolled_out_daemons()?;
    still_counts(c, &before)?;
    await_mode(c, "shop", "volume", "SMCD")?;
    for w in [&w, &no] {
        remove(c, w)?;
    }
    until("nothing is mounted", SOON, || {
        mounts(c).is_ok_and(|n| n == 0)
    })?;
    // From here on all pods of the shop have it in this way, and the tests that come are those of the other one.
    c.by_volume = true;
    for namespace in ["shop", "machines"] {
        c.kubectl(&["-n", namespace, "rollout", "restart", "deployment"])?;
    }
    for w in ["redis", "load"] {
        c.rolled_out("shop", w)?;
    }
    flow::restarted(c)?;
    let by = |w: &str| -> Result<String> {
        let label = format!("app={w}");
        c.kubectl(&["get", "pods", "-n", "shop", "-l", &label, "-o", path])
    };
    ensure!(by("redis")?.contains("csi.underpass.io") && by("load")?.contains("csi.underpass.io"));
    Ok(())
}

/// Who makes a pod that asks in vain is told so by whoever makes it: there is no event, since no runtime asks.
pub fn who_asks_in_vain_is_warned(c: &mut Cluster) -> Result<()> {
    const TAKEN: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: taken, namespace: machines, annotations: {underpass.io/enabled: "true"}}
spec:
  volumes: [{name: own, emptyDir: {}}]
  containers:
    - name: main
      image: underpass.test/programs:1
      command: [sleep, "1000"]
      volumeMounts: [{name: own, mountPath: /run/underpass}]
"#;
    let kubectl = c.node(FIRST.name).machine.program(kubernetes("kubectl"));
    let kubectl = kubectl.words("apply -f -").stdin(TAKEN.as_bytes());
    let said = c.as_admin(kubectl).run(COMMAND)?;
    ensure!(
        said.status.success()
            && said.stderr.contains("Warning:")
            && said.stderr.contains("mounted at /run/underpass"),
        "{said:?}"
    );
    let path = "jsonpath={.spec.volumes[*].csi.driver}{.spec.containers[*].env}";
    let has = c.kubectl(&["get", "pod", "taken", "-n", "machines", "-o", path])?;
    ensure!(has.is_empty(), "{has}");
    c.kubectl(&["delete", "pod", "taken", "-n", "machines", "--now"])
        .map(drop)
}

/// Namespaces that the chart names: pods of one get the shim without asking, those of another not although they ask.
pub fn namespaces_of_the_chart(c: &mut Cluster) -> Result<()> {
    let before = counted(c)?;
    c.upgrade(&[
        "namespaces.include={plain}",
        "namespaces.exclude={kube-system,machines}",
    ])?;
    still_counts(c, &before)?;
    let included = Workload::new("included", counts(REDIS_AT)).within(PLAIN);
    deploy(c, &included)?;
    await_mode(c, PLAIN, "included", "SMCD")?;
    let mut excluded = Workload::new("excluded", "exec sleep 1000000").annotated(ENABLED, "true");
    excluded.namespace = "machines";
    deploy(c, &excluded)?;
    ensure!(!has_shim(c, "machines", "excluded")?, "it is excluded");
    let said = c.underpass(&["pods", "-n", "machines"])?;
    ensure!(said.contains("its namespace is excluded"), "{said}");
    for w in [&included, &excluded] {
        remove(c, w)?;
    }
    c.upgrade(&["namespaces.exclude={kube-system}"])?;
    still_counts(c, &before)
}

/// A pod that asks for a resource.
const ASKS: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: asks, namespace: machines}
spec:
  containers:
    - name: main
      image: underpass.test/programs:1
      command: [sleep, "1000"]
      resources: {limits: {rdma/hca: 1}}
"#;

/// Can a process among the daemon container's open this device of the node? A cgroup decides that.
fn opens(c: &Cluster, device: &str) -> Result<bool> {
    let node = c.node(FIRST.name);
    let pid = node.pid_of(&c.daemon_container(FIRST.name)?)?;
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    // Of version 1, a hierarchy of its own; of version 2, the only one.
    let of = |mark: &str| groups.lines().find_map(|l| Some(l.split_once(mark)?.1));
    let group = match of(":devices:") {
        Some(group) => format!("devices{group}"),
        None => of("0::").context("a cgroup")?.to_owned(),
    };
    let script = format!(
        "echo $$ >/sys/fs/cgroup/{group}/cgroup.procs || exit 2; (exec 3<{device}) && exit 0; exit 1"
    );
    let shell = node.machine.program("sh").args(["-c", &script]);
    let output = shell.run(SOON)?;
    match output.status.code() {
        Some(0) => Ok(true),
        Some(1) => Ok(false),
        _ => anyhow::bail!("{output:?}"),
    }
}

/// The chart's device plugin: the daemon's container may open the node's devices, which it may not without; a node without a
/// rail that works has none of what pods ask for, also after the kubelet's next start.
pub fn devices(c: &mut Cluster) -> Result<()> {
    const DEVICE: &str = "/dev/infiniband/uverbs0";
    // The kernel's log: containers may not open it.
    let make = format!(
        "mkdir -p /dev/infiniband && mount -t tmpfs none /dev/infiniband && mknod {DEVICE} c 1 11"
    );
    node_shell(c, &make)?;
    ensure!(!opens(c, DEVICE)?, "without a plugin");
    let before = counted(c)?;
    c.upgrade(&[
        "devicePlugin.enabled=true",
        "devicePlugin.rails={underpass.io/rail,rdma/hca}",
    ])?;
    still_counts(c, &before)?;
    ensure!(opens(c, DEVICE)?, "with the plugin");
    offered(c)?;
    c.apply(ASKS)?;
    until("the pod waits for a rail", SOON, || {
        let said = c.kubectl(&["describe", "pod", "asks", "-n", "machines"]);
        said.is_ok_and(|s| s.contains("Insufficient rdma/hca"))
    })?;
    // The kubelet forgets the plugin with its next start. A new pod is given the device by the plugin, or does not run.
    c.stop_kubelet(0);
    c.start_kubelet(0)?;
    let daemon = [
        "-n",
        "underpass-system",
        "-l",
        "app.kubernetes.io/component=node",
    ];
    c.kubectl(&[&["delete", "pod", "--wait"][..], &daemon].concat())?;
    c.rolled_out_daemons()?;
    ensure!(opens(c, DEVICE)?, "after the kubelet's next start");
    offered(c)?;
    c.kubectl(&["delete", "pod", "asks", "-n", "machines", "--now"])?;
    node_shell(c, "umount /dev/infiniband && rmdir /dev/infiniband")?;
    still_counts(c, &before)
}

fn node_shell(c: &Cluster, script: &str) -> Result<String> {
    let shell = c.node(FIRST.name).machine.program("sh");
    shell.args(["-c", script]).check(COMMAND)
}

/// Until the node has what the plugin offers where no rail works.
fn offered(c: &Cluster) -> Result<()> {
    until("the node has the plugin's resources", SOON, || {
        let path = "jsonpath={.status.allocatable}";
        let said = c.kubectl(&["get", "node", FIRST.name, "-o", path]);
        let all: serde_json::Value =
            serde_json::from_str(&said.unwrap_or_default()).unwrap_or_default();
        all["underpass.io/devices"] == "1"
            && all["underpass.io/rail"] == "0"
            && all["rdma/hca"] == "0"
    })
}
