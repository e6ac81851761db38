//! Reading `/sys/class/infiniband`.

use crate::verbs::{DeviceId, Gid, GidEntry, GidKind, LinkLayer, PortState, Transport};
use lane::num;
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SysDevice {
    /// Its name, and which appearance of it this is.
    pub id: DeviceId,
    /// The device's own number, EUI-64; 0: not readable.
    pub node_guid: u64,
    /// The transport of its queue pairs.
    pub transport: Transport,
    /// Address on the PCI bus; `None` for software devices.
    pub pci: Option<String>,
    /// NUMA node of the device, or of the interface on which a software device is based.
    pub numa_node: Option<u32>,
    /// The character device through which programs use it, such as `uverbs0`. When a device is removed, it disappears
    /// first, while the kernel waits for all programs to close it. (rxe tells programs that have it open in no other
    /// way.)
    pub verbs: Option<String>,
    /// In order of numbers.
    pub ports: Vec<SysPort>,
}

/// A port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SysPort {
    /// From 1.
    pub port: u8,
    /// As the device reports it.
    pub state: PortState,
    /// The port's link layer.
    pub link_layer: LinkLayer,
    /// Local identifier, assigned by InfiniBand's subnet manager; otherwise 0.
    pub lid: u16,
    /// As the driver reports; software devices invent it.
    pub speed_mbps: Option<u32>,
    /// Network interface of its first GID, or the one on which a software device is based.
    pub netdev: Option<String>,
    /// The entries that are set, by index.
    pub gids: Vec<GidEntry>,
}

/// The directories of sysfs.
#[derive(Clone, Debug)]
pub struct Tree {
    pub(super) class: PathBuf,
    verbs: PathBuf,
    net: PathBuf,
    /// Addresses of a network interface.
    addresses: fn(&str) -> Vec<IpAddr>,
}

impl Tree {
    /// The sysfs of this machine.
    pub fn system() -> Self {
        Tree {
            addresses: of_interface,
            ..Tree::at(Path::new("/sys"))
        }
    }

    /// One in another place, in which interfaces have no addresses.
    pub fn at(sys: &Path) -> Self {
        Tree {
            class: sys.join("class/infiniband"),
            verbs: sys.join("class/infiniband_verbs"),
            net: sys.join("class/net"),
            addresses: |_| Vec::new(),
        }
    }

    /// All devices, by name. A kernel without RDMA has none.
    pub fn scan(&self) -> Vec<SysDevice> {
        self.names().iter().filter_map(|n| self.device(n)).collect()
    }

    /// The appearance of the device that has this name now.
    pub fn id(&self, name: &str) -> Option<DeviceId> {
        // The inode number of the directory is assigned when the device appears, and not reused.
        let index = fs::metadata(self.class.join(name)).ok()?.ino();
        Some(DeviceId {
            name: name.to_owned(),
            index,
        })
    }

    /// The `uverbs` device of a device.
    fn verbs(&self, name: &str) -> Option<String> {
        let of = |v: &String| text(&self.verbs.join(v).join("ibdev"));
        names(&self.verbs)
            .into_iter()
            .find(|v| of(v).as_deref() == Some(name))
    }

    pub(super) fn names(&self) -> Vec<String> {
        names(&self.class)
    }

    /// A device with its GIDs.
    pub(super) fn device(&self, name: &str) -> Option<SysDevice> {
        let mut seen = self.glance(name)?;
        for p in &mut seen.ports {
            if seen.transport == Transport::Iwarp {
                break; // `glance` has read them already
            }
            let dir = self.class.join(format!("{name}/ports/{}", p.port));
            p.gids = read_gids(&dir, p.link_layer);
            let of_gid = p.gids.iter().find_map(|g| g.netdev.clone());
            p.netdev = of_gid.or_else(|| p.netdev.take());
        }
        // Read again, in case another device has got the name while we looked.
        (self.id(name)? == seen.id).then_some(seen)
    }

