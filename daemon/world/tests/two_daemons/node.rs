//! A node: its daemon, whole, with a clock and helpers of the test's, and its processes.

use super::along::Look;
use super::listing::{Known, Listing};
use super::machine::Machine;
use super::process::{Process, Wire};
use super::seen::note;
use super::tcp::cookie;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;
use underpass_rdma::devices::{Change, SysDevice, SysPort};
use underpass_rdma::sim::{self, Rng};
use underpass_rdma::verbs::*;
use underpassd::clients::control::Control;
use underpassd::clients::ids::{ClientId, ConnRef};
use underpassd::config::{Config, LimitsConfig, NodeConfig, PeerConfig, RailConfig};
use underpassd::core::register::Registration;
use underpassd::core::{Core, Hello};
use underpassd::dataplane::thread::{Loop, Next};
use underpassd::nodes::peers::cut::Cut;
use underpassd::nodes::peers::digest::Key;
use underpassd::nodes::peers::directory::Name;
use underpassd::nodes::peers::msg::Msg;
use underpassd::nodes::peers::Accepted;
use underpassd::os::fds::Foreign;
use underpassd::os::memfd;
use underpassd::os::process::Process as Peer;
use underpassd::os::system::System;
use underpassd::pairing::proof::{Proof, Record};
use underpassd::pairing::socket;

pub const RAILS: usize = 2;

/// What was recorded of connections, by their sockets' cookies.
#[derive(Default)]
pub struct Records(Mutex<HashMap<u64, Record>>);

impl Records {
    pub fn enter(&self, socket: BorrowedFd<'_>, record: Record) {
        self.0.lock().unwrap().insert(cookie(socket), record);
    }
}

impl Proof for Records {
    fn record(&self, socket: BorrowedFd<'_>) -> Option<Record> {
        self.0.lock().unwrap().get(&cookie(socket)).copied()
    }

    fn active(&self) -> bool {
        true
    }
}

/// A channel to the other node's daemon.
pub struct Channel {
    id: u64,
    out: mpsc::Receiver<Msg>,
    /// What has come, and when it is read.
    inn: VecDeque<(u64, Msg)>,
}

/// A daemon's view of a process.
struct Client {
    id: ClientId,
    /// `None`: it has executed a program that has no shim.
    control: Option<(Rc<Control>, Rc<Wire>)>,
}

pub struct Daemon {
    pub core: Core<sim::Node>,
    pub directory: Rc<Listing>,
    served: Loop<sim::Node>,
    /// Its data plane runs on a single processor.
    alone: bool,
    /// From when it sleeps, and until when.
    sleeps: Option<(u64, u64)>,
    busy_until: u64,
    pub channel: Option<Channel>,
    clients: BTreeMap<u32, Client>,
    reads: Vec<Registration>,
    pub dead: Vec<(u64, ClientId)>,
    swept: u64,
    /// Looks for holders of inherited ends: when the next one begins, and what the present one has found, and until
    /// when it takes.
    looks_at: u64,
    looking: Option<(u64, Vec<Option<u32>>)>,
    looks_unseen_at: u64,
}

pub struct Node {
    n: usize,
    pub machine: Arc<Machine>,
    pub verbs: sim::Node,
    records: Arc<Records>,
    pub daemon: RefCell<Daemon>,
    pub processes: RefCell<Vec<Rc<RefCell<Process>>>>,
    /// A child has executed another program without a word to the daemon about its parent's lane, whose slot is free when
    /// the parent ends.
    pub leaks: Cell<bool>,
    /// For the next daemon.
    pub limits: RefCell<LimitsConfig>,
}

pub fn name(n: usize) -> String {
    format!("n{n}")
}

fn config(n: usize, limits: LimitsConfig) -> Config {
    let addresses = |n| vec![format!("10.9.0.{}/32", n + 1)];
    let rail = |r| RailConfig {
        device: format!("sim{r}"),
        port: None,
        fabric: Some(r as u32 + 1),
        off: false,
        encrypted: false,
    };
    let other = 1 - n;
    Config {
        node: NodeConfig {
            name: name(n),
            control: String::new(),
            addresses: addresses(n),
        },
        peer: vec![PeerConfig {
            name: name(other),
            control: "192.0.2.1:1".into(),
            addresses: addresses(other),
        }],
        rail: (0..RAILS).map(rail).collect(),
        limits,
        ..Config::default()
    }
}

