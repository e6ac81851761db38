//! What was just built, in the machines.

use crate::programs::Transfer;
use anyhow::{ensure, Context, Result};
use lane::proto::reason::Reason;
use underpass_tests::harness::paths;
use underpass_tests::lab::daemon::Daemon;
use underpass_tests::lab::{quoted, Family, Lab};

/// Two programs of one machine are promoted there as on any node, with the BPF proof.
pub fn same_node_lanes(lab: &mut Lab) -> Result<()> {
    let node = lab.node(0);
    let d = Daemon::start(node, "")?;
    ensure!(d.stats()?.proof, "no BPF proof: {}", d.picture());
    let echo = format!(
        "exec {} -u {}",
        paths::PYTHON,
        quoted(&paths::script("echo.py").to_string_lossy())
    );
    let server = node.sh(format!("{echo} serve epoll 127.0.0.1"))?;
    let server = server.envs(d.eager()).spawn()?;
    let port = server.line("port ")?;
    let client = node.sh(format!("{echo} client 127.0.0.1 {port} 2 0 /run/echo-stop"))?;
    let client = client.envs(d.eager()).spawn()?;
    d.await_ss("four ends are promoted", |rows| {
        let up = |r: &&underpass_admin::Row| r.mode == "SMCD" && r.up == "both";
        rows.iter().filter(up).count() == 4
    })?;
    let shown = d.tool("ss")?;
    ensure!(shown.matches(" SMCD").count() == 4, "{shown}");
    node.check("touch /run/echo-stop")?;
    let said = crate::programs::result(&client.wait()?)?;
    ensure!(
        said["errors"].as_array().is_some_and(Vec::is_empty),
        "{said}"
    );
    let bytes = said["bytes"].as_u64().context("bytes")?;
    let s = d.stats()?;
    ensure!(
        s.promoted == 4 && s.resets == 0 && s.lane_tx_bytes > 0,
        "{}",
        d.picture()
    );
    ensure!(bytes > 0, "{said}");
    Ok(())
}

/// Two programs of two machines, each under the shim of its own node: TCP, a reason, and the bytes.
pub fn across_nodes_stays_on_tcp(lab: &mut Lab) -> Result<()> {
    let daemons = [
        Daemon::start(lab.node(0), "")?,
        Daemon::start(lab.node(1), "")?,
    ];
    for family in [Family::V4, Family::V6] {
        let t = Transfer::start(lab, family, [daemons[0].eager(), daemons[1].eager()])?;
        t.await_bytes(2 << 20)?;
        for d in &daemons {
            d.await_ss("one connection, on TCP with a reason", |rows| {
                let mut ends = rows.iter().filter(|r| r.state == "ACTIVE");
                let one = ends.next().is_some_and(|r| {
                    r.mode.starts_with("TCP 0x") && r.reason == Reason::Waiting.code()
                });
                one && ends.next().is_none()
            })?;
        }
        let moved = t.finish(lab)?;
        ensure!(moved.iter().all(|&n| n >= 2 << 20), "{moved:?}");
    }
    for d in &daemons {
        let s = d.stats()?;
        ensure!(
            s.promoted == 0 && s.paired == 0 && s.resets == 0,
            "{}",
            d.picture()
        );
    }
    Ok(())
}
