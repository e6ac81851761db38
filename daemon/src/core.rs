//! The daemon's state, and what it does when something happens. One thread, no waiting: whatever
//! may take time (looking at a registered socket, closing it) runs on the blocking pool and comes
//! back as another event.

pub(crate) mod across;
pub(crate) mod captured;
pub(crate) mod commands;
pub mod counters;
pub(crate) mod events;
mod expedite;
mod holders;
mod idle;
mod inherited;
mod memory;
mod recovered;
pub mod register;
mod remote;
mod resets;
mod sweep;
mod tables;
pub(crate) mod takeover;

use crate::clients::adopt::Recovered;
use crate::clients::client::{Client, PerSecond};
use crate::clients::control::Control;
use crate::clients::families::Families;
use crate::clients::family::{Family, Totals};
use crate::clients::ids::{ClientId, ConnRef};
use crate::clients::limits::defaults::{self, Machine};
use crate::clients::limits::{self, Cgroup, Cgroups};
use crate::clients::looks::Looks;
use crate::clients::notice::Notice;
use crate::clients::places::Places;
use crate::clients::tenant;
use crate::clients::view::{Entry, Holder, Snapshot};
use crate::config::Config;
use crate::core::counters::Counters;
use crate::core::events::Events;
use crate::dataplane::rail::Rails;
use crate::dataplane::thread::DataPlane;
use crate::lanes::groups::{LinkGroups, Out, Violation};
use crate::lanes::holders::{Came, Holders};
use crate::lanes::inherited::InheritedEnds;
use crate::nodes::expedite::Lookup;
use crate::nodes::peers::directory::Directory;
use crate::nodes::peers::Peers;
use crate::os::fds::Foreign;
use crate::os::memfd::{self, Ident};
use crate::os::process::{ProcId, Process};
use crate::os::system::{Clock, System};
use crate::pairing::local::Waiting;
use crate::pairing::proof::Proof;
use crate::rules::Rules;
use lane::family::{state, TABLE_BYTES};
use lane::proto::msg::{ToDaemon, ToShim};
use lane::proto::reason::Reason;
use register::Registration;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use underpass_ibv::Ibv;
use underpass_rdma::verbs::Provider;

/// The core, as the tasks hold it. Never borrowed across an await.
pub type Shared = Rc<RefCell<Core>>;

/// After this many milliseconds an end that could not be proven may try again: the end that it did not fit may
/// have been forged.
pub(crate) const RETRY_UNPROVEN_MS: u32 = 30_000;
/// Retry after a temporary failure: no memory, a limit, a peer that came and went.
const RETRY_TROUBLE_MS: u32 = 10_000;
pub(crate) const RETRY_SOON_MS: u32 = 500;

/// `V`: the verbs of lanes to other nodes.
pub struct Core<V: Provider = Ibv> {
    system: Arc<dyn System>,
    pub config: Config,
    pub proof: Arc<dyn Proof>,
    /// Number of this run of the daemon.
    pub incarnation: u64,
    pub started: Duration,
    began: tables::Began,
    pub clients: HashMap<ClientId, Client>,
    pub families: Families,
    /// Whose turn it is to read their tables for the sums.
    pub(crate) reading: Arc<tokio::sync::Mutex<()>>,
    /// Processes of families that were there before us, and have not said hello.
    pub recovered: Vec<Recovered>,
    /// Ends of processes that have ended, which other processes may still hold.
    pub inherited: InheritedEnds,
    pub(crate) takeovers: Vec<takeover::Ordered>,
    /// Ends that came from other processes, which may still hold them.
    pub holders: Holders,
    /// Notified when there is a remote lane, so that the holders of its socket are looked up (`unseen`).
    pub held: Rc<tokio::sync::Notify>,
    /// Have all processes been looked at that are older than this daemon?
    pub scanned: bool,
    pub scan_done: Rc<tokio::sync::Notify>,
    by_process: HashMap<(ProcId, Ident), ClientId>,
    pub waiting: Waiting,
    /// A sweep is under way, and those are done.
    swept_here: bool,
    /// Ends that are expedited, whose other end is looked for.
    pub lookup: Lookup,
    pub groups: LinkGroups,
    pub cgroups: Cgroups,
    memory: memory::Memory,
    pub events: Events,
    pub counters: Counters,
    next_client: u64,
    /// Connections that have not said hello yet.
    pub(crate) newcomers: Rc<Places>,
    /// Clients with a control connection.
    connected: usize,
    /// Does this daemon leave when idle? Then processes may ask it to stay.
    pub leaves: bool,
    /// The runtime directory; `None` in unit tests.
    pub dir: Option<std::path::PathBuf>,
    /// Identities of that directory, and of the one that containers see, as shims write them into their tables.
    pub homes: Vec<lane::family::Home>,
    /// Containers, as their runtime told of them.
    pub(crate) pods: Arc<crate::pods::known::Known>,
    /// Which connections may have lanes.
    pub rules: Rules,
    /// Shares one census among all who ask for `ss` at the same time.
    pub looks: Rc<Looks<Vec<Entry>>>,
    /// And one reading of all tables among all who ask for the counters.
    pub(crate) sums: Rc<Looks<underpass_admin::Stats>>,
    /// Captures, by the users who made them.
    pub(crate) captures: captured::Captures,
    /// Number of living processes that asked the daemon to stay.
    kept: usize,
    /// Since when there is no shim, no lane, and nobody who asked us to stay.
    pub idle_since: Option<Duration>,
    /// The other nodes; `None`: this daemon works alone.
    pub peers: Option<Peers>,
    /// The CSI driver, once it serves the kubelet.
    pub csi: Option<Arc<underpass_kubelet::csi::Driver>>,
    /// Lanes to them; `None` without peers.
    pub rails: Option<Arc<DataPlane<V>>>,
    effects: remote::Effects,
    /// What the daemon's lanes count against, as a client of remote link groups.
    remote_cgroup: Arc<limits::Cgroup>,
}

