//! Runs steps one after the other, counts what their test programs report, and prints one summary.

use crate::{build, Tree};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    /// `cargo test`: results are counted from libtest's lines.
    Tests,
    /// One check that passes or fails by its exit code.
    Check,
    /// Our own build; if it fails, nothing after it can run.
    Build,
}

pub struct Step {
    pub name: &'static str,
    pub kind: Kind,
    pub command: Option<Command>,
    /// Seconds that it may take on a cold machine with two processors; a longer run is only marked.
    pub budget: u64,
}

impl Step {
    pub fn new(name: &'static str, kind: Kind, budget: u64, command: Command) -> Self {
        Step {
            name,
            kind,
            command: Some(command),
            budget,
        }
    }
}

#[derive(Default)]
struct Count {
    passed: u64,
    failed: u64,
    skipped: u64,
    /// Of these, those that the test program itself says cannot run here.
    ignored: u64,
    names: Vec<String>,
}

impl Count {
    /// `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; ...`
    fn line(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix("test result:") {
            let number = |what: &str| {
                rest.split([';', '.'])
                    .filter_map(|p| p.trim().strip_suffix(what))
                    .find_map(|n| n.trim().parse::<u64>().ok())
                    .unwrap_or(0)
            };
            self.passed += number("passed");
            self.failed += number("failed");
            self.ignored += number("ignored");
            self.skipped += number("ignored") + number("filtered out");
        } else if let Some(name) = line
            .strip_prefix("test ")
            .and_then(|l| l.strip_suffix(" ... FAILED"))
        {
            self.names.push(name.to_string());
        }
    }
}

/// Runs every step, also after one failed, and prints the summary. Success if nothing failed.
pub fn run(tree: &Tree, steps: Vec<Step>) -> ExitCode {
    let begin = Instant::now();
    let mut rows: Vec<(&str, Count, Duration, u64)> = Vec::new();
    for mut step in steps {
        println!("\n== {}", step.name);
        let start = Instant::now();
        let mut count = Count::default();
        let ok = match step.command.as_mut() {
            None => build::all(tree).map_err(|e| eprintln!("{e}")).is_ok(),
            Some(c) => watch(c, &mut count),
        };
        if step.kind == Kind::Tests {
            // A test program that did not compile or died printed no result, and names that match no
            // test run none: that is a failure.
            if count.failed == 0 && (!ok || count.passed + count.ignored == 0) {
                count.failed += 1;
                count.names.push("(ended without a result)".into());
            }
        } else if ok {
            count.passed = 1;
        } else {
            count.failed = 1;
        }
        let stop = step.kind == Kind::Build && !ok;
        rows.push((step.name, count, start.elapsed(), step.budget));
        if stop {
            break;
        }
    }
    println!(
        "\n{:<14}{:>8}{:>8}{:>9}{:>9}{:>8}",
        "step", "passed", "failed", "skipped", "seconds", "budget"
    );
    let mut sum = Count::default();
    for (name, c, took, budget) in &rows {
        println!(
            "{name:<14}{:>8}{:>8}{:>9}{:>9.1}{budget:>8}{}",
            c.passed,
            c.failed,
            c.skipped,
            took.as_secs_f64(),
            if took.as_secs() > *budget {
                "  over"
            } else {
                ""
            }
        );
        sum.passed += c.passed;
        sum.failed += c.failed;
        sum.skipped += c.skipped;
        sum.names
            .extend(c.names.iter().map(|n| format!("{name}: {n}")));
    }
    for n in &sum.names {
        println!("FAILED {n}");
    }
    let skipped = if sum.skipped > 0 {
        format!(", {} skipped", sum.skipped)
    } else {
        String::new()
    };
    println!(
        "{} passed, {} failed{skipped} in {:.0} s",
        sum.passed,
        sum.failed,
        begin.elapsed().as_secs_f64()
    );
    crate::code(sum.failed == 0)
}

/// Runs a command, shows its output, counts its results.
fn watch(c: &mut Command, count: &mut Count) -> bool {
    let mut child = match c.stdin(Stdio::null()).stdout(Stdio::piped()).spawn() {
        Ok(p) => p,
        Err(e) => {
            eprintln!("{c:?}: {e}");
            return false;
        }
    };
    if let Some(out) = child.stdout.take() {
        let mut reader = BufReader::new(out);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let _ = std::io::stdout().write_all(&line);
            count.line(String::from_utf8_lossy(&line).trim_end());
            line.clear();
        }
    }
    child.wait().is_ok_and(|s| s.success())
}

/// The integration tests: every file of `tests/tests` except those that have a step of their own.
pub fn integration_tests(tree: &Tree) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(tree.root.join("tests/tests"))
        .into_iter()
        .flatten()
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .filter_map(|n| n.strip_suffix(".rs").map(str::to_string))
        .filter(|n| !n.starts_with("model") && n != "loads")
        .collect();
    names.sort();
    names
}

pub fn root() -> bool {
    std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|s| {
            s.lines().find_map(|l| {
                l.strip_prefix("Uid:")
                    .map(|u| u.split_whitespace().nth(1) == Some("0"))
            })
        })
        .unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_libtest_prints() {
        let mut c = Count::default();
        c.line("test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 4 filtered out; finished in 0.00s");
        c.line("test a::b ... FAILED");
        c.line("test a::c ... ok");
        c.line("test result: ok. 10 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!((c.passed, c.failed, c.skipped), (13, 1, 6));
        assert_eq!(c.ignored, 2);
        assert_eq!(c.names, ["a::b"]);
    }
}
