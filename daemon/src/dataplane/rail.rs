//! Lanes to other nodes: this daemon as the other client of its processes' link groups, the devices, and one
//! engine (`underpass_rdma::engine::Pair`) per peer node.
//!
//! Everything here happens in short steps, one at a time: the data plane's thread polls, and the core calls in
//! between (`dataplane::thread`). A step leaves a list of [`Effect`]s for the core.
//!
//! A pair of nodes has one engine *incarnation* at a time, known to both by a number. An incarnation ends when one of
//! the two daemons ends, or finds that the other breaks the protocol. Its link groups to processes end with it (their
//! lanes go down to TCP), and lanes of the next incarnation are new ones.
//!
//! What it must never do: keep a connection's socket longer than its lane, show a peer's words to a process that
//! they are not meant for, or call memory free that a device may still write.

mod area;
mod devices;
mod incarnation;
mod inherited;
mod lanes;
pub(crate) mod locality;
mod members;
mod show;
mod takeover;
mod wake;
pub(crate) mod waker;

use crate::clients::ids::{ClientId, ConnRef};
use crate::config::RailRules;
use crate::nodes::peers::directory::Name;
use crate::nodes::peers::msg::Msg;
use crate::os::locality::Locality;
use crate::os::system::System;
use area::DaemonArea;
use crossbeam::channel::{Receiver, Sender};
pub(crate) use devices::has_rail;
use devices::{Devices, News};
use incarnation::Node;
use lane::proto::msg::ToShim;
use lane::proto::reason::Reason;
use lanes::Lane;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use underpass_rdma::devices::Change;
use underpass_rdma::engine::{self, LaneId};
use underpass_rdma::verbs::{DeviceId, Provider};

/// Names a lane: its link group, and its slot on the link group.
type Key = (u64, u32);

/// Shortest time between two requests for another chunk of a link group: there may be none to get.
const ASK_NS: u64 = 1_000_000_000;

/// What the core has to do.
#[derive(Debug)]
pub enum Effect {
    /// A message to a peer's daemon.
    Say(Name, Msg),
    /// The daemon's messages about chunks of a link group, as a shim sends them.
    Mapped {
        group: u64,
        chunk: u32,
    },
    PeerMapped {
        group: u64,
        chunk: u32,
    },
    WantChunk {
        group: u64,
    },
    /// The link group cannot be used, or not any more.
    TearDown {
        group: u64,
    },
    /// Both nodes have the lane: offer it.
    Release {
        at: Key,
        who: ConnRef,
        uses: u32,
        tag: u64,
    },
    /// The lane will not be made: decline the connection, for these reasons of both ends.
    Abandon {
        at: Key,
        who: ConnRef,
        local: Reason,
        peer: Reason,
        retry_ms: u32,
    },
    /// Nothing of the lane is left here.
    Done {
        at: Key,
    },
    /// The remote end does not use the lane.
    Unused {
        at: Key,
        who: ConnRef,
    },
    /// The connection was reset, for this reason.
    Reset {
        who: ConnRef,
        reason: Reason,
    },
    /// Why lanes to this node are refused from now on; 0: they are made.
    Refusal(Name, u32),
}

/// The daemon's side of a link group between a process and itself.
struct RemoteGroup {
    node: Name,
    /// Of [`Node::era`].
    era: u64,
    area: DaemonArea,
    client: Option<engine::ClientId>,
    bell: OwnedFd,
    /// The core has given the link group up.
    torn: bool,
    /// When another chunk was asked for that has not come yet.
    asked: Option<u64>,
}

/// What a helper has done with a socket.
enum Finished {
    Takeover(takeover::Done),
    /// Where this connection's end is.
    Locality(Key, ConnRef, Locality),
}

pub struct Rails<V: Provider> {
    system: Arc<dyn System>,
    devices: Option<Devices<V>>,
    nodes: BTreeMap<Name, Node<V>>,
    groups: HashMap<u64, RemoteGroup>,
    lanes: BTreeMap<Key, Lane>,
    out: Vec<Effect>,
    /// An eventfd that wakes the data plane.
    wake: Option<Arc<OwnedFd>>,
    /// Results of helpers that have worked on sockets.
    jobs: (Sender<Finished>, Receiver<Finished>),
    /// The daemon is counted as asleep on all link groups.
    armed: bool,
    /// The epoll set of the data plane: links of engines, doorbells, devices.
    set: Option<Arc<OwnedFd>>,
    names: Arc<[Name]>,
    own: Name,
    /// The next node's number.
    numbers: u32,
    /// The last incarnations with nodes that are gone: their daemons may be the same when they are back, and still in
    /// them. The newest last.
    former: VecDeque<(Name, u64)>,
    /// Counters of nodes that are gone.
    departed: BTreeMap<devices::Port, engine::Stats>,
    /// When [`Rails::tend`] is due, and until when the rails count as busy.
    tend_at: u64,
    busy_until: u64,
}

/// What the engine calls while it works.
struct Host<'a> {
    now: u64,
    groups: &'a mut HashMap<u64, RemoteGroup>,
    clients: &'a HashMap<engine::ClientId, u64>,
    lanes: &'a HashMap<LaneId, Key>,
    out: &'a mut Vec<Effect>,
}

