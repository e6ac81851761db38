//! The daemon's configuration: a TOML file, over it the command line.

use crate::clients::limits::defaults::Machine;
use crate::clients::limits::Limits;
use crate::nodes::peers::directory::{self, FileDirectory, Listed};
use crate::pairing::bpf::ProofConfig;
use crate::rules;
use lane::abi::{RING_LOG2_MAX, RING_LOG2_MIN};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use underpass_admin::rules::Rule;
use underpass_kubelet::csi::CsiConfig;
use underpass_pods::policy::PodsConfig;
use underpass_webhook::WebhookConfig;

/// Most seconds that the kernel takes between two probes (`MAX_TCP_KEEPIDLE`).
const PROBE_MAX_S: u16 = 32767;

/// Everything that can be set. Unknown keys are errors: a misspelt limit is no limit.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// log2 of the size of a lane's first ring, and of the largest that it may grow to. 1 MiB (20) is enough for
    /// speed; larger rings take as much of a non-blocking send as the kernel's buffers would.
    pub ring_log2: u8,
    pub ring_max_log2: u8,
    /// Registrations that one shim may have under way.
    pub credits: u32,
    pub lanes: LanesConfig,
    pub limits: LimitsConfig,
    pub proof: ProofConfig,
    pub exclude: Exclude,
    /// Which connections may have lanes, after `exclude`.
    pub rule: Vec<Rule>,
    pub node: NodeConfig,
    /// The other nodes; none: this daemon works alone and listens to nobody.
    pub peer: Vec<PeerConfig>,
    pub tls: TlsConfig,
    /// RDMA ports with settings of their own; other ports are used as they are found.
    pub rail: Vec<RailConfig>,
    /// Containers that get the shim.
    pub pods: PodsConfig,
    pub kubernetes: KubernetesConfig,
    /// The daemon as a CSI driver.
    pub csi: CsiConfig,
    /// Of `underpassd webhook` alone.
    pub webhook: WebhookConfig,
    pub metrics: MetricsConfig,
}

/// What the daemon does with the Kubernetes API.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesConfig {
    /// Read there what namespaces ask for and which containers are init containers, and tell there which pods do not get
    /// the shim.
    pub api: bool,
    /// This node's name there; empty: the variable `NODE_NAME`'s value.
    pub node: String,
    /// The other nodes, and who has which address, come from there; then there is no `[[peer]]`. All daemons listen at
    /// [`NodeConfig::control`]'s port.
    pub nodes: bool,
    /// ConfigMap in which the signer makes the CA known. This node's certificate is asked for there, and kept in the files
    /// that [`TlsConfig`] names. Empty: somebody else keeps them.
    pub ca: String,
}

impl KubernetesConfig {
    pub fn node(&self) -> String {
        match self.node.as_str() {
            "" => std::env::var("NODE_NAME").unwrap_or_default(),
            n => n.into(),
        }
    }
}

/// `/metrics`, `/healthz` and `/readyz`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsConfig {
    /// Where to listen: `address:port`; empty: nowhere.
    pub listen: String,
    /// What has series of its own.
    pub per_pod: PerPod,
    /// Most pods (or namespaces) that have series of their own at a time; the others share those of `other`.
    pub pods_max: usize,
    /// Most reasons of a pod (or namespace) that have series of their own; 0: none by pod and reason.
    pub reasons_max: usize,
}

/// Whose series there are besides those of the node.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum PerPod {
    /// Nobody's.
    None,
    Namespace,
    Pod,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct RailConfig {
    pub device: String,
    /// All ports of the device, if absent.
    pub port: Option<u8>,
    /// Ports of two nodes with the same number reach each other. If absent, derived from the subnet of the port's
    /// address.
    pub fabric: Option<u32>,
    /// Not to be used.
    #[serde(default)]
    pub off: bool,
    /// What it carries is encrypted on its way (MACsec, or an encrypting adapter), says the administrator.
    #[serde(default)]
    pub encrypted: bool,
}

impl RailConfig {
    pub fn is(&self, device: &str, port: u8) -> bool {
        self.device == device && self.port.is_none_or(|p| p == port)
    }
}