impl Daemon {
    fn new(
        config: Config,
        machine: &Arc<Machine>,
        verbs: &sim::Node,
        records: &Arc<Records>,
        alone: bool,
    ) -> Daemon {
        let system = machine.clone();
        let directory = Rc::new(Listing {
            file: config.directory().unwrap().expect("peers"),
            known: Cell::new(Known::All),
        });
        let mut core = Core::new(
            config,
            Some(directory.clone()),
            records.clone(),
            system,
            Some(verbs.clone()),
        );
        let plane = core.rails.clone().expect("peers");
        let (stale, _) = mpsc::unbounded_channel();
        let served = Loop::new(plane, stale, alone).expect("descriptors");
        core.rails(|r| {
            let all: Vec<Change> = (0..RAILS)
                .map(|rail| Change::Added(device(verbs, rail)))
                .collect();
            r.devices_changed(&all);
            r.tell_refusals();
        });
        Daemon {
            core,
            directory,
            served,
            alone,
            sleeps: None,
            busy_until: 0,
            channel: None,
            clients: BTreeMap::new(),
            reads: Vec::new(),
            dead: Vec::new(),
            swept: 0,
            looks_at: 0,
            looking: None,
            looks_unseen_at: 0,
        }
    }
}

fn device(verbs: &sim::Node, rail: usize) -> SysDevice {
    let name = format!("sim{rail}");
    let id = verbs.scan().unwrap().into_iter().find(|d| d.name == name);
    SysDevice {
        id: id.expect("plugged in"),
        node_guid: 1,
        transport: Transport::InfiniBand,
        pci: None,
        numa_node: None,
        verbs: Some("uverbs0".into()),
        ports: vec![SysPort {
            port: 1,
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            lid: 0,
            speed_mbps: None,
            netdev: None,
            gids: vec![GidEntry {
                index: 0,
                gid: verbs.gid(rail),
                kind: GidKind::RoceV2,
                netdev: None,
            }],
        }],
    }
}

impl Node {
    pub fn new(n: usize, verbs: sim::Node, records: &Arc<Records>, rng: &mut Rng) -> Node {
        let machine = Arc::new(Machine::new(rng.next_u64()));
        let config = config(n, LimitsConfig::default());
        let daemon = Daemon::new(config, &machine, &verbs, records, rng.one_in(2));
        Node {
            n,
            machine,
            verbs,
            records: records.clone(),
            daemon: RefCell::new(daemon),
            processes: RefCell::default(),
            leaks: Cell::new(false),
            limits: RefCell::default(),
        }
    }

    pub fn process(&self, p: usize) -> Rc<RefCell<Process>> {
        self.processes.borrow()[p].clone()
    }

    /// A capture of the lane of a process's end, if it has one.
    pub fn along(&self, pid: u32, (conn, gen): (u32, u32)) -> Option<Look> {
        let d = self.daemon.try_borrow().ok()?;
        let client = d.clients.get(&pid)?.id;
        let (mut along, table) = d.core.along(ConnRef { client, conn, gen })?;
        Some(Box::new(move |first, show| {
            let tables = [Some(&table), None];
            let seen = along.look(tables, first, &mut |end, p| {
                show(end, p.at, p.lost, &p.bytes)
            });
            !seen.over
        }))
    }

    /// The daemon is killed, and another one started.
    pub fn restart(&self, rng: &mut Rng) {
        self.machine.forget_jobs();
        let alone = rng.one_in(2);
        let config = config(self.n, self.limits.borrow().clone());
        let fresh = Daemon::new(config, &self.machine, &self.verbs, &self.records, alone);
        drop(self.daemon.replace(fresh));
    }

    /// A process connects to the daemon.
    pub fn connect(&self, runtime: &tokio::runtime::Runtime, process: &mut Process) {
        let (a, b) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        let mut peer = Peer::of_peer(a.as_fd(), u64::MAX).expect("ourselves");
        peer.id.pid = process.pid;
        peer.id.start = u64::from(process.pid);
        let control = {
            let _inside = runtime.enter();
            Rc::new(Control::new(Foreign::new(a)).expect("a runtime"))
        };
        let table = Foreign::new(process.family.table_fd());
        let hello = Hello {
            version: lane::VERSION,
            own_pid: process.pid,
            ident: memfd::check_fixed(&table, lane::family::TABLE_BYTES).expect("a table"),
            table,
            found: None,
        };
        let mut d = self.daemon.borrow_mut();
        let (id, _) = d.core.admit(&peer, hello, &control).expect("let in");
        let wire = Rc::new(Wire::default());
        process.connected(b, wire.clone());
        let control = Some((control, wire));
        d.clients.insert(process.pid, Client { id, control });
    }

    /// A process has executed a program that has no shim: its control connection ends. What it has said before that is
    /// read.
    pub fn disconnect(&self, pid: u32) {
        let d = &mut *self.daemon.borrow_mut();
        let Some(client) = d.clients.get_mut(&pid) else {
            return;
        };
        if let (id, Some((control, wire))) = (client.id, client.control.take()) {
            d.hear(id, &wire, || false);
            d.core.disconnect(id, Some(&control));
        }
    }

