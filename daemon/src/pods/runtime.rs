//! The thread that speaks with the container runtime.

use super::known::Known;
use super::place;
use super::policy::{self, Decision, PodsConfig, WhyNot};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use underpass_nri::messages::{Adjustment, Configure, Container, PodSandbox};
use underpass_nri::{serve, Plugin};

/// What the runtime shows; plugins with lower numbers are asked before. (Who sets a variable after another plugin has set it
/// makes the container fail, so this one comes last, and adds to what it finds.)
const NAME: (&str, &str) = ("underpass", "99");
/// Pauses before the socket is tried again: the runtime may be restarting, or not be there yet.
const AGAIN: Duration = Duration::from_millis(200);
const AGAIN_MAX: Duration = Duration::from_secs(5);

/// Starts the thread; it ends with the process. `made`: is there a directory for containers, and is it this daemon's? Then
/// the thread fills it.
pub(crate) fn start(
    config: PodsConfig,
    known: Arc<Known>,
    made: Result<(), String>,
) -> io::Result<()> {
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let thread = std::thread::Builder::new().name("underpass-nri".into());
    thread.spawn(move || {
        let mut ours = Containers {
            filled: made.is_ok().then(Instant::now),
            place: made,
            known,
            config,
        };
        if ours.filled.is_some() {
            ours.fill();
        }
        if let Err(e) = &ours.place {
            tracing::error!("no container gets the shim: {e}");
        }
        rt.block_on(talk_for_ever(&mut ours));
    })?;
    Ok(())
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
    place: Result<(), String>,
    /// When that was tried; `None`: the directory is not this daemon's.
    filled: Option<Instant>,
}

impl Containers {
    fn fill(&mut self) {
        self.place = place::fill(&self.config).map_err(|e| e.to_string());
        self.filled = Some(Instant::now());
    }

    /// Is what containers are given there now? What was missing is looked for again after a while.
    fn in_place(&mut self) -> Result<(), String> {
        let due = self.filled.is_some_and(|t| t.elapsed() > AGAIN_MAX);
        if self.place.is_err() && due {
            self.fill();
        }
        let here = || place::look(&self.config.dir).map_err(|e| e.to_string());
        self.place.clone().and_then(|()| here())
    }
}

impl Plugin for Containers {
    fn configured(&mut self, runtime: &Configure) {
        tracing::info!(
            "registered with {} {}: pods that ask for it get the shim",
            runtime.runtime,
            runtime.version
        );
    }

    fn synchronize(&mut self, pods: Vec<PodSandbox>, containers: Vec<Container>) {
        let look = |p: &PodSandbox, c: &Container| policy::look_back(&self.config, p, c);
        self.known.replace(pods, containers, look);
    }

    fn create(&mut self, pod: PodSandbox, container: Container) -> Option<Adjustment> {
        let in_place = self.in_place();
        let decision = policy::decide(&self.config, &pod, &container, &in_place);
        let (namespace, name) = (pod.namespace.clone(), pod.name.clone());
        self.known.add_pod(pod);
        self.known.add_container(&container, &decision);
        match decision {
            Decision::Inject(a) => {
                tracing::debug!(
                    namespace,
                    pod = name,
                    container = container.name,
                    "injected"
                );
                Some(a)
            }
            Decision::Not(why) => {
                // (Whoever names containers means the others not to have it.)
                if why != WhyNot::NotNamed {
                    tracing::warn!(
                        namespace,
                        pod = name,
                        container = container.name,
                        "asked for the shim and does not get it: {why}"
                    );
                }
                None
            }
            Decision::Unasked | Decision::Has => None,
        }
    }

    fn pod_made(&mut self, pod: PodSandbox) {
        self.known.add_pod(pod);
    }

    fn pod_gone(&mut self, pod: &PodSandbox) {
        self.known.remove_pod(&pod.id);
    }

    fn container_gone(&mut self, container: &Container) {
        self.known.remove_container(&container.id);
    }
}
