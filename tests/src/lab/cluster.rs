//! Nodes of the lab as a cluster: a daemon on each that knows the others, with certificates of one
//! CA; what tells that connections between nodes run over RDMA, and that nothing is left of them.

use super::daemon::Daemon;
use super::node::Node;
use super::{quoted, Family, Lab, PATIENCE};
use crate::harness::paths::{self, Build};
use crate::harness::{until, Place, Program};
use anyhow::{ensure, Context, Result};
use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tempfile::TempDir;
use underpass_admin::{PeerState, Request, Response, Row};

/// Where daemons listen for each other.
pub const PORT: u16 = 7471;

const LIMIT: Duration = Duration::from_secs(20);

/// What programs left behind may wait for a peer that takes nothing: 100 s taken over by a daemon, about
/// as long as in the kernel.
const ORPHANS: Duration = Duration::from_secs(150);

/// Daemons by node. Dropping it kills them; if connections were reset and none was to be, that is a [`complaint`].
pub struct Cluster {
    members: Vec<Member>,
    certs: TempDir,
    /// Connections that shims have reset, as daemons said that were killed since.
    resets: u64,
    /// Is there a peer here beside whom a connection cannot always be kept?
    hostile: AtomicBool,
}

/// What the clusters that are gone complain about. (A drop that panics would hide what the test itself says, and what ran.)
static COMPLAINT: Mutex<Option<String>> = Mutex::new(None);

/// Did a cluster end with unexpected resets since this was asked last?
pub fn complaint() -> Option<String> {
    let mut told = COMPLAINT.lock().unwrap_or_else(PoisonError::into_inner);
    told.take()
}

struct Member {
    name: String,
    build: Build,
    daemon: Option<Daemon>,
}

impl Cluster {
    /// On all nodes of the lab, with a channel between any two of them.
    pub fn start(lab: &Lab) -> Result<Self> {
        let mut c = Self::prepare(lab)?;
        for n in 0..lab.nodes() {
            c.start_daemon(lab, n)?;
        }
        c.await_channels()?;
        c.await_links()?;
        Ok(c)
    }

    /// The same without daemons: what they need lies in the machines.
    pub fn prepare(lab: &Lab) -> Result<Self> {
        let certs = tempfile::Builder::new().prefix("upcerts-").tempdir()?;
        certificate(&certs, "ca --name underpass")?;
        let mut members = Vec::new();
        for n in 0..lab.nodes() {
            let name = lab.node(n).name();
            certificate(&certs, &format!("node {name}"))?;
            members.push(Member {
                name,
                build: Build::This,
                daemon: None,
            });
        }
        let c = Cluster {
            members,
            certs,
            resets: 0,
            hostile: AtomicBool::new(false),
        };
        (0..lab.nodes()).try_for_each(|n| c.install(lab, n))?;
        Ok(c)
    }

    /// Puts what a daemon needs into a machine: once in its life.
    pub fn install(&self, lab: &Lab, n: usize) -> Result<()> {
        install(lab, n, self.certs.path())
    }

    /// Starts a node's daemon (again), in the same runtime directory, and waits until it answers.
    pub fn start_daemon(&mut self, lab: &Lab, n: usize) -> Result<()> {
        self.kill_daemon(n);
        let (node, m) = (lab.node(n), &mut self.members[n]);
        let dir = run_dir(n);
        let args = format!("--config {}", config(n));
        m.daemon = Some(Daemon::start_in(node, m.build, &dir, &args)?);
        Ok(())
    }

    /// Starts one of this build, now and later; the one that runs is killed.
    pub fn replace_daemon(&mut self, lab: &Lab, n: usize, build: Build) -> Result<()> {
        self.members[n].build = build;
        self.start_daemon(lab, n)
    }

    /// `SIGKILL`; it is gone when this returns.
    pub fn kill_daemon(&mut self, n: usize) {
        let killed = self.members[n].daemon.take();
        self.resets += killed.map_or(0, |d| resets_of(&d));
    }

    /// A program or a node here is killed, or a peer cannot do its part: connections may be reset. Otherwise a test with a
    /// reset has failed, whatever it looked at.
    pub fn expect_resets(&self) {
        self.hostile.store(true, Relaxed); // (this thread reads it)
    }

    pub fn daemon(&self, n: usize) -> Result<&Daemon> {
        let m = &self.members[n];
        m.daemon
            .as_ref()
            .with_context(|| format!("no daemon on {}", m.name))
    }

    fn daemons(&self) -> impl Iterator<Item = &Daemon> {
        self.members.iter().filter_map(|m| m.daemon.as_ref())
    }

    /// The environments of eager programs on the first two nodes.
    pub fn eager(&self) -> [Vec<(String, String)>; 2] {
        self.eager_of([Build::This; 2])
    }

