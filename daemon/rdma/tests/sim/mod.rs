//! Two nodes with a daemon each, applications, TCP and a control channel, under one clock and one
//! seed. What it checks is what must hold always: every byte arrives once and in order, nobody
//! waits for ever, nothing lands where it should not, nothing is left at the end.

#![allow(dead_code)]

pub mod app;
pub mod tcp;

use app::App;
use link::lane::Area;
use link::layout::{Control as Words, Loc, CONTROL_BYTES};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use tcp::Pipe;
use underpass_rdma::engine::*;
use underpass_rdma::sim::{self, Faults, Rng};
use underpass_rdma::verbs::{Buffer, Live, Memory as _, Mtu, Provider};

pub const RAILS: usize = 2;
const CHUNK: usize = 1 << 20;
const BASE: u32 = 3 << 16;

/// Memory for incoming rings of one party.
struct Rings {
    base: u64,
    next: u32,
    free: Vec<Loc>,
}

/// What the engine asks of its caller.
struct Host {
    world: sim::World,
    rings: BTreeMap<PartyId, Rings>,
    party_of: BTreeMap<LaneId, PartyId>,
    rung: BTreeSet<PartyId>,
    rng: Rng,
    refuse_in: u64,
    reuse: bool,
    placed: i64,
    /// Whether a write to a ring that was given back is an error; not from a peer that lies.
    strict: bool,
}

impl engine_host::Host for Host {
    fn ring(&mut self, party: PartyId) {
        self.rung.insert(party);
    }

    fn place(&mut self, lane: LaneId, log2: u32) -> Option<Loc> {
        if self.rng.one_in(self.refuse_in) {
            return None;
        }
        let r = self.rings.get_mut(&self.party_of[&lane])?;
        let free = r.free.iter().position(|l| l.log2 == log2);
        let loc = match free {
            Some(i) if self.reuse => r.free.swap_remove(i),
            _ => {
                let page = r.next;
                let loc = Loc {
                    chunk: 1,
                    page,
                    log2,
                };
                if !loc.fits(CHUNK) {
                    return None;
                }
                r.next += 1 << (log2 - 12);
                loc
            }
        };
        self.world
            .permit(r.base + u64::from(loc.page) * 4096, loc.bytes() as u64);
        self.placed += 1;
        Some(loc)
    }

    fn free(&mut self, lane: LaneId, at: Loc) {
        let r = self.rings.get_mut(&self.party_of[&lane]).expect("a party");
        let addr = r.base + u64::from(at.page) * 4096;
        // Somebody else's now.
        if self.strict {
            self.world.forbid(addr, at.bytes() as u64);
        }
        r.free.push(at);
        self.placed -= 1;
    }
}

use underpass_rdma::engine as engine_host;

pub struct Party {
    id: PartyId,
    pub app: Area,
    mirror: Area,
    chunk: Arc<Buffer>,
    own: Arc<Buffer>,
    _words: [Arc<Buffer>; 2],
    asleep: bool,
}

pub struct Node {
    provider: sim::Node,
    pub pair: Pair<sim::Node>,
    host: Host,
    rails: [Option<RailId>; RAILS],
    pub parties: Vec<Party>,
    next_poll: u64,
    flushed: BTreeSet<LaneId>,
    removed: BTreeSet<LaneId>,
    gone: BTreeSet<PartyId>,
    pub faults: Vec<(usize, Fault)>,
    pub pair_failed: Option<&'static str>,
    asleep: bool,
}

pub struct Lane {
    pub party: usize,
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
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub ring_bytes: u64,
    pub ups: u64,
    pub moves: u64,
    pub link_downs: u64,
    pub no_rail: u64,
    pub queries: u64,
    pub doubts: u64,
    pub removed_devices: u64,
}

fn config(first: bool, rng: &mut Rng) -> Config {
    let mut c = Config::new(first);
    c.links_per_rail = 1 + rng.below(2) as usize;
    c.depth = 4 + [0, rng.below(12)][rng.below(2) as usize] as u16;
    c.sends = 8 + rng.below(24) as u32;
    c.budget = 512 << rng.below(6);
    c.window = 8 << 10 << rng.below(3);
    c.retry_ns = 300_000;
    c.quiet_ns = 4_000_000;
    c.setup_ns = 10_000_000;
    c.doubt_ns = 60_000_000;
    c
}

