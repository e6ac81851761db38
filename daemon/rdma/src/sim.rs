//! A simulation of verbs: nodes, devices and wires in one process, driven by a seed.
//!
//! It treats the engine as badly as hardware may, and repeatably: requests are read late, land late and are
//! acknowledged late; acknowledgements get lost, so that what has landed looks failed; queue pairs fail at any step;
//! a write may land long after its sender has seen the error, as long as the receiver's queue pair exists;
//! registrations fail; devices disappear. Memory is real: writes are copies into whatever is registered when they
//! land.
//!
//! It also checks the engine: see [`World::violations`]. Not for production.

mod net;
mod objects;

pub use objects::{Cq, Device, Mr, Node, Pd, Qp};

use crate::verbs::{Completion, DeviceEvent, Live, Memory};
use net::{Event, QpState};
use std::cell::{Ref, RefCell, RefMut};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

/// A small random number generator (splitmix64): the same sequence everywhere for the same seed.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to `n - 1`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next_u64() % n.max(1)
    }

    /// True one time out of `n`; never if `n` is 0.
    pub fn one_in(&mut self, n: u64) -> bool {
        n != 0 && self.below(n) == 0
    }
}

/// Rates and sizes of the simulated faults. Each `x_in` means "one in so many"; 0 means never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Maximum usual delay of each stage.
    pub delay_ns: u64,
    /// Stages that take 50 times as long.
    pub slow_in: u64,
    /// Requests at which the queue pair fails.
    pub error_in: u64,
    /// Registrations and queue pairs that fail for lack of memory.
    pub no_memory_in: u64,
    /// Maximum time after the sender's error at which a write may still land.
    pub late_ns: u64,
    /// A bit for each rail that behaves like iWARP: queue pairs are connected by a handshake, and a success means
    /// only that the sender's device has taken the bytes.
    pub iwarp: u8,
    /// Interval between two repeats of a packet that is not acknowledged, if it is not the usual, short one.
    pub repeat_ns: u64,
}

type Lie = Box<dyn FnMut(usize, &mut Vec<u8>)>;

/// The whole simulated world. Handles of one world refer to it.
#[derive(Clone)]
pub struct World(Rc<RefCell<Inner>>);

struct Inner {
    now: u64,
    rng: Rng,
    faults: Faults,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    ports: Vec<Port>,
    /// Per rail: do packets pass?
    wires: Vec<bool>,
    mrs: BTreeMap<u32, MrState>,
    cqs: BTreeMap<u32, CqState>,
    qps: BTreeMap<u32, QpState>,
    pds: BTreeMap<u32, usize>,
    live: BTreeMap<usize, Live>,
    next: u32,
    forbidden: Vec<(u64, u64)>,
    violations: Vec<String>,
    /// Address, length and order of the latest writes that landed.
    landed: VecDeque<(u64, u64, u64)>,
    lie: Option<Lie>,
    /// Do completion queues have descriptors?
    descriptors: bool,
    /// The node whose queue pairs cannot be destroyed.
    holds: Option<usize>,
    /// Who looks for this node's completions next panics.
    panics: Option<usize>,
}

/// A device of a node: each has one port, on the wire of its rail.
struct Port {
    node: usize,
    rail: usize,
    index: u64,
    gone: bool,
    /// What it reports, and the descriptor that tells of that.
    reports: VecDeque<DeviceEvent>,
    fd: Option<OwnedFd>,
}

struct MrState {
    node: usize,
    pd: u32,
    addr: u64,
    len: u64,
    local_write: bool,
    remote_write: bool,
    /// Keeps the memory that devices may access mapped.
    _memory: Arc<dyn Memory>,
}

struct CqState {
    node: usize,
    entries: usize,
    queue: VecDeque<Completion>,
    /// A notification was requested: for messages, or (true) for all completions.
    armed: Option<bool>,
    notified: bool,
    fd: Option<OwnedFd>,
}

/// Makes an eventfd readable.
const ONE: [u8; 8] = 1u64.to_ne_bytes();

fn eventfd() -> Option<OwnedFd> {
    use rustix::event::{eventfd, EventfdFlags};
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()
}

impl CqState {
    fn notify(&mut self) {
        (self.armed, self.notified) = (None, true);
        if let Some(fd) = &self.fd {
            let _ = rustix::io::write(fd, &ONE); // EAGAIN: it is readable already
        }
    }
}

impl Port {
    fn next_report(&mut self) -> Option<DeviceEvent> {
        let next = self.reports.pop_front();
        if let (None, Some(fd)) = (next, &self.fd) {
            let _ = rustix::io::read(fd, &mut [0u8; 8]); // EAGAIN: there was nothing
        }
        next
    }
}

impl Inner {
    fn port_of(&mut self, node: usize, rail: usize) -> Option<&mut Port> {
        self.ports
            .iter_mut()
            .find(|p| (p.node, p.rail) == (node, rail))
    }
}

