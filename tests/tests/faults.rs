//! The daemon absent, stopped, killed; operators at work; the shim told to stay away.

use anyhow::{ensure, Context, Result};
use lane::proto::reason::Reason;
use std::time::Duration;
use underpass_admin::{Row, Target};
use underpass_tests::harness::peers::{Echo, Transfer};
use underpass_tests::harness::{paths, until, Daemon, Place, Program, PATIENCE};

const LIMIT: Duration = Duration::from_secs(120);

fn echo(place: &Place, conns: u32, rounds: u32) -> Result<u64> {
    let e = Echo::serve("epoll", "127.0.0.1", place)?;
    Ok(e.client(place, conns, rounds, None)?.finish(LIMIT)?.0)
}

/// No daemon: plain TCP. Once there is one, the same processes are promoted.
#[test]
fn daemon_absent() -> Result<()> {
    let mut d = Daemon::absent()?;
    echo(&d.place(), 4, 100)?;
    echo(&d.eager(), 4, 600)?;

    let server = Echo::serve("threads", "127.0.0.1", &d.place())?;
    let stop = tempfile::tempdir()?;
    let file = stop.path().join("stop");
    let client = server.client(&d.place(), 2, 0, Some(&file))?;
    std::thread::sleep(Duration::from_millis(200)); // some rounds without a daemon; right without, too
    d.restart()?;
    d.await_promoted(4)?;
    std::fs::write(&file, b"")?;
    client.finish(LIMIT)?;
    d.assert_promoted(4, 1000)?;
    Ok(())
}

/// A daemon that is stopped holds nobody up, neither new connections nor promoted ones.
#[test]
fn daemon_stopped() -> Result<()> {
    let d = Daemon::start()?;
    let mut t = Transfer::start(&d.place(), &d.place(), "127.0.0.1")?;
    d.await_promoted(2)?;
    d.freeze()?;
    echo(&d.place(), 4, 100)?;
    echo(&d.eager(), 4, 600)?;
    ensure!(t.alive(), "transfer ended");
    d.thaw()?;
    let before = d.stats()?.promoted;
    let bytes = echo(&d.eager(), 4, 600)?;
    d.assert_promoted(before + 8, bytes)?;
    let moved = t.finish(LIMIT)?;
    ensure!(moved.forth > 0 && moved.back > 0);
    Ok(())
}

/// `kill -9` of the daemon leaves every lane running; after its restart it sees them all again,
/// and new connections are promoted.
#[test]
fn daemon_killed_and_restarted() -> Result<()> {
    let mut d = Daemon::start()?;
    let mut t = Transfer::start(&d.place(), &d.place(), "127.0.0.1")?;
    d.await_promoted(2)?;
    for round in 0..5 {
        d.kill();
        t.await_sent(20 << 20)
            .with_context(|| format!("daemon dead, round {round}"))?;
        ensure!(t.alive(), "transfer ended in round {round}");
        d.restart()?;
        d.await_lanes(2)?;
        // The lanes have been in use all the time.
        let before = d.lane_bytes_now();
        until("bytes flow on lanes", PATIENCE, || {
            d.lane_bytes_now() > before + (10 << 20)
        })
        .with_context(|| d.picture())?;
        let promoted = d.stats()?.promoted;
        let bytes = echo(&d.eager(), 2, 600)?;
        d.assert_promoted(promoted + 4, bytes)?;
    }
    let moved = t.finish(LIMIT)?;
    ensure!(moved.forth + moved.back > 50 << 20, "{moved:?}");
    Ok(())
}

/// The daemon dies owing a process an answer to everything that it may ask, and no connection that was
/// asked for is left: the process finds the next daemon all the same.
#[test]
fn daemon_killed_with_all_credits_out() -> Result<()> {
    let mut d = Daemon::start()?;
    let echo = Echo::serve("threads", "127.0.0.1", &d.eager())?;
    // The server gets its credits. It has sixteen, and these use them up.
    echo.client(&d.eager(), 1, 600, None)?.finish(LIMIT)?;
    d.assert_promoted(2, 1000)?;
    d.freeze()?;
    echo.client(&d.eager(), 40, 20, None)?.finish(LIMIT)?;
    let stop = tempfile::tempdir()?;
    let file = stop.path().join("stop");
    let late = echo.client(&d.eager(), 4, 0, Some(&file))?;
    std::thread::sleep(Duration::from_millis(300)); // they are refused a registration; right without
    d.kill();
    d.restart()?;
    d.await_promoted(8).with_context(|| d.picture())?;
    std::fs::write(&file, b"")?;
    late.finish(LIMIT)?;
    Ok(())
}

