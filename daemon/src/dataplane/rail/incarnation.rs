//! One peer node: its engine, and when a new incarnation of it begins.

use super::devices::{Devices, Port};
use super::lanes::Stage;
use super::{Effect, Host, Key, Rails};
use crate::nodes::peers::directory::Name;
use crate::nodes::peers::msg::Msg;
use crate::os::panics::{contained, Part};
use crate::os::system::System;
use lane::num;
use lane::proto::reason::Reason;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use underpass_rdma::engine::{self, Config, Event, LaneId, Pair, RailId};
use underpass_rdma::verbs::{DeviceId, Provider};

/// Base of the exponential backoff after a protocol violation, in ns, and how often it doubles at most.
const VIOLATION_BACKOFF_NS: u64 = 1_000_000_000;
const VIOLATION_BACKOFF_DOUBLINGS: u32 = 6;
/// So many incarnation numbers there are. They go round, so that each has one after it: whatever number a node says, the one
/// that takes its place later can go on from there.
const INCARNATIONS: u64 = 1 << 62;

/// Why the rails to a node fail if its engine panics. (If it cannot be taken down after that, the process ends.)
const DEFECT: &str = "a defect in the engine";

pub(super) fn after(incarnation: u64) -> u64 {
    incarnation.wrapping_add(1) % INCARNATIONS
}

/// Does `a` come after `b`? Of two different numbers, one does and the other does not.
fn is_after(a: u64, b: u64) -> bool {
    match a.wrapping_sub(b) % INCARNATIONS {
        0 => false,
        ahead if ahead == INCARNATIONS / 2 => a > b,
        ahead => ahead < INCARNATIONS / 2,
    }
}
/// A node with neither a channel nor a working link is given up after this time: otherwise what is kept for it
/// would never be freed.
const LOST_NS: u64 = 20_000_000_000;

pub(super) struct Node<V: Provider> {
    pub number: u32,
    first: bool,
    pub pair: Pair<V>,
    pub incarnation: u64,
    /// How many incarnations there were, which this node counts for itself: what is left of one is never taken for another's,
    /// whatever number the peer gives it.
    pub era: u64,
    /// Both nodes are known to be in this incarnation, and there is a channel.
    pub agreed: bool,
    /// Which run of the peer's daemon it is.
    daemon: Option<u64>,
    pub rails: BTreeMap<Port, RailId>,
    /// All rails that this engine was ever given, and the counters of former engines.
    pub ever: BTreeMap<RailId, Port>,
    pub past: BTreeMap<Port, engine::Stats>,
    pub lanes: HashMap<LaneId, Key>,
    pub clients: HashMap<engine::ClientId, u64>,
    /// Lanes in the making, by the number of their pairing.
    pub making: HashMap<u64, Key>,
    /// There is a link that carries lanes.
    pub up: bool,
    pub refusal: Option<Reason>,
    faults: u32,
    no_rails_before: u64,
    /// Since when there has been no channel.
    alone_since: Option<u64>,
    /// It is no peer any more.
    pub gone: bool,
}

fn new_pair<V: Provider>(first: bool, system: &Arc<dyn System>) -> Pair<V> {
    let system = system.clone();
    Pair::new(
        Config::new(first),
        Box::new(move || num::low32(system.random())),
    )
}

impl<V: Provider> Node<V> {
    pub(super) fn new(number: u32, first: bool, system: &Arc<dyn System>) -> Node<V> {
        Node {
            number,
            first,
            pair: new_pair(first, system),
            incarnation: 1,
            era: 0,
            agreed: false,
            daemon: None,
            rails: BTreeMap::new(),
            ever: BTreeMap::new(),
            past: BTreeMap::new(),
            lanes: HashMap::new(),
            clients: HashMap::new(),
            making: HashMap::new(),
            up: false,
            refusal: None,
            faults: 0,
            no_rails_before: 0,
            alone_since: None,
            gone: false,
        }
    }

