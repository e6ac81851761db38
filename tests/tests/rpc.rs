//! gRPC, which sets `TCP_INQ` on every socket: unary calls and streams, every answer checked.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::peers::result;
use underpass_tests::harness::{Daemon, Program, PATIENCE};

const LIMIT: Duration = Duration::from_secs(90);

/// In the default mode, as anybody would start it.
#[test]
fn grpc_goes_over_lanes() -> Result<()> {
    let d = Daemon::start()?;
    let dir = tempfile::tempdir()?;
    let mut server = Program::packaged_python("rpc.py", &d.place())
        .args(["serve", "127.0.0.1"])
        .spawn()?;
    let port = server.line("port ", PATIENCE)?;
    let client = Program::packaged_python("rpc.py", &d.place())
        .args(["call", "127.0.0.1", &port, "4"])
        .arg(dir.path().join("seen"))
        .spawn()?;
    let seen = dir.path().join("seen");
    let (out, lane, tcp) = d.calls((&server, client), 2, &seen, LIMIT)?;
    let moved = result(&out.stdout)?["bytes"].as_u64().context("bytes")?;
    ensure!(
        lane >= moved / 100 * 95 && lane / 95 * 5 >= tcp,
        "{moved} bytes of calls, {lane} on lanes, {tcp} on TCP\n{}",
        d.picture()
    );
    d.assert_promoted(2, lane)?;
    Ok(())
}
