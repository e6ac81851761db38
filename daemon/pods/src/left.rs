//! What the daemon leaves on the node, beside the directory that containers see, for the plugin that the container runtime
//! starts itself: containers are made while the daemon is away, too, as it would have decided.

use crate::cluster::{put, Cluster};
use crate::place;
use crate::policy::{decide, Decision, PodsConfig};
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;
use underpass_nri::messages::{Adjustment, Container, PodSandbox};

/// Where it lies, unless the daemon's configuration says otherwise.
pub const DIR: &str = "/var/lib/underpass";
/// What was learnt from the Kubernetes API.
pub const CLUSTER: &str = "cluster.json";
/// The daemon's configuration of pods.
const CONFIG: &str = "pods.json";

/// How often the daemon says that it is there.
pub const AGAIN: Duration = Duration::from_secs(15 * 60);
/// A daemon that has been away for longer is not coming back: Underpass was removed.
const AWAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Leaves the configuration, or says that it still counts.
pub fn leave(config: &PodsConfig) -> io::Result<()> {
    put(
        &config.dir.with_file_name(CONFIG),
        &serde_json::to_vec(config)?,
    )
}

/// What a container gets by what was left in `dir`. Anything that is wrong with that means: nothing.
pub fn given(dir: &Path, pod: &PodSandbox, container: &Container) -> Option<Adjustment> {
    let file = dir.join(CONFIG);
    let left = fs::metadata(&file).ok()?.modified().ok()?;
    // (A clock that was set back does not make it old.)
    if left.elapsed().is_ok_and(|age| age > AWAY) {
        return None;
    }
    let config: PodsConfig = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    let cluster = Cluster::load(&dir.join(CLUSTER)).unwrap_or_default();
    let in_place = place::look(&config.dir).map_err(|e| e.to_string());
    match decide(&config, &cluster, pod, container, &in_place) {
        Decision::Inject(a) => Some(a),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{ENABLED, SHIM};
    use std::time::SystemTime;

    #[test]
    fn as_the_daemon_would() {
        let t = tempfile::tempdir().unwrap();
        let config = PodsConfig {
            dir: t.path().join("pods"),
            exclude: vec!["kube-system".into()],
            ..PodsConfig::default()
        };
        let mut pod = PodSandbox {
            namespace: "shop".into(),
            ..PodSandbox::default()
        };
        let c = Container::default();
        let gets = |pod: &PodSandbox| given(t.path(), pod, &c).is_some();
        pod.annotations.insert(ENABLED.into(), "true".into());
        assert!(!gets(&pod), "no daemon was ever here");
        leave(&config).unwrap();
        assert!(!gets(&pod), "the shim is not in place");
        fs::create_dir(&config.dir).unwrap();
        fs::write(config.dir.join(SHIM), "").unwrap();
        assert!(gets(&pod));
        pod.namespace = "kube-system".into();
        assert!(!gets(&pod));
        pod.namespace = "shop".into();
        pod.annotations.clear();
        assert!(!gets(&pod));
        let mut cluster = Cluster::default();
        cluster.namespaces.insert("shop".into(), "true".into());
        cluster.save(&t.path().join(CLUSTER)).unwrap();
        assert!(gets(&pod), "its namespace asks");
        let file = fs::File::open(t.path().join(CONFIG)).unwrap();
        file.set_modified(SystemTime::now() - AWAY - AGAIN).unwrap();
        assert!(!gets(&pod), "Underpass was removed");
        leave(&config).unwrap();
        assert!(gets(&pod));
        fs::write(t.path().join(CONFIG), "{").unwrap();
        assert!(!gets(&pod));
    }
}
