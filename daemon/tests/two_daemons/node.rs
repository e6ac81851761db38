//! A node: its daemon, whole, with a clock and helpers of the test's, and its processes.

use super::process::Process;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;
use underpass_rdma::devices::{Change, SysDevice, SysPort};
use underpass_rdma::sim::{self, Rng};
use underpass_rdma::verbs::*;
use underpassd::clients::control::Control;
use underpassd::clients::ids::ClientId;
use underpassd::config::{Config, NodeConfig, PeerConfig, RailConfig};
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
use underpassd::os::system::{self, System};
use underpassd::pairing::proof::{Proof, Record};
use underpassd::pairing::socket;

pub const RAILS: usize = 2;

type Job = Box<dyn FnOnce() + Send>;

/// The machine under a daemon.
pub struct Machine {
    pub now: AtomicU64,
    jobs: Mutex<VecDeque<Job>>,
    rng: Mutex<Rng>,
}

impl System for Machine {
    fn now(&self) -> u64 {
        self.now.load(Relaxed)
    }

    fn help(&self, job: Job) {
        self.jobs.lock().unwrap().push_back(job);
    }

    fn random(&self) -> u64 {
        self.rng.lock().unwrap().next_u64()
    }

    fn lives(&self, pid: u32) -> bool {
        system::Machine.lives(pid)
    }

    fn tcp_send(&self, sock: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, i32> {
        system::Machine.tcp_send(sock, bytes)
    }

    fn tcp_sent(&self, sock: BorrowedFd<'_>) -> Option<u64> {
        system::Machine.tcp_sent(sock)
    }
}

/// What was recorded of connections, by their sockets' cookies.
#[derive(Default)]
pub struct Records(pub Mutex<HashMap<u64, Record>>);

impl Proof for Records {
    fn record(&self, socket: BorrowedFd<'_>) -> Option<Record> {
        self.0.lock().unwrap().get(&cookie(socket)).copied()
    }

