//! A node of the cluster: a machine with containerd, a kubelet and a kube-proxy.

use crate::keys::DIR;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use underpass_tests::harness::containerd::{self, Version};
use underpass_tests::harness::machine::{make_cgroups, Machine};
use underpass_tests::harness::program::{Program, Running};
use underpass_tests::harness::{paths, until};

const CONTAINERD: &str = "/run/containerd/containerd.sock";
/// The longest that a part takes to be ready: the machine has two processors, and others use them.
pub const READY: Duration = Duration::from_secs(90);
pub const COMMAND: Duration = Duration::from_secs(120);

/// Where Kubernetes is: see `tools/build-kubernetes.sh`.
pub fn kubernetes(program: &str) -> std::path::PathBuf {
    paths::target().join("kubernetes/bin").join(program)
}

/// What a node is called, and where it is.
#[derive(Clone, Copy)]
pub struct Place {
    pub name: &'static str,
    pub address: &'static str,
    /// Addresses of its pods.
    pub pods: &'static str,
    /// Those that they have besides, of IPv6.
    pub pods6: Option<&'static str>,
    /// The cgroup, below the root, in which its pods are.
    pub cgroup: &'static str,
}

pub struct Node {
    pub at: Place,
    /// By name, in the order in which they end.
    programs: BTreeMap<&'static str, Running>,
    pub machine: Machine,
}

impl Node {
    /// The machine alone.
    pub fn new(at: Place) -> Result<Node> {
        make_cgroups(at.cgroup)?;
        Ok(Node {
            at,
            programs: BTreeMap::new(),
            machine: Machine::start(at.address, at.cgroup)?,
        })
    }

    pub fn run(&mut self, name: &'static str, program: Program) -> Result<()> {
        self.programs.insert(name, program.spawn()?);
        Ok(())
    }

    /// Kills a program of the node.
    pub fn kill(&mut self, name: &str) {
        drop(self.programs.remove(name));
    }

    pub fn programs(&self) -> impl Iterator<Item = (&'static str, &Running)> {
        self.programs.iter().map(|(n, r)| (*n, r))
    }

    pub fn start_containerd(&mut self) -> Result<()> {
        let program = self.machine.program(Version::One.bin().join("containerd"));
        let program = program.words("--config /etc/containerd/config.toml");
        self.run("containerd", program.env("PATH", Version::One.path()))?;
        let ready = || self.ctr(&["version"]).is_ok();
        until("containerd is ready", READY, ready)
    }

    pub fn ctr(&self, args: &[&str]) -> Result<String> {
        let program = self.machine.program(Version::One.bin().join("ctr"));
        let program = program.words(&format!("--address {CONTAINERD} -n k8s.io"));
        program.args(args).check(COMMAND)
    }

    /// Imports images.
    pub fn import(&self, files: &[impl AsRef<Path>]) -> Result<()> {
        for tar in files {
            self.ctr(&["images", "import", &tar.as_ref().to_string_lossy()])?;
        }
        Ok(())
    }

    pub fn start_proxy(&mut self) -> Result<()> {
        let proxy = self.machine.program(kubernetes("kube-proxy"));
        let proxy = proxy.words(&format!(
            "--kubeconfig={DIR}/admin.conf --proxy-mode=iptables --cluster-cidr=10.244.0.0/16 \
             --hostname-override={} --conntrack-max-per-core=0 --conntrack-min=0 \
             --conntrack-tcp-timeout-established=0s --conntrack-tcp-timeout-close-wait=0s --bind-address={}",
            self.at.name, self.at.address
        ));
        self.run("proxy", proxy)
    }

    pub fn start_kubelet(&mut self) -> Result<()> {
        let kubelet = self.machine.program(kubernetes("kubelet"));
        let kubelet = kubelet.words(&kubelet_options(&self.at));
        self.run("kubelet", kubelet.env("PATH", Version::One.path()))
    }