    /// A device without its GIDs, which make up most of the files: rxe has a table of 1,024.
    pub fn glance(&self, name: &str) -> Option<SysDevice> {
        let id = self.id(name)?;
        let dir = self.class.join(name);
        let mut ports: Vec<SysPort> = names(&dir.join("ports"))
            .iter()
            .filter_map(|n| Some((n.parse().ok()?, dir.join("ports").join(n))))
            .filter_map(|(port, dir)| read_port(port, &dir))
            .collect();
        ports.sort_by_key(|p| p.port);
        let bus = fs::canonicalize(dir.join("device")).ok();
        // The interface on which rxe is based.
        let parent = text(&dir.join("parent"));
        let transport = transport(&text(&dir.join("node_type")).unwrap_or_default());
        for p in &mut ports {
            p.netdev = parent.clone();
            if transport == Transport::Iwarp {
                let of_gid = text(&dir.join(format!("ports/{}/gid_attrs/ndevs/0", p.port)));
                let known = of_gid.filter(|n| !n.is_empty()).or_else(|| parent.clone());
                p.netdev = known.or_else(|| interface(&dir, p.port));
                let all = p.netdev.as_deref().map(self.addresses);
                p.gids = addresses(all.unwrap_or_default(), p.netdev.as_deref());
            }
        }
        let numa = text(&dir.join("device/numa_node"))
            .or_else(|| text(&self.net.join(parent?).join("device/numa_node")));
        Some(SysDevice {
            node_guid: text(&dir.join("node_guid"))
                .and_then(|t| guid(&t))
                .unwrap_or(0),
            transport,
            pci: bus.as_deref().and_then(pci),
            // -1 if the machine has no NUMA nodes.
            numa_node: numa.and_then(|t| t.parse().ok()),
            verbs: self.verbs(name),
            ports,
            id: self.id(name).filter(|now| *now == id)?,
        })
    }
}

fn read_port(port: u8, dir: &Path) -> Option<SysPort> {
    let link_layer = match text(&dir.join("link_layer"))?.as_str() {
        "InfiniBand" => LinkLayer::InfiniBand,
        "Ethernet" => LinkLayer::Ethernet,
        _ => LinkLayer::Other,
    };
    Some(SysPort {
        port,
        state: state(&text(&dir.join("state"))?),
        link_layer,
        lid: text(&dir.join("lid"))
            .and_then(|t| u16::from_str_radix(t.trim_start_matches("0x"), 16).ok())
            .unwrap_or(0),
        speed_mbps: text(&dir.join("rate")).and_then(|t| rate(&t)),
        netdev: None,
        gids: Vec::new(),
    })
}

fn read_gids(port: &Path, link_layer: LinkLayer) -> Vec<GidEntry> {
    let mut gids: Vec<GidEntry> = names(&port.join("gids"))
        .iter()
        .filter_map(|n| read_gid(n.parse().ok()?, port, link_layer))
        .collect();
    gids.sort_by_key(|g| g.index);
    gids
}

fn read_gid(index: u32, port: &Path, link_layer: LinkLayer) -> Option<GidEntry> {
    let attr = |kind: &str| text(&port.join(format!("gid_attrs/{kind}/{index}")));
    let gid: Gid = text(&port.join(format!("gids/{index}")))?.parse().ok()?;
    if gid.is_zero() {
        return None;
    }
    let kind = match attr("types").as_deref() {
        Some("RoCE v2") => GidKind::RoceV2,
        // The kernel has one name for both.
        Some("IB/RoCE v1") if link_layer == LinkLayer::Ethernet => GidKind::RoceV1,
        Some("IB/RoCE v1") => GidKind::InfiniBand,
        _ => GidKind::Other,
    };
    Some(GidEntry {
        index,
        gid,
        kind,
        netdev: attr("ndevs").filter(|n| !n.is_empty()),
    })
}

/// The network interface of an iWARP adapter's port.
fn interface(device: &Path, port: u8) -> Option<String> {
    let dir = device.join("device/net");
    let all = names(&dir);
    let of_port = |n: &&String| {
        let number = text(&dir.join(n).join("dev_port"));
        number.and_then(|t| t.parse().ok()) == Some(u32::from(port) - 1)
    };
    let only = || all.first().filter(|_| all.len() == 1);
    all.iter().find(of_port).or_else(only).cloned()
}

/// IP addresses in the form of a GID table.
fn addresses(all: Vec<IpAddr>, netdev: Option<&str>) -> Vec<GidEntry> {
    let entry = |(i, ip): (usize, IpAddr)| GidEntry {
        index: num::small(i),
        gid: Gid::from(ip),
        kind: GidKind::Address,
        netdev: netdev.map(str::to_owned),
    };
    all.into_iter().enumerate().map(entry).collect()
}

/// Addresses of an interface that are valid beyond its own link.
fn of_interface(name: &str) -> Vec<IpAddr> {
    let all = nix::ifaddrs::getifaddrs().into_iter().flatten();
    let ip = |a: nix::ifaddrs::InterfaceAddress| {
        let a = a.address.filter(|_| a.interface_name == name)?;
        let v4 = a.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        let v6 = a.as_sockaddr_in6().map(|a| a.ip());
        v4.or(v6.filter(|ip| !ip.is_unicast_link_local()).map(IpAddr::V6))
    };
    all.filter_map(ip).collect()
}

/// Names in a directory, sorted; none if it does not exist.
pub(super) fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut all: Vec<String> = entries
        .filter_map(|e| e.file_name().into_string().ok())
        .collect();
    all.sort();
    all
}

pub(super) fn text(file: &Path) -> Option<String> {
    Some(fs::read_to_string(file).ok()?.trim().to_owned())
}