    /// The same with these builds' shims.
    pub fn eager_of(&self, builds: [Build; 2]) -> [Vec<(String, String)>; 2] {
        [0, 1].map(|n| Daemon::env(builds[n], &run_dir(n), true))
    }

    /// The same of programs whose connections are promoted as they deserve it.
    pub fn shim(&self) -> [Vec<(String, String)>; 2] {
        [0, 1].map(|n| Daemon::env(Build::This, &run_dir(n), false))
    }

    /// What a daemon knows of another node.
    pub fn peer(&self, n: usize, other: usize) -> Result<PeerState> {
        let wanted = &self.members[other].name;
        match self.daemon(n)?.ask(&Request::Peers)? {
            Response::Peers { peers, .. } => {
                let mut peers = peers.into_iter();
                let found = peers.find(|p| p.name == *wanted);
                found.with_context(|| format!("no peer {wanted}"))
            }
            r => anyhow::bail!("peers answered {r:?}"),
        }
    }

    /// Waits until all daemons that run have channels with each other.
    pub fn await_channels(&self) -> Result<()> {
        let run = |n: &usize| self.members[*n].daemon.is_some();
        let all = || (0..self.members.len()).filter(run);
        for n in all() {
            for other in all().filter(|&o| o != n) {
                self.await_channel(n, other, "up")?;
            }
        }
        Ok(())
    }

    /// Waits until every daemon has a working link over each of its rails.
    pub fn await_links(&self) -> Result<()> {
        let linked = |d: &Daemon| {
            let all = d.stats().map(|s| s.rails).unwrap_or_default();
            let up = |r: &underpass_admin::RailStats| r.links.iter().any(|l| l.up > 0);
            !all.is_empty() && all.iter().all(up)
        };
        until("the rails have links", PATIENCE, || {
            self.daemons().all(linked)
        })
        .with_context(|| self.picture())
    }

    /// Waits until a daemon says that its channel with another node is `up` or `down`.
    pub fn await_channel(&self, n: usize, other: usize, state: &str) -> Result<()> {
        until(&format!("the channel is {state}"), PATIENCE, || {
            self.peer(n, other).is_ok_and(|p| p.state == state)
        })
        .with_context(|| self.picture())
    }

    /// Waits until connections to this port run over RDMA, as many as these or more, in both
    /// directions and seen from both ends. Everything that is tested of RDMA lanes rests on this.
    pub fn await_smcr(&self, port: u16, ends: usize) -> Result<()> {
        self.await_carried(port, ends, "both")
    }

    /// The same of connections on which only one end sends.
    pub fn await_smcr_one_way(&self, port: u16, ends: usize) -> Result<()> {
        self.await_carried(port, ends, "")
    }

    /// Waits until so many connections to this port were seen on RDMA, on both nodes: each at some moment, for those
    /// of a program that sends more than the lab's processors carry go down and up again.
    pub fn saw_smcr(&self, port: u16, ends: usize) -> Result<()> {
        let mut seen = [HashSet::new(), HashSet::new()];
        until(&format!("{ends} ends seen on RDMA"), PATIENCE, || {
            for (n, seen) in seen.iter_mut().enumerate() {
                let now = self.daemon(n).and_then(|d| rows(d, port));
                let on = now
                    .into_iter()
                    .flatten()
                    .filter(|r| r.mode.starts_with("SMCR"));
                seen.extend(on.map(|r| (r.local, r.peer)));
            }
            seen.iter().all(|s| s.len() >= ends)
        })
        .with_context(|| self.picture())
    }

    fn await_carried(&self, port: u16, ends: usize, up: &str) -> Result<()> {
        let carried = |rows: &[Row]| {
            let on = |r: &&Row| r.mode.starts_with("SMCR") && r.up.contains(up);
            rows.iter().filter(on).count() >= ends
        };
        for n in [0, 1] {
            self.await_rows(n, port, &format!("{ends} ends on RDMA"), carried)?;
            let d = self.daemon(n)?;
            // An end that only receives is counted with its first bytes from the ring, after its row. (Promotions from before
            // a daemon's start are not its own.)
            let counted = |s: underpass_admin::Stats| s.lane_tx_bytes + s.lane_rx_bytes > 0;
            until("ends and bytes are counted", PATIENCE, || {
                d.stats().is_ok_and(counted)
            })
            .with_context(|| self.picture())?;
        }
        Ok(())
    }

    /// Bytes that the lanes of all nodes have sent so far.
    pub fn carried(&self) -> Result<u64> {
        let sent = self.daemons().map(|d| Ok(d.stats()?.lane_tx_bytes));
        sent.sum()
    }

