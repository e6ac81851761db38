//! Nodes on one machine: network namespaces on one bridge, each with a daemon and programs of its
//! own. They share one kernel, and with it the BPF records; nothing else. Needs root.
//!
//! Node `n1` has the addresses 10.88.0.1 and 10.88.1.1, `n2` 10.88.0.2 and 10.88.2.1, and so on;
//! each is listed with 10.88.0.N and 10.88.N.0/24.

use super::program::{Place, Program, Running};
use super::{paths, until, PATIENCE};
use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tempfile::TempDir;

const PORT: u16 = 7471;
const LIMIT: Duration = Duration::from_secs(20);

/// Runs a command line; it must succeed.
pub fn sh(line: &str) -> Result<()> {
    let mut words = line.split_whitespace();
    let program = words.next().context("no command")?;
    let out = Command::new(program)
        .args(words)
        .output()
        .context(program.to_owned())?;
    if !out.status.success() {
        bail!("{line}: {}", String::from_utf8_lossy(&out.stderr));
    }
    Ok(())
}

/// The wire that the nodes share.
pub struct Lan {
    hub: String,
    tag: String,
    /// The CA and all certificates, made by `underpass certs`.
    pub certs: TempDir,
}

impl Lan {
    pub fn new() -> Result<Lan> {
        static N: AtomicU32 = AtomicU32::new(0);
        let tag = format!(
            "unode{}-{}",
            std::process::id(),
            N.fetch_add(1, Ordering::Relaxed)
        );
        let lan = Lan {
            hub: format!("{tag}h"),
            tag,
            certs: tempfile::Builder::new().prefix("upcerts-").tempdir()?,
        };
        let hub = &lan.hub;
        sh(&format!("ip netns add {hub}"))?;
        sh(&format!("ip -n {hub} link add br0 type bridge"))?;
        sh(&format!("ip -n {hub} link set br0 up"))?;
        lan.make("ca --name underpass")?;
        Ok(lan)
    }

    /// `underpass certs ARGS`, in the directory of certificates.
    pub fn make(&self, args: &str) -> Result<()> {
        Program::new(paths::bin("underpass"), &Place::bare())
            .arg("certs")
            .words(args)
            .dir(self.certs.path())
            .check(LIMIT)?;
        Ok(())
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.certs.path().join(name)
    }
}

impl Drop for Lan {
    fn drop(&mut self) {
        let _ = sh(&format!("ip netns del {}", self.hub));
    }
}

/// See [`Node::pod`].
pub struct Pod {
    ns: String,
    pub addr: String,
}

impl Pod {
    /// For programs without the shim.
    pub fn bare(&self) -> Place {
        Place::bare().netns(&self.ns)
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = sh(&format!("ip netns del {}", self.ns));
    }
}

/// How a node's daemon is configured, where it differs from the usual.
#[derive(Clone, Default)]
pub struct Setup {
    /// Its name, if it is not `nN`.
    pub name: Option<String>,
    /// Numbers of the nodes it lists.
    pub peers: Vec<u32>,
    pub args: Vec<String>,
    /// More configuration.
    pub more: String,
}

pub struct Node {
    n: u32,
    pub name: String,
    ns: String,
    dir: TempDir,
    setup: Setup,
    running: Option<Running>,
}

impl Node {
    /// Makes the namespace and a certificate; starts no daemon yet.
    pub fn new(lan: &Lan, n: u32, setup: Setup) -> Result<Node> {
        let ns = format!("{}n{n}", lan.tag);
        let name = setup.name.clone().unwrap_or(format!("n{n}"));
        let node = Node {
            n,
            name: name.clone(),
            ns,
            dir: tempfile::Builder::new().prefix("upnode-").tempdir()?,
            setup,
            running: None,
        };
        let ns = &node.ns;
        sh(&format!("ip netns add {ns}"))?;
        sh(&format!("ip -n {ns} link set lo up"))?;
        sh(&format!(
            "ip link add eth0 netns {ns} type veth peer name v{n} netns {}",
            lan.hub
        ))?;
        sh(&format!("ip -n {} link set v{n} master br0 up", lan.hub))?;
        sh(&format!("ip -n {ns} addr add 10.88.0.{n}/16 dev eth0"))?;
        sh(&format!("ip -n {ns} addr add 10.88.{n}.1/16 dev eth0"))?;
        sh(&format!("ip -n {ns} link set eth0 up"))?;
        sh(&format!("ip -n {ns} route add 10.96.0.0/16 dev eth0"))?;
        if !lan.file(&format!("{name}.crt")).exists() {
            lan.make(&format!("node {name}"))?;
        }
        for (from, to) in [
            ("ca.crt", "ca.crt"),
            (&*format!("{name}.crt"), "node.crt"),
            (&*format!("{name}.key"), "node.key"),
        ] {
            node.install(&lan.file(from), to)?;
        }
        Ok(node)
    }

