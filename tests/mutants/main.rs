//! Mutants of the switch, takeover and what daemons do across nodes: each must fail a test that needs no virtual machine.
//!
//! All mutants of a sample are built at once, each behind a test of its number, in a copy of the tree under
//! `target/mutants`; a run of the test programs with `MUTANT=n` then has that one. A seeded sample is run, of every
//! mutant only as many programs as it survives. It fails if a mutant survives that `survivors.md` does not explain.
//!
//! A run that was stopped goes on where it was. `JOBS=n`: how many mutants are run at a time (else: as many as there are
//! processors). `UNTIL=Loom`: only the steps up to that one ([`programs::Stage`]), without a result.
//!
//! ```text
//! make mutants ARGS="[SAMPLE [SEED]]"          300 and 1
//! make mutants ARGS="only N..."                these, and says what the test programs print
//! make mutants ARGS="in PART [SAMPLE [SEED]]"  those of files whose name has PART
//! make mutants ARGS="300 and in rail 50"        more than one of these
//! make mutants ARGS=list                       all of them, with their numbers
//! ```

mod caught;
mod known;
mod programs;
mod rewrite;
mod survivors;
mod tree;

use anyhow::{bail, ensure, Context, Result};
use caught::{Catch, Caught};
use programs::{Program, Seen, Stage, PROGRAMS, STAGES};
use rewrite::{Key, Mutant};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Instant;
use underpass_rdma::sim::Rng;
use underpass_tests::harness::paths;

/// What is known of survivors.
const SURVIVORS: &str = "tests/mutants/survivors.md";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    if words == ["list"] {
        let (all, _) = tree::rewrite(&paths::root(), &BTreeSet::new())?;
        for (n, m) in all.iter().enumerate() {
            println!("{}", m.name(n));
        }
        return Ok(());
    }
    let mut bench = Bench::new()?;
    if let ["only", which @ ..] = words.as_slice() {
        let sample: Result<Vec<usize>, _> = which.iter().map(|n| n.parse()).collect();
        return bench.run(&sample?, true);
    }
    let mut sample = BTreeSet::new();
    for part in words.split(|w| *w == "and") {
        let all = 0..bench.mutants.len();
        sample.extend(match part {
            ["in", part, rest @ ..] => {
                let is = |n: &usize| bench.mutants[*n].key.file.contains(part);
                choose(all.filter(is).collect(), rest)?
            }
            rest => choose(all.collect(), rest)?,
        });
    }
    bench.run(&Vec::from_iter(sample), false)
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

/// All mutants, and what is known of them.
struct Bench {
    mutants: Vec<Mutant>,
    without: BTreeSet<usize>,
    /// Below it everything is built.
    to: PathBuf,
    caught: Mutex<Caught>,
}

impl Bench {
    /// Nothing is built yet.
    fn new() -> Result<Bench> {
        let to = paths::target().join("mutants");
        let files = tree::prepare(&to)?;
        let from = to.join("from");
        let (mutants, _) = tree::rewrite(&from, &BTreeSet::new())?;
        let without = known::load(&from, &to.join("without"), &mutants)?;
        let caught = Caught::load(to.join("caught"), &from, &files)?;
        Ok(Bench {
            mutants,
            without,
            caught: Mutex::new(caught),
            to,
        })
    }

    /// Builds the programs of a stage with the mutants of the sample, but for those that do not compile.
    fn build(&mut self, stage: Stage, sample: &[usize]) -> Result<Vec<Program>> {
        let (from, list) = (self.to.join("from"), self.to.join("without"));
        let sample: BTreeSet<usize> = sample.iter().copied().collect();
        for _ in 0..40 {
            let others = (0..self.mutants.len()).filter(|n| !sample.contains(n));
            tree::write(
                &self.to,
                &others.chain(self.without.iter().copied()).collect(),
            )?;
            let out = tree::cargo(&self.to, stage).output()?;
            let said = String::from_utf8_lossy(&out.stdout);
            if out.status.success() {
                return self.find(stage, &said);
            }
            let bad = tree::wrong(&self.to, &said)?;
            if bad.is_empty() {
                tree::errors(&said).for_each(|v| eprintln!("{}", v["message"]["rendered"]));
                bail!("the tree with mutants does not build");
            }
            self.without.extend(bad);
            known::store(&from, &list, &self.mutants, &self.without)?;
        }
        bail!("too many mutants do not compile")
    }

    /// Finds the test programs, and how long each takes without a mutant.
    fn find(&self, stage: Stage, said: &str) -> Result<Vec<Program>> {
        let mut all = Vec::new();
        for run in PROGRAMS.iter().filter(|r| r.stage == stage) {
            let path = tree::messages(said)
                .filter(|v| v["reason"] == "compiler-artifact" && v["profile"]["test"] == true)
                .find(|v| {
                    let of = |v: &serde_json::Value| v.as_str().unwrap_or_default().to_string();
                    run.is(&of(&v["target"]["name"]), &of(&v["manifest_path"]))
                })
                .and_then(|v| Some(PathBuf::from(v["executable"].as_str()?)));
            let name = run.name();
            let mut p = Program::new(run, path.with_context(|| format!("{name} was not built"))?);
            let seen = p.measure(&self.to)?;
            ensure!(seen == Seen::Passes, "{name} fails without a mutant");
            all.push(p);
        }
        Ok(all)
    }