    /// Does this node offer the links? (The one with the smaller name does.)
    pub(super) fn is_first(&self) -> bool {
        self.first
    }

    pub(super) fn add_rail(&mut self, now: u64, devices: &Devices<V>, port: &Port) {
        if now < self.no_rails_before || self.rails.contains_key(port) {
            return;
        }
        let Some(rail) = devices.rail(port) else {
            return;
        };
        match self.pair.add_rail(rail) {
            Ok(id) => {
                self.rails.insert(port.clone(), id);
                self.ever.insert(id, port.clone());
            }
            Err(e) => tracing::warn!("rail {}: {e}", port.device.name),
        }
    }

    pub(super) fn remove_rail(&mut self, port: &Port) {
        if let Some(id) = self.rails.remove(port) {
            self.pair.remove_rail(id);
        }
    }

    pub(super) fn qp_failed(&mut self, device: &DeviceId, qpn: u32) {
        for (port, id) in &self.rails {
            if port.device == *device {
                self.pair.qp_failed(*id, qpn);
            }
        }
    }
}

/// Adds a lane to what is logged of it, by the name that both daemons know it by.
fn lane_span(lane: u32) -> tracing::Span {
    tracing::info_span!("lane", name = %format_args!("{lane:#x}"))
}

impl<V: Provider> Rails<V> {
    /// A channel to the peer's daemon is up; `daemon` tells which run of it.
    pub fn channel_up(&mut self, name: &Name, daemon: u64) {
        self.notify();
        let Some(n) = self.nodes.get_mut(name) else {
            return;
        };
        let other = n.daemon.replace(daemon).is_some_and(|d| d != daemon);
        n.agreed = false;
        n.alone_since = None;
        let incarnation = n.incarnation;
        if other {
            self.renew(name, after(incarnation));
        }
        self.say_incarnation(name);
        self.tell_refusals();
    }

    pub fn channel_down(&mut self, name: &Name) {
        self.notify();
        let now = self.system.now();
        let Some(n) = self.nodes.get_mut(name) else {
            return;
        };
        n.agreed = false;
        n.alone_since.get_or_insert(now);
        n.pair.set_control(false);
        let making: Vec<Key> = n.making.drain().map(|(_, k)| k).collect();
        for k in making {
            self.unmake(k, Reason::PeerDaemon, Reason::None);
        }
    }

    fn say_incarnation(&mut self, name: &Name) {
        if let Some(n) = self.nodes.get(name) {
            self.out.push(Effect::Say(
                name.clone(),
                Msg::Rails {
                    incarnation: n.incarnation,
                },
            ));
        }
    }

    pub fn message(&mut self, name: &Name, msg: Msg) {
        self.notify();
        let Some(n) = self.nodes.get_mut(name) else {
            return;
        };
        match msg {
            Msg::Rails { incarnation }
                if incarnation < INCARNATIONS && is_after(incarnation, n.incarnation) =>
            {
                self.renew(name, incarnation);
                self.say_incarnation(name);
                self.agree(name);
            }
            Msg::Rails { incarnation } if incarnation == n.incarnation => self.agree(name),
            Msg::Engine {
                incarnation,
                control,
            } if incarnation == n.incarnation && n.agreed => {
                let done = contained(Part::Rails, || n.pair.control(control));
                if done.is_none() {
                    self.event(name, Event::PairFailed(DEFECT));
                }
            }
            Msg::Lane {
                incarnation,
                pair,
                token,
                uses,
                tag,
            } if incarnation == n.incarnation => self.peer_lane(name, pair, (token, uses, tag)),
            Msg::LaneGo { incarnation, pair } if incarnation == n.incarnation => {
                self.peer_go(name, pair)
            }
            Msg::NoLane {
                incarnation,
                pair,
                reason,
            } if incarnation == n.incarnation => {
                if let Some(k) = n.making.remove(&pair) {
                    let peer = Reason::from_code(reason).unwrap_or(Reason::PeerDeclined);
                    self.unmake(k, Reason::PeerDeclined, peer);
                }
            }
            _ => {} // they belong to another incarnation
        }
    }

