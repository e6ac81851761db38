//! Runs steps one after the other, counts what their test programs report, and prints one summary.

mod beside;

use crate::{build, Tree};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    /// `cargo test`: results are counted from libtest's lines.
    Tests,
    /// One check that passes or fails by its exit code.
    Check,
    /// A check by libFuzzer: how far it came is shown.
    Fuzz,
    /// Our own build; if it fails, nothing after it can run.
    Build,
}

/// What runs when a step's command has succeeded, some at a time ([`beside`]).
pub enum Then {
    Commands(Vec<Command>),
    /// The test programs that the command has built, these first.
    Built(&'static [&'static str]),
}

pub struct Step {
    pub name: &'static str,
    pub kind: Kind,
    pub command: Option<Command>,
    pub then: Then,
    /// The step with which it begins, at the lowest priority. At its own place it is waited for.
    pub since: Option<&'static str>,
    /// Seconds that it may take on a cold machine with two processors; a longer run is only marked.
    pub budget: u64,
    /// Why it cannot run here, if it cannot: it is counted as skipped, and named.
    pub skip: Option<String>,
}

impl Step {
    pub fn new(name: &'static str, kind: Kind, budget: u64, command: Command) -> Self {
        Step {
            name,
            kind,
            command: Some(command),
            then: Then::Commands(Vec::new()),
            since: None,
            budget,
            skip: None,
        }
    }

    /// The same step, which begins with an earlier one that leaves processors idle.
    pub fn since(self, name: &'static str) -> Self {
        Step {
            since: Some(name),
            ..self
        }
    }

    /// The same step, which does not run, for this reason.
    pub fn skipped(mut self, why: String) -> Self {
        self.skip = Some(why);
        self
    }
}

/// Seconds that these steps may take together.
pub fn budget(steps: &[Step]) -> u64 {
    steps.iter().map(|s| s.budget).sum()
}

#[derive(Default)]
struct Count {
    passed: u64,
    failed: u64,
    skipped: u64,
    /// Of these, those that the test program itself says cannot run here.
    ignored: u64,
    /// Those that say so while they run, and pass: which, and why. So many of them are the running test program's.
    skips: Vec<String>,
    unsettled: u64,
    /// How far libFuzzer came: edges (of code) and executions.
    edges: Option<u64>,
    executions: Option<u64>,
    /// Tests that failed, and what each said.
    names: Vec<(String, Said)>,
    /// The failed test whose words are being printed.
    says: Option<usize>,
    /// Why the step did not run.
    left_out: Option<String>,
}

/// The first and the last lines of what a failed test said: who sees the summary alone may still see why.
#[derive(Debug, Default, PartialEq)]
struct Said {
    first: Vec<String>,
    last: VecDeque<String>,
}

impl Said {
    const LINES: usize = 8;
    const CHARS: usize = 240;

    fn line(&mut self, line: &str) {
        let line: String = line.chars().take(Self::CHARS).collect();
        if line.trim().is_empty() {
            return;
        }
        if self.first.len() < Self::LINES {
            self.first.push(line);
            return;
        }
        if self.last.len() == Self::LINES {
            self.last.pop_front();
        }
        self.last.push_back(line);
    }
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
            let passed = number("passed");
            let skips = std::mem::take(&mut self.unsettled).min(passed);
            self.passed += passed - skips;
            self.failed += number("failed");
            self.ignored += number("ignored") + skips;
            self.skipped += number("ignored") + number("filtered out") + skips;
            self.says = None;
        } else if let Some(what) = between(line, "*** SKIP: ", " ***") {
            // (daemon/tests/common/skip.rs)
            self.skips.push(what.into());
            self.unsettled += 1;
        } else if let Some(name) = between(line, "test ", " ... FAILED") {
            // (libtest-mimic lines the results up.)
            self.failed(name.trim_end());
        } else if let Some(name) = between(line, "---- ", " ----") {
            let name = name.strip_suffix(" stdout").unwrap_or(name);
            self.says = self.names.iter().rposition(|(n, _)| n == name);
        } else if line == "failures:" {
            self.says = None;
        } else if let Some((_, said)) = self.says.and_then(|i| self.names.get_mut(i)) {
            said.line(line);
        }
    }

    /// `#4096 pulse  cov: 523 ft: 1201 corp: 97/3Kb ...`, many of them; `stat::number_of_executed_units: 70000`. Is it one of
    /// the many, which nobody needs to see?
    fn fuzzed(&mut self, line: &str) -> bool {
        let number = |text: &str| text.split_whitespace().next()?.parse().ok();
        if let Some(units) = line.strip_prefix("stat::number_of_executed_units:") {
            self.executions = number(units);
        }
        let edges = line.strip_prefix('#').and_then(|l| l.split_once(" cov: "));
        if let Some((_, n)) = edges {
            self.edges = number(n);
        }
        edges.is_some()
    }

    fn failed(&mut self, name: &str) {
        self.names.push((name.into(), Said::default()));
    }
}

