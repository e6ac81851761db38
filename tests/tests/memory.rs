//! A program whose memory cgroup is nearly full is not killed because of its lanes. Needs root, and a cgroup that limits memory.

use anyhow::{ensure, Context, Result};
use lane::proto::reason::Reason;
use std::path::Path;
use std::time::Duration;
use underpass_admin::Row;
use underpass_tests::harness::cgroup::TestCgroup;
use underpass_tests::harness::{free_port, until, web, Daemon, Program, Running, PATIENCE};

const LIMIT: Duration = Duration::from_secs(120);
/// Connections of the server, each to a client process of its own.
const CLIENTS: u8 = 48;
/// Bytes that the server may use beside what it has with all of them idle: it sends 8 MiB on each.
const MORE: u64 = 24 << 20;
/// What a pod has that is not nearly full.
const ENOUGH: u64 = 1 << 30;

/// How often lanes, or memory for them, were refused because a memory cgroup is nearly full.
fn refused(metrics: u16) -> Result<u64> {
    let all = web::http(metrics, "GET", "/metrics", "")?;
    let of = |l: &str| {
        let rest = l.strip_prefix("underpass_limit_refusals_total{limit=\"room\"} ")?;
        rest.trim().parse().ok()
    };
    Ok(all.lines().find_map(of).unwrap_or(0))
}

fn ask(d: &Daemon, port: u16, number: u8, [go, read]: [&Path; 2]) -> Result<Running> {
    Program::python("memory.py", &d.eager())
        .words(&format!("ask {port} {number}"))
        .args([go, read])
        .spawn()
}

/// How many ends of these programs' connections are so.
fn ends(d: &Daemon, of: &[Running], so: impl Fn(&Row) -> bool) -> usize {
    let all = d.ss().unwrap_or_default();
    let theirs = |r: &&Row| of.iter().any(|p| p.pid() == r.pid);
    all.iter().filter(theirs).filter(|r| so(r)).count()
}

#[test]
fn root_a_full_pod_lives() -> Result<()> {
    let Some(cgroup) = TestCgroup::new() else {
        println!("SKIPPED: no cgroup that limits memory can be made here");
        return Ok(());
    };
    cgroup.limit(Some(ENOUGH));
    let dir = tempfile::tempdir()?;
    let (port, metrics) = (free_port()?, free_port()?);
    let config = dir.path().join("config.toml");
    std::fs::write(
        &config,
        format!("[metrics]\nlisten = '127.0.0.1:{metrics}'\n"),
    )?;
    let d = Daemon::with(&["--config", config.to_str().context("path")?])?;
    let mut server = Program::python("memory.py", &d.eager())
        .words(&format!("serve {port} {CLIENTS}"))
        .within(&cgroup)?
        .spawn()?;
    server.line("ready", LIMIT)?;
    let [go, read, never] = ["go", "read", "never"].map(|f| dir.path().join(f));
    let mut clients = Vec::new();
    for number in 0..CLIENTS {
        clients.push(ask(&d, port, number, [&go, &read])?);
    }
    server.line(&format!("have {CLIENTS}"), LIMIT)?;
    d.await_promoted(2 * usize::from(CLIENTS))?;
    ensure!(refused(metrics)? == 0, "there was room enough");
    let limit = cgroup.used().context("used")? + MORE;
    cgroup.limit(Some(limit));
    std::fs::write(&go, b"")?;
    // They read slowly, so rings grow, and stop in the middle.
    until("there is no room for larger rings", LIMIT, || {
        server.has_ended() || refused(metrics).is_ok_and(|n| n > 0)
    })?;
    let late = (0..4).map(|_| ask(&d, port, CLIENTS, [&never, &never]));
    let late = late.collect::<Result<Vec<_>>>()?;
    // (Who is refused is the server; the other end is told so.)
    let refused_lane =
        |r: &Row| r.mode.starts_with("TCP") && r.peer_reason == Reason::Memory.code();
    until("there is no room for further lanes", PATIENCE, || {
        server.has_ended() || ends(&d, &late, refused_lane) == late.len()
    })
    .with_context(|| d.picture())?;
    std::fs::write(&read, b"")?;
    for (number, mut c) in clients.into_iter().enumerate() {
        let sum = |p: &mut Running| p.line(&format!("hash {number} "), LIMIT);
        let got = sum(&mut c).with_context(|| kills(&cgroup))?;
        ensure!(
            got == sum(&mut server)?,
            "connection {number}: {}",
            kills(&cgroup)
        );
    }
    let most = cgroup.most_used();
    println!(
        "of {limit} bytes {most:?} were used; {} times refused",
        refused(metrics)?
    );
    ensure!(
        !server.has_ended() && cgroup.killed() == Some(0),
        "{}",
        kills(&cgroup)
    );
    if let Some(most) = most {
        ensure!(most <= limit, "{most} of {limit} bytes were used");
    }
    d.assert_promoted(2 * u64::from(CLIENTS), u64::from(CLIENTS) << 10)?;
    cgroup.limit(Some(ENOUGH));
    until("there is room again", PATIENCE, || {
        ends(&d, &late, |r| r.mode == "SMCD") == late.len()
    })
    .with_context(|| d.picture())
}

fn kills(cgroup: &TestCgroup) -> String {
    format!("the kernel has killed {:?} processes", cgroup.killed())
}