    /// Replaces one of `ca.crt`, `node.crt`, `node.key`.
    pub fn install(&self, from: &Path, to: &str) -> Result<()> {
        let tmp = self.dir.path().join("tmp");
        std::fs::copy(from, &tmp).with_context(|| from.display().to_string())?;
        Ok(std::fs::rename(tmp, self.dir.path().join(to))?)
    }

    pub fn addr(&self) -> String {
        format!("10.88.{}.1", self.n)
    }

    /// The address where its daemon listens.
    pub fn control(&self) -> String {
        format!("10.88.0.{}", self.n)
    }

    fn config(&self) -> Result<PathBuf> {
        let d = self.dir.path().display();
        let mut t = format!(
            "{}\n[node]\nname = '{}'\naddresses = ['10.88.0.{n}', '10.88.{n}.0/24']\n\
             [tls]\nca = '{d}/ca.crt'\ncert = '{d}/node.crt'\nkey = '{d}/node.key'\n",
            self.setup.more,
            self.name,
            n = self.n
        );
        for p in &self.setup.peers {
            writeln!(
                t,
                "[[peer]]\nname = 'n{p}'\ncontrol = '10.88.0.{p}:{PORT}'\naddresses = ['10.88.0.{p}', '10.88.{p}.0/24']"
            )?;
        }
        let path = self.dir.path().join("config.toml");
        std::fs::write(&path, t)?;
        Ok(path)
    }

    /// Starts the daemon (again).
    pub fn start(&mut self) -> Result<()> {
        self.kill();
        let mut p = Program::new(paths::bin("underpassd"), &Place::bare().netns(&self.ns))
            .arg("--dir")
            .arg(self.run_dir())
            .arg("--config")
            .arg(self.config()?)
            .args(&self.setup.args)
            .spawn()?;
        let ready = until("the daemon answers", PATIENCE, || {
            p.has_ended() || self.tool("stats -j").is_ok()
        });
        if ready.is_err() || p.has_ended() {
            bail!("underpassd did not start: {}\n{}", p.stdout(), p.stderr());
        }
        self.running = Some(p);
        Ok(())
    }

    pub fn reconfigure(&mut self, f: impl FnOnce(&mut Setup)) {
        f(&mut self.setup);
    }

    pub fn kill(&mut self) {
        self.running = None;
    }