impl engine::Host for Host<'_> {
    fn ring(&mut self, client: engine::ClientId) {
        let remote_group = self.clients.get(&client).and_then(|l| self.groups.get(l));
        if let Some(b) = remote_group {
            lane::notify::doorbell::ring(b.bell.as_fd());
        }
    }

    fn place(&mut self, lane: LaneId, log2: u32) -> Option<lane::abi::Loc> {
        let (group, _) = self.lanes.get(&lane)?;
        let remote_group = self.groups.get_mut(group)?;
        let placed = remote_group.area.place(log2);
        let now = self.now;
        if placed.is_none()
            && !remote_group.torn
            && remote_group.asked.is_none_or(|t| now >= t + ASK_NS)
        {
            remote_group.asked = Some(now);
            self.out.push(Effect::WantChunk { group: *group });
        }
        placed
    }

    fn free(&mut self, lane: LaneId, at: lane::abi::Loc) {
        let remote_group = self
            .lanes
            .get(&lane)
            .and_then(|k| self.groups.get_mut(&k.0));
        if let Some(b) = remote_group {
            b.area.free(at);
        }
    }
}

impl<V: Provider> Rails<V> {
    /// `verbs`: `None` if there is no RDMA; `peers`: all nodes but `own`.
    pub fn new(
        system: Arc<dyn System>,
        verbs: Option<V>,
        rules: RailRules,
        own: &Name,
        peers: impl Iterator<Item = Name>,
    ) -> Rails<V> {
        if verbs.is_none() {
            tracing::info!("no libibverbs: connections to other nodes stay on TCP");
        }
        let mut rails = Rails {
            devices: verbs.map(|v| Devices::new(v, rules)),
            system,
            names: Arc::default(),
            own: own.clone(),
            numbers: 0,
            former: VecDeque::new(),
            departed: BTreeMap::new(),
            nodes: BTreeMap::new(),
            groups: HashMap::new(),
            lanes: BTreeMap::new(),
            out: Vec::new(),
            wake: wake::new_wake(),
            jobs: crossbeam::channel::unbounded(),
            armed: false,
            set: None,
            tend_at: 0,
            busy_until: 0,
        };
        peers.for_each(|name| rails.node_came(&name));
        rails
    }

    /// The client that stands for this node.
    pub fn client_of(&self, node: &Name) -> Option<ClientId> {
        self.nodes.get(node).map(|n| ClientId::remote(n.number))
    }

    /// Something has changed or is about to: takes [`Rails::fall_asleep`] back, and wakes the data plane.
    pub fn notify(&mut self) {
        if std::mem::take(&mut self.armed) {
            self.nodes.values().for_each(|n| n.pair.wake_up());
        }
        self.tend_at = 0;
        wake::wake(self.wake.as_deref());
    }

    /// Moves the effects of the steps so far to `all`, in their order.
    pub fn take_effects(&mut self, all: &mut VecDeque<Effect>) {
        all.extend(self.out.drain(..));
    }

    pub fn has_effects(&self) -> bool {
        !self.out.is_empty()
    }

    /// A message of the link groups' state machine to the daemon as a client.
    pub fn deliver(&mut self, to: ClientId, msg: ToShim, fds: &[Arc<OwnedFd>]) {
        self.notify();
        match msg {
            ToShim::GroupNew { group, bytes, .. } => self.group_new(to, group, bytes, fds),
            ToShim::Chunk {
                group,
                chunk,
                bytes,
                ..
            } => {
                let entered = self.groups.get_mut(&group).zip(fds.first());
                let ok =
                    entered.is_some_and(|(b, fd)| b.area.enter(true, chunk, fd, bytes).is_some());
                self.answer(ok, group, Effect::Mapped { group, chunk });
            }
            ToShim::PeerChunk {
                group,
                chunk,
                bytes,
                ..
            } => {
                let ok = match chunk {
                    0 => self.peer_first(group, bytes, fds).is_some(),
                    _ => self.peer_chunk(group, chunk, bytes, fds).is_some(),
                };
                match (ok, chunk) {
                    (true, 0) => {}
                    _ => self.answer(ok, group, Effect::PeerMapped { group, chunk }),
                }
            }
            ToShim::ChunkReady { group, chunk, .. } => {
                self.own_ready(group, chunk);
            }
            ToShim::PeerGone { group, .. } => {
                if let Some(b) = self.groups.get_mut(&group) {
                    b.torn = true;
                }
                self.leave_group(group);
            }
            _ => {}
        }
    }

    fn answer(&mut self, ok: bool, group: u64, yes: Effect) {
        self.out.push(match ok {
            true => yes,
            false => Effect::TearDown { group },
        });
    }

