//! Two nodes with RDMA: virtual machines with containerd and a kubelet in each, and the control plane on this machine
//! (`make cluster ARGS=lab`). The chart is all that is installed: its device plugin gives the daemons their devices, its signer
//! their certificates, and they find each other through the API.

use crate::cluster::Cluster;
use crate::keys::DIR;
use crate::node::{self, kubernetes, Place};
use crate::things::{self, are_on, counts, rows_of, Workload, REDIS};
use anyhow::{ensure, Context, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;
use underpass_tests::harness::containerd::Version;
use underpass_tests::harness::{paths, until};
use underpass_tests::lab::{quoted, Guest, Lab, Running, Spec};

/// Everything is emulated.
const SLOW: Duration = Duration::from_secs(300);
/// As long as a test may need a program.
const LIFE: Duration = Duration::from_secs(3600);
const BYTES: u32 = 1 << 20;
/// The API server as pods know it, and where it is. (There is no kube-proxy: a node's rules are made by the test.)
const API: &str = "10.96.0.1";
const SERVER: &str = "10.250.0.1:6443";
/// Services of pods of the first node, as the second one knows them: of one without the annotation, and of one with it.
const SERVICES: [&str; 2] = ["10.96.0.20", "10.96.0.21"];

/// The machines, as the lab names them and their addresses on its first wire.
pub const NODES: [Place; 2] = [
    Place {
        name: "lab1",
        address: "10.9.0.1",
        pods: "10.244.11.0/24",
        pods6: None,
        cgroup: "kubepods",
    },
    Place {
        name: "lab2",
        address: "10.9.0.2",
        pods: "10.244.12.0/24",
        pods6: None,
        cgroup: "kubepods",
    },
];

/// A node of the cluster.
struct Member {
    at: Place,
    guest: Guest,
    _programs: Vec<Running>,
}

impl Member {
    fn tool(&self, args: &str) -> Result<String> {
        let tool = quoted(&paths::bin("underpass").to_string_lossy());
        self.guest.sh(format!("{tool} {args}")).check()
    }

    /// Rows of the connections of a workload's pod.
    fn rows(&self, workload: &str) -> Result<Vec<Value>> {
        rows_of(&self.tool("ss -ej")?, workload)
    }

    /// Are all connections of the pod, one at least, in this mode?
    fn is_on(&self, workload: &str, mode: &str) -> bool {
        are_on(&self.rows(workload).unwrap_or_default(), mode)
    }

    /// Runs a script where the workload's connected program runs.
    fn exec(&self, workload: &str, script: &str) -> Result<String> {
        let rows = self.rows(workload)?;
        let pid = rows.first().and_then(|r| r["pid"].as_u64());
        let pid = pid.context("no connected program")?;
        let enter = format!("nsenter --target {pid} --mount --net --root --wd");
        let line = format!("{enter} /bin/sh -c {}", quoted(script));
        self.guest.sh(line).limit(SLOW).check()
    }
}

fn ctr() -> String {
    let ctr = Version::One.bin().join("ctr");
    format!("{} -n k8s.io", quoted(&ctr.to_string_lossy()))
}

/// What a node's machine gets, in a directory that it sees.
fn write(dir: &Path, at: Place, control: &Cluster) -> Result<()> {
    let put = |path: &str, text: &str| -> Result<()> {
        let to = dir.join(path.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().context("a path")?)?;
        Ok(std::fs::write(to, text)?)
    };
    let keys = control.node("node1").machine.path(DIR);
    for f in ["ca.crt", "admin.crt", "admin.key", "admin.conf"] {
        put(
            &format!("{DIR}/{f}"),
            &std::fs::read_to_string(keys.join(f))?,
        )?;
    }
    for ext in ["crt", "key", "conf"] {
        let f = format!("{}.{ext}", at.name);
        put(
            &format!("{DIR}/{f}"),
            &std::fs::read_to_string(keys.join(&f))?,
        )?;
    }
    for (path, text) in node::files(&at) {
        put(path, &text)?;
    }
    Ok(())
}

/// Starts what a node runs, until the API says that it is ready.
fn join(lab: &Lab, n: usize, dir: &Path, images: &[PathBuf], outside: usize) -> Result<Member> {
    let (at, other) = (NODES[n], NODES[1 - n]);
    let guest = lab.node(n).guest()?;
    let script = format!(
        "ip link set eth{outside} up
         ip addr add 10.0.2.15/24 dev eth{outside}
         ip route add 10.250.0.0/24 via 10.0.2.2
         ip route add {} via {}
         ip route add default via 10.0.2.2
         echo 1 >/proc/sys/net/ipv4/ip_forward
         nft -f - <<'end'
           table ip services {{
             chain output {{ type nat hook output priority -100; ip daddr {API} tcp dport 443 dnat to {SERVER}; }}
             chain prerouting {{ type nat hook prerouting priority -100; ip daddr {API} tcp dport 443 dnat to {SERVER}; }}
             chain postrouting {{ type nat hook postrouting priority 100; oifname eth{outside} masquerade; }}
           }}
end
         for c in cpuset cpu io memory pids; do echo +$c >/sys/fs/cgroup/cgroup.subtree_control || true; done
         mkdir -p /etc/kubernetes /opt/nri/plugins /etc/nri/conf.d
         cp -r {}/. /",
        other.pods,
        other.address,
        quoted(&dir.to_string_lossy()),
    );
    guest.sh(script).check()?;
    let mut programs = Vec::new();
    let mut start = |line: String| -> Result<()> {
        let path = format!("export PATH={}; exec {line}", Version::One.path());
        programs.push(guest.sh(path).limit(LIFE).spawn()?);
        Ok(())
    };
    let containerd = Version::One.bin().join("containerd");
    start(format!(
        "{} --config /etc/containerd/config.toml",
        containerd.display()
    ))?;
    let ctr = ctr();
    let asks = || guest.sh(format!("{ctr} version")).check().is_ok();
    until("containerd is ready", SLOW, asks)?;
    for i in images {
        let import = format!("{ctr} images import {}", quoted(&i.to_string_lossy()));
        guest.sh(import).limit(SLOW).check()?;
    }
    start(format!(
        "{} {}",
        kubernetes("kubelet").display(),
        node::kubelet_options(&at)
    ))?;
    Ok(Member {
        at,
        guest,
        _programs: programs,
    })
}

/// Two annotated pods on two nodes are on RDMA at both ends, with every byte; a rail is cut, then both.
pub fn pods_of_two_nodes(agent: &str) -> Result<()> {
    let control = Cluster::control_plane()?;
    control.apply(things::POLICIES)?;
    control.kubectl(&["create", "namespace", "shop"])?;
    let spec = Spec {
        memory_mib: 3072,
        outside: Some(control.node("node1").machine.pid()),
        ..Spec::pair(agent)
    };
    let outside = spec.rails + 1;
    let mut lab = Lab::boot(spec)?;
    let done = with(&control, &mut lab, outside);
    done.map_err(|e| e.context(control.picture()).context(lab.evidence()))
}

/// What the pod `load` stores at the server is what it reads back.
fn bytes_come_back(client: &Member, at: &str) -> Result<()> {
    let line = format!(
        "head -c {BYTES} /dev/urandom >/tmp/a && redis-cli -h {at} -x set k </tmp/a && \
         redis-cli -h {at} --raw get k | head -c {BYTES} >/tmp/b && sha256sum </tmp/a && sha256sum </tmp/b"
    );
    let said = client.exec("load", &line)?;
    let lines: Vec<&str> = said.lines().collect();
    ensure!(lines.len() == 3 && lines[1] == lines[2], "{said}");
    Ok(())
}

/// A pod asks one of the other node that has no annotation, at its address and at a service's: both connections stay on TCP and
/// say why. Through another service it asks one that has the annotation: that connection is on RDMA.
fn asks_others(control: &Cluster, [there, here]: [&Member; 2], redis: &str) -> Result<()> {
    let mut plain = Workload::new("plain", REDIS);
    plain.node = Some(there.at.name);
    control.apply(&plain.text())?;
    control.rolled_out_within("shop", "plain", SLOW)?;
    let plain = control.address_of("shop", "plain")?;
    for (service, pod) in SERVICES.into_iter().zip([&*plain, redis]) {
        let rule = format!("ip daddr {service} tcp dport 6379 dnat to {pod}");
        let add = format!("nft add rule ip services prerouting {rule}");
        here.guest.sh(add).check()?;
    }
    let [a, b, c] = [&*plain, SERVICES[0], SERVICES[1]]
        .map(|at| format!("redis-cli -h {at} -r 10000000 -i 0.05 incr {at} >/dev/null"));
    let mut asks = Workload::new("asks", format!("{a} & {b} & exec {c}"))
        .annotated("underpass.io/enabled", "true");
    asks.node = Some(here.at.name);
    control.apply(&asks.text())?;
    control.rolled_out_within("shop", "asks", SLOW)?;
    let to = |at: &str| -> Vec<Value> {
        let mut rows = here.rows("asks").unwrap_or_default();
        let peer = format!("{at}:6379");
        rows.retain(|r| r["peer"] == peer.as_str());
        rows
    };
    let is_told = |at: &str| {
        let rows = to(at);
        let told = |r: &Value| {
            r["reason"]["name"] == "waiting" && r["peer_reason"]["name"] == "peer-no-shim"
        };
        are_on(&rows, "TCP") && rows.iter().all(told)
    };
    let right = || is_told(&plain) && is_told(SERVICES[0]) && are_on(&to(SERVICES[1]), "SMCR");
    until("they are on TCP, with the reason, and on RDMA", SLOW, right)
        .with_context(|| format!("{:#?}", here.rows("asks")))
}

fn with(control: &Cluster, lab: &mut Lab, outside: usize) -> Result<()> {
    let dirs = tempfile::Builder::new().prefix("upnodes-").tempdir()?;
    for at in NODES {
        write(&dirs.path().join(at.name), at, control)?;
    }
    let members: Result<Vec<Member>> = (0..2)
        .map(|n| {
            join(
                lab,
                n,
                &dirs.path().join(NODES[n].name),
                control.images(),
                outside,
            )
        })
        .collect();
    let members = members?;
    for m in &members {
        control.await_ready(m.at.name, SLOW)?;
    }
    control.install_with(&["devicePlugin.enabled=true"], SLOW)?;
    let up = || {
        let peers = members.iter().map(|m| m.tool("peers").unwrap_or_default());
        peers.into_iter().all(|p| p.contains(" up "))
    };
    until("the daemons have a channel", SLOW, up)?;
    let [remote, local] = ["lab1", "lab2"];
    let rails = || {
        let path = "jsonpath={.status.allocatable.underpass\\.io/rail}";
        let has = |n| control.kubectl(&["get", "node", n, "-o", path]);
        [remote, local]
            .iter()
            .all(|n| has(n).is_ok_and(|said| said == "1k"))
    };
    until("both nodes have rails", SLOW, rails)?;
    let mut redis = Workload::new("redis", REDIS).annotated("underpass.io/enabled", "true");
    redis.node = Some(remote);
    redis.resource = Some("underpass.io/rail");
    control.apply(&redis.text())?;
    control.rolled_out_within("shop", "redis", SLOW)?;
    let at = control.address_of("shop", "redis")?;
    let mut load = Workload::new("load", counts(&at)).annotated("underpass.io/enabled", "true");
    load.node = Some(local);
    control.apply(&load.text())?;
    control.rolled_out_within("shop", "load", SLOW)?;
    let on = |mode: &str| members[0].is_on("redis", mode) && members[1].is_on("load", mode);
    let picture = || {
        let logs = "tail -n 30 /var/log/pods/underpass-system_*/*/*.log";
        let said = |m: &Member| {
            let all = [m.tool("ss -e"), m.tool("devices"), m.guest.sh(logs).check()];
            all.map(Result::unwrap_or_default).join("\n")
        };
        members.iter().map(said).collect::<Vec<_>>().join("\n")
    };
    until("both ends are on RDMA", SLOW, || on("SMCR")).with_context(picture)?;
    bytes_come_back(&members[1], &at)?;
    asks_others(control, [&members[0], &members[1]], &at).with_context(picture)?;
    // The client stops if a number is not the next one: it counts on through all of this.
    let counts_on = || -> Result<()> {
        let counted = || -> u64 {
            let said = members[1].exec("load", "cat /tmp/counted");
            said.ok().and_then(|s| s.trim().parse().ok()).unwrap_or(0)
        };
        let before = counted();
        until("the client counts on", SLOW, || counted() > before + 20)
    };
    counts_on()?;
    lab.rail(1).cut()?;
    counts_on()?;
    until("both ends are on the other rail", SLOW, || on("SMCR")).with_context(picture)?;
    lab.rail(2).cut()?;
    until("both ends are on TCP", SLOW, || on("TCP")).with_context(picture)?;
    counts_on()?;
    lab.rail(1).mend()?;
    lab.rail(2).mend()?;
    until("both ends are back on RDMA", SLOW, || on("SMCR")).with_context(picture)?;
    counts_on()
}
