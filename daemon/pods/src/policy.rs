//! What a pod asks for, and what its containers get. Pure: from what the runtime tells, the configuration, and what the
//! cluster says.

use super::cluster::Cluster;
use serde::{Deserialize, Serialize};
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
const PRELOAD: &str = "LD_PRELOAD";

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

/// Does the pod ask? Its own word wins, then its namespace's.
fn asks(config: &PodsConfig, cluster: &Cluster, pod: &PodSandbox) -> Result<bool, WhyNot> {
    let own = pod.annotations.get(ENABLED).map(String::as_str);
    let namespace = cluster.namespaces.get(&pod.namespace);
    let listed = || {
        config.annotations.iter().any(|a| {
            let (name, value) = a.split_once('=').unwrap_or((a, "true"));
            pod.annotations.get(name).is_some_and(|v| v == value)
        })
    };
    match own {
        Some("true") => Ok(true),
        Some("false") => Ok(false),
        Some(_) => Err(WhyNot::Unreadable),
        None if listed() => Ok(true),
        None => match namespace.map(String::as_str) {
            Some("true") => Ok(true),
            Some("false") => Ok(false),
            Some(_) => Err(WhyNot::UnreadableNamespace),
            None => Ok(config.include.contains(&pod.namespace)),
        },
    }
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
    let Some(at) = place(container) else {
        return Decision::Not(WhyNot::Taken);
    };
    match in_place {
        Err(e) => Decision::Not(WhyNot::NotInPlace(e.clone())),
        Ok(()) => Decision::Inject(adjustment(config, container, at)),
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
    let ours = |m: &&Mount| config.dir == Path::new(&m.source);
    let preload = variables(container, PRELOAD).last().unwrap_or_default();
    let mut all = container.mounts.iter().filter(ours);
    all.any(|m| preloads(preload, &library(&m.destination)))
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
        "" => set(PRELOAD, library),
        // The shim comes behind what is there.
        v => set(PRELOAD, format!("{v}:{library}")),
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
mod tests {
    use super::*;

    fn pod(annotations: &[(&str, &str)]) -> PodSandbox {
        PodSandbox {
            namespace: "shop".into(),
            name: "web-0".into(),
            annotations: annotations
                .iter()
                .map(|(k, v)| ((*k).into(), (*v).into()))
                .collect(),
            ..PodSandbox::default()
        }
    }

    fn container(env: &[&str]) -> Container {
        Container {
            name: "web".into(),
            env: env.iter().map(|e| (*e).into()).collect(),
            ..Container::default()
        }
    }

    fn of(config: &PodsConfig, annotations: &[(&str, &str)], c: &Container) -> Decision {
        decide(config, &Cluster::default(), &pod(annotations), c, &Ok(()))
    }

    fn env(d: &Decision) -> Vec<(String, String)> {
        let Decision::Inject(a) = d else {
            panic!("{d:?}");
        };
        let all = a.env.iter();
        all.map(|e| (e.key.clone(), e.value.clone())).collect()
    }

    #[test]
    fn who_asks() {
        let mut config = PodsConfig::default();
        let plain = container(&[]);
        let asks = |c: &PodsConfig, a: &[(&str, &str)]| of(c, a, &plain) != Decision::Unasked;
        assert!(!asks(&config, &[]));
        assert!(asks(&config, &[(ENABLED, "true")]));
        assert!(!asks(&config, &[(ENABLED, "false")]));
        let smcr = "network.alibabacloud.com/erdma-smcr";
        assert!(asks(&config, &[(smcr, "true")]));
        assert!(!asks(&config, &[(smcr, "false")]));
        assert!(
            !asks(&config, &[(smcr, "true"), (ENABLED, "false")]),
            "the pod's own word"
        );
        config.include = vec!["shop".into()];
        assert!(asks(&config, &[]) && !asks(&config, &[(ENABLED, "false")]));
        let not = |c: &PodsConfig, a: &[(&str, &str)], why| {
            assert_eq!(of(c, a, &plain), Decision::Not(why));
        };
        not(&config, &[(ENABLED, "yes")], WhyNot::Unreadable);
        not(&config, &[(CONTAINERS, "web2, db")], WhyNot::NotNamed);
        assert!(matches!(
            of(&config, &[(CONTAINERS, "db, web")], &plain),
            Decision::Inject(_)
        ));
        config.exclude = vec!["shop".into()];
        not(&config, &[(ENABLED, "true")], WhyNot::Excluded);
        assert!(!asks(&config, &[(ENABLED, "false")]), "it did not ask");
    }

    #[test]
    fn what_the_cluster_says() {
        let mut config = PodsConfig::default();
        let mut cluster = Cluster::default();
        let web = container(&[]);
        let of = |config: &PodsConfig, cluster: &Cluster, a: &[(&str, &str)]| {
            let mut p = pod(a);
            p.uid = "u1".into();
            decide(config, cluster, &p, &web, &Ok(()))
        };
        let gets = |d: &Decision| matches!(d, Decision::Inject(_));
        cluster.namespaces.insert("shop".into(), "true".into());
        assert!(gets(&of(&config, &cluster, &[])));
        let unasked = of(&config, &cluster, &[(ENABLED, "false")]);
        assert_eq!(unasked, Decision::Unasked, "the pod's own word wins");
        cluster.namespaces.insert("shop".into(), "false".into());
        assert_eq!(of(&config, &cluster, &[]), Decision::Unasked);
        assert!(gets(&of(&config, &cluster, &[(ENABLED, "true")])));
        let smcr = ("network.alibabacloud.com/erdma-smcr", "true");
        assert!(gets(&of(&config, &cluster, &[smcr])), "also the pod's word");
        config.include = vec!["shop".into()];
        let own = of(&config, &cluster, &[]);
        assert_eq!(
            own,
            Decision::Unasked,
            "the namespace's word before the configuration's"
        );
        cluster.namespaces.insert("shop".into(), "on".into());
        let not = of(&config, &cluster, &[]);
        assert_eq!(not, Decision::Not(WhyNot::UnreadableNamespace));
        cluster.namespaces.clear();
        assert!(gets(&of(&config, &cluster, &[])));
        // Init containers get it if they are named.
        cluster.init.insert("u1".into(), vec!["web".into()]);
        assert_eq!(of(&config, &cluster, &[]), Decision::Not(WhyNot::Init));
        assert!(gets(&of(&config, &cluster, &[(CONTAINERS, "web")])));
        assert!(!WhyNot::Init.is_missed() && WhyNot::Taken.is_missed());
    }

    #[test]
    fn what_it_gets() {
        let config = PodsConfig::default();
        let yes = [(ENABLED, "true")];
        let d = of(&config, &yes, &container(&["PATH=/bin"]));
        let pair = |k: &str, v: &str| (k.to_owned(), v.to_owned());
        let dir = pair("UNDERPASS_DIR", "/run/underpass");
        let ours = pair("LD_PRELOAD", "/run/underpass/libunderpass.so");
        let asan = pair("ASAN_OPTIONS", "verify_asan_link_order=0");
        assert_eq!(env(&d), [ours.clone(), dir.clone(), asan.clone()]);
        let Decision::Inject(a) = d else {
            unreachable!()
        };
        let m = &a.mounts[0];
        assert_eq!(a.mounts.len(), 1);
        assert_eq!(
            (
                m.destination.as_str(),
                m.source.as_str(),
                m.options.join(",")
            ),
            (
                "/run/underpass",
                "/var/lib/underpass/pods",
                "bind,ro,nosuid,nodev".into()
            )
        );
        // What image or pod preload stays before it.
        let c = container(&["LD_PRELOAD=/a.so /b.so", "ASAN_OPTIONS=detect_leaks=0"]);
        let merged = "/a.so /b.so:/run/underpass/libunderpass.so";
        let removed = pair("-LD_PRELOAD", "");
        let expected = [
            removed.clone(),
            pair("LD_PRELOAD", merged),
            dir.clone(),
            pair("-ASAN_OPTIONS", ""),
            pair("ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0"),
        ];
        assert_eq!(env(&of(&config, &yes, &c)), expected);
        let d = of(&config, &yes, &container(&["LD_PRELOAD="]));
        assert_eq!(env(&d), [removed, ours, dir.clone(), asan.clone()]);
        // Who has written it there by hand gets the directory.
        let own = "LD_PRELOAD=/a.so:/run/underpass/libunderpass.so";
        let d = of(
            &config,
            &yes,
            &container(&[own, "UNDERPASS_DIR=/run/underpass"]),
        );
        assert_eq!(env(&d), [asan]);
    }

    fn mounted(at: &str) -> Container {
        let mut c = container(&[]);
        c.mounts.push(Mount {
            destination: at.into(),
            source: "/elsewhere".into(),
            ..Mount::default()
        });
        c
    }

    #[test]
    fn where_it_is_mounted() {
        let config = PodsConfig::default();
        let yes = [(ENABLED, "true")];
        for (mount, expected) in [
            ("/data", Some("/run/underpass")),
            ("/", Some("/run/underpass")),
            ("/run2", Some("/run/underpass")),
            ("/run/underpass2", Some("/run/underpass")),
            ("/run/lock", Some("/run/underpass")),
            ("/var/lib", Some("/run/underpass")),
            ("/run", Some("/.underpass")),
            ("/run/", Some("/.underpass")),
            ("/var/run", Some("/.underpass")),
            ("/run/underpass", None),
            ("/run/underpass/", None),
            ("/var/run/underpass/x", None),
            ("/.underpass", None),
        ] {
            let at = match of(&config, &yes, &mounted(mount)) {
                Decision::Inject(a) => {
                    let at = a.mounts[0].destination.clone();
                    let all = a.env.iter().map(|e| e.value.clone());
                    let values: Vec<String> = all.collect();
                    assert_eq!(values[..2], [format!("{at}/libunderpass.so"), at.clone()]);
                    Some(at)
                }
                Decision::Not(WhyNot::Taken) => None,
                other => panic!("{other:?}"),
            };
            assert_eq!(at.as_deref(), expected, "{mount}");
        }
    }

    #[test]
    fn who_cannot_get_it() {
        let config = PodsConfig::default();
        let yes = [(ENABLED, "true")];
        let no = Err("no space left".to_owned());
        let d = decide(
            &config,
            &Cluster::default(),
            &pod(&yes),
            &container(&[]),
            &no,
        );
        let Decision::Not(why) = d else {
            panic!("{d:?}");
        };
        assert!(why.to_string().ends_with(": no space left"));
        let not = |c: &Container, why| assert_eq!(of(&config, &yes, c), Decision::Not(why));
        let twice = container(&["LD_PRELOAD=/a.so", "LD_PRELOAD=/b.so"]);
        not(&twice, WhyNot::Twice);
        not(&container(&["UNDERPASS_DIR=/x"]), WhyNot::Elsewhere);
        for (handler, gets) in [("", true), ("runc", true), ("kata", false)] {
            let mut p = pod(&yes);
            p.handler = handler.into();
            let d = decide(&config, &Cluster::default(), &p, &container(&[]), &Ok(()));
            assert_eq!(matches!(d, Decision::Inject(_)), gets, "{handler}");
        }
    }

    #[test]
    fn who_has_it() {
        let (config, none) = (PodsConfig::default(), Cluster::default());
        let yes = [(ENABLED, "true")];
        let mut c = container(&[]);
        assert_eq!(
            look_back(&config, &none, &pod(&yes), &c),
            Decision::Not(WhyNot::Before)
        );
        let Decision::Inject(a) = of(&config, &yes, &c) else {
            panic!();
        };
        c.mounts = a.mounts;
        c.env = a
            .env
            .iter()
            .map(|e| format!("{}={}", e.key, e.value))
            .collect();
        assert_eq!(of(&config, &yes, &c), Decision::Has, "asked a second time");
        let mut other = config.clone();
        other.exclude = vec!["shop".into()];
        for config in [&config, &other] {
            for annotations in [&yes[..], &[]] {
                assert_eq!(
                    look_back(config, &none, &pod(annotations), &c),
                    Decision::Has
                );
            }
        }
        assert_eq!(
            look_back(&config, &none, &pod(&[]), &container(&[])),
            Decision::Unasked
        );
    }
}