/// What a shim said in its hello, checked.
pub struct Hello {
    pub version: u16,
    pub own_pid: u32,
    pub ident: Ident,
    pub table: Foreign,
    /// What the table says, if that is older than this daemon and has not been read yet.
    pub found: Option<Totals>,
}

impl<V: Provider> Core<V> {
    /// `directory`: the other nodes; `None`: this daemon works alone. `verbs`: `None` if the node has no RDMA.
    pub fn new(
        config: Config,
        directory: Option<Rc<dyn Directory>>,
        proof: Arc<dyn Proof>,
        system: Arc<dyn System>,
        verbs: Option<V>,
    ) -> Core<V> {
        let incarnation = system.random();
        let rules = Rules::configured(&config.rules());
        let clock = Clock::of(&system);
        let now = clock.now();
        let peers = directory.map(|d| Peers::new(d, Reason::NoDevice));
        let rails = peers.as_ref().map(|p| {
            let all = p.directory.peers().into_iter().map(|p| p.name);
            let own = p.directory.own();
            let rails = Rails::new(system.clone(), verbs, config.rails(), own, all);
            Arc::new(DataPlane::new(system.clone(), rails))
        });
        let cgroups = Cgroups::new(config.limits());
        let began = tables::Began::now(&*system);
        Core {
            system,
            peers,
            csi: None,
            rails,
            effects: remote::Effects::default(),
            remote_cgroup: limits::remote(&cgroups.refused),
            cgroups,
            memory: memory::Memory::here(),
            config,
            proof,
            incarnation,
            started: now,
            began,
            clients: HashMap::new(),
            families: Families::default(),
            reading: Arc::default(),
            recovered: Vec::new(),
            inherited: InheritedEnds::default(),
            takeovers: Vec::new(),
            holders: Holders::default(),
            held: Rc::default(),
            scanned: false,
            scan_done: Rc::default(),
            by_process: HashMap::new(),
            waiting: Waiting::new(clock.clone()),
            swept_here: false,
            lookup: Lookup::default(),
            groups: LinkGroups::new((incarnation >> 32) as u32, clock),
            events: Events::default(),
            counters: Counters::default(),
            next_client: 1,
            newcomers: Places::new(defaults::newcomers(&Machine::here())),
            connected: 0,
            leaves: false,
            dir: None,
            homes: Vec::new(),
            pods: Arc::default(),
            rules,
            looks: Rc::default(),
            sums: Rc::default(),
            captures: captured::Captures::default(),
            kept: 0,
            idle_since: Some(now),
        }
    }

