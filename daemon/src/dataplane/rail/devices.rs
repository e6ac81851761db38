//! The rails of this node: ports of devices that are open here and can carry links.
//!
//! Two rails of two nodes are taken to be connected if their addresses are in the same subnet: a daemon can know
//! no more about the wiring. Where this is wrong, because a router connects two subnets, the configuration names
//! the fabric. Among several rails, a connection's bytes take the one of the interface that has its address ([`Facts::rank`]).

use crate::config::RailRules;
use crate::os::locality::Locality;
use rustix::fd::RawFd;
use std::collections::{BTreeMap, BTreeSet};
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
    /// Where it is, which no link depends on.
    pub place: Place,
}

/// Where a rail is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// The network interfaces whose addresses the port has: the one of our GID, and the one below it that is the port's own
    /// (of a VLAN).
    pub netdevs: Vec<String>,
    /// The subnet of that address: an address in it, and the mask.
    pub subnet: Option<(IpAddr, IpAddr)>,
    pub numa: Option<u32>,
}

impl Facts {
    /// How well this rail suits an end there; 0 is best. The interface is what an administrator has wired and addressed;
    /// pools of addresses of several rails may overlap.
    pub(super) fn rank(&self, locality: &Locality) -> u8 {
        let here = &self.place;
        if here.netdevs.iter().any(|n| locality.interfaces.contains(n)) {
            return 0;
        }
        let within =
            |(of, mask): (IpAddr, IpAddr)| masked(locality.address?, mask).map(|a| a == of);
        if here.subnet.and_then(within) == Some(true) {
            return 1;
        }
        match here.numa.is_some() && here.numa == locality.numa {
            true => 2,
            false => 3,
        }
    }

    /// Are links that were made with these facts as good as ones made with those?
    fn makes_the_same_links(&self, other: &Facts) -> bool {
        let place = other.place.clone();
        let moved = Facts {
            place,
            ..self.clone()
        };
        moved == *other
    }
}

/// What happened to a rail.
pub(super) enum News {
    Up(Port),
    /// Down, or its address has changed: everything made of it must go.
    Gone(Port),
    /// Some rail is in another place now: only which lanes it suits has changed.
    Moved,
    /// A device reports that a queue pair has failed.
    QpFailed(DeviceId, u32),
}

pub(super) struct Devices<V: Provider> {
    verbs: V,
    rules: RailRules,
    /// Ports that would be rails, if clear text were not forbidden.
    forbidden: BTreeSet<Port>,
    open: BTreeMap<DeviceId, Arc<V::Device>>,
    up: BTreeMap<Port, Facts>,
}

impl<V: Provider> Devices<V> {
    pub(super) fn new(verbs: V, rules: RailRules) -> Devices<V> {
        Devices {
            verbs,
            rules,
            forbidden: BTreeSet::new(),
            open: BTreeMap::new(),
            up: BTreeMap::new(),
        }
    }

    pub(super) fn up(&self) -> &BTreeMap<Port, Facts> {
        &self.up
    }

    /// Are there rails that may not be used, because they do not encrypt?
    pub(super) fn has_forbidden(&self) -> bool {
        !self.forbidden.is_empty()
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
        self.forbidden.retain(|p| p.device != *id);
        if self.open.remove(id).is_some() {
            tracing::info!(device = id.name, "rdma device gone");
        }
    }

    fn look(&mut self, d: &SysDevice, news: &mut Vec<News>) {
        self.forbidden.retain(|p| p.device != d.id);
        let mut wanted: Vec<(u8, Facts)> = Vec::new();
        for port in d.ports.iter().map(|p| p.port) {
            match facts(&self.rules, d, port) {
                Some(_) if self.rules.is_forbidden(&d.id.name, port) => {
                    let device = d.id.clone();
                    self.forbidden.insert(Port { device, port });
                }
                Some(f) => wanted.push((port, f)),
                None => {}
            }
        }
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
            let was = self.up.get_mut(&key).zip(now.as_ref());
            if let Some((was, now)) = was.filter(|(was, now)| was.makes_the_same_links(now)) {
                was.place = now.place.clone();
                news.push(News::Moved);
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
}

/// The properties of a port, if it is usable. Prefers an IPv4 address.
fn facts(rules: &RailRules, d: &SysDevice, port: u8) -> Option<Facts> {
    let p = d.ports.iter().find(|p| p.port == port)?;
    d.usable(p).ok()?;
    let config = rules.of(&d.id.name, port);
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
            let infiniband = kind == GidKind::InfiniBand;
            let network = network(g.gid.ip()).filter(|_| !infiniband);
            let prefix = || infiniband.then(|| number(&g.gid.0[..8]));
            let of = network.map(subnet).or_else(prefix).or(fabric)?;
            let v4 = matches!(g.gid.ip(), IpAddr::V4(_));
            Some(((!v4, g.index), g, (of, network)))
        })
        .min_by_key(|(rank, ..)| *rank)?;
    let (subnet, network) = subnet;
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
        place: Place {
            netdevs: [&gid.netdev, &p.netdev]
                .into_iter()
                .flatten()
                .cloned()
                .collect(),
            subnet: network,
            numa: d.numa_node,
        },
    })
}

