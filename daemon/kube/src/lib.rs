//! What the daemon learns from the Kubernetes API, and what it tells there.
//!
//! It watches the annotations of namespaces and the pods of its own node, and writes what decisions need to a
//! [`Cluster`]; it tells events of pods that ask for the shim and do not get it. It learns the other nodes and who has which
//! address ([`Nodes`]), and gets this node its certificate. All of it on a thread of its own: the API may be slow or away for
//! as long as it likes, and everything goes on as it last was.

#![warn(unreachable_pub)]
// `as` only where a lint exception says why. Tests may: what they lose, they notice.
#![cfg_attr(
    not(test),
    warn(
        clippy::as_ptr_cast_mut,
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        clippy::ptr_as_ptr,
        clippy::ref_as_ptr
    )
)]

mod current;
mod fresh;
mod identity;
mod kept;
mod learn;
mod nodes;
mod tell;

pub use current::{client, Watching};
pub use fresh::{namespace, Asked, Fresh, Question};
pub use learn::init_containers;
pub use nodes::{NodeAt, Nodes};

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::mpsc;
use underpass_admin::Where;
use underpass_pods::cluster::Cluster;

/// Pause before another try where no client can be made.
const AGAIN: Duration = Duration::from_secs(5);
/// Events that wait to be told; more are dropped.
const EVENTS: usize = 64;

/// Who signs the nodes' certificates, as requests name it.
pub const SIGNER: &str = "underpass.io/node";
/// What the keys of nodes are for.
pub const USAGES: [&str; 3] = ["digital signature", "server auth", "client auth"];
/// Where the ConfigMap has the certificates of the CAs to trust.
pub const CA_FILE: &str = "ca.crt";

/// Where this node's certificate is kept, and whom it trusts.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// ConfigMap (of the daemon's namespace) with the CAs' certificates.
    pub config_map: String,
    /// Files.
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// What is learnt of other nodes, if anything is.
#[derive(Clone, Debug, Default)]
pub struct Others {
    pub nodes: Option<Arc<Nodes>>,
    pub certificates: Option<Certificates>,
}

/// An event of a pod, shown by `kubectl describe`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub namespace: String,
    pub pod: String,
    pub uid: String,
    pub container: String,
    /// Why the container does not get the shim.
    pub message: String,
}

/// What has been learnt so far.
#[derive(Debug)]
pub struct Learnt {
    cluster: Mutex<Cluster>,
    /// Where it is kept.
    file: PathBuf,
    /// Containers of this node's pods: by the pods' uids, then by their own ids.
    containers: Mutex<BTreeMap<String, HashMap<String, Where>>>,
    /// How the watches fare.
    namespaces: Arc<Watching>,
    pods: Arc<Watching>,
    asker: OnceLock<mpsc::Sender<Asked>>,
}

impl Learnt {
    /// What was learnt before is in the file. A file that cannot be read is as good as none.
    pub fn kept_in(file: PathBuf) -> Self {
        let cluster = Cluster::load(&file).unwrap_or_else(|e| {
            tracing::warn!("{}: {e}", file.display());
            Cluster::default()
        });
        Learnt {
            cluster: Mutex::new(cluster),
            file,
            containers: Mutex::default(),
            namespaces: Arc::new(Watching::namespaces()),
            pods: Arc::new(Watching::pods()),
            asker: OnceLock::new(),
        }
    }

    pub fn with<R>(&self, f: impl FnOnce(&Cluster) -> R) -> R {
        f(&self.cluster.lock())
    }

    /// Whose a container is.
    pub fn container(&self, id: &str) -> Option<Where> {
        let all = self.containers.lock();
        all.values().find_map(|pod| pod.get(id)).cloned()
    }

    /// Will the pod become known soon? The runtime may ask about a pod before the watch has told of it.
    pub fn awaits(&self, uid: &str) -> bool {
        self.pods.is_current() && !self.cluster.lock().init.contains_key(uid)
    }

    /// Is all known that the API had to say when it was asked first?
    pub fn is_whole(&self) -> bool {
        self.namespaces.is_listed() && self.pods.is_listed()
    }

    /// Changes it, and the file if something is different.
    fn change(&self, f: impl FnOnce(&mut Cluster)) {
        let changed = {
            let mut c = self.cluster.lock();
            let before = c.clone();
            f(&mut c);
            (*c != before).then(|| c.clone())
        };
        // (Only this crate's thread writes.)
        if let Some(Err(e)) = changed.map(|c| c.save(&self.file)) {
            tracing::warn!("{}: {e}", self.file.display());
        }
    }
}

/// Says what happens to pods. Never waits.
#[derive(Clone, Debug)]
pub struct Teller(mpsc::Sender<Event>);

impl Teller {
    pub fn tell(&self, event: Event) {
        // Full, if the API is away: `underpass pods` and the daemon's messages say it too.
        let _ = self.0.try_send(event);
    }
}

/// Starts the thread; it ends with the process. `node`: this node's name in the API.
pub fn start(node: String, learnt: Arc<Learnt>, others: Others) -> io::Result<Teller> {
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (tx, mut events) = mpsc::channel(EVENTS);
    let (asker, mut asked) = mpsc::channel(fresh::QUESTIONS);
    learnt.ask_by(asker);
    let thread = std::thread::Builder::new().name("underpass-kube".into());
    thread.spawn(move || {
        rt.block_on(async {
            let client = client_of(&learnt).await;
            tokio::join!(
                learn::namespaces(client.clone(), &learnt),
                learn::pods(client.clone(), &node, &learnt),
                tell::events(client.clone(), &node, &mut events),
                fresh::answer(client.clone(), &mut asked),
                know(client.clone(), &node, &others),
            )
        });
    })?;
    Ok(Teller(tx))
}

/// For ever: what has to do with other nodes.
async fn know(client: kube::Client, node: &str, others: &Others) {
    let nodes = async {
        if let Some(nodes) = &others.nodes {
            let places = learn::places(client.clone(), nodes);
            let keep = async {
                if let Some(file) = &nodes.file {
                    kept::keep(nodes, file).await;
                }
            };
            tokio::join!(learn::nodes(client.clone(), nodes), places, keep);
        }
    };
    let identity = async {
        if let Some(c) = &others.certificates {
            identity::keep(client.clone(), node, c, others.nodes.as_deref()).await;
        }
    };
    tokio::join!(nodes, identity);
}

/// A client as pods have it, or as $KUBECONFIG says.
async fn client_of(learnt: &Learnt) -> kube::Client {
    let mut said = false;
    loop {
        let watches = vec![learnt.namespaces.clone(), learnt.pods.clone()];
        match client(watches).await {
            Ok(c) => return c,
            Err(e) if said => tracing::debug!("Kubernetes API: {e}"),
            Err(e) => tracing::error!("Kubernetes API: {e}; trying again"),
        }
        said = true;
        tokio::time::sleep(AGAIN).await;
    }
}
