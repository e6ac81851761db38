//! Services of a cluster, between the daemons of two nodes: kube-proxy's rules in the nodes' namespaces translate the addresses of
//! pods' connections. Both ends are found where both have the shim, by the proof; where one has none, the other says so. There are
//! no lanes across nodes here: that both ends know that neither node has a device is that they are paired. Needs root.

use anyhow::{Context, Result};
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;
use underpass_tests::harness::node::{pair, Lan, Node, Pod};
use underpass_tests::harness::peers::{Echo, EchoClient};
use underpass_tests::harness::talk::found;
use underpass_tests::harness::{until, Place, PATIENCE};

const LIMIT: Duration = Duration::from_secs(60);
/// A service, and its port.
const AT: (&str, u16) = ("10.96.0.9", 80);
const NAT: &str = "iptables -w -t nat";

/// Two nodes with a pod each.
struct Cluster {
    a: Node,
    b: Node,
    pods: [Pod; 2],
    _lan: Lan,
}

impl Cluster {
    fn new() -> Result<Self> {
        let lan = Lan::new()?;
        let (a, b) = pair(&lan)?;
        let pods = [a.pod_behind()?, b.pod_behind()?];
        Ok(Cluster {
            a,
            b,
            pods,
            _lan: lan,
        })
    }

    /// Packets to this address and port that come to the node, or begin there, go to another.
    fn dnat(on: &Node, (at, port): (&str, u16), to: &str) -> Result<()> {
        ["PREROUTING", "OUTPUT"].iter().try_for_each(|chain| {
            on.sh(&format!(
                "{NAT} -A {chain} -d {at} -p tcp --dport {port} -j DNAT --to-destination {to}"
            ))
        })
    }

    /// What the node sends to that address has its own as the source.
    fn masquerade(on: &Node, to: &str) -> Result<()> {
        on.sh(&format!(
            "{NAT} -A POSTROUTING -p tcp -d {to} -j MASQUERADE"
        ))
    }

    fn no_rules(&self) -> Result<()> {
        [&self.a, &self.b]
            .iter()
            .try_for_each(|n| n.sh(&format!("{NAT} -F")))
    }
}

/// A connection that lasts.
struct Talk {
    _server: Echo,
    client: EchoClient,
    stop: PathBuf,
    _dir: tempfile::TempDir,
}

impl Talk {
    /// `way`: makes rules for the server's port.
    fn new(
        (from, to, host): (&Place, &Place, &str),
        at: (&str, Option<u16>),
        way: impl FnOnce(u16) -> Result<()>,
    ) -> Result<Self> {
        let server = Echo::serve("epoll", host, to)?;
        let port = server.port()?;
        way(port)?;
        let dir = tempfile::tempdir()?;
        let stop = dir.path().join("stop");
        let client = server.client_to(at.0, at.1.unwrap_or(port), from, 1, 0, Some(&stop))?;
        Ok(Talk {
            _server: server,
            client,
            stop,
            _dir: dir,
        })
    }

    fn end(self) -> Result<()> {
        std::fs::write(&self.stop, b"")?;
        self.client.finish(LIMIT)?;
        Ok(())
    }
}

/// The other node has said that the other end has no shim. (Both are on this machine, where the client's own daemon may see that
/// program: then it knows its number.)
fn told_by_the_other(a: &Node) -> Result<()> {
    let told = |r: &Value| {
        r["reason"]["name"] == "waiting"
            && r["peer_reason"]["name"] == "peer-no-shim"
            && r["peer_pid"] == 0
    };
    until("the other node has said it", PATIENCE, || {
        let rows = a.tool("ss -j -e").unwrap_or_default();
        let rows = rows.as_array().into_iter().flatten();
        let active: Vec<&Value> = rows.filter(|r| r["state"] == "ACTIVE").collect();
        active.len() == 1 && active.iter().all(|r| told(r))
    })
    .with_context(|| a.picture())
}

/// A pod asks a service. Behind it is a pod of the other node, or a program on that node itself; the client's own address is kept,
/// or the client's node puts its own in its place.
#[test]
fn root_a_service_of_the_other_node() -> Result<()> {
    let c = Cluster::new()?;
    let (a, b, [client, pod]) = (&c.a, &c.b, &c.pods);
    for (host, shim, bare) in [
        (pod.addr.clone(), b.place_in(pod), pod.bare()),
        (b.addr(), b.place(), b.bare()),
    ] {
        for masquerade in [false, true] {
            for (to, has_shim) in [(&shim, true), (&bare, false)] {
                c.no_rules()?;
                let ends = (&a.place_in(client), to, &*host);
                let t = Talk::new(ends, (AT.0, Some(AT.1)), |port| {
                    if masquerade {
                        Cluster::masquerade(a, &host)?;
                    }
                    Cluster::dnat(a, AT, &format!("{host}:{port}"))
                })?;
                let done = match has_shim {
                    true => found(a, b, 1),
                    false => told_by_the_other(a),
                };
                done.with_context(|| format!("{host}, masqueraded {masquerade}"))?;
                t.end()?;
            }
        }
    }
    Ok(())
}

/// A pod asks a port of the other node, which leads to a pod there: that pod sees the node as its client.
#[test]
fn root_a_port_of_the_other_node() -> Result<()> {
    let c = Cluster::new()?;
    let (a, b, [client, pod]) = (&c.a, &c.b, &c.pods);
    let at = (b.addr(), 30080);
    for (to, has_shim) in [(b.place_in(pod), true), (pod.bare(), false)] {
        c.no_rules()?;
        let ends = (&a.place_in(client), &to, &*pod.addr);
        let t = Talk::new(ends, (&at.0, Some(at.1)), |port| {
            Cluster::masquerade(b, &pod.addr)?;
            Cluster::dnat(b, (&at.0, at.1), &format!("{}:{port}", pod.addr))
        })?;
        match has_shim {
            true => found(a, b, 1)?,
            false => told_by_the_other(a)?,
        }
        t.end()?;
    }
    Ok(())
}

/// Behind the service is a program of the client's node, in the node's own namespace.
#[test]
fn root_a_service_on_the_clients_node() -> Result<()> {
    let c = Cluster::new()?;
    let (a, client) = (&c.a, &c.pods[0]);
    for (to, has_shim) in [(a.place(), true), (a.bare(), false)] {
        c.no_rules()?;
        let host = a.addr();
        let ends = (&a.place_in(client), &to, &*host);
        let t = Talk::new(ends, (AT.0, Some(AT.1)), |port| {
            Cluster::dnat(a, AT, &format!("{host}:{port}"))
        })?;
        match has_shim {
            true => until("both ends are on the lane", PATIENCE, || {
                let rows = a.tool("ss -j -e").unwrap_or_default();
                let mut active = rows.as_array().into_iter().flatten();
                active.all(|r| r["state"] != "ACTIVE" || r["mode"] == "SMCD")
                    && a.tool("stats -j").is_ok_and(|s| s["promoted"] == 2)
            })
            .with_context(|| a.picture())?,
            false => a.await_reasons(1, "waiting", "peer-no-shim")?,
        }
        t.end()?;
    }
    Ok(())
}