/// Has one of these devices a port that is a rail?
pub(crate) fn has_rail(all: &[SysDevice], rules: &RailRules) -> bool {
    let may = |d: &SysDevice, port| {
        !rules.is_forbidden(&d.id.name, port) && facts(rules, d, port).is_some()
    };
    let is = |d: &SysDevice| d.ports.iter().any(|p| may(d, p.port));
    all.iter().any(is)
}

/// A number for a subnet.
fn subnet((first, _): (IpAddr, IpAddr)) -> u32 {
    match first {
        IpAddr::V4(ip) => number(&ip.octets()),
        IpAddr::V6(ip) => number(&ip.octets()),
    }
}

/// The subnet of an address of this machine: its first address, and the mask.
fn network(ip: IpAddr) -> Option<(IpAddr, IpAddr)> {
    if matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local()) {
        return None;
    }
    let mut all = nix::ifaddrs::getifaddrs().ok()?;
    all.find_map(|a| {
        let plain = |s: nix::sys::socket::SockaddrStorage| {
            let v4 = s.as_sockaddr_in().map(|s| IpAddr::V4(s.ip()));
            v4.or(s.as_sockaddr_in6().map(|s| IpAddr::V6(s.ip())))
        };
        let (address, mask) = (plain(a.address?)?, plain(a.netmask?)?);
        (address == ip).then_some((masked(address, mask)?, mask))
    })
}

/// `None` if they are of two families.
fn masked(address: IpAddr, mask: IpAddr) -> Option<IpAddr> {
    match (address, mask) {
        (IpAddr::V4(a), IpAddr::V4(m)) => Some((a & m).into()),
        (IpAddr::V6(a), IpAddr::V6(m)) => Some((a & m).into()),
        _ => None,
    }
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

    impl Facts {
        fn of(gid: Gid) -> Facts {
            Facts {
                gid,
                gid_index: 0,
                lid: 0,
                mtu: Mtu::B1024,
                fabric: 0,
                place: Place::default(),
            }
        }
    }

    #[test]
    fn subnets_have_numbers() {
        let of = |s: &str| network(s.parse().unwrap()).map(subnet);
        assert_eq!(of("127.0.0.1"), Some(number(&[127, 0, 0, 0])), "/8");
        assert_eq!(of("203.0.113.77"), None);
        assert_eq!(of("fe80::1"), None);
    }

    #[test]
    fn the_rail_of_an_end() {
        let ip = |s: &str| Some(s.parse::<IpAddr>().unwrap());
        let rail = Facts {
            place: Place {
                netdevs: vec!["ens2.100".into(), "ens2".into()],
                subnet: ip("10.1.0.0").zip(ip("255.255.0.0")),
                numa: Some(1),
            },
            ..Facts::of(Gid([0; 16]))
        };
        let locality = |names: &[&str], address, numa| Locality {
            address,
            interfaces: names.iter().map(|n| n.to_string()).collect(),
            numa,
        };
        assert_eq!(
            rail.rank(&locality(&["eth0", "ens2"], ip("10.9.0.1"), None)),
            0
        );
        assert_eq!(rail.rank(&locality(&["ens3"], ip("10.1.9.9"), Some(1))), 1);
        assert_eq!(rail.rank(&locality(&[], ip("10.2.0.1"), Some(1))), 2);
        assert_eq!(rail.rank(&locality(&["ens3"], ip("fd00::1"), Some(0))), 3);
        assert_eq!(rail.rank(&Locality::default()), 3);
        assert_eq!(rail.rank(&locality(&["ens2.200", "ens2"], None, None)), 0);
        let nothing = Facts::of(Gid([0; 16]));
        assert!(nothing.makes_the_same_links(&rail));
        assert!(!nothing.makes_the_same_links(&Facts::of(Gid([1; 16]))));
        assert_eq!(nothing.rank(&Locality::default()), 3);
    }

    /// A subnet is the fabric: of an address's interface, or the first half of InfiniBand's.
    #[test]
    fn fabrics_of_ports() {
        let node = World::new(1, 1, 1, Faults::default()).node(0);
        let id = node.scan().unwrap().remove(0);
        let d = Devices::new(node, RailRules::default());
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
            facts(&d.rules, &device, 1).map(|f| f.fabric)
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
        let mut d = Devices::new(node, RailRules::default());
        let ports: Vec<Port> = (ids.iter().cloned())
            .map(|device| Port { device, port: 1 })
            .collect();
        for port in &ports {
            d.up.insert(port.clone(), Facts::of(Gid([0; 16])));
        }
        let mut news = Vec::new();
        d.changed(&[Change::Removed(ids[0].clone())], &mut news);
        assert!(matches!(&news[..], [News::Gone(p)] if *p == ports[0]));
        assert_eq!(d.up().keys().collect::<Vec<_>>(), [&ports[1]]);
    }
}