fn area(words: &Arc<Buffer>, chunk: &Arc<Buffer>) -> Area {
    let a = Area::new();
    // SAFETY: the party keeps both buffers as long as the area.
    unsafe {
        a.set_control(words.addr().as_ptr().cast());
        a.set_chunk(1, chunk.addr().as_ptr(), chunk.len());
    }
    a
}

impl Sim {
    pub fn new(seed: u64, lanes: usize, faults: Faults) -> Sim {
        let mut rng = Rng(seed ^ 0x5eed);
        let world = sim::World::new(seed, 2, RAILS, faults);
        let parties = 1 + rng.below(2) as usize;
        let mut nodes: Vec<Node> = (0..2).map(|n| node(&world, n, parties, &mut rng)).collect();
        let lanes = (0..lanes)
            .map(|l| lane(&mut nodes, l, l % parties, &mut rng))
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
                    if std::mem::take(&mut self.nodes[n].asleep) {
                        self.nodes[n].pair.rouse();
                    }
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
        let timer = self.now >= node.pair.next_timer_ns();
        if node.asleep && !timer && !self.world.pending(n) {
            return;
        }
        if node.asleep {
            node.asleep = false;
            node.pair.rouse();
        }
        let mut worked = false;
        for _ in 0..1 + self.rng.below(3) {
            worked = node.pair.poll(self.now, &mut node.host);
        }
        if !worked && self.rng.one_in(3) {
            // To sleep, as a daemon does: count, look once more.
            node.pair.doze();
            if node.pair.poll(self.now, &mut node.host) {
                node.pair.rouse();
            } else {
                node.asleep = true;
            }
        }
        if self.rng.one_in(self.slow_in) {
            node.next_poll = self.now + self.rng.below(3_000_000);
        }
        for p in &mut node.parties {
            if node.host.rung.contains(&p.id) {
                p.asleep = false;
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
                Event::PartyRemoved { party } => {
                    self.nodes[n].gone.insert(party);
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
        let arrived = lane.pipes[1 - side].borrow_mut().run_until(self.now);
        let node = &mut self.nodes[side];
        let party = &mut node.parties[lane.party];
        if arrived {
            party.asleep = false;
        }
        if lane.reset || lane.ends[side].done() && self.rng.one_in(2) {
            return false;
        }
        if party.asleep && !self.rng.one_in(400) || self.rng.one_in(3) {
            return false; // all but asleep: TCP's own wake-ups are not simulated in full
        }
        let rang = Cell::new(false);
        let w = app::World {
            app: &party.app,
            mirror: &party.mirror,
            out: &lane.pipes[side],
            inn: &lane.pipes[1 - side],
            arrives: self.now + 1_000 + self.rng.below(50_000),
            rang: &rang,
        };
        let moved = lane.ends[side].step(&w, &mut self.rng);
        if rang.get() && node.asleep {
            node.asleep = false;
            node.pair.rouse();
        }
        moved
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
            let whole = |l: &&Lane| !l.reset;
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
            for p in &n.parties {
                n.pair.remove_party(p.id);
            }
        }
        self.wait("parties removed", |s| {
            s.nodes.iter().all(|n| n.gone.len() == n.parties.len())
        });
        for l in &self.lanes {
            for e in &l.ends {
                self.counts.ring_bytes += e.rx.ring_bytes.load(Relaxed);
                self.counts.moves += e.moves;
                self.counts.ups += u64::from(e.tx.downs.load(Relaxed));
            }
        }
        self.nodes.clear();
        self.world.run_until(self.now + 1_000_000_000);
        assert_eq!(self.world.violations(), Vec::<String>::new());
        assert_eq!(self.world.live(), Live::default(), "objects are left");
        self.counts
    }

    fn wait(&mut self, what: &str, done: impl Fn(&Sim) -> bool) {
        for n in &mut self.nodes {
            if std::mem::take(&mut n.asleep) {
                n.pair.rouse();
            }
        }
        for _ in 0..40_000 {
            if done(self) {
                return;
            }
            self.tick(false);
        }
        panic!("never {what}: {}", self.state());
    }
}

fn add_rail(node: &mut Node, rail: usize) {
    let name = format!("sim{rail}");
    let found = node.provider.scan().expect("scan");
    let id = found
        .into_iter()
        .find(|d| d.name == name)
        .expect("plugged in");
    let device = node.provider.open(&id).expect("open");
    let added = node.pair.add_rail(Rail {
        device: Arc::new(device),
        port: 1,
        gid_index: 0,
        gid: node.provider.gid(rail),
        lid: 0,
        mtu: Mtu::B1024,
        fabric: rail as u32,
    });
    node.rails[rail] = Some(added.expect("a rail"));
}

fn node(world: &sim::World, n: usize, parties: usize, rng: &mut Rng) -> Node {
    let mut psn = Rng(rng.next_u64());
    let random = Box::new(move || psn.next_u64() as u32);
    let mut node = Node {
        provider: world.node(n),
        pair: Pair::new(config(n == 0, rng), random),
        host: Host {
            world: world.clone(),
            rings: BTreeMap::new(),
            party_of: BTreeMap::new(),
            rung: BTreeSet::new(),
            rng: Rng(rng.next_u64()),
            refuse_in: [0, 8][rng.below(2) as usize],
            reuse: rng.one_in(2),
            placed: 0,
            strict: true,
        },
        rails: [None; RAILS],
        parties: Vec::new(),
        next_poll: 0,
        flushed: BTreeSet::new(),
        removed: BTreeSet::new(),
        gone: BTreeSet::new(),
        faults: Vec::new(),
        pair_failed: None,
        asleep: false,
    };
    for rail in 0..RAILS {
        add_rail(&mut node, rail);
    }
    for _ in 0..parties {
        let new = |len| Arc::new(Buffer::new(len).expect("memory"));
        let words = [new(CONTROL_BYTES), new(CONTROL_BYTES)];
        let (chunk, own) = (new(CHUNK), new(CHUNK));
        let at = |b: &Arc<Buffer>| b.addr().cast::<Words>();
        // SAFETY: both are page-aligned mappings of this size, kept by the value itself.
        let memory =
            unsafe { PartyMemory::new(at(&words[0]), at(&words[1]), Arc::new(words.clone())) };
        let id = node.pair.add_party(memory);
        assert!(node.pair.add_app_chunk(id, 1, chunk.clone()));
        assert!(node.pair.add_own_chunk(id, 1, own.clone()));
        let base = own.addr().as_ptr() as u64;
        let rings = Rings {
            base,
            next: 0,
            free: Vec::new(),
        };
        node.host.rings.insert(id, rings);
        node.parties.push(Party {
            id,
            app: area(&words[0], &chunk),
            mirror: area(&words[1], &own),
            chunk,
            own,
            _words: words,
            asleep: false,
        });
    }
    node
}

fn lane(nodes: &mut [Node], l: usize, party: usize, rng: &mut Rng) -> Lane {
    let totals = [rng.below(60_000), rng.below(60_000)];
    let salts = [rng.next_u64(), rng.next_u64()];
    let mut page = l as u32 * 16;
    let places: Vec<Loc> = [12, 13, 14, 12, 13]
        .into_iter()
        .map(|log2| {
            let loc = Loc {
                chunk: 1,
                page,
                log2,
            };
            page += 1 << (log2 - 12);
            loc
        })
        .collect();
    let pipes: [RefCell<Pipe>; 2] = Default::default();
    let mut ids = [0; 2];
    let ends: Vec<App> = (0..2)
        .map(|n| {
            let slot = (l + 100 * n) as u32;
            let (salt, total) = ((salts[n], salts[1 - n]), (totals[n], totals[1 - n]));
            let mut end = App::new(slot, places.clone(), salt, total);
            let p = &nodes[n].parties[party];
            // The slot has been used before.
            let old = [0, 500, 5_000, 100_000][rng.below(4) as usize];
            let (app, mirror) = (p.app.control().unwrap(), p.mirror.control().unwrap());
            let i = slot as usize;
            app.heads[i].store(old, Relaxed);
            mirror.cursors[i].store(old, Relaxed);
            let read = rng.below(20_000);
            app.cursors[i].store(read, Relaxed);
            mirror.heads[i].store(read, Relaxed);
            let id = nodes[n].pair.open(p.id, slot, BASE).expect("a lane");
            nodes[n].host.party_of.insert(id, p.id);
            ids[n] = id;
            let w = app::World {
                app: &nodes[n].parties[party].app,
                mirror: &nodes[n].parties[party].mirror,
                out: &pipes[n],
                inn: &pipes[1 - n],
                arrives: 0,
                rang: &Cell::new(false),
            };
            end.attach(&w, BASE, rng);
            end
        })
        .collect();
    for n in 0..2 {
        nodes[n].pair.connect(ids[n], ids[1 - n]);
    }
    let mut ends = ends.into_iter();
    Lane {
        party,
        ends: [ends.next().expect("two"), ends.next().expect("two")],
        ids,
        pipes,
        reset: false,
    }
}
