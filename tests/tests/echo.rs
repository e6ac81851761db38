//! Python programs of every I/O style, promoted, with every byte compared.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::peers::Echo;
use underpass_tests::harness::{until, Daemon, Place, Program, PATIENCE};

const LIMIT: Duration = Duration::from_secs(120);

/// Both ends of every connection are promoted, and at least `share` percent of the bytes that
/// travelled (each of them there and back) did so on lanes: some go over TCP before the promotion,
/// and while a full ring has sent a direction down.
fn promoted(
    d: &Daemon,
    mode: &str,
    host: &str,
    place: &Place,
    size: [u32; 2],
    share: u64,
) -> Result<()> {
    let [conns, rounds] = size;
    let mut echo = Echo::serve(mode, host, place)?;
    let done = echo.client(place, conns, rounds, None)?.finish(LIMIT);
    let (bytes, _) = done.with_context(|| {
        let ended = echo.server.has_ended();
        format!(
            "server ended: {ended} {}\n{}",
            echo.server.stderr(),
            d.picture()
        )
    })?;
    ensure!(
        bytes > u64::from(conns) * 100_000,
        "only {bytes} bytes were sent"
    );
    d.assert_promoted(u64::from(conns) * 2, bytes * 2 * share / 100)?;
    Ok(())
}

fn eager(mode: &str, host: &str) -> Result<()> {
    let d = Daemon::start()?;
    promoted(&d, mode, host, &d.eager(), [4, 600], 50)
}

/// Hello and its answer, the registration, the memory of both areas (made, mapped, given to the other), the offer:
/// seven datagrams for each of two processes that did not know each other. Two for each end after that, and now and
/// then credits. (Eager ends have the daemon ask for those that are late.)
#[test]
fn first_promotion_takes_14_datagrams() -> Result<()> {
    for (conns, most) in [(1, 14), (5, 14 + 4 * 4 + 2)] {
        let d = Daemon::start()?;
        let echo = Echo::serve("threads", "127.0.0.1", &d.place())?;
        let stop = tempfile::tempdir()?;
        let file = stop.path().join("stop");
        let client = echo.client(&d.place(), conns, 0, Some(&file))?;
        d.await_promoted(2 * conns as usize)?;
        let took = d.stats()?.datagrams;
        ensure!((14..=most).contains(&took), "{took}\n{}", d.picture());
        std::fs::write(&file, b"")?;
        client.finish(LIMIT)?;
    }
    Ok(())
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
    // Not eager: it is the child that is to be promoted, once the parent has closed its copy.
    let d = Daemon::start()?;
    promoted(&d, "fork", "127.0.0.1", &d.place(), [4, 600], 50)
}

/// The sums of `stats` while forked children come and go, and when all have ended: every connection
/// counts once at each end, whether its child closes it or just ends.
#[test]
fn forked_children_are_counted_once() -> Result<()> {
    const CONNS: u32 = 50;
    for mode in ["fork", "vanish"] {
        let d = Daemon::start()?;
        let echo = Echo::serve(mode, "127.0.0.1", &d.place())?;
        let stop = tempfile::tempdir()?;
        let file = stop.path().join("stop");
        let mut client = echo.client(&d.place(), CONNS, 0, Some(&file))?;
        let ends = u64::from(CONNS) * 2;
        d.await_promoted(ends as usize)?;
        until("bytes on lanes", PATIENCE, || {
            d.stats().is_ok_and(|s| s.lane_rx_bytes >= 5_000_000)
        })?;
        let living = d.stats()?;
        ensure!(living.promoted == ends, "{mode}: {living:?}");
        std::fs::write(&file, b"")?;
        while !client.running.has_ended() {
            let s = d.stats()?;
            ensure!(s.promoted == ends, "{mode}: {s:?}");
        }
        let (bytes, _) = client.finish(LIMIT)?;
        // There and back, and a hash at the end.
        let most = bytes * 2 + u64::from(CONNS) * 64;
        let right = |when: &str| {
            let s = d.stats()?;
            ensure!(
                s.promoted == ends
                    && (living.lane_rx_bytes..=most).contains(&s.lane_rx_bytes),
                "{mode}, {when}: {ends} ends, at most {most} bytes, but {s:?}, and before that {living:?}"
            );
            Ok(s.lane_rx_bytes)
        };
        let first = right("at the end")?;
        // The client's table was read for the last time.
        std::thread::sleep(Duration::from_secs(6));
        ensure!(right("later")? == first, "{mode}");
        // The server's parent lives on; nothing of its children is shown.
        let ghosts = d.ss()?.into_iter().filter(|r| r.state == "ACTIVE").count();
        ensure!(ghosts == 0, "{mode}: {ghosts} rows\n{}", d.picture());
        let again = echo.client(&d.place(), 2, 600, None)?.finish(LIMIT)?.0;
        let s = d.stats()?;
        ensure!(
            s.promoted == ends + 4 && s.lane_rx_bytes <= most + again * 2 + 128,
            "{mode}: {s:?}"
        );
    }
    Ok(())
}