    fn agree(&mut self, name: &Name) {
        if self.devices.is_none() {
            return; // without devices nobody polls the engine
        }
        if let Some(n) = self.nodes.get_mut(name) {
            if !std::mem::replace(&mut n.agreed, true) {
                n.pair.set_control(true);
            }
        }
    }

    /// Begins a new incarnation with this node; everything of the previous one goes down to TCP.
    pub(super) fn renew(&mut self, name: &Name, incarnation: u64) {
        let now = self.system.now();
        let Some(n) = self.nodes.get_mut(name) else {
            return;
        };
        let mut host = Host {
            now,
            groups: &mut self.groups,
            clients: &n.clients,
            lanes: &n.lanes,
            out: &mut self.out,
        };
        n.pair.abandon(&mut host);
        self.events(name);
        let Some(n) = self.nodes.get_mut(name) else {
            return;
        };
        n.keep_counts();
        n.pair = new_pair(n.first, &self.system);
        tracing::info!(node = %name, incarnation, "an incarnation of the rails begins");
        n.incarnation = incarnation;
        n.era += 1;
        n.agreed = false;
        n.up = false;
        n.rails.clear();
        n.lanes.clear();
        n.clients.clear();
        self.add_ports(name);
        let Some(n) = self.nodes.get_mut(name) else {
            return;
        };
        let making: Vec<Key> = n.making.drain().map(|(_, k)| k).collect();
        for k in making {
            self.unmake(k, Reason::DaemonLost, Reason::None);
        }
        for (group, b) in &mut self.groups {
            if b.node == *name {
                b.client = None;
                if !b.torn {
                    self.out.push(Effect::TearDown { group: *group });
                }
            }
        }
        let mut leaving = Vec::new();
        for (k, l) in self.lanes.iter_mut().filter(|(_, l)| l.node == *name) {
            l.engine = None;
            if l.stage == Stage::Leaving {
                leaving.push(*k);
            }
        }
        leaving.into_iter().for_each(|k| self.removed(k));
    }

    /// Gives the node's engine all ports that are up.
    pub(super) fn add_ports(&mut self, name: &Name) {
        let now = self.system.now();
        let (Some(n), Some(d)) = (self.nodes.get_mut(name), &self.devices) else {
            return;
        };
        let ports: Vec<Port> = d.up().keys().cloned().collect();
        ports.iter().for_each(|p| n.add_rail(now, d, p));
    }

    /// Gives up nodes that have been out of reach for long.
    pub fn sweep(&mut self) {
        self.forget_gone();
        let t = self.system.now();
        let lost = |n: &Node<V>| {
            let long = n.alone_since.is_some_and(|s| t >= s + LOST_NS);
            long && !n.up && (!n.lanes.is_empty() || !n.clients.is_empty())
        };
        let of = |(name, n): (&Name, &Node<V>)| lost(n).then(|| (name.clone(), n.incarnation));
        let all: Vec<(Name, u64)> = self.nodes.iter().filter_map(of).collect();
        for (name, incarnation) in all {
            self.notify();
            self.renew(&name, after(incarnation));
        }
    }

    /// Polls the engine of one node. Returns whether there was anything to do.
    pub(super) fn poll_node(&mut self, name: &Name, now: u64) -> bool {
        let Some(n) = self.nodes.get_mut(name) else {
            return false;
        };
        if n.no_rails_before != 0 && now >= n.no_rails_before {
            n.no_rails_before = 0;
            self.add_ports(name);
            self.rank_all();
        }
        let Some(n) = self.nodes.get_mut(name) else {
            return false;
        };
        let mut host = Host {
            now,
            groups: &mut self.groups,
            clients: &n.clients,
            lanes: &n.lanes,
            out: &mut self.out,
        };
        let worked = contained(Part::Rails, || n.pair.poll(now, &mut host));
        match worked {
            None => self.event(name, Event::PairFailed(DEFECT)),
            Some(_) => self.events(name),
        }
        worked.unwrap_or(true)
    }