/// Which ports may be rails.
#[derive(Clone, Debug, Default)]
pub struct RailRules {
    pub ports: Vec<RailConfig>,
    /// Only those that encrypt.
    pub encrypted_only: bool,
}

impl RailRules {
    pub fn of(&self, device: &str, port: u8) -> Option<&RailConfig> {
        self.ports.iter().find(|c| c.is(device, port))
    }

    /// Would lanes go there in clear text, and is that forbidden?
    pub fn is_forbidden(&self, device: &str, port: u8) -> bool {
        self.encrypted_only && !self.of(device, port).is_some_and(|c| c.encrypted)
    }
}

/// This node, as its peers know it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct NodeConfig {
    /// The DNS name in its certificate.
    pub name: String,
    /// Where to listen for peer daemons: `address:port`; empty: port 7471 of every address.
    pub control: String,
    /// Ranges of addresses of this node and its pods.
    pub addresses: Vec<String>,
}

/// A peer node.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct PeerConfig {
    pub name: String,
    pub control: String,
    pub addresses: Vec<String>,
}

/// Files (PEM) of the private CA and of this node's certificate.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct TlsConfig {
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct LanesConfig {
    /// Interval of probes on the TCP connection below a busy lane, in seconds; 0: no probes.
    pub probe_s: u16,
    /// May lanes to other nodes go over rails that do not encrypt (`[[rail]] encrypted`)?
    pub clear_text: bool,
}

/// Per tenant: in Kubernetes, per pod. What is not said depends on the machine ([`crate::clients::limits::defaults`]).
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsConfig {
    pub lanes: Option<u32>,
    /// Address space reserved for rings. Pages cost memory only when used, and the process that
    /// uses them pays.
    pub memory_mib: Option<u64>,
    /// Of that, memory of lanes to other nodes, which is pinned.
    pub pinned_mib: Option<u64>,
    pub processes: Option<u32>,
    /// Ends that wait for their other ends.
    pub waiting: Option<u32>,
}

/// Connections that stay on TCP.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Exclude {
    /// Either end's port.
    pub ports: Vec<u16>,
    /// Program names, as in `/proc/PID/comm`.
    pub programs: Vec<String>,
    /// Either end's address.
    pub addresses: Vec<std::net::IpAddr>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            ring_log2: 16,
            ring_max_log2: 22,
            credits: 16,
            lanes: LanesConfig::default(),
            limits: LimitsConfig::default(),
            proof: ProofConfig::default(),
            exclude: Exclude::default(),
            rule: Vec::new(),
            node: NodeConfig::default(),
            peer: Vec::new(),
            tls: TlsConfig::default(),
            rail: Vec::new(),
            pods: PodsConfig::default(),
            kubernetes: KubernetesConfig::default(),
            csi: CsiConfig::default(),
            webhook: WebhookConfig::default(),
            metrics: MetricsConfig::default(),
        }
    }
}

impl Default for LanesConfig {
    fn default() -> Self {
        LanesConfig {
            probe_s: 60,
            clear_text: true,
        }
    }
}

impl Default for TlsConfig {
    fn default() -> Self {
        TlsConfig {
            ca: "/etc/underpass/tls/ca.crt".into(),
            cert: "/etc/underpass/tls/node.crt".into(),
            key: "/etc/underpass/tls/node.key".into(),
        }
    }
}

