//! A Kubernetes cluster of one node: etcd and Kubernetes 1.20 as Debian 12 has them, containerd, and images of this system's
//! programs, on a machine whose files and network are its own.

use crate::keys::{self, Holder, DIR};
use anyhow::{ensure, Context, Result};
use std::collections::BTreeMap;
use std::time::Duration;
use underpass_tests::harness::containerd::{self, PAUSE};
use underpass_tests::harness::machine::Machine;
use underpass_tests::harness::program::{Program, Running};
use underpass_tests::harness::{paths, until};

/// The node's address, and the API server's.
const ADDRESS: &str = "10.250.0.1";
const SERVER: &str = "https://10.250.0.1:6443";
pub const NODE: &str = "node1";
/// Services get their addresses from this range, pods from the other.
const SERVICES: &str = "10.96.0.0/16";
const PODS: &str = "10.244.1.0/24";
const CONTAINERD: &str = "/run/containerd/containerd.sock";
/// Image of the pods.
pub const IMAGE: &str = "underpass.test/programs:1";

/// The longest that a part takes to be ready: the machine has two processors, and others use them.
const READY: Duration = Duration::from_secs(90);
const COMMAND: Duration = Duration::from_secs(60);

const PROGRAMS: [&str; 10] = [
    "/bin/sh",
    "/bin/sleep",
    "/bin/cat",
    "/bin/ls",
    "/usr/bin/env",
    "/usr/bin/sha256sum",
    "/usr/bin/head",
    "/usr/bin/redis-server",
    "/usr/bin/redis-cli",
    "/usr/bin/redis-benchmark",
];

pub struct Cluster {
    /// By name, in the order in which they end.
    programs: BTreeMap<&'static str, Running>,
    pub machine: Machine,
    pub work: tempfile::TempDir,
}

/// Where Kubernetes is: see `tools/build-kubernetes.sh`.
fn kubernetes(program: &str) -> std::path::PathBuf {
    paths::target().join("kubernetes/bin").join(program)
}

impl Cluster {
    pub fn start() -> Result<Cluster> {
        let machine = Machine::start(ADDRESS, "kubepods")?;
        write_files(&machine)?;
        let mut c = Cluster {
            programs: BTreeMap::new(),
            machine,
            work: tempfile::Builder::new().prefix("upcluster-").tempdir()?,
        };
        c.start_containerd()?;
        c.import()?;
        c.start_etcd()?;
        c.start_server()?;
        c.start_others()?;
        c.start_kubelet()?;
        Ok(c)
    }

    fn run(&mut self, name: &'static str, program: Program) -> Result<()> {
        self.programs.insert(name, program.spawn()?);
        Ok(())
    }

    /// Kills a program of the cluster.
    pub fn kill(&mut self, name: &str) {
        drop(self.programs.remove(name));
    }

    pub fn start_containerd(&mut self) -> Result<()> {
        let program = self.machine.program(containerd::bin().join("containerd"));
        let program = program.words("--config /etc/containerd/config.toml");
        self.run("containerd", program.env("PATH", containerd::path()))?;
        let ready = || self.ctr(&["version"]).is_ok();
        until("containerd is ready", READY, ready)
    }

    fn ctr(&self, args: &[&str]) -> Result<String> {
        let program = self.machine.program(containerd::bin().join("ctr"));
        let program = program.words(&format!("--address {CONTAINERD} -n k8s.io"));
        program.args(args).check(COMMAND)
    }

    /// Imports the pods' images.
    fn import(&self) -> Result<()> {
        let root = self.work.path().join("root");
        containerd::fill(&root, &PROGRAMS)?;
        let tar = self.work.path().join("image.tar");
        for name in [IMAGE, PAUSE] {
            containerd::image(&root, name, &["/bin/sleep", "1000000"], &tar)?;
            self.import_file(&tar)?;
        }
        Ok(())
    }

    pub fn import_file(&self, tar: &std::path::Path) -> Result<()> {
        self.ctr(&["images", "import", &tar.to_string_lossy()])?;
        Ok(())
    }

    fn start_etcd(&mut self) -> Result<()> {
        let etcd = paths::target().join("etcd/usr/bin/etcd");
        let etcd = self.machine.program(etcd).words(
            "--data-dir /var/lib/etcd --unsafe-no-fsync --listen-client-urls http://127.0.0.1:2379 \
             --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380 \
             --initial-advertise-peer-urls http://127.0.0.1:2380 \
             --initial-cluster default=http://127.0.0.1:2380",
        );
        self.run("etcd", etcd)
    }

