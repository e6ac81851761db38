//! One pair of node 0, with an application's words and memory that the tests write, and the [`Peer`] of node 1.

use crate::peer::Peer;
use lane::abi::{Control as Words, Cursor, Epoch, Loc, CONTROL_BYTES};
use lane::half::Area;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use underpass_rdma::engine::{self, *};
use underpass_rdma::sim::{self, Faults, World};
use underpass_rdma::verbs::{Mapping, Memory as _, Mtu, Provider};
use underpass_rdma::wire::{Body, Cdc, LinkEnd};

/// By which the peer names the lanes, from here on.
pub const TOKEN: u32 = 700;
pub const BASE: Epoch = Epoch::base(3);
const CHUNK: usize = 1 << 20;
/// Of our ports.
pub const LID: u16 = 7;
/// The application's ring.
pub const RING: Loc = Loc {
    chunk: 1,
    page: 0,
    log2: 12,
};
/// A millisecond in ns.
pub const MS: u64 = 1_000_000;
/// A turn of the pair.
pub const TICK_NS: u64 = 1_000;

/// What the engine has asked of its caller.
#[derive(Default)]
pub struct Host {
    pub rung: Vec<ClientId>,
    pub placed: Vec<Loc>,
    pub freed: Vec<Loc>,
    /// What to answer instead of the next place.
    pub answers: Vec<Option<Loc>>,
    next: u32,
}

impl engine::Host for Host {
    fn ring(&mut self, client: ClientId) {
        self.rung.push(client);
    }

    fn place(&mut self, _: LaneId, log2: u32) -> Option<Loc> {
        if let Some(a) = self.answers.pop() {
            return a;
        }
        let (chunk, page) = (1, self.next);
        self.next += 1 << (log2 - 12);
        let loc = Loc { chunk, page, log2 };
        self.placed.push(loc);
        Some(loc)
    }

    fn free(&mut self, _: LaneId, at: Loc) {
        self.freed.push(at);
    }
}

pub struct Client {
    pub id: ClientId,
    app: Area,
    proxy: Area,
    /// Memory of the application's, which it sends from, and ours, which the peer writes.
    pub chunk: Arc<Mapping>,
    pub own: Arc<Mapping>,
    _words: [Arc<Mapping>; 2],
}

pub struct Bench {
    pub pair: Pair<sim::Node>,
    pub peer: Peer,
    pub world: World,
    pub now: u64,
    pub host: Host,
    pub rails: Vec<RailId>,
    pub clients: Vec<Client>,
    /// What the pair has said over the control channel, and all other events.
    pub control: Vec<Control>,
    pub events: Vec<Event>,
}

pub fn config(first: bool) -> Config {
    Config {
        links_per_rail: 1,
        retry_ns: 1_000_000,
        setup_ns: 20_000_000,
        quiet_ns: 50_000_000,
        ask_ns: 500_000_000,
        ..Config::new(first)
    }
}

/// The same, and nobody asks whether the other one is there.
pub fn quiet(first: bool) -> Config {
    Config {
        quiet_ns: 9_000_000_000,
        ..config(first)
    }
}

impl Bench {
    /// A pair with these rails and a client, the control channel connected.
    pub fn new(config: Config, rails: usize) -> Bench {
        Bench::with(config, rails, Faults::default())
    }

    pub fn with(config: Config, rails: usize, faults: Faults) -> Bench {
        let world = World::new(1, 2, rails, faults);
        let mut psn = 0xff00_0001u32;
        let random = Box::new(move || {
            psn += 1;
            psn
        });
        let mut b = Bench {
            pair: Pair::new(config, random),
            peer: Peer::new(&world, rails),
            world,
            now: 1_000,
            host: Host::default(),
            rails: Vec::new(),
            clients: Vec::new(),
            control: Vec::new(),
            events: Vec::new(),
        };
        for rail in 0..rails {
            let id = b.add_rail(rail);
            b.rails.push(id);
        }
        b.add_client();
        b.pair.set_control(true);
        b
    }

    // The simulation is of one thread.
    #[allow(clippy::arc_with_non_send_sync)]
    pub fn add_rail(&mut self, rail: usize) -> RailId {
        let node = self.world.node(0);
        let found = node.scan().expect("scan");
        let device = node.open(&found[rail]).expect("a device");
        let added = self.pair.add_rail(Rail {
            device: Arc::new(device),
            port: 1,
            gid_index: 0,
            gid: node.gid(rail),
            lid: LID,
            mtu: Mtu::B1024,
            fabric: rail as u32,
        });
        added.expect("a rail")
    }

