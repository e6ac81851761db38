//! `make bench`: every case over every wire, in turn within each round, medians over the rounds.
//! The exit code is not 0 when a run over Underpass was not one.

use anyhow::{Context, Result};
use clap::Parser;
use std::collections::HashMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use underpass_benches::cases::{measured, Case, Wire, ALL};
use underpass_benches::limit;
use underpass_benches::report::{head, line, median, Row};
use underpass_tests::harness::{paths, Daemon};

#[derive(Parser)]
#[command(about = "Kernel TCP, Unix sockets, Underpass and bare shared memory, side by side")]
struct Args {
    /// One short round.
    #[arg(long)]
    quick: bool,
    /// Rounds per case.
    #[arg(long)]
    rounds: Option<usize>,
    /// Seconds per run.
    #[arg(long)]
    seconds: Option<f64>,
    /// Only cases whose name contains one of these.
    cases: Vec<String>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("bench: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<bool> {
    let rounds = args.rounds.unwrap_or(if args.quick { 1 } else { 5 });
    let seconds = args.seconds.unwrap_or(if args.quick { 0.7 } else { 2.0 });
    let chosen: Vec<&Case> = ALL
        .iter()
        .filter(|c| args.cases.is_empty() || args.cases.iter().any(|n| c.name.contains(n.as_str())))
        .collect();
    let begin = Instant::now();
    println!("{rounds} rounds of {seconds} s\n{}", head());
    let mut rows = Vec::new();
    let mut problems = Vec::new();
    for case in chosen {
        let (row, bad) = one(case, rounds, seconds)?;
        println!("{}", line(&row));
        for b in bad {
            println!("    !! {b}");
            problems.push(format!("{}: {b}", case.name));
        }
        rows.push(row);
    }
    let dir = paths::target().join("bench");
    std::fs::create_dir_all(&dir)?;
    let file = dir.join("report.json");
    std::fs::write(&file, serde_json::to_string_pretty(&rows)? + "\n")
        .with_context(|| file.display().to_string())?;
    println!(
        "{} cases in {:.0} s; written to {}",
        rows.len(),
        begin.elapsed().as_secs_f64(),
        file.display()
    );
    for p in &problems {
        println!("FAILED {p}");
    }
    Ok(problems.is_empty())
}

/// All wires of one case, round by round. Runs that failed are told and leave a hole.
fn one(case: &Case, rounds: usize, seconds: f64) -> Result<(Row, Vec<String>)> {
    let d = Daemon::start()?;
    let mut wires = vec![Wire::Tcp, Wire::Underpass];
    if case.has_unix() {
        wires.insert(1, Wire::Unix);
    }
    let mut seen: HashMap<&str, Vec<f64>> = HashMap::new();
    let mut bad = Vec::new();
    let key = |w: Wire| match w {
        Wire::Tcp => "tcp",
        Wire::Unix => "unix",
        Wire::Underpass => "underpass",
    };
    for round in 0..rounds {
        // Every other round the other way about, so that drift favours nobody.
        let order: Vec<Wire> = if round % 2 == 0 {
            wires.clone()
        } else {
            wires.iter().rev().copied().collect()
        };
        for wire in order {
            let guess = seen.get(key(wire)).and_then(|v| v.last()).copied();
            match measured(case, wire, &d, seconds, guess) {
                Ok(x) => seen.entry(key(wire)).or_default().push(x),
                Err(e) => bad.push(format!("{wire:?}, round {round}: {e:#}")),
            }
        }
        if let Some(what) = case.limit {
            seen.entry("limit").or_default().push(limit::measure(
                what,
                Duration::from_secs_f64(seconds / 4.0),
            )?);
        }
    }
    // A limit is the best that was seen; everything else is what was usual.
    let best = seen.remove("limit").and_then(|v| {
        let better = if case.is_time() { f64::min } else { f64::max };
        v.into_iter().reduce(better)
    });
    let mut mid = |k: &str| median(seen.remove(k).unwrap_or_default());
    let row = Row {
        case: case.name.into(),
        unit: case.unit.into(),
        tcp: mid("tcp"),
        unix: mid("unix"),
        underpass: mid("underpass"),
        limit: best,
        ratio_vs_tcp: None,
        ratio_vs_limit: None,
    };
    Ok((row.finish(case.is_time()), bad))
}
