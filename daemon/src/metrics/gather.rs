//! The core's side: what it answers to the thread that speaks HTTP.

use crate::admin::rail_view;
use crate::admin::server::entries_of_late;
use crate::clients::control::DATAGRAMS;
use crate::clients::families::Account;
use crate::clients::family::Totals;
use crate::clients::limits::Limit;
use crate::clients::view::Entry;
use crate::config::RailRules;
use crate::core::counters::Counters;
use crate::core::Shared;
use crate::histogram::Histogram;
use crate::os::memfd;
use crate::os::panics::{self, Part};
use crate::tasks::readings;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use underpass_admin::{NodeState, PeerState, PodRow, RailStats};

/// How often all processes are looked at for the connections. (The look is that of `underpass ss`.)
const LOOK: Duration = Duration::from_secs(5);

/// What the thread asks.
pub(crate) enum Ask {
    /// Does the core answer?
    Alive(oneshot::Sender<()>),
    Ready(oneshot::Sender<Ready>),
    Snapshot(oneshot::Sender<Snapshot>),
}

/// What new connections and containers need, besides the control socket.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ready {
    /// The BPF proof works, or the configuration does without it.
    pub proof: bool,
    /// The container runtime has registered the daemon, or the configuration names none.
    pub runtime: bool,
    /// The same of the kubelet, as that of a CSI driver.
    pub kubelet: bool,
}

/// What the core and its helpers know at one moment.
#[derive(Default)]
pub(crate) struct Snapshot {
    pub counters: Counters,
    /// What limits have refused, in the order of [`Limit::ALL`].
    pub refused: [u64; Limit::ALL.len()],
    /// Panics that ended a part of the daemon's work, in the order of [`Part::ALL`].
    pub panics: [u64; Part::ALL.len()],
    pub datagrams: u64,
    pub ready: Ready,
    pub processes: usize,
    pub link_groups: usize,
    pub lanes: u64,
    pub ring_bytes: u64,
    pub totals: Totals,
    pub by_pod: Vec<(Arc<Account>, Totals, bool)>,
    pub rows: Arc<Vec<Entry>>,
    /// `None`: the daemon looks after no containers.
    pub containers: Option<Containers>,
    /// `None`: the daemon works alone.
    pub nodes: Option<(NodeState, Vec<Peer>)>,
    pub rails: Vec<RailStats>,
    pub rail_rules: RailRules,
}

pub(crate) struct Peer {
    pub state: PeerState,
    /// It has said that it has rails.
    pub has_rails: bool,
}

pub(crate) struct Containers {
    pub rows: Vec<PodRow>,
    /// Given the shim, and refused it, since the start.
    pub counts: [u64; 2],
    /// How long the answers about new ones have taken.
    pub answers: Histogram,
    pub registered: bool,
}

/// Answers for ever.
pub(crate) async fn serve(shared: Shared, mut asks: mpsc::Receiver<Ask>) {
    while let Some(ask) = asks.recv().await {
        // Whoever asked may have given up.
        match ask {
            Ask::Alive(to) => drop(to.send(())),
            Ask::Ready(to) => drop(to.send(ready(&shared))),
            Ask::Snapshot(to) => {
                let shared = shared.clone();
                tokio::task::spawn_local(async move { to.send(snapshot(&shared).await) });
            }
        }
    }
}

fn ready(shared: &Shared) -> Ready {
    let c = shared.borrow();
    Ready {
        proof: c.proof.active() || !c.config.proof.bpf,
        runtime: c.pods.is_registered() || c.config.pods.nri.as_os_str().is_empty(),
        kubelet: c.config.csi.kubelet.as_os_str().is_empty()
            || c.csi.as_ref().is_some_and(|d| d.is_registered()),
    }
}

async fn snapshot(shared: &Shared) -> Snapshot {
    let rows = entries_of_late(shared, "metrics", LOOK).await;
    let totals = readings::read_all(shared).await;
    let (chunks, rails) = {
        let c = shared.borrow();
        (c.groups.memory(), c.rails.clone())
    };
    let read = move || {
        let bytes = chunks.iter().map(|c| memfd::touched(c)).sum::<u64>();
        (bytes, rails.map(|r| rail_view::stats_of(&r)))
    };
    let (ring_bytes, rails) = tokio::task::spawn_blocking(read).await.unwrap_or_default();
    let ready = ready(shared);
    let c = shared.borrow();
    let containers = (!c.config.pods.nri.as_os_str().is_empty()).then(|| Containers {
        rows: c.pods.rows(),
        counts: c.pods.counts(),
        answers: c.pods.answers(),
        registered: c.pods.is_registered(),
    });
    let nodes = c.peers.as_ref().map(|p| {
        let (node, peers, _) = p.states();
        let peer = |state: PeerState| Peer {
            has_rails: p.pairing.has_rails(&state.name),
            state,
        };
        (node, peers.into_iter().map(peer).collect())
    });
    Snapshot {
        counters: c.counters.clone(),
        refused: c.cgroups.refused.all(),
        panics: panics::caught(),
        datagrams: DATAGRAMS.load(Relaxed),
        ready,
        processes: c.clients.values().filter(|p| p.control.is_some()).count(),
        link_groups: c.groups.len(),
        lanes: c.groups.lanes(),
        ring_bytes,
        totals,
        by_pod: c.families.by_pod(),
        rows,
        containers,
        nodes,
        rails: rails.unwrap_or_default(),
        rail_rules: c.config.rails(),
    }
}
