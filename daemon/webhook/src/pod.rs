//! A pod as it is created, in the words in which a container runtime tells of one: both ways decide by one rule.

use k8s_openapi::api::core::v1::{self, Pod, PodSpec};
use std::collections::BTreeMap;
use underpass_kubelet::csi::NAME as DRIVER;
use underpass_nri::messages::{Container, Mount, PodSandbox};
use underpass_pods::cluster::Cluster;
use underpass_pods::policy::{PodsConfig, ENABLED};

/// What the daemons run on.
const NODES: [(&str, &str); 2] = [
    ("kubernetes.io/os", "linux"),
    ("kubernetes.io/arch", "amd64"),
];

/// What is known of the cluster.
pub trait Lookup: Send + Sync {
    /// The value of a namespace's annotation [`ENABLED`].
    fn namespace(&self, name: &str) -> Option<String>;
    /// The handler of a runtime class.
    fn handler(&self, class: &str) -> Option<String>;
}

/// The pod, and what the cluster says of it.
pub(crate) fn sandbox(
    pod: &Pod,
    spec: &PodSpec,
    namespace: &str,
    lookup: &dyn Lookup,
) -> (PodSandbox, Cluster) {
    // (It may have no uid yet, and needs none: it is the only one.)
    let sandbox = PodSandbox {
        name: name(pod),
        namespace: namespace.into(),
        annotations: pod.metadata.annotations.clone().unwrap_or_default(),
        handler: handler(spec, lookup),
        ..PodSandbox::default()
    };
    let mut cluster = Cluster::default();
    if let Some(word) = lookup.namespace(namespace) {
        cluster.namespaces.insert(namespace.into(), word);
    }
    let init = underpass_kube::init_containers(spec);
    cluster.init.insert(sandbox.uid.clone(), init);
    (sandbox, cluster)
}

/// Of a pod that a controller makes, only the beginning is known.
fn name(pod: &Pod) -> String {
    let m = &pod.metadata;
    m.name
        .clone()
        .or(m.generate_name.clone())
        .unwrap_or_default()
}

/// What will run its containers; empty: the default. A runtime class that is not known is taken for a handler of its name,
/// as most are named.
fn handler(spec: &PodSpec, lookup: &dyn Lookup) -> String {
    match spec.runtime_class_name.as_deref() {
        None | Some("") => String::new(),
        Some(class) => lookup.handler(class).unwrap_or_else(|| class.into()),
    }
}

/// Its variables that are written in the pod, and its mounts. What the driver gives it is the daemon's directory.
pub(crate) fn container(config: &PodsConfig, spec: &PodSpec, c: &v1::Container) -> Container {
    let driver = volume(spec).unwrap_or_default();
    let written = c.env.iter().flatten().filter(|e| e.value_from.is_none());
    let mounts = c.volume_mounts.iter().flatten().map(|m| Mount {
        destination: absolute(&m.mount_path),
        source: match !driver.is_empty() && m.name == driver {
            true => config.dir.to_string_lossy().into_owned(),
            false => String::new(),
        },
        ..Mount::default()
    });
    Container {
        name: c.name.clone(),
        env: written
            .map(|e| format!("{}={}", e.name, e.value.as_deref().unwrap_or_default()))
            .collect(),
        mounts: mounts.collect(),
        ..Container::default()
    }
}

/// The name of the pod's volume of the driver, which mounts no other than read-only ones.
pub(crate) fn volume(spec: &PodSpec) -> Option<&str> {
    let mut all = spec.volumes.iter().flatten();
    let is = |c: &v1::CSIVolumeSource| c.driver == DRIVER && c.read_only == Some(true);
    let ours = |v: &&v1::Volume| v.csi.as_ref().is_some_and(is);
    all.find(ours).map(|v| v.name.as_str())
}

/// As the kubelet and the runtime read a path.
fn absolute(path: &str) -> String {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            p => parts.push(p),
        }
    }
    format!("/{}", parts.join("/"))
}

/// Can it run only where no daemon is? Then its volume would never come.
pub(crate) fn is_for_other_nodes(spec: &PodSpec) -> bool {
    let os = spec.os.as_ref().map(|o| o.name.as_str());
    let selector: &BTreeMap<_, _> = match &spec.node_selector {
        Some(s) => s,
        None => return os.is_some_and(|o| o != NODES[0].1),
    };
    let other = |(label, value): &(&str, &str)| selector.get(*label).is_some_and(|v| v != value);
    os.is_some_and(|o| o != NODES[0].1) || NODES.iter().any(other)
}

/// The value of a namespace's annotation.
pub(crate) fn word(annotations: &BTreeMap<String, String>) -> Option<String> {
    annotations.get(ENABLED).cloned()
}
