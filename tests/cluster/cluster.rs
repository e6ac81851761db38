//! A Kubernetes cluster of one node, or two: etcd and Kubernetes 1.20 as Debian 12 has them, containerd, and images of this system's
//! programs, on machines whose files and networks are their own.

use crate::keys::{self, Holder, DIR};
use crate::lab;
use crate::node::{kubernetes, Node, Place, COMMAND, READY};
use anyhow::{ensure, Context, Result};
use std::path::PathBuf;
use std::time::Duration;
use underpass_tests::harness::containerd::{self, PAUSE};
use underpass_tests::harness::paths::Build;
use underpass_tests::harness::program::Program;
use underpass_tests::harness::{paths, until};

const SERVER: &str = "https://10.250.0.1:6443";
/// The node that there is from the beginning, with the control plane on it, and one that may come.
pub const FIRST: Place = Place {
    name: "node1",
    address: "10.250.0.1",
    pods: "10.244.1.0/24",
    pods6: Some("fd00:244:1::/64"),
    cgroup: "kubepods",
};
pub const SECOND: Place = Place {
    name: "node2",
    address: "10.250.0.2",
    pods: "10.244.2.0/24",
    pods6: Some("fd00:244:2::/64"),
    cgroup: "underpass-node2",
};
/// The chart's namespace, as options.
const SYSTEM: [&str; 2] = ["-n", "underpass-system"];
/// Services get their addresses from this range.
const SERVICES: &str = "10.96.0.0/16";
/// Image of the pods.
pub const IMAGE: &str = "underpass.test/programs:1";

/// Programs that tests run in pods of any kind.
pub const SHELL: [&str; 7] = [
    "/bin/sh",
    "/bin/sleep",
    "/bin/cat",
    "/bin/ls",
    "/usr/bin/env",
    "/usr/bin/sha256sum",
    "/usr/bin/head",
];
const REDIS: [&str; 3] = [
    "/usr/bin/redis-server",
    "/usr/bin/redis-cli",
    "/usr/bin/redis-benchmark",
];

pub struct Cluster {
    /// The control plane runs on the first.
    nodes: Vec<Node>,
    /// What all nodes import.
    images: Vec<PathBuf>,
    pub work: tempfile::TempDir,
    /// The stream was started (`flow`).
    pub flows: bool,
    /// Pods get the shim by a volume, not by NRI.
    pub by_volume: bool,
}

impl Cluster {
    /// With its first node.
    pub fn start() -> Result<Cluster> {
        let mut c = Cluster::control_plane()?;
        c.join(0)?;
        Ok(c)
    }

    /// Without nodes.
    pub fn control_plane() -> Result<Cluster> {
        let first = Node::new(FIRST)?;
        write_files(&first)?;
        let mut c = Cluster {
            nodes: vec![first],
            images: Vec::new(),
            work: tempfile::Builder::new().prefix("upcluster-").tempdir()?,
            flows: false,
            by_volume: false,
        };
        c.make_images()?;
        c.start_etcd()?;
        c.start_server()?;
        c.start_others()?;
        Ok(c)
    }

    /// What nodes import.
    pub fn images(&self) -> &[PathBuf] {
        &self.images
    }

    /// Makes the pods' images.
    fn make_images(&mut self) -> Result<()> {
        let root = self.work.path().join("root");
        containerd::fill(&root, &[&SHELL[..], &REDIS].concat())?;
        for (n, name) in [IMAGE, PAUSE].iter().enumerate() {
            let tar = self.work.path().join(format!("image{n}.tar"));
            containerd::image(&root, name, &["/bin/sleep", "1000000"], &tar)?;
            self.images.push(tar);
        }
        self.images.push(Build::This.image());
        Ok(())
    }

    /// Starts what a node runs, until the API says that it is ready.
    fn join(&mut self, node: usize) -> Result<()> {
        let images = self.images.clone();
        let n = &mut self.nodes[node];
        n.start_containerd()?;
        n.import(&images)?;
        n.start_proxy()?;
        self.start_kubelet(node)
    }

    /// A second node.
    pub fn add_node(&mut self) -> Result<()> {
        let node = Node::new(SECOND)?;
        let first = &self.nodes[0];
        first.machine.connect(&node.machine)?;
        for (a, b) in [(first, &node), (&node, first)] {
            let route = a.machine.program("ip");
            let route = route.args(["route", "add", b.at.pods, "via", b.at.address]);
            route.check(COMMAND)?;
        }
        keys::copy(&first.machine, &node.machine, SECOND.name)?;
        node.write_files()?;
        self.nodes.push(node);
        self.join(1)
    }

