//! Python programs of every I/O style, promoted, with every byte compared.

use anyhow::{ensure, Result};
use std::time::Duration;
use underpass_tests::harness::peers::Echo;
use underpass_tests::harness::{Daemon, Place};

const LIMIT: Duration = Duration::from_secs(120);

/// Both ends of every connection are promoted, and most bytes went over lanes.
fn promoted(
    d: &Daemon,
    mode: &str,
    host: &str,
    place: &Place,
    conns: u32,
    rounds: u32,
) -> Result<()> {
    let echo = Echo::serve(mode, host, place)?;
    let (bytes, _) = echo.client(place, conns, rounds, None)?.finish(LIMIT)?;
    ensure!(
        bytes > u64::from(conns) * 100_000,
        "only {bytes} bytes were sent"
    );
    // Each byte travels there and back; some travel on TCP before the promotion, or while a full
    // ring sent a direction down.
    d.assert_promoted(u64::from(conns) * 2, bytes)?;
    Ok(())
}

fn eager(mode: &str, host: &str) -> Result<()> {
    let d = Daemon::start()?;
    promoted(&d, mode, host, &d.eager(), 4, 120)
}

#[test]
fn threads() -> Result<()> {
    eager("threads", "127.0.0.1")
}

#[test]
fn threads_ipv6() -> Result<()> {
    eager("threads", "::1")
}

#[test]
fn accept_then_fork() -> Result<()> {
    eager("fork", "127.0.0.1")
}

#[test]
fn epoll() -> Result<()> {
    eager("epoll", "127.0.0.1")
}

#[test]
fn epoll_ipv6() -> Result<()> {
    eager("epoll", "::1")
}

#[test]
fn epoll_edge() -> Result<()> {
    eager("edge", "127.0.0.1")
}

#[test]
fn poll() -> Result<()> {
    eager("poll", "127.0.0.1")
}

#[test]
fn select() -> Result<()> {
    eager("select", "127.0.0.1")
}

/// By the usual rules: promoted after some calls, without being told to.
#[test]
fn promoted_in_use() -> Result<()> {
    let d = Daemon::start()?;
    promoted(&d, "threads", "127.0.0.1", &d.place(), 4, 300)
}

#[test]
fn promoted_in_use_epoll() -> Result<()> {
    let d = Daemon::start()?;
    promoted(&d, "epoll", "127.0.0.1", &d.place(), 4, 300)
}

/// Rings of one page: every message wraps, fills the ring, waits for space.
#[test]
fn tiny_rings() -> Result<()> {
    let d = Daemon::with(&["--ring-log2", "12", "--ring-max-log2", "12"])?;
    promoted(&d, "threads", "127.0.0.1", &d.eager(), 3, 100)
}

#[test]
fn tiny_rings_epoll() -> Result<()> {
    let d = Daemon::with(&["--ring-log2", "12", "--ring-max-log2", "12"])?;
    promoted(&d, "epoll", "127.0.0.1", &d.eager(), 3, 100)
}

/// Many connections on one link.
#[test]
fn many_connections() -> Result<()> {
    let d = Daemon::start()?;
    promoted(&d, "epoll", "127.0.0.1", &d.eager(), 60, 20)
}
