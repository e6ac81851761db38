//! The rails of this node: ports of devices that are open here and can carry links.
//!
//! Two rails of two nodes are taken to be connected if their addresses are in the same subnet: a daemon can know
//! no more about the wiring. Where this is wrong, because a router connects two subnets, the configuration names
//! the fabric.

use crate::config::RailConfig;
use rustix::fd::RawFd;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use underpass_rdma::devices::{Change, Fabric, SysDevice};
use underpass_rdma::engine::Rail;
use underpass_rdma::verbs::{
    Device as _, DeviceEvent, DeviceId, Gid, GidKind, Mtu, PortState, Provider,
};

/// Name of a rail: device and port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Port {
    pub device: DeviceId,
    pub port: u8,
}

/// The properties of a port that a link over it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub gid: Gid,
    pub gid_index: u32,
    pub lid: u16,
    pub mtu: Mtu,
    pub fabric: u32,
}

/// What happened to a rail.
pub(super) enum News {
    Up(Port),
    /// Down, or its address has changed: everything made of it must go.
    Gone(Port),
    /// A device reports that a queue pair has failed.
    QpFailed(DeviceId, u32),
}

pub(super) struct Devices<V: Provider> {
    verbs: V,
    config: Vec<RailConfig>,
    open: BTreeMap<DeviceId, Arc<V::Device>>,
    up: BTreeMap<Port, Facts>,
}

impl<V: Provider> Devices<V> {
    pub(super) fn new(verbs: V, config: &[RailConfig]) -> Devices<V> {
        Devices {
            verbs,
            config: config.to_vec(),
            open: BTreeMap::new(),
            up: BTreeMap::new(),
        }
    }

    pub(super) fn up(&self) -> &BTreeMap<Port, Facts> {
        &self.up
    }

    /// A rail, for the engine of a pair of nodes.
    pub(super) fn rail(&self, port: &Port) -> Option<Rail<V::Device>> {
        let (f, device) = (self.up.get(port)?, self.open.get(&port.device)?);
        Some(Rail {
            device: device.clone(),
            port: port.port,
            gid_index: f.gid_index,
            gid: f.gid,
            lid: f.lid,
            mtu: f.mtu,
            fabric: f.fabric,
        })
    }

    /// Descriptors that become readable when there are events.
    pub(super) fn event_fds(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.open.values().filter_map(|d| d.event_fd())
    }

    /// Handles changes that the kernel shows.
    pub(super) fn changed(&mut self, changes: &[Change], news: &mut Vec<News>) {
        for c in changes {
            match c {
                Change::Removed(id) => self.close(id, news),
                Change::Added(d) | Change::Changed(d) => self.look(d, news),
            }
        }
    }

    fn close(&mut self, id: &DeviceId, news: &mut Vec<News>) {
        let of: Vec<Port> = self
            .up
            .keys()
            .filter(|p| p.device == *id)
            .cloned()
            .collect();
        for p in of {
            self.up.remove(&p);
            news.push(News::Gone(p));
        }
        if self.open.remove(id).is_some() {
            tracing::info!(device = id.name, "rdma device gone");
        }
    }

    fn look(&mut self, d: &SysDevice, news: &mut Vec<News>) {
        let wanted: Vec<(u8, Facts)> = d
            .ports
            .iter()
            .filter_map(|p| Some((p.port, self.facts(d, p.port)?)))
            .collect();
        if !wanted.is_empty() && !self.open.contains_key(&d.id) {
            match self.verbs.open(&d.id) {
                Ok(dev) => {
                    self.open.insert(d.id.clone(), Arc::new(dev));
                }
                Err(e) => tracing::warn!(device = d.id.name, "cannot open rdma device: {e}"),
            }
        }
        let Some(open) = self.open.get(&d.id).cloned() else {
            return;
        };
        let info = open.info().ok();
        for p in &d.ports {
            let key = Port {
                device: d.id.clone(),
                port: p.port,
            };
            let mut now = wanted.iter().find(|w| w.0 == p.port).map(|w| w.1.clone());
            let said = info
                .as_ref()
                .and_then(|i| i.ports.iter().find(|q| q.port == p.port));
            match (&mut now, said) {
                (Some(f), Some(q)) if q.state == PortState::Active => f.mtu = q.active_mtu,
                _ => now = None,
            }
            if self.up.get(&key) == now.as_ref() {
                continue;
            }
            if self.up.remove(&key).is_some() {
                news.push(News::Gone(key.clone()));
            }
            if let Some(f) = now {
                tracing::info!(device = d.id.name, port = p.port, address = ?f.gid.ip(), "rail up");
                self.up.insert(key.clone(), f);
                news.push(News::Up(key));
            } else {
                tracing::info!(device = d.id.name, port = p.port, "rail down");
            }
        }
    }

