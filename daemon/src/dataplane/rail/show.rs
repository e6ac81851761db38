//! What the tools are shown of the rails.

use super::devices::Port;
use super::incarnation::Node;
use super::{Key, Rails};
use crate::clients::ids::ConnRef;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use underpass_admin::{RailLinks, RailRow, RailStats};
use underpass_rdma::engine::{LinkId, LinkView, Stats, Tap};
use underpass_rdma::verbs::{Gid, Provider};

/// A GID as text; empty until the peer has told its own.
fn shown(gid: Gid) -> String {
    match gid.is_zero() {
        true => String::new(),
        false => gid.to_string(),
    }
}

impl<V: Provider> Rails<V> {
    /// The links that carry these connections' lanes now. Lanes are many and links few: each link's row is made once.
    pub fn rows(&self, asked: &[(Key, ConnRef)]) -> Vec<Option<Arc<RailRow>>> {
        let mut made = HashMap::new();
        let row = |(at, who): &(Key, ConnRef)| {
            let lane = self.lanes.get(at).filter(|l| l.who == *who)?;
            let node = self.nodes.get(&lane.node)?;
            let link = node.pair.link_of(lane.engine?)?;
            let row = made.entry((node.number, link));
            row.or_insert_with(|| node.row(link).map(Arc::new)).clone()
        };
        asked.iter().map(row).collect()
    }

    /// From now on, this one is told what arrives for the lane of that end. `false`: it has none, or not yet.
    pub fn tap(&mut self, at: Key, who: ConnRef, tap: Box<dyn Tap>) -> bool {
        let Some(lane) = self.lanes.get(&at).filter(|l| l.who == who) else {
            return false;
        };
        let node = self.nodes.get_mut(&lane.node);
        let engine = node.zip(lane.engine);
        engine.is_some_and(|(n, id)| n.pair.tap(id, tap))
    }

    /// Counters, in parts: one for each peer node and each time that a rail was added to it.
    pub fn counts(&self) -> Vec<RailStats> {
        let mut all = Vec::new();
        let past = |(port, stats): (&Port, &Stats)| RailStats {
            device: port.device.name.clone(),
            port: port.port,
            ..part(*stats)
        };
        for (name, node) in &self.nodes {
            let links = node.pair.links();
            for (id, port) in &node.ever {
                let of: Vec<&LinkView> = links.iter().filter(|v| v.rail == *id).collect();
                let links = RailLinks {
                    node: name.to_string(),
                    up: of.iter().filter(|v| v.active).count() as u64,
                    lanes: of.iter().map(|v| v.lanes as u64).sum(),
                };
                let present = node.rails.get(port) == Some(id);
                all.push(RailStats {
                    device: port.device.name.clone(),
                    port: port.port,
                    links: if present { vec![links] } else { Vec::new() },
                    ..part(node.pair.stats(*id))
                });
            }
            all.extend(node.past.iter().map(past));
        }
        all.extend(self.departed.iter().map(past));
        all
    }
}

impl<V: Provider> Rails<V> {
    /// Is there no lane: none being made, in use, or being closed?
    pub fn is_empty(&self) -> bool {
        let busy = |n: &Node<V>| !n.lanes.is_empty() || !n.making.is_empty();
        self.lanes.is_empty() && self.out.is_empty() && !self.nodes.values().any(busy)
    }
}

impl<V: Provider> std::fmt::Debug for Rails<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (name, n) in &self.nodes {
            let (i, up, agreed) = (n.incarnation, n.up, n.agreed);
            write!(
                f,
                "[{name}: incarnation {i}, up {up}, agreed {agreed}, rails {}",
                n.rails.len()
            )?;
            write!(
                f,
                ", {} in the engine, {} in the making]",
                n.lanes.len(),
                n.making.len()
            )?;
        }
        for (at, l) in &self.lanes {
            write!(
                f,
                "[{at:x?}: {:?}, ends {:?}, fin {}",
                l.stage, l.ending, l.fin
            )?;
            write!(
                f,
                ", working {}, taken over {}]",
                l.working,
                l.takeover.is_some()
            )?;
        }
        Ok(())
    }
}

fn part(s: Stats) -> RailStats {
    RailStats {
        writes: s.writes,
        bytes: s.bytes,
        messages_sent: s.messages_sent,
        messages_received: s.messages_received,
        links_failed: s.links_failed,
        round_trips: s.round_trips.counts.into(),
        round_trips_ns: s.round_trips.sum_ns,
        ..RailStats::default()
    }
}

impl<V: Provider> Node<V> {
    fn row(&self, link: LinkId) -> Option<RailRow> {
        let view = self.pair.links().into_iter().find(|v| v.link == link)?;
        let port = self.ever.get(&view.rail)?;
        // In SMC-R the server adds links to the group; here the node with the smaller name does.
        let role = if self.is_first() { "server" } else { "client" };
        Some(RailRow {
            role: role.into(),
            device: port.device.name.clone(),
            port: port.port,
            link: view.link,
            gid: shown(view.gid),
            peer_gid: shown(view.peer_gid),
        })
    }

    /// The engine is about to be replaced: its counters are kept.
    pub(super) fn keep_counts(&mut self) {
        for (id, port) in std::mem::take(&mut self.ever) {
            let s = self.pair.stats(id);
            add(&mut self.past, port, s);
        }
    }
}

/// Adds to the counters of a port.
pub(super) fn add(all: &mut BTreeMap<Port, Stats>, port: Port, s: Stats) {
    let sum = all.entry(port).or_default();
    sum.writes += s.writes;
    sum.bytes += s.bytes;
    sum.inlined += s.inlined;
    sum.messages_sent += s.messages_sent;
    sum.messages_received += s.messages_received;
    sum.links_failed += s.links_failed;
    sum.round_trips.merge(&s.round_trips);
}
