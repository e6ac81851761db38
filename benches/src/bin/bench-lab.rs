//! `make bench-lab`: two virtual machines with RDMA; kernel TCP, rsockets, kernel SMC-R and
//! Underpass between them, in turn within each round, medians over the rounds. The exit code is not
//! 0 when a way could not be measured.

use anyhow::{bail, Context, Result};
use clap::Parser;
use serde::Serialize;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use underpass_benches::lab::table::{self, Line, METRICS};
use underpass_benches::lab::{cross, word, Bench, Outcome, Way, CASES, WAYS};
use underpass_benches::report::short;
use underpass_tests::harness::paths;
use underpass_tests::lab::Lab;

#[derive(Parser)]
#[command(about = "TCP, rsockets, SMC-R and Underpass between two machines, side by side")]
struct Args {
    /// At most.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// No round begins that would probably not end within so many minutes.
    #[arg(long, default_value_t = 7.0)]
    minutes: f64,
    /// Seconds per run.
    #[arg(long, default_value_t = 1.2)]
    seconds: f64,
    /// Only these.
    ways: Vec<Way>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("bench-lab: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<bool> {
    if let Some(what) = Lab::lacks() {
        bail!("{what}");
    }
    let begin = Instant::now();
    let mut bench = Bench::boot(args.seconds)?;
    println!(
        "two emulated machines of one processor each, up after {:.0} s",
        begin.elapsed().as_secs_f64()
    );
    let mut lines: Vec<Line> = WAYS
        .iter()
        .filter(|w| args.ways.is_empty() || args.ways.contains(w))
        .map(|w| Line::new(*w))
        .collect();
    let limit = Duration::try_from_secs_f64(args.minutes * 60.0)?;
    let mut longest = Duration::ZERO;
    for round in 0..args.rounds {
        if round > 0 && begin.elapsed() + longest > limit {
            println!("it takes too long: {round} rounds must do");
            break;
        }
        let start = Instant::now();
        // Every other round the other way about, so that drift favours nobody.
        let mut order: Vec<usize> = (0..lines.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for i in order {
            one(&mut bench, &mut lines[i], round);
        }
        longest = longest.max(start.elapsed());
        println!(
            "round {} in {:.0} s",
            round + 1,
            start.elapsed().as_secs_f64()
        );
    }
    println!(
        "\nmedians of these rounds, {} s for each figure\n\n{}",
        args.seconds,
        table::text(&lines)
    );
    let wanted = args.ways.is_empty() || args.ways.contains(&Way::Preload);
    let checks = wanted.then(|| checked(&mut bench));
    report(&lines, &checks)?;
    for c in &bench.crashes {
        println!("a machine crashed and was booted again: {c}");
    }
    let mut good = true;
    for l in &lines {
        for not in &l.not {
            println!("FAILED {}: {not}", l.way.name());
            good = false;
        }
    }
    println!("{:.0} s", begin.elapsed().as_secs_f64());
    Ok(good)
}

/// All cases of one way, once. A way that did not work at all in the first round is not tried again.
fn one(bench: &mut Bench, line: &mut Line, round: usize) {
    if round > 0 && line.runs.is_empty() {
        return;
    }
    let nodes = match bench.nodes(line.way) {
        Ok(n) => n,
        Err(e) => return line.not.push(format!("{e:#}")),
    };
    for case in CASES {
        match bench.run(line.way, case, nodes.as_ref()) {
            Ok(Outcome::Figures(f, note)) => {
                line.runs.push((word(case), f));
                if let Some(n) = note.filter(|n| !line.notes.contains(n)) {
                    line.notes.push(n);
                }
            }
            Ok(Outcome::Other(what)) => {
                line.not.push(format!("not promoted: {what}"));
                if line.runs.is_empty() {
                    return;
                }
            }
            Err(e) => {
                let kept = keep(&bench.evidence());
                line.not
                    .push(format!("{}, round {round}: {e:#}{kept}", word(case)));
            }
        }
    }
}

/// Puts what is known of a failed run where it can be read. Where that is.
fn keep(evidence: &str) -> String {
    let path = paths::target().join("bench/lab-failed.txt");
    let kept = std::fs::create_dir_all(paths::target().join("bench"))
        .and_then(|()| std::fs::write(&path, evidence));
    match kept {
        Ok(()) => format!("\n(consoles and commands are in {})", path.display()),
        Err(e) => format!("\n(consoles and commands are lost: {e})\n{evidence}"),
    }
}

/// rsockets by other programs than ours, once, beside the table: does ours measure the same?
#[derive(Default, Serialize)]
struct Checks {
    rstream_round_trip_us: Option<f64>,
    rstream_bulk_mb_per_s: Option<f64>,
    /// Our program as it is for TCP, under rsockets' preload library.
    librspreload: Option<Line>,
    not: Vec<String>,
}

fn checked(bench: &mut Bench) -> Checks {
    let mut c = Checks::default();
    println!("rsockets otherwise, one run each:");
    match cross::rstream(bench) {
        Ok((us, mb)) => {
            println!(
                "  rstream: round trip {} us, bulk {} MB/s",
                short(Some(us)),
                short(Some(mb))
            );
            (c.rstream_round_trip_us, c.rstream_bulk_mb_per_s) = (Some(us), Some(mb));
        }
        Err(e) => c.not.push(format!("rstream: {e:#}")),
    }
    let mut l = Line::new(Way::Preload);
    one(bench, &mut l, 0);
    for m in METRICS.iter().filter(|m| l.value(m).is_some()) {
        println!("  librspreload: {} {}", m.name, short(l.value(m)));
    }
    c.not
        .extend(l.not.iter().map(|n| format!("librspreload: {n}")));
    for n in &c.not {
        println!("  {n}");
    }
    c.librspreload = Some(l);
    c
}

fn report(lines: &[Line], checks: &Option<Checks>) -> Result<()> {
    let dir = paths::target().join("bench");
    std::fs::create_dir_all(&dir)?;
    let file = dir.join("lab.json");
    let all = serde_json::json!({ "ways": lines, "checks": checks });
    std::fs::write(&file, serde_json::to_string_pretty(&all)? + "\n")
        .with_context(|| file.display().to_string())?;
    println!("every run is in {}", file.display());
    Ok(())
}
