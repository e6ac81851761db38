//! One lane: what both directions share, and the table of lanes.

use super::api::Fault;
use super::inn::In;
use super::out::Out;
use super::{LaneId, RailId};
use lane::abi::Epoch;
use lane::num;
use litemap::LiteMap;

/// Number of epochs in one use of a lane slot: `base + 1` to `base + EPOCHS`.
pub(super) const EPOCHS: u32 = 0xffff;

pub(super) struct Lane {
    pub client: u32,
    pub slot: usize,
    pub base: Epoch,
    /// Token by which the peer names the lane; none until it has told.
    pub peer: Option<u32>,
    /// The link over which we send messages about the lane. It stays set after the link's death until both ends are
    /// destroyed.
    pub link: Option<u32>,
    /// How well each rail suits the lane: 0 is best.
    pub ranks: LiteMap<RailId, u8>,
    /// Requests posted and not completed.
    pub under_way: u32,
    seq_out: u16,
    seq_in: Option<u16>,
    pub out: Out,
    pub inn: In,
    pub queued: bool,
    /// A snapshot has to be sent.
    pub cdc: bool,
    /// The next snapshot is the first after a move to another link.
    pub validate: bool,
    pub abort: bool,
    pub fault: Option<Fault>,
    pub closing: Option<Closing>,
    /// The peer no longer writes to our rings, and has forgotten the lane except for our own closing.
    pub peer_closed: bool,
    /// Since when no link could carry the lane although there are some.
    pub starved: Option<u64>,
}

/// A lane that is being removed.
#[derive(Default)]
pub(super) struct Closing {
    /// How the sender came down has to be told first: a receiver may wait for that, and nothing else tells it.
    pub tells: bool,
    pub next_try: u64,
    pub acked: bool,
}

impl Lane {
    pub(super) fn new(client: u32, slot: usize) -> Self {
        Lane {
            client,
            slot,
            base: Epoch::NONE,
            peer: None,
            link: None,
            ranks: LiteMap::new(),
            under_way: 0,
            seq_out: 0,
            seq_in: None,
            out: Out::default(),
            inn: In::default(),
            queued: false,
            cdc: false,
            validate: false,
            abort: false,
            fault: None,
            closing: None,
            peer_closed: false,
            starved: None,
        }
    }

    /// Neither failed nor removed.
    pub(super) fn works(&self) -> bool {
        self.fault.is_none() && self.closing.is_none()
    }

    /// What a link over this rail counts for the lane.
    pub(super) fn rank(&self, rail: RailId) -> u8 {
        self.ranks.get(&rail).copied().unwrap_or(u8::MAX)
    }

    pub(super) fn next_seq(&mut self) -> u16 {
        self.seq_out = self.seq_out.wrapping_add(1);
        self.seq_out
    }

    /// Is this message newer than all before? Messages on one link come in order, but a lane that moves from one
    /// working link to another may get messages over both for a moment.
    pub(super) fn news(&mut self, seq: u16) -> bool {
        let newer = self
            .seq_in
            .is_none_or(|last| seq.wrapping_sub(last).wrapping_sub(1) < u16::MAX / 2);
        if newer {
            self.seq_in = Some(seq);
        }
        newer
    }

    /// Does this epoch belong to the present use of the slot?
    pub(super) fn ours(&self, epoch: Epoch) -> bool {
        (1..=EPOCHS).contains(&epoch.since(self.base))
    }

    /// The link is destroyed at both ends: nothing of ours is in flight. Everything is sent again over another link.
    pub(super) fn moved(&mut self) {
        self.link = None;
        self.under_way = 0;
        self.validate = true;
        self.cdc = true;
        self.out.moved();
        self.inn.moved();
    }

    /// Messages sent over the former control channel may be lost.
    pub(super) fn say_again(&mut self) {
        if let Some(c) = &mut self.closing {
            c.next_try = 0;
        }
        self.out.query_again();
    }
}

/// Lanes by token. A token consists of an index and the number of uses of its place, so that a late message for a
/// lane that is gone does not reach its successor.
#[derive(Default)]
pub(super) struct Lanes {
    places: Vec<Slot>,
    free: Vec<u32>,
}

struct Slot {
    uses: u32,
    lane: Option<Box<Lane>>,
    taken: bool,
}

const INDEX_BITS: u32 = 20;
const USES: u32 = (1 << (32 - INDEX_BITS)) - 1;

impl Lanes {
    pub(super) fn add(&mut self, lane: Lane) -> Option<LaneId> {
        let i = match self.free.pop() {
            Some(i) => i,
            None if self.places.len() < 1 << INDEX_BITS => {
                self.places.push(Slot {
                    uses: 0,
                    lane: None,
                    taken: false,
                });
                num::small(self.places.len()) - 1
            }
            None => return None,
        };
        let place = &mut self.places[i as usize];
        place.uses = place.uses % USES + 1;
        place.lane = Some(Box::new(lane));
        Some(place.uses << INDEX_BITS | i)
    }

    fn place(&mut self, id: LaneId) -> Option<&mut Slot> {
        let place = self.places.get_mut(id as usize & ((1 << INDEX_BITS) - 1))?;
        (place.uses == id >> INDEX_BITS).then_some(place)
    }

    pub(super) fn get(&self, id: LaneId) -> Option<&Lane> {
        let place = self.places.get(id as usize & ((1 << INDEX_BITS) - 1))?;
        place
            .lane
            .as_deref()
            .filter(|_| place.uses == id >> INDEX_BITS)
    }

    pub(super) fn get_mut(&mut self, id: LaneId) -> Option<&mut Lane> {
        self.place(id)?.lane.as_deref_mut()
    }

    /// Takes a lane out of the table, so that it can be worked on together with the rest of the pair.
    pub(super) fn take(&mut self, id: LaneId) -> Option<Box<Lane>> {
        let place = self.place(id)?;
        place.taken = place.lane.is_some();
        place.lane.take()
    }

    pub(super) fn put_back(&mut self, id: LaneId, lane: Box<Lane>) {
        if let Some(place) = self.place(id) {
            if place.taken {
                place.taken = false;
                place.lane = Some(lane);
            }
        }
    }

    pub(super) fn remove(&mut self, id: LaneId) {
        if let Some(place) = self.place(id) {
            place.lane = None;
            place.taken = false;
            self.free.push(id & ((1 << INDEX_BITS) - 1));
        }
    }

    pub(super) fn each(&mut self, mut f: impl FnMut(LaneId, &mut Lane)) {
        for (i, p) in self.places.iter_mut().enumerate() {
            if let Some(lane) = p.lane.as_deref_mut() {
                f(p.uses << INDEX_BITS | num::small(i), lane);
            }
        }
    }
}