    fn active(&self) -> bool {
        true
    }
}

pub fn cookie(socket: BorrowedFd<'_>) -> u64 {
    let got = underpassd::os::sockopt::get(socket, libc::SOL_SOCKET, libc::SO_COOKIE);
    got.expect("a socket").0
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
    control: Rc<Control>,
}

pub struct Daemon {
    pub core: Core<sim::Node>,
    served: Loop<sim::Node>,
    sleeps_until: Option<u64>,
    busy_until: u64,
    pub channel: Option<Channel>,
    clients: HashMap<usize, Client>,
    reads: Vec<Registration>,
    pub dead: Vec<(u64, ClientId)>,
    swept: u64,
}

pub struct Node {
    n: usize,
    pub machine: Arc<Machine>,
    verbs: sim::Node,
    records: Arc<Records>,
    pub daemon: Daemon,
    pub processes: Vec<Process>,
    births: u64,
}

pub fn name(n: usize) -> String {
    format!("n{n}")
}

fn config(n: usize) -> Config {
    let addresses = |n| vec![format!("10.9.0.{}/32", n + 1)];
    let rail = |r| RailConfig {
        device: format!("sim{r}"),
        port: None,
        fabric: Some(r as u32 + 1),
        off: false,
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
        ..Config::default()
    }
}

impl Daemon {
    fn new(
        n: usize,
        machine: &Arc<Machine>,
        verbs: &sim::Node,
        records: &Arc<Records>,
        alone: bool,
    ) -> Daemon {
        let system = machine.clone();
        let mut core = Core::new(config(n), records.clone(), system, Some(verbs.clone()));
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
            served,
            sleeps_until: None,
            busy_until: 0,
            channel: None,
            clients: HashMap::new(),
            reads: Vec::new(),
            dead: Vec::new(),
            swept: 0,
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
    pub fn new(
        n: usize,
        verbs: sim::Node,
        records: &Arc<Records>,
        processes: usize,
        rng: &mut Rng,
    ) -> Node {
        let machine = Arc::new(Machine {
            now: AtomicU64::new(super::START_NS),
            jobs: Mutex::default(),
            rng: Mutex::new(Rng(rng.next_u64())),
        });
        let daemon = Daemon::new(n, &machine, &verbs, records, rng.one_in(2));
        Node {
            n,
            machine,
            verbs,
            records: records.clone(),
            daemon,
            processes: (0..processes)
                .map(|p| Process::new(format!("n{n}p{p}")))
                .collect(),
            births: 0,
        }
    }

    fn now(&self) -> u64 {
        self.machine.now()
    }

    /// The daemon is killed, and another one started.
    pub fn restart(&mut self, rng: &mut Rng) {
        self.machine.jobs.lock().unwrap().clear();
        // (First the old one, whose devices are closed.)
        let alone = rng.one_in(2);
        let fresh = || Daemon::new(self.n, &self.machine, &self.verbs, &self.records, alone);
        let old = std::mem::replace(&mut self.daemon, fresh());
        drop(old);
    }

    /// A process connects to the daemon.
    pub fn connect(&mut self, runtime: &tokio::runtime::Runtime, p: usize) {
        let process = &mut self.processes[p];
        let (a, b) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        let mut peer = Peer::of_peer(a.as_fd(), u64::MAX).expect("ourselves");
        peer.id.start = (self.n * 100 + p) as u64;
        let control = {
            let _inside = runtime.enter();
            Rc::new(Control::new(Foreign::new(a)).expect("a runtime"))
        };
        let table = Foreign::new(process.table_fd());
        let hello = Hello {
            version: lane::VERSION,
            own_pid: std::process::id(),
            ident: memfd::check_fixed(&table, lane::family::TABLE_BYTES).expect("a table"),
            table,
        };
        let (id, _) = self
            .daemon
            .core
            .admit(&peer, hello, &control)
            .expect("let in");
        process.control = Some(b);
        self.daemon.clients.insert(p, Client { id, control });
        self.births += 1;
    }

    /// A process is killed; the daemon gets to know a little later.
    pub fn kill(&mut self, p: usize, rng: &mut Rng) {
        self.processes[p].kill();
        if let Some(x) = self.daemon.clients.remove(&p) {
            self.daemon.core.disconnect(x.id, Some(&x.control));
            let at = self.now() + rng.below(5_000_000);
            self.daemon.dead.push((at, x.id));
        }
    }

    /// What there is to do for the daemon; as much of it as chance wants.
    pub fn run(&mut self, rng: &mut Rng) {
        let now = self.now();
        if now < self.daemon.busy_until {
            return;
        }
        if rng.one_in(400) {
            self.daemon.busy_until = now + rng.below(3_000_000);
        }
        self.hear_processes(rng);
        self.read_registrations(rng);
        self.hear_channel();
        self.help(rng);
        let d = &mut self.daemon;
        let all = std::mem::take(&mut d.dead);
        let (due, rest): (Vec<_>, _) = all.into_iter().partition(|x| x.0 <= now);
        d.dead = rest;
        for (_, id) in due {
            d.core.dead(id);
        }
        if now >= d.swept + 100_000_000 {
            d.swept = now;
            d.core.tick_across();
            d.core.sweep();
        }
        self.run_data_plane();
        if rng.one_in(2) {
            self.daemon.core.effects();
        }
    }

    fn run_data_plane(&mut self) {
        let (now, d) = (self.now(), &mut self.daemon);
        if let Some(until) = d.sleeps_until {
            if !d.served.wait(false) && now < until {
                return;
            }
            d.sleeps_until = None;
        }
        match d.served.poll() {
            Next::Sleep(until) => d.sleeps_until = Some(until),
            Next::Poll => {}
            Next::End => unreachable!("nobody ends it"),
        }
    }

    fn hear_processes(&mut self, rng: &mut Rng) {
        for (p, process) in self.processes.iter_mut().enumerate() {
            let Some(client) = self.daemon.clients.get(&p) else {
                continue;
            };
            client.control.flush();
            while !rng.one_in(4) {
                let Some((msg, fds)) = process.said.pop_front() else {
                    break;
                };
                let fds = fds.into_iter().map(Foreign::new).collect();
                let done = self.daemon.core.message(client.id, msg, fds);
                match done {
                    Ok(r) => self.daemon.reads.extend(r),
                    Err(e) => panic!("a violation: {}", e.0),
                }
            }
        }
    }

    /// What helpers find out of registered sockets. (Addresses are the nodes'.)
    fn read_registrations(&mut self, rng: &mut Rng) {
        while !self.daemon.reads.is_empty() && !rng.one_in(3) {
            let r = self.daemon.reads.remove(0);
            let read = socket::read(r.fd.as_fd(), r.tcp_pos, r.flags, &*r.proof);
            let read = read.map(|mut end| {
                end.local.set_ip(address(self.n));
                end.peer.set_ip(address(1 - self.n));
                end
            });
            let core = &mut self.daemon.core;
            core.registration_read(r.who, Some(read), r.came, r.flags);
            drop(r.job);
            core.credit(r.who.client, r.control);
        }
    }

    /// Jobs of helpers, in any order.
    fn help(&mut self, rng: &mut Rng) {
        while !rng.one_in(3) {
            let mut jobs = self.machine.jobs.lock().unwrap();
            let n = rng.below(jobs.len() as u64) as usize;
            let Some(job) = jobs.remove(n) else { return };
            drop(jobs);
            job();
        }
    }

    fn hear_channel(&mut self) {
        let now = self.now();
        let node: Name = name(1 - self.n).into();
        while let Some(c) = &mut self.daemon.channel {
            let due = c.inn.front().is_some_and(|m| m.0 <= now);
            let Some((_, msg)) = due.then(|| c.inn.pop_front()).flatten() else {
                return;
            };
            let id = c.id;
            let done = self.daemon.core.peer_message(&node, id, msg);
            assert_eq!(done, Ok(()));
        }
    }

    pub fn channel_up(&mut self, incarnation: u64, key: Key) {
        let (queue, out) = mpsc::channel(4096);
        let met = Accepted {
            node: name(1 - self.n).into(),
            address: String::new(),
            incarnation,
            release: String::new(),
            version: underpassd::nodes::peers::msg::VERSION,
            expires: 0,
            we_dialed: self.n == 0,
        };
        let id = self
            .daemon
            .core
            .channel_up(&met, key, 1024, queue, Rc::new(Cut::default()));
        self.daemon.channel = Some(Channel {
            id: id.expect("the only one"),
            out,
            inn: VecDeque::new(),
        });
    }

    pub fn channel_down(&mut self) {
        if let Some(c) = self.daemon.channel.take() {
            let node: Name = name(1 - self.n).into();
            let why = lane::proto::reason::Reason::PeerDaemon;
            self.daemon.core.channel_down(&node, c.id, "cut", why);
        }
    }

    /// What has been said to the other node, in order.
    pub fn said(&mut self) -> Vec<Msg> {
        let c = self.daemon.channel.as_mut();
        c.map_or(Vec::new(), |c| {
            std::iter::from_fn(|| c.out.try_recv().ok()).collect()
        })
    }

    /// Messages of the other node, to be read some time later.
    pub fn deliver(&mut self, all: Vec<Msg>, rng: &mut Rng) {
        let now = self.now();
        if let Some(c) = &mut self.daemon.channel {
            for m in all {
                let last = c.inn.back().map_or(0, |m| m.0);
                c.inn.push_back(((now + rng.below(100_000)).max(last), m));
            }
        }
    }

    pub fn jobs(&self) -> usize {
        self.machine.jobs.lock().unwrap().len()
    }
}

fn address(n: usize) -> std::net::IpAddr {
    std::net::Ipv4Addr::new(10, 9, 0, n as u8 + 1).into()
}
