//! One node of the lab, on or off: its names and addresses, and what runs on it.

use super::guest::{Guest, Job, Running};
use super::machine::Machine;
use anyhow::{Context, Result};
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Family {
    V4,
    V6,
}

/// RDMA in software, by the name of its kind of device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Soft {
    /// RoCE v2: `rxe1` on the first rail.
    Rxe,
    /// iWARP: `siw1`.
    Siw,
}

impl Soft {
    fn kind(self) -> &'static str {
        match self {
            Soft::Rxe => "rxe",
            Soft::Siw => "siw",
        }
    }
}

pub struct Node {
    index: usize,
    agent: PathBuf,
    pub(super) boots: usize,
    pub(super) machine: Option<Machine>,
    /// Consoles and stories of earlier boots that nobody has asked for.
    past: (String, String),
    /// How much of the console was looked at for the kernel's complaints.
    seen: usize,
}

/// How a kernel begins to complain about itself.
const BUGS: &[&str] = &[
    "BUG: ",
    "Oops: ",
    "Kernel panic",
    "WARNING: CPU",
    "general protection",
];

impl Node {
    pub(super) fn new(index: usize, agent: &Path) -> Self {
        Node {
            index,
            agent: agent.to_path_buf(),
            boots: 0,
            machine: None,
            past: Default::default(),
            seen: 0,
        }
    }

    /// Its host name: `lab1` and on.
    pub fn name(&self) -> String {
        format!("lab{}", self.index + 1)
    }

    /// Its address on a wire: 0 is eth0, 1 is the first rail.
    pub fn address(&self, wire: usize, family: Family) -> IpAddr {
        let (w, n) = (wire as u8, self.index as u8 + 1);
        match family {
            Family::V4 => Ipv4Addr::new(10, 9, w, n).into(),
            Family::V6 => Ipv6Addr::new(0xfd09, 0, 0, w.into(), 0, 0, 0, n.into()).into(),
        }
    }

    /// An address for a network namespace of it, in the subnet of the first rail.
    pub fn pod(&self) -> IpAddr {
        Ipv4Addr::new(10, 9, 1, self.index as u8 + 101).into()
    }

    /// Its IPv4 address on eth0.
    pub fn host(&self) -> String {
        self.address(0, Family::V4).to_string()
    }

    /// Its agent, which can be kept and used while the lab is changed.
    pub fn guest(&self) -> Result<Guest> {
        let m = self.machine.as_ref();
        m.map(|m| m.guest.clone())
            .with_context(|| format!("{} is off", self.name()))
    }

    /// The program that is its agent.
    pub fn agent(&self) -> &Path {
        &self.agent
    }

    /// A script to run on it, for bash with `-eu -o pipefail`.
    pub fn sh(&self, script: impl Into<String>) -> Result<Job> {
        Ok(self.guest()?.sh(script))
    }

    /// Runs a script to its end, which must be success; what it printed.
    pub fn check(&self, script: impl Into<String>) -> Result<String> {
        self.sh(script)?.check()
    }

    pub fn spawn(&self, script: impl Into<String>) -> Result<Running> {
        self.sh(script)?.spawn()
    }

    /// Index of the RoCEv2 GID of its address on a rail. Found, as it must be: nobody promises it.
    pub fn gid_index(&self, rail: usize, family: Family) -> Result<u32> {
        let wanted = match self.address(rail, family) {
            IpAddr::V4(a) => a.to_ipv6_mapped(),
            IpAddr::V6(a) => a,
        };
        let gids = self.gids(rail)?;
        gids.iter()
            .find(|(_, gid, kind)| *gid == wanted && kind == "RoCE v2")
            .map(|g| g.0)
            .with_context(|| format!("{}: no {wanted} among {gids:?}", self.name()))
    }