    fn group_new(&mut self, to: ClientId, group: u64, bytes: u64, fds: &[Arc<OwnedFd>]) {
        let node = self
            .nodes
            .iter()
            .find(|(_, n)| ClientId::remote(n.number) == to);
        let (Some((name, node)), [bell, first]) = (node, fds) else {
            return self.out.push(Effect::TearDown { group });
        };
        let mut area = DaemonArea::default();
        let entered = area.enter_first(true, first, bytes);
        let (Some(_), Ok(bell)) = (entered, rustix::io::fcntl_dupfd_cloexec(bell, 0)) else {
            return self.out.push(Effect::TearDown { group });
        };
        if let Some(set) = &self.set {
            waker::watch_bell(set, bell.as_fd(), group);
        }
        let remote_group = RemoteGroup {
            node: name.clone(),
            era: node.era,
            area,
            client: None,
            bell,
            torn: false,
            asked: None,
        };
        self.groups.insert(group, remote_group);
        self.out.push(Effect::Mapped { group, chunk: 0 });
    }

    /// The process's control words and first data chunk. It is given ours before it is offered a lane.
    fn peer_first(&mut self, group: u64, bytes: u64, fds: &[Arc<OwnedFd>]) -> Option<()> {
        let b = self.groups.get_mut(&group)?;
        let map = b.area.enter_first(false, fds.first()?, bytes)?;
        let node = self.nodes.get_mut(&b.node).filter(|n| n.era == b.era)?;
        let client = node.pair.add_client(b.area.words()?);
        b.client = Some(client);
        node.clients.insert(client, group);
        node.pair.add_app_chunk(client, 1, map);
        self.own_ready(group, 1)
    }

    /// A further data chunk of the process.
    fn peer_chunk(
        &mut self,
        group: u64,
        chunk: u32,
        bytes: u64,
        fds: &[Arc<OwnedFd>],
    ) -> Option<()> {
        let b = self.groups.get_mut(&group)?;
        let map = b.area.enter(false, chunk, fds.first()?, bytes)?;
        let node = self.nodes.get_mut(&b.node).filter(|n| n.era == b.era)?;
        node.pair.add_app_chunk(b.client?, chunk, map);
        Some(())
    }

    /// The process has mapped this chunk of our area: rings may be placed there.
    fn own_ready(&mut self, group: u64, chunk: u32) -> Option<()> {
        let b = self.groups.get_mut(&group)?;
        b.asked = None;
        b.area.ready(chunk);
        let map = b.area.own_chunk(chunk)?;
        let node = self.nodes.get_mut(&b.node).filter(|n| n.era == b.era)?;
        node.pair.add_own_chunk(b.client?, chunk, map);
        Some(())
    }

    /// Removes a link group that the core has given up, if no lane of it is left.
    fn leave_group(&mut self, group: u64) {
        let used = self
            .lanes
            .range((group, 0)..=(group, u32::MAX))
            .next()
            .is_some();
        if used || self.groups.get(&group).is_none_or(|b| !b.torn) {
            return;
        }
        let Some(b) = self.groups.remove(&group) else {
            return;
        };
        // The engine keeps the memory as long as anything may be written to it.
        let node = self.nodes.get_mut(&b.node).filter(|n| n.era == b.era);
        if let (Some(n), Some(p)) = (node, b.client) {
            n.pair.remove_client(p);
        }
    }

    /// Are there devices at all?
    pub fn has_devices(&self) -> bool {
        self.devices.is_some()
    }

    /// Handles changes of the devices that the kernel lists.
    pub fn devices_changed(&mut self, changes: &[Change]) {
        let mut news = Vec::new();
        if let Some(d) = &mut self.devices {
            d.changed(changes, &mut news);
        }
        self.watch_devices();
        self.take_news(news);
    }

    /// Handles events of open devices. Returns the devices that should be looked at again.
    pub fn device_events(&mut self) -> Vec<DeviceId> {
        let mut news = Vec::new();
        let stale = self.devices.as_mut().map(|d| d.events(&mut news));
        self.take_news(news);
        stale.unwrap_or_default()
    }

    fn take_news(&mut self, news: Vec<News>) {
        if news.is_empty() {
            return;
        }
        self.notify();
        let now = self.system.now();
        let Some(devices) = &self.devices else { return };
        for n in news {
            for node in self.nodes.values_mut() {
                match &n {
                    News::Up(port) => node.add_rail(now, devices, port),
                    News::Gone(port) => node.remove_rail(port),
                    News::QpFailed(id, qpn) => node.qp_failed(id, *qpn),
                    News::Moved => {}
                }
            }
        }
        self.rank_all();
        self.tell_refusals();
    }

    /// Why no lanes are made to a node now.
    fn refusal(&self, node: &Node<V>) -> Reason {
        match &self.devices {
            Some(d) if !d.up().is_empty() => match node.up {
                true => Reason::None,
                false => Reason::RailDown,
            },
            Some(d) if d.has_forbidden() => Reason::Config,
            _ => Reason::NoDevice,
        }
    }

    pub fn tell_refusals(&mut self) {
        let mut told = Vec::new();
        for (name, node) in &self.nodes {
            let now = self.refusal(node);
            if node.refusal != Some(now) {
                told.push((name.clone(), now));
            }
        }
        for (name, now) in told {
            if let Some(n) = self.nodes.get_mut(&name) {
                n.refusal = Some(now);
            }
            self.out.push(Effect::Refusal(name, now.code()));
        }
    }
}
