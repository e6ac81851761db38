//! How programs close their connections: with SO_LINGER, and where no hook sees it.

use anyhow::{ensure, Context, Result};
use underpass_tests::harness::paths;
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::streams::{Env, CLIENT, SERVER};
use underpass_tests::lab::{quoted, Lab, Running, PATIENCE};

/// What comes of a close.
#[derive(Debug)]
struct Closed {
    sent: u64,
    took: f64,
    /// Something was not acknowledged when it returned.
    outstanding: bool,
    handled: u64,
}

/// `closes.py` on both nodes, the closing end on the second one.
struct Pair {
    server: Running,
    client: Running,
    port: u16,
    gate: String,
    done: String,
}

impl Pair {
    fn start(lab: &Lab, way: &str, env: &[Env; 2]) -> Result<Self> {
        let program = paths::script("closes.py");
        let python = format!("{} {}", paths::PYTHON, quoted(&program.to_string_lossy()));
        let [a, b] = [0, 1].map(|n| lab.node(n));
        let host = a.host();
        let how = if env[CLIENT].is_empty() {
            "bare"
        } else {
            "shim"
        };
        let [gate, done] = ["gate", "done"].map(|f| format!("/run/closes-{way}-{how}.{f}"));
        let server = a.sh(format!("exec {python} serve {host}"))?;
        let server = server
            .envs(env[SERVER].clone())
            .limit(2 * PATIENCE)
            .spawn()?;
        let port = server.line("port ")?.parse()?;
        let client = b.sh(format!("exec {python} {way} {host} {port} {gate} {done}"))?;
        let client = client.envs(env[CLIENT].clone()).spawn()?;
        client.line("connected")?;
        Ok(Pair {
            server,
            client,
            port,
            gate,
            done,
        })
    }

    /// Nothing is under way until [`close`](Self::close): what it sends last is all that a loss can meet.
    fn pause(&self, lab: &Lab) -> Result<()> {
        lab.node(1).guest()?.touch(&self.gate)?;
        self.client.line("paused").map(drop)
    }

    /// Lets it send its last, and close.
    fn close(&self, lab: &Lab) -> Result<()> {
        lab.node(1).check(format!("rm {}", self.gate)).map(drop)
    }

    fn closed(&self) -> Result<Closed> {
        let told = self.client.line("result ")?;
        let v: serde_json::Value = serde_json::from_str(&told)?;
        Ok(Closed {
            sent: v["sent"].as_u64().context("sent")?,
            took: v["took"].as_f64().context("took")?,
            outstanding: v["outstanding"].as_bool().context("outstanding")?,
            handled: v["handled"].as_u64().context("handled")?,
        })
    }

    /// The other end has all of it, and the end of the stream, while the program lives.
    fn arrives(&self, c: &Cluster, sent: u64) -> Result<()> {
        let got = self.server.line("got ").with_context(|| c.picture())?;
        ensure!(got == format!("{sent} eof"), "{got}, of {sent}");
        ensure!(!self.client.has_ended(), "it has ended");
        Ok(())
    }

    fn end(self, lab: &Lab) -> Result<()> {
        lab.node(1).guest()?.touch(&self.done)?;
        self.client.wait()?;
        Ok(())
    }
}

/// What is sent on TCP to this port does not arrive any more.
fn lose(lab: &Lab, port: u16) -> Result<()> {
    lab.node(0).check(format!(
        "nft add table inet lab
         nft 'add chain inet lab input {{ type filter hook input priority 0; }}'
         nft add rule inet lab input tcp dport {port} drop"
    ))?;
    Ok(())
}

/// Two closes of the same kind, on plain TCP and on RDMA: what is the same of them is looked at by `f`.
fn both_ways(lab: &Lab, c: &Cluster, way: &str, f: impl Fn(&Pair) -> Result<()>) -> Result<()> {
    for env in [[vec![], vec![]], c.eager()] {
        let shim = !env[0].is_empty();
        let p = Pair::start(lab, way, &env)?;
        if shim {
            c.await_smcr_one_way(p.port, 1)?;
        }
        p.pause(lab)?;
        f(&p).with_context(|| format!("{way}, {}", if shim { "on RDMA" } else { "bare" }))?;
        p.end(lab)?;
    }
    Ok(())
}

/// A close with SO_LINGER waits until everything is acknowledged, for its time, or until a signal, in whatever way
/// it is made; the end of a process, and `shutdown`, do not wait.
pub fn closes_that_linger(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    for way in ["close", "nonblocking", "dup2", "range"] {
        both_ways(lab, &c, way, |p| {
            p.close(lab)?;
            let closed = p.closed()?;
            ensure!(!closed.outstanding, "it did not wait: {closed:?}");
            p.arrives(&c, closed.sent)
        })?;
    }
    for way in ["timeout", "signal", "shut"] {
        both_ways(lab, &c, way, |p| {
            lose(lab, p.port)?;
            p.close(lab)?;
            let closed = p.closed()?;
            ensure!(
                closed.outstanding,
                "it was lost, and acknowledged: {closed:?}"
            );
            ensure!(way != "timeout" || closed.took >= 1.0, "{closed:?}");
            ensure!((way == "signal") == (closed.handled > 0), "{closed:?}");
            lab.node(0).check("nft delete table inet lab")?;
            p.arrives(&c, closed.sent)
        })?;
    }
    both_ways(lab, &c, "exit", |p| {
        lose(lab, p.port)?;
        p.close(lab)?;
        p.client
            .until("its end", PATIENCE, || p.client.has_ended())?;
        lab.node(0).check("nft delete table inet lab")?;
        Ok(())
    })?;
    c.no_resets()
}

/// Closed by an inlined system call, which no hook sees; the program lives on.
pub fn closes_nobody_sees(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    both_ways(lab, &c, "raw", |p| {
        p.close(lab)?;
        p.arrives(&c, p.closed()?.sent)
    })?;
    c.no_resets()
}