    /// The GIDs of a rail's device: index, GID, type.
    pub fn gids(&self, rail: usize) -> Result<Vec<(u32, Ipv6Addr, String)>> {
        // Only what the shell itself can do: a process for each of a thousand entries takes long.
        let text = self.check(format!(
            "cd /sys/class/infiniband/rxe{rail}/ports/1
             for f in gids/*; do
               read -r gid <$f
               [ $gid != 0000:0000:0000:0000:0000:0000:0000:0000 ] || continue
               read -r kind <gid_attrs/types/${{f#gids/}}
               echo ${{f#gids/}} $gid $kind
             done"
        ))?;
        text.lines()
            .map(|l| {
                let mut w = l.splitn(3, ' ');
                let mut next = || w.next().context("short line");
                Ok((next()?.parse()?, next()?.parse()?, next()?.to_string()))
            })
            .collect()
    }

    /// A counter of a rail's device, such as `sent_pkts` or `rcvd_pkts`.
    pub fn counter(&self, rail: usize, name: &str) -> Result<u64> {
        self.number(&format!(
            "/sys/class/infiniband/rxe{rail}/ports/1/hw_counters/{name}"
        ))
    }

    /// A counter of a wire's NIC, such as `rx_packets` or `tx_bytes`.
    pub fn nic_counter(&self, wire: usize, name: &str) -> Result<u64> {
        self.number(&format!("/sys/class/net/eth{wire}/statistics/{name}"))
    }

    fn number(&self, file: &str) -> Result<u64> {
        let text = self.guest()?.read(file)?;
        Ok(String::from_utf8_lossy(&text).trim().parse()?)
    }

    pub(super) fn on(&mut self) -> Result<&mut Machine> {
        let name = self.name();
        self.machine
            .as_mut()
            .with_context(|| format!("{name} is off"))
    }

    pub(super) fn is_on(&mut self) -> bool {
        let on = self.machine.as_mut().is_some_and(Machine::is_on);
        if !on {
            self.off(); // it may have ended by itself
        }
        on
    }

    pub(super) fn off(&mut self) {
        if let Some(m) = self.machine.take() {
            self.past.0 += &m.console();
            self.past.1 += &m.guest.story();
        }
    }

    /// A complaint of the kernel since this was asked last.
    pub(super) fn complaint(&mut self) -> Option<String> {
        let console = self.console();
        let new = console.get(self.seen..).unwrap_or_default();
        let line = new.lines().find(|l| BUGS.iter().any(|b| l.contains(b)));
        let line = line.map(|l| format!("{}: {l}", self.name()));
        self.seen = console.len();
        line
    }

    fn console(&self) -> String {
        let now = self.machine.as_ref().map(Machine::console);
        self.past.0.clone() + &now.unwrap_or_default()
    }

    /// All that the console showed, and what ran since this was asked last.
    pub(super) fn evidence(&mut self) -> (String, String) {
        let now = self.machine.as_ref().map(|m| m.guest.story());
        let story = std::mem::take(&mut self.past.1) + &now.unwrap_or_default();
        (self.console(), story)
    }

    /// Addresses and devices.
    pub(super) fn set_up(&self, rails: usize, rail_mtu: u32) -> Result<Running> {
        let mut script = String::new();
        for w in 0..=rails {
            let mtu = if w == 0 { 1500 } else { rail_mtu };
            let (v4, v6) = (self.address(w, Family::V4), self.address(w, Family::V6));
            let _ = write!(
                script,
                // Without duplicate address detection, which makes addresses useless for seconds.
                "echo 0 >/proc/sys/net/ipv6/conf/eth{w}/accept_dad
                 ip addr add {v4}/24 dev eth{w}
                 ip addr add {v6}/64 dev eth{w} nodad
                 ip link set eth{w} mtu {mtu} up\n"
            );
            if w > 0 {
                script += &devices(w, &[Soft::Rxe]);
            }
        }
        self.spawn(script)
    }

    /// Gives a rail these devices and no others.
    pub(super) fn set_devices(&self, rail: usize, wanted: &[Soft]) -> Result<()> {
        self.check(devices(rail, wanted)).map(|_| ())
    }
}

/// A script that gives a rail these devices and no others.
fn devices(rail: usize, wanted: &[Soft]) -> String {
    let (keep, rest): (Vec<_>, Vec<_>) = [Soft::Rxe, Soft::Siw]
        .into_iter()
        .partition(|s| wanted.contains(s));
    let mut script = String::new();
    for kind in rest.into_iter().map(Soft::kind) {
        let _ = write!(
            script,
            "if [ -e /sys/class/infiniband/{kind}{rail} ]; then
               rdma link delete {kind}{rail}
             fi\n"
        );
    }
    for soft in keep {
        let kind = soft.kind();
        // The kernel loads modules by itself, but does not say which it missed.
        let load = match soft {
            Soft::Rxe => ":",
            Soft::Siw => "modprobe siw",
        };
        let _ = write!(
            script,
            "if [ ! -e /sys/class/infiniband/{kind}{rail} ]; then
               {load}
               rdma link add {kind}{rail} type {kind} netdev eth{rail}
             fi\n"
        );
    }
    script
}