    pub fn start_server(&mut self) -> Result<()> {
        let server = self.machine.program(kubernetes("kube-apiserver"));
        let server = server.words(&format!(
            "--etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --secure-port=6443 \
             --advertise-address={ADDRESS} --kubelet-preferred-address-types=InternalIP \
             --tls-cert-file={DIR}/apiserver.crt --tls-private-key-file={DIR}/apiserver.key \
             --client-ca-file={DIR}/ca.crt --service-cluster-ip-range={SERVICES} \
             --service-account-key-file={DIR}/tokens.pub \
             --service-account-signing-key-file={DIR}/tokens.key \
             --service-account-issuer=https://kubernetes.default.svc \
             --authorization-mode=Node,RBAC --allow-privileged=true \
             --enable-admission-plugins=NodeRestriction,PodSecurityPolicy \
             --kubelet-client-certificate={DIR}/admin.crt --kubelet-client-key={DIR}/admin.key"
        ));
        self.run("api server", server)?;
        let ready = || {
            let said = self.kubectl(&["get", "--raw", "/readyz"]);
            said.is_ok_and(|s| s == "ok")
        };
        until("the API server is ready", READY, ready).with_context(|| self.picture())
    }

    fn start_others(&mut self) -> Result<()> {
        let admin = format!("--kubeconfig={DIR}/admin.conf");
        let manager = self.machine.program(kubernetes("kube-controller-manager"));
        let manager = manager.words(&format!(
            "{admin} --service-account-private-key-file={DIR}/tokens.key --root-ca-file={DIR}/ca.crt \
             --use-service-account-credentials=true --cluster-signing-cert-file={DIR}/ca.crt \
             --cluster-signing-key-file={DIR}/ca.key --bind-address=127.0.0.1 --port=0 \
             --leader-elect=false --allocate-node-cidrs=false"
        ));
        self.run("controller manager", manager)?;
        let scheduler = self.machine.program(kubernetes("kube-scheduler"));
        let line = format!("{admin} --leader-elect=false --bind-address=127.0.0.1 --port=0");
        self.run("scheduler", scheduler.words(&line))?;
        let proxy = self.machine.program(kubernetes("kube-proxy"));
        let proxy = proxy.words(&format!(
            "{admin} --proxy-mode=iptables --cluster-cidr=10.244.0.0/16 --hostname-override={NODE} \
             --conntrack-max-per-core=0 --conntrack-min=0 --conntrack-tcp-timeout-established=0s \
             --conntrack-tcp-timeout-close-wait=0s --bind-address={ADDRESS}"
        ));
        self.run("proxy", proxy)
    }

    pub fn start_kubelet(&mut self) -> Result<()> {
        let kubelet = self.machine.program(kubernetes("kubelet"));
        let kubelet = kubelet.words(&format!(
            "--config={DIR}/kubelet.yaml --kubeconfig={DIR}/kubelet.conf --container-runtime=remote \
             --container-runtime-endpoint=unix://{CONTAINERD} --image-service-endpoint=unix://{CONTAINERD} \
             --hostname-override={NODE} --node-ip={ADDRESS} --cert-dir=/var/lib/kubelet/pki"
        ));
        self.run("kubelet", kubelet.env("PATH", containerd::path()))?;
        let ready = || {
            let path = "{.status.conditions[?(@.type==\"Ready\")].status}";
            let said = self.kubectl(&["get", "node", NODE, "-o", &format!("jsonpath={path}")]);
            said.is_ok_and(|s| s == "True")
        };
        until("the node is ready", READY, ready).with_context(|| self.picture())
    }

