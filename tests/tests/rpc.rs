//! gRPC, which sets `TCP_INQ` on every socket: unary calls and streams, every answer checked.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::peers::result;
use underpass_tests::harness::{until, Daemon, Program, SOON};

const LIMIT: Duration = Duration::from_secs(90);

/// In the default mode, as anybody would start it.
#[test]
fn grpc_goes_over_lanes() -> Result<()> {
    let d = Daemon::start()?;
    let dir = tempfile::tempdir()?;
    let mut server = Program::packaged_python("rpc.py", &d.place())
        .args(["serve", "127.0.0.1"])
        .spawn()?;
    let port = server.line("port ", SOON)?;
    let mut client = Program::packaged_python("rpc.py", &d.place())
        .args(["call", "127.0.0.1", &port, "4"])
        .arg(dir.path().join("seen"))
        .spawn()?;
    d.await_promoted(2)
        .with_context(|| format!("{}\n{}", server.stderr(), client.stderr()))?;
    until("the calls are made", LIMIT, || {
        client.stdout().contains("result ") || client.has_ended()
    })?;
    let rows = d.ss()?;
    std::fs::write(dir.path().join("seen"), b"")?;
    let out = client.wait(LIMIT)?;
    ensure!(out.status.success(), "{}\n{}", out.stdout, out.stderr);
    let moved = result(&out.stdout)?["bytes"].as_u64().context("bytes")?;
    let (lane, tcp) = rows.iter().fold((0, 0), |(lane, tcp), r| {
        (lane + r.lane_tx_bytes, tcp + r.tcp_tx_bytes)
    });
    ensure!(
        lane >= moved / 100 * 95 && lane / 95 * 5 >= tcp,
        "{moved} bytes of calls, {lane} on lanes, {tcp} on TCP\n{}",
        d.picture()
    );
    d.assert_promoted(2, lane)?;
    Ok(())
}