    /// So many more bytes have gone through lanes.
    pub fn has_carried(&self, since: u64, least: u64) -> Result<()> {
        let moved = self.carried()? - since;
        ensure!(
            moved >= least,
            "only {moved} bytes on lanes\n{}",
            self.picture()
        );
        Ok(())
    }

    /// Waits until the connections to this port, as many as these, are on TCP in both directions at
    /// both ends.
    pub fn await_tcp(&self, port: u16, ends: usize) -> Result<()> {
        for n in [0, 1] {
            let down = |rows: &[Row]| {
                rows.len() == ends && rows.iter().all(|r| r.mode.starts_with("TCP 0x"))
            };
            self.await_rows(n, port, &format!("{ends} ends on TCP"), down)?;
        }
        Ok(())
    }

    /// Waits until a node's ends of the connections to this port satisfy `f`.
    pub fn await_rows(
        &self,
        n: usize,
        port: u16,
        what: &str,
        f: impl Fn(&[Row]) -> bool,
    ) -> Result<()> {
        let d = self.daemon(n)?;
        let what = format!("{what}, on {}", self.members[n].name);
        until(&what, PATIENCE, || rows(d, port).is_ok_and(|rows| f(&rows)))
            .with_context(|| self.picture())
    }

    /// Packets that two nodes have received on a rail, where nothing but RDMA speaks.
    fn packets(lab: &Lab, rail: usize) -> Result<[u64; 2]> {
        let of = |n| lab.node(n).nic_counter(rail, "rx_packets");
        Ok([of(0)?, of(1)?])
    }

    /// Waits until much more has come in on a rail at both nodes: more than links say to each other
    /// when nobody sends.
    pub fn await_traffic(&self, lab: &Lab, rail: usize) -> Result<()> {
        let before = Self::packets(lab, rail)?;
        until(&format!("traffic on rail {rail}"), PATIENCE, || {
            Self::packets(lab, rail).is_ok_and(|now| (0..2).all(|n| now[n] > before[n] + 200))
        })
        .with_context(|| self.picture())
    }

    /// What a node's daemon holds.
    pub fn holdings(&self, lab: &Lab, n: usize) -> Result<Holdings> {
        let s = self.daemon(n)?.stats()?;
        let printed = lab.node(n).check(format!(
            "rdma resource show
             echo fds $(ls /proc/{}/fd | wc -l)",
            s.pid
        ))?;
        let mut all = Holdings {
            lanes: s.lanes,
            clients: s.clients,
            memory_bytes: s.memory_bytes,
            ..Holdings::default()
        };
        for line in printed.lines() {
            if let Some(fds) = line.strip_prefix("fds ") {
                all.fds = fds.trim().parse()?;
            } else {
                all.add(line)?;
            }
        }
        ensure!(all.fds > 0, "no process {}", s.pid);
        Ok(all)
    }

    /// Waits until no lane and no process is left at a daemon, and it holds no more than this.
    pub fn await_no_more(&self, lab: &Lab, n: usize, than: &Holdings) -> Result<()> {
        let mut last = Holdings::default();
        until("nothing is left over", ORPHANS, || {
            last = self.holdings(lab, n).unwrap_or_default();
            last.fds > 0 && last.lanes == 0 && last.clients == 0 && last.no_more(than)
        })
        .with_context(|| format!("{last:?}\nnot: {than:?}\n{}", self.picture()))
    }

    /// Waits until no lane and no process is left, then tells what the daemon holds. Links between
    /// nodes may stay.
    pub fn idle(&self, lab: &Lab, n: usize) -> Result<Holdings> {
        let mut last = Holdings::default();
        let mut same = 0;
        until("the daemon is idle", PATIENCE, || {
            let now = self.holdings(lab, n).unwrap_or_default();
            let idle = now.fds > 0 && now.lanes == 0 && now.clients == 0;
            same = if idle && now == last { same + 1 } else { 0 };
            last = now;
            same == 3
        })
        .with_context(|| format!("{last:?}\n{}", self.picture()))?;
        Ok(last)
    }

    /// For the messages of failed tests.
    pub fn picture(&self) -> String {
        let mut t = String::new();
        for m in &self.members {
            let _ = writeln!(t, "== {}", m.name);
            match &m.daemon {
                Some(d) => {
                    let peers = d.tool("peers").unwrap_or_else(|e| format!("{e:#}"));
                    let _ = writeln!(t, "{peers}{}", d.picture());
                }
                None => t += "no daemon\n",
            }
        }
        t
    }

    /// Nobody broke a connection that TCP would have kept.
    pub fn no_resets(&self) -> Result<()> {
        for d in self.daemons() {
            let s = d.stats()?;
            ensure!(s.resets == 0, "{s:?}\n{}", self.picture());
        }
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let resets = self.resets + self.daemons().map(resets_of).sum::<u64>();
        if resets > 0 && !self.hostile.load(Relaxed) {
            let picture = self.picture();
            let told = format!("{resets} connections were reset, and nobody was killed\n{picture}");
            *COMPLAINT.lock().unwrap_or_else(PoisonError::into_inner) = Some(told);
        }
    }
}

