//! What a pod asks for, and what its containers get. Pure: from what the runtime tells, the configuration, and what the
//! cluster says.

use super::cluster::Cluster;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use underpass_admin::environ;
use underpass_admin::places::DIR_ENV;
use underpass_nri::messages::{Adjustment, Container, KeyValue, Mount, PodSandbox};

/// Where the daemon leaves things on the node, unless its configuration says otherwise: below it is what containers see.
pub const LEFT: &str = "/var/lib/underpass";
/// Where containers have the daemon's directory; the second, if something is mounted at `/run` (a directory that the runtime
/// makes in a volume would stay there, or cannot be made).
pub const MOUNTED_AT: [&str; 2] = [underpass_admin::places::SYSTEM_DIR, "/.underpass"];
/// Name of the shim in it.
pub const SHIM: &str = "libunderpass.so";

/// The word of a pod, or of a namespace for its pods: `true` or `false`.
pub const ENABLED: &str = "underpass.io/enabled";
/// Names of the containers that get the shim, separated by commas; without it, all but the init containers do.
pub const CONTAINERS: &str = "underpass.io/containers";

/// Environment variable of the dynamic linker: libraries to load before all others.
pub const PRELOAD: &str = "LD_PRELOAD";
/// Where kubelets mount what CSI drivers give to a pod.
const KUBELET_CSI: &str = "/volumes/kubernetes.io~csi/";

/// Pods and what they may ask for. What is in the directory is in `super::place`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct PodsConfig {
    /// The container runtime's NRI socket; empty: no container is given the shim.
    pub nri: PathBuf,
    /// The directory of the node that containers get to see.
    pub dir: PathBuf,
    /// The shim, and the tool as a program without libraries: copied there.
    pub library: PathBuf,
    pub tool: PathBuf,
    /// The directory of plugins that the runtime starts itself, where the tool is put as one; empty: it is not.
    pub plugins: PathBuf,
    /// Other annotations that ask for it, as `name=value`.
    pub annotations: Vec<String>,
    /// Handlers of runtime classes whose containers share the node's kernel; the default handler's always do.
    pub handlers: Vec<String>,
    /// Namespaces whose pods get it without asking, and namespaces whose pods never do.
    pub include: Vec<String>,
    pub exclude: Vec<String>,
}

impl Default for PodsConfig {
    fn default() -> Self {
        PodsConfig {
            nri: PathBuf::new(),
            dir: "/var/lib/underpass/pods".into(),
            library: "/usr/lib/underpass/libunderpass.so".into(),
            tool: "/usr/lib/underpass/underpass-static".into(),
            plugins: PathBuf::new(),
            annotations: vec!["network.alibabacloud.com/erdma-smcr=true".into()],
            handlers: ["runc", "crun", "nvidia"].map(String::from).into(),
            include: Vec::new(),
            exclude: Vec::new(),
        }
    }
}

/// Why a container that asked did not get it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhyNot {
    #[error("its namespace is excluded by the daemon's configuration")]
    Excluded,
    #[error("{ENABLED} is neither `true` nor `false`")]
    Unreadable,
    #[error("{ENABLED} of its namespace is neither `true` nor `false`")]
    UnreadableNamespace,
    #[error("{CONTAINERS} does not name it")]
    NotNamed,
    #[error("it is an init container, and {CONTAINERS} does not name it")]
    Init,
    #[error("something else is mounted at {} or below", MOUNTED_AT[0])]
    Taken,
    #[error("the runtime class `{0}` is not known to share the node's kernel (handlers, in the daemon's configuration)")]
    Handler(String),
    #[error("its {PRELOAD} is set twice")]
    Twice,
    #[error("it sets {DIR_ENV} itself")]
    Elsewhere,
    #[error("the shim is not in place on this node: {0}")]
    NotInPlace(String),
    #[error("it was made without the shim; it gets it when it is made anew")]
    Before,
}

impl WhyNot {
    /// Does somebody miss it? (Whoever names containers means the others not to have it.)
    pub fn is_missed(&self) -> bool {
        !matches!(self, WhyNot::NotNamed | WhyNot::Init)
    }
}

