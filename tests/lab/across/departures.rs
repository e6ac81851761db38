//! The matrix of `departures.c` between two nodes.

use anyhow::{anyhow, ensure, Result};
use std::time::Duration;
use underpass_tests::harness::departures::{most_waits, Matrix, CELLS};
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::streams::Env;
use underpass_tests::lab::{quoted, Lab, Output, PATIENCE};

/// The machines are emulated.
const LIMIT: Duration = Duration::from_secs(1500);

/// In `make lab` every 37th cell; all of them (20 minutes) with `CELLS=""`, those whose names contain some words with these.
/// `RULES=usual`: connections are promoted as they deserve it.
const EVERY: &str = "37";

/// Most waits of one leaving call, and of the first use after it. (A call that waits until its four seconds are over makes
/// 130; the machines are slow, and a daemon's part there and back takes a second or two.)
const WAITS: u64 = 100;

fn run(lab: &Lab, matrix: &Matrix, env: [Env; 2]) -> Result<Output> {
    let program = matrix.program();
    let program = quoted(&program.to_string_lossy());
    let [a, b] = [0, 1].map(|n| lab.node(n));
    let at = format!("{}:7900", a.host());
    let serves = a.sh(format!("exec {program} --serve {at}"))?;
    let serves = serves.envs(env[0].clone()).limit(LIMIT).spawn()?;
    serves.line("serves")?;
    // ("mixed": within a node alone.)
    let (words, every) = std::env::var("CELLS").map_or((String::new(), EVERY), |w| (w, "1"));
    let words = words.split_whitespace().chain(["!mixed"]);
    let words: Vec<_> = words.map(quoted).collect();
    let leaves = b.sh(format!("exec {program} {}", words.join(" ")))?;
    let leaves = leaves
        .envs(env[1].clone())
        .env("OTHER", at)
        .env("AT_ONCE", "4")
        .env("EVERY", every);
    let said = leaves.limit(LIMIT).spawn()?.wait_for(LIMIT)?;
    serves.signal(nix::sys::signal::Signal::SIGKILL)?;
    serves.wait_for(PATIENCE)?;
    Ok(said)
}

pub fn ways_out(lab: &mut Lab) -> Result<()> {
    let matrix = Matrix::compile()?;
    let c = Cluster::start(lab)?;
    let bare = run(lab, &matrix, [vec![], vec![]])?;
    let usual = std::env::var_os("RULES").is_some_and(|r| r == "usual");
    let env = if usual { c.shim() } else { c.eager() };
    let ours = run(lab, &matrix, env)?;
    let told = || format!("{}\n{}\n{}", ours.stderr, ours.stdout, c.picture());
    let said = [bare.stdout.as_str(), ours.stdout.as_str()];
    let cells = bare.stdout.lines().count() as u64;
    ensure!(cells > 0 && cells <= CELLS, "{}", bare.stderr);
    let lost = matrix.lost(true, cells, said);
    let lost = lost.map_err(|e| anyhow!("{e:#}\n{}", told()))?;
    println!("{cells} cells; {}", ours.stderr.trim());
    let [bare_waits, waits] = [most_waits(&bare.stderr)?, most_waits(&ours.stderr)?];
    ensure!(waits <= bare_waits + WAITS, "{bare_waits} {}", told());
    for n in [0, 1] {
        let s = c.daemon(n)?.stats()?;
        // (Here nothing is lost of a peer that was killed: its daemon puts it on TCP.)
        let good = s.promoted >= cells && s.resets == 0 && lost == 0;
        ensure!(good, "{lost} {} {}", s.resets, told());
    }
    Ok(())
}