    /// The time by which `started` and `idle_since` are counted.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.system.now())
    }

    /// A shim has connected and said hello. `Ok((id, true))`: a new client, whose death must be
    /// watched.
    pub fn admit(
        &mut self,
        process: &Process,
        hello: Hello,
        control: &Rc<Control>,
    ) -> Result<(ClientId, bool), Reason> {
        let page = Notice::new().map_err(|_| Reason::Memory)?;
        let key = (process.id, hello.ident);
        let id = match self.by_process.get(&key) {
            // The same process with the same table: it lost its connection, or we cut it.
            Some(id) => *id,
            None => {
                self.retire_predecessors(process.id);
                let tenant = tenant::of(&process.cgroups, process.uid);
                let tenant = self.cgroups.get(&tenant);
                let member = tenant.enter().ok_or(Reason::Limit)?;
                let id = ClientId(self.next_client);
                self.next_client += 1;
                let table = (hello.ident, hello.table);
                let family = self.join_family(table, hello.found, process.id, &process.cgroups);
                let client = Client {
                    id,
                    proc_id: process.id,
                    own_pid: hello.own_pid,
                    uid: process.uid,
                    comm: process.comm.clone(),
                    netns: process.netns,
                    member,
                    room: self.memory.rooms.of(&process.cgroups),
                    family,
                    control: None,
                    credits: 0,
                    untold: 0,
                    under_way: HashSet::new(),
                    registered: HashMap::new(),
                    known: VecDeque::new(),
                    missed: Vec::new(),
                    commands: self.missed_by(process.id, hello.ident),
                    moves: PerSecond::default(),
                    resets: PerSecond::default(),
                    blown_by: None,
                    watched: None,
                };
                self.clients.insert(id, client);
                self.by_process.insert(key, id);
                self.forget_recovered(|r| r.id == process.id);
                self.event(id, "connected");
                self.attach(id, hello.version, control, page);
                return Ok((id, true));
            }
        };
        self.disconnect(id, None);
        self.event(id, "connected again");
        self.attach(id, hello.version, control, page);
        Ok((id, false))
    }

    /// Gives a client its (new) control connection.
    fn attach(
        &mut self,
        id: ClientId,
        version: u16,
        control: &Rc<Control>,
        page: (Notice, OwnedFd),
    ) {
        let Some(p) = self.clients.get_mut(&id) else {
            return;
        };
        control.set_notice(page.0);
        p.control = Some(control.clone());
        self.connected += 1;
        p.credits = self.config.credits;
        p.untold = 0;
        let ack = ToShim::HelloAck {
            version,
            client: id.0,
            home: self.homes.first().map_or(0, |h| h[2]),
            credits: self.config.credits,
            ring_log2: self.config.ring_log2,
            ring_max_log2: self.config.ring_max_log2,
            probe_s: self.config.lanes.probe_s,
        };
        p.send(ack, vec![Arc::new(page.1)]);
        let mut out = Out::default();
        self.groups.resumed(id, &mut out);
        for s in out.sends {
            p.send(s.msg, s.fds);
        }
        for msg in std::mem::take(&mut p.missed) {
            p.send(msg, vec![]);
        }
        for command in std::mem::take(&mut p.commands).messages() {
            p.send(command, vec![]);
        }
        self.busy_changed();
    }

    /// A process that has closed its old connection and now shows another table has executed another program: what
    /// the old program had mapped is gone, so its client is removed.
    fn retire_predecessors(&mut self, proc_id: ProcId) {
        let old = self
            .clients
            .values()
            .filter(|p| p.proc_id == proc_id && p.control.is_none());
        for id in old.map(|p| p.id).collect::<Vec<_>>() {
            self.dead(id);
        }
    }

    /// A control connection ended. `control`: does nothing if the client has another connection by now.
    pub fn disconnect(&mut self, id: ClientId, control: Option<&Rc<Control>>) {
        let Some(p) = self.clients.get_mut(&id) else {
            return;
        };
        let Some(present) = &p.control else { return };
        if control.is_some_and(|c| !Rc::ptr_eq(c, present)) {
            return;
        }
        p.disconnect(control.is_none());
        self.connected -= 1;
        self.event(id, "disconnected");
        self.waiting.remove_client(id);
        self.forget_client_across(id);
        let mut out = Out::default();
        self.groups.client_silent(id, &mut out);
        self.act(out, Reason::PeerGone, RETRY_SOON_MS);
        self.busy_changed();
    }

    /// Counts the clients with a connection anew.
    fn recount(&mut self) {
        let with = self.clients.values().filter(|p| p.control.is_some());
        self.connected = with.count();
    }

    /// The process has ended.
    pub fn dead(&mut self, id: ClientId) {
        self.disconnect(id, None);
        self.event(id, "ended");
        let Some(p) = self.clients.remove(&id) else {
            return;
        };
        self.dead_remote(&p);
        let kept = self.hand_down(&p);
        self.by_process.remove(&(p.proc_id, p.family.ident));
        let mut out = Out::default();
        self.groups.client_dead(id, &kept, &mut out);
        self.act(out, Reason::PeerGone, RETRY_SOON_MS);
        self.families.leave(p.family.ident, Some(p.cgroup()));
        self.busy_changed();
    }

    /// A process moves to a family table of its own, in which its connections keep their indices.
    fn moved(&mut self, id: ClientId, fds: Vec<Foreign>, bytes: u64) -> Result<(), Violation> {
        let now = self.now();
        let table = only(fds, "a table that is none, or not alone")?;
        let ident = memfd::check_fixed(&table, TABLE_BYTES);
        let ident = ident.filter(|_| bytes == TABLE_BYTES as u64);
        let ident = ident.ok_or(Violation("a family table that is none"))?;
        let Some(p) = self.clients.get_mut(&id) else {
            return Ok(());
        };
        if !p.may_move(now) {
            return Err(Violation("it moves all the time"));
        }
        let family = self.families.join(ident, table, (now, false));
        self.families.follows(ident, p.family.ident);
        let before = std::mem::replace(&mut p.family, family.clone()).ident;
        self.by_process.remove(&(p.proc_id, before));
        self.by_process.insert((p.proc_id, ident), id);
        self.families.leave(before, Some(p.cgroup()));
        self.rails(|r| r.moved(id, &family));
        self.event(id, "moved to a table of its own");
        Ok(())
    }

    /// A registration is taken back.
    fn forget(&mut self, who: ConnRef) {
        if let Some(p) = self.clients.get_mut(&who.client) {
            p.under_way.remove(&(who.conn, who.gen));
        }
        self.timing_ends(who);
        self.waiting.forget(who);
        self.forget_across(who);
    }

    /// Handles a message. Returns the registered socket that is to be read because of it. `Err`: the connection
    /// must be cut.
    pub fn message(
        &mut self,
        id: ClientId,
        msg: ToDaemon,
        fds: Vec<Foreign>,
    ) -> Result<Option<Registration>, Violation> {
        let who = |conn, gen| ConnRef {
            client: id,
            conn,
            gen,
        };
        let mut out = Out::default();
        let mut trouble = (Reason::PeerGone, RETRY_SOON_MS);
        match msg {
            ToDaemon::Hello { .. } => return Err(Violation("a second hello")),
            ToDaemon::Register {
                conn,
                gen,
                tx_tcp_pos,
                rx_tcp_pos,
                flags,
            } => {
                return self.register(who(conn, gen), [tx_tcp_pos, rx_tcp_pos], flags, None, fds);
            }
            ToDaemon::RegisterReceived {
                conn,
                gen,
                tx_tcp_pos,
                rx_tcp_pos,
                flags,
                from,
                copies,
            } => {
                let came = Some(Came { from, copies });
                return self.register(who(conn, gen), [tx_tcp_pos, rx_tcp_pos], flags, came, fds);
            }
            ToDaemon::Mapped { group, side, chunk } => {
                self.groups.mapped(id, group, side, chunk, &mut out)?
            }
            ToDaemon::PeerMapped { group, side, chunk } => {
                self.groups.peer_mapped(id, group, side, chunk, &mut out)?
            }
            ToDaemon::LaneDone { group, side, lane } => {
                let owner = self.owner(id, group, side, lane);
                self.groups.lane_done(owner, group, side, lane, &mut out)?;
                self.rails(|r| r.done(owner, (group, lane)));
            }
            ToDaemon::LaneRefused { group, side, lane } => {
                self.groups.lane_refused(id, group, side, lane, &mut out)?;
                self.rails(|r| r.done(id, (group, lane)));
            }
            ToDaemon::LaneHeld { group, lane, .. } => self.lane_held(id, (group, lane), fds)?,
            ToDaemon::LaneShut { group, lane, .. } => {
                self.rails(|r| r.shut(id, (group, lane)));
            }
            ToDaemon::TakeOver {
                group,
                side,
                lane,
                sender,
            } => self.take_over(id, (group, lane), (side, sender))?,
            ToDaemon::Moved { table_bytes } => self.moved(id, fds, table_bytes)?,
            ToDaemon::WantChunk { group, side } if !self.may_grow(id, (group, side)) => {}
            ToDaemon::WantChunk { group, side } => {
                self.groups.want_chunk(id, group, side, &mut out)?
            }
            ToDaemon::GroupFailed { group, side } => {
                trouble = self.group_failed(id, (group, side), &mut out)?;
            }
            ToDaemon::Reset { conn, gen, reason } => self.was_reset(who(conn, gen), reason),
            ToDaemon::FuseBlown {} => self.fuse_blown(id),
            ToDaemon::Forget { conn, gen } => {
                self.forget(who(conn, gen));
                trouble = (Reason::PeerDeclined, RETRY_SOON_MS);
                self.groups.forget(who(conn, gen), &mut out);
            }
        }
        self.act(out, trouble.0, trouble.1);
        self.busy_changed();
        Ok(None)
    }

    /// Sends what the link groups want sent, and declines the ends of lanes that will not be made. The rails are told
    /// last, because messages that result from their steps must follow those sent here.
    pub(crate) fn act(&mut self, out: Out, reason: Reason, retry_ms: u32) {
        let (remote, local): (Vec<_>, _) = out.sends.into_iter().partition(|s| s.to.is_remote());
        for s in local {
            self.note_offer(s.to, &s.msg);
            if let Some(p) = self.clients.get_mut(&s.to) {
                p.send(s.msg, s.fds);
            }
        }
        for e in out.failed.iter().flatten() {
            if Some(*e) != out.gave_up {
                self.decline(*e, reason, reason, retry_ms);
            }
        }
        self.act_remote(remote, &out.ready, &out.failed);
        self.effects();
    }

    /// The families with their connected processes, and with those that were found.
    pub fn snapshot(&self) -> Vec<Snapshot> {
        let mut all: HashMap<_, Snapshot> = HashMap::new();
        let mut add = |family: &Arc<Family>, holder| {
            let s = all.entry(family.ident).or_insert_with(|| Snapshot {
                family: family.clone(),
                holders: Vec::new(),
                recovered: Vec::new(),
            });
            match holder {
                (Some(start), h) => s.recovered.push((start, h)),
                (None, h) => s.holders.push(h),
            }
        };
        for p in self.clients.values().filter(|p| p.control.is_some()) {
            let holder = Holder {
                client: p.id,
                pid: p.proc_id.pid,
                own_pid: p.own_pid,
                netns: p.netns,
                comm: p.comm.clone(),
            };
            add(&p.family, (None, holder));
        }
        for r in &self.recovered {
            let holder = Holder {
                client: ClientId::NOBODY,
                pid: r.id.pid,
                own_pid: r.own_pid,
                netns: r.netns,
                comm: r.comm.clone(),
            };
            if let Some(f) = self.families.get(r.ident) {
                add(f, (Some(r.id.start), holder));
            }
        }
        let mut all: Vec<Snapshot> = all.into_values().collect();
        all.iter_mut()
            .for_each(|s| s.holders.sort_by_key(|h| h.client));
        all.sort_by_key(|s| s.holders.first().map(|h| h.client));
        all
    }

    /// The file of a chunk that this client has mapped and that a helper is to seal ([`crate::tasks::seal`]), and who pays.
    pub(crate) fn unsealed(
        &mut self,
        id: ClientId,
        (group, side, chunk): (u64, u8, u32),
    ) -> Option<(Arc<OwnedFd>, Arc<Cgroup>)> {
        let payer = self.clients.get(&id)?.cgroup().clone();
        let file = self.groups.unsealed(id, (group, side), chunk)?;
        Some((file, payer))
    }

    /// The processes of a family.
    fn of_family(&self, family: Ident) -> impl Iterator<Item = &Client> {
        let all = self.clients.values();
        all.filter(move |p| p.family.ident == family)
    }
}

/// The one descriptor that came with a message. `what` is wrong if there is none, or more than one.
fn only(mut fds: Vec<Foreign>, what: &'static str) -> Result<Foreign, Violation> {
    match (fds.pop(), fds.is_empty()) {
        (Some(fd), true) => Ok(fd),
        _ => Err(Violation(what)),
    }
}

/// Is this still the connection that was registered?
pub(crate) fn alive(clients: &HashMap<ClientId, Client>, c: &ConnRef) -> bool {
    let client = clients.get(&c.client).filter(|p| p.control.is_some());
    let view = client.and_then(|p| p.family.view(c.conn));
    view.is_some_and(|v| v.gen == c.gen && v.state == state::OPEN)
}