    pub fn running(&self) -> Result<&Running> {
        self.running.as_ref().context("no daemon runs")
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub fn place(&self) -> Place {
        Place::shim(&self.run_dir()).eager().netns(&self.ns)
    }

    /// Programs that register only after some use, or when they are asked.
    pub fn quiet(&self) -> Place {
        Place::shim(&self.run_dir()).netns(&self.ns)
    }

    pub fn bare(&self) -> Place {
        Place::bare().netns(&self.ns)
    }

    /// A network namespace of this node beside its own, as a pod has.
    pub fn pod(&self, lan: &Lan) -> Result<Pod> {
        let (n, ns) = (self.n, format!("{}p", self.ns));
        let pod = Pod {
            ns: ns.clone(),
            addr: format!("10.88.{n}.7"),
        };
        sh(&format!("ip netns add {ns}"))?;
        sh(&format!(
            "ip link add eth0 netns {ns} type veth peer name p{n} netns {}",
            lan.hub
        ))?;
        sh(&format!("ip -n {} link set p{n} master br0 up", lan.hub))?;
        sh(&format!("ip -n {ns} addr add {}/16 dev eth0", pod.addr))?;
        sh(&format!("ip -n {ns} link set eth0 up"))?;
        Ok(pod)
    }

    /// A pod whose packets go through this node's namespace, where kube-proxy's rules are. For programs of this node's daemon, or
    /// without the shim.
    pub fn pod_behind(&self) -> Result<Pod> {
        let (n, ns) = (self.n, format!("{}q", self.ns));
        let addr = format!("10.88.{n}.8");
        let pod = Pod {
            ns: ns.clone(),
            addr: addr.clone(),
        };
        sh(&format!("ip netns add {ns}"))?;
        sh(&format!("ip -n {ns} link set lo up"))?;
        sh(&format!(
            "ip link add eth0 netns {ns} type veth peer name pod netns {}",
            self.ns
        ))?;
        sh(&format!("ip -n {ns} addr add {addr}/32 dev eth0"))?;
        sh(&format!("ip -n {ns} link set eth0 up"))?;
        sh(&format!("ip -n {ns} route add {}/32 dev eth0", self.addr()))?;
        sh(&format!("ip -n {ns} route add default via {}", self.addr()))?;
        self.sh("ip link set pod up")?;
        self.sh(&format!("ip route add {addr}/32 dev pod"))?;
        for on in ["ip_forward", "conf.eth0.proxy_arp"] {
            self.sh(&format!("sysctl -qw net.ipv4.{on}=1"))?;
        }
        Ok(pod)
    }

    /// For programs of this node in a pod: with the shim.
    pub fn place_in(&self, pod: &Pod) -> Place {
        self.place().netns(&pod.ns)
    }

    /// Runs a command inside.
    pub fn sh(&self, line: &str) -> Result<()> {
        sh(&format!("ip netns exec {} {line}", self.ns))
    }

    /// What the tool says, as root on this node.
    pub fn tool(&self, args: &str) -> Result<Value> {
        let text = Program::new(paths::bin("underpass"), &self.bare())
            .arg("--dir")
            .arg(self.run_dir())
            .words(args)
            .check(LIMIT)?;
        Ok(serde_json::from_str(&text)?)
    }

    /// `underpass check -j …`, as root on this node, whatever the answer.
    pub fn check(&self, args: &str) -> Result<Value> {
        let out = Program::new(paths::bin("underpass"), &self.bare())
            .arg("--dir")
            .arg(self.run_dir())
            .arg("check")
            .words(args)
            .env("UNDERPASS_LIB", paths::shim())
            .run(LIMIT)?;
        serde_json::from_str(&out.stdout).with_context(|| format!("{out:?}"))
    }

    /// How the channel with a peer is: state and reason.
    pub fn peer(&self, name: &str) -> Result<Value> {
        let v = self.tool("peers -j")?;
        let all = v["peers"].as_array().context("peers")?;
        let p = all.iter().find(|p| p["name"] == name);
        Ok(p.with_context(|| format!("no peer {name}"))?.clone())
    }

    /// Waits until the channel with a peer is up.
    pub fn await_up(&self, name: &str) -> Result<()> {
        until("the channel is up", PATIENCE, || {
            self.peer(name).is_ok_and(|p| p["state"] == "up")
        })
        .with_context(|| self.picture())
    }

    /// Waits until there is no channel, and the reason contains this.
    pub fn await_down(&self, name: &str, part: &str) -> Result<()> {
        until(
            &format!("{} says {part:?} of {name}", self.name),
            PATIENCE,
            || {
                self.peer(name).is_ok_and(|p| {
                    p["state"] == "down" && p["reason"].as_str().is_some_and(|r| r.contains(part))
                })
            },
        )
        .with_context(|| self.picture())
    }

    /// Waits until somebody was refused for this reason.
    pub fn await_refused(&self, from: &str, part: &str) -> Result<()> {
        until(&format!("{} refused {part:?}", self.name), PATIENCE, || {
            let v = self.tool("peers -j").unwrap_or_default();
            v["refused"].as_array().is_some_and(|all| {
                let is = |r: &Value| {
                    r["address"] == from && r["reason"].as_str().is_some_and(|t| t.contains(part))
                };
                all.iter().any(is)
            })
        })
        .with_context(|| self.picture())
    }

    /// The connected ends: reason here and at the peer, by name.
    pub fn reasons(&self) -> Result<Vec<(String, String)>> {
        let v = self.tool("ss -j -e")?;
        let rows = v.as_array().context("rows")?.iter();
        let name = |v: &Value| v["name"].as_str().unwrap_or("-").to_owned();
        let rows = rows.filter(|r| r["state"] == "ACTIVE");
        Ok(rows
            .map(|r| (name(&r["reason"]), name(&r["peer_reason"])))
            .collect())
    }

    /// Waits until so many ends say just this.
    pub fn await_reasons(&self, n: usize, here: &str, there: &str) -> Result<()> {
        let wanted = (here.to_owned(), there.to_owned());
        until(
            &format!("{n} ends of {} say {wanted:?}", self.name),
            PATIENCE,
            || {
                let r = self.reasons().unwrap_or_default();
                r.len() == n && r.iter().all(|r| *r == wanted)
            },
        )
        .with_context(|| self.picture())
    }

    /// Ends whose other end was found on another node.
    pub fn paired(&self) -> Result<u64> {
        let v = self.tool("stats -j")?;
        ensure!(v["promoted"] == 0, "nothing is promoted across nodes");
        v["paired_across"].as_u64().context("paired_across")
    }

    /// For the messages of failed tests.
    pub fn picture(&self) -> String {
        let mut t = format!("node {}\n", self.name);
        for args in ["peers -j", "ss -j -e", "log -j"] {
            let _ = match self.tool(args) {
                Ok(v) => writeln!(t, "{args}: {v:#}"),
                Err(e) => writeln!(t, "{args}: {e:#}"),
            };
        }
        if let Some(r) = &self.running {
            t += &r.stderr();
        }
        t
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
        let _ = sh(&format!("ip netns del {}", self.ns));
    }
}

/// Two nodes that know each other, with daemons.
pub fn pair(lan: &Lan) -> Result<(Node, Node)> {
    let one = |n, m| {
        Node::new(
            lan,
            n,
            Setup {
                peers: vec![m],
                ..Setup::default()
            },
        )
    };
    let (mut a, mut b) = (one(1, 2)?, one(2, 1)?);
    a.start()?;
    b.start()?;
    a.await_up("n2")?;
    b.await_up("n1")?;
    Ok((a, b))
}
