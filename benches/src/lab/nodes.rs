//! The daemons of both machines, which know each other or do not.

use anyhow::{ensure, Context, Result};
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;
use underpass_admin::{Request, Response, Row};
use underpass_tests::harness::{paths, until};
use underpass_tests::lab::daemon::Daemon;
use underpass_tests::lab::{Family, Lab};

/// Where daemons listen for each other.
const PORT: u16 = 7471;
const PATIENCE: Duration = Duration::from_secs(60);
/// What the machines are called and which addresses they have, as the lab gives them.
const NAMES: [&str; 2] = ["lab1", "lab2"];

/// Certificates and configurations of two nodes that are each other's peers, in a directory that
/// the machines see as well.
pub fn configured() -> Result<TempDir> {
    // Not where TMPDIR says: /run and the like are the machines' own.
    let dir = tempfile::Builder::new()
        .prefix("upbench-")
        .tempdir_in("/tmp")?;
    let certs = |args: &[&str]| -> Result<()> {
        let out = Command::new(paths::bin("underpass"))
            .arg("certs")
            .args(args)
            .current_dir(dir.path())
            .output()?;
        let said = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success(), "underpass certs {args:?}: {said}");
        Ok(())
    };
    certs(&["ca", "--name", "bench-lab"])?;
    for name in NAMES {
        certs(&["node", name])?;
    }
    for (n, name) in NAMES.iter().enumerate() {
        let (own, other) = (n + 1, 2 - n);
        let addresses = |n: usize| format!("['10.9.0.{n}', '10.9.1.{n}', '10.9.2.{n}']");
        let d = dir.path().display();
        let text = format!(
            "[node]\nname = '{name}'\naddresses = {}\n\
             [tls]\nca = '{d}/ca.crt'\ncert = '{d}/{name}.crt'\nkey = '{d}/{name}.key'\n\
             [[peer]]\nname = '{}'\ncontrol = '10.9.0.{other}:{PORT}'\naddresses = {}\n",
            addresses(own),
            NAMES[1 - n],
            addresses(other),
        );
        std::fs::write(dir.path().join(format!("{name}.toml")), text)?;
    }
    Ok(dir)
}

/// A daemon on each machine.
pub struct Nodes([Daemon; 2]);

impl Nodes {
    /// Daemons that work alone.
    pub fn unpaired(lab: &Lab) -> Result<Self> {
        Self::start(lab, |_| String::new())
    }

    /// Each other's peers, by the configuration that was made in this directory.
    pub fn peers(lab: &Lab, config: &Path) -> Result<Self> {
        for (n, name) in NAMES.iter().enumerate() {
            // What the configuration says must be what the lab does.
            let node = lab.node(n);
            let address = node.address(0, Family::V4).to_string();
            ensure!(node.name() == *name && address == format!("10.9.0.{}", n + 1));
        }
        let nodes = Self::start(lab, |n| {
            format!("--config {}/{}.toml", config.display(), NAMES[n])
        })?;
        for d in &nodes.0 {
            until("the daemons' channel is up", PATIENCE, || {
                matches!(d.ask(&Request::Peers), Ok(Response::Peers { peers, .. })
                    if peers.iter().any(|p| p.state == "up"))
            })
            .with_context(|| d.picture())?;
        }
        Ok(nodes)
    }

    fn start(lab: &Lab, args: impl Fn(usize) -> String) -> Result<Self> {
        let one = |n| Daemon::start(lab.node(n), &args(n));
        Ok(Nodes([one(0)?, one(1)?]))
    }

    /// Programs on a machine run under the shim, by its usual rules.
    pub fn env(&self, node: usize) -> Vec<(String, String)> {
        self.0[node].shim()
    }

    /// The connected ends on a machine that have this port at either end.
    pub fn rows(&self, node: usize, port: u16) -> Result<Vec<Row>> {
        let end = format!(":{port}");
        let mut rows = self.0[node].ss()?;
        rows.retain(|r| r.state == "ACTIVE" && (r.local.ends_with(&end) || r.peer.ends_with(&end)));
        Ok(rows)
    }
}