    /// Handles events of open devices. Returns the devices that should be looked at again.
    pub(super) fn events(&mut self, news: &mut Vec<News>) -> Vec<DeviceId> {
        let mut stale = Vec::new();
        let mut gone = Vec::new();
        for (id, d) in &self.open {
            while let Ok(Some(e)) = d.poll_event() {
                match e {
                    DeviceEvent::QpError(qpn) => news.push(News::QpFailed(id.clone(), qpn)),
                    DeviceEvent::Removed => gone.push(id.clone()),
                    DeviceEvent::Other => {}
                    DeviceEvent::PortDown(port) => {
                        let port = Port {
                            device: id.clone(),
                            port,
                        };
                        if self.up.remove(&port).is_some() {
                            news.push(News::Gone(port));
                        }
                        stale.push(id.clone());
                    }
                    _ => stale.push(id.clone()),
                }
            }
        }
        for id in gone {
            self.close(&id, news);
        }
        stale
    }

    /// The properties of a port, if it is usable. Prefers an IPv4 address.
    fn facts(&self, d: &SysDevice, port: u8) -> Option<Facts> {
        let p = d.ports.iter().find(|p| p.port == port)?;
        d.usable(p).ok()?;
        let config = self.config.iter().find(|c| c.is(&d.id.name, port));
        if config.is_some_and(|c| c.off) {
            return None;
        }
        let fabric = config.and_then(|c| c.fabric);
        let kind = match d.fabric(p) {
            Fabric::InfiniBand => GidKind::InfiniBand,
            Fabric::Iwarp => GidKind::Address,
            _ => GidKind::RoceV2,
        };
        let of_kind = p.gids.iter().filter(|g| g.kind == kind);
        let (_, gid, subnet) = of_kind
            .filter_map(|g| {
                let subnet = subnet(&g.gid, kind == GidKind::InfiniBand).or(fabric)?;
                let v4 = matches!(g.gid.ip(), IpAddr::V4(_));
                Some(((!v4, g.index), g, subnet))
            })
            .min_by_key(|(rank, ..)| *rank)?;
        let of = fabric.unwrap_or(subnet);
        Some(Facts {
            gid: gid.gid,
            gid_index: match kind {
                GidKind::Address => 0, // the order of addresses has no meaning
                _ => gid.index,
            },
            lid: p.lid,
            mtu: Mtu::B1024, // until the device reports it
            fabric: match kind {
                // RoCE over the same wires is another fabric.
                GidKind::Address => number(&[&of.to_be_bytes()[..], b"iWARP"].concat()),
                _ => of,
            },
        })
    }
}

/// A number for the subnet that an address is in; `None` if it cannot be told.
fn subnet(gid: &Gid, infiniband: bool) -> Option<u32> {
    if infiniband {
        return Some(number(&gid.0[..8]));
    }
    let ip = gid.ip();
    let all = nix::ifaddrs::getifaddrs().ok()?;
    for a in all {
        let (Some(address), Some(mask)) = (a.address, a.netmask) else {
            continue;
        };
        let found = match ip {
            IpAddr::V4(ip) => address
                .as_sockaddr_in()
                .zip(mask.as_sockaddr_in())
                .and_then(|(a, m)| {
                    let (a, m) = (u32::from(a.ip()), u32::from(m.ip()));
                    (a == u32::from(ip)).then(|| number(&(a & m).to_be_bytes()))
                }),
            IpAddr::V6(ip) if ip.is_unicast_link_local() => None,
            IpAddr::V6(ip) => address
                .as_sockaddr_in6()
                .zip(mask.as_sockaddr_in6())
                .and_then(|(a, m)| {
                    let (a, m) = (u128::from(a.ip()), u128::from(m.ip()));
                    (a == u128::from(ip)).then(|| number(&(a & m).to_be_bytes()))
                }),
        };
        if found.is_some() {
            return found;
        }
    }
    None
}

