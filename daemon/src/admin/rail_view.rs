//! What the tools show of RDMA links: which one carries a connection, what each rail has done, and what connects
//! two nodes. `dataplane::rail` has the facts; what a caller may know of them is decided here.

use crate::clients::ids::ConnRef;
use crate::clients::view::Entry;
use crate::core::Core;
use crate::dataplane::thread::DataPlane;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use underpass_admin::{Across, RailLinks, RailRow, RailStats, Row};
use underpass_rdma::verbs::Provider;

impl<V: Provider> Core<V> {
    /// Counters of all rails, in order of their names.
    pub(crate) fn rail_stats(&self) -> Vec<RailStats> {
        self.rails.as_ref().map_or(Vec::new(), |r| stats_of(r))
    }

    /// Links, channel and refusals between this node and that of `peer`; `None`: `peer` is not on another node.
    pub(crate) fn between(&self, local: IpAddr, peer: IpAddr) -> Option<Across> {
        let mut a = self.peers.as_ref()?.across(local, peer)?;
        let stats = self.rail_stats();
        let links = stats.iter().flat_map(|r| &r.links);
        a.links = links.filter(|l| l.node == a.node).map(|l| l.up).sum();
        Some(a)
    }

    /// Adds the rail to the rows of connections that use one. A row's link group and lane are what its shim says, so
    /// `Rails::rows` checks that the lane is that connection's.
    pub(crate) fn fill_rails(&self, rows: &mut [Entry]) {
        if let Some(plane) = &self.rails {
            fill(rows, |asked| plane.lock().rows(asked));
        }
    }
}

/// Most connections that are looked up in one step of the rails, in which no bytes move.
const STEP: usize = 1024;

fn fill(
    rows: &mut [Entry],
    mut look: impl FnMut(&[((u64, u32), ConnRef)]) -> Vec<Option<Arc<RailRow>>>,
) {
    let mut remote: Vec<_> = rows.iter_mut().filter(|e| e.row.mode == "SMCR").collect();
    for part in remote.chunks_mut(STEP) {
        let ask = |e: &&mut Entry| {
            let who = ConnRef {
                client: e.client,
                conn: e.conn,
                gen: e.gen,
            };
            ((e.row.link, e.row.lane), who)
        };
        let asked: Vec<_> = part.iter().map(ask).collect();
        for (e, found) in part.iter_mut().zip(look(&asked)) {
            e.row.rail = found.map(Arc::unwrap_or_clone);
        }
    }
}

/// Counters of all rails of this data plane, in order of their names.
pub(crate) fn stats_of<V: Provider>(plane: &DataPlane<V>) -> Vec<RailStats> {
    let parts = plane.lock().counts();
    sum(parts)
}

fn sum(parts: Vec<RailStats>) -> Vec<RailStats> {
    let mut all: BTreeMap<(String, u8), RailStats> = BTreeMap::new();
    for p in parts {
        let s = all
            .entry((p.device.clone(), p.port))
            .or_insert_with(|| RailStats {
                device: p.device,
                port: p.port,
                ..RailStats::default()
            });
        for (a, b) in [
            (&mut s.writes, p.writes),
            (&mut s.bytes, p.bytes),
            (&mut s.messages_sent, p.messages_sent),
            (&mut s.messages_received, p.messages_received),
            (&mut s.links_failed, p.links_failed),
            (&mut s.round_trips_ns, p.round_trips_ns),
        ] {
            *a = a.saturating_add(b);
        }
        s.round_trips
            .resize(p.round_trips.len().max(s.round_trips.len()), 0);
        for (a, b) in s.round_trips.iter_mut().zip(p.round_trips) {
            *a = a.saturating_add(b);
        }
        for l in p.links {
            match s.links.iter_mut().find(|k| k.node == l.node) {
                Some(k) => {
                    k.up += l.up;
                    k.lanes += l.lanes;
                }
                None => s.links.push(l),
            }
        }
        s.links.sort_by(|a, b| a.node.cmp(&b.node));
    }
    all.into_values().collect()
}