fn between<'a>(line: &'a str, before: &str, after: &str) -> Option<&'a str> {
    line.strip_prefix(before)?.strip_suffix(after)
}

/// What became of a step.
struct Row {
    name: &'static str,
    count: Count,
    took: Duration,
    budget: u64,
}

/// Runs every step, also after one failed, and prints the summary. Success if something ran and nothing failed.
pub fn run(tree: &Tree, steps: Vec<Step>) -> ExitCode {
    let mut steps = VecDeque::from(steps);
    let mut rows: Vec<Row> = packages().into_iter().collect();
    let mut early = beside::Early::default();
    while let Some(step) = steps.pop_front() {
        let begins = |s: &&mut Step| s.since == Some(step.name) && s.skip.is_none();
        for s in steps.iter_mut().filter(begins) {
            early.begin(s.name, s.command.take());
        }
        println!("\n== {}", step.name);
        let start = Instant::now();
        let kind = step.kind;
        let (name, budget) = (step.name, step.budget);
        let count = match early.end(name) {
            Some((said, ok)) => {
                let _ = std::io::stdout().write_all(&said);
                check(ok)
            }
            None => one(tree, step),
        };
        let stop = kind == Kind::Build && count.failed > 0;
        let took = start.elapsed();
        rows.push(Row {
            name,
            count,
            took,
            budget,
        });
        if stop {
            break;
        }
    }
    let (text, ok) = summary(&rows);
    println!("\n{text}");
    crate::code(ok)
}

/// Seconds that preparing the system may take on a cold machine. `.ci/run` does it, and says how long it took.
pub const PACKAGES: u64 = 120;

fn packages() -> Option<Row> {
    let took = std::env::var("UNDERPASS_PACKAGES_SECONDS").ok()?;
    Some(Row {
        name: "packages",
        count: Count::default(),
        took: Duration::from_secs(took.parse().ok()?),
        budget: PACKAGES,
    })
}

/// Runs one step.
fn one(tree: &Tree, mut step: Step) -> Count {
    let mut count = Count::default();
    if let Some(why) = step.skip {
        println!("SKIPPED: {why}");
        count.skipped = 1;
        count.left_out = Some(why);
        return count;
    }
    // What is to run next, if it succeeded.
    let then = match (step.command.take(), step.then) {
        (None, _) => crate::made("build", build::installed(tree)).then(Vec::new),
        (Some(c), Then::Built(first)) => beside::built(c, first),
        (Some(c), Then::Commands(all)) => watch(c, step.kind, &mut count).then_some(all),
    };
    let ok = then.is_some_and(|all| beside::run(all, &mut count, &mut std::io::stdout()));
    if step.kind == Kind::Fuzz {
        let (edges, executions) = (count.edges, count.executions);
        count = Count {
            edges,
            executions,
            ..check(ok)
        };
    } else if step.kind == Kind::Tests {
        // A test program that did not compile or died printed no result, and names that match no
        // test run none: that is a failure.
        if count.failed == 0 && (!ok || count.passed + count.ignored == 0) {
            count.failed += 1;
            count.failed("(ended without a result)");
        }
    } else {
        count = check(ok);
    }
    count
}

/// A check, or a build, that succeeded or failed.
fn check(ok: bool) -> Count {
    Count {
        passed: u64::from(ok),
        failed: u64::from(!ok),
        ..Count::default()
    }
}

