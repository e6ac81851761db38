//! Pairs of programs that use verbs by themselves, one in each machine, serving in the first.
//!
//! They sleep while they wait for completions: there are few processors here.

use anyhow::{ensure, Result};
use underpass_tests::harness::{paths, until};
use underpass_tests::lab::{quoted, Family, Lab, Running, PATIENCE};

/// More iterations than a test lasts.
pub const ENDLESS: u32 = 1_000_000_000;

/// The ends of a pair.
pub struct Pair {
    pub server: Running,
    pub client: Running,
}

/// `ibv_rc_pingpong`, which compares what it receives. Its ends find each other by TCP on eth0. Its
/// retry count is 7, and soft-RoCE takes that for "for ever": it survives a rail that is cut.
pub fn ping_pong(lab: &Lab, rail: usize, family: Family, iterations: u32) -> Result<Pair> {
    let port = 18_500 + rail;
    let (a, b) = (lab.node(0), lab.node(1));
    let command = |gid: u32, to: &str| {
        format!(
            "exec ibv_rc_pingpong -d rxe{rail} -g {gid} -p {port} -n {iterations} -s 1000 -e -c {to}"
        )
    };
    let server = a.spawn(command(a.gid_index(rail, family)?, ""))?;
    server.until("the server listens", PATIENCE, || {
        let sockets = a.check(format!("ss -Hltn 'sport = :{port}'"));
        sockets.is_ok_and(|s| !s.is_empty())
    })?;
    let client = b.spawn(command(b.gid_index(rail, family)?, &a.host()))?;
    Ok(Pair { server, client })
}

/// `verbs.py`, for longer than a test lasts. Its retries end: when the rail is cut, so does it.
pub fn impatient(lab: &Lab, rail: usize, family: Family) -> Result<Pair> {
    let (a, b) = (lab.node(0), lab.node(1));
    let script = quoted(&paths::script("verbs.py").to_string_lossy());
    let command = |role: &str, gid: u32| {
        format!(
            "exec {} -u {script} {role} rxe{rail} {gid} 3",
            paths::PYTHON
        )
    };
    let server = a.spawn(command("serve", a.gid_index(rail, family)?))?;
    let port = server.line("port ")?;
    let connect = command("connect", b.gid_index(rail, family)?);
    let client = b.spawn(format!("{connect} {} {port}", a.host()))?;
    client.line("rounds ")?;
    Ok(Pair { server, client })
}

impl Pair {
    /// Both ends of a ping-pong must be content.
    pub fn finish(self) -> Result<()> {
        for end in [self.client, self.server] {
            let said = end.wait()?.ok()?;
            ensure!(said.contains(" iters in "), "{said}");
        }
        Ok(())
    }

    /// Waits until an end has given up, and returns what it said. The other may wait for ever.
    pub fn failed(self) -> Result<String> {
        until("verbs fail", PATIENCE, || {
            self.server.has_ended() || self.client.has_ended()
        })?;
        let ended = if self.client.has_ended() {
            self.client
        } else {
            self.server
        };
        let o = ended.wait()?;
        Ok(o.stdout + &o.stderr)
    }

    pub fn both_run(&self) -> bool {
        !self.server.has_ended() && !self.client.has_ended()
    }
}
