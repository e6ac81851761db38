//! Choosing the GID of ours from which to reach a given peer.

use super::{Fabric, SysDevice};
use crate::verbs::{Gid, GidKind, PortState};
use std::net::IpAddr;

/// A GID that could be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Name of the device.
    pub device: String,
    /// From 1.
    pub port: u8,
    /// Valid until the table changes; to be looked up again for each connection.
    pub index: u32,
    /// The GID itself.
    pub gid: Gid,
}

/// The GID from which to reach `peer`, on any active port of these devices.
///
/// On RoCE and iWARP, `peer` is the address that the peer's GID represents, and ours must be of the same kind: IPv4,
/// link-local or other IPv6. If `local` is given, only that address is accepted. Otherwise the address wins that has
/// the most leading bits in common with the peer's, which on a rail with its own subnet is the rail's own; among
/// equals the first. On InfiniBand both GIDs need the same subnet prefix.
pub fn best_gid<'a>(
    devices: impl IntoIterator<Item = &'a SysDevice>,
    local: Option<IpAddr>,
    peer: Gid,
) -> Option<Candidate> {
    let mut best: Option<(u32, Candidate)> = None;
    for d in devices {
        for p in d.ports.iter().filter(|p| p.state == PortState::Active) {
            for g in &p.gids {
                let fits = match (d.fabric(p), g.kind) {
                    (Fabric::Roce, GidKind::RoceV2) | (Fabric::Iwarp, GidKind::Address) => {
                        kind(&g.gid) == kind(&peer)
                    }
                    (Fabric::InfiniBand, GidKind::InfiniBand) => g.gid.0[..8] == peer.0[..8],
                    _ => false,
                };
                if !fits || local.is_some_and(|l| g.gid.ip() != l.to_canonical()) {
                    continue;
                }
                let common = common_bits(&g.gid, &peer);
                if best.as_ref().is_none_or(|(most, _)| common > *most) {
                    let candidate = Candidate {
                        device: d.id.name.clone(),
                        port: p.port,
                        index: g.index,
                        gid: g.gid,
                    };
                    best = Some((common, candidate));
                }
            }
        }
    }
    best.map(|(_, c)| c)
}

#[derive(PartialEq, Eq)]
enum Kind {
    V4,
    LinkLocal,
    V6,
}

fn kind(gid: &Gid) -> Kind {
    match gid.ip() {
        IpAddr::V4(_) => Kind::V4,
        IpAddr::V6(ip) if ip.is_unicast_link_local() => Kind::LinkLocal,
        IpAddr::V6(_) => Kind::V6,
    }
}

fn common_bits(a: &Gid, b: &Gid) -> u32 {
    (u128::from_be_bytes(a.0) ^ u128::from_be_bytes(b.0)).leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::sysfs::tests::{put, rxe};
    use crate::devices::Tree;

    fn full(ip: &str) -> String {
        Gid::from(ip.parse::<IpAddr>().unwrap()).to_string()
    }

    fn rails() -> (tempfile::TempDir, Vec<SysDevice>) {
        let root = tempfile::tempdir().unwrap();
        for (name, dev, ips) in [
            ("rxe1", "eth1", ["fe80::1", "10.1.0.1", "fd00:1::1"]),
            ("rxe2", "eth2", ["fe80::2", "10.2.0.1", "fd00:2::1"]),
        ] {
            let ips = ips.map(full);
            rxe(root.path(), name, dev, &[&ips[0], &ips[1], &ips[2]]);
        }
        let devices = Tree::at(root.path()).scan();
        (root, devices)
    }

    fn pick(devices: &[SysDevice], local: Option<&str>, peer: &str) -> Option<(String, u32)> {
        let local = local.map(|l| l.parse().unwrap());
        let peer = Gid::from(peer.parse::<IpAddr>().unwrap());
        best_gid(devices, local, peer).map(|c| (c.device, c.index))
    }

    #[test]
    fn the_rail_of_the_peer() {
        let (_root, d) = rails();
        assert_eq!(pick(&d, None, "10.2.0.2"), Some(("rxe2".into(), 1)));
        assert_eq!(pick(&d, None, "10.1.0.2"), Some(("rxe1".into(), 1)));
        assert_eq!(pick(&d, None, "fd00:2::9"), Some(("rxe2".into(), 2)));
        // Never an address of another kind.
        assert_eq!(pick(&d, None, "fe80::9"), Some(("rxe1".into(), 0)));
        assert_eq!(pick(&d[..0], None, "10.1.0.2"), None);
    }

    #[test]
    fn a_given_address_is_kept() {
        let (_root, d) = rails();
        let at = |l| pick(&d, Some(l), "10.2.0.2");
        assert_eq!(at("10.1.0.1"), Some(("rxe1".into(), 1)));
        assert_eq!(at("::ffff:10.1.0.1"), Some(("rxe1".into(), 1)));
        assert_eq!(at("10.9.0.1"), None);
        assert_eq!(at("fd00:1::1"), None);
    }

    #[test]
    fn only_active_ports_and_routable_types() {
        let (root, _) = rails();
        let r = root.path();
        put(r, "class/infiniband/rxe2/ports/1/state", "1: DOWN");
        let d = Tree::at(r).scan();
        assert_eq!(pick(&d, None, "10.2.0.2"), Some(("rxe1".into(), 1)));
        let types = "class/infiniband/rxe1/ports/1/gid_attrs/types/1";
        put(r, types, "IB/RoCE v1");
        let d = Tree::at(r).scan();
        assert_eq!(pick(&d, None, "10.2.0.2"), None);
    }

    #[test]
    fn infiniband_by_subnet() {
        let (root, _) = rails();
        let r = root.path();
        let port = "class/infiniband/rxe1/ports/1";
        put(r, &format!("{port}/link_layer"), "InfiniBand");
        put(r, &format!("{port}/gid_attrs/types/0"), "IB/RoCE v1");
        let d = Tree::at(r).scan();
        let rxe1 = &d[..1];
        assert_eq!(pick(rxe1, None, "fe80::9"), Some(("rxe1".into(), 0)));
        assert_eq!(pick(rxe1, None, "fec0::9"), None);
    }
}
