//! The data engine: moves the bytes of lanes between this node and one other.
//!
//! A [`Pair`] is everything that two daemons share: links (queue pairs) over several rails, the memory that each lets
//! the other write, and the lanes. It is a state machine without threads, clocks or sockets: the caller polls it with
//! the time, passes in what came over the control channel, and takes events out. So the same code runs step by step
//! over devices and over the simulation.
//!
//! Rules that must never be broken:
//! - no number from the peer or from an application's memory is trusted (each is read once and checked);
//! - memory is not used again while a write may still land in it;
//! - bytes are not acknowledged before they are in the peer's ring, and no bytes are posted over bytes that may not be
//!   there yet;
//! - a failure of one lane, or its load, does not affect another lane.

mod api;
mod chunks;
mod clients;
mod close;
mod inn;
mod inward;
mod lanes;
mod link;
mod links;
mod messages;
mod out;
mod outward;
mod post;
mod request;
mod tap;

pub use api::{
    Config, Control, Event, Fault, Host, LinkView, Rail, RoundTrips, Stats, Tap, ROUND_TRIPS_US,
};
pub use clients::ClientMemory;

use crate::verbs::{Completion, CompletionQueue, Provider};
use lanes::Lanes;
use litemap::LiteMap;
use std::collections::VecDeque;

/// Number of a rail of a pair, from 1; never used again.
pub type RailId = u32;
/// Number of a link, the same at both ends; never used again.
pub type LinkId = u32;
/// Number of a client of a pair, from 1; never used again.
pub type ClientId = u32;
/// Token of a lane: the number by which the peer names it.
pub type LaneId = u32;

/// Everything between this daemon and the daemon of one other node.
pub struct Pair<P: Provider> {
    // Dropped in this order: queue pairs, then what they use.
    links: LiteMap<LinkId, link::Link<P>>,
    chunks: LiteMap<u32, chunks::Chunk<P>>,
    rails: LiteMap<RailId, links::RailState<P>>,
    /// Links whose queue pair is destroyed here, until each end knows that both are destroyed.
    dead: LiteMap<LinkId, links::Dead>,
    clients: LiteMap<ClientId, clients::Client>,
    lanes: Lanes,
    config: Config,
    random: Box<dyn FnMut() -> u32 + Send>,
    now: u64,
    /// Lanes to be looked at, in the order of their turns.
    queue: VecDeque<LaneId>,
    inbox: VecDeque<Control>,
    events: VecDeque<Event>,
    next: Numbers,
    control: bool,
    /// Does a link carry lanes now?
    rail: bool,
    failed: bool,
    /// A queue pair could not be destroyed: nothing that relies on its destruction may be done or reported.
    stuck: bool,
    /// A completion queue may hold more completions than the last poll took.
    full: bool,
    /// Regions that the peer takes back, until none of our writes to them is in progress.
    leaving: Vec<u32>,
    lane_timer: u64,
    link_timer: u64,
    stats: LiteMap<RailId, Stats>,
    completions: Vec<Completion>,
    numbers: Vec<LinkId>,
}

struct Numbers {
    link: u32,
    rail: u32,
    client: u32,
    chunk: u32,
}

/// Interval between two looks at every lane, for what depends only on time.
const LANE_TIMER_NS: u64 = 20_000_000;
/// The same for links. Any other event of a link sets the timer to now.
const LINK_TIMER_NS: u64 = 1_000_000;
/// Interval between two looks at a handshake of queue pairs.
const HANDSHAKE_NS: u64 = 2_000_000;
/// Maximum number of lanes per poll, so that control messages and completions are handled soon.
const TURNS: usize = 256;

impl<P: Provider> Pair<P> {
    /// `random` supplies packet sequence numbers; they should be hard to guess.
    pub fn new(config: Config, random: Box<dyn FnMut() -> u32 + Send>) -> Self {
        Pair {
            links: LiteMap::new(),
            chunks: LiteMap::new(),
            rails: LiteMap::new(),
            dead: LiteMap::new(),
            clients: LiteMap::new(),
            lanes: Lanes::default(),
            config,
            random,
            now: 0,
            queue: VecDeque::new(),
            inbox: VecDeque::new(),
            events: VecDeque::new(),
            next: Numbers {
                link: 1,
                rail: 1,
                client: 1,
                chunk: 1,
            },
            control: false,
            rail: false,
            failed: false,
            stuck: false,
            full: false,
            leaving: Vec::new(),
            lane_timer: 0,
            link_timer: 0,
            stats: LiteMap::new(),
            completions: Vec::new(),
            numbers: Vec::new(),
        }
    }

