//! Two nodes with a daemon each, applications, TCP and a control channel, under one clock and one
//! seed. What it checks is what must hold always: every byte arrives once and in order, nobody
//! waits for ever, nothing lands where it should not, nothing is left at the end.

#![allow(dead_code)]

pub mod app;
mod build;
pub mod forged;
pub mod tcp;
mod words;

use app::App;
use build::{add_rail, lane, node, Host};
use lane::half::Area;
use lane::notify;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use tcp::Pipe;
use underpass_rdma::engine::{ClientId, Control, Event, Fault, LaneId, LinkId, Pair, RailId};
use underpass_rdma::sim::{self, Faults, Rng};
use underpass_rdma::verbs::{Live, Mapping};

pub const RAILS: usize = 2;
pub struct Client {
    id: ClientId,
    pub app: Area,
    pub proxy: Area,
    chunk: Arc<Mapping>,
    own: Arc<Mapping>,
    _words: [Arc<Mapping>; 2],
    asleep: bool,
}

impl Client {
    fn wake(&mut self) {
        if std::mem::take(&mut self.asleep) {
            notify::wake_up(&self.app.control().expect("mapped").sleepers.0);
        }
    }
}

pub struct Node {
    provider: sim::Node,
    pub pair: Pair<sim::Node>,
    host: Host,
    rails: [Option<RailId>; RAILS],
    pub clients: Vec<Client>,
    next_poll: u64,
    flushed: BTreeSet<LaneId>,
    removed: BTreeSet<LaneId>,
    gone: BTreeSet<ClientId>,
    pub faults: Vec<(usize, Fault)>,
    pub pair_failed: Option<&'static str>,
    asleep: bool,
    /// Counted as asleep on its clients' link groups; one that stays so polls once for each wake-up.
    counted: bool,
    stays: bool,
    /// Links by their completion queues.
    queues: BTreeMap<u32, LinkId>,
    /// The daemon has given its pair up, and the link groups are gone.
    abandoned: bool,
}

impl Node {
    /// Something is about to change: it may not sleep through it.
    fn notify(&mut self) {
        self.asleep = false;
        if std::mem::take(&mut self.counted) {
            self.pair.wake_up();
        }
    }

    /// Prepares to sleep; whether it must look once more.
    fn fall_asleep(&mut self) -> bool {
        let queues = &mut self.queues;
        let news = self.pair.arm(|link, cq| {
            queues.insert(cq.id(), link);
        });
        if !self.counted {
            self.pair.fall_asleep();
        }
        !std::mem::replace(&mut self.counted, true) || news
    }

    fn wake(&mut self, notified: Vec<u32>) {
        self.asleep = false;
        for cq in notified {
            if let Some(link) = self.queues.get(&cq) {
                self.pair.notified(*link, self.stays);
            }
        }
        if !self.stays {
            self.notify();
        }
    }
}

pub struct Lane {
    pub client: usize,
    pub ends: [App; 2],
    pub ids: [LaneId; 2],
    pipes: [RefCell<Pipe>; 2],
    pub reset: bool,
}

type Tamper = Box<dyn FnMut(usize, Control) -> Control>;

pub struct Sim {
    pub world: sim::World,
    pub rng: Rng,
    pub now: u64,
    pub nodes: Vec<Node>,
    pub lanes: Vec<Lane>,
    control: [VecDeque<(u64, Control)>; 2],
    pub control_up: bool,
    pub tamper: Option<Tamper>,
    wires: [bool; RAILS],
    pub counts: Counts,
    /// Pauses of daemons and applications.
    slow_in: u64,
    /// Receivers that a switch in doubt has reached.
    pub undecided: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub ring_bytes: u64,
    /// Bytes behind messages.
    pub inlined: u64,
    pub ups: u64,
    pub moves: u64,
    pub link_downs: u64,
    pub no_rail: u64,
    pub queries: u64,
    pub removed_devices: u64,
}

impl Sim {
    pub fn new(seed: u64, lanes: usize, faults: Faults) -> Sim {
        let mut rng = Rng(seed ^ 0x5eed);
        let world = sim::World::new(seed, 2, RAILS, faults);
        let clients = 1 + rng.below(2) as usize;
        let mut nodes: Vec<Node> = (0..2).map(|n| node(&world, n, clients, &mut rng)).collect();
        let lanes = (0..lanes)
            .map(|l| lane(&mut nodes, l, l % clients, &mut rng))
            .collect();
        let slow_in = [0, 200, 1000][rng.below(3) as usize];
        Sim {
            world,
            rng,
            now: 1_000,
            nodes,
            lanes,
            control: Default::default(),
            control_up: false,
            tamper: None,
            wires: [true; RAILS],
            counts: Counts::default(),
            slow_in,
            undecided: 0,
        }
    }