    /// Runs kubectl, which must succeed. What it wrote.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        let kubectl = self.machine.program(kubernetes("kubectl")).args(args);
        self.as_admin(kubectl).check(COMMAND)
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
        let kubectl = self.machine.program(kubernetes("kubectl"));
        let kubectl = kubectl.args(["apply", "-f", "-"]).stdin(text.as_bytes());
        self.as_admin(kubectl).check(COMMAND)?;
        Ok(())
    }

    /// Installs the chart with its image, as README says.
    pub fn install(&self) -> Result<()> {
        self.import_file(&paths::target().join("underpass/image.tar"))?;
        let chart = paths::root().join("deploy/helm/underpass");
        self.helm(&[
            "install",
            "underpass",
            &chart.to_string_lossy(),
            "-n",
            "underpass-system",
            "--create-namespace",
        ])?;
        let status = [
            "rollout",
            "status",
            "daemonset/underpass",
            "-n",
            "underpass-system",
        ];
        self.kubectl(&[&status[..], &["--timeout=60s"]].concat())?;
        Ok(())
    }

    pub fn helm(&self, args: &[&str]) -> Result<String> {
        let helm = paths::target().join("helm/helm/helm");
        self.as_admin(self.machine.program(helm).args(args))
            .check(COMMAND)
    }

    /// `kubectl underpass`.
    pub fn underpass(&self, args: &[&str]) -> Result<String> {
        let plugin = paths::root().join("deploy/kubectl-underpass");
        self.as_admin(self.machine.program(plugin).args(args))
            .check(COMMAND)
    }

    /// Until the workload's newest pod is the only one, and runs.
    pub fn rolled_out(&self, namespace: &str, workload: &str) -> Result<()> {
        let of = format!("deployment/{workload}");
        self.kubectl(&["rollout", "status", &of, "-n", namespace, "--timeout=60s"])?;
        Ok(())
    }

    /// The workload's pod.
    pub fn pod(&self, namespace: &str, workload: &str) -> Result<String> {
        let label = format!("app={workload}");
        let path = "jsonpath={range .items[?(@.status.phase==\"Running\")]}{.metadata.name} {end}";
        let said = self.kubectl(&["get", "pods", "-n", namespace, "-l", &label, "-o", path])?;
        let name = said.split_whitespace().last();
        name.map(String::from)
            .with_context(|| format!("no pod of {workload}"))
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
        self.running(
            &format!("labels.\"io.kubernetes.pod.name\"~=^{workload}-"),
            "main",
        )
    }

    /// The one container that runs, with this label and name.
    fn running(&self, label: &str, name: &str) -> Result<String> {
        let named = format!("{label},labels.\"io.kubernetes.container.name\"=={name}");
        let all = self.ctr(&["containers", "ls", "-q", &named])?;
        let tasks = self.ctr(&["tasks", "ls"])?;
        let runs = |id: &&str| {
            let of = |l: &str| l.starts_with(*id) && l.contains("RUNNING");
            tasks.lines().any(of)
        };
        let id = all.lines().find(runs).context("no such container runs")?;
        Ok(id.to_owned())
    }

    /// Kills its first process.
    pub fn stop_container(&self, id: &str) -> Result<()> {
        self.ctr(&["tasks", "kill", "-s", "SIGKILL", id])?;
        Ok(())
    }

    pub fn kill_daemon(&self) -> Result<()> {
        let id = self.running(
            "labels.\"io.kubernetes.pod.namespace\"==underpass-system",
            "underpassd",
        )?;
        self.stop_container(&id)
    }

    /// Runs a program in a container without asking the API.
    pub fn exec_in_container(&self, id: &str, command: &[&str]) -> Result<String> {
        let exec = ["tasks", "exec", "--exec-id", "test", id];
        self.ctr(&[&exec, command].concat())
    }

    /// What is known, for errors.
    pub fn picture(&self) -> String {
        let mut text = String::new();
        for (name, running) in &self.programs {
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

impl Drop for Cluster {
    fn drop(&mut self) {
        // The kubelet first: it would start again what ends.
        for name in ["kubelet", "containerd"] {
            self.kill(name);
        }
        self.programs.clear();
    }
}

/// Configurations, keys and certificates.
fn write_files(m: &Machine) -> Result<()> {
    ensure!(
        kubernetes("kubelet").exists(),
        "run `make cluster`: Kubernetes is not built"
    );
    keys::make(
        m,
        SERVER,
        &[
            Holder {
                file: "apiserver",
                name: "kube-apiserver",
                organisation: "test",
                at: &[
                    "localhost",
                    "kubernetes",
                    "kubernetes.default.svc",
                    "10.96.0.1",
                    ADDRESS,
                ],
            },
            Holder {
                file: "admin",
                name: "admin",
                organisation: "system:masters",
                at: &["admin"],
            },
            Holder {
                file: "kubelet",
                name: &format!("system:node:{NODE}"),
                organisation: "system:nodes",
                at: &[NODE, ADDRESS],
            },
        ],
    )?;
    let places = containerd::Places {
        root: "/var/lib/containerd",
        state: "/run/containerd",
        cni: "/etc/cni/net.d",
        nri: "/var/run/nri/nri.sock",
        plugins: ["/opt/nri/plugins", "/etc/nri/conf.d"],
    };
    m.write("/etc/containerd/config.toml", &containerd::config(&places))?;
    // (Routed, not bridged: services work without the kernel's bridge filter.)
    m.write(
        "/etc/cni/net.d/10-pods.conflist",
        &format!(
            r#"{{"cniVersion": "0.4.0", "name": "pods", "plugins": [{{"type": "ptp", "ipMasq": false,
"ipam": {{"type": "host-local", "ranges": [[{{"subnet": "{PODS}"}}]], "routes": [{{"dst": "0.0.0.0/0"}}]}}}}]}}"#
        ),
    )?;
    m.write("/etc/kubernetes/resolv.conf", "nameserver 127.0.0.1\n")?;
    m.write(
        "/etc/kubernetes/kubelet.yaml",
        &format!(
            r#"apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
failSwapOn: false
authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: false}}, x509: {{clientCAFile: {DIR}/ca.crt}}}}
authorization: {{mode: AlwaysAllow}}
address: {ADDRESS}
readOnlyPort: 0
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
resolvConf: {DIR}/resolv.conf
evictionHard: {{"nodefs.available": "0%", "imagefs.available": "0%", "memory.available": "50Mi"}}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
tlsCertFile: {DIR}/kubelet.crt
tlsPrivateKeyFile: {DIR}/kubelet.key
"#
        ),
    )
}
