//! Every wait has somebody who ends it, whoever attaches the lane, takes the wake-up or holds the lock.

use anyhow::{bail, ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::c::both_ways;
use underpass_tests::harness::peers::result;
use underpass_tests::harness::{Daemon, Place, Program, Running, PATIENCE};

const LIMIT: Duration = Duration::from_secs(120);

fn program(place: &Place) -> Program {
    Program::new(env!("CARGO_BIN_EXE_waits"), place)
}

/// So many servers, and their ports.
fn servers(place: &Place, n: usize) -> Result<(Vec<Running>, Vec<String>)> {
    let start = |_| {
        let mut s = program(place).arg("serve").spawn()?;
        let port = s.line("port ", PATIENCE)?;
        Ok((s, port))
    };
    let all: Vec<_> = (0..n).map(start).collect::<Result<_>>()?;
    Ok(all.into_iter().unzip())
}

fn race(how: &str) -> Result<()> {
    const ROUNDS: u64 = 600;
    let d = Daemon::start()?;
    let (_servers, ports) = servers(&d.place(), 4)?;
    let out = program(&d.place())
        .args(["race", how, &ROUNDS.to_string()])
        .args(&ports)
        .run(LIMIT)?;
    let v = result(&out.stdout).with_context(|| out.stderr.clone())?;
    // All of them were on a lane while they were polled.
    let rounds = v["rounds"].as_u64().unwrap_or(0);
    let stats = d.stats()?;
    ensure!(rounds > 0 && stats.promoted >= 2 * rounds, "{v} {stats:?}");
    Ok(())
}

#[test]
fn lanes_come_while_a_poll_goes_to_sleep() -> Result<()> {
    race("poll")
}

#[test]
fn lanes_come_while_a_select_goes_to_sleep() -> Result<()> {
    race("select")
}

/// Both threads of a set sleep from before there was a lane; one takes the wake-up and is busy then.
#[test]
fn second_waiter_of_a_set() -> Result<()> {
    const ROUNDS: u64 = 400;
    let d = Daemon::start()?;
    let (_servers, ports) = servers(&d.place(), 1)?;
    let out = program(&d.place())
        .args(["two", &ROUNDS.to_string()])
        .args(&ports)
        .run(LIMIT)?;
    result(&out.stdout).with_context(|| out.stderr.clone())?;
    // (Some of them end before their lane comes.)
    let stats = d.stats()?;
    ensure!(stats.promoted >= ROUNDS / 2, "{stats:?}");
    Ok(())
}

/// One end is told of news all the time, and woken, and there never is any: it has little to do. Processor time of a
/// shared machine is not all its own: the best of three rounds counts.
fn storm(how: &str) -> Result<()> {
    let d = Daemon::start()?;
    let mut shares = Vec::new();
    for _ in 0..3 {
        let (cpu_ms, wall_ms) = storm_once(how, &d)?;
        // A twentieth of a processor as a rule, now and then a sixth; it was half of one.
        if cpu_ms <= wall_ms / 4 {
            return Ok(());
        }
        shares.push(format!("{cpu_ms} of {wall_ms} ms"));
    }
    bail!("an idle end was busy for {shares:?}")
}

/// Milliseconds of processor time that the end took, and that it lasted.
fn storm_once(how: &str, d: &Daemon) -> Result<(u64, u64)> {
    let mut victim = program(&d.place()).args(["idle", how]).spawn()?;
    let port = victim.line("port ", PATIENCE)?;
    let out = program(&d.place())
        .args(["storm", "2000", &port])
        .run(LIMIT)?;
    let bumps = result(&out.stdout).with_context(|| out.stderr.clone())?["bumps"].clone();
    let out = victim.wait(LIMIT)?;
    let v = result(&out.stdout).with_context(|| out.stderr.clone())?;
    println!("{how}: {bumps} bumps, {v}");
    let n = |k: &str| v[k].as_u64().unwrap_or(u64::MAX);
    ensure!(bumps.as_u64() >= Some(10_000), "{bumps} bumps");
    ensure!(
        n("wall_ms") >= 1900 && n("vain") == 0,
        "it was not idle: {v}"
    );
    ensure!(n("sleeps") <= 1000, "{v}");
    Ok((n("cpu_ms"), n("wall_ms")))
}

#[test]
fn storm_on_an_epoll_set() -> Result<()> {
    storm("epoll")
}

#[test]
fn storm_on_a_poll() -> Result<()> {
    storm("poll")
}

#[test]
fn storm_on_a_recv() -> Result<()> {
    storm("recv")
}

/// The locks of a lane are held by somebody who never gives them back.
fn held(how: &str) -> Result<()> {
    let d = Daemon::start()?;
    for who in ["dead", "zombie", "stopped"] {
        let (_servers, ports) = servers(&d.place(), 1)?;
        let out = program(&d.place())
            .args(["held", how, who, &ports[0]])
            .run(LIMIT)?;
        let v = result(&out.stdout).with_context(|| format!("{who}: {}", out.stderr))?;
        println!("{how}, {who}: {v}");
        // Of 1,500 ms in which the holder is stopped.
        ensure!(v["cpu_ms"].as_u64() <= Some(300), "{who}: {v}");
    }
    Ok(())
}

#[test]
fn lock_of_the_dead_in_an_epoll_wait() -> Result<()> {
    held("epoll")
}

#[test]
fn lock_of_the_dead_in_a_poll() -> Result<()> {
    held("poll")
}

#[test]
fn lock_of_the_dead_in_a_recv() -> Result<()> {
    held("recv")
}

/// Nobody else comes: who only gives up would be told of the same bytes for ever.
#[test]
fn lock_of_the_dead_in_a_recv_that_does_not_wait() -> Result<()> {
    held("nonblocking")
}

/// What watches for the end alone is told of a death, however early it sleeps, and of nothing else.
#[test]
fn watched_for_the_end() -> Result<()> {
    both_ways("watched", &[], 18, 1_000)
}

/// Time-outs that others set, handlers, ends and deaths: what a sleeping call is told, and once.
#[test]
fn told_in_their_sleep() -> Result<()> {
    both_ways("told", &[], 80, 1_000)
}

/// Eager mode: nothing waits for a lane in the thread that is both ends.
#[test]
fn eager_in_the_thread_of_both_ends() -> Result<()> {
    const ROUNDS: u64 = 150;
    let d = Daemon::start()?;
    let out = program(&d.eager())
        .args(["both", &ROUNDS.to_string()])
        .run(LIMIT)?;
    let v = result(&out.stdout).with_context(|| out.stderr.clone())?;
    println!("{v}");
    // It was 20 ms for each end of each connection, of a processor.
    ensure!(v["cpu_ms"].as_u64() <= Some(ROUNDS * 10), "{v}");
    let stats = d.stats()?;
    ensure!(stats.promoted >= 2 * ROUNDS, "{stats:?}");
    Ok(())
}

/// One thread takes connections out of a set while others give them their lanes.
#[test]
fn taken_out_while_the_lane_comes() -> Result<()> {
    both_ways("unregister", &["400"], 800, 100_000)
}

/// A one-shot registration is added while another thread gives the connection its lane.
#[test]
fn armed_while_the_lane_comes() -> Result<()> {
    both_ways("unregister", &["400", "once"], 800, 100_000)
}

/// What fills TCP's buffer between the moment in which a connection gets its lane and the first wait of its set.
#[test]
fn filled_before_the_first_wait() -> Result<()> {
    both_ways("filled", &[], 60, 1_000_000)
}
