//! Watches.

use super::current::Watching;
use super::nodes::{usable, NodeAt, Nodes, Placed};
use super::Learnt;
use futures_util::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, PodSpec};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, watcher, Event};
use kube::runtime::WatchStreamExt;
use kube::{Api, Client, ResourceExt};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::pin::pin;
use underpass_admin::Where;
use underpass_pods::policy::ENABLED;

/// The restart policy of an init container that goes on beside the others (Kubernetes 1.28).
const ALWAYS: &str = "Always";

/// Characters of an annotation's value that are kept.
const WORD_MAX: usize = 16;
/// Objects of one answer: each may be large.
const PAGE: u32 = 100;

/// Pods of one answer, where all pods are asked for.
const PODS: u32 = 500;
/// What network plugins write of a pod's interfaces (Multus and others).
const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";

/// Lists come from the API server's memory, as the kubelets' do: there is a daemon on every node.
fn config() -> watcher::Config {
    watcher::Config::default().any_semantic().page_size(PAGE)
}

/// For ever: the annotations of namespaces.
pub(super) async fn namespaces(client: Client, learnt: &Learnt) {
    let all: Api<PartialObjectMeta<Namespace>> = Api::all(client);
    let events = watcher(all, config()).default_backoff();
    let word = |n: &PartialObjectMeta<Namespace>| word_of(n.annotations());
    let mut list = List(BTreeMap::new());
    follow(
        events,
        "namespaces",
        word,
        PartialObjectMeta::name_any,
        Some(&learnt.namespaces),
        |told| {
            if let Some(change) = list.take(told) {
                learnt.change(|c| change.make(&mut c.namespaces));
            }
        },
    )
    .await;
}

/// For ever: the pods of this node.
pub(super) async fn pods(client: Client, node: &str, learnt: &Learnt) {
    let all: Api<Pod> = Api::all(client);
    let config = config().fields(&format!("spec.nodeName={node}"));
    let events = watcher(all, config).default_backoff();
    let uid = |p: &Pod| p.uid().unwrap_or_default();
    let mut list = List(BTreeMap::new());
    follow(
        events,
        "pods",
        |p| {
            let init = p.spec.as_ref().map(init_containers).unwrap_or_default();
            Some((init, containers(p)))
        },
        uid,
        Some(&learnt.pods),
        |told| {
            let Some(change) = list.take(told) else {
                return;
            };
            let (init, containers) = change.split();
            learnt.change(|c| init.make(&mut c.init));
            containers.make(&mut learnt.containers.lock());
        },
    )
    .await;
}

/// For ever: the nodes and their addresses.
pub(super) async fn nodes(client: Client, nodes: &Nodes) {
    let all: Api<Node> = Api::all(client);
    let events = watcher(all, config()).default_backoff();
    let mut list = List(BTreeMap::new());
    follow(
        events,
        "nodes",
        |n| Some(node_at(n)),
        |n| n.name_any(),
        None,
        |told| match list.take(told) {
            Some(Change::All(all)) => nodes.set_nodes(&all),
            Some(Change::One(name, node)) => nodes.set_node(&name, node.as_ref()),
            None => {}
        },
    )
    .await;
}

/// For ever: where the cluster's pods are.
pub(super) async fn places(client: Client, nodes: &Nodes) {
    let all: Api<Pod> = Api::all(client);
    // (In parts: the API server's memory would give them all at once.)
    let config = watcher::Config::default().page_size(PODS);
    follow_places(watcher(all, config).default_backoff(), nodes).await;
}

async fn follow_places(events: impl Stream<Item = watcher::Result<Event<Pod>>>, nodes: &Nodes) {
    // (Counts at once, pod by pod: a second list of all would take as much memory as the first.)
    let mut listed = HashSet::new();
    follow(
        events,
        "places of pods",
        placed,
        |p| p.uid().unwrap_or_default(),
        None,
        |told| match told {
            Told::Begin => listed = HashSet::new(),
            Told::Listed(uid, placed) => {
                nodes.set_pod(&uid, Some(&placed));
                listed.insert(uid.into_boxed_str());
            }
            Told::Whole => nodes.keep_pods(&std::mem::take(&mut listed)),
            Told::One(uid, placed) => nodes.set_pod(&uid, placed.as_ref()),
        },
    )
    .await;
}

