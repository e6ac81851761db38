//! The wires between the machines, and how they are cut.
//!
//! A NIC of a machine is a Unix datagram socket that qemu binds to a path and sends from to
//! another path: with two machines to the other's socket, with more to a hub of ours that
//! passes frames on. A stream (`-netdev socket`) would be simpler and far too slow: its own delayed
//! acknowledgements add 44 ms to every RDMA round trip.
//!
//! A wire is cut by renaming the sockets of its NICs: whoever sends there finds nothing, and the
//! frame is lost, as on a real wire; nothing is in the way of frames while it is whole. Neither
//! machine is told. For a NIC that loses its carrier, see `Lab::unplug`.

use super::hub::Hub;
use anyhow::{Context, Result};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// One wire: number 0 is for TCP and control (eth0 everywhere), 1 and up are the rails.
pub struct Wire {
    dir: PathBuf,
    number: usize,
    nodes: usize,
    /// Machines that no frame reaches.
    deaf: HashSet<usize>,
    _hub: Option<Hub>,
}

impl Wire {
    pub(super) fn new(dir: &Path, number: usize, nodes: usize) -> Result<Self> {
        let mut w = Wire {
            dir: dir.to_path_buf(),
            number,
            nodes,
            deaf: HashSet::new(),
            _hub: None,
        };
        if nodes > 2 {
            let ports = (0..nodes)
                .map(|n| (w.hub_path(n), w.nic_path(n), mac(number, n)))
                .collect();
            w._hub = Some(Hub::start(ports)?);
        }
        Ok(w)
    }

    /// No frame arrives any more, anywhere.
    pub fn cut(&mut self) -> Result<()> {
        (0..self.nodes).try_for_each(|n| self.cut_to(n))
    }

    /// No frame arrives any more at this machine; what it sends arrives.
    pub fn cut_to(&mut self, node: usize) -> Result<()> {
        if self.deaf.insert(node) {
            self.rename(node)?;
        }
        Ok(())
    }

    /// Whole again.
    pub fn mend(&mut self) -> Result<()> {
        for n in std::mem::take(&mut self.deaf) {
            let path = self.nic_path(n);
            // A machine that is off has no socket; it gets a new one.
            if cut(&path).exists() {
                std::fs::rename(cut(&path), &path).with_context(|| path.display().to_string())?;
            }
        }
        Ok(())
    }

    /// Where qemu binds the socket of a machine's NIC.
    pub(super) fn nic_path(&self, node: usize) -> PathBuf {
        self.dir.join(format!("wire{}-nic{node}", self.number))
    }

    /// Where it sends to.
    pub(super) fn remote_path(&self, node: usize) -> PathBuf {
        if self.nodes == 2 {
            self.nic_path(1 - node)
        } else {
            self.hub_path(node)
        }
    }

    fn hub_path(&self, node: usize) -> PathBuf {
        self.dir.join(format!("wire{}-hub{node}", self.number))
    }

    /// A machine that was off has bound its socket anew: a wire that was cut stays so.
    pub(super) fn replugged(&mut self, node: usize) -> Result<()> {
        if self.deaf.contains(&node) {
            self.rename(node)?;
        }
        Ok(())
    }

    fn rename(&self, node: usize) -> Result<()> {
        let path = self.nic_path(node);
        if path.exists() {
            std::fs::rename(&path, cut(&path)).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }
}

fn cut(path: &Path) -> PathBuf {
    path.with_extension("cut")
}

/// The hardware address of a machine's NIC.
pub(super) fn mac(wire: usize, node: usize) -> [u8; 6] {
    [0x52, 0x54, 0, 0x4c, wire as u8, node as u8 + 1]
}
