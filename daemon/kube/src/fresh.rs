//! What the API says now, for decisions that are not made from a watch which may be behind. Whoever decides waits for it on a
//! thread of its own, and not for long.

use super::learn::{init_containers, word_of};
use super::Learnt;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{Api, Client, ResourceExt};
use std::sync::mpsc::{sync_channel, SyncSender};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use underpass_pods::cluster::Cluster;

/// Questions that wait to be asked; more are dropped, and what was learnt counts.
pub(crate) const QUESTIONS: usize = 16;
/// Nobody waits for an answer any more.
const LATE: Duration = Duration::from_secs(1);

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// The word of the namespace of this name.
    Namespace(String),
    /// The init containers of a pod.
    Pod {
        namespace: String,
        name: String,
        uid: String,
    },
}

/// A question, and who waits for the answer.
pub type Asked = (Question, SyncSender<Fresh>);

/// What was answered, and counts instead of what was learnt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fresh {
    /// A namespace and its word, if it has one.
    pub namespace: Option<(String, Option<String>)>,
    /// A pod's uid, and the names of its init containers.
    pub init: Option<(String, Vec<String>)>,
}

impl Fresh {
    fn put_in(&self, c: &mut Cluster) {
        match self.namespace.clone() {
            Some((name, Some(word))) => drop(c.namespaces.insert(name, word)),
            Some((name, None)) => drop(c.namespaces.remove(&name)),
            None => {}
        }
        c.init.extend(self.init.clone());
    }
}

impl Learnt {
    /// The same as [`Learnt::with`], where `fresh` counts more.
    pub fn with_fresh<R>(&self, fresh: &Fresh, f: impl FnOnce(&Cluster) -> R) -> R {
        if *fresh == Fresh::default() {
            return self.with(f);
        }
        let mut cluster = self.with(Cluster::clone);
        fresh.put_in(&mut cluster);
        f(&cluster)
    }

    /// Asks for the namespace's word if the watch of namespaces may be behind. Waits until `end` at most.
    pub fn look_at_namespace(&self, name: &str, end: Instant, fresh: &mut Fresh) {
        if !self.namespaces.is_current() {
            let answer = self.ask(Question::Namespace(name.into()), end);
            fresh.namespace = answer.and_then(|a| a.namespace);
        }
    }

    /// Asks for the init containers of a pod that is not known, if the watch of pods may be behind. Waits until `end` at most.
    pub fn look_at_pod(
        &self,
        (namespace, name, uid): (&str, &str, &str),
        end: Instant,
        fresh: &mut Fresh,
    ) {
        if self.pods.is_current() || self.with(|c| c.init.contains_key(uid)) {
            return;
        }
        let pod = Question::Pod {
            namespace: namespace.into(),
            name: name.into(),
            uid: uid.into(),
        };
        fresh.init = self.ask(pod, end).and_then(|a| a.init);
    }

    /// `None`: nobody says it in time.
    fn ask(&self, question: Question, end: Instant) -> Option<Fresh> {
        let (to, answer) = sync_channel(1);
        self.asker.get()?.try_send((question, to)).ok()?;
        let left = end.saturating_duration_since(Instant::now());
        answer.recv_timeout(left).ok()
    }

    /// Once: who is asked.
    pub fn ask_by(&self, asker: mpsc::Sender<Asked>) {
        let _ = self.asker.set(asker); // (the first stays)
    }
}

/// For ever: answers.
pub(super) async fn answer(client: Client, asked: &mut mpsc::Receiver<Asked>) {
    while let Some((question, to)) = asked.recv().await {
        let client = client.clone();
        // (One that takes its time keeps no other waiting.)
        tokio::spawn(async move {
            match tokio::time::timeout(LATE, look(&client, question)).await {
                Ok(Ok(fresh)) => drop(to.try_send(fresh)), // (who asked may be gone)
                Ok(Err(e)) => tracing::debug!("Kubernetes API: {e}"),
                Err(_) => tracing::debug!("Kubernetes API: no answer"),
            }
        });
    }
}

async fn look(client: &Client, question: Question) -> kube::Result<Fresh> {
    let mut fresh = Fresh::default();
    match question {
        Question::Namespace(name) => {
            let word = namespace(client, &name).await?;
            fresh.namespace = Some((name, word));
        }
        Question::Pod {
            namespace,
            name,
            uid,
        } => {
            let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
            let pod = pods.get_opt(&name).await?;
            // (There may be another pod of this name by now.)
            let pod = pod.filter(|p| p.uid().is_some_and(|u| u == uid));
            let init = pod.and_then(|p| p.spec).map(|s| init_containers(&s));
            fresh.init = init.map(|names| (uid, names));
        }
    }
    Ok(fresh)
}

/// What a namespace says now; nothing, if it is not there.
pub async fn namespace(client: &Client, name: &str) -> kube::Result<Option<String>> {
    let all: Api<Namespace> = Api::all(client.clone());
    let n = all.get_metadata_opt(name).await?;
    Ok(n.and_then(|n| word_of(n.annotations())))
}

#[cfg(test)]
mod tests;