/// Where it is, the address within the cluster first, and since when it is a node.
fn node_at(node: &Node) -> NodeAt {
    let status = node.status.iter();
    let all = status.flat_map(|s| s.addresses.iter().flatten());
    let of = |kind: &'static str| {
        let all = all.clone().filter(move |a| a.type_ == kind);
        all.filter_map(|a| a.address.parse().ok())
    };
    let all: Vec<IpAddr> = of("InternalIP").chain(of("ExternalIP")).collect();
    NodeAt {
        addresses: usable(&all).collect(),
        since: node
            .metadata
            .creation_timestamp
            .as_ref()
            .map_or(0, |t| t.0.as_second()),
    }
}

/// Where it is and what addresses it has; `None`: none of its own.
fn placed(pod: &Pod) -> Option<Placed> {
    let (spec, status) = (pod.spec.as_ref()?, pod.status.as_ref()?);
    let ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    // (On the node's network its addresses are the node's.)
    if ended || spec.host_network == Some(true) {
        return None;
    }
    let told = status.pod_ips.iter().flatten().map(|p| &p.ip);
    let told = told.chain(&status.pod_ip).filter_map(|ip| ip.parse().ok());
    let mut told: Vec<IpAddr> = told.collect();
    told.sort_unstable();
    told.dedup();
    let written = pod.annotations().get(NETWORK_STATUS);
    Some(Placed {
        node: spec.node_name.clone()?,
        written: written.map(|w| interfaces(w, &told)).unwrap_or_default(),
        told,
    })
}

/// The addresses of a pod's interfaces by its annotation, but for those known otherwise.
fn interfaces(text: &str, told: &[IpAddr]) -> Vec<IpAddr> {
    #[derive(Deserialize)]
    struct Interface {
        #[serde(default)]
        ips: Vec<String>,
    }
    let all: Vec<Interface> = serde_json::from_str(text).unwrap_or_default();
    let ips = all.iter().flat_map(|i| &i.ips);
    let ips = ips.filter_map(|ip| ip.parse().ok());
    ips.filter(|ip| !told.contains(ip)).collect()
}

/// The containers that it has now, by their ids.
fn containers(pod: &Pod) -> HashMap<String, Where> {
    let uid = pod.uid().unwrap_or_default();
    let status = pod.status.iter();
    let all = status.flat_map(|s| {
        let all = [&s.container_statuses, &s.init_container_statuses];
        all.into_iter().flatten().flatten()
    });
    let known = all.filter_map(|c| {
        // (As in `containerd://ID`.)
        let (_, id) = c.container_id.as_ref()?.split_once("://")?;
        let at = Where {
            namespace: pod.namespace().unwrap_or_default(),
            pod: pod.name_any(),
            container: c.name.clone(),
            sandbox: uid.clone(),
            id: id.to_owned(),
        };
        Some((id.to_owned(), at))
    });
    known.collect()
}

/// The word of a namespace.
pub(super) fn word_of(annotations: &BTreeMap<String, String>) -> Option<String> {
    let word = annotations.get(ENABLED)?;
    // (Longer ones mean nothing, and there may be many of them.)
    Some(word.chars().take(WORD_MAX).collect())
}

/// Names of a pod's init containers, without those that go on beside the others.
pub fn init_containers(pod: &PodSpec) -> Vec<String> {
    let all = pod.init_containers.iter().flatten();
    let ends = all.filter(|c| c.restart_policy.as_deref() != Some(ALWAYS));
    ends.map(|c| c.name.clone()).collect()
}

/// What a watch tells.
#[derive(Debug, PartialEq)]
enum Told<V> {
    /// A list begins.
    Begin,
    /// This is in it.
    Listed(String, V),
    /// It is whole: there is nothing else.
    Whole,
    /// This is there; without a value, it counts for nothing.
    One(String, Option<V>),
}

/// For a table whose old list counts until the new one is whole.
#[derive(Debug)]
struct List<V>(BTreeMap<String, V>);

impl<V> List<V> {
    /// What there is to change now.
    fn take(&mut self, told: Told<V>) -> Option<Change<V>> {
        match told {
            Told::Begin => self.0.clear(),
            Told::Listed(key, value) => drop(self.0.insert(key, value)),
            Told::Whole => return Some(Change::All(std::mem::take(&mut self.0))),
            Told::One(key, value) => return Some(Change::One(key, value)),
        }
        None
    }
}