/// The daemon dies while a process is in no hook that would notice, owes it nothing and has told it
/// nothing that it has not heard: its next registration notices.
#[test]
fn daemon_killed_while_nothing_is_registered() -> Result<()> {
    let mut d = Daemon::start()?;
    let echo = Echo::serve("threads", "127.0.0.1", &d.place())?;
    for round in 0..3 {
        let before = d.stats()?.promoted;
        echo.client(&d.eager(), 1, 600, None)?.finish(LIMIT)?;
        d.assert_promoted(before + 2, 1000)
            .with_context(|| format!("round {round}\n{}", d.picture()))?;
        until("the lane is gone", PATIENCE, || {
            d.stats().is_ok_and(|s| s.links == 0)
        })?;
        // The server hears of that. Too little for a registration.
        echo.client(&Place::bare(), 1, 2, None)?.finish(LIMIT)?;
        d.kill();
        d.restart()?;
    }
    Ok(())
}

/// A program that is inside no hooked call when the daemon starts again, and will be in none for an
/// hour, is shown at once all the same.
#[test]
fn a_sleeping_program_is_in_the_first_view() -> Result<()> {
    let script = "import socket,time\n\
        l=socket.create_server(('127.0.0.1',0)); a=socket.create_connection(l.getsockname())\n\
        b,_=l.accept()\n\
        for _ in range(300):\n\
        \x20a.sendall(b'x'); b.recv(1); b.sendall(b'y'); a.recv(1); time.sleep(0.001)\n\
        print('asleep', flush=True); time.sleep(3600)\n";
    let mut d = Daemon::start()?;
    let place = d.place();
    let mut p = Program::new(paths::PYTHON, &place)
        .args(["-c", script])
        .spawn()?;
    p.line("asleep", PATIENCE)?;
    let view = |d: &Daemon| -> Result<Vec<_>> {
        let rows = d.ss()?.into_iter().filter(|r| r.pid == p.pid());
        let mut rows: Vec<_> = rows.map(|r| (r.inode, r.mode, r.lane_tx_bytes)).collect();
        rows.sort();
        Ok(rows)
    };
    let before = view(&d)?;
    ensure!(before.len() == 3, "{before:?}\n{}", d.picture());
    for _ in 0..2 {
        d.kill();
        d.restart()?;
        let after = view(&d)?;
        ensure!(after == before, "{before:?}\n{after:?}");
    }
    ensure!(d.stats()?.clients == 0, "it sleeps");
    Ok(())
}

/// Down and up again and again, while both directions are busy.
#[test]
fn down_and_up() -> Result<()> {
    let d = Daemon::start()?;
    let mut t = Transfer::start(&d.place(), &d.place(), "127.0.0.1")?;
    d.await_promoted(2)?;
    let rows = d.ss()?;
    let row = rows
        .iter()
        .find(|r| r.state == "ACTIVE")
        .context("no row")?;
    ensure!(row.tx_ring_bytes >= 1 << 16, "{row:?}");
    let targets = [
        Target::All,
        Target::Pid(row.pid),
        Target::Inode(row.inode),
        Target::Pair {
            local: row.local.clone(),
            peer: row.peer.clone(),
        },
    ];
    let before = d.stats()?;
    for round in 0..12 {
        let target = &targets[round % targets.len()];
        ensure!(d.down(target.clone())? >= 1, "nobody was told: {target:?}");
        let down = || {
            d.ss().is_ok_and(|rows| {
                rows.iter()
                    .filter(|r| r.state == "ACTIVE")
                    .all(|r| r.up == "none")
            })
        };
        until("both directions are down", PATIENCE, down)
            .with_context(|| format!("{target:?}\n{}", d.picture()))?;
        t.await_sent(5 << 20)
            .with_context(|| format!("{target:?}"))?;
        ensure!(t.alive(), "transfer ended, round {round}");
        let ups = d.stats()?.ups;
        ensure!(d.up(target.clone())? >= 1, "nobody was told: {target:?}");
        d.await_ups(ups + 2)
            .with_context(|| format!("{target:?}"))?;
    }
    let after = d.stats()?;
    ensure!(
        after.downs >= before.downs + 24 && after.ups >= before.ups + 24,
        "{before:?}\n{after:?}"
    );
    let moved = t.finish(LIMIT)?;
    ensure!(moved.forth > 0 && moved.back > 0);
    d.assert_promoted(2, 1 << 20)?;
    Ok(())
}