/// The table, what failed and what was left out, and a last line; and whether that is a success.
fn summary(rows: &[Row]) -> (String, bool) {
    let mut text = format!(
        "{:<14}{:>8}{:>8}{:>9}{:>9}{:>8}\n",
        "step", "passed", "failed", "skipped", "seconds", "budget"
    );
    let mut line = |name: &str, c: &Count, took: Duration, budget: u64| {
        let over = if took.as_secs() > budget {
            "  over"
        } else {
            ""
        };
        let number = |n: Option<u64>| n.map_or("?".into(), |n| n.to_string());
        let came = match (c.edges, c.executions) {
            (None, None) => String::new(),
            (e, n) => format!("  {} edges, {} executions", number(e), number(n)),
        };
        text += &format!(
            "{name:<14}{:>8}{:>8}{:>9}{:>9.1}{budget:>8}{over}{came}\n",
            c.passed,
            c.failed,
            c.skipped,
            took.as_secs_f64(),
        );
    };
    let mut sum = Count::default();
    for r in rows {
        line(r.name, &r.count, r.took, r.budget);
        sum.passed += r.count.passed;
        sum.failed += r.count.failed;
        sum.skipped += r.count.skipped;
    }
    let took: Duration = rows.iter().map(|r| r.took).sum();
    line("total", &sum, took, rows.iter().map(|r| r.budget).sum());
    for r in rows {
        for why in r.count.left_out.iter().chain(&r.count.skips) {
            text += &format!("SKIPPED {}: {why}\n", r.name);
        }
        for (n, said) in &r.count.names {
            text += &format!("FAILED {}: {n}\n", r.name);
            for l in said.first.iter().chain(&said.last) {
                text += &format!("    {l}\n");
            }
        }
    }
    let skipped = match sum.skipped {
        0 => String::new(),
        n => format!(", {n} skipped"),
    };
    text += &format!(
        "{} passed, {} failed{skipped} in {:.0} s",
        sum.passed,
        sum.failed,
        took.as_secs_f64()
    );
    let ran = rows.iter().any(|r| r.count.left_out.is_none());
    (text, ran && sum.failed == 0)
}

/// Runs a command, shows its output, counts its results. (Skipped tests, and libFuzzer, say so on standard error. What only
/// builds may have a terminal there, and shows how far it is.)
fn watch(mut c: Command, kind: Kind, count: &mut Count) -> bool {
    let mut run = || {
        let (from, to) = std::io::pipe()?;
        if matches!(kind, Kind::Tests | Kind::Fuzz) {
            c.stderr(to.try_clone()?);
        }
        let child = c.stdin(Stdio::null()).stdout(to).spawn()?;
        Ok::<_, std::io::Error>((from, child))
    };
    let (from, mut child) = match run() {
        Ok(both) => both,
        Err(e) => {
            eprintln!("{c:?}: {e}");
            return false;
        }
    };
    drop(c); // its ends of the pipe
    let mut reader = BufReader::new(from);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
        let text = String::from_utf8_lossy(&line);
        if kind != Kind::Fuzz || !count.fuzzed(text.trim_end()) {
            let _ = std::io::stdout().write_all(&line);
        }
        count.line(text.trim_end());
        line.clear();
    }
    child.wait().is_ok_and(|s| s.success())
}

/// Those that take longest. They begin first, so that none is left alone with the machine at the end.
const LONG: [&str; 6] = [
    "answers",
    "large",
    "departures",
    "kin",
    "handovers",
    "numbers",
];

