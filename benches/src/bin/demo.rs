//! `make demo`: what Underpass does, in under two minutes. Real programs over kernel TCP and over
//! Underpass in turn; which connections were promoted; and a transfer that does not lose a byte
//! while its daemon is killed and operators send it down to TCP and up again.
//!
//! It shows nothing that it has not checked: a connection that was not promoted, or a byte that
//! differs, ends it with an error.

use anyhow::{bail, ensure, Context, Result};
use clap::Parser;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};
use underpass_benches::cases::{measured, Wire, ALL, DEMO};
use underpass_benches::report::short;
use underpass_tests::harness::peers::Transfer;
use underpass_tests::harness::redis::Redis;
use underpass_tests::harness::{paths, until, Daemon, Program, PATIENCE};

#[derive(Parser)]
#[command(
    about = "Kernel TCP and Underpass side by side, then a transfer through a daemon's death"
)]
struct Args {
    /// Seconds per measurement.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
}

fn main() -> ExitCode {
    let begin = Instant::now();
    match run(&Args::parse()) {
        Ok(()) => {
            println!(
                "\nEverything was promoted and every byte arrived. {:.0} s",
                begin.elapsed().as_secs_f64()
            );
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("\nTHE DEMO FAILED: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let mut d = Daemon::start()?;
    table(&d, args.seconds)?;
    connections(&d)?;
    transfer(&mut d)
}

fn table(d: &Daemon, seconds: f64) -> Result<()> {
    println!("Unmodified programs, the same run, the same machine. Higher is better.\n");
    println!(
        "{:<28}{:>14}{:>14}{:>9}   unit",
        "", "kernel TCP", "Underpass", "ratio"
    );
    for name in DEMO {
        let case = ALL
            .iter()
            .find(|c| c.name == *name)
            .with_context(|| format!("no case {name}"))?;
        let tcp = measured(case, Wire::Tcp, d, seconds, None)
            .with_context(|| format!("{name} over TCP"))?;
        let ours = measured(case, Wire::Underpass, d, seconds, None)
            .with_context(|| format!("{name} over Underpass"))?;
        println!(
            "{name:<28}{:>14}{:>14}{:>8}x   {}",
            short(Some(tcp)),
            short(Some(ours)),
            short(Some(ours / tcp)),
            case.unit
        );
    }
    Ok(())
}

/// `underpass ss` while fifty clients are at work.
fn connections(d: &Daemon) -> Result<()> {
    let redis = Redis::start(&d.place())?;
    let _load = Program::new("redis-benchmark", &d.place())
        .words(&format!("-p {} -t get -c 50 -n 1000000000", redis.port))
        .spawn()?;
    d.await_promoted(100)?;
    println!("\nredis-benchmark with 50 clients is running.");
    let text = tool(d, "ss")?;
    let shown = 8;
    println!(
        "{}",
        text.lines().take(shown).collect::<Vec<_>>().join("\n")
    );
    println!("… and {} more", text.lines().count().saturating_sub(shown));
    let promoted = text
        .lines()
        .filter(|l| l.split_whitespace().last() == Some("SMCD"))
        .count();
    ensure!(
        promoted >= 100,
        "ss shows {promoted} promoted ends of 100:\n{text}"
    );
    println!("{promoted} ends in mode SMCD: through shared memory.");
    Ok(())
}

fn transfer(d: &mut Daemon) -> Result<()> {
    println!("\nTwo programs send noise to each other and hash it (plain Python sockets).");
    let mut t = Transfer::start(&d.place(), &d.place(), "127.0.0.1")?;
    d.await_promoted(2)?;
    step(&mut t, "both directions are promoted")?;
    for _ in 0..2 {
        d.kill();
        step(&mut t, "kill -9 of the daemon: the lanes run on without it")?;
        d.restart()?;
        d.await_lanes(2)?;
        step(&mut t, "the restarted daemon sees them again")?;
        tool(d, "down")?;
        let down = || {
            d.ss().is_ok_and(|rows| {
                rows.iter()
                    .filter(|r| r.state == "ACTIVE")
                    .all(|r| r.up == "none")
            })
        };
        until("everything is on TCP", PATIENCE, down).with_context(|| d.picture())?;
        step(&mut t, "underpass down --all: on TCP")?;
        let ups = d.stats()?.ups;
        tool(d, "up")?;
        d.await_ups(ups + 2)?;
        step(&mut t, "underpass up --all: promoted again")?;
    }
    let s = d.stats()?;
    let moved = t.finish(Duration::from_secs(60))?;
    // (The daemon counts from its own start: the lanes are older.)
    ensure!(s.ups >= 2 && s.resets == 0, "{s:?}");
    for (name, bytes, hash) in [
        ("there", moved.forth, &moved.hashes[0]),
        ("back", moved.back, &moved.hashes[1]),
    ] {
        println!(
            "{name:>8} {:>8.1} MB  sha256 {hash}  the same at both ends",
            bytes as f64 / 1e6
        );
    }
    Ok(())
}

/// Tells what has happened, after the transfer has gone on under it for a while.
fn step(t: &mut Transfer, what: &str) -> Result<()> {
    t.await_sent(100 << 20).with_context(|| what.to_string())?;
    if !t.alive() {
        bail!(
            "the transfer ended: {what}\n{}{}",
            t.server.stderr(),
            t.client.stderr()
        );
    }
    println!("{:>8.1} MB  {what}", t.sent() as f64 / 1e6);
    Ok(())
}

/// The `underpass` command, as a user would type it.
fn tool(d: &Daemon, what: &str) -> Result<String> {
    let mut c = Command::new(paths::bin("underpass"));
    c.arg(what).env("UNDERPASS_DIR", d.dir());
    if what != "ss" {
        c.arg("--all");
    }
    let out = c.output()?;
    if !out.status.success() {
        bail!(
            "underpass {what}: {}{}",
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
    }
    Ok(String::from_utf8(out.stdout)?)
}
