//! The lab: virtual machines with wires between them, each machine one node of a cluster with a
//! TCP network and two RDMA rails, all inside one host that has neither KVM nor RDMA hardware.
//!
//! Each machine is a qemu with Debian's kernel, and its root is the host's file system under a layer of
//! memory (`tests/lab/guest/init.sh`): whatever was just built runs in it under the same path, and
//! whatever it writes is gone with it. Its `eth0` is for TCP and control; `eth1` and on are the
//! rails, with the soft-RoCE devices `rxe1` and on, or iWARP's `siw1`. Programs are started through an agent
//! (`agent`, `guest`), not through a network, so that wires can be cut.
//!
//! Everything ends when the [`Lab`] is dropped or the thread that booted it ends. Nothing here
//! may touch the host's network or need privileges.

pub mod agent;
pub mod cluster;
pub mod daemon;
mod guest;
mod hub;
mod initramfs;
mod kernel;
mod machine;
mod monitor;
mod node;
pub mod stream;
pub mod streams;
mod talk;
mod wire;

pub use guest::{Guest, Job, Output, Running};
pub use initramfs::quoted;
pub use node::{Family, Node, Soft};
pub use talk::End;
pub use wire::Wire;

use anyhow::{ensure, Context, Result};
use kernel::Kernel;
use machine::{Machine, QEMU};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Longest that anything which should happen soon may take in machines that are emulated, several
/// on few processors. Generous: it only ends a broken run.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// File name of the machines' first file system.
const IMAGE: &str = "initramfs";

/// What machines there are to be.
pub struct Spec {
    pub nodes: usize,
    pub rails: usize,
    /// Processors and memory of each machine.
    pub cpus: u32,
    pub memory_mib: u32,
    /// MTU of the rails. RDMA's own is the next smaller one of 1024, 2048 and 4096.
    pub rail_mtu: u32,
    /// A process whose network the machines reach through one more interface, behind the rails: it is there as
    /// `10.0.2.2` and with its own addresses.
    pub outside: Option<u32>,
    /// The built `lab-agent`.
    pub agent: PathBuf,
}

impl Spec {
    /// Two machines with two rails, one processor and 1 GiB each.
    pub fn pair(agent: &str) -> Self {
        Spec {
            nodes: 2,
            rails: 2,
            cpus: 1,
            memory_mib: 1024,
            rail_mtu: 1500,
            outside: None,
            agent: agent.into(),
        }
    }
}

/// Running machines.
pub struct Lab {
    // In this order: machines end before the directory with their sockets goes.
    nodes: Vec<Node>,
    wires: Vec<Wire>,
    spec: Spec,
    kernel: Kernel,
    /// Node and rail whose devices are not what they were at boot.
    changed: Vec<(usize, usize)>,
    dir: TempDir,
}