/// What becomes of a container.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Nobody asked.
    Unasked,
    /// It has the shim already.
    Has,
    /// It gets it.
    Inject(Adjustment),
    Not(WhyNot),
}

/// The pod's own word.
fn own_word(config: &PodsConfig, pod: &PodSandbox) -> Option<Result<bool, WhyNot>> {
    let mut listed = config.annotations.iter();
    let has = |a: &String| {
        let (name, value) = a.split_once('=').unwrap_or((a, "true"));
        pod.annotations.get(name).is_some_and(|v| v == value)
    };
    match pod.annotations.get(ENABLED).map(String::as_str) {
        Some("true") => Some(Ok(true)),
        Some("false") => Some(Ok(false)),
        Some(_) => Some(Err(WhyNot::Unreadable)),
        None => listed.any(has).then_some(Ok(true)),
    }
}

/// Does the pod's namespace decide, because the pod says nothing itself?
pub fn is_up_to_namespace(config: &PodsConfig, pod: &PodSandbox) -> bool {
    own_word(config, pod).is_none()
}

/// Does the pod ask? Its own word wins, then its namespace's.
fn asks(config: &PodsConfig, cluster: &Cluster, pod: &PodSandbox) -> Result<bool, WhyNot> {
    let namespaces = || match cluster.namespaces.get(&pod.namespace).map(String::as_str) {
        Some("true") => Ok(true),
        Some("false") => Ok(false),
        Some(_) => Err(WhyNot::UnreadableNamespace),
        None => Ok(config.include.contains(&pod.namespace)),
    };
    own_word(config, pod).unwrap_or_else(namespaces)
}

/// Decides about a container that is about to be made. `in_place`: is what it would be given there?
pub fn decide(
    config: &PodsConfig,
    cluster: &Cluster,
    pod: &PodSandbox,
    container: &Container,
    in_place: &Result<(), String>,
) -> Decision {
    match asks(config, cluster, pod) {
        Ok(true) => {}
        Ok(false) => return Decision::Unasked,
        Err(why) => return Decision::Not(why),
    }
    // (By the plugin that the runtime has started itself.)
    if is_injected(config, container) {
        return Decision::Has;
    }
    if config.exclude.contains(&pod.namespace) {
        return Decision::Not(WhyNot::Excluded);
    }
    if let Some(names) = pod.annotations.get(CONTAINERS) {
        if !names.split(',').any(|n| n.trim() == container.name) {
            return Decision::Not(WhyNot::NotNamed);
        }
    } else if cluster.is_init(&pod.uid, &container.name) {
        return Decision::Not(WhyNot::Init);
    }
    if !pod.handler.is_empty() && !config.handlers.contains(&pod.handler) {
        return Decision::Not(WhyNot::Handler(pod.handler.clone()));
    }
    if variables(container, PRELOAD).count() > 1 {
        return Decision::Not(WhyNot::Twice);
    }
    if variables(container, DIR_ENV).any(|d| !MOUNTED_AT.contains(&d)) {
        return Decision::Not(WhyNot::Elsewhere);
    }
    let own = mounted(config, container);
    let Some(at) = own.or_else(|| place(container)) else {
        return Decision::Not(WhyNot::Taken);
    };
    match in_place {
        Err(e) => Decision::Not(WhyNot::NotInPlace(e.clone())),
        Ok(()) => {
            let mut adjustment = adjustment(config, container, at);
            if own.is_some() {
                adjustment.mounts.clear();
            }
            Decision::Inject(adjustment)
        }
    }
}

/// The same for a container that is there.
pub fn look_back(
    config: &PodsConfig,
    cluster: &Cluster,
    pod: &PodSandbox,
    container: &Container,
) -> Decision {
    // (Its pod may have asked when it was made, or the configuration may have been another.)
    if is_injected(config, container) {
        return Decision::Has;
    }
    match decide(config, cluster, pod, container, &Ok(())) {
        Decision::Inject(_) => Decision::Not(WhyNot::Before),
        other => other,
    }
}

