//! Runs real programs, under the shim or bare, with a daemon of their own, in network namespaces
//! where asked: for integration tests, the demo and the benchmarks alike.
//!
//! Everything started here ends when its handle is dropped, whole process groups included. Nothing
//! here decides that a connection was promoted: that is read from the daemon, and callers assert it.

pub mod c;
#[path = "../../daemon/tests/common/cgroup.rs"]
pub mod cgroup;
pub mod containerd;
pub mod daemon;
pub mod departures;
pub mod lines;
pub mod machine;
pub mod node;
pub mod packaged;
pub mod paths;
pub mod peers;
pub mod pod;
pub mod program;
pub mod redis;
pub mod talk;
pub mod tools;
pub mod tshark;
pub mod web;

pub use daemon::Daemon;
pub use pod::Pods;
pub use program::{Output, Place, Program, Running};

use anyhow::{bail, Result};
use std::time::{Duration, Instant};

/// Longest that anything which should happen soon may take. Generous: it only ends a broken run.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// What a test that failed says: the cause before what it led to and what was seen around it, which is long, and no backtrace.
pub fn failed(e: anyhow::Error) -> String {
    let all: Vec<String> = e.chain().rev().map(ToString::to_string).collect();
    all.join("\n")
}

/// Waits until `f` says yes. `what` names the wish in the error.
pub fn until(what: &str, limit: Duration, mut f: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + limit;
    let mut pause = Duration::from_millis(2);
    while !f() {
        if Instant::now() > end {
            bail!("waited {limit:?} in vain: {what}");
        }
        std::thread::sleep(pause);
        pause = (pause * 3 / 2).min(Duration::from_millis(50));
    }
    Ok(())
}

/// A TCP port that nobody listens on in this namespace. Tests run one at a time.
pub fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port())
}

/// Does anybody in this namespace listen on this port? Looks without connecting.
pub fn listening(port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .any(|f| listens_in(&std::fs::read_to_string(f).unwrap_or_default(), &wanted))
}

/// The same in the text of one of these files.
fn listens_in(text: &str, wanted: &str) -> bool {
    text.lines().any(|l| {
        let mut w = l.split_whitespace().skip(1);
        w.next().is_some_and(|a| a.ends_with(wanted)) && w.nth(1) == Some("0A")
    })
}
