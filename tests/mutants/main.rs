//! Mutants of the switch, takeover and what daemons do across nodes: each must fail a test that needs no virtual machine.
//!
//! All mutants of the files below are built at once, each behind a test of its number, in a copy of the tree under
//! `target/mutants`; a run of the test programs with `MUTANT=n` then has that one. A seeded sample is run. It fails if
//! a mutant survives that `survivors.md` does not explain.
//!
//! ```text
//! make mutants ARGS="[SAMPLE [SEED]]"          300 and 1
//! make mutants ARGS="only N..."                these, and says what the test programs print
//! make mutants ARGS="in PART [SAMPLE [SEED]]"  those of files whose name has PART
//! make mutants ARGS=list                       all of them, with their numbers
//! ```

mod known;
mod rewrite;
mod survivors;

use anyhow::{bail, ensure, Context, Result};
use rewrite::{Key, Mutant, Rewriter};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use underpass_rdma::sim::Rng;
use underpass_tests::harness::paths;

/// What is mutated.
const PLACES: [&str; 18] = [
    "lane/src/notify.rs",
    "lane/src/proto/frame.rs",
    "lane/src/half/leave.rs",
    "lane/src/half/native_calls.rs",
    "lane/src/half/ring.rs",
    "lane/src/half/rx.rs",
    "lane/src/half/rx/",
    "lane/src/half/tx.rs",
    "lane/src/half/tx/",
    "daemon/src/core/remote.rs",
    "daemon/src/core/takeover.rs",
    "daemon/src/dataplane/thread.rs",
    "daemon/src/dataplane/rail.rs",
    "daemon/src/dataplane/rail/",
    "daemon/src/lanes/groups/takeover.rs",
    "daemon/src/lanes/takeover.rs",
    "daemon/rdma/src/engine.rs",
    "daemon/rdma/src/engine/",
];

/// A test program, and how it is run.
struct Run {
    package: &'static str,
    target: &'static str,
    /// What it is told.
    args: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
}

const fn run(package: &'static str, target: &'static str) -> Run {
    let (args, env): (&[&str], &[(&str, &str)]) = (&[], &[]);
    Run {
        package,
        target,
        args,
        env,
    }
}

/// Test programs, the quick ones first. (`LOOM` is built on its own.)
static PROGRAMS: [Run; 16] = [
    run("lane", "lib"),
    run("lane", "lane_alone"),
    run("lane", "lane_cases"),
    run("lane", "takeover_cases"),
    run("underpass-rdma", "engine_alone"),
    Run {
        args: &["stories"],
        ..run("underpass-world", "two_daemons")
    },
    Run {
        env: &[("PROPTEST_CASES", "2000"), SAME_CASES],
        ..run("lane", "lane_random")
    },
    Run {
        env: &[SAME_CASES],
        ..run("lane", "lane_hostile")
    },
    Run {
        env: &[SAME_CASES],
        ..run("lane", "takeover_hostile")
    },
    run("underpassd", "lib"),
    run("underpassd", "takeover"),
    run("underpass-rdma", "lib"),
    run("underpass-rdma", "hostile"),
    Run {
        env: &[("SEEDS", "300")],
        ..run("underpass-rdma", "seeds")
    },
    Run {
        args: &["--skip", "stories"],
        env: &[("SEEDS", "400")],
        ..run("underpass-world", "two_daemons")
    },
    run("lane", LOOM),
];

/// The library's own tests under loom.
const LOOM: &str = "loom";

/// Random operations are the same in each run.
const SAME_CASES: (&str, &str) = ("PROPTEST_RNG_SEED", "1");

/// What is known of survivors.
const SURVIVORS: &str = "tests/mutants/survivors.md";

/// A test program that runs so many times longer than without a mutant hangs.
const SLOWER: u32 = 20;

/// Where that build is, below `target/mutants`.
const LOOM_BUILD: &str = "build-loom";