/// The integration tests: every file of `tests/tests` except those that have a step of their own.
pub fn integration_tests(tree: &Tree) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(tree.root.join("tests/tests"))
        .into_iter()
        .flatten()
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .filter_map(|n| n.strip_suffix(".rs").map(str::to_string))
        .filter(|n| !n.starts_with("model") && n != "loads")
        .collect();
    let place = |n: &String| LONG.iter().position(|l| l == n).unwrap_or(LONG.len());
    names.sort_by_key(|n| (place(n), n.clone()));
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
        assert_eq!(c.names, [("a::b".into(), Said::default())]);
    }

    #[test]
    fn a_test_that_says_it_cannot_run_is_no_pass() {
        let said = |lines: &[&str]| {
            let mut c = Count::default();
            lines.iter().for_each(|l| c.line(l));
            c
        };
        let some = said(&[
            "test a ...",
            "*** SKIP: a: it needs root ***",
            "ok",
            "test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out",
            "test result: ok. 5 passed; 0 failed;",
        ]);
        assert_eq!((some.passed, some.failed, some.skipped), (6, 0, 2));
        // All that there is may be skipped: the step has run, as if the test program had ignored it.
        let all = said(&[
            "*** SKIP: b: no room ***",
            "test result: ok. 1 passed; 0 failed;",
        ]);
        assert_eq!((all.passed, all.skipped, all.ignored), (0, 1, 1));
        let (text, ok) = summary(&[row("unit", some, 1, 9), row("tenants", all, 1, 9)]);
        assert!(ok);
        assert!(
            text.contains("\nSKIPPED unit: a: it needs root\n"),
            "{text}"
        );
        assert!(text.contains("\nSKIPPED tenants: b: no room\n"), "{text}");
        assert!(text.ends_with("6 passed, 0 failed, 3 skipped in 2 s"));
        // Other words, and a test that says so and fails, take nothing away.
        let failed = said(&[
            "*** SKIPPED ***",
            "*** SKIP: c: why ***",
            "test result: FAILED. 0 passed; 1 failed;",
            "test result: ok. 5 passed; 0 failed;",
        ]);
        assert_eq!((failed.passed, failed.failed, failed.skipped), (5, 1, 0));
    }

    #[test]
    fn shows_how_far_libfuzzer_came() {
        let tree = Tree::find();
        let lines = "INFO: seed\\n#2\\tINITED cov: 7 ft: 9 corp: 2/3b\\n#70\\tDONE   cov: 12 ft: 30 corp: 5/9b\\n\
            Done 70 runs\\nstat::number_of_executed_units: 71\\n";
        let c = tree.command("sh", &["-c", &format!("printf '{lines}' >&2")]);
        let count = one(&tree, Step::new("fuzz x", Kind::Fuzz, 30, c));
        assert_eq!((count.passed, count.failed), (1, 0));
        let (text, _) = summary(&[row("fuzz x", count, 21, 30)]);
        assert!(text.contains("30  12 edges, 71 executions\n"), "{text}");
    }

    #[test]
    fn shows_what_a_failed_test_said() {
        let mut c = Count::default();
        for l in [
            "test cluster                 ... FAILED",
            "test unit ... FAILED",
            "failures:",
            "---- cluster ----",
            "the first line",
        ] {
            c.line(l);
        }
        for n in 0..100 {
            c.line(&format!("line {n}"));
        }
        for l in [
            "",
            "the last line",
            "---- unit stdout ----",
            "why",
            "failures:",
            "    unit",
            "test result: FAILED. 0 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
            "something else",
        ] {
            c.line(l);
        }
        let (text, ok) = summary(&[row("all", c, 1, 2)]);
        assert!(!ok);
        let from = text.find("FAILED").unwrap();
        let lines: Vec<&str> = text[from..].lines().collect();
        assert_eq!(
            lines[..3],
            ["FAILED all: cluster", "    the first line", "    line 0"]
        );
        let end = lines.iter().position(|l| *l == "FAILED all: unit").unwrap();
        assert_eq!(end, 1 + 2 * Said::LINES);
        assert_eq!(lines[end - 1], "    the last line");
        assert_eq!(lines[end + 1..], ["    why", "0 passed, 2 failed in 1 s"]);
    }

    fn row(name: &'static str, count: Count, took: u64, budget: u64) -> Row {
        Row {
            name,
            count,
            took: Duration::from_secs(took),
            budget,
        }
    }

    #[test]
    fn a_step_that_begins_early_counts_at_its_place() {
        let tree = Tree::find();
        let dir = std::env::temp_dir().join(format!("underpass-early-{}", std::process::id()));
        let _ = std::fs::create_dir(&dir);
        let at = |script: &str| {
            let mut c = tree.command("sh", &["-c", script]);
            c.current_dir(&dir);
            c
        };
        let second = |fails: &str| {
            let early = format!("nice >nice; touch begun; [ ! -e {fails} ]");
            let waits =
                "i=0; while [ ! -e begun ]; do i=$((i+1)); [ $i -lt 200 ]; sleep 0.05; done";
            vec![
                Step::new("first", Kind::Check, 9, at(&format!("set -e; {waits}"))),
                Step::new("second", Kind::Check, 9, at(&early)).since("first"),
            ]
        };
        assert!(run(&tree, second("nowhere")) == ExitCode::SUCCESS);
        assert_eq!(std::fs::read_to_string(dir.join("nice")).unwrap(), "19\n");
        assert!(run(&tree, second("begun")) == ExitCode::FAILURE);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn what_did_not_run_is_no_pass() {
        let tree = Tree::find();
        let step = Step::new("miri", Kind::Tests, 9, tree.command("false", &[]));
        let count = one(&tree, step.skipped("no Miri".into()));
        assert_eq!((count.passed, count.failed, count.skipped), (0, 0, 1));
        let (text, ok) = summary(&[row("miri", count, 0, 9)]);
        assert!(!ok);
        assert!(text.contains("\nSKIPPED miri: no Miri\n"), "{text}");
        assert!(text.ends_with("0 passed, 0 failed, 1 skipped in 0 s"));
    }

    #[test]
    fn shows_budgets_and_their_total() {
        let passed = |n| Count {
            passed: n,
            ..Count::default()
        };
        let rows = [row("one", passed(3), 11, 10), row("two", passed(4), 20, 30)];
        let (text, ok) = summary(&rows);
        assert!(ok);
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|l| l.split_whitespace().collect())
            .collect();
        assert_eq!(lines[1], ["one", "3", "0", "0", "11.0", "10", "over"]);
        assert_eq!(lines[2], ["two", "4", "0", "0", "20.0", "30"]);
        assert_eq!(lines[3], ["total", "7", "0", "0", "31.0", "40"]);
        assert!(text.ends_with("7 passed, 0 failed in 31 s"));
    }
}
