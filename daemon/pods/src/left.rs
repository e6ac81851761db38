//! What the daemon leaves on the node, beside the directory that containers see, for the plugin that the container runtime
//! starts itself: containers are made while the daemon is away, too, as it would have decided.

use crate::cluster::Cluster;
use crate::files::put_text;
use crate::place;
use crate::policy::{decide, Decision, PodsConfig};
use serde_json::{Map, Value};
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;
use underpass_nri::messages::{Adjustment, Container, PodSandbox};

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
    put_text(
        &config.dir.with_file_name(CONFIG),
        &serde_json::to_vec(config)?,
        0o666,
    )
}

/// Takes back what was left: this daemon does not look after containers (`api`: or does not ask the API).
pub fn withdraw(config: &PodsConfig, api: bool) {
    let files: &[&str] = if api { &[CLUSTER] } else { &[CONFIG, CLUSTER] };
    for name in files {
        let _ = fs::remove_file(config.dir.with_file_name(name)); // mostly there is none
    }
}

/// Reads what a daemon has left, which may be of another version: what this one does not know is skipped.
fn read(file: &Path) -> Option<PodsConfig> {
    let left: Map<String, Value> = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    let mut known = serde_json::to_value(PodsConfig::default()).ok()?;
    for (name, value) in left {
        if let Some(v) = known.get_mut(&name) {
            *v = value;
        }
    }
    serde_json::from_value(known).ok()
}

/// What a container gets by what was left in `dir`. Anything that is wrong with that means: nothing.
pub fn given(dir: &Path, pod: &PodSandbox, container: &Container) -> Option<Adjustment> {
    let file = dir.join(CONFIG);
    let left = fs::metadata(&file).ok()?.modified().ok()?;
    // (A clock that was set back does not make it old.)
    if left.elapsed().is_ok_and(|age| age > AWAY) {
        return None;
    }
    let config = read(&file)?;
    if config.plugins.as_os_str().is_empty() {
        return None; // it was switched off since
    }
    let cluster = Cluster::load(&dir.join(CLUSTER)).ok()?;
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
            plugins: "/opt/nri/plugins".into(),
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
        // A newer daemon has left it.
        let text = fs::read_to_string(t.path().join(CONFIG)).unwrap();
        let newer = text.replacen('{', "{\"more\": [1], ", 1);
        fs::write(t.path().join(CONFIG), newer).unwrap();
        assert!(gets(&pod));
        fs::write(t.path().join(CLUSTER), "").unwrap();
        assert!(!gets(&pod), "the namespace may have said no");
        withdraw(&config, true);
        assert!(!gets(&pod), "nobody asks any more");
        pod.annotations.insert(ENABLED.into(), "true".into());
        assert!(gets(&pod));
        let off = PodsConfig {
            plugins: "".into(),
            ..config.clone()
        };
        leave(&off).unwrap();
        assert!(!gets(&pod), "the plugin was switched off");
        leave(&config).unwrap();
        assert!(gets(&pod));
        withdraw(&config, false);
        assert!(!gets(&pod));
        fs::write(t.path().join(CONFIG), "{").unwrap();
        assert!(!gets(&pod));
    }
}