impl Lab {
    /// What this host lacks for a lab, if anything.
    pub fn lacks() -> Option<String> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        if !std::env::split_paths(&path).any(|d| d.join(QEMU).exists()) {
            return Some(format!("no {QEMU}"));
        }
        if !Path::new(initramfs::BUSYBOX).exists() {
            return Some(format!("no {}", initramfs::BUSYBOX));
        }
        Kernel::find().err().map(|e| format!("{e:#}"))
    }

    /// Boots all machines and gives them addresses and devices. They end with the calling thread.
    pub fn boot(spec: Spec) -> Result<Self> {
        ensure!(spec.nodes >= 2, "a lab has two machines or more");
        let kernel = Kernel::find()?;
        // Not where TMPDIR says: the addresses of Unix sockets are short.
        let dir = tempfile::Builder::new()
            .prefix("uplab-")
            .tempdir_in("/tmp")?;
        let image = initramfs::image(&kernel, &spec.agent)?;
        std::fs::write(dir.path().join(IMAGE), image)?;
        let wires: Result<Vec<Wire>> = (0..=spec.rails)
            .map(|w| Wire::new(dir.path(), w, spec.nodes))
            .collect();
        let mut lab = Lab {
            nodes: (0..spec.nodes).map(|n| Node::new(n, &spec.agent)).collect(),
            wires: wires?,
            spec,
            kernel,
            changed: Vec::new(),
            dir,
        };
        let all: Vec<usize> = (0..lab.nodes.len()).collect();
        match lab.start(&all) {
            Ok(()) => Ok(lab),
            Err(e) => Err(e.context(lab.evidence())),
        }
    }

    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Per machine; they count from 1.
    pub fn rails(&self) -> usize {
        self.spec.rails
    }

    /// By number, from 0.
    pub fn node(&self, n: usize) -> &Node {
        &self.nodes[n]
    }

    /// The wire of TCP and control.
    pub fn control(&mut self) -> &mut Wire {
        &mut self.wires[0]
    }

    /// By number, from 1, as in the devices' names.
    pub fn rail(&mut self, n: usize) -> &mut Wire {
        assert!(n > 0, "rails count from 1");
        &mut self.wires[n]
    }

    /// Takes a machine's NIC off its wire (0: eth0) or puts it back: the machine sees its carrier
    /// go and come, and its RDMA port with it.
    pub fn set_carrier(&mut self, node: usize, wire: usize, on: bool) -> Result<()> {
        self.nodes[node].on()?.set_carrier(wire, on)
    }

    /// Gives a machine's rail these devices, and no others: a soft-RoCE one is what it has at boot.
    pub fn set_devices(&mut self, node: usize, rail: usize, wanted: &[Soft]) -> Result<()> {
        self.changed.push((node, rail));
        self.nodes[node].set_devices(rail, wanted)
    }

    /// Pulls the plug of a machine: it is gone in the middle of whatever it does.
    pub fn kill(&mut self, node: usize) {
        self.nodes[node].off();
    }

    /// Boots machines that are off.
    pub fn start(&mut self, which: &[usize]) -> Result<()> {
        for &n in which {
            ensure!(!self.nodes[n].is_on(), "{} is on", self.nodes[n].name());
            let boots = self.nodes[n].boots + 1;
            let dir = self.dir.path();
            let m = Machine::start(&self.spec, &self.kernel, dir, &self.wires, n, boots)?;
            self.nodes[n].boots = boots;
            self.nodes[n].machine = Some(m);
        }
        for &n in which {
            self.nodes[n].on()?.booted()?;
            for w in &mut self.wires {
                w.replugged(n)?;
            }
        }
        let setups: Result<Vec<Running>> = which
            .iter()
            .map(|&n| self.nodes[n].set_up(self.spec.rails, self.spec.rail_mtu))
            .collect();
        for s in setups? {
            s.wait()?.ok()?;
        }
        Ok(())
    }

    /// Brings back what a test may have left otherwise: wires whole, carriers on, machines on, devices
    /// as at boot.
    pub fn restore(&mut self) -> Result<()> {
        for w in 0..self.wires.len() {
            self.wires[w].mend()?;
            for n in 0..self.nodes.len() {
                if self.nodes[n].is_on() {
                    self.set_carrier(n, w, true)?;
                }
            }
        }
        for (n, rail) in std::mem::take(&mut self.changed) {
            if self.nodes[n].is_on() {
                self.nodes[n].set_devices(rail, &[Soft::Rxe])?;
            }
        }
        let off: Vec<usize> = (0..self.nodes.len())
            .filter(|&n| !self.nodes[n].is_on())
            .collect();
        self.start(&off).context("booting again what is off")
    }

    /// The consoles of all machines, and what ran in them since this was asked last.
    pub fn evidence(&mut self) -> String {
        let mut text = String::new();
        for n in &mut self.nodes {
            let (console, story) = n.evidence();
            let name = n.name();
            let _ = write!(
                text,
                "---- console of {name}\n{console}---- what ran in {name}\n{story}"
            );
        }
        text
    }

    /// Did a kernel complain about itself since this was asked last? Its words, if so.
    pub fn complaint(&mut self) -> Option<String> {
        self.nodes.iter_mut().find_map(Node::complaint)
    }
}