    pub fn add_client(&mut self) -> ClientId {
        let new = |len| Arc::new(Mapping::anonymous(len).expect("memory"));
        let words = [new(CONTROL_BYTES), new(CONTROL_BYTES)];
        let (chunk, own) = (new(CHUNK), new(CHUNK));
        let at = |b: &Arc<Mapping>| b.addr().cast::<Words>();
        // SAFETY: both are page-aligned mappings of this size, kept by the value itself.
        let memory =
            unsafe { ClientMemory::new(at(&words[0]), at(&words[1]), Arc::new(words.clone())) };
        let id = self.pair.add_client(memory);
        assert!(self.pair.add_app_chunk(id, 1, chunk.clone()));
        assert!(self.pair.add_own_chunk(id, 1, own.clone()));
        let area = |words: &Arc<Mapping>| {
            let a = Area::new();
            // SAFETY: the client keeps the words as long as the area.
            unsafe { a.set_control(words.addr().as_ptr().cast()) };
            a
        };
        self.clients.push(Client {
            id,
            app: area(&words[0]),
            proxy: area(&words[1]),
            chunk,
            own,
            _words: words,
        });
        id
    }

    /// One turn: a message that was posted arrives in it, and the pair deals with it.
    pub fn tick(&mut self) {
        self.now += TICK_NS;
        self.world.run_until(self.now);
        self.peer.poll();
        self.pair.poll(self.now, &mut self.host);
        self.take();
    }

    pub fn take(&mut self) {
        while let Some(e) = self.pair.next_event() {
            match e {
                Event::Control(m) => self.control.push(m),
                e => self.events.push(e),
            }
        }
    }

    /// The index of the rail that a link goes over.
    pub fn rail_of(&self, no: LinkId) -> usize {
        let of = |l: &LinkView| (l.link == no).then_some(l.rail);
        let rail = self.pair.links().iter().find_map(of).expect("a link");
        let rails = self.rails.iter();
        rails.clone().position(|r| *r == rail).expect("a rail")
    }

    /// Until everything that was said is answered.
    pub fn settle(&mut self) {
        (0..20).for_each(|_| self.tick());
    }

    /// That much later.
    pub fn later(&mut self, ns: u64) {
        self.now += ns;
        self.settle();
    }

    /// The peer's daemon says something over the control channel.
    pub fn says(&mut self, m: Control) {
        self.pair.control(m);
        self.settle();
    }

    /// Takes what the pair has said over the control channel.
    pub fn controls(&mut self) -> Vec<Control> {
        std::mem::take(&mut self.control)
    }

    pub fn happened(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// The pair's offer of a link that has not been answered.
    pub fn offered(&mut self) -> LinkEnd {
        self.settle();
        let offer = |m: &Control| match m {
            Control::QpOffer(end) => Some(*end),
            _ => None,
        };
        let end = self.control.iter().find_map(offer).expect("an offer");
        self.control.retain(|m| *m != Control::QpOffer(end));
        end
    }

    /// Both queue pairs of an offered link are connected.
    pub fn connected(&mut self) -> LinkEnd {
        let offer = self.offered();
        let rail = offer.fabric as usize;
        let end = self.peer.end(offer.link, rail);
        self.peer.connect(offer, rail);
        self.says(Control::QpAnswer(end));
        offer
    }

    /// A link that works, with the peer's memory known as region 9 (`REGION`).
    pub fn link(&mut self) -> LinkId {
        let no = self.connected().link;
        let confirm = (no, Body::ConfirmLink { reply: false });
        assert_eq!(self.peer.bodies(no), [confirm]);
        self.peer.say(no, no, Body::ConfirmLink { reply: true });
        self.settle();
        no
    }

    pub fn app(&self) -> &Words {
        self.clients[0].app.control().expect("mapped")
    }

    pub fn proxy(&self) -> &Words {
        self.clients[0].proxy.control().expect("mapped")
    }

    /// The application has stored something.
    pub fn publish(&mut self) {
        self.app().seq[0].0.fetch_add(1, Relaxed);
        self.settle();
    }

    /// A lane in this slot; the peer names it by `TOKEN` and the slot's number.
    pub fn lane(&mut self, slot: u32) -> LaneId {
        let id = self.pair.open(self.clients[0].id, slot).expect("a lane");
        self.pair.connect(id, TOKEN + slot, BASE);
        self.settle();
        id
    }
}

/// The head that a snapshot says.
pub fn head(b: &Body) -> Option<u64> {
    match b {
        Body::Cdc(c) => Some(c.head.get()),
        _ => None,
    }
}

/// A snapshot that says nothing.
pub fn cdc() -> Cdc {
    Cdc {
        head: Cursor::default(),
        cursor: Cursor::default(),
        tx_epoch: Epoch::NONE,
        tx_phase: lane::abi::tx::NONE,
        rx_epoch: Epoch::NONE,
        rx_flags: lane::abi::rx::NONE,
        flags: 0,
        moves: 0,
        acked_moves: 0,
    }
}
