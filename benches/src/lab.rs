//! `make bench-lab`: one program over every way that bytes can go between two machines with RDMA,
//! in one and the same pair of virtual machines (see docs/lab.md).
//!
//! No figure is taken over a connection whose kind was not looked up: a layer that quietly fell
//! back to TCP would be measured as TCP.

pub mod cross;
pub mod nodes;
pub mod table;

use crate::load::calls::Layer;
use crate::load::client::{Case, Figures};
use crate::load::smc::Shown;
use anyhow::{bail, ensure, Context, Result};
use clap::ValueEnum;
use lane::proto::reason::Reason;
use nix::sys::signal::Signal;
use nodes::Nodes;
use serde::Serialize;
use std::fmt::Write;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use underpass_admin::Row;
use underpass_tests::harness::paths;
use underpass_tests::lab::{quoted, Family, Lab, Running, Spec};

/// The way that bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    Tcp,
    Rsockets,
    Smc,
    /// Shim and daemons, which do not know each other.
    Fallback,
    Underpass,
    /// rsockets once more, through its own preload library.
    Preload,
}

/// Those that are measured in each round.
pub const WAYS: [Way; 5] = [
    Way::Tcp,
    Way::Rsockets,
    Way::Smc,
    Way::Fallback,
    Way::Underpass,
];
pub const CASES: [Case; 3] = [Case::RoundTrip, Case::Bulk, Case::Many];

/// Connections of `Case::Many`.
pub const MANY: usize = 32;

const PRELOAD: &str = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so";
/// Longest that a program of a run may take, its warm-up included.
const LIMIT: Duration = Duration::from_secs(60);
/// Longest that connections may take to be promoted while they are used.
const PROMOTION: Duration = Duration::from_secs(20);

impl Way {
    pub fn name(self) -> &'static str {
        match self {
            Way::Tcp => "kernel TCP",
            Way::Rsockets => "rsockets",
            Way::Smc => "kernel SMC-R v2",
            Way::Fallback => "Underpass, on TCP",
            Way::Underpass => "Underpass",
            Way::Preload => "librspreload",
        }
    }

    fn layer(self) -> Layer {
        match self {
            Way::Rsockets => Layer::Rsocket,
            Way::Smc => Layer::Smc,
            Way::Tcp | Way::Fallback | Way::Underpass | Way::Preload => Layer::Tcp,
        }
    }

    /// Does it use RDMA devices?
    fn rdma(self) -> bool {
        !matches!(self, Way::Tcp | Way::Fallback)
    }

    /// The wires of the addresses that connections are made to, in turn. rsockets take the device
    /// of the address, and SMC-R v2 wants one in the address's own subnet. Everything else connects
    /// by the network of TCP; Underpass finds the devices by itself.
    fn wires(self) -> &'static [usize] {
        match self {
            Way::Rsockets | Way::Preload | Way::Smc => &[1, 2],
            Way::Tcp | Way::Fallback | Way::Underpass => &[0],
        }
    }

    /// Connections that one process serves. The rsockets of librdmacm 44 hang when a process accepts
    /// more than three: the thread that watches over them goes on using memory that was freed when
    /// the fourth made it grow.
    fn per_process(self) -> usize {
        match self {
            Way::Rsockets | Way::Preload => 3,
            _ => usize::MAX,
        }
    }
}

fn connections(case: Case) -> usize {
    if case == Case::Many {
        MANY
    } else {
        1
    }
}

/// What came of a run.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// And what to know about them, if anything.
    Figures(Figures, Option<String>),
    /// It ran, over something else than it should have.
    Other(String),
}

pub struct Bench {
    lab: Lab,
    config: TempDir,
    port: u16,
    seconds: f64,
    /// What kernels said when they died.
    pub crashes: Vec<String>,
}

impl Bench {
    /// Boots the machines and prepares them for every way.
    pub fn boot(seconds: f64) -> Result<Self> {
        // Before the machines look into the directory.
        let config = nodes::configured()?;
        let agent = paths::helper("lab-agent");
        let bench = Bench {
            lab: Lab::boot(Spec::pair(&agent.to_string_lossy()))?,
            config,
            port: 20_000,
            seconds,
            crashes: Vec::new(),
        };
        for n in 0..bench.lab.nodes() {
            bench.prepare(n)?;
        }
        Ok(bench)
    }

    fn prepare(&self, node: usize) -> Result<()> {
        let load = load();
        self.lab.node(node).check(format!(
            "modprobe smc; modprobe smc_diag
             {load} smc prepare --netdev eth1 --netdev eth2 --device rxe1 --device rxe2"
        ))?;
        Ok(())
    }

    /// Boots again what has crashed.
    fn restore(&mut self) -> Result<()> {
        for n in 0..self.lab.nodes() {
            if self.lab.node(n).check("true").is_err() {
                let why = self.lab.complaint();
                self.crashes
                    .push(why.unwrap_or_else(|| "a machine was gone".into()));
                self.lab.kill(n);
                self.lab.start(&[n])?;
                self.prepare(n)?;
            }
        }
        Ok(())
    }

