//! Clients: processes of this node whose lanes end at the peer's node.
//!
//! We are the other client of their link groups. A process's area is read here, and every word in it is treated as
//! hostile. Our area, the proxy, shows the words of the peer's ends; its words and publish counters have no other
//! writer.

use super::lanes::Lane;
use super::{ClientId, Host, LaneId, Pair, RailId};
use crate::verbs::Provider;
use lane::abi::{Control, Epoch, RxWord, COUNTERS, LANES, LANES_PER_COUNTER};
use lane::notify;
use litemap::LiteMap;
use std::ptr::NonNull;
use std::sync::Arc;

/// The control words of a link group between a process and this daemon.
#[derive(Clone)]
pub struct ClientMemory {
    app: NonNull<Control>,
    proxy: NonNull<Control>,
    /// Keeps both mapped.
    _keep: Arc<dyn std::any::Any + Send + Sync>,
}

// SAFETY: two addresses of memory that consists of atomics; `new` demands that it outlives the value.
unsafe impl Send for ClientMemory {}

impl ClientMemory {
    /// # Safety
    /// Both point to `CONTROL_BYTES` mapped, page-aligned bytes, `proxy` writable, as long as
    /// `keep` lives.
    pub unsafe fn new(
        app: NonNull<Control>,
        proxy: NonNull<Control>,
        keep: Arc<dyn std::any::Any + Send + Sync>,
    ) -> Self {
        ClientMemory {
            app,
            proxy,
            _keep: keep,
        }
    }

    /// The process's words.
    pub(super) fn app(&self) -> &Control {
        // SAFETY: mapped by the contract of `new`; `Control` is all atomics, for which any bytes are
        // valid and foreign writes allowed.
        unsafe { self.app.as_ref() }
    }

    /// Our words, which the process reads.
    pub(super) fn proxy(&self) -> &Control {
        // SAFETY: as above.
        unsafe { self.proxy.as_ref() }
    }
}

pub(super) struct Client {
    pub memory: ClientMemory,
    /// The process's chunks and ours, by chunk number.
    pub app_chunks: LiteMap<u32, u32>,
    pub own_chunks: LiteMap<u32, u32>,
    counters: Vec<Counter>,
    pub removing: bool,
}

/// A publish counter, and the lanes that share it.
#[derive(Clone, Default)]
struct Counter {
    /// The process's counter when it was last read.
    seen: u32,
    lanes: Vec<LaneId>,
    /// Words of these lanes were stored, and have to be published.
    publish: bool,
}

impl Client {
    pub(super) fn lanes(&self) -> usize {
        self.counters.iter().map(|c| c.lanes.len()).sum()
    }

    pub(super) fn leave(&mut self, id: LaneId, slot: usize) {
        self.counters[slot / LANES_PER_COUNTER]
            .lanes
            .retain(|l| *l != id);
    }
}

impl<P: Provider> Pair<P> {
    /// A process has got a remote link group for this pair. Its chunks have to be added next; then lanes can be opened.
    pub fn add_client(&mut self, memory: ClientMemory) -> ClientId {
        let id = self.next.client;
        self.next.client += 1;
        let client = Client {
            memory,
            app_chunks: LiteMap::new(),
            own_chunks: LiteMap::new(),
            counters: vec![Counter::default(); COUNTERS],
            removing: false,
        };
        self.clients.insert(id, client);
        id
    }

    /// A lane slot of a client is used for a connection to the peer's node. `None`: there is no such client, or no lane
    /// is left. The lane stays idle until [`Pair::connect`].
    pub fn open(&mut self, client: ClientId, slot: u32) -> Option<LaneId> {
        let slot = slot as usize;
        if slot >= LANES {
            return None;
        }
        let p = self.clients.get_mut(&client)?;
        let words = p.memory.proxy();
        // As an end does when it attaches a lane: it is not ready. Cursors stay as they are, because they never
        // decrease.
        words.rx[slot]
            .word
            .store(RxWord::default(), std::sync::atomic::Ordering::Release);
        let id = self.lanes.add(Lane::new(client, slot))?;
        p.counters[slot / LANES_PER_COUNTER].lanes.push(id);
        Some(id)
    }

    /// How well a rail suits a lane: its bytes go over a rail of the smallest rank that works, and among links of equal
    /// rank over the one with the fewest lanes. A rail without a rank comes last. A lane in use moves when it is told.
    pub fn prefer(&mut self, id: LaneId, rail: RailId, rank: u8) {
        if let Some(lane) = self.lanes.get_mut(id) {
            lane.ranks.insert(rail, rank);
        }
        self.wake(id);
    }

    /// The peer has told the token by which it names the lane. Epochs above `base` belong to this use of the slots;
    /// both ends must have been given the same base.
    pub fn connect(&mut self, id: LaneId, peer: u32, base: Epoch) {
        if let Some(lane) = self.lanes.get_mut(id) {
            if lane.peer.is_none() {
                lane.base = base;
                lane.peer = Some(peer);
            }
        }
        self.wake(id);
    }

    /// Queues the lanes of all counters that have moved.
    pub(super) fn scan(&mut self) -> bool {
        let mut found = false;
        let queue = &mut self.queue;
        let lanes = &mut self.lanes;
        for (_, p) in self.clients.iter_mut() {
            let app = p.memory.app();
            for (c, seq) in p.counters.iter_mut().zip(&app.seq) {
                if c.lanes.is_empty() {
                    continue;
                }
                let now = notify::counter(&seq.0);
                if now == c.seen {
                    continue;
                }
                c.seen = now;
                found = true;
                for id in &c.lanes {
                    if let Some(lane) = lanes.get_mut(*id) {
                        if !lane.queued {
                            lane.queued = true;
                            queue.push_back(*id);
                        }
                    }
                }
            }
        }
        found
    }

    /// Notes that words of this lane were stored; [`Pair::publish_all`] announces them.
    pub(super) fn publish(&mut self, lane: &Lane) {
        if let Some(p) = self.clients.get_mut(&lane.client) {
            p.counters[lane.slot / LANES_PER_COUNTER].publish = true;
        }
    }

    pub(super) fn publish_all(&mut self, host: &mut dyn Host) {
        for (id, p) in &mut self.clients {
            let mut ring = false;
            for (i, counter) in p.counters.iter_mut().enumerate() {
                if std::mem::take(&mut counter.publish) {
                    let seq = &p.memory.proxy().seq[i].0;
                    ring |= notify::publish(seq, &p.memory.app().sleepers.0);
                }
            }
            if ring {
                host.ring(*id);
            }
        }
    }

    /// Counts this daemon as asleep on all link groups. The caller has to poll once more afterwards.
    pub fn fall_asleep(&self) {
        for p in self.clients.values() {
            notify::fall_asleep(&p.memory.proxy().sleepers.0);
        }
    }

    /// Undoes [`Pair::fall_asleep`]. No client may have been added or removed meanwhile.
    pub fn wake_up(&self) {
        for p in self.clients.values() {
            notify::wake_up(&p.memory.proxy().sleepers.0);
        }
    }
}