    fn events(&mut self, name: &Name) {
        while let Some(e) = self.nodes.get_mut(name).and_then(|n| n.pair.next_event()) {
            self.event(name, e);
        }
    }

    fn event(&mut self, name: &Name, e: Event) {
        let now = self.system.now();
        let Some(n) = self.nodes.get_mut(name) else {
            return;
        };
        let incarnation = n.incarnation;
        let _node = tracing::info_span!("node", %name).entered();
        match e {
            Event::Control(control) => {
                if n.agreed {
                    let msg = Msg::Engine {
                        incarnation,
                        control,
                    };
                    self.out.push(Effect::Say(name.clone(), msg));
                }
            }
            Event::LinkUp { link, .. } => {
                let _link = tracing::info_span!("link", number = link).entered();
                tracing::info!("link up");
            }
            Event::LinkDown { link, why, .. } => {
                let _link = tracing::info_span!("link", number = link).entered();
                tracing::warn!("link down: {why}");
            }
            Event::NoRail => {
                n.up = false;
                self.tend_at = 0;
                tracing::warn!("no link is left");
                self.tell_refusals();
            }
            Event::RailBack => {
                n.up = true;
                n.faults = 0;
                self.tell_refusals();
            }
            Event::LaneFailed { lane, fault } => {
                if let Some(k) = n.lanes.get(&lane).copied() {
                    let _lane = lane_span(lane).entered();
                    tracing::warn!("lane failed: {fault}");
                    self.fail(k, Reason::Hostile);
                }
            }
            Event::Settled { lane, stands } => {
                let what = if stands { "it stands" } else { "it never came" };
                let _lane = lane_span(lane).entered();
                tracing::info!("a switch was in doubt: {what}");
            }
            Event::Flushed { .. } | Event::Asked => self.tend_at = 0,
            Event::PeerClosed { lane, used } => {
                if let Some(k) = n.lanes.get(&lane).copied() {
                    self.peer_closed(k, used);
                }
            }
            Event::Removed { lane } => {
                if let Some(k) = n.lanes.remove(&lane) {
                    self.removed(k);
                }
            }
            Event::ClientRemoved { client } => {
                n.clients.remove(&client);
            }
            Event::PairFailed(why) => {
                tracing::error!("the rails fail: {why}");
                n.faults = (n.faults + 1).min(VIOLATION_BACKOFF_DOUBLINGS);
                n.no_rails_before = now + (VIOLATION_BACKOFF_NS << n.faults);
                self.renew(name, after(incarnation));
                self.say_incarnation(name);
                self.tell_refusals();
            }
        }
    }

    /// Gives up a lane that was not offered yet.
    pub(super) fn unmake(&mut self, at: Key, local: Reason, peer: Reason) {
        let Some(l) = self.lanes.get(&at).filter(|l| l.stage == Stage::Making) else {
            return;
        };
        let retry_ms = super::lanes::RETRY_MS;
        self.out.push(Effect::Abandon {
            at,
            who: l.who,
            local,
            peer,
            retry_ms,
        });
        self.forget_lane(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// There is no number that a node could take for good.
    #[test]
    fn each_number_has_one_after_it() {
        let some = [
            0,
            1,
            2,
            5_000,
            INCARNATIONS / 2 - 1,
            INCARNATIONS / 2,
            INCARNATIONS - 1,
        ];
        for a in some {
            assert!(after(a) < INCARNATIONS && is_after(after(a), a) && !is_after(a, after(a)));
            for b in some {
                assert_eq!(is_after(a, b), a != b && !is_after(b, a), "{a} {b}");
            }
        }
    }
}