/// Connections that shims have reset, if the daemon can answer.
fn resets_of(d: &Daemon) -> u64 {
    d.stats().map_or(0, |s| s.resets)
}

/// A daemon's connections to or from this port.
fn rows(d: &Daemon, port: u16) -> Result<Vec<Row>> {
    let end = format!(":{port}");
    let mut rows = d.ss()?;
    rows.retain(|r| r.state == "ACTIVE" && (r.local.ends_with(&end) || r.peer.ends_with(&end)));
    Ok(rows)
}

/// What a daemon holds: verbs objects of all devices together, descriptors, and what it says itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Holdings {
    pub verbs: BTreeMap<String, u64>,
    pub fds: u64,
    pub lanes: u64,
    pub clients: u64,
    pub memory_bytes: u64,
}

impl Holdings {
    /// Adds a line like `0: rxe1: pd 1 cq 1 qp 1 cm_id 0 mr 0 ctx 1 srq 0`.
    fn add(&mut self, line: &str) -> Result<()> {
        let (_, counts) = line.rsplit_once(": ").context(line.to_string())?;
        let mut words = counts.split_whitespace();
        while let (Some(kind), Some(n)) = (words.next(), words.next()) {
            *self.verbs.entry(kind.into()).or_default() += n.parse::<u64>()?;
        }
        Ok(())
    }

    pub fn no_more(&self, than: &Holdings) -> bool {
        let of = |kind: &String| than.verbs.get(kind).copied().unwrap_or(0);
        self.verbs.iter().all(|(kind, n)| *n <= of(kind))
            && self.fds <= than.fds
            && self.lanes <= than.lanes
            && self.clients <= than.clients
            && self.memory_bytes <= than.memory_bytes
    }
}

/// `underpass certs ARGS` in the directory of certificates.
fn certificate(certs: &TempDir, args: &str) -> Result<()> {
    Program::new(paths::bin("underpass"), &Place::bare())
        .arg("certs")
        .words(args)
        .dir(certs.path())
        .check(LIMIT)?;
    Ok(())
}

fn home(n: usize) -> String {
    format!("/run/cluster{n}")
}

fn config(n: usize) -> String {
    format!("{}/config.toml", home(n))
}

fn run_dir(n: usize) -> String {
    format!("{}/run", home(n))
}

/// Puts certificates and configuration into a machine, and brings back what a test may have left
/// otherwise there: filters, devices.
fn install(lab: &Lab, n: usize, certs: &Path) -> Result<()> {
    let node = lab.node(n);
    let (name, home) = (node.name(), home(n));
    std::fs::write(certs.join(format!("{name}.toml")), configuration(lab, n))?;
    let from = quoted(&certs.to_string_lossy());
    // Programs of other users go through this directory to the daemon's.
    let mut script = format!(
        "rm -rf {home} && mkdir -m 755 {home} && cd {from}
         cp ca.crt {home}/ca.crt
         cp {name}.crt {home}/node.crt
         cp {name}.key {home}/node.key
         cp {name}.toml {}
         nft flush ruleset\n",
        config(n)
    );
    for rail in 1..=lab.rails() {
        let _ = writeln!(
            script,
            "rdma link show rxe{rail}/1 >/dev/null 2>&1 ||
             rdma link add rxe{rail} type rxe netdev eth{rail}"
        );
    }
    node.check(script)?;
    Ok(())
}

fn configuration(lab: &Lab, n: usize) -> String {
    let addresses = |node: &Node| {
        let rails = (1..=lab.rails()).map(|rail| node.address(rail, Family::V4));
        let all = [Family::V4, Family::V6].map(|f| node.address(0, f));
        let all = all.into_iter().chain(rails).chain([node.pod()]);
        let all: Vec<_> = all.map(|a| format!("'{a}'")).collect();
        format!("[{}]", all.join(", "))
    };
    let (node, home) = (lab.node(n), home(n));
    let mut t = format!(
        "[node]\nname = '{}'\naddresses = {}\n\
         [tls]\nca = '{home}/ca.crt'\ncert = '{home}/node.crt'\nkey = '{home}/node.key'\n",
        node.name(),
        addresses(node)
    );
    for other in (0..lab.nodes()).filter(|&o| o != n) {
        let peer = lab.node(other);
        let _ = write!(
            t,
            "[[peer]]\nname = '{}'\ncontrol = '{}:{PORT}'\naddresses = {}\n",
            peer.name(),
            peer.host(),
            addresses(peer)
        );
    }
    t
}