    /// The node of this name.
    pub fn node(&self, name: &str) -> &Node {
        let of = |n: &&Node| n.at.name == name;
        self.nodes.iter().find(of).unwrap_or(&self.nodes[0])
    }

    pub fn kill(&mut self, name: &str) {
        self.nodes[0].kill(name);
    }

    pub fn start_containerd(&mut self) -> Result<()> {
        self.nodes[0].start_containerd()
    }

    fn start_etcd(&mut self) -> Result<()> {
        let etcd = paths::target().join("etcd/usr/bin/etcd");
        let etcd = self.nodes[0].machine.program(etcd).words(
            "--data-dir /var/lib/etcd --unsafe-no-fsync --listen-client-urls http://127.0.0.1:2379 \
             --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380 \
             --initial-advertise-peer-urls http://127.0.0.1:2380 \
             --initial-cluster default=http://127.0.0.1:2380",
        );
        self.nodes[0].run("etcd", etcd)
    }

    pub fn start_server(&mut self) -> Result<()> {
        self.start_server_with("")
    }

    /// With more options.
    pub fn start_server_with(&mut self, more: &str) -> Result<()> {
        let server = self.nodes[0].machine.program(kubernetes("kube-apiserver"));
        let server = server.words(&format!(
            "--etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --secure-port=6443 \
             --advertise-address={} --kubelet-preferred-address-types=InternalIP \
             --tls-cert-file={DIR}/apiserver.crt --tls-private-key-file={DIR}/apiserver.key \
             --client-ca-file={DIR}/ca.crt --service-cluster-ip-range={SERVICES} \
             --service-account-key-file={DIR}/tokens.pub \
             --service-account-signing-key-file={DIR}/tokens.key \
             --service-account-issuer=https://kubernetes.default.svc \
             --authorization-mode=Node,RBAC --allow-privileged=true --feature-gates=IPv6DualStack=true \
             --enable-admission-plugins=NodeRestriction,PodSecurityPolicy \
             --kubelet-client-certificate={DIR}/admin.crt --kubelet-client-key={DIR}/admin.key {more}",
            FIRST.address
        ));
        self.nodes[0].run("api server", server)?;
        let ready = || {
            let said = self.kubectl(&["get", "--raw", "/readyz"]);
            said.is_ok_and(|s| s == "ok")
        };
        until("the API server is ready", READY, ready).with_context(|| self.picture())
    }

    fn start_others(&mut self) -> Result<()> {
        let admin = format!("--kubeconfig={DIR}/admin.conf");
        let manager = self.nodes[0]
            .machine
            .program(kubernetes("kube-controller-manager"));
        let manager = manager.words(&format!(
            "{admin} --service-account-private-key-file={DIR}/tokens.key --root-ca-file={DIR}/ca.crt \
             --use-service-account-credentials=true --cluster-signing-cert-file={DIR}/ca.crt \
             --cluster-signing-key-file={DIR}/ca.key --bind-address=127.0.0.1 --port=0 \
             --leader-elect=false --allocate-node-cidrs=false"
        ));
        self.nodes[0].run("controller manager", manager)?;
        let scheduler = self.nodes[0].machine.program(kubernetes("kube-scheduler"));
        let line = format!("{admin} --leader-elect=false --bind-address=127.0.0.1 --port=0");
        self.nodes[0].run("scheduler", scheduler.words(&line))
    }

    pub fn start_kubelet(&mut self, node: usize) -> Result<()> {
        self.nodes[node].start_kubelet()?;
        let name = self.nodes[node].at.name;
        self.await_ready(name, READY)
    }

    /// Until a node says that it is ready.
    pub fn await_ready(&self, node: &str, limit: Duration) -> Result<()> {
        let ready = || {
            let path = "{.status.conditions[?(@.type==\"Ready\")].status}";
            let said = self.kubectl(&["get", "node", node, "-o", &format!("jsonpath={path}")]);
            said.is_ok_and(|s| s == "True")
        };
        until("the node is ready", limit, ready).with_context(|| self.picture())
    }