    /// What catches a mutant: first the test that has done so before.
    fn try_one(&self, n: usize, programs: &[Program], loud: bool) -> Result<Option<Catch>> {
        let key = &self.mutants[n].key;
        let hint = self.caught.lock().expect("lock").hint(key).cloned();
        let is = |p: &Program| hint.as_ref().is_some_and(|h| h.program == p.name);
        let alone = programs.iter().find(|p| is(p)).zip(hint.as_ref());
        let alone = alone.and_then(|(p, h)| match &h.seen {
            Seen::Fails(Some(test)) => Some((p, Some(test.as_str()))),
            _ => None,
        });
        let mut order: Vec<&Program> = programs.iter().collect();
        order.sort_by_key(|p| !is(p)); // (which keeps the others' order)
        let all = order.into_iter().map(|p| (p, None));
        for (p, test) in alone.filter(|_| !loud).into_iter().chain(all) {
            let seen = p.see(Some(n), test, loud, &self.to)?;
            if seen != Seen::Passes {
                let program = p.name.clone();
                return Ok(Some(Catch { program, seen }));
            }
        }
        Ok(None)
    }

    /// Runs the programs of a stage with each of these. Returns those that survive.
    fn run_stage(
        &self,
        sample: &BTreeSet<usize>,
        programs: &[Program],
        loud: bool,
    ) -> Result<BTreeSet<usize>> {
        let next = Mutex::new(sample.iter());
        let left = Mutex::new(BTreeSet::new());
        let work = || -> Result<()> {
            loop {
                let Some(n) = next.lock().expect("lock").next() else {
                    return Ok(());
                };
                let m = &self.mutants[*n];
                if let Some(c) = self.try_one(*n, programs, loud)? {
                    println!("{}: {c}", m.name(*n));
                    self.caught.lock().expect("lock").add(&m.key, c)?;
                } else {
                    left.lock().expect("lock").insert(*n);
                }
            }
        };
        std::thread::scope(|s| {
            let all: Vec<_> = (0..jobs()).map(|_| s.spawn(work)).collect();
            all.into_iter()
                .try_for_each(|t| t.join().expect("a thread of ours"))
        })?;
        Ok(left.into_inner()?)
    }

    fn run(&mut self, sample: &[usize], loud: bool) -> Result<()> {
        let begin = Instant::now();
        let mut left: BTreeSet<usize> = sample.iter().copied().collect();
        if !loud {
            let caught = self.caught.lock().expect("lock");
            left.retain(|n| caught.is(&self.mutants[*n].key).is_none());
        }
        let before = sample.len() - left.len();
        let until = std::env::var("UNTIL").ok();
        let mut skipped = false;
        for (i, stage) in STAGES.into_iter().enumerate() {
            skipped |= i > 0 && until == Some(format!("{:?}", STAGES[i - 1]));
            if skipped {
                continue;
            }
            let tries =
                |b: &Bench, n: &usize| stage.has(&b.mutants[*n].key) && !b.without.contains(n);
            if !left.iter().any(|n| tries(self, n)) {
                continue;
            }
            let programs = self.build(stage, sample)?;
            let now: BTreeSet<usize> = left.iter().copied().filter(|n| tries(self, n)).collect();
            println!("{stage:?}: {} to try", now.len());
            let stay = self.run_stage(&now, &programs, loud)?;
            left.retain(|n| !now.contains(n) || stay.contains(n));
        }
        left.retain(|n| !self.without.contains(n));
        if skipped {
            left.iter()
                .for_each(|n| println!("{}: not to the end", self.mutants[*n].name(*n)));
            let caught = sample.len() - left.len();
            println!(
                "{caught} of {}, {} not to the end",
                sample.len(),
                left.len()
            );
            return Ok(());
        }
        for n in &left {
            println!("{}: SURVIVES", self.mutants[*n].name(*n));
            let (program, seen) = (String::new(), Seen::Passes);
            let mut caught = self.caught.lock().expect("lock");
            caught.add(&self.mutants[*n].key, Catch { program, seen })?;
        }
        let tried: Vec<usize> = sample
            .iter()
            .copied()
            .filter(|n| !self.without.contains(n))
            .collect();
        let none = sample.len() - tried.len();
        let left = tried
            .iter()
            .copied()
            .filter(|n| self.was(*n, &Seen::Passes));
        let left: BTreeSet<usize> = left.collect();
        let unexplained = self.report(&tried, &left)?;
        let hang = tried.iter().filter(|n| self.was(**n, &Seen::Hangs)).count();
        println!(
            "{} mutants in all, {} tried, {} caught ({hang} because a test hangs; {before} tried by a run before, on \
             the same tree), {} survive, {unexplained} of them unexplained ({none} did not compile), in {:.0} s",
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

    /// What was seen of a mutant on this tree, is it this?
    fn was(&self, n: usize, seen: &Seen) -> bool {
        let caught = self.caught.lock().expect("lock");
        let is = caught.is(&self.mutants[n].key);
        is.is_some_and(|c| c.seen == *seen)
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

impl std::fmt::Display for Catch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.seen {
            Seen::Fails(Some(test)) => write!(f, "{}, {test}", self.program),
            Seen::Hangs => write!(f, "{} hangs", self.program),
            _ => write!(f, "{}", self.program),
        }
    }
}

/// How many mutants are run at a time.
fn jobs() -> usize {
    let said = std::env::var("JOBS").ok().and_then(|n| n.parse().ok());
    said.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
}