/// The parent's first call may already have promoted the connection: then the fork ends that, and
/// nothing is lost.
#[test]
fn accept_then_fork_eager() -> Result<()> {
    let d = Daemon::start()?;
    let echo = Echo::serve("fork", "127.0.0.1", &d.eager())?;
    // The parent registers what it accepts, and closes it: its children get the lanes all the same.
    for round in 1..=5 {
        let stop = tempfile::tempdir()?;
        let file = stop.path().join("stop");
        let client = echo.client(&d.eager(), 4, 0, Some(&file))?;
        let on_lanes = |d: &Daemon| {
            let rows = d.ss().unwrap_or_default();
            rows.iter().filter(|r| r.mode == "SMCD").count() == 8
        };
        until("eight ends on lanes", PATIENCE, || on_lanes(&d))
            .with_context(|| format!("round {round}\n{}", d.picture()))?;
        std::fs::write(&file, b"")?;
        client.finish(LIMIT)?;
    }
    ensure!(d.stats()?.resets == 0, "{}", d.picture());
    Ok(())
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
    promoted(&d, "threads", "127.0.0.1", &d.place(), [4, 600], 50)
}

#[test]
fn promoted_in_use_epoll() -> Result<()> {
    let d = Daemon::start()?;
    promoted(&d, "epoll", "127.0.0.1", &d.place(), [4, 600], 50)
}

/// Rings of one page: every message wraps, fills the ring, waits for space. A ring that stays full
/// goes down for a while, so that how much travels on it depends on who runs when.
#[test]
fn tiny_rings() -> Result<()> {
    let d = Daemon::with(&["--ring-log2", "12", "--ring-max-log2", "12"])?;
    promoted(&d, "threads", "127.0.0.1", &d.eager(), [3, 1200], 2)
}

#[test]
fn tiny_rings_epoll() -> Result<()> {
    let d = Daemon::with(&["--ring-log2", "12", "--ring-max-log2", "12"])?;
    promoted(&d, "epoll", "127.0.0.1", &d.eager(), [3, 1200], 2)
}

/// Many connections on one link group.
#[test]
fn many_connections() -> Result<()> {
    let d = Daemon::start()?;
    promoted(&d, "epoll", "127.0.0.1", &d.eager(), [60, 60], 50)
}

/// Three thousand connections, one after the other on thirty-two places of one set, promoted while
/// they are busy: an event is never told twice, nor without something to read.
#[test]
fn epoll_events_are_true() -> Result<()> {
    let d = Daemon::start()?;
    let mut server = Program::python("busy_epoll.py", &d.place())
        .arg("serve")
        .spawn()?;
    let port = server.line("port ", LIMIT)?;
    let out = Program::python("busy_epoll.py", &d.place())
        .words(&format!("client {port} 3000"))
        .run(LIMIT)?;
    let served = server.wait(LIMIT)?; // ends with its last connection
    ensure!(
        out.status.success() && served.status.success(),
        "client: {}\nserver: {}",
        out.stderr,
        served.stderr
    );
    d.assert_promoted(1500, 3_000_000)?;
    Ok(())
}

/// Children that exit without closing leave entries of the family table behind: they are used again.
#[test]
fn forked_children_leave_no_entries() -> Result<()> {
    let d = Daemon::start()?;
    let mut server = Program::python("forking.py", &d.place())
        .arg("serve")
        .spawn()?;
    let port = server.line("port ", LIMIT)?;
    Program::python("forking.py", &d.place())
        .words(&format!("client {port} 200"))
        .check(LIMIT)?;
    let used = entries_used(server.pid())?;
    ensure!(used < 60, "{used} entries for one connection at a time");
    d.assert_promoted(100, 0)?;
    Ok(())
}

/// How far the family table of a process was ever filled.
fn entries_used(pid: u32) -> Result<u32> {
    use std::os::unix::fs::FileExt;
    for fd in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = fd?.path();
        let name = std::fs::read_link(&path).unwrap_or_default();
        if name.to_string_lossy().contains("underpass-family") {
            let mut b = [0; 4];
            let at = std::mem::offset_of!(lane::family::Header, used) as u64;
            std::fs::File::open(path)?.read_exact_at(&mut b, at)?;
            return Ok(u32::from_ne_bytes(b));
        }
    }
    anyhow::bail!("process {pid} has no family table")
}
