//! What is known of the cluster: annotations of namespaces, and handlers of runtime classes. Watched, so that no pod waits.

use crate::pod::{self, Lookup};
use futures_util::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher::{self, watcher};
use kube::runtime::WatchStreamExt;
use kube::{Api, Client, ResourceExt};
use parking_lot::Mutex;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use underpass_kube::Watching;
use underpass_pods::policy::ENABLED;

/// How long a pod waits for its namespace's word if the watch may be behind.
const LOOK: Duration = Duration::from_millis(500);

type Namespaces = PartialObjectMeta<Namespace>;

/// What the API has said so far. As long as it says nothing more, that counts.
pub struct Seen {
    namespaces: Store<Namespaces>,
    classes: Store<RuntimeClass>,
    listed: AtomicBool,
    /// How the watch of namespaces fares.
    watching: Arc<Watching>,
    /// Who is asked if that may be behind.
    client: OnceLock<Client>,
    /// Until they are followed.
    writers: Mutex<Option<Writers>>,
}

type Writers = (
    reflector::store::Writer<Namespaces>,
    reflector::store::Writer<RuntimeClass>,
);

impl Default for Seen {
    fn default() -> Self {
        let (namespaces, a) = reflector::store();
        let (classes, b) = reflector::store();
        Seen {
            namespaces,
            classes,
            listed: AtomicBool::new(false),
            watching: Arc::new(Watching::namespaces()),
            client: OnceLock::new(),
            writers: Mutex::new(Some((a, b))),
        }
    }
}

impl Seen {
    /// Are all namespaces known? Before that, pods that their namespace asks for go without.
    pub fn is_ready(&self) -> bool {
        self.listed.load(Relaxed) // (orders nothing: the store has a lock of its own)
    }

    /// What its client notes ([`underpass_kube::client`]).
    pub fn watching(&self) -> Arc<Watching> {
        self.watching.clone()
    }

    /// What is known, with the word that the namespace has now. `None`: nobody says it.
    pub(crate) async fn look<'a>(&'a self, namespace: &str) -> Option<Fresh<'a>> {
        let client = self.client.get()?;
        let look = underpass_kube::namespace(client, namespace);
        let word = match tokio::time::timeout(LOOK, look).await {
            Ok(Ok(word)) => word,
            Ok(Err(e)) => {
                tracing::warn!(
                    namespace,
                    "Kubernetes API: {e}: what was known before counts"
                );
                return None;
            }
            Err(_) => {
                tracing::warn!(
                    namespace,
                    "Kubernetes API: no answer: what was known before counts"
                );
                return None;
            }
        };
        Some(Fresh {
            seen: self,
            namespace: namespace.into(),
            word,
        })
    }

    /// Is the watch not known to have told everything, and is there somebody to ask?
    pub(crate) fn may_be_behind(&self) -> bool {
        self.client.get().is_some() && !self.watching.is_current()
    }

    /// Once: who is asked.
    pub(crate) fn ask_by(&self, client: Client) {
        let _ = self.client.set(client); // (the first stays)
    }

    /// For ever. `client`: notes how [`Seen::watching`] fares.
    pub async fn follow(&self, client: Client) {
        let Some((namespaces, classes)) = self.writers.lock().take() else {
            return std::future::pending().await; // somebody follows already
        };
        self.ask_by(client.clone());
        let config = || watcher::Config::default().any_semantic();
        let all: Api<Namespaces> = Api::all(client.clone());
        let events = watcher(all, config()).default_backoff().modify(narrow);
        let events = reflector::reflector(namespaces, events);
        let namespaces = tell("namespaces", events, Some(&self.watching));
        let all: Api<RuntimeClass> = Api::all(client);
        let events = watcher(all, config()).default_backoff();
        let classes = tell(
            "runtime classes",
            reflector::reflector(classes, events),
            None,
        );
        let ready = async {
            if self.namespaces.wait_until_ready().await.is_ok() {
                self.listed.store(true, Relaxed); // (as above)
                self.watching.listed();
                tracing::info!("Kubernetes API: namespaces are watched");
            }
        };
        tokio::join!(namespaces, classes, ready);
    }
}

/// Only what is asked for is kept: there may be many, with much in them.
fn narrow(n: &mut Namespaces) {
    n.metadata.managed_fields = None;
    n.metadata.labels = None;
    if let Some(a) = &mut n.metadata.annotations {
        a.retain(|name, _| name == ENABLED);
    }
}

/// Says once what does not work.
async fn tell<K>(
    what: &str,
    events: impl Stream<Item = watcher::Result<K>>,
    watching: Option<&Watching>,
) {
    let mut events = pin!(events);
    let mut failing = false;
    while let Some(event) = events.next().await {
        if let Err(e) = &event {
            watching.iter().for_each(|w| w.broken());
            if !failing {
                tracing::warn!("Kubernetes API, {what}: {e}; trying again");
            }
        }
        failing = event.is_err();
    }
}

impl Lookup for Seen {
    fn namespace(&self, name: &str) -> Option<String> {
        let n = self.namespaces.get(&ObjectRef::new(name))?;
        pod::word(n.annotations())
    }

    fn handler(&self, class: &str) -> Option<String> {
        let c = self.classes.get(&ObjectRef::new(class))?;
        Some(c.handler.clone())
    }
}

/// What is known, and a namespace's word as it is now.
pub(crate) struct Fresh<'a> {
    seen: &'a Seen,
    namespace: String,
    word: Option<String>,
}

impl Lookup for Fresh<'_> {
    fn namespace(&self, name: &str) -> Option<String> {
        match name == self.namespace {
            true => self.word.clone(),
            false => self.seen.namespace(name),
        }
    }

    fn handler(&self, class: &str) -> Option<String> {
        self.seen.handler(class)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::runtime::watcher::Event;
    use serde_json::json;

    #[test]
    fn what_was_told() {
        let seen = Seen::default();
        let (mut namespaces, mut classes) = seen.writers.lock().take().unwrap();
        let namespace = |word: &str| {
            let mut n: Namespaces = serde_json::from_value(json!({
                "metadata": {"name": "shop", "labels": {"a": "b"},
                             "annotations": {ENABLED: word, "other": "x"}}
            }))
            .unwrap();
            narrow(&mut n);
            assert!(n.labels().is_empty() && n.annotations().len() == 1);
            n
        };
        assert_eq!(seen.namespace("shop"), None);
        namespaces.apply_watcher_event(&Event::Apply(namespace("true")));
        assert_eq!(seen.namespace("shop").as_deref(), Some("true"));
        assert_eq!(seen.namespace("other"), None);
        namespaces.apply_watcher_event(&Event::Delete(namespace("true")));
        assert_eq!(seen.namespace("shop"), None);
        let class: RuntimeClass =
            serde_json::from_value(json!({"metadata": {"name": "gvisor"}, "handler": "runsc"}))
                .unwrap();
        classes.apply_watcher_event(&Event::Apply(class));
        assert_eq!(seen.handler("gvisor").as_deref(), Some("runsc"));
        assert_eq!(seen.handler("kata"), None);
    }
}