/// Processes in containers must not learn the addresses of nodes.
pub(crate) fn hide_addresses(row: &mut Row) {
    if let Some(r) = &mut row.rail {
        r.gid.clear();
        r.peer_gid.clear();
    }
}

/// They must not learn the names of nodes either, only sums over all nodes.
pub(crate) fn hide_nodes(rail: &mut RailStats) {
    if rail.links.is_empty() {
        return;
    }
    let total = |f: fn(&RailLinks) -> u64| rail.links.iter().map(f).sum();
    rail.links = vec![RailLinks {
        node: String::new(),
        up: total(|l| l.up),
        lanes: total(|l| l.lanes),
    }];
}

pub(crate) fn hide_node(a: &mut Across) {
    for s in [&mut a.own, &mut a.node, &mut a.trouble] {
        s.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of lanes wait while the rails are looked at, so that is not done for each row.
    #[test]
    fn rows_are_filled_in_few_steps() {
        let row = |n: u32| {
            let mode = if n % 2 == 0 { "SMCR" } else { "SMCD" };
            let row = Row {
                mode: mode.into(),
                lane: n,
                ..Row::default()
            };
            Entry::untracked(row, "1.2.3.4:5".parse().unwrap(), None)
        };
        let mut all: Vec<Entry> = (0..4000).map(row).collect();
        let mut steps = 0;
        fill(&mut all, |asked| {
            steps += 1;
            let rail = |link| {
                Some(Arc::new(RailRow {
                    link,
                    ..RailRow::default()
                }))
            };
            asked.iter().map(|a| rail(a.0 .1)).collect()
        });
        assert_eq!(steps, 2);
        for e in all {
            let link = e.row.rail.map(|r| r.link);
            assert_eq!(link, (e.row.mode == "SMCR").then_some(e.row.lane));
        }
    }

    fn part(device: &str, node: &str, up: u64) -> RailStats {
        RailStats {
            device: device.into(),
            port: 1,
            links: vec![RailLinks {
                node: node.into(),
                up,
                lanes: 10 * up,
            }],
            writes: 1,
            bytes: 100,
            messages_sent: 3,
            messages_received: 4,
            links_failed: 5,
            round_trips: vec![6; usize::try_from(up).unwrap()],
            round_trips_ns: 7,
        }
    }

    #[test]
    fn parts_of_one_rail_are_added_up() {
        let parts = vec![
            part("mlx5_1", "n3", 2),
            part("mlx5_0", "n2", 1),
            part("mlx5_1", "n2", 4),
            part("mlx5_1", "n3", 1),
        ];
        let all = sum(parts);
        let names: Vec<_> = all.iter().map(|r| &*r.device).collect();
        assert_eq!(names, ["mlx5_0", "mlx5_1"]);
        assert_eq!(all[0], part("mlx5_0", "n2", 1));
        let r = &all[1];
        let counters = [r.writes, r.bytes, r.messages_sent, r.messages_received];
        assert_eq!((counters, r.links_failed), ([3, 300, 9, 12], 15));
        // (Parts of older and newer builds may have more of them or fewer.)
        assert_eq!(
            (&r.round_trips[..], r.round_trips_ns),
            (&[18, 12, 6, 6][..], 21)
        );
        let links = |r: &RailStats| -> Vec<(String, u64, u64)> {
            let one = |l: &RailLinks| (l.node.clone(), l.up, l.lanes);
            r.links.iter().map(one).collect()
        };
        assert_eq!(links(r), [("n2".into(), 4, 40), ("n3".into(), 3, 30)]);
        let mut hidden = r.clone();
        hide_nodes(&mut hidden);
        assert_eq!(links(&hidden), [(String::new(), 7, 70)]);
    }

    #[test]
    fn a_container_does_not_learn_the_nodes_addresses() {
        let rail = RailRow {
            device: "mlx5_0".into(),
            gid: "fe80".into(),
            peer_gid: "fe81".into(),
            ..RailRow::default()
        };
        let mut row = Row {
            rail: Some(rail),
            ..Row::default()
        };
        hide_addresses(&mut row);
        let r = row.rail.unwrap();
        assert_eq!((&*r.device, &*r.gid, &*r.peer_gid), ("mlx5_0", "", ""));
    }
}