/// The same with many connections of an event loop, and messages whose every byte is compared.
#[test]
fn down_and_up_event_loop() -> Result<()> {
    for mode in ["epoll", "edge", "threads"] {
        let d = Daemon::start()?;
        let e = Echo::serve(mode, "127.0.0.1", &d.eager())?;
        let stop = tempfile::tempdir()?;
        let file = stop.path().join("stop");
        let client = e.client(&d.eager(), 6, 0, Some(&file))?;
        for _ in 0..15 {
            d.await_promoted(12).with_context(|| mode.to_string())?;
            d.down(Target::All)?;
            until("all are down", PATIENCE, || d.promoted_now() == 0)
                .with_context(|| d.picture())?;
            d.up(Target::All)?;
        }
        d.await_promoted(12)?;
        std::fs::write(&file, b"")?;
        client
            .finish(LIMIT)
            .with_context(|| format!("{mode}\n{}", d.picture()))?;
        d.assert_promoted(12, 1 << 20)?;
    }
    Ok(())
}

/// Everything at once: a daemon that dies, operators, and event loops.
#[test]
fn daemon_dies_between_down_and_up() -> Result<()> {
    let mut d = Daemon::start()?;
    let e = Echo::serve("epoll", "127.0.0.1", &d.place())?;
    let stop = tempfile::tempdir()?;
    let file = stop.path().join("stop");
    let client = e.client(&d.place(), 4, 0, Some(&file))?;
    for _ in 0..5 {
        d.await_promoted(8)?;
        d.down(Target::All)?;
        d.restart()?;
        until("held or down", PATIENCE, || {
            d.up(Target::All).is_ok_and(|n| n >= 8)
        })
        .with_context(|| d.picture())?;
    }
    d.await_promoted(8)?;
    // (The sums are those of the last daemon, which found these connections promoted.)
    let carried = d.lane_bytes_now();
    ensure!(carried > 1 << 20, "{carried}\n{}", d.picture());
    std::fs::write(&file, b"")?;
    client.finish(LIMIT)?;
    d.assert_promoted(0, 0)?;
    Ok(())
}

/// `UNDERPASS=off` on either side is as if the shim were not there.
#[test]
fn off() -> Result<()> {
    let d = Daemon::start()?;
    echo(&d.place().off(), 4, 100)?;
    let server = Echo::serve("threads", "127.0.0.1", &d.eager())?;
    server
        .client(&d.place().off(), 4, 100, None)?
        .finish(LIMIT)?;
    let s = d.stats()?;
    ensure!(s.promoted == 0 && s.lanes == 0, "{s:?}");
    let bytes = server.client(&d.eager(), 4, 600, None)?.finish(LIMIT)?.0;
    d.assert_promoted(8, bytes)?;
    Ok(())
}

/// One end without the shim: TCP, with a reason on the end that has it.
#[test]
fn peer_without_a_shim_has_a_reason() -> Result<()> {
    let d = Daemon::start()?;
    let e = Echo::serve("epoll", "127.0.0.1", &d.place())?;
    let stop = tempfile::tempdir()?;
    let file = stop.path().join("stop");
    let client = e.client(&Place::bare(), 3, 0, Some(&file))?;
    until("the server's ends show a reason", PATIENCE, || {
        let rows = d.ss().unwrap_or_default();
        rows.iter()
            .filter(|r| r.state == "ACTIVE" && r.mode.starts_with("TCP 0x") && r.reason != 0)
            .count()
            == 3
    })
    .with_context(|| d.picture())?;
    std::fs::write(&file, b"")?;
    client.finish(LIMIT)?;
    ensure!(d.stats()?.promoted == 0);
    Ok(())
}

/// A limit on the size of files, which would kill whoever makes our table (SIGXFSZ), or on address space, which the
/// program would miss: it stays on TCP.
#[test]
fn limits_on_files_and_memory() -> Result<()> {
    let d = Daemon::start()?;
    let echo = Echo::serve("threads", "127.0.0.1", &d.eager())?;
    for (limit, clients) in [
        ("-f unlimited", 2),
        ("-f 1000", 1),
        ("-v 1500000", 1),
        ("-d 700000", 1),
    ] {
        let script = format!(
            "ulimit {limit}; exec bash -c \"exec 3<>/dev/tcp/127.0.0.1/{}; \
             echo hello >&3; read x <&3; echo got \\$x; read x <&3\"",
            echo.port()?
        );
        let mut p = Program::new("bash", &d.eager())
            .args(["-c", &script])
            .spawn()?;
        ensure!(p.line("got ", PATIENCE)? == "hello");
        until("the daemon knows", PATIENCE, || {
            d.stats().is_ok_and(|s| s.clients == clients)
        })
        .with_context(|| format!("limit {limit}: {}", d.picture()))?;
        let cramped = |r: &Row| r.pid == p.pid() && r.reason == Reason::Cramped.code();
        ensure!(
            d.ss()?.iter().any(cramped) == (clients == 1),
            "limit {limit}: {}",
            d.picture()
        );
        p.kill();
        until("it has ended", LIMIT, || {
            d.stats().is_ok_and(|s| s.clients == 1)
        })?;
    }
    Ok(())
}
