//! Connections between two nodes that have no lanes, and what both ends must know of each other.

use super::node::Node;
use super::peers::{Echo, EchoClient};
use anyhow::{ensure, Context, Result};
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// Connections that last until they are told to end.
pub struct Talk {
    client: EchoClient,
    _server: Echo,
    stop: PathBuf,
    _dir: tempfile::TempDir,
}

impl Talk {
    pub fn between(a: &Node, b: &Node, n: u32) -> Result<Talk> {
        Talk::to(a, b, n, |_| Ok((b.addr(), None)))
    }

    /// Through the address (and port, if it is another one) that `way` says for the server's port.
    pub fn to(
        a: &Node,
        b: &Node,
        n: u32,
        way: impl FnOnce(u16) -> Result<(String, Option<u16>)>,
    ) -> Result<Talk> {
        let server = Echo::serve("epoll", &b.addr(), &b.place())?;
        let dir = tempfile::tempdir()?;
        let stop = dir.path().join("stop");
        let (host, port) = way(server.port()?)?;
        let port = port.unwrap_or(server.port()?);
        let client = server.client_to(&host, port, &a.place(), n, 0, Some(&stop))?;
        Ok(Talk {
            client,
            _server: server,
            stop,
            _dir: dir,
        })
    }

    /// Every byte must have come back.
    pub fn end(self) -> Result<()> {
        std::fs::write(&self.stop, b"")?;
        self.client.finish(LIMIT)?;
        Ok(())
    }
}

pub const NO_LANES: &str = "no-rdma-device";

/// Both ends of `n` connections are found, and both say that there is no device.
pub fn found(a: &Node, b: &Node, n: usize) -> Result<()> {
    a.await_reasons(n, NO_LANES, NO_LANES)
        .with_context(|| b.picture())?;
    b.await_reasons(n, NO_LANES, NO_LANES)
        .with_context(|| a.picture())
}

pub fn check_pair(a: &Node, b: &Node) -> Result<()> {
    let before = (a.paired()?, b.paired()?);
    let t = Talk::between(a, b, 2)?;
    found(a, b, 2)?;
    t.end()?;
    ensure!(a.paired()? >= before.0 + 2 && b.paired()? >= before.1 + 2);
    Ok(())
}
