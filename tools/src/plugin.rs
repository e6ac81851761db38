//! The plugin that the container runtime starts itself, by NRI: before the first pod of a node that boots, and as long as
//! the daemon is away, it gives containers what the daemon would have given them.
//!
//! It has no command line: the runtime starts the file `98-underpass` of its directory of plugins, which is this program.

use crate::out::{Failure, Outcome};
use std::fmt::Display;
use std::path::Path;
use std::process::ExitCode;
use tokio::net::UnixStream;
use underpass_nri::launched::launched;
use underpass_nri::messages::{Adjustment, Configure, Container, PodSandbox};
use underpass_nri::Plugin;
use underpass_pods::left;
use underpass_pods::policy::LEFT;

/// Speaks with the runtime until it ends.
pub fn run() -> Outcome {
    let fail = |e: &dyn Display| Failure::new(format_args!("NRI plugin: {e}"));
    let me = launched().map_err(|e| fail(&e))?;
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| fail(&e))?;
    rt.block_on(async {
        let stream = UnixStream::from_std(me.stream).map_err(|e| fail(&e))?;
        let served = underpass_nri::serve(stream, (&me.name, &me.index), &mut Left).await;
        served.map_err(|e| fail(&e))
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Decides by what the daemon has left, and keeps nothing itself: `underpass pods` is the daemon's.
struct Left;

impl Plugin for Left {
    fn configured(&mut self, _: &Configure) {}

    fn synchronize(&mut self, _: Vec<PodSandbox>, _: Vec<Container>) {}

    fn create(&mut self, pod: PodSandbox, container: Container) -> Option<Adjustment> {
        left::given(Path::new(LEFT), &pod, &container)
    }

    fn pod_made(&mut self, _: PodSandbox) {}

    fn pod_gone(&mut self, _: &PodSandbox) {}

    fn container_stopped(&mut self, _: &Container) {}

    fn container_gone(&mut self, _: &Container) {}
}