/// The root of the contract crate, and what is added to it.
const LIB: &str = "lane/src/lib.rs";
const IS: &str = "
#[doc(hidden)]
pub mod mutant {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    static ON: AtomicU32 = AtomicU32::new(u32::MAX);
    #[inline(always)]
    pub fn is(n: u32) -> bool {
        let on = ON.load(Relaxed);
        on == n || on == u32::MAX && first(n)
    }
    #[cold]
    fn first(n: u32) -> bool {
        let on = std::env::var(\"MUTANT\").ok().and_then(|v| v.parse().ok());
        ON.store(on.unwrap_or(u32::MAX - 1), Relaxed);
        on == Some(n)
    }
}
";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    if words == ["list"] {
        let (all, _) = rewrite(&paths::root(), &BTreeSet::new())?;
        for (n, m) in all.iter().enumerate() {
            println!("{}", m.name(n));
        }
        return Ok(());
    }
    let bench = Bench::build()?;
    let all = 0..bench.mutants.len();
    let (sample, loud): (Vec<usize>, bool) = match words.as_slice() {
        ["only", which @ ..] => (
            which.iter().map(|n| n.parse()).collect::<Result<_, _>>()?,
            true,
        ),
        ["in", part, rest @ ..] => {
            let of: Vec<usize> = all
                .filter(|n| bench.mutants[*n].key.file.contains(part))
                .collect();
            (choose(of, rest)?, false)
        }
        rest => (choose(all.collect(), rest)?, false),
    };
    bench.run(&sample, loud)
}

/// A sample of so many, by a seed.
fn choose(mut all: Vec<usize>, words: &[&str]) -> Result<Vec<usize>> {
    let n = words.first().map_or(Ok(300), |w| w.parse())?;
    let mut rng = Rng(words.get(1).map_or(Ok(1), |w| w.parse())?);
    let mut out = Vec::new();
    while out.len() < n && !all.is_empty() {
        out.push(all.swap_remove(rng.below(all.len() as u64) as usize));
    }
    out.sort_unstable();
    Ok(out)
}

/// The tree with all mutants, built.
struct Bench {
    mutants: Vec<Mutant>,
    without: BTreeSet<usize>,
    programs: Vec<Program>,
}

struct Program {
    name: String,
    path: PathBuf,
    run: &'static Run,
    limit: Duration,
}