    /// One tick: time, verbs, control channel, daemons, applications. Whether anything moved.
    pub fn tick(&mut self, apps: bool) -> bool {
        self.now += 1 + self.rng.below(20_000);
        self.world.run_until(self.now);
        let mut moved = false;
        for n in 0..2 {
            while self.control[n].front().is_some_and(|m| m.0 <= self.now) {
                if let Some((_, m)) = self.control[n].pop_front() {
                    self.nodes[n].notify();
                    self.nodes[n].pair.control(m);
                }
            }
            self.poll_node(n);
        }
        if apps {
            for l in 0..self.lanes.len() {
                for side in 0..2 {
                    moved |= self.step_app(l, side);
                }
            }
        }
        if !moved {
            self.now += self.rng.below(30_000);
        }
        moved
    }

    fn poll_node(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        if self.now < node.next_poll {
            return;
        }
        let timer = self.now >= node.pair.next_timer_ns(0);
        if node.asleep {
            let notified = self.world.notified(n);
            if !timer && notified.is_empty() {
                return;
            }
            node.wake(notified);
        }
        let polls = if node.stays { 1 } else { 1 + self.rng.below(3) };
        let mut worked = false;
        for _ in 0..polls {
            worked = node.pair.poll(self.now, &mut node.host);
        }
        if node.stays || !worked && self.rng.one_in(3) {
            while !node.pair.unfinished() {
                if !node.fall_asleep() {
                    node.asleep = true;
                    break;
                }
                node.pair.poll(self.now, &mut node.host);
            }
        }
        if self.rng.one_in(self.slow_in) {
            node.next_poll = self.now + self.rng.below(3_000_000);
        }
        for p in &mut node.clients {
            if node.host.rung.contains(&p.id) {
                p.wake();
            }
        }
        node.host.rung.clear();
        self.events(n);
    }

    fn events(&mut self, n: usize) {
        while let Some(e) = self.nodes[n].pair.next_event() {
            match e {
                Event::Control(m) => {
                    if matches!(m, Control::SwitchQuery { .. }) {
                        self.counts.queries += 1;
                    }
                    if self.control_up {
                        let m = match &mut self.tamper {
                            Some(t) => t(n, m),
                            None => m,
                        };
                        let last = self.control[1 - n].back().map_or(0, |m| m.0);
                        let at = (self.now + self.rng.below(100_000)).max(last);
                        self.control[1 - n].push_back((at, m));
                    }
                }
                Event::LaneFailed { lane, fault } => {
                    let l = self.lanes.iter().position(|l| l.ids[n] == lane);
                    let l = l.expect("a lane of ours");
                    self.lanes[l].reset = true;
                    self.nodes[n].faults.push((l, fault));
                }
                Event::Flushed { lane, .. } => {
                    self.nodes[n].flushed.insert(lane);
                }
                Event::Removed { lane } => {
                    assert!(self.nodes[n].removed.insert(lane), "removed twice");
                }
                Event::ClientRemoved { client } => {
                    self.nodes[n].gone.insert(client);
                }
                Event::PairFailed(why) => self.nodes[n].pair_failed = Some(why),
                Event::LinkDown { why, .. } => {
                    self.counts.link_downs += 1;
                    if std::env::var_os("WHY").is_some() {
                        eprintln!("{} node {n}: link down: {why}", self.now);
                    }
                }
                Event::NoRail => self.counts.no_rail += 1,
                _ => {}
            }
        }
    }

    fn step_app(&mut self, l: usize, side: usize) -> bool {
        let lane = &mut self.lanes[l];
        if lane.pipes[1 - side].borrow_mut().run_until(self.now) {
            self.wake_app(l, side);
        }
        let lane = &self.lanes[l];
        let asleep = self.nodes[side].clients[lane.client].asleep;
        if lane.reset || asleep || self.rng.one_in(3) {
            return false;
        }
        if self.step_end(l, side, false) {
            return true;
        }
        if self.rng.one_in(8) {
            self.sleep_app(self.lanes[l].client, side);
        }
        false
    }

