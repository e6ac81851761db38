//! The thread that speaks with the container runtime.

use super::in_place::{InPlace, Keeper};
use super::known::Known;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use underpass_kube::{Event, Learnt, Teller};
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
/// How much of it a container waits for the API's word about a pod that the runtime has told of first.
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
    /// are not known yet.
    fn await_word(&self, pod: &PodSandbox, end: Instant) {
        let source = pod.annotations.get(SOURCE.0);
        let from_api = source.is_none_or(|s| s == SOURCE.1);
        let end = end.min(Instant::now() + LATE);
        while from_api && self.learnt.awaits(&pod.uid) && Instant::now() < end {
            std::thread::sleep(LATE / 10);
        }
    }

    fn answer(&mut self, pod: PodSandbox, container: Container) -> Option<Adjustment> {
        let end = Instant::now() + LIMIT;
        let (config, learnt) = (&self.config, &self.learnt);
        let decide = |in_place: &_| {
            let by = |cluster: &_| policy::decide(config, cluster, &pod, &container, in_place);
            learnt.with(by)
        };
        let mut decision = decide(&Ok(()));
        // (Who does not get it in any case waits for nothing.)
        if matches!(decision, Decision::Inject(_)) {
            let in_place = self.in_place.now(end);
            self.await_word(&pod, end);
            decision = decide(&in_place);
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
    use underpass_pods::policy::ENABLED;

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
