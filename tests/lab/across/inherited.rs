//! Programs that connect, fork and end, and whose child goes on with the connection.

use anyhow::{Context, Result};
use std::cell::Cell;
use underpass_tests::harness::paths;
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::streams::{CLIENT, SERVER};
use underpass_tests::lab::{quoted, Lab, Running, PATIENCE};

/// Bytes that show that it goes on: more than was on the way.
const ON: u64 = 300_000;

/// What the child does with the connection.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Child {
    Goes,
    /// In the end it is killed.
    Dies,
    /// It never touches it, and is killed.
    DiesIdle,
    /// It is in another pid namespace, and goes on.
    Elsewhere,
}

/// The echo of `inherited.py` on the first node, and its client on the second.
struct Pair {
    server: Running,
    client: Running,
    port: u16,
    fork: String,
    until: String,
}

impl Pair {
    fn start(lab: &Lab, c: &Cluster, how: Child) -> Result<Self> {
        let [a, b] = [0, 1].map(|n| lab.node(n));
        let python = format!(
            "{} {}",
            paths::PYTHON,
            quoted(&paths::script("children.py").to_string_lossy())
        );
        let host = a.host();
        let [fork, until] = ["fork", "until"].map(|f| format!("/run/children-{how:?}.{f}"));
        let how = match how {
            Child::DiesIdle => "idle",
            Child::Elsewhere => "pidns",
            _ => "",
        };
        // The shell stays, and with it the child.
        let server = a.sh(format!(
            "{python} serve {host} {fork} {how}; echo ended; exec sleep 600"
        ))?;
        let server = server.envs(c.eager()[SERVER].clone()).spawn()?;
        let port = |r: &Running| -> Option<u16> {
            r.stdout()
                .lines()
                .find_map(|l| l.strip_prefix("port ")?.parse().ok())
        };
        server.until("it listens", PATIENCE, || port(&server).is_some())?;
        let port = port(&server).context("port")?;
        let client = b.sh(format!("exec {python} connect {host} {port} {until}"))?;
        let client = client.envs(c.eager()[CLIENT].clone()).spawn()?;
        Ok(Pair {
            server,
            client,
            port,
            fork,
            until,
        })
    }

    /// Bytes that have come back.
    fn got(&self) -> u64 {
        let said = self.client.stdout();
        let mut lines = said.lines().rev();
        lines
            .find_map(|l| l.strip_prefix("got ")?.parse().ok())
            .unwrap_or(0)
    }

    fn await_more(&self) -> Result<()> {
        let before = self.got();
        self.client
            .until("bytes come back", PATIENCE, || self.got() >= before + ON)
    }
}

impl Pair {
    /// Waits until the daemon beside the child has let go of the connection, which goes on.
    fn await_left(&self, lab: &Lab, c: &Cluster) -> Result<()> {
        let pid = c.daemon(0)?.stats()?.pid;
        let inode = Cell::new(0);
        c.await_rows(0, self.port, "the connection", |rows| {
            inode.set(rows.first().map_or(0, |r| r.inode));
            inode.get() != 0
        })?;
        let inode = inode.get();
        let held = format!("ls -l /proc/{pid}/fd | grep -c 'socket:.{inode}.' || true");
        self.server
            .until("its copy is closed", PATIENCE, || {
                let said = lab.node(0).check(held.clone());
                said.is_ok_and(|s| s.trim() == "0")
            })
            .with_context(|| c.picture())
    }
}

pub fn programs_fork_and_end(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    c.expect_resets(); // (where the child is killed)
    super::new_ones_are_promoted(lab, &c)?;
    let before = [c.idle(lab, 0)?, c.idle(lab, 1)?];
    for how in [Child::Goes, Child::Dies, Child::DiesIdle, Child::Elsewhere] {
        let p = Pair::start(lab, &c, how)?;
        c.await_smcr(p.port, 1)?;
        p.await_more()?;
        lab.node(0).guest()?.touch(&p.fork)?;
        p.server.until("the parent has ended", PATIENCE, || {
            p.server.stdout().contains("ended")
        })?;
        if how != Child::DiesIdle {
            p.await_more()?;
            // Two processes had it: such a connection is on TCP.
            c.await_rows(1, p.port, "on TCP", |r| {
                r.iter().all(|r| r.mode.starts_with("TCP 0x"))
            })?;
            p.await_more()?;
            p.await_left(lab, &c)?;
        }
        if matches!(how, Child::Goes | Child::Elsewhere) {
            lab.node(1).guest()?.touch(&p.until)?;
        } else {
            lab.node(0).check("pkill -KILL -f children.py")?;
        }
        let said = p.client.wait()?;
        let end = said.stdout.lines().last().unwrap_or("");
        let good = match how {
            Child::Goes | Child::Elsewhere => end.starts_with("result eof"),
            _ => end.starts_with("result eof") || end.starts_with("result reset"),
        };
        anyhow::ensure!(good, "{how:?}: {end}\n{}\n{}", said.stderr, c.picture());
    }
    for (n, held) in before.iter().enumerate() {
        c.await_no_more(lab, n, held)?;
    }
    Ok(())
}
