//! A node with many network namespaces, as many pods make them: what `underpass ss` shows is whole, and costs the daemon little
//! however many there are. `UNDERPASS_NAMESPACES` says how many. Needs root.

use anyhow::{ensure, Context, Result};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use underpass_admin::{Request, Response, Row};
use underpass_tests::harness::{c, until, Daemon, Place, Program, Running, PATIENCE};

const SHIPPED: usize = 150;
/// Connections of a program: with its listener, twice as many sockets and one.
const EACH: usize = 2;
/// Of so many programs, one has no shim.
const BARE: usize = 5;
/// For all to start.
const LONG: Duration = Duration::from_secs(120);
/// What a look may cost where the kernel's lists are short.
const LITTLE: Duration = Duration::from_millis(500);

fn wanted() -> usize {
    let said = std::env::var("UNDERPASS_NAMESPACES").ok();
    said.and_then(|n| n.parse().ok()).unwrap_or(SHIPPED)
}

/// Processor time of a process so far.
fn used(pid: u32) -> Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').context("a name")?;
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks: u64 = ticks.map(|t| t.parse().unwrap_or(0)).sum();
    Ok(Duration::from_millis(ticks * 10)) // (100 a second, as `/proc` has them)
}

/// Processor time for the lists of so many namespaces.
fn lists(n: usize) -> Result<Duration> {
    const TIMES: usize = 30;
    let me = std::process::id();
    let before = used(me)?;
    for _ in 0..TIMES {
        for file in ["tcp", "tcp6"] {
            std::fs::read(format!("/proc/self/net/{file}"))?;
        }
    }
    Ok((used(me)? - before) * n as u32 / TIMES as u32)
}

/// Each of these processes has its rows.
fn whole(rows: &[Row], pids: &[u32]) -> Result<()> {
    let mut of: BTreeMap<u32, [usize; 2]> = BTreeMap::new();
    for r in rows {
        let n = of.entry(r.pid).or_default();
        match r.state.as_str() {
            "LISTEN" => n[0] += 1,
            "ACTIVE" if r.peer_pid == r.pid => n[1] += 1,
            other => anyhow::bail!("{other}: {r:?}"),
        }
    }
    ensure!(of.len() == pids.len(), "{} of {}", of.len(), pids.len());
    for p in pids {
        ensure!(of.get(p) == Some(&[1, 2 * EACH]), "{p}: {:?}", of.get(p));
    }
    Ok(())
}

#[test]
fn root_many_namespaces() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let program = dir.path().join("apart");
    c::compile("apart", &program)?;
    let d = Daemon::start()?;
    let n = wanted();
    let start = |i: usize| {
        let place = if i % BARE == 0 {
            Place::bare()
        } else {
            d.place()
        };
        let program = Program::new(&program, &place).arg(EACH.to_string());
        program.spawn()
    };
    let mut all: Vec<Running> = (0..n).map(start).collect::<Result<_>>()?;
    for r in &mut all {
        r.line("ready", LONG)?;
    }
    let shim = all.iter().enumerate().filter(|(i, _)| i % BARE != 0);
    let pids: Vec<u32> = shim.map(|(_, r)| r.pid()).collect();
    until("all rows", PATIENCE, || {
        d.ss().is_ok_and(|rows| whole(&rows, &pids).is_ok())
    })
    .with_context(|| format!("{:?}", d.ss().map(|r| whole(&r, &pids))))?;
    let daemon = d.pid()?;
    let lists = lists(n)?;
    for (what, request) in [("ss", Request::Ss), ("pods", Request::Pods)] {
        const TIMES: u32 = 3;
        let (before, began) = (used(daemon)?, Instant::now());
        for _ in 0..TIMES {
            let answer = d.ask(&request)?;
            ensure!(!matches!(answer, Response::Error { .. }), "{answer:?}");
        }
        let cost = (used(daemon)? - before) / TIMES;
        let took = began.elapsed() / TIMES;
        println!(
            "{what} of {n} namespaces: {cost:?} of the processor, {took:?}; the lists: {lists:?}"
        );
        ensure!(
            cost < LITTLE.max(lists / 3),
            "{what}: {cost:?}; the lists: {lists:?}"
        );
    }
    whole(&d.ss()?, &pids)
}
