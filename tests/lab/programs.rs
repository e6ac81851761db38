//! Pairs of unmodified programs over TCP, one in each machine.

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use std::sync::atomic::{AtomicU32, Ordering};
use underpass_tests::harness::{paths, until};
use underpass_tests::lab::{quoted, End, Family, Lab, Output, Running, PATIENCE};

/// `transfer.py` in two machines: both ends send noise all the time, and hash it.
pub struct Transfer {
    server: Running,
    client: Running,
    stop: String,
}

impl Transfer {
    /// The environments decide whether the ends run under the shim.
    pub fn start(lab: &Lab, family: Family, env: [Vec<(String, String)>; 2]) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let stop = format!("/run/stop{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let script = quoted(&paths::script("transfer.py").to_string_lossy());
        let python = format!("exec {} -u {script}", paths::PYTHON);
        let [at, to] = env;
        let host = lab.node(0).address(0, family);
        let server = lab.node(0).sh(format!("{python} serve {host}"))?;
        let server = server.envs(at).spawn()?;
        let port = server.line("port ")?;
        let client = lab
            .node(1)
            .sh(format!("{python} connect {host} {port} {stop}"))?;
        Ok(Transfer {
            server,
            client: client.envs(to).spawn()?,
            stop,
        })
    }

    /// Waits until each end has sent so many bytes.
    pub fn await_bytes(&self, bytes: u64) -> Result<()> {
        for end in [&self.client, &self.server] {
            let sent = || -> Option<u64> {
                let said = end.stdout();
                said.lines()
                    .rev()
                    .find_map(|l| l.strip_prefix("sent ")?.parse().ok())
            };
            end.until("bytes are sent", PATIENCE, || sent() >= Some(bytes))?;
        }
        Ok(())
    }

    /// Ends it; each end must have received what the other has sent.
    pub fn finish(self, lab: &Lab) -> Result<[u64; 2]> {
        lab.node(1).check(format!("touch {}", self.stop))?;
        let ends = [self.server.wait()?, self.client.wait()?];
        let [s, c] = [result(&ends[0])?, result(&ends[1])?];
        ensure!(
            s["sent"] == c["received"] && s["received"] == c["sent"] && s["sent"] != c["sent"],
            "bytes differ: {s} {c}"
        );
        let bytes = |v: &Value| v["sent_bytes"].as_u64().context("sent_bytes");
        Ok([bytes(&s)?, bytes(&c)?])
    }
}

/// The JSON after `result `, of a program that must have succeeded.
pub fn result(o: &Output) -> Result<Value> {
    ensure!(o.end == End::Code(0), "{o:?}");
    let line = o.stdout.lines().find_map(|l| l.strip_prefix("result "));
    Ok(serde_json::from_str(line.context("no result")?)?)
}

pub fn tcp_between_machines(lab: &mut Lab) -> Result<()> {
    for family in [Family::V4, Family::V6] {
        let t = Transfer::start(lab, family, [vec![], vec![]])?;
        t.await_bytes(4 << 20)?;
        let moved = t.finish(lab)?;
        ensure!(moved.iter().all(|&n| n >= 4 << 20), "{moved:?}");
    }
    Ok(())
}

/// Waits until the first machine's pings on a wire are answered, or no longer are.
pub fn await_ping(lab: &Lab, wire: usize, answered: bool) -> Result<()> {
    let to = lab.node(1).address(wire, Family::V4);
    let what = format!("{to} answers: {answered}");
    until(&what, PATIENCE, || {
        let ping = format!("/bin/busybox ping -c 1 -W 1 {to} >/dev/null && echo yes || echo no");
        let said = lab.node(0).check(ping);
        said.is_ok_and(|s| (s.trim() == "yes") == answered)
    })
}
