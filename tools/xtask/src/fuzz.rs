//! Fuzz targets under libFuzzer, each for a bounded time.
//!
//! The program is built as `cargo fuzz --sanitizer none` builds it, and no option for that is unstable. New inputs that
//! reach what no other has reached go to `target/fuzz/found/TARGET`, and an input that a target does not like to
//! `target/fuzz/failed`: keep it in `tests/fuzz/corpus/TARGET`, where `make unit` replays it. `make fuzz ARGS="merge TARGET"`
//! keeps as few of the new inputs as reach the same as all of them.

use crate::steps::{Kind, Step};
use crate::Tree;
use std::path::PathBuf;
use std::process::Command;

const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// What libFuzzer is told by: counters of the edges taken, and the operands of comparisons.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                     -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";

/// Seconds for each target; `UNDERPASS_FUZZ_SECONDS` are others.
const SECONDS: u64 = 20;

/// The build, then the targets with these names, or all.
pub fn steps(tree: &Tree, args: &[String]) -> Vec<Step> {
    let (merge, names) = match args.split_first() {
        Some((first, rest)) if first == "merge" => (true, rest),
        _ => (false, args),
    };
    let mut all = vec![build(tree)];
    let wanted = |name: &String| names.is_empty() || names.contains(name);
    for name in targets(tree).into_iter().filter(wanted) {
        all.push(if merge {
            merged(tree, name)
        } else {
            run(tree, name)
        });
    }
    all
}

/// Each has a directory of kept inputs (a test in tests/fuzz compares).
fn targets(tree: &Tree) -> Vec<String> {
    let dirs = std::fs::read_dir(tree.root.join("tests/fuzz/corpus"));
    let mut names: Vec<String> = dirs
        .into_iter()
        .flatten()
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// (With a platform named, what runs at build time is built without counters, which there is no libFuzzer to read.)
fn build(tree: &Tree) -> Step {
    let mut c = tree.cargo("build --locked --profile fuzz -p underpass-fuzz --target");
    c.arg(PLATFORM)
        .env("CARGO_TARGET_DIR", tree.target.join("fuzz"))
        .env("RUSTFLAGS", FLAGS);
    Step::new("fuzz build", Kind::Check, 400, c)
}

/// The program for one target, what it has found before, and what is kept.
fn program(tree: &Tree, name: &str) -> (Command, PathBuf, PathBuf) {
    let dir = tree.target.join("fuzz");
    let found = dir.join("found").join(name);
    let path = dir.join(PLATFORM).join("fuzz/underpass-fuzz");
    for d in [&found, &dir.join("failed")] {
        if let Err(e) = std::fs::create_dir_all(d) {
            eprintln!("{}: {e}", d.display());
        }
    }
    let mut c = tree.command(&path.to_string_lossy(), &[]);
    c.env("UNDERPASS_FUZZ", name)
        .arg(format!(
            "-artifact_prefix={}/{name}-",
            dir.join("failed").display()
        ))
        .args([
            "-timeout=10",
            "-rss_limit_mb=2048",
            "-print_funcs=0",
            "-print_final_stats=1",
        ]);
    (c, found, tree.root.join("tests/fuzz/corpus").join(name))
}

fn run(tree: &Tree, name: String) -> Step {
    let seconds = std::env::var("UNDERPASS_FUZZ_SECONDS").ok();
    let seconds = seconds.and_then(|s| s.parse().ok()).unwrap_or(SECONDS);
    let (mut c, found, kept) = program(tree, &name);
    c.env("UNDERPASS_FUZZ_SEEDS", &found)
        .arg(format!("-max_total_time={seconds}"))
        .arg("-max_len=4096")
        .args([found, kept]);
    Step::new(title(&name), Kind::Fuzz, seconds + 10, c)
}

fn merged(tree: &Tree, name: String) -> Step {
    let (mut c, found, kept) = program(tree, &name);
    c.arg("-merge=1").args([kept, found]);
    Step::new(title(&name), Kind::Fuzz, 60, c)
}

fn title(name: &str) -> &'static str {
    // (One for each target, and the program ends.)
    String::leak(format!("fuzz {name}"))
}