    /// The one container that runs, with this label and name.
    pub fn running(&self, label: &str, name: &str) -> Result<String> {
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

    /// The first process of a container that runs.
    pub fn pid_of(&self, id: &str) -> Result<u32> {
        let tasks = self.ctr(&["tasks", "ls"])?;
        let task = tasks.lines().find(|l| l.starts_with(id));
        let pid = task.and_then(|l| l.split_whitespace().nth(1));
        Ok(pid.context("no such task")?.parse()?)
    }

    /// Kills its first process.
    pub fn stop_container(&self, id: &str) -> Result<()> {
        self.ctr(&["tasks", "kill", "-s", "SIGKILL", id])?;
        Ok(())
    }

    /// Runs a program in a container without asking the API.
    pub fn exec_in_container(&self, id: &str, command: &[&str]) -> Result<String> {
        let exec = ["tasks", "exec", "--exec-id", "test", id];
        self.ctr(&[&exec, command].concat())
    }

    /// Configurations. The keys are made by the cluster.
    pub fn write_files(&self) -> Result<()> {
        let mut all = files(&self.at).into_iter();
        all.try_for_each(|(path, text)| self.machine.write(path, &text))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The kubelet first: it would start again what ends.
        for name in ["kubelet", "containerd"] {
            self.kill(name);
        }
        self.programs.clear();
    }
}

/// Configurations of a node, by path.
pub fn files(at: &Place) -> Vec<(&'static str, String)> {
    let places = containerd::Places {
        root: "/var/lib/containerd",
        state: "/run/containerd",
        cni: "/etc/cni/net.d",
        nri: "/var/run/nri/nri.sock",
        plugins: ["/opt/nri/plugins", "/etc/nri/conf.d"],
    };
    // (Routed, not bridged: services work without the kernel's bridge filter.)
    let families = [(Some(at.pods), "0.0.0.0/0"), (at.pods6, "::/0")];
    let families = families
        .into_iter()
        .filter_map(|(pods, all)| Some((pods?, all)));
    let (ranges, routes): (Vec<String>, Vec<String>) = families
        .map(|(pods, all)| {
            (
                format!(r#"[{{"subnet": "{pods}"}}]"#),
                format!(r#"{{"dst": "{all}"}}"#),
            )
        })
        .unzip();
    let (ranges, routes) = (ranges.join(", "), routes.join(", "));
    let network = format!(
        r#"{{"cniVersion": "0.4.0", "name": "pods", "plugins": [{{"type": "ptp", "ipMasq": false,
"ipam": {{"type": "host-local", "ranges": [{ranges}], "routes": [{routes}]}}}}]}}"#,
    );
    vec![
        (
            "/etc/containerd/config.toml",
            containerd::config(Version::One, &places),
        ),
        ("/etc/cni/net.d/10-pods.conflist", network),
        (
            "/etc/kubernetes/resolv.conf",
            "nameserver 127.0.0.1\n".into(),
        ),
        ("/etc/kubernetes/kubelet.yaml", kubelet_file(at)),
    ]
}

fn kubelet_file(at: &Place) -> String {
    let Place {
        name,
        address,
        cgroup,
        ..
    } = at;
    // (The kubelet calls the group of all pods `kubepods`, below this one.)
    let root = match *cgroup {
        "kubepods" => "/".into(),
        other => format!("/{other}"),
    };
    format!(
        r#"apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
cgroupRoot: {root}
failSwapOn: false
featureGates: {{IPv6DualStack: true}}
authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: false}}, x509: {{clientCAFile: {DIR}/ca.crt}}}}
authorization: {{mode: AlwaysAllow}}
address: {address}
readOnlyPort: 0
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
resolvConf: {DIR}/resolv.conf
evictionHard: {{"nodefs.available": "0%", "imagefs.available": "0%", "memory.available": "50Mi"}}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
tlsCertFile: {DIR}/{name}.crt
tlsPrivateKeyFile: {DIR}/{name}.key
"#
    )
}

/// What a kubelet is started with.
pub fn kubelet_options(at: &Place) -> String {
    let Place { name, address, .. } = at;
    format!(
        "--config={DIR}/kubelet.yaml --kubeconfig={DIR}/{name}.conf --container-runtime=remote \
         --container-runtime-endpoint=unix://{CONTAINERD} --image-service-endpoint=unix://{CONTAINERD} \
         --hostname-override={name} --node-ip={address} --cert-dir=/var/lib/kubelet/pki"
    )
}