    fn step_end(&mut self, l: usize, side: usize, all: bool) -> bool {
        let lane = &mut self.lanes[l];
        let node = &mut self.nodes[side];
        let client = &node.clients[lane.client];
        let rang = Cell::new(false);
        let port = tcp::End {
            out: &lane.pipes[side],
            inn: &lane.pipes[1 - side],
            arrives: self.now + 1_000 + self.rng.below(50_000),
            rang: &rang,
        };
        let w = app::World {
            app: &client.app,
            proxy: &client.proxy,
            port: &port,
        };
        if node.abandoned {
            self.undecided += u64::from(lane.ends[side].leave_group(&w));
        }
        let held = port.inn.borrow().held();
        let moved = lane.ends[side].step(&w, &mut self.rng, all);
        let room = port.inn.borrow().held() < held;
        if rang.get() && node.asleep {
            node.wake(Vec::new());
        }
        if moved || room {
            self.wake_app(l, 1 - side);
        }
        moved
    }

    /// Counts the process as a sleeper, looks once more at everything, and sleeps until its doorbell
    /// is rung or TCP has something.
    fn sleep_app(&mut self, client: usize, side: usize) {
        let p = &self.nodes[side].clients[client];
        notify::fall_asleep(&p.app.control().expect("mapped").sleepers.0);
        let mut moved = false;
        for l in 0..self.lanes.len() {
            if self.lanes[l].client == client && !self.lanes[l].reset {
                moved |= self.step_end(l, side, true);
            }
        }
        let p = &mut self.nodes[side].clients[client];
        if moved {
            notify::wake_up(&p.app.control().expect("mapped").sleepers.0);
        } else {
            p.asleep = true;
        }
    }

    fn wake_app(&mut self, l: usize, side: usize) {
        let p = &mut self.nodes[side].clients[self.lanes[l].client];
        p.wake();
    }

    pub fn set_control(&mut self, up: bool) {
        if up != self.control_up {
            self.control_up = up;
            self.control = Default::default();
            for n in &mut self.nodes {
                n.pair.set_control(up);
            }
        }
    }

    pub fn set_wire(&mut self, rail: usize, up: bool) {
        if self.wires[rail] != up {
            self.wires[rail] = up;
            self.world.set_wire(rail, up);
            // Sometimes the port tells, sometimes only the silence.
            for n in 0..2 {
                if let (Some(id), true) = (self.nodes[n].rails[rail], self.rng.one_in(2) || up) {
                    self.nodes[n].pair.set_rail(id, up);
                }
            }
        }
    }

    /// A node's device says that its port is down, or up.
    pub fn set_port(&mut self, n: usize, rail: usize, up: bool) {
        let n = &mut self.nodes[n];
        if let Some(id) = n.rails[rail] {
            n.pair.set_rail(id, up);
        }
    }

    /// A node's daemon does nothing for so long.
    pub fn pause(&mut self, n: usize, ns: u64) {
        self.nodes[n].next_poll = self.now + ns;
    }

    /// Bytes behind messages that a node's devices know to be acknowledged.
    pub fn inlined(&self, n: usize) -> u64 {
        let n = &self.nodes[n];
        let rails = n.rails.iter().flatten();
        rails.map(|r| n.pair.stats(*r).inlined).sum()
    }

    pub fn unplug(&mut self, n: usize, rail: usize) {
        if let Some(id) = self.nodes[n].rails[rail].take() {
            self.world.unplug(n, rail);
            self.nodes[n].pair.remove_rail(id);
            self.counts.removed_devices += 1;
        }
    }

    pub fn plug(&mut self, n: usize, rail: usize) {
        if self.nodes[n].rails[rail].is_none() {
            self.world.plug(n, rail);
            add_rail(&mut self.nodes[n], rail);
        }
    }

    /// Something happens to the world.
    pub fn chaos(&mut self) {
        let (rail, n) = (
            self.rng.below(RAILS as u64) as usize,
            self.rng.below(2) as usize,
        );
        match self.rng.below(12) {
            0..=2 => self.set_wire(rail, false),
            3..=6 => self.set_wire(rail, true),
            7 => self.unplug(n, rail),
            8 | 9 => self.plug(n, rail),
            10 => self.set_control(false),
            _ => self.set_control(true),
        }
    }

    pub fn mend(&mut self) {
        self.world.set_faults(Faults {
            delay_ns: 5_000,
            late_ns: 1_000_000,
            ..Faults::default()
        });
        for rail in 0..RAILS {
            self.set_wire(rail, true);
            self.plug(0, rail);
            self.plug(1, rail);
        }
        self.set_control(true);
        self.slow_in = 0;
        for n in &mut self.nodes {
            n.host.refuse_in = 0;
        }
    }

    /// From now on errors of these lanes are expected.
    pub fn lied(&mut self, which: impl Fn(usize) -> bool) {
        for (l, lane) in self.lanes.iter_mut().enumerate() {
            for e in &mut lane.ends {
                e.lied = which(l);
            }
        }
        for n in &mut self.nodes {
            n.host.strict = false;
        }
    }