/// Does the container have the shim from this daemon?
fn is_injected(config: &PodsConfig, container: &Container) -> bool {
    let preload = variables(container, PRELOAD).last().unwrap_or_default();
    let dir = variables(container, DIR_ENV).last().unwrap_or_default();
    // (The webhook has given it: the kubelet has mounted the directory at a place of its own first. What else would be there
    // with these variables?)
    let by_kubelet = |m: &Mount| m.source.contains(KUBELET_CSI) && dir == m.destination;
    let ours = |m: &&Mount| is_own(config, m) || by_kubelet(m);
    let mut all = container.mounts.iter().filter(ours);
    all.any(|m| preloads(preload, &library(&m.destination)))
}

fn is_own(config: &PodsConfig, mount: &Mount) -> bool {
    config.dir == Path::new(&mount.source)
}

/// Where the directory is mounted already, without the variables.
fn mounted(config: &PodsConfig, container: &Container) -> Option<&'static str> {
    let mut own = container.mounts.iter().filter(|m| is_own(config, m));
    own.find_map(|m| MOUNTED_AT.into_iter().find(|at| *at == m.destination))
}

/// Where the directory can be mounted, if it can.
fn place(container: &Container) -> Option<&'static str> {
    // (In most images /var/run leads to /run.)
    let all = container.mounts.iter().map(|m| {
        let at = m.destination.trim_end_matches('/');
        at.strip_prefix("/var")
            .filter(|r| is_in(r, "/run"))
            .unwrap_or(at)
    });
    let all: Vec<&str> = all.collect();
    let free = |at: &str| all.iter().all(|m| !is_in(at, m) || m.is_empty());
    if all.iter().any(|m| MOUNTED_AT.iter().any(|at| is_in(m, at))) {
        return None;
    }
    MOUNTED_AT.into_iter().find(|at| free(at))
}

/// Is a path that directory, or below it?
fn is_in(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir)
        .is_some_and(|r| r.is_empty() || r.starts_with('/'))
}

fn library(at: &str) -> String {
    format!("{at}/{SHIM}")
}

/// The values of a variable, of which there should be one at most.
fn variables<'a>(container: &'a Container, name: &'a str) -> impl Iterator<Item = &'a str> {
    let all = container.env.iter();
    all.filter_map(move |v| v.strip_prefix(name)?.strip_prefix('='))
}

/// Does this value of LD_PRELOAD name the library? (Its names are separated by colons or spaces.)
fn preloads(value: &str, library: &str) -> bool {
    value.split([':', ' ']).any(|l| l == library)
}

fn adjustment(config: &PodsConfig, container: &Container, at: &str) -> Adjustment {
    let library = library(at);
    let mut env = Vec::new();
    let mut set = |key: &str, value: String| {
        if variables(container, key).next().is_some() {
            // (Without this, the runtime refuses to change what a plugin before us has set.)
            env.push(KeyValue {
                key: format!("-{key}"),
                value: String::new(),
            });
        }
        env.push(KeyValue {
            key: key.into(),
            value,
        });
    };
    let old = |key| variables(container, key).last().unwrap_or_default();
    match old(PRELOAD) {
        v if preloads(v, &library) => {}
        v => {
            let new = environ::preload(Path::new(&library), Some(OsStr::new(v)));
            set(PRELOAD, new.to_string_lossy().into_owned());
        }
    }
    if old(DIR_ENV) != at {
        set(DIR_ENV, at.into());
    }
    let before = old(environ::ASAN);
    let options = environ::asan_options(Some(before.as_ref()));
    if options != *before {
        set(environ::ASAN, options.to_string_lossy().into_owned());
    }
    // (Not `rslave`: what is in the directory is seen without it, and a runtime refuses to make a container with it if the
    // node's mount is private.)
    let options = ["bind", "ro", "nosuid", "nodev"];
    Adjustment {
        mounts: vec![Mount {
            destination: at.into(),
            kind: "bind".into(),
            source: config.dir.to_string_lossy().into_owned(),
            options: options.map(String::from).into(),
        }],
        env,
    }
}

#[cfg(test)]
mod tests;