    /// Runs kubectl, which must succeed. What it wrote.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.kubectl_within(args, COMMAND)
    }

    fn kubectl_within(&self, args: &[&str], limit: Duration) -> Result<String> {
        let kubectl = self.nodes[0]
            .machine
            .program(kubernetes("kubectl"))
            .args(args);
        self.as_admin(kubectl).check(limit)
    }

    /// The environment of whoever administers the cluster.
    pub fn as_admin(&self, program: Program) -> Program {
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{path}", kubernetes("").display());
        let program = program.env("KUBECONFIG", format!("{DIR}/admin.conf"));
        program.env("PATH", path).env("HOME", "/run")
    }

    /// Makes what a text describes.
    pub fn apply(&self, text: &str) -> Result<()> {
        let kubectl = self.nodes[0].machine.program(kubernetes("kubectl"));
        let kubectl = kubectl.args(["apply", "-f", "-"]).stdin(text.as_bytes());
        self.as_admin(kubectl).check(COMMAND)?;
        Ok(())
    }

    /// Installs the chart with its image, as README says.
    pub fn install(&self) -> Result<()> {
        self.install_with(&[], COMMAND)
    }

    /// The same with some values.
    pub fn install_with(&self, values: &[&str], limit: Duration) -> Result<()> {
        self.install_of(Build::This, values, limit)
    }

    /// The same of a build's chart.
    pub fn install_of(&self, build: Build, values: &[&str], limit: Duration) -> Result<()> {
        let (chart, values) = (build.chart(), values.join(","));
        let chart = chart.to_string_lossy();
        let words = ["install", "underpass", &chart, "--create-namespace"];
        self.helm(&[&words[..], &["--set", &values], &SYSTEM].concat())?;
        self.rolled_out_daemons_within(limit)
    }

    /// Gives the chart other values.
    pub fn upgrade(&self, values: &[&str]) -> Result<()> {
        self.helm_upgrade(Build::This, &[values, &["--wait"]].concat())?;
        self.rolled_out_daemons()
    }

    /// The same of a build's chart, without waiting for anything; options may come after the values.
    pub fn helm_upgrade(&self, build: Build, values: &[&str]) -> Result<()> {
        let chart = build.chart();
        let chart = chart.to_string_lossy();
        let (options, values): (Vec<&str>, Vec<&str>) =
            values.iter().partition(|v| v.starts_with("--"));
        let values = values.join(",");
        let words = ["upgrade", "underpass", &chart, "--set", &values];
        self.helm(&[&words[..], &options, &SYSTEM].concat())?;
        Ok(())
    }

    /// Until there is a daemon on each node, which says that it is ready.
    pub fn rolled_out_daemons(&self) -> Result<()> {
        self.rolled_out_daemons_within(COMMAND)
    }

    fn rolled_out_daemons_within(&self, limit: Duration) -> Result<()> {
        let of = ["daemonset/underpass", "-n", "underpass-system"];
        let timeout = format!("--timeout={}s", limit.as_secs());
        let wait = [&["rollout", "status"][..], &of, &[&timeout]];
        self.kubectl_within(&wait.concat(), limit)?;
        Ok(())
    }

    /// The address of the workload's pod.
    pub fn address_of(&self, namespace: &str, workload: &str) -> Result<String> {
        let pod = self.pod(namespace, workload)?;
        let path = "jsonpath={.status.podIP}";
        self.kubectl(&["get", "pod", &pod, "-n", namespace, "-o", path])
    }

    pub fn stop_kubelet(&mut self, node: usize) {
        self.nodes[node].kill("kubelet");
    }

    pub fn helm(&self, args: &[&str]) -> Result<String> {
        let helm = paths::target().join("helm/helm/helm");
        self.as_admin(self.nodes[0].machine.program(helm).args(args))
            .check(COMMAND)
    }

    /// `kubectl underpass`.
    pub fn underpass(&self, args: &[&str]) -> Result<String> {
        let plugin = paths::root().join("deploy/kubectl-underpass");
        self.as_admin(self.nodes[0].machine.program(plugin).args(args))
            .check(COMMAND)
    }

    /// Until the workload's newest pod is the only one, and runs.
    pub fn rolled_out(&self, namespace: &str, workload: &str) -> Result<()> {
        self.rolled_out_within(namespace, workload, COMMAND)
    }

    pub fn rolled_out_within(
        &self,
        namespace: &str,
        workload: &str,
        limit: Duration,
    ) -> Result<()> {
        let (of, limit_s) = (format!("deployment/{workload}"), limit.as_secs());
        let timeout = format!("--timeout={limit_s}s");
        let args = ["rollout", "status", &of, "-n", namespace, &timeout];
        self.kubectl_within(&args, limit).map(drop)
    }

    /// The workload's pod.
    pub fn pod(&self, namespace: &str, workload: &str) -> Result<String> {
        let label = format!("app={workload}");
        let path = "jsonpath={range .items[?(@.status.phase==\"Running\")]}{.metadata.name}/{.metadata.deletionTimestamp} {end}";
        let by = "--sort-by=.metadata.creationTimestamp";
        let said = self.kubectl(&["get", "pods", "-n", namespace, "-l", &label, by, "-o", path])?;
        // (One that is being replaced is running for a while yet.)
        let mut newest_first = said
            .split_whitespace()
            .rev()
            .filter_map(|p| p.strip_suffix('/'));
        let name = newest_first.next();
        name.map(String::from)
            .with_context(|| format!("no pod of {workload}"))
    }

    /// The address that the pod has besides, of IPv6.
    pub fn address6_of(&self, namespace: &str, workload: &str) -> Result<String> {
        let pod = self.pod(namespace, workload)?;
        let path = "jsonpath={.status.podIPs[*].ip}";
        let said = self.kubectl(&["get", "pod", &pod, "-n", namespace, "-o", path])?;
        let of = said.split_whitespace().find(|a| a.contains(':'));
        of.map(String::from).with_context(|| said.clone())
    }

    /// Runs a program in the workload's pod.
    pub fn exec(&self, namespace: &str, workload: &str, command: &[&str]) -> Result<String> {
        let pod = self.pod(namespace, workload)?;
        let to = ["exec", "-n", namespace, &pod, "-c", "main", "--"];
        self.kubectl(&[&to, command].concat())
    }

    /// How often the workload's container was started again.
    pub fn restarts(&self, namespace: &str, workload: &str) -> Result<u32> {
        let pod = self.pod(namespace, workload)?;
        let path = "jsonpath={.status.containerStatuses[0].restartCount}";
        let said = self.kubectl(&["get", "pod", &pod, "-n", namespace, "-o", path])?;
        said.parse().with_context(|| said.clone())
    }

    /// The id of the workload's container, as the runtime has it.
    pub fn container_of(&self, workload: &str) -> Result<String> {
        self.nodes[0].running(
            &format!("labels.\"io.kubernetes.pod.name\"~=^{workload}-"),
            "main",
        )
    }

    /// The same of the first node's daemon.
    pub fn daemon_container(&self, node: &str) -> Result<String> {
        self.node(node).running(
            "labels.\"io.kubernetes.pod.namespace\"==underpass-system",
            "underpassd",
        )
    }

    /// (The kubelet starts another one.)
    pub fn kill_daemon(&self, node: &str) -> Result<()> {
        let id = self.daemon_container(node)?;
        self.node(node).stop_container(&id)
    }

    /// What is known, for errors.
    pub fn picture(&self) -> String {
        let mut text = String::new();
        for (name, running) in self.nodes.iter().flat_map(Node::programs) {
            let log = running.stderr();
            let lines: Vec<&str> = log.lines().collect();
            let last = lines[lines.len().saturating_sub(8)..].join("\n");
            text.push_str(&format!("{name}:\n{last}\n"));
        }
        for args in [
            &["get", "pods", "-A", "-o", "wide"][..],
            &["get", "events", "-A"],
        ] {
            text.push_str(&self.kubectl(args).unwrap_or_else(|e| format!("{e:#}")));
        }
        text
    }
}

/// Keys and certificates of the cluster, and the first node's configurations.
fn write_files(first: &Node) -> Result<()> {
    ensure!(
        kubernetes("kubelet").exists(),
        "run `make cluster`: Kubernetes is not built"
    );
    let server = Holder {
        file: "apiserver",
        name: "kube-apiserver",
        organisation: "test",
        at: &[
            "localhost",
            "kubernetes",
            "kubernetes.default.svc",
            "10.96.0.1",
            FIRST.address,
        ],
    };
    let admin = Holder {
        file: "admin",
        name: "admin",
        organisation: "system:masters",
        at: &["admin"],
    };
    let nodes = [FIRST, SECOND, lab::NODES[0], lab::NODES[1]];
    let kubelets = nodes.map(|n| (n, format!("system:node:{}", n.name), [n.name, n.address]));
    let mut all = vec![server, admin];
    all.extend(kubelets.iter().map(|(n, name, at)| Holder {
        file: n.name,
        name,
        organisation: "system:nodes",
        at,
    }));
    keys::make(&first.machine, SERVER, &all)?;
    first.write_files()
}