fn guid(text: &str) -> Option<u64> {
    u64::from_str_radix(&text.replace(':', ""), 16).ok()
}

/// The number in text such as `1: CA`.
pub(super) fn leading_number(text: &str) -> Option<u32> {
    text.split(':').next()?.trim().parse().ok()
}

fn transport(node_type: &str) -> Transport {
    match leading_number(node_type) {
        Some(1) => Transport::InfiniBand,
        Some(4) => Transport::Iwarp,
        _ => Transport::Other,
    }
}

fn state(text: &str) -> PortState {
    match leading_number(text) {
        Some(1) => PortState::Down,
        Some(2) => PortState::Init,
        Some(3) => PortState::Armed,
        Some(4) => PortState::Active,
        _ => PortState::Other,
    }
}

/// `2.5 Gb/sec (1X SDR)` as megabits per second.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the rate is positive, and less than 2^32 in megabits"
)]
fn rate(text: &str) -> Option<u32> {
    let gigabits: f64 = text.split(' ').next()?.parse().ok()?;
    (gigabits > 0.0 && gigabits < 1e6).then_some((gigabits * 1000.0) as u32)
}

/// The last component of a device's path, if it is a PCI address.
fn pci(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let parts: Vec<&str> = name.split([':', '.']).collect();
    let sizes: Vec<usize> = parts.iter().map(|p| p.len()).collect();
    let hex = parts
        .iter()
        .all(|p| p.bytes().all(|b| b.is_ascii_hexdigit()));
    (sizes == [4, 2, 2, 1] && hex).then(|| name.to_owned())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::devices::Unusable;
    use std::os::unix::fs::symlink;

    pub(crate) fn put(root: &Path, file: &str, text: &str) {
        let file = root.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, format!("{text}\n")).unwrap();
    }

    /// A port as rxe shows it.
    pub(crate) fn rxe(root: &Path, name: &str, netdev: &str, gids: &[&str]) {
        let dir = format!("class/infiniband/{name}");
        put(root, &format!("{dir}/node_guid"), "5054:00ff:fe00:0001");
        put(root, &format!("{dir}/node_type"), "1: CA");
        put(root, &format!("{dir}/parent"), netdev);
        put(
            root,
            &format!("class/infiniband_verbs/u-{name}/ibdev"),
            name,
        );
        let port = format!("{dir}/ports/1");
        put(root, &format!("{port}/state"), "4: ACTIVE");
        put(root, &format!("{port}/link_layer"), "Ethernet");
        put(root, &format!("{port}/lid"), "0x0");
        put(root, &format!("{port}/rate"), "2.5 Gb/sec (1X SDR)");
        for (i, gid) in gids.iter().enumerate() {
            put(root, &format!("{port}/gids/{i}"), gid);
            if *gid != "0000:0000:0000:0000:0000:0000:0000:0000" {
                put(root, &format!("{port}/gid_attrs/types/{i}"), "RoCE v2");
                put(root, &format!("{port}/gid_attrs/ndevs/{i}"), netdev);
            }
        }
    }

    const LINK_LOCAL: &str = "fe80:0000:0000:0000:5054:00ff:fe00:0001";
    const V4: &str = "0000:0000:0000:0000:0000:ffff:0a09:0001";
    const ZERO: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

    #[test]
    fn no_rdma_no_devices() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Tree::at(root.path()).scan(), []);
    }

    #[test]
    fn a_software_device() {
        let root = tempfile::tempdir().unwrap();
        let mut table = [ZERO; 11];
        (table[0], table[2], table[10]) = (LINK_LOCAL, V4, V4);
        rxe(root.path(), "rxe0", "eth0", &table);
        let [d] = &Tree::at(root.path()).scan()[..] else {
            panic!("one device")
        };
        assert_eq!(d.id.name, "rxe0");
        assert_eq!(d.node_guid, 0x5054_00ff_fe00_0001);
        assert_eq!((d.pci.as_deref(), d.numa_node), (None, None));
        assert_eq!(d.verbs.as_deref(), Some("u-rxe0"));
        let p = &d.ports[0];
        assert_eq!((p.port, p.state, p.lid), (1, PortState::Active, 0));
        assert_eq!(p.speed_mbps, Some(2500));
        assert_eq!(p.netdev.as_deref(), Some("eth0"));
        let gids: Vec<_> = p.gids.iter().map(|g| (g.index, g.kind)).collect();
        assert_eq!(gids, [0, 2, 10].map(|i| (i, GidKind::RoceV2)));
        assert_eq!(p.gids[1].gid.to_string(), V4);
        assert_eq!(d.usable(p), Ok(()));

        put(root.path(), "class/net/eth0/device/numa_node", "1");
        rxe(root.path(), "rxe1", "eth1", &[ZERO]);
        let fresh = Tree::at(root.path()).device("rxe1").unwrap();
        assert_eq!(fresh.ports[0].netdev.as_deref(), Some("eth1"));
        assert_eq!(fresh.usable(&fresh.ports[0]), Err(Unusable::NoGid));
        let glance = Tree::at(root.path()).glance("rxe0").unwrap();
        assert_eq!((&glance.id, glance.numa_node), (&d.id, Some(1)));
        assert_eq!(glance.ports[0].netdev.as_deref(), Some("eth0"));
        assert_eq!(glance.ports[0].gids, []);
    }

    #[test]
    fn a_card_with_two_ports() {
        let root = tempfile::tempdir().unwrap();
        let r = root.path();
        rxe(r, "mlx5_0", "eth2", &[LINK_LOCAL, LINK_LOCAL]);
        let dir = "class/infiniband/mlx5_0";
        put(r, &format!("{dir}/ports/1/gid_attrs/types/0"), "IB/RoCE v1");
        for (file, text) in [
            ("state", "1: DOWN"),
            ("link_layer", "InfiniBand"),
            ("lid", "0x1f"),
            ("rate", "100 Gb/sec (4X EDR)"),
            ("gids/0", LINK_LOCAL),
            ("gid_attrs/types/0", "IB/RoCE v1"),
        ] {
            put(r, &format!("{dir}/ports/2/{file}"), text);
        }
        put(r, "devices/pci0000:3a/0000:3b:00.0/numa_node", "1");
        symlink(
            r.join("devices/pci0000:3a/0000:3b:00.0"),
            r.join(dir).join("device"),
        )
        .unwrap();
        let d = Tree::at(r).device("mlx5_0").unwrap();
        assert_eq!(d.pci.as_deref(), Some("0000:3b:00.0"));
        assert_eq!(d.numa_node, Some(1));
        assert_eq!(d.ports[0].gids[0].kind, GidKind::RoceV1);
        assert_eq!(d.ports[0].gids[1].kind, GidKind::RoceV2);
        let p = &d.ports[1];
        assert_eq!((p.port, p.state, p.lid), (2, PortState::Down, 0x1f));
        assert_eq!(p.link_layer, LinkLayer::InfiniBand);
        assert_eq!(p.gids[0].kind, GidKind::InfiniBand);
        assert_eq!(p.speed_mbps, Some(100_000));
        assert_eq!(d.usable(p), Err(Unusable::PortDown));
    }

    #[test]
    fn iwarp_says_so() {
        let root = tempfile::tempdir().unwrap();
        rxe(root.path(), "siw0", "eth0", &[LINK_LOCAL]);
        put(root.path(), "class/infiniband/siw0/node_type", "4: RNIC");
        let d = Tree::at(root.path()).device("siw0").unwrap();
        assert_eq!(d.fabric(&d.ports[0]).to_string(), "iWARP");
        assert_eq!(d.usable(&d.ports[0]), Err(Unusable::NoGid));
        assert!(d.ports[0].gids.is_empty(), "its GIDs are no addresses");
        let tree = Tree {
            addresses: |name| match name {
                "eth0" => vec!["10.9.0.1".parse().unwrap(), "fd09::1".parse().unwrap()],
                _ => Vec::new(),
            },
            ..Tree::at(root.path())
        };
        let d = tree.device("siw0").unwrap();
        assert_eq!(d.usable(&d.ports[0]), Ok(()));
        let gids: Vec<_> = d.ports[0].gids.iter().map(|g| g.gid.ip()).collect();
        assert_eq!(gids[0], "10.9.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(gids.len(), 2);
        // An adapter that has its interfaces in its directory.
        for file in ["parent", "ports/1/gid_attrs/ndevs/0"] {
            fs::remove_file(root.path().join("class/infiniband/siw0").join(file)).unwrap();
        }
        let net = "class/infiniband/siw0/device/net";
        put(root.path(), &format!("{net}/eth7/dev_port"), "1");
        put(root.path(), &format!("{net}/eth0/dev_port"), "0");
        let d = tree.device("siw0").unwrap();
        assert_eq!(d.ports[0].netdev.as_deref(), Some("eth0"));
    }

    #[test]
    fn nonsense_is_not_believed() {
        assert_eq!(rate("-1 Gb/sec"), None);
        assert_eq!(rate("NaN Gb/sec"), None);
        assert_eq!(rate(""), None);
        assert_eq!(state("4 ACTIVE"), PortState::Other);
        assert_eq!(transport(""), Transport::Other);
        assert_eq!(pci(Path::new("/sys/devices/virtio0")), None);
        assert_eq!(pci(Path::new("/sys/devices/beef")), None);
        assert_eq!(pci(Path::new("/")), None);
        assert_eq!(
            pci(Path::new("/sys/0000:3b:00.0")).as_deref(),
            Some("0000:3b:00.0")
        );
    }
}