    /// The daemons of a way, if it has any. They run only while they are needed.
    pub fn nodes(&self, way: Way) -> Result<Option<Nodes>> {
        match way {
            Way::Fallback => Nodes::unpaired(&self.lab).map(Some),
            Way::Underpass => Nodes::peers(&self.lab, self.config.path()).map(Some),
            _ => Ok(None),
        }
    }

    /// Consoles and commands, for a run that failed.
    pub fn evidence(&mut self) -> String {
        self.lab.evidence()
    }

    /// One run.
    pub fn run(&mut self, way: Way, case: Case, nodes: Option<&Nodes>) -> Result<Outcome> {
        self.restore()?;
        let (n, seconds) = (connections(case), self.seconds);
        let each = way.per_process().min(n);
        let processes = n.div_ceil(each);
        // Ports of its own: nothing that is left of an earlier run can be mistaken for this one.
        let port = self.port;
        self.port += processes as u16;
        let (layer, case) = (word(way.layer()), word(case));
        let (serve, mut script) = (program(way, nodes, 0), String::from("pids=\n"));
        for p in 0..processes {
            let (port, n) = (usize::from(port) + p, each.min(n - p * each));
            let _ = writeln!(script, "{serve} serve {layer} {port} {n} & pids+=\" $!\"");
        }
        let server = self.start(0, format!("{script}for p in $pids; do wait $p; done"))?;
        server.until("the servers listen", LIMIT, || {
            server.stdout().lines().count() == processes
        })?;
        let to: Vec<String> = (0..n)
            .map(|i| {
                let wires = way.wires();
                let address = self.lab.node(0).address(wires[i % wires.len()], Family::V4);
                format!("{address}:{}", usize::from(port) + i / each)
            })
            .collect();
        let (measure, to) = (program(way, nodes, 1), to.join(" "));
        let client = self.start(
            1,
            format!("exec {measure} measure {layer} {case} {seconds} {to}"),
        )?;
        client.line("warm")?;
        let look = |patience| match way {
            Way::Smc => self.smc(port, n),
            Way::Fallback => look_up(nodes, port, n, "TCP", patience),
            Way::Underpass => look_up(nodes, port, n, "SMCR", patience),
            Way::Tcp | Way::Rsockets | Way::Preload => Ok(Kind::default()),
        };
        let mut before = look(PROMOTION)?;
        if let Some(other) = before.other.take() {
            return Ok(Outcome::Other(other));
        }
        client.signal(Signal::SIGUSR1)?;
        let result = client.line("result ")?;
        let after = look(Duration::ZERO)?;
        client.signal(Signal::SIGUSR1)?;
        client.wait()?.ok()?;
        server.wait()?.ok()?;
        if let Some(other) = after.other {
            return Ok(Outcome::Other(format!("at the end {other}")));
        }
        outcome(way, serde_json::from_str(&result)?, before, &after)
    }

    /// Starts a program of a run.
    fn start(&self, node: usize, script: String) -> Result<Running> {
        self.lab.node(node).sh(script)?.limit(LIMIT).spawn()
    }

    /// What the kernels say of their SMC sockets.
    fn smc(&self, port: u16, n: usize) -> Result<Kind> {
        for node in 0..2 {
            let said = self.lab.node(node).check(format!("{} smc show", load()))?;
            let shown: Shown = serde_json::from_str(&said)?;
            let conns: Vec<_> = shown
                .conns
                .iter()
                .filter(|c| [c.local_port, c.peer_port].contains(&port))
                .collect();
            if conns.len() != n {
                bail!("{n} connections, and smc_diag knows {said}");
            }
            let mut why: Vec<u32> = conns.iter().map(|c| c.fallback).collect();
            why.dedup();
            if conns.iter().any(|c| !c.smcr) {
                return Ok(Kind::other(format!("fallback by {}: {why:#x?}", node + 1)));
            }
            if shown.versions.is_empty() || shown.versions.iter().any(|v| *v < 2) {
                return Ok(Kind::other(format!("versions {:?}", shown.versions)));
            }
        }
        Ok(Kind::default())
    }
}

/// The measuring program with the environment of a way, which is for this program alone: bash does not survive
/// librspreload.
fn program(way: Way, nodes: Option<&Nodes>, node: usize) -> String {
    let env = match (way, nodes) {
        (Way::Preload, _) => vec![("LD_PRELOAD".into(), PRELOAD.into())],
        (_, Some(nodes)) => nodes.env(node),
        (_, None) => Vec::new(),
    };
    let mut words = String::from("env");
    for (key, value) in env {
        let _ = write!(words, " {key}={}", quoted(&value));
    }
    format!("{words} {}", load())
}

