//! Watches.

use super::{Learnt, Watched};
use futures_util::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Namespace, Pod, PodSpec};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, watcher, Event};
use kube::runtime::WatchStreamExt;
use kube::{Api, Client, ResourceExt};
use std::collections::BTreeMap;
use std::pin::pin;
use underpass_pods::policy::ENABLED;

/// The restart policy of an init container that goes on beside the others (Kubernetes 1.28).
const ALWAYS: &str = "Always";

/// Characters of an annotation's value that are kept.
const WORD_MAX: usize = 16;
/// Objects of one answer: each may be large.
const PAGE: u32 = 100;

/// Lists come from the API server's memory, as the kubelets' do: there is a daemon on every node.
fn config() -> watcher::Config {
    watcher::Config::default().any_semantic().page_size(PAGE)
}

/// For ever: the annotations of namespaces.
pub(super) async fn namespaces(client: Client, learnt: &Learnt) {
    let all: Api<PartialObjectMeta<Namespace>> = Api::all(client);
    let events = watcher(all, config()).default_backoff();
    let word = |n: &PartialObjectMeta<Namespace>| {
        let word = n.annotations().get(ENABLED)?;
        // (Longer ones mean nothing, and there may be many of them.)
        Some((n.name_any(), word.chars().take(WORD_MAX).collect()))
    };
    follow(
        events,
        "namespaces",
        word,
        PartialObjectMeta::name_any,
        |is| learnt.set_watching(Watched::Namespaces, is),
        |change| learnt.change(|c| change.make(&mut c.namespaces)),
    )
    .await;
}

/// For ever: the pods of this node.
pub(super) async fn pods(client: Client, node: &str, learnt: &Learnt) {
    let all: Api<Pod> = Api::all(client);
    let config = config().fields(&format!("spec.nodeName={node}"));
    let events = watcher(all, config).default_backoff();
    let uid = |p: &Pod| p.uid().unwrap_or_default();
    follow(
        events,
        "pods",
        |p| {
            Some((
                uid(p),
                p.spec.as_ref().map(init_containers).unwrap_or_default(),
            ))
        },
        uid,
        |is| learnt.set_watching(Watched::Pods, is),
        |change| learnt.change(|c| change.make(&mut c.init)),
    )
    .await;
}

/// Names of a pod's init containers, without those that go on beside the others.
pub fn init_containers(pod: &PodSpec) -> Vec<String> {
    let all = pod.init_containers.iter().flatten();
    let ends = all.filter(|c| c.restart_policy.as_deref() != Some(ALWAYS));
    ends.map(|c| c.name.clone()).collect()
}

/// What a watch has told.
#[derive(Debug, PartialEq)]
enum Change<V> {
    /// This is all that there is.
    All(BTreeMap<String, V>),
    /// This is there; without a value, it counts for nothing.
    One(String, Option<V>),
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

/// Hands on what a watch tells. `value` is what is wanted of an object, `key` what it is known by; `watching` is told
/// whether the list is whole and followed.
async fn follow<K, V>(
    events: impl Stream<Item = watcher::Result<Event<K>>>,
    what: &str,
    value: impl Fn(&K) -> Option<(String, V)>,
    key: impl Fn(&K) -> String,
    watching: impl Fn(bool),
    change: impl Fn(Change<V>),
) {
    let mut events = pin!(events);
    let (mut list, mut failing) = (BTreeMap::new(), false);
    while let Some(event) = events.next().await {
        match event {
            Err(e) => {
                watching(false);
                if !failing {
                    tracing::warn!("Kubernetes API, {what}: {e}; trying again");
                }
                failing = true;
                continue;
            }
            // (The old list counts until the new one is whole.)
            Ok(Event::Init) => list.clear(),
            Ok(Event::InitApply(object)) => list.extend(value(&object)),
            Ok(Event::InitDone) => {
                change(Change::All(std::mem::take(&mut list)));
                tracing::info!("Kubernetes API: {what} are watched");
                watching(true);
            }
            Ok(Event::Apply(object)) => {
                let value = value(&object).map(|(_, v)| v);
                change(Change::One(key(&object), value));
            }
            Ok(Event::Delete(object)) => change(Change::One(key(&object), None)),
        }
        failing = false;
    }
}