    /// A process has ended; the daemon gets to know a little later, and has perhaps not read what it had said.
    pub fn ended(&self, pid: u32, rng: &mut Rng) {
        self.machine.ends(pid);
        if rng.one_in(2) {
            note("a last message that nobody reads");
            let d = &mut *self.daemon.borrow_mut();
            let of = d.clients.get(&pid).and_then(|p| p.control.as_ref());
            of.inspect(|(_, wire)| while wire.next().is_some() {});
        }
        self.disconnect(pid);
        let at = self.machine.now() + rng.below(5_000_000);
        let d = &mut *self.daemon.borrow_mut();
        if let Some(x) = d.clients.remove(&pid) {
            d.dead.push((at, x.id));
        }
    }

    /// What there is to do for the daemon's two threads; as much of it as chance wants.
    pub fn run(&self, rng: &mut Rng) {
        let now = self.machine.now();
        let Ok(mut d) = self.daemon.try_borrow_mut() else {
            return;
        };
        if now < d.busy_until {
            return;
        }
        if rng.one_in(400) {
            d.busy_until = now + rng.below(3_000_000);
        }
        d.hear_processes(rng);
        d.read_registrations(self.n, rng);
        d.hear_channel(now, &name(1 - self.n).into());
        let all = std::mem::take(&mut d.dead);
        let (due, rest): (Vec<_>, _) = all.into_iter().partition(|x| x.0 <= now);
        d.dead = rest;
        due.into_iter().for_each(|(_, id)| d.core.dead(id));
        if now >= d.swept + 100_000_000 {
            d.swept = now;
            d.core.tick_across();
            while d.core.sweep() {}
        }
        d.look_at_inherited(&self.machine, rng);
        d.look_for_unseen_closes(&self.machine, rng);
        d.run_data_plane(now);
        if rng.one_in(2) {
            d.core.effects();
        }
    }

    pub fn channel_up(&self, incarnation: u64, key: Key) {
        let (queue, out) = mpsc::channel(4096);
        let met = Accepted {
            node: name(1 - self.n).into(),
            address: String::new(),
            incarnation,
            release: String::new(),
            version: underpassd::nodes::peers::msg::VERSION,
            expires: 0,
            life_s: 0,
            we_dialed: self.n == 0,
        };
        let mut d = self.daemon.borrow_mut();
        let cut = Rc::new(Cut::default());
        let id = d.core.channel_up(&met, key, 1024, queue, cut);
        d.channel = Some(Channel {
            id: id.expect("the only one"),
            out,
            inn: VecDeque::new(),
        });
    }

    pub fn channel_down(&self) {
        let d = &mut *self.daemon.borrow_mut();
        if let Some(c) = d.channel.take() {
            let node: Name = name(1 - self.n).into();
            let why = lane::proto::reason::Reason::PeerDaemon;
            d.core.channel_down(&node, c.id, "cut", why);
        }
    }

    /// What has been said to the other node, in order.
    pub fn said(&self) -> Vec<Msg> {
        let Ok(mut d) = self.daemon.try_borrow_mut() else {
            return Vec::new();
        };
        let c = d.channel.as_mut();
        c.map_or(Vec::new(), |c| {
            std::iter::from_fn(|| c.out.try_recv().ok()).collect()
        })
    }

    /// Messages of the other node, to be read some time later.
    pub fn deliver(&self, all: Vec<Msg>, rng: &mut Rng) {
        let now = self.machine.now();
        if let Some(c) = &mut self.daemon.borrow_mut().channel {
            for m in all {
                let last = c.inn.back().map_or(0, |m| m.0);
                c.inn.push_back(((now + rng.below(100_000)).max(last), m));
            }
        }
    }

    pub fn incarnation(&self) -> u64 {
        self.daemon.borrow().core.incarnation
    }

    /// Does its data plane run on a single processor?
    pub fn is_alone(&self) -> bool {
        self.daemon.borrow().alone
    }

    /// Its data plane has a few turns, while no time passes: for how many ns it sleeps since then or before. `None`: it
    /// goes on, or something wakes it again and again.
    pub fn sleeps(&self) -> Option<u64> {
        let d = &mut *self.daemon.borrow_mut();
        let now = self.machine.now();
        (0..4).for_each(|_| d.run_data_plane(now));
        let (from, until) = d.sleeps.filter(|_| !d.served.wait(false))?;
        Some(until - from)
    }

    /// As the tools name an end of this process's.
    pub fn name_of(&self, pid: u32, conn: u32, gen: u32) -> ConnRef {
        let client = self.daemon.borrow().clients[&pid].id;
        ConnRef { client, conn, gen }
    }