/// What a run was, by its figures and by what its connections were before and after it.
fn outcome(way: Way, f: Figures, before: Kind, after: &Kind) -> Result<Outcome> {
    // A few packets are sent at any time, to see whether links still live.
    let least = f.messages.max(f.bytes >> 16) / 20;
    ensure!(
        (f.rdma_packets > least) == way.rdma(),
        "{} packets were sent by RDMA devices, and that is not {}: {f:?}",
        f.rdma_packets,
        way.name()
    );
    let lane = after.lane.saturating_sub(before.lane);
    let tcp = after.tcp.saturating_sub(before.tcp);
    let mut note = before.note;
    if way == Way::Underpass && tcp > 0 {
        let share = 100.0 * lane as f64 / (lane + tcp) as f64;
        if share < 50.0 {
            return Ok(Outcome::Other(format!(
                "{share:.0} % of the bytes on lanes"
            )));
        }
        note = Some(format!("{share:.1} % of the bytes on lanes"));
    }
    Ok(Outcome::Figures(f, note))
}

/// What connections are.
#[derive(Default)]
struct Kind {
    /// What they are instead of what they should be.
    other: Option<String>,
    note: Option<String>,
    /// Bytes that the client's node has moved so far, both ways.
    lane: u64,
    tcp: u64,
}

impl Kind {
    fn other(what: String) -> Self {
        Kind {
            other: Some(what),
            ..Kind::default()
        }
    }
}

/// Waits until both ends of all connections are of this mode, and says what they are if they are
/// not.
fn look_up(
    nodes: Option<&Nodes>,
    port: u16,
    n: usize,
    mode: &str,
    patience: Duration,
) -> Result<Kind> {
    let nodes = nodes.context("no daemons")?;
    let end = Instant::now() + patience;
    loop {
        let kind = kind(&[nodes.rows(0, port)?, nodes.rows(1, port)?], n, mode);
        if kind.other.is_none() || Instant::now() >= end {
            return Ok(kind);
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// What the rows of the server's and the client's node say.
fn kind(rows: &[Vec<Row>; 2], n: usize, mode: &str) -> Kind {
    let is = |r: &Row| r.mode.split(' ').next() == Some(mode);
    let right = rows.iter().all(|r| r.len() == n && r.iter().all(is));
    let sum = |f: fn(&Row) -> u64| rows[1].iter().map(f).sum();
    Kind {
        other: (!right).then(|| described(rows, n)),
        note: rows.iter().flatten().map(reason).find(|r| !r.is_empty()),
        lane: sum(|r| r.lane_tx_bytes + r.lane_rx_bytes),
        tcp: sum(|r| r.tcp_tx_bytes + r.tcp_rx_bytes),
    }
}

fn reason(r: &Row) -> String {
    match Reason::from_code(r.reason) {
        Some(Reason::None) => String::new(),
        Some(known) => known.info().name.into(),
        None => format!("{:#x}", r.reason),
    }
}

/// Modes and reasons at both ends.
fn described(rows: &[Vec<Row>; 2], n: usize) -> String {
    let mut text = String::new();
    for (end, rows) in ["server", "client"].iter().zip(rows) {
        let mut kinds: Vec<String> = rows
            .iter()
            .map(|r| format!("{} {}", r.mode, reason(r)).trim().to_string())
            .collect();
        kinds.sort();
        kinds.dedup();
        let _ = write!(
            text,
            "{}{end} {} ({} of {n} known)",
            if text.is_empty() { "" } else { ", " },
            if kinds.is_empty() {
                "-".into()
            } else {
                kinds.join(" | ")
            },
            rows.len()
        );
    }
    text
}

/// The measuring program, for a shell.
fn load() -> String {
    quoted(&paths::helper("lab-load").to_string_lossy())
}

/// The word for it on a command line.
pub fn word(v: impl ValueEnum) -> String {
    v.to_possible_value()
        .map(|v| v.get_name().to_string())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(mode: &str, reason: Reason) -> Row {
        Row {
            mode: mode.into(),
            reason: reason.code(),
            lane_tx_bytes: 3,
            tcp_rx_bytes: 4,
            ..Row::default()
        }
    }

    #[test]
    fn a_mode_is_that_of_all_ends() {
        let up = || row("SMCR", Reason::None);
        let tcp = || row("TCP 0x03030002/0x00000000", Reason::NoDevice);
        let k = kind(&[vec![up(), up()], vec![up(), up()]], 2, "SMCR");
        assert!(k.other.is_none() && k.note.is_none());
        assert_eq!((k.lane, k.tcp), (6, 8));
        let k = kind(&[vec![tcp()], vec![tcp()]], 1, "TCP");
        assert!(k.other.is_none() && k.note.unwrap() == "no-rdma-device");
        for rows in [
            [vec![up(), up()], vec![up(), tcp()]],
            [vec![tcp(), up()], vec![up(), up()]],
            [vec![up()], vec![up(), up()]],
            [vec![], vec![]],
            [vec![row("SMCD", Reason::None)], vec![up(), up()]],
        ] {
            assert!(kind(&rows, 2, "SMCR").other.is_some(), "{rows:?}");
        }
        let k = kind(&[vec![tcp()], vec![]], 1, "SMCR");
        let said = "server TCP 0x03030002/0x00000000 no-rdma-device (1 of 1 known), client - (0 of 1 known)";
        assert_eq!(k.other.unwrap(), said);
    }
}
