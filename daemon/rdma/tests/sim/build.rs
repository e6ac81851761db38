//! How the simulated nodes and lanes are made and abandoned, and what a daemon does for its engine.

use super::app::{self, App};
use super::tcp::Pipe;
use super::{Client, Lane, Node, Sim, RAILS};
use lane::abi::{Control as Words, Cursor, Epoch, Loc, CONTROL_BYTES};
use lane::half::Area;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use underpass_rdma::engine::{self, ClientId, ClientMemory, Config, LaneId, Pair, Rail};
use underpass_rdma::sim::{self, Rng};
use underpass_rdma::verbs::{Mapping, Memory as _, Mtu, Provider};

const CHUNK: usize = 1 << 20;
const BASE: Epoch = Epoch::base(3);

/// Memory for incoming rings of one client.
pub struct Rings {
    pub base: u64,
    next: u32,
    free: Vec<Loc>,
}

/// What the engine asks of its caller.
pub struct Host {
    world: sim::World,
    rings: BTreeMap<ClientId, Rings>,
    client_of: BTreeMap<LaneId, ClientId>,
    pub rung: BTreeSet<ClientId>,
    rng: Rng,
    pub refuse_in: u64,
    reuse: bool,
    pub placed: i64,
    /// Whether a write to a ring that was given back is an error; not from a peer that lies.
    pub strict: bool,
}

impl engine::Host for Host {
    fn ring(&mut self, client: ClientId) {
        self.rung.insert(client);
    }

    fn place(&mut self, lane: LaneId, log2: u32) -> Option<Loc> {
        if self.rng.one_in(self.refuse_in) {
            return None;
        }
        let r = self.rings.get_mut(&self.client_of[&lane])?;
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
        let r = self
            .rings
            .get_mut(&self.client_of[&lane])
            .expect("a client");
        let addr = r.base + u64::from(at.page) * 4096;
        // Somebody else's now.
        if self.strict {
            self.world.forbid(addr, at.bytes() as u64);
        }
        r.free.push(at);
        self.placed -= 1;
    }
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
    c.ask_ns = 60_000_000;
    c
}

fn area(words: &Arc<Mapping>, chunk: &Arc<Mapping>) -> Area {
    let a = Area::new();
    // SAFETY: the client keeps both buffers as long as the area.
    unsafe {
        a.set_control(words.addr().as_ptr().cast());
        a.set_chunk(1, chunk.addr().as_ptr(), chunk.len());
    }
    a
}

// The simulation is of one thread.
#[allow(clippy::arc_with_non_send_sync)]
pub fn add_rail(node: &mut Node, rail: usize) {
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
        lid: 7,
        mtu: Mtu::B1024,
        fabric: rail as u32,
    });
    node.rails[rail] = Some(added.expect("a rail"));
}

pub fn node(world: &sim::World, n: usize, clients: usize, rng: &mut Rng) -> Node {
    let mut psn = Rng(rng.next_u64());
    let random = Box::new(move || psn.next_u64() as u32);
    let mut node = Node {
        provider: world.node(n),
        pair: Pair::new(config(n == 0, rng), random),
        host: Host {
            world: world.clone(),
            rings: BTreeMap::new(),
            client_of: BTreeMap::new(),
            rung: BTreeSet::new(),
            rng: Rng(rng.next_u64()),
            refuse_in: [0, 8][rng.below(2) as usize],
            reuse: rng.one_in(2),
            placed: 0,
            strict: true,
        },
        rails: [None; RAILS],
        clients: Vec::new(),
        next_poll: 0,
        flushed: BTreeSet::new(),
        removed: BTreeSet::new(),
        gone: BTreeSet::new(),
        faults: Vec::new(),
        pair_failed: None,
        asleep: false,
        counted: false,
        stays: rng.one_in(2),
        queues: BTreeMap::new(),
        abandoned: false,
    };
    for rail in 0..RAILS {
        add_rail(&mut node, rail);
    }
    for _ in 0..clients {
        let new = |len| Arc::new(Mapping::anonymous(len).expect("memory"));
        let words = [new(CONTROL_BYTES), new(CONTROL_BYTES)];
        let (chunk, own) = (new(CHUNK), new(CHUNK));
        let at = |b: &Arc<Mapping>| b.addr().cast::<Words>();
        // SAFETY: both are page-aligned mappings of this size, kept by the value itself.
        let memory =
            unsafe { ClientMemory::new(at(&words[0]), at(&words[1]), Arc::new(words.clone())) };
        let id = node.pair.add_client(memory);
        assert!(node.pair.add_app_chunk(id, 1, chunk.clone()));
        assert!(node.pair.add_own_chunk(id, 1, own.clone()));
        let base = own.addr().as_ptr() as u64;
        let rings = Rings {
            base,
            next: 0,
            free: Vec::new(),
        };
        node.host.rings.insert(id, rings);
        node.clients.push(Client {
            id,
            app: area(&words[0], &chunk),
            proxy: area(&words[1], &own),
            chunk,
            own,
            _words: words,
            asleep: false,
        });
    }
    node
}

pub fn lane(nodes: &mut [Node], l: usize, client: usize, rng: &mut Rng) -> Lane {
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
            let p = &nodes[n].clients[client];
            // The slot has been used before.
            let old = Cursor::new([0, 500, 5_000, 100_000][rng.below(4) as usize]);
            let (app, proxy) = (p.app.control().unwrap(), p.proxy.control().unwrap());
            let i = slot as usize;
            app.heads[i].store(old, Relaxed);
            proxy.cursors[i].store(old, Relaxed);
            let read = Cursor::new(rng.below(20_000));
            app.cursors[i].store(read, Relaxed);
            proxy.heads[i].store(read, Relaxed);
            let id = nodes[n].pair.open(p.id, slot).expect("a lane");
            nodes[n].host.client_of.insert(id, p.id);
            ids[n] = id;
            let w = app::World {
                app: &nodes[n].clients[client].app,
                proxy: &nodes[n].clients[client].proxy,
                port: &(),
            };
            end.attach(&w, BASE, 7, rng);
            end
        })
        .collect();
    for n in 0..2 {
        nodes[n].pair.connect(ids[n], ids[1 - n], BASE);
    }
    let mut ends = ends.into_iter();
    Lane {
        client,
        ends: [ends.next().expect("two"), ends.next().expect("two")],
        ids,
        pipes,
        reset: false,
    }
}

impl Sim {
    /// The daemons cannot reach each other any more. They give their pair up, one long after the other.
    pub fn abandon(&mut self) {
        let first = self.rng.below(2) as usize;
        for n in [first, 1 - first] {
            for _ in 0..self.rng.below(600) {
                self.tick(true);
            }
            let node = &mut self.nodes[n];
            node.notify();
            node.pair.abandon(&mut node.host);
            node.abandoned = true;
            self.events(n);
            for l in 0..self.lanes.len() {
                self.wake_app(l, n);
            }
        }
    }
}