    /// Does all work that is due; returns whether there was any. No other method works: they only record what they are
    /// told. A caller that sleeps polls until nothing is [unfinished](Pair::unfinished), arms the completion queues and
    /// counts itself asleep ([`Pair::fall_asleep`]), and polls once more if the queues were not armed, or it was not
    /// asleep, before.
    pub fn poll(&mut self, now_ns: u64, host: &mut dyn Host) -> bool {
        self.now = now_ns;
        let mut worked = false;
        while let Some(message) = self.inbox.pop_front() {
            self.on_control(message);
            self.link_timer = 0;
            worked = true;
        }
        worked |= self.poll_links(host);
        if now_ns >= self.link_timer {
            self.link_timer = now_ns + LINK_TIMER_NS;
            self.link_timers();
        }
        self.finish_leaving();
        worked |= self.scan();
        if now_ns >= self.lane_timer {
            self.lane_timer = now_ns + LANE_TIMER_NS;
            self.wake_lanes(|_| true);
            self.retry_chunks();
        }
        self.flush_links();
        for _ in 0..TURNS.min(self.queue.len()) {
            let Some(id) = self.queue.pop_front() else {
                break;
            };
            worked |= self.turn(id, host);
        }
        self.flush_links();
        self.publish_all(host);
        worked || self.unfinished()
    }

    /// Did the last poll leave work for the next one?
    pub fn unfinished(&self) -> bool {
        !self.queue.is_empty() || !self.inbox.is_empty() || self.full || self.link_timer == 0
    }

    /// When the next poll is due if nothing happens; `quiet` is added while no handshake is in progress.
    pub fn next_timer_ns(&self, quiet: u64) -> u64 {
        let next = self.lane_timer + quiet;
        match self.links.values().any(link::Link::shakes_hands) {
            true => next.min(self.now + HANDSHAKE_NS),
            false => next,
        }
    }

    /// The oldest event that was not taken yet. Take all events after each poll.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// A message of the peer's daemon that came over the control channel.
    pub fn control(&mut self, message: Control) {
        self.inbox.push_back(message);
    }

    /// The control channel is connected again, or gone. Messages sent over an earlier one may be lost.
    pub fn set_control(&mut self, up: bool) {
        self.control = up;
        if up {
            self.say_again();
        }
    }

    /// Has this pair failed? [`Event::PairFailed`] has reported why.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// Arms the completion queues; returns whether any was not armed before. `fresh` is called once for each queue:
    /// the caller has to sleep on its descriptor, and to call [`Pair::notified`] when that is readable.
    pub fn arm(&mut self, mut fresh: impl FnMut(LinkId, &P::Cq)) -> bool {
        let mut news = false;
        for (no, link) in &mut self.links {
            if !std::mem::replace(&mut link.known, true) {
                fresh(*no, &link.cq);
            }
            news |= link.arm();
        }
        news
    }

    /// There may be a notification of this link's queue. `rearm`: the caller will sleep again after the next poll.
    pub fn notified(&mut self, no: LinkId, rearm: bool) {
        if let Some(link) = self.links.get_mut(&no) {
            let _ = link.cq.take_notification();
            link.armed = None;
            if rearm {
                link.arm();
            }
        }
    }

    fn event(&mut self, event: Event) {
        self.events.push_back(event);
    }

    /// The peer violates the protocol of the links themselves: nothing from it can be trusted.
    fn fail_pair(&mut self, why: &'static str) {
        if self.failed {
            return;
        }
        self.failed = true;
        self.event(Event::PairFailed(why));
        let all: Vec<_> = self.links.keys().copied().collect();
        for no in all {
            self.fail_link(no, why);
        }
    }

    /// Puts the lanes for which `which` holds into the queue.
    fn wake_lanes(&mut self, which: impl Fn(&lanes::Lane) -> bool) {
        let queue = &mut self.queue;
        self.lanes.each(|id, lane| {
            if !lane.queued && which(lane) {
                lane.queued = true;
                queue.push_back(id);
            }
        });
    }

    fn wake(&mut self, id: LaneId) {
        if let Some(lane) = self.lanes.get_mut(id) {
            if !lane.queued {
                lane.queued = true;
                self.queue.push_back(id);
            }
        }
    }
}