    pub fn all_done(&self) -> bool {
        let mut lanes = self.lanes.iter();
        lanes.all(|l| l.reset || l.ends[0].lied || l.ends.iter().all(App::done))
    }

    /// Runs the applications to their end.
    pub fn run(&mut self, chaos_ticks: u64, chaos_in: u64) {
        self.set_control(true);
        for _ in 0..chaos_ticks {
            if self.rng.one_in(chaos_in) {
                self.chaos();
            }
            self.tick(true);
            if self.all_done() {
                break;
            }
        }
        self.mend();
        self.finish_alone();
    }

    /// There is memory for every ring.
    pub fn never_refuse(&mut self) {
        self.nodes.iter_mut().for_each(|n| n.host.refuse_in = 0);
    }

    pub fn never_shut(&mut self) {
        for l in &mut self.lanes {
            for e in &mut l.ends {
                e.may_shut = false;
            }
        }
    }

    pub fn ring_bytes(&self) -> u64 {
        let ends = self.lanes.iter().flat_map(|l| &l.ends);
        ends.map(|e| e.rx.ring_bytes.load(Relaxed)).sum()
    }

    /// Until the applications have everything, with the world as it is.
    pub fn finish_alone(&mut self) {
        let mut idle = 0;
        while !self.all_done() {
            idle = if self.tick(true) { 0 } else { idle + 1 };
            assert!(idle < 40_000, "stalled at {}: {}", self.now, self.state());
        }
    }

    fn state(&self) -> String {
        let end = |e: &App| {
            format!(
                "sent {}/{} (mode {}), received {}/{} (mode {})",
                e.sent,
                e.total,
                e.tx.mode.load(Relaxed),
                e.received,
                e.expected,
                e.rx.mode.load(Relaxed)
            )
        };
        let lanes = self
            .lanes
            .iter()
            .map(|l| format!("{}; {}", end(&l.ends[0]), end(&l.ends[1])));
        let lanes: Vec<_> = lanes.collect();
        let links: Vec<_> = self.nodes.iter().map(|n| n.pair.links()).collect();
        format!("{lanes:#?} {links:#?} {:?}", self.world.violations())
    }

    /// Ends everything in order and looks what is left.
    pub fn end(mut self) -> Counts {
        for n in 0..2 {
            for l in 0..self.lanes.len() {
                let id = self.lanes[l].ids[n];
                if !self.lanes[l].reset {
                    self.nodes[n].pair.finish(id);
                }
            }
        }
        self.wait("flushed", |s| {
            // A peer that lies about a lane may never say that its bytes have landed.
            let whole = |l: &&Lane| !l.reset && !l.ends[0].lied;
            let mut lanes = s.lanes.iter().filter(whole);
            lanes.all(|l| (0..2).all(|n| s.nodes[n].flushed.contains(&l.ids[n])))
        });
        for n in 0..2 {
            for l in 0..self.lanes.len() {
                let id = self.lanes[l].ids[n];
                self.nodes[n].pair.remove(id);
            }
        }
        self.wait("removed", |s| {
            (0..2).all(|n| {
                s.lanes
                    .iter()
                    .all(|l| s.nodes[n].removed.contains(&l.ids[n]))
            })
        });
        for n in &mut self.nodes {
            assert_eq!(n.host.placed, 0, "rings are left");
            for p in &n.clients {
                n.pair.remove_client(p.id);
            }
        }
        self.wait("clients removed", |s| {
            s.nodes.iter().all(|n| n.gone.len() == n.clients.len())
        });
        for l in &self.lanes {
            for e in &l.ends {
                self.counts.ring_bytes += e.rx.ring_bytes.load(Relaxed);
                self.counts.moves += e.moves;
                self.counts.ups += u64::from(e.tx.downs.load(Relaxed));
            }
        }
        self.counts.inlined = self.inlined(0) + self.inlined(1);
        self.nodes.clear();
        self.world.run_until(self.now + 1_000_000_000);
        assert_eq!(self.world.violations(), Vec::<String>::new());
        assert_eq!(self.world.live(), Live::default(), "objects are left");
        self.counts
    }

    fn wait(&mut self, what: &str, done: impl Fn(&Sim) -> bool) {
        self.nodes.iter_mut().for_each(Node::notify);
        for _ in 0..40_000 {
            if done(self) {
                return;
            }
            self.tick(false);
        }
        panic!("never {what}: {}", self.state());
    }
}