impl World {
    /// A world of `nodes` nodes with `rails` devices each.
    pub fn new(seed: u64, nodes: usize, rails: usize, faults: Faults) -> World {
        let mut ports = Vec::new();
        for node in 0..nodes {
            for rail in 0..rails {
                let index = ports.len() as u64;
                ports.push(Port {
                    node,
                    rail,
                    index,
                    gone: false,
                    reports: VecDeque::new(),
                    fd: None,
                });
            }
        }
        World(Rc::new(RefCell::new(Inner {
            now: 0,
            rng: Rng(seed),
            faults,
            events: BinaryHeap::new(),
            order: 0,
            ports,
            wires: vec![true; rails],
            mrs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            pds: BTreeMap::new(),
            live: BTreeMap::new(),
            next: 0x100,
            forbidden: Vec::new(),
            violations: Vec::new(),
            landed: VecDeque::new(),
            lie: None,
            descriptors: false,
            holds: None,
            panics: None,
        })))
    }

    fn get(&self) -> Ref<'_, Inner> {
        self.0.borrow()
    }

    fn get_mut(&self) -> RefMut<'_, Inner> {
        self.0.borrow_mut()
    }

    /// The provider of one node.
    pub fn node(&self, node: usize) -> Node {
        Node {
            world: self.clone(),
            node,
        }
    }

    /// Devices have descriptors to sleep on, and so have completion queues that are created from now on.
    pub fn with_descriptors(&self) {
        let mut w = self.get_mut();
        w.descriptors = true;
        w.ports.iter_mut().for_each(|p| p.fd = eventfd());
    }

    /// Numbers of a device's queue pairs.
    pub fn qps(&self, node: usize, rail: usize) -> Vec<u32> {
        let w = self.get();
        let of = |(_, q): &(&u32, &QpState)| q.node == node && q.rail == rail;
        w.qps.iter().filter(of).map(|q| *q.0).collect()
    }

    /// A node's device reports something.
    pub fn report(&self, node: usize, rail: usize, event: DeviceEvent) {
        if let Some(p) = self.get_mut().port_of(node, rail) {
            p.reports.push_back(event);
            let _ = p.fd.as_ref().map(|fd| rustix::io::write(fd, &ONE)); // EAGAIN: it is readable
        }
    }

    /// From now on a node's device refuses to destroy queue pairs.
    pub fn hold(&self, node: usize) {
        self.get_mut().holds = Some(node);
    }

    /// Whoever polls a completion queue of this node's next panics there, as if it had met a defect.
    pub fn panic_at(&self, node: usize) {
        self.get_mut().panics = Some(node);
    }

    /// Advances the time; everything that is due happens in order.
    pub fn run_until(&self, now: u64) {
        self.get_mut().run_until(now);
    }

    /// Sets the faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.get_mut().faults = faults;
    }

    /// Cuts or mends the wire of a rail.
    pub fn set_wire(&self, rail: usize, up: bool) {
        self.get_mut().wires[rail] = up;
    }

    /// Removes a node's device. [`World::plug`] brings it back with another index.
    pub fn unplug(&self, node: usize, rail: usize) {
        let mut w = self.get_mut();
        for p in &mut w.ports {
            if p.node == node && p.rail == rail {
                p.gone = true;
            }
        }
        let of = |q: &QpState| q.node == node && q.rail == rail;
        let all: Vec<_> = w.qps.iter().filter(|(_, q)| of(q)).map(|q| *q.0).collect();
        for qpn in all {
            w.fail(qpn, crate::verbs::Status::Other);
        }
    }

    /// Undoes [`World::unplug`].
    pub fn plug(&self, node: usize, rail: usize) {
        let mut w = self.get_mut();
        let index = w.ports.iter().map(|p| p.index).max().unwrap_or(0) + 1;
        for p in &mut w.ports {
            if p.node == node && p.rail == rail && p.gone {
                p.gone = false;
                p.index = index;
            }
        }
    }

    /// From now on, a write that lands in `[addr, addr + len)` is a violation: that memory is not in use.
    pub fn forbid(&self, addr: u64, len: u64) {
        self.get_mut().forbidden.push((addr, len));
    }

    /// Undoes [`World::forbid`].
    pub fn permit(&self, addr: u64, len: u64) {
        self.get_mut().forbidden.retain(|f| *f != (addr, len));
    }

    /// Forbidden things that have happened: a message without a receive buffer, a full queue, and a request or late
    /// write to memory that is no longer registered or is forbidden.
    pub fn violations(&self) -> Vec<String> {
        self.get().violations.clone()
    }

    /// Completion queues of this node with a notification that was not taken yet.
    pub fn notified(&self, node: usize) -> Vec<u32> {
        let w = self.get();
        let of = |(id, c): (&u32, &CqState)| (c.node == node && c.notified).then_some(*id);
        w.cqs.iter().filter_map(of).collect()
    }

    /// Sets a function that changes messages before they are sent; it gets the sending node's number.
    pub fn set_lie(&self, lie: impl FnMut(usize, &mut Vec<u8>) + 'static) {
        self.get_mut().lie = Some(Box::new(lie));
    }

    /// Numbers of live objects of all nodes.
    pub fn live(&self) -> Live {
        let w = self.get();
        let mut sum = Live::default();
        for l in w.live.values() {
            sum.devices += l.devices;
            sum.pds += l.pds;
            sum.mrs += l.mrs;
            sum.cqs += l.cqs;
            sum.qps += l.qps;
        }
        sum
    }
}
