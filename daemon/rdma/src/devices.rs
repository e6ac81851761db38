//! The RDMA devices of this machine, as the kernel shows them in sysfs.
//!
//! Finding devices, watching them and choosing addresses needs no library and opens no device, so it works
//! everywhere; it is what `underpass devices` shows. Software devices and their GIDs come and go, and on shared
//! devices a GID's index grows with every container, so nothing is configured by index: a GID is chosen by type and
//! address.

mod choose;
mod counters;
mod sysfs;
mod watch;

pub use choose::{best_gid, Candidate};
pub use counters::{PortCounters, NAMED};
pub use sysfs::{SysDevice, SysPort, Tree};
pub use watch::{Change, Watch};

use crate::verbs::{GidKind, LinkLayer, PortState, Transport};
use std::fmt;

/// The transport of a device's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fabric {
    /// InfiniBand's transport over Ethernet.
    Roce,
    /// InfiniBand's transport over its own wires.
    InfiniBand,
    /// RDMA over TCP (RFC 5040).
    Iwarp,
    /// Anything else, which carries no lanes.
    Other,
}

impl Fabric {
    fn of(transport: Transport, link_layer: LinkLayer) -> Self {
        match (transport, link_layer) {
            (Transport::InfiniBand, LinkLayer::Ethernet) => Fabric::Roce,
            (Transport::InfiniBand, LinkLayer::InfiniBand) => Fabric::InfiniBand,
            (Transport::Iwarp, _) => Fabric::Iwarp,
            _ => Fabric::Other,
        }
    }
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Fabric::Roce => "RoCE",
            Fabric::InfiniBand => "InfiniBand",
            Fabric::Iwarp => "iWARP",
            Fabric::Other => "other",
        })
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PortState::Down => "down",
            PortState::Init => "init",
            PortState::Armed => "armed",
            PortState::Active => "active",
            PortState::Other => "unknown",
        })
    }
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            GidKind::InfiniBand => "IB",
            GidKind::RoceV1 => "RoCE v1",
            GidKind::RoceV2 => "RoCE v2",
            GidKind::Address => "IP",
            GidKind::Other => "other",
        })
    }
}

/// Why a port carries no lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// Its state is not [`PortState::Active`].
    #[error("port-down")]
    PortDown,
    /// It has no GIDs yet, or only RoCE v1's, which no router forwards. With iWARP: its interface has no address, or
    /// is not known.
    #[error("no-gid")]
    NoGid,
    /// The device is being removed, or the kernel's `ib_uverbs` is not loaded.
    #[error("no-uverbs")]
    NoVerbs,
    /// It is neither RoCE, nor InfiniBand, nor iWARP.
    #[error("unknown-transport")]
    Transport,
}

impl SysDevice {
    /// The transport of this port of the device.
    pub fn fabric(&self, port: &SysPort) -> Fabric {
        Fabric::of(self.transport, port.link_layer)
    }

    /// Could this port of the device carry lanes now, and if not, why?
    pub fn usable(&self, port: &SysPort) -> Result<(), Unusable> {
        let wanted = match self.fabric(port) {
            Fabric::Roce => GidKind::RoceV2,
            Fabric::InfiniBand => GidKind::InfiniBand,
            Fabric::Iwarp => GidKind::Address,
            Fabric::Other => return Err(Unusable::Transport),
        };
        if self.verbs.is_none() {
            Err(Unusable::NoVerbs)
        } else if port.state != PortState::Active {
            Err(Unusable::PortDown)
        } else if !port.gids.iter().any(|g| g.kind == wanted) {
            Err(Unusable::NoGid)
        } else {
            Ok(())
        }
    }
}
