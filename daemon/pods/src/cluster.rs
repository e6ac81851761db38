//! What the Kubernetes API says about who asks. Kept in a file: containers are made while the API cannot be reached, too.

use crate::files::put_text;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

/// Only what decisions need: memory is bounded by the annotated namespaces and the node's pods.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct Cluster {
    /// Values of the namespaces' annotation [`ENABLED`](super::policy::ENABLED); absent: not annotated.
    pub namespaces: BTreeMap<String, String>,
    /// Names of init containers, by the uids of this node's pods (those that go on beside the others, as sidecars do, not
    /// among them).
    pub init: BTreeMap<String, Vec<String>>,
}

impl Cluster {
    /// What the file says; nothing, if there is none.
    pub fn load(file: &Path) -> io::Result<Cluster> {
        match fs::read(file) {
            Ok(text) => Ok(serde_json::from_slice(&text)?),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Cluster::default()),
            Err(e) => Err(e),
        }
    }

    /// Replaces the file, at once and whole.
    pub fn save(&self, file: &Path) -> io::Result<()> {
        put_text(file, &serde_json::to_vec(self)?, 0o666)
    }

    pub fn is_init(&self, uid: &str, container: &str) -> bool {
        let names = self.init.get(uid);
        names.is_some_and(|names| names.iter().any(|n| n == container))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_kept() {
        let t = tempfile::tempdir().unwrap();
        let file = t.path().join("cluster.json");
        assert_eq!(Cluster::load(&file).unwrap(), Cluster::default());
        let mut c = Cluster::default();
        c.namespaces.insert("shop".into(), "true".into());
        c.init.insert("u1".into(), vec!["prepare".into()]);
        c.save(&file).unwrap();
        assert_eq!(Cluster::load(&file).unwrap(), c);
        assert!(c.is_init("u1", "prepare") && !c.is_init("u1", "web") && !c.is_init("u2", "web"));
        fs::write(&file, "{").unwrap();
        assert!(Cluster::load(&file).is_err());
        // What a newer daemon has written besides does not keep an older one from reading it.
        fs::write(&file, r#"{"namespaces": {"a": "false"}, "more": 1}"#).unwrap();
        assert_eq!(Cluster::load(&file).unwrap().namespaces["a"], "false");
    }
}
