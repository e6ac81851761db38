//! The thread that speaks with the container runtime.

use super::in_place::{InPlace, Keeper};
use super::known::Known;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use underpass_kube::{Event, Fresh, Learnt, Teller};
use underpass_nri::messages::{Adjustment, Configure, Container, PodSandbox};
use underpass_nri::{serve, Plugin};
use underpass_pods::left;
use underpass_pods::policy::{self, Decision, PodsConfig, WhyNot};

/// What the runtime shows; plugins with lower numbers are asked before. (Who sets a variable after another plugin has set it
/// makes the container fail, so this one comes last, and adds to what it finds.)
const NAME: (&str, &str) = ("underpass", "99");
/// Pauses before the socket is tried again: the runtime may be restarting, or not be there yet.
const AGAIN: Duration = Duration::from_millis(200);
const AGAIN_MAX: Duration = Duration::from_secs(5);

/// The longest that the runtime waits for this daemon before it makes a container. Then the container goes without, and it is
/// said why.
const LIMIT: Duration = Duration::from_millis(100);
/// How much of it a container waits for the API's word, once about its pod's namespace and once about its pod.
const LATE: Duration = Duration::from_millis(50);
/// How long the runtime waits, at the daemon's start, for the API's first word.
const FIRST_WORD: Duration = Duration::from_secs(5);
/// A pod's annotation: where the kubelet has it from. What is not from the API is not known there under the same uid.
const SOURCE: (&str, &str) = ("kubernetes.io/config.source", "api");

/// Starts the thread; it ends with the process. `made`: is there a directory for containers, and is it this daemon's? Then
/// the thread fills it. `teller`: who is told of containers that do not get the shim.
pub(crate) fn start(
    config: PodsConfig,
    known: Arc<Known>,
    made: Result<(), String>,
    learnt: Arc<Learnt>,
    teller: Option<Teller>,
) -> io::Result<()> {
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let thread = std::thread::Builder::new().name("underpass-nri".into());
    thread.spawn(move || {
        let keeper = Keeper::new(config.clone(), made);
        let in_place = match InPlace::keep(keeper) {
            Ok(p) => p,
            Err(e) => return tracing::error!("no container gets the shim: a thread: {e}"),
        };
        let mut ours = Containers {
            in_place,
            known,
            learnt,
            teller,
            config: config.clone(),
            runtime: String::new(),
        };
        // A container that is made before the API's word is known would go without the shim, unseen.
        let end = Instant::now() + FIRST_WORD;
        while ours.teller.is_some() && !ours.learnt.is_whole() && Instant::now() < end {
            std::thread::sleep(LATE);
        }
        rt.block_on(async { tokio::join!(leave_for_ever(&config), talk_for_ever(&mut ours)) });
    })?;
    Ok(())
}

/// Leaves what decisions need for when the daemon is away.
async fn leave_for_ever(config: &PodsConfig) {
    loop {
        if let Err(e) = left::leave(config) {
            tracing::warn!("what decisions need is not left for when the daemon is away: {e}");
        }
        tokio::time::sleep(left::AGAIN).await;
    }
}

