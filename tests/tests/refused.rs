//! A daemon that refuses a program: its connections say why they are on TCP.

use anyhow::{ensure, Context, Result};
use lane::family::{state, TABLE_BYTES};
use lane::proto::msg::{ToDaemon, ToShim, MAX};
use lane::proto::reason::Reason;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;
use underpass_tests::harness::peers::Echo;
use underpass_tests::harness::{until, Daemon, Place, PATIENCE};
use underpassd::clients::family::Family;
use underpassd::os::fds::Foreign;
use underpassd::os::wire::{self, Incoming};

/// Refuses everybody, and hands out the tables that it is shown.
fn refusing(dir: &Path, reason: Reason) -> Result<mpsc::Receiver<Family>> {
    let sock = underpassd::tasks::server::listen(&dir.join("control.sock"))?;
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || loop {
        use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
        let wait = |fd: &OwnedFd| {
            let mut p = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
            poll(&mut p, PollTimeout::NONE).is_ok()
        };
        if !wait(&sock) {
            return;
        }
        let raw = nix::sys::socket::accept(std::os::fd::AsRawFd::as_raw_fd(&sock));
        let Ok(raw) = raw else { continue };
        // SAFETY: just accepted, nobody else has it.
        let conn = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(raw) };
        let mut buf = [0; MAX];
        wait(&conn);
        let conn = Foreign::new(conn);
        let Ok(Incoming::Message { len, fds, .. }) = wire::recv(&conn, &mut buf) else {
            continue;
        };
        let hello = ToDaemon::decode(&buf[..len]);
        if let (Ok(ToDaemon::Hello { .. }), Some(table)) = (hello, fds.into_iter().next()) {
            if let Some(ident) = underpassd::os::memfd::check_fixed(&table, TABLE_BYTES) {
                let _ = tx.send(Family::new(ident, table));
            }
        }
        let reason = reason.code();
        let n = ToShim::Refused { reason }.encode(&mut buf);
        let _ = wire::send(conn.as_fd(), &buf[..n], &[]);
    });
    Ok(rx)
}

#[test]
fn the_reason_is_shown_at_every_connection() -> Result<()> {
    for reason in [Reason::VersionMismatch, Reason::Limit] {
        let dir = tempfile::tempdir()?;
        let tables = refusing(dir.path(), reason)?;
        let place = Place::shim(dir.path());
        let stop = tempfile::tempdir()?;
        let file = stop.path().join("stop");
        let server = Echo::serve("epoll", "127.0.0.1", &place)?;
        let client = server.client(&place, 2, 0, Some(&file))?;
        for _ in 0..2 {
            let table = tables.recv_timeout(PATIENCE)?;
            until("both connections say why", PATIENCE, || {
                let rows = table.views();
                let open = rows.iter().filter(|v| v.state == state::OPEN);
                open.filter(|v| v.reason == reason.code()).count() == 2
            })
            .with_context(|| format!("{reason:?} {:#?}", table.views()))?;
        }
        std::fs::write(&file, b"")?;
        client.finish(Duration::from_secs(60))?;
    }
    Ok(())
}

/// A limit in the configuration; and a restarted daemon, which may admit it, shows what it said.
#[test]
fn a_limit_is_shown() -> Result<()> {
    let config = tempfile::NamedTempFile::new()?;
    std::fs::write(config.path(), "[limits]\nprocesses = 1\n")?;
    let mut d = Daemon::with(&["--config", &config.path().to_string_lossy()])?;
    let stop = tempfile::tempdir()?;
    let file = stop.path().join("stop");
    let server = Echo::serve("epoll", "127.0.0.1", &d.place())?;
    let client = server.client(&d.place(), 2, 0, Some(&file))?;
    until("one was refused", PATIENCE, || d.said().contains("limit"))?;
    std::thread::sleep(Duration::from_millis(300)); // some rounds more, so that it has noticed
    std::fs::write(config.path(), "")?;
    d.restart()?;
    let rows = d.ss()?;
    let limited = rows.iter().filter(|r| r.reason == Reason::Limit.code());
    ensure!(limited.count() == 2, "{rows:#?}\n{}", d.picture());
    std::fs::write(&file, b"")?;
    client.finish(Duration::from_secs(60))?;
    Ok(())
}
