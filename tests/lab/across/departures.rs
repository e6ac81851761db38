//! The matrix of `departures.c` between two nodes.

use anyhow::{ensure, Context, Result};
use std::time::Duration;
use underpass_tests::harness::departures::{Matrix, CELLS};
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::streams::Env;
use underpass_tests::lab::{quoted, Lab, Output, PATIENCE};

/// The machines are emulated.
const LIMIT: Duration = Duration::from_secs(1500);

/// In `make lab`: some ways out of each kind (the next image, another process, an option, libc's own calls) with few bytes.
const SOME: &[&str] = &[
    "!/unread-1/",
    "!full",
    "!over",
    "!stuck",
    "!spawn",
    "!-kept",
    "!fork-exec-bare",
    "!inq",
    "!popen",
];

fn run(lab: &Lab, matrix: &Matrix, env: [Env; 2], filters: &[&str]) -> Result<Output> {
    let program = matrix.program();
    let program = quoted(&program.to_string_lossy());
    let [a, b] = [0, 1].map(|n| lab.node(n));
    let at = format!("{}:7900", a.host());
    let serves = a.sh(format!("exec {program} --serve {at}"))?;
    let serves = serves.envs(env[0].clone()).limit(LIMIT).spawn()?;
    serves.line("serves")?;
    let words: Vec<_> = filters.iter().map(|f| quoted(f)).collect();
    let leaves = b.sh(format!("exec {program} {}", words.join(" ")))?;
    let leaves = leaves
        .envs(env[1].clone())
        .env("OTHER", at)
        .env("AT_ONCE", "4");
    let said = leaves.limit(LIMIT).spawn()?.wait_for(LIMIT)?;
    serves.signal(nix::sys::signal::Signal::SIGKILL)?;
    serves.wait_for(PATIENCE)?;
    Ok(said)
}

pub fn ways_out(lab: &mut Lab) -> Result<()> {
    let filters: Vec<String> = std::env::var("CELLS").map_or_else(
        |_| SOME.iter().map(|f| f.to_string()).collect(),
        |all| all.split_whitespace().map(String::from).collect(),
    );
    let filters: Vec<&str> = filters.iter().map(String::as_str).collect();
    let matrix = Matrix::compile()?;
    let c = Cluster::start(lab)?;
    let bare = run(lab, &matrix, [vec![], vec![]], &filters)?;
    let ours = run(lab, &matrix, c.eager(), &filters)?;
    let told = || format!("{}\n{}\n{}", ours.stderr, ours.stdout, c.picture());
    let said = [bare.stdout.as_str(), ours.stdout.as_str()];
    let cells = bare.stdout.lines().count() as u64;
    ensure!(cells > 0 && cells <= CELLS, "{}", bare.stderr);
    let lost = matrix.lost(cells, said).with_context(told)?;
    println!(
        "{cells} cells, {lost} of killed peers differ; {}",
        ours.stderr.trim()
    );
    for n in [0, 1] {
        let s = c.daemon(n)?.stats()?;
        ensure!(
            s.promoted >= cells && s.resets <= lost,
            "{} {}",
            s.resets,
            told()
        );
    }
    Ok(())
}