impl Default for MetricsConfig {
    fn default() -> Self {
        MetricsConfig {
            listen: String::new(),
            per_pod: PerPod::Namespace,
            pods_max: 500,
            reasons_max: 8,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: {1}")]
    Read(PathBuf, std::io::Error),
    #[error("{0}: {1}")]
    Parse(PathBuf, toml::de::Error),
    #[error("ring sizes must be {RING_LOG2_MIN} to {RING_LOG2_MAX} (log2 of bytes), the first not above the largest")]
    Rings,
    #[error("credits must be 1 to 256")]
    Credits,
    #[error("metrics.listen must be an address and a port, as in `127.0.0.1:7479`")]
    Metrics,
    #[error("lanes.probe_s must be at most {PROBE_MAX_S}")]
    Probes,
    #[error("kubernetes.api needs this node's name: kubernetes.node, or the variable NODE_NAME")]
    NodeName,
    #[error("kubernetes.{0} needs kubernetes.api")]
    NoApi(&'static str),
    #[error("with kubernetes.nodes the other nodes come from the API: [[peer]] must go")]
    Peers,
    #[error(transparent)]
    Directory(#[from] directory::Error),
    #[error(transparent)]
    Rule(#[from] rules::Error),
}

impl Config {
    pub fn load(path: &Path) -> Result<Config, Error> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::Read(path.into(), e))?;
        toml::from_str(&text).map_err(|e| Error::Parse(path.into(), e))
    }

    /// Checks the values after the file and the command line were merged.
    pub fn check(&self) -> Result<(), Error> {
        let (first, most) = (u32::from(self.ring_log2), u32::from(self.ring_max_log2));
        if first < RING_LOG2_MIN || most > RING_LOG2_MAX || first > most {
            return Err(Error::Rings);
        }
        if !(1..=256).contains(&self.credits) {
            return Err(Error::Credits);
        }
        if self.lanes.probe_s > PROBE_MAX_S {
            return Err(Error::Probes);
        }
        rules::check(&self.rules())?;
        self.check_kubernetes()?;
        let listen = &self.metrics.listen;
        if !listen.is_empty() && listen.parse::<std::net::SocketAddr>().is_err() {
            return Err(Error::Metrics);
        }
        self.directory().map(|_| ())
    }

    fn check_kubernetes(&self) -> Result<(), Error> {
        let k = &self.kubernetes;
        let node = k.node();
        if k.api && node.is_empty() {
            return Err(Error::NodeName);
        }
        for (name, wanted) in [("nodes", k.nodes), ("ca", !k.ca.is_empty())] {
            if wanted && !k.api {
                return Err(Error::NoApi(name));
            }
        }
        if k.nodes && !self.peer.is_empty() {
            return Err(Error::Peers);
        }
        self.control_port().map(|_| ())
    }

    /// Where this daemon listens, and in a cluster all do.
    pub fn control_port(&self) -> Result<u16, Error> {
        let own = &self.node;
        if own.control.is_empty() {
            return Ok(directory::PORT);
        }
        let at = own.control.parse::<std::net::SocketAddr>();
        let wrong = |_| directory::Error::Control(own.name.clone(), own.control.clone());
        Ok(at.map_err(wrong)?.port())
    }

    /// The nodes this daemon works with, as far as this configuration names them; `None`: it names none.
    pub fn directory(&self) -> Result<Option<FileDirectory>, Error> {
        if self.peer.is_empty() {
            return Ok(None);
        }
        let listed: Vec<_> = self
            .peer
            .iter()
            .map(|p| Listed {
                name: &p.name,
                control: &p.control,
                addresses: &p.addresses,
            })
            .collect();
        let own = &self.node;
        Ok(Some(FileDirectory::new(
            &own.name,
            &own.addresses,
            &listed,
        )?))
    }

    /// Which connections may have lanes: `[exclude]`, then each `[[rule]]`.
    pub fn rules(&self) -> Vec<Rule> {
        let e = &self.exclude;
        let addresses = e.addresses.iter().map(ToString::to_string).collect();
        let none = Rule::default;
        let (ports, programs) = (e.ports.clone(), e.programs.clone());
        let excluded = [
            Rule { programs, ..none() },
            Rule { ports, ..none() },
            Rule {
                addresses,
                ..none()
            },
        ];
        let excluded = excluded.into_iter().filter(|r| *r != none());
        excluded.chain(self.rule.iter().cloned()).collect()
    }

    pub fn rails(&self) -> RailRules {
        RailRules {
            ports: self.rail.clone(),
            encrypted_only: !self.lanes.clear_text,
        }
    }

    pub fn limits(&self) -> Limits {
        let (said, here) = (&self.limits, Limits::of(&Machine::here()));
        let bytes = |mib: Option<u64>| mib.map(|m| m.saturating_mul(1 << 20));
        Limits {
            lanes: said.lanes.unwrap_or(here.lanes),
            memory: bytes(said.memory_mib).unwrap_or(here.memory),
            pinned: bytes(said.pinned_mib).unwrap_or(here.pinned),
            clients: said.processes.unwrap_or(here.clients),
            waiting: said.waiting.unwrap_or(here.waiting),
            jobs: here.jobs,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_and_files() {
        assert!(Config::default().check().is_ok());
        let c: Config = toml::from_str(
            "ring_log2 = 12\n[limits]\nlanes = 7\n[exclude]\nports = [22]\naddresses = ['10.0.0.1']",
        )
        .unwrap();
        assert_eq!(
            (c.ring_log2, c.ring_max_log2, c.limits().lanes),
            (12, 22, 7)
        );
        assert_eq!(c.limits().clients, Config::default().limits().clients);
        assert!(toml::from_str::<Config>("ring_lgo2 = 12").is_err());
        let rules: Vec<String> = c.rules().iter().map(Rule::to_string).collect();
        assert_eq!(rules, ["deny port 22", "deny address 10.0.0.1"]);
        let c: Config = toml::from_str("[metrics]\nlisten = '::1:7479'\nper_pod = 'pod'").unwrap();
        assert_eq!(c.metrics.per_pod, PerPod::Pod);
        assert!(c
            .check()
            .unwrap_err()
            .to_string()
            .contains("metrics.listen"));
        let c: Config = toml::from_str("[[rule]]\naction = 'allow'\nuids = [7]\n[[rule]]").unwrap();
        let rules: Vec<String> = c.rules().iter().map(Rule::to_string).collect();
        assert_eq!(rules, ["allow uid 7", "deny all"]);
        assert!(c.check().is_ok());
        let c: Config = toml::from_str("[[rule]]\naddresses = ['10.0.0.1/8']").unwrap();
        assert!(c.check().unwrap_err().to_string().contains("10.0.0.0/8"));
        assert!(toml::from_str::<Config>("[[rule]]\nport = [1]").is_err());
        let c: Config =
            toml::from_str("[lanes]\nclear_text = false\n[[rail]]\ndevice = 'a'\nencrypted = true")
                .unwrap();
        let r = c.rails();
        assert!(!r.is_forbidden("a", 1) && r.is_forbidden("b", 1));
        assert!(!Config::default().rails().is_forbidden("b", 1));
        let peers = "[node]\nname = 'a'\n[[peer]]\nname = 'b'\ncontrol = '10.0.0.2'\n\
                     addresses = ['10.0.0.2']\n[tls]\nkey = '/k'\n";
        let c: Config = toml::from_str(peers).unwrap();
        assert!(c.check().is_ok() && c.directory().unwrap().is_some());
        let c: Config = toml::from_str(&peers.replace("name = 'a'", "control = 'x'")).unwrap();
        assert!(c
            .check()
            .unwrap_err()
            .to_string()
            .contains("control address `x`"));
        let c: Config = toml::from_str(&peers.replace("name = 'a'", "name = 'b'")).unwrap();
        assert!(c.check().unwrap_err().to_string().contains("itself"));
        assert!(Config::default().directory().unwrap().is_none());
        let cluster = "[kubernetes]\napi = true\nnode = 'a'\nnodes = true\nca = 'c'\n";
        let said = |text: &str| {
            let c: Config = toml::from_str(text).unwrap();
            c.check().map_err(|e| e.to_string())
        };
        assert_eq!(said(cluster), Ok(()));
        let wrong = |text: &str, why: &str| {
            let e = said(text).unwrap_err();
            assert!(e.contains(why), "{e}");
        };
        wrong(&cluster.replace("api = true", ""), "needs kubernetes.api");
        wrong(
            &format!("{cluster}{}", &peers[peers.find("[[peer]]").unwrap()..]),
            "[[peer]] must go",
        );
        wrong(
            &format!("{cluster}[node]\ncontrol = 'x'"),
            "control address `x`",
        );
        assert!(Config {
            ring_log2: 21,
            ring_max_log2: 20,
            ..Config::default()
        }
        .check()
        .is_err());
        assert!(Config {
            ring_max_log2: 23,
            ..Config::default()
        }
        .check()
        .is_err());
    }
}