async fn talk_for_ever(ours: &mut Containers) {
    let path = ours.config.nri.clone();
    let (mut pause, mut said) = (AGAIN, String::new());
    loop {
        let began = Instant::now();
        let why = match talk(&path, ours).await {
            Ok(()) => "the runtime has ended the connection".to_owned(),
            Err(e) => e.to_string(),
        };
        ours.known.set_registered(false);
        if began.elapsed() > AGAIN_MAX {
            (pause, said) = (AGAIN, String::new());
        }
        if why != said {
            tracing::warn!(socket = %path.display(), "container runtime: {why}; trying again");
            said = why;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(AGAIN_MAX);
    }
}

async fn talk(path: &Path, ours: &mut Containers) -> Result<(), underpass_nri::Error> {
    let stream = UnixStream::connect(path).await?;
    serve(stream, NAME, ours).await
}

/// Decides, and notes what there is.
struct Containers {
    config: PodsConfig,
    known: Arc<Known>,
    learnt: Arc<Learnt>,
    teller: Option<Teller>,
    in_place: InPlace,
    /// Who asks, or will do so.
    runtime: String,
}

impl Containers {
    /// The runtime has the pod from the kubelet, which may have heard of it before this daemon did; then its init containers
    /// are not known yet. They are asked for where the watch may be behind.
    fn await_word(&self, pod: &PodSandbox, end: Instant, fresh: &mut Fresh) {
        let source = pod.annotations.get(SOURCE.0);
        if source.is_some_and(|s| s != SOURCE.1) {
            return;
        }
        let end = end.min(Instant::now() + LATE);
        while self.learnt.awaits(&pod.uid) && Instant::now() < end {
            std::thread::sleep(LATE / 10);
        }
        let at = (&*pod.namespace, &*pod.name, &*pod.uid);
        self.learnt.look_at_pod(at, end, fresh);
    }

    fn answer(&mut self, pod: PodSandbox, container: Container) -> Option<Adjustment> {
        let end = Instant::now() + LIMIT;
        let (config, learnt) = (&self.config, &self.learnt);
        let decide = |fresh: &_, in_place: &_| {
            let by = |cluster: &_| policy::decide(config, cluster, &pod, &container, in_place);
            learnt.with_fresh(fresh, by)
        };
        let mut fresh = Fresh::default();
        if policy::is_up_to_namespace(config, &pod) {
            let end = end.min(Instant::now() + LATE);
            learnt.look_at_namespace(&pod.namespace, end, &mut fresh);
        }
        let mut decision = decide(&fresh, &Ok(()));
        // (Who does not get it in any case waits for nothing.)
        if matches!(decision, Decision::Inject(_)) {
            let in_place = self.in_place.now(end);
            self.await_word(&pod, end, &mut fresh);
            decision = decide(&fresh, &in_place);
        }
        self.known.add_pod(pod.clone());
        self.known.made_container(&container, &decision);
        match decision {
            Decision::Inject(a) => {
                tracing::debug!(
                    namespace = pod.namespace,
                    pod = pod.name,
                    container = container.name,
                    "injected"
                );
                Some(a)
            }
            Decision::Not(why) if why.is_missed() => {
                self.refuse(pod, &container.name, &why);
                None
            }
            Decision::Not(_) | Decision::Unasked | Decision::Has => None,
        }
    }

    fn refuse(&self, pod: PodSandbox, container: &str, why: &WhyNot) {
        tracing::warn!(
            namespace = pod.namespace,
            pod = pod.name,
            container,
            "asked for the shim and does not get it: {why}"
        );
        if let Some(t) = &self.teller {
            t.tell(Event {
                namespace: pod.namespace,
                pod: pod.name,
                uid: pod.uid,
                container: container.into(),
                message: why.to_string(),
            });
        }
    }
}

impl Plugin for Containers {
    fn configured(&mut self, runtime: &Configure) {
        self.runtime = format!("{} {}", runtime.runtime, runtime.version);
    }

    fn synchronize(&mut self, pods: Vec<PodSandbox>, containers: Vec<Container>) {
        let look = |p: &PodSandbox, c: &Container| {
            self.learnt
                .with(|cluster| policy::look_back(&self.config, cluster, p, c))
        };
        self.known.replace(pods, containers, look);
        self.known.set_registered(true);
        let runtime = &self.runtime;
        tracing::info!("registered with {runtime}: pods that ask for it get the shim");
    }

    fn create(&mut self, pod: PodSandbox, container: Container) -> Option<Adjustment> {
        let asked = Instant::now();
        let answer = self.answer(pod, container);
        self.known.answered(asked.elapsed());
        answer
    }

    fn pod_made(&mut self, pod: PodSandbox) {
        self.known.add_pod(pod);
    }

    fn pod_gone(&mut self, pod: &PodSandbox) {
        self.known.remove_pod(&pod.id);
    }

    fn container_stopped(&mut self, container: &Container) {
        self.known.stop_container(&container.id);
    }

    fn container_gone(&mut self, container: &Container) {
        self.known.remove_container(&container.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc;
    use underpass_kube::Question;
    use underpass_pods::policy::ENABLED;

    /// Where the watches may be behind, as they are here, the API says what counts: of the namespace if the pod says nothing,
    /// and of the pod's init containers.
    #[test]
    fn what_a_watch_may_have_missed_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cluster.json");
        let old = r#"{"namespaces": {"over": "true"}}"#;
        std::fs::write(&file, old).unwrap();
        let learnt = Arc::new(Learnt::kept_in(file));
        let (asker, mut asked) = mpsc::channel(4);
        learnt.ask_by(asker);
        let api = std::thread::spawn(move || {
            let mut all = Vec::new();
            while let Some((q, to)) = asked.blocking_recv() {
                all.push(q.clone());
                let mut fresh = Fresh::default();
                match q {
                    Question::Namespace(name) => {
                        let word = (name == "new").then(|| "true".into());
                        fresh.namespace = Some((name, word));
                    }
                    Question::Pod { uid, .. } => fresh.init = Some((uid, vec!["first".into()])),
                }
                // (Nobody answers for the last one.)
                if all.len() < 4 {
                    let _ = to.send(fresh);
                }
            }
            all
        });
        let mut ours = Containers {
            in_place: InPlace::slow(Duration::ZERO),
            known: Arc::default(),
            learnt,
            teller: None,
            config: PodsConfig::default(),
            runtime: String::new(),
        };
        let mut made = |namespace: &str, container: &str, word: Option<&str>| {
            let mut pod = PodSandbox {
                id: "s".into(),
                uid: "u".into(),
                name: "web-0".into(),
                namespace: namespace.into(),
                ..PodSandbox::default()
            };
            let word = word.map(|w| (ENABLED.into(), w.into()));
            pod.annotations.extend(word);
            let container = Container {
                id: container.into(),
                pod: "s".into(),
                name: container.into(),
                ..Container::default()
            };
            ours.create(pod, container).is_some()
        };
        assert!(!made("over", "main", None), "the word was taken back");
        assert!(!made("new", "first", None), "an init container");
        assert!(made("over", "main", Some("true")), "its own word counts");
        assert!(!made("over", "main", Some("false")));
        drop(ours);
        let pod = |namespace: &str| Question::Pod {
            namespace: namespace.into(),
            name: "web-0".into(),
            uid: "u".into(),
        };
        let of = |name: &str| Question::Namespace(name.into());
        let all = api.join().unwrap();
        assert_eq!(all, [of("over"), of("new"), pod("new"), pod("over")]);
    }

    /// A disk that does not answer keeps no container from being made, and it is said why it has no shim; who did not ask does
    /// not wait at all.
    #[test]
    fn a_container_does_not_wait_for_a_disk() {
        let known: Arc<Known> = Arc::default();
        let mut ours = Containers {
            in_place: InPlace::slow(Duration::from_secs(60)),
            known: known.clone(),
            learnt: Arc::new(Learnt::kept_in("/none".into())),
            teller: None,
            config: PodsConfig::default(),
            runtime: String::new(),
        };
        let mut pod = PodSandbox {
            id: "s".into(),
            ..PodSandbox::default()
        };
        let container = |id: &str| Container {
            id: id.into(),
            pod: "s".into(),
            name: id.into(),
            ..Container::default()
        };
        assert!(ours.create(pod.clone(), container("a")).is_none());
        assert!(known.answers().sum < LIMIT / 2, "{:?}", known.answers().sum);
        pod.annotations.insert(ENABLED.into(), "true".into());
        assert!(ours.create(pod, container("b")).is_none());
        let took = known.answers().sum;
        assert!(took >= LIMIT && took < LIMIT * 20, "{took:?}");
        let rows = known.rows();
        assert!(!rows[0].wanted && rows[0].why_not.is_empty(), "{rows:?}");
        assert!(
            rows[1].wanted && rows[1].why_not.contains("in time"),
            "{rows:?}"
        );
        assert_eq!(known.counts(), [0, 1]);
    }
}