impl Program {
    /// Whether it passes; None: it takes too long.
    fn passes(&self, mutant: Option<usize>, loud: bool) -> Result<Option<bool>> {
        let mut c = Command::new(&self.path);
        c.args(self.run.args).envs(self.run.env.iter().copied());
        c.env("RUST_BACKTRACE", "0").stdin(Stdio::null());
        // A mutant's failures are none of the tree's.
        c.env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1");
        if let Some(n) = mutant {
            c.env("MUTANT", n.to_string());
        }
        if !loud {
            c.stdout(Stdio::null()).stderr(Stdio::null());
        }
        let mut child = c.spawn().with_context(|| self.name.clone())?;
        let end = Instant::now() + self.limit;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status.success()));
            }
            if Instant::now() > end {
                child.kill()?;
                child.wait()?;
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Bench {
    fn build() -> Result<Bench> {
        let to = paths::target().join("mutants");
        // As it is now, whatever is edited meanwhile.
        let (from, tree) = (to.join("from"), to.join("tree"));
        copy(&paths::root(), &from, |_| true)?;
        copy(&from, &tree, |n| n != LIB && !is_mutated(n))?;
        let list = to.join("without");
        let mut without = known::load(&from, &list, &rewrite(&from, &BTreeSet::new())?.0)?;
        for _ in 0..40 {
            let mutants = write(&from, &tree, &without)?;
            let mut said = String::new();
            let mut bad = BTreeSet::new();
            for loom in [false, true] {
                let out = cargo(&tree, &to, loom).output()?;
                let now = String::from_utf8_lossy(&out.stdout);
                if !out.status.success() {
                    bad = wrong(&tree, &now)?;
                    if bad.is_empty() {
                        errors(&now).for_each(|v| eprintln!("{}", v["message"]["rendered"]));
                        bail!("the tree with mutants does not build");
                    }
                    break;
                }
                said += &now;
            }
            if !bad.is_empty() {
                without.extend(bad);
                continue;
            }
            known::store(&from, &list, &mutants, &without)?;
            let mut b = Bench {
                mutants,
                without,
                programs: Vec::new(),
            };
            b.find(&said)?;
            return Ok(b);
        }
        bail!("too many mutants do not compile")
    }

    /// Finds the test programs, and how long each takes without a mutant.
    fn find(&mut self, said: &str) -> Result<()> {
        for run in &PROGRAMS {
            let Run {
                package,
                target,
                args,
                ..
            } = *run;
            let path = messages(said)
                .filter(|v| v["reason"] == "compiler-artifact" && v["profile"]["test"] == true)
                .find(|v| {
                    let name = match target {
                        "lib" | LOOM => package,
                        t => t,
                    };
                    let at = v["executable"].as_str().unwrap_or_default();
                    (v["target"]["name"] == name.replace('-', "_") || v["target"]["name"] == name)
                        && at.contains(LOOM_BUILD) == (target == LOOM)
                })
                .and_then(|v| Some(PathBuf::from(v["executable"].as_str()?)));
            let name = [&[package, target], args].concat().join(" ");
            let mut p = Program {
                path: path.with_context(|| format!("{name} was not built"))?,
                name,
                run,
                limit: Duration::from_secs(600),
            };
            let begin = Instant::now();
            ensure!(
                p.passes(None, true)? == Some(true),
                "{} fails without a mutant",
                p.name
            );
            let took = begin.elapsed();
            println!("{}: {:.1} s", p.name, took.as_secs_f64());
            p.limit = Duration::from_secs(5) + took * SLOWER;
            self.programs.push(p);
        }
        Ok(())
    }

    fn run(&self, sample: &[usize], loud: bool) -> Result<()> {
        let next = Mutex::new(sample.iter());
        let left = Mutex::new(BTreeSet::new());
        let begin = Instant::now();
        let work = || -> Result<()> {
            loop {
                let Some(n) = next.lock().expect("lock").next() else {
                    return Ok(());
                };
                if self.without.contains(n) {
                    continue;
                }
                let mut killer = None;
                for p in &self.programs {
                    if p.passes(Some(*n), loud)? != Some(true) {
                        killer = Some(&p.name);
                        break;
                    }
                }
                let m = &self.mutants[*n];
                match killer {
                    Some(k) => println!("{}: {k}", m.name(*n)),
                    None => {
                        println!("{}: SURVIVES", m.name(*n));
                        left.lock().expect("lock").insert(*n);
                    }
                }
            }
        };
        std::thread::scope(|s| {
            let all: Vec<_> = (0..cores()).map(|_| s.spawn(work)).collect();
            all.into_iter()
                .try_for_each(|t| t.join().expect("a thread of ours"))
        })?;
        let left = left.into_inner()?;
        let tried: Vec<usize> = sample
            .iter()
            .copied()
            .filter(|n| !self.without.contains(n))
            .collect();
        let none = sample.len() - tried.len();
        let unexplained = self.report(&tried, &left)?;
        println!(
            "{} mutants in all, {} tried, {} caught, {} survive, {unexplained} of them unexplained ({none} did not \
             compile), in {:.0} s",
            self.mutants.len(),
            tried.len(),
            tried.len() - left.len(),
            left.len(),
            begin.elapsed().as_secs_f64()
        );
        ensure!(
            unexplained == 0,
            "{unexplained} survivors are not explained"
        );
        Ok(())
    }

    /// Prints which survivors are explained, and which explanations are out of date. Returns the number of
    /// unexplained survivors.
    fn report(&self, tried: &[usize], left: &BTreeSet<usize>) -> Result<usize> {
        let text = std::fs::read_to_string(paths::root().join(SURVIVORS))?;
        let explained = survivors::explained(&text)?;
        let is = |n: &usize| explained.contains(&self.mutants[*n].key);
        let list = |title: &str, which: &dyn Fn(&usize) -> bool| {
            let some: Vec<&usize> = tried.iter().filter(|n| which(n)).collect();
            if !some.is_empty() {
                println!("\n{title}");
            }
            for n in &some {
                println!("{}", self.mutants[**n].name(**n));
            }
            some.len()
        };
        list("explained survivors", &|n| left.contains(n) && is(n));
        list("explained, and caught all the same", &|n| {
            !left.contains(n) && is(n)
        });
        let all: BTreeSet<&Key> = self.mutants.iter().map(|m| &m.key).collect();
        for k in explained.iter().filter(|k| !all.contains(k)) {
            println!("\nexplained, but there is no such change: {}", k.name());
        }
        let unexplained = list("unexplained survivors", &|n| left.contains(n) && !is(n));
        println!();
        Ok(unexplained)
    }
}

impl Mutant {
    fn name(&self, n: usize) -> String {
        let Key { file, within, what } = &self.key;
        format!("{n} {file}:{} in `{within}`: {what}", self.line)
    }
}

/// Builds the test programs of the tree, either the one under loom or all others.
fn cargo(tree: &Path, to: &Path, loom: bool) -> Command {
    let mut c = Command::new(env!("CARGO"));
    c.current_dir(tree)
        .args(["test", "--release", "--no-run", "--message-format=json"])
        .args(["--config", "profile.release.lto=false"])
        .args(["--config", "profile.release.codegen-units=16"])
        .args(["--lib", "-p", "underpass-lane"])
        .stderr(Stdio::inherit());
    if loom {
        c.env("CARGO_TARGET_DIR", to.join(LOOM_BUILD))
            .env("RUSTFLAGS", "--cfg loom -Awarnings");
    } else {
        c.args(["-p", "underpass-rdma", "-p", "underpassd"]);
        let all: BTreeSet<&str> = PROGRAMS.iter().map(|p| p.target).collect();
        let own = all.into_iter().filter(|t| !["lib", LOOM].contains(t));
        c.args(own.flat_map(|t| ["--test", t]));
        c.env("CARGO_TARGET_DIR", to.join("build"))
            .env("RUSTFLAGS", "-Awarnings");
    }
    c
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The names of all files below a folder, without what is built, git's own, and documents.
fn files(root: &Path) -> Result<Vec<String>> {
    let mut all = Vec::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(at) = todo.pop() {
        for e in std::fs::read_dir(root.join(&at))? {
            let e = e?;
            let name = at.join(e.file_name()).to_string_lossy().into_owned();
            match e.file_type()? {
                _ if ["target", ".git", "docs"].contains(&name.as_str()) => {}
                t if t.is_dir() => todo.push(name.into()),
                t if t.is_file() => all.push(name),
                _ => {}
            }
        }
    }
    all.sort();
    Ok(all)
}

/// Copies those of them that differ, so that cargo builds nothing twice, and removes what is gone.
fn copy(from: &Path, to: &Path, take: impl Fn(&str) -> bool) -> Result<()> {
    let all = files(from)?;
    for name in all.iter().filter(|n| take(n)) {
        put(&to.join(name), &std::fs::read(from.join(name))?)?;
    }
    for gone in files(to)?.iter().filter(|n| !all.contains(n)) {
        std::fs::remove_file(to.join(gone))?;
    }
    Ok(())
}

fn put(path: &Path, text: &[u8]) -> Result<()> {
    if std::fs::read(path).ok().as_deref() != Some(text) {
        std::fs::create_dir_all(path.parent().context("a folder")?)?;
        std::fs::write(path, text)?;
    }
    Ok(())
}

fn is_mutated(name: &str) -> bool {
    PLACES
        .iter()
        .any(|p| name == *p || p.ends_with('/') && name.starts_with(p) && name.ends_with(".rs"))
}

/// Writes the mutated files.
fn write(from: &Path, tree: &Path, without: &BTreeSet<usize>) -> Result<Vec<Mutant>> {
    let lib = std::fs::read_to_string(from.join(LIB))? + IS;
    put(&tree.join(LIB), lib.as_bytes())?;
    let (mutants, texts) = rewrite(from, without)?;
    for (name, text) in texts {
        put(&tree.join(name), text.as_bytes())?;
    }
    Ok(mutants)
}

/// All mutants, and the files that have them: names and texts.
type Rewritten = (Vec<Mutant>, Vec<(String, String)>);

/// Puts the mutants into the files that are mutated.
fn rewrite(from: &Path, without: &BTreeSet<usize>) -> Result<Rewritten> {
    let mut r = Rewriter::default();
    r.without = without.clone();
    let mut texts = Vec::new();
    for name in files(from)?.into_iter().filter(|n| is_mutated(n)) {
        let text = std::fs::read_to_string(from.join(&name))?;
        let is = match name.starts_with("lane/") {
            true => "crate::mutant::is",
            false => "::lane::mutant::is",
        };
        let text = r.file(&name, &text, is).with_context(|| name.clone())?;
        // A number is looked for by lines.
        texts.push((name, text.replace("mutant :: is", "mutant\n:: is")));
    }
    Ok((r.mutants, texts))
}

fn messages(said: &str) -> impl Iterator<Item = Value> + '_ {
    said.lines().filter_map(|l| serde_json::from_str(l).ok())
}

fn errors(said: &str) -> impl Iterator<Item = Value> + '_ {
    messages(said).filter(|v| v["message"]["level"] == "error")
}

/// Numbers of the mutants that the compiler complained of: each error's nearest number before it, or in it.
fn wrong(tree: &Path, said: &str) -> Result<BTreeSet<usize>> {
    let mut bad = BTreeSet::new();
    for v in errors(said) {
        for s in v["message"]["spans"].as_array().into_iter().flatten() {
            let (Some(file), Some(at), Some(end)) = (
                s["file_name"].as_str(),
                s["byte_start"].as_u64(),
                s["byte_end"].as_u64(),
            ) else {
                continue;
            };
            let Ok(text) = std::fs::read_to_string(tree.join(file)) else {
                continue;
            };
            let number = |at: usize| -> Option<usize> {
                let t = text[at..].split_once('(')?.1;
                t.split_once("u32")?.0.trim().parse().ok()
            };
            let (at, end) = (at as usize, end as usize);
            let inside = text[at..end].find("mutant\n:: is").map(|i| at + i);
            let before = text[..at].rfind("mutant\n:: is");
            bad.extend(inside.or(before).and_then(number));
        }
    }
    Ok(bad)
}