/// FNV-1a: the same on every node and in every version.
fn number(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |h, b| {
        (h ^ u32::from(*b)).wrapping_mul(0x0100_0193)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use underpass_rdma::devices::SysPort;
    use underpass_rdma::sim::{Faults, World};
    use underpass_rdma::verbs::{GidEntry, LinkLayer, Transport};

    #[test]
    fn subnets_have_numbers() {
        let gid = |s: &str| {
            let ip: std::net::Ipv6Addr = s.parse().unwrap();
            Gid(ip.octets())
        };
        let lo = subnet(&gid("::ffff:127.0.0.1"), false);
        assert_eq!(lo, Some(number(&[127, 0, 0, 0])), "127.0.0.1/8");
        assert_eq!(subnet(&gid("::ffff:203.0.113.77"), false), None);
        assert_eq!(subnet(&gid("fe80::1"), false), None);
        let ib = |last| subnet(&gid(&format!("fe80:0:0:5::{last}")), true);
        assert_eq!(ib(1), ib(2));
        assert_ne!(ib(1), subnet(&gid("fe80::1"), true));
    }

    /// A subnet is the fabric: of an address's interface, or the first half of InfiniBand's.
    #[test]
    fn fabrics_of_ports() {
        let node = World::new(1, 1, 1, Faults::default()).node(0);
        let id = node.scan().unwrap().remove(0);
        let d = Devices::new(node, &[]);
        let fabric = |layer, kind, address: &str| {
            let ip: std::net::Ipv6Addr = address.parse().unwrap();
            let port = SysPort {
                port: 1,
                state: PortState::Active,
                link_layer: layer,
                lid: 1,
                speed_mbps: None,
                netdev: None,
                gids: vec![GidEntry {
                    index: 0,
                    gid: Gid(ip.octets()),
                    kind,
                    netdev: None,
                }],
            };
            let device = SysDevice {
                id: id.clone(),
                node_guid: 1,
                transport: Transport::InfiniBand,
                pci: None,
                numa_node: None,
                verbs: Some("uverbs0".into()),
                ports: vec![port],
            };
            d.facts(&device, 1).map(|f| f.fabric)
        };
        let roce = |a| fabric(LinkLayer::Ethernet, GidKind::RoceV2, a);
        assert_eq!(roce("::ffff:127.0.0.1"), Some(number(&[127, 0, 0, 0])));
        assert_eq!(roce("::ffff:203.0.113.77"), None);
        let ib = |a| fabric(LinkLayer::InfiniBand, GidKind::InfiniBand, a);
        let first: std::net::Ipv6Addr = "fe80:0:0:5::".parse().unwrap();
        let expected = number(&first.octets()[..8]);
        assert_eq!(ib("fe80:0:0:5::1"), Some(expected));
        assert_eq!(ib("fe80:0:0:5::2"), Some(expected));
    }

    /// A device that goes takes its own ports with it, and no other one's.
    #[test]
    fn one_device_goes() {
        let node = World::new(1, 1, 2, Faults::default()).node(0);
        let ids = node.scan().unwrap();
        let mut d = Devices::new(node, &[]);
        let ports: Vec<Port> = (ids.iter().cloned())
            .map(|device| Port { device, port: 1 })
            .collect();
        for port in &ports {
            let facts = Facts {
                gid: Gid([0; 16]),
                gid_index: 0,
                lid: 0,
                mtu: Mtu::B1024,
                fabric: 0,
            };
            d.up.insert(port.clone(), facts);
        }
        let mut news = Vec::new();
        d.changed(&[Change::Removed(ids[0].clone())], &mut news);
        assert!(matches!(&news[..], [News::Gone(p)] if *p == ports[0]));
        assert_eq!(d.up().keys().collect::<Vec<_>>(), [&ports[1]]);
    }
}