/// A change of a table.
#[derive(Debug, PartialEq)]
enum Change<V> {
    /// This is all that there is.
    All(BTreeMap<String, V>),
    One(String, Option<V>),
}

impl<A, B> Change<(A, B)> {
    /// The same of two tables.
    fn split(self) -> (Change<A>, Change<B>) {
        match self {
            Change::All(all) => {
                let (mut a, mut b) = (BTreeMap::new(), BTreeMap::new());
                for (key, (x, y)) in all {
                    a.insert(key.clone(), x);
                    b.insert(key, y);
                }
                (Change::All(a), Change::All(b))
            }
            Change::One(key, value) => {
                let (x, y) = value.unzip();
                (Change::One(key.clone(), x), Change::One(key, y))
            }
        }
    }
}

impl<V> Change<V> {
    fn make(self, table: &mut BTreeMap<String, V>) {
        match self {
            Change::All(all) => *table = all,
            Change::One(key, Some(value)) => {
                table.insert(key, value);
            }
            Change::One(key, None) => {
                table.remove(&key);
            }
        }
    }
}

/// Hands on what a watch tells. `value` is what is wanted of an object, `key` what it is known by; `watching` is told how the
/// watch fares.
async fn follow<K, V>(
    events: impl Stream<Item = watcher::Result<Event<K>>>,
    what: &str,
    value: impl Fn(&K) -> Option<V>,
    key: impl Fn(&K) -> String,
    watching: Option<&Watching>,
    mut tell: impl FnMut(Told<V>),
) {
    let mut events = pin!(events);
    let mut failing = false;
    while let Some(event) = events.next().await {
        match event {
            Err(e) => {
                watching.iter().for_each(|w| w.broken());
                if !failing {
                    tracing::warn!("Kubernetes API, {what}: {e}; trying again");
                }
                failing = true;
                continue;
            }
            Ok(Event::Init) => tell(Told::Begin),
            Ok(Event::InitApply(object)) => {
                if let Some(value) = value(&object) {
                    tell(Told::Listed(key(&object), value));
                }
            }
            Ok(Event::InitDone) => {
                tell(Told::Whole);
                tracing::info!("Kubernetes API: {what} are watched");
                watching.iter().for_each(|w| w.listed());
            }
            Ok(Event::Apply(object)) => tell(Told::One(key(&object), value(&object))),
            Ok(Event::Delete(object)) => tell(Told::One(key(&object), None)),
        }
        failing = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn where_a_pod_is() {
        let pod = |phase: &str, host: bool| -> Pod {
            let status = json!([
                {"name": "cni", "interface": "eth0", "ips": ["10.1.0.5"], "default": true},
                {"name": "rail1", "interface": "net1", "ips": ["192.168.1.5", "fd01::5"], "mac": "x"},
                {"name": "odd"},
            ]);
            serde_json::from_value(json!({
                "metadata": {"annotations": {NETWORK_STATUS: status.to_string()}},
                "spec": {"nodeName": "a", "hostNetwork": host, "containers": []},
                "status": {"phase": phase, "podIP": "10.1.0.5",
                           "podIPs": [{"ip": "10.1.0.5"}, {"ip": "fd00::5"}]},
            }))
            .unwrap()
        };
        let ips =
            |all: &[&str]| -> Vec<IpAddr> { all.iter().map(|s| s.parse().unwrap()).collect() };
        let p = placed(&pod("Running", false)).unwrap();
        assert_eq!(p.node, "a");
        assert_eq!(p.told, ips(&["10.1.0.5", "fd00::5"]));
        assert_eq!(p.written, ips(&["192.168.1.5", "fd01::5"]));
        // Addresses of ended pods are given to others.
        assert_eq!(placed(&pod("Succeeded", false)), None);
        assert_eq!(placed(&pod("Failed", false)), None);
        assert_eq!(placed(&pod("Running", true)), None);
        assert!(interfaces("{", &[]).is_empty());
        assert!(interfaces("[{\"ips\": [\"x\"]}]", &[]).is_empty());
    }

    /// Pages of this process that are resident, and the most that there were, in MiB.
    fn resident() -> [u64; 2] {
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        ["VmRSS:", "VmHWM:"].map(|what| {
            let line = text.lines().find(|l| l.starts_with(what)).unwrap();
            let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
            kib >> 10
        })
    }

    /// The largest clusters that Kubernetes supports have half as many pods.
    #[test]
    fn a_large_cluster_takes_little_memory() {
        const NODES: u32 = 10_000;
        const PODS: u32 = 300_000;
        let pod = |n: u32, generation: u32| {
            let mut p = Pod::default();
            p.metadata.uid = Some(format!("0a1b2c3d-4e5f-6789-abcd-{:012x}", n));
            let spec = p.spec.get_or_insert_default();
            spec.node_name = Some(format!("node-{:05}.example", (n + generation) % NODES));
            let status = p.status.get_or_insert_default();
            status.phase = Some("Running".into());
            let ip = |k: u32| std::net::Ipv4Addr::from(0x0a00_0000 + k).to_string();
            status.pod_ip = Some(ip(n + 65_536 * generation));
            p
        };
        let all: BTreeMap<String, NodeAt> = (0..NODES)
            .map(|n| {
                let ip = std::net::Ipv4Addr::from(0xac10_0000 + n);
                let node = NodeAt {
                    addresses: vec![ip.into()],
                    since: 1,
                };
                (format!("node-{n:05}.example"), node)
            })
            .collect();
        let before = resident();
        let nodes = Nodes::default();
        nodes.set_nodes(&all);
        let list = (0..PODS).map(|n| Event::InitApply(pod(n, 0)));
        // Some pods are made anew elsewhere; then the whole list is told once more, as after an outage.
        let moved = (0..PODS / 3).map(|n| Event::Apply(pod(n, 1)));
        let again = (0..PODS).map(|n| Event::InitApply(pod(n, 1)));
        let events = std::iter::once(Event::Init)
            .chain(list)
            .chain([Event::InitDone])
            .chain(moved)
            .chain([Event::Init])
            .chain(again)
            .chain([Event::InitDone]);
        let stream = futures_util::stream::iter(events.map(Ok));
        let rt = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        rt.block_on(follow_places(stream, &nodes));
        let after = resident();
        println!(
            "{NODES} nodes, {PODS} pods: {} MiB, at most {} MiB while they are listed",
            after[0] - before[0],
            after[1] - before[0],
        );
        let at = IpAddr::from([10, 1, 0, 7]);
        assert_eq!(nodes.owner(at).as_deref(), Some("node-00008.example"));
        assert!(after[1] - before[0] < 192, "{before:?} {after:?}");
    }

    #[test]
    fn whose_container_it_is() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "web-0", "namespace": "shop", "uid": "u"},
            "status": {
                "containerStatuses": [
                    {"name": "main", "containerID": "containerd://c1", "image": "", "imageID": "",
                     "ready": true, "restartCount": 0},
                    {"name": "waits", "image": "", "imageID": "", "ready": false, "restartCount": 0},
                ],
                "initContainerStatuses": [
                    {"name": "before", "containerID": "cri-o://c2", "image": "", "imageID": "",
                     "ready": true, "restartCount": 0},
                ],
            },
        }))
        .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let learnt = Learnt::kept_in(dir.path().join("c"));
        let told = |pod: Option<&Pod>| {
            let value = pod.map(|p| (Vec::<String>::new(), containers(p)));
            let (_, containers) = Change::One("u".into(), value).split();
            containers.make(&mut learnt.containers.lock());
        };
        told(Some(&pod));
        let at = learnt.container("c1").unwrap();
        assert_eq!(
            (&*at.namespace, &*at.pod, &*at.container),
            ("shop", "web-0", "main")
        );
        assert_eq!(learnt.container("c2").unwrap().container, "before");
        assert_eq!(learnt.container("c3"), None);
        told(None);
        assert_eq!(learnt.container("c1"), None);
    }

    #[test]
    fn where_a_node_is() {
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "a", "creationTimestamp": "1970-01-01T00:01:00Z"},
            "status": {"addresses": [
                {"type": "Hostname", "address": "10.9.9.9"},
                {"type": "ExternalIP", "address": "192.0.2.1"},
                {"type": "InternalIP", "address": "10.0.0.1"},
                {"type": "InternalIP", "address": "fd00::1"},
            ]},
        }))
        .unwrap();
        let NodeAt { addresses, since } = node_at(&node);
        let all: Vec<String> = addresses.iter().map(|a| a.to_string()).collect();
        assert_eq!(all, ["10.0.0.1", "fd00::1", "192.0.2.1"]);
        assert_eq!(since, 60);
    }
}