    /// Is there a lane that its process has finished with, or a process that has ended, and the daemon is not done with
    /// it?
    pub fn has_orphans(&self) -> bool {
        let d = self.daemon.borrow();
        let rails = d.core.rails.as_ref();
        let said = |p: &Client| p.control.as_ref().is_some_and(|(_, w)| w.says_done());
        let over = |r: &str| r.contains("ends Some(Over)");
        rails.is_some_and(|r| over(&format!("{:?}", r.lock())))
            || !d.dead.is_empty()
            || !d.core.inherited.all.is_empty()
            || d.clients.values().any(said)
    }
}

impl Daemon {
    fn run_data_plane(&mut self, now: u64) {
        if let Some((_, until)) = self.sleeps {
            if !self.served.wait(false) && now < until {
                return;
            }
            self.sleeps = None;
        }
        match self.served.poll() {
            Next::Sleep(until) => self.sleeps = Some((now, until)),
            Next::Poll => {}
            Next::End => unreachable!("nobody ends it"),
        }
    }

    fn hear_processes(&mut self, rng: &mut Rng) {
        let mut all = Vec::new();
        for client in self.clients.values() {
            let Some((control, wire)) = &client.control else {
                continue;
            };
            control.flush();
            all.push((client.id, wire.clone()));
        }
        for (id, wire) in all {
            self.hear(id, &wire, || rng.one_in(4));
        }
    }

    /// Reads what a process has said, until it has enough.
    fn hear(&mut self, id: ClientId, wire: &Wire, mut enough: impl FnMut() -> bool) {
        while !enough() {
            let Some((msg, fds)) = wire.next() else {
                return;
            };
            let fds = fds.into_iter().map(Foreign::new).collect();
            match self.core.message(id, msg, fds) {
                Ok(r) => self.reads.extend(r),
                Err(e) => panic!("a violation: {}", e.0),
            }
        }
    }

    /// What helpers find out of registered sockets. (Addresses are the nodes'.)
    fn read_registrations(&mut self, n: usize, rng: &mut Rng) {
        while !self.reads.is_empty() && !rng.one_in(3) {
            let r = self.reads.remove(0);
            let read = socket::read(r.fd.as_fd(), r.tcp_pos, r.flags, &*r.proof);
            let read = read.map(|mut end| {
                end.local.set_ip(address(n));
                end.peer.set_ip(address(1 - n));
                end
            });
            self.core
                .registration_read(r.who, Some(read), r.came, r.flags);
            drop(r.job);
            self.core.credit(r.who.client, r.control);
        }
    }

    fn hear_channel(&mut self, now: u64, node: &Name) {
        while let Some(c) = &mut self.channel {
            let due = c.inn.front().is_some_and(|m| m.0 <= now);
            let Some((_, msg)) = due.then(|| c.inn.pop_front()).flatten() else {
                return;
            };
            let id = c.id;
            let done = self.core.peer_message(node, id, msg);
            assert_eq!(done, Ok(()));
        }
    }

    /// As `tasks::look_at_inherited`, whose helper looks into `/proc`.
    fn look_at_inherited(&mut self, machine: &Machine, rng: &mut Rng) {
        let now = machine.now();
        match self.looking.take_if(|l| l.0 <= now) {
            Some((_, holders)) => {
                self.core.inherited_looked_at(&holders);
                self.looks_at = now + 1_000_000_000;
            }
            None if self.looking.is_none() && now >= self.looks_at => {
                let all = &self.core.inherited.all;
                if all.is_empty() {
                    return;
                }
                let found: Vec<_> = all
                    .iter()
                    .map(|i| machine.holder(i.inode).filter(|_| !i.has_left()))
                    .collect();
                note(match found.contains(&None) {
                    true => "a look for holders finds none",
                    false => "a look for holders finds one",
                });
                self.looking = Some((now + rng.below(100_000_000), found));
            }
            None => {}
        }
    }

    /// As `tasks::look_for_unseen_closes`.
    fn look_for_unseen_closes(&mut self, machine: &Machine, rng: &mut Rng) {
        let now = machine.now();
        if now < self.looks_unseen_at {
            return;
        }
        self.looks_unseen_at = now + 1_000_000_000 + rng.below(500_000_000);
        for h in self.core.idle_ends() {
            if machine.holder(h.idle.inode).is_none() {
                note("an end that nobody holds");
                self.core.rails(|r| r.not_held(&h.idle));
            }
        }
    }
}

fn address(n: usize) -> std::net::IpAddr {
    std::net::Ipv4Addr::new(10, 9, 0, n as u8 + 1).into()
}
