//! What a daemon knows of the other nodes although the API is away when it starts: the nodes as they last were, and where
//! those addresses were to which its node's connections led lately. It counts until the API has told everything anew.

use super::nodes::{Kept, Nodes};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::Instant;
use underpass_pods::files::put_text;

/// How long changes of nodes are collected: one that was removed is to be forgotten soon.
const COLLECT: Duration = Duration::from_secs(1);
/// How often it is looked whether other addresses were met.
const LOOK: Duration = Duration::from_secs(60);
/// How often the file is written although nothing has changed: its age says how long ago the daemon was there.
const AGAIN: Duration = Duration::from_secs(60 * 60);
/// What is older says nothing: nodes may have been removed meanwhile.
const OLD: Duration = Duration::from_secs(24 * 60 * 60);

impl Kept {
    /// What the file says; nothing, if there is none or it is old.
    pub(crate) fn load(file: &Path) -> io::Result<Kept> {
        let meta = match std::fs::metadata(file) {
            Ok(m) => m,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Kept::default()),
            Err(e) => return Err(e),
        };
        // (A time in the future is that of a clock that was wrong.)
        if !meta.modified()?.elapsed().is_ok_and(|age| age < OLD) {
            return Ok(Kept::default());
        }
        Ok(serde_json::from_slice(&std::fs::read(file)?)?)
    }

    fn save(&self, file: &Path) -> io::Result<()> {
        put_text(file, &serde_json::to_vec(self)?, 0o600)
    }
}

impl Nodes {
    /// What was known before is in the file, and counts until the API has told everything anew. A file that cannot be read
    /// is as good as none.
    pub fn kept_in(file: PathBuf) -> Nodes {
        let kept = Kept::load(&file).unwrap_or_else(|e| {
            tracing::warn!("{}: {e}", file.display());
            Kept::default()
        });
        let mut nodes = Nodes::default();
        nodes.file = Some(file);
        nodes.restore(&kept);
        nodes
    }
}

/// For ever: keeps the file as the nodes are.
pub(super) async fn keep(nodes: &Nodes, file: &Path) {
    let mut changes = nodes.changes();
    let (mut generation, mut failing) = (nodes.generation(), false);
    let (mut saved, mut at) = (Kept::default(), Instant::now());
    let (before, mut next) = (generation, Instant::now() + LOOK);
    loop {
        // Nodes change seldom, pods all the time.
        let _ = tokio::time::timeout_at(next, changes.changed()).await; // then it is time
        let is_time = Instant::now() >= next;
        if nodes.generation() == before {
            // Nothing was told yet: what was kept before gets no younger by itself.
            if is_time {
                next = Instant::now() + LOOK;
            }
            continue;
        }
        if nodes.generation() == generation && !is_time {
            continue;
        }
        tokio::time::sleep(COLLECT).await;
        generation = nodes.generation();
        next = Instant::now() + LOOK;
        let now = nodes.kept();
        if now == saved && at.elapsed() < AGAIN {
            continue;
        }
        let (kept, to) = (now.clone(), file.to_owned());
        let done = tokio::task::spawn_blocking(move || kept.save(&to)).await;
        match done.unwrap_or_else(|e| Err(io::Error::other(e))) {
            Ok(()) => (saved, at, failing) = (now, Instant::now(), false),
            Err(e) => {
                if !failing {
                    tracing::warn!("{}: {e}; trying again", file.display());
                }
                failing = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::nodes::{NodeAt, Placed};
    use super::*;
    use std::net::IpAddr;
    use std::time::SystemTime;

    #[test]
    fn an_old_file_says_nothing() {
        let t = tempfile::tempdir().unwrap();
        let file = t.path().join("nodes.json");
        let mut kept = Kept::default();
        assert_eq!(Kept::load(&file).unwrap(), kept);
        kept.nodes.insert("a".into(), NodeAt::default());
        kept.save(&file).unwrap();
        assert_eq!(Kept::load(&file).unwrap(), kept);
        let at = |time| {
            let f = std::fs::File::options().write(true).open(&file).unwrap();
            f.set_modified(time).unwrap();
            Kept::load(&file).unwrap()
        };
        assert_eq!(at(SystemTime::now() - OLD / 2), kept);
        assert_eq!(at(SystemTime::now() - OLD), Kept::default());
        assert_eq!(at(SystemTime::now() + OLD), Kept::default());
    }

    /// A change of nodes is written at once; addresses are with the next one.
    #[test]
    fn what_is_known_is_written() {
        let t = tempfile::tempdir().unwrap();
        let file = t.path().join("nodes.json");
        let nodes = Nodes::default();
        let rt = tokio::runtime::Builder::new_current_thread();
        let rt = { rt }.enable_time().build().unwrap();
        rt.block_on(async {
            let written = async {
                let until = async |n: usize| loop {
                    let kept = Kept::load(&file).unwrap();
                    if kept.nodes.len() == n {
                        return kept;
                    }
                    tokio::time::sleep(COLLECT / 20).await;
                };
                let at = |ip: &str| NodeAt {
                    addresses: vec![ip.parse().unwrap()],
                    since: 1,
                };
                nodes.set_node("a", Some(&at("10.0.0.1")));
                until(1).await;
                let ip: IpAddr = "10.1.0.1".parse().unwrap();
                let placed = Placed {
                    node: "a".into(),
                    told: vec![ip],
                    written: Vec::new(),
                };
                nodes.set_pod("1", Some(&placed));
                nodes.met(ip);
                nodes.set_node("b", Some(&at("10.0.0.2")));
                assert!(until(2).await.places[&ip].told);
                nodes.set_node("b", None);
                until(1).await;
            };
            tokio::select! {
                biased;
                () = keep(&nodes, &file) => unreachable!(),
                () = written => {}
            }
        });
    }
}
