//! The test programs, and how they are run.

use crate::rewrite::Key;
use anyhow::{ensure, Context, Result};
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A test program.
pub struct Run {
    pub stage: Stage,
    target: &'static str,
    /// What it is told.
    args: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
}

/// The programs are built and run in steps, each only with what has survived those before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// The contract crate's own tests, which take seconds to build, and no second to run.
    Lane,
    /// Those that take longer to run.
    Random,
    /// The engine's.
    Engine,
    /// The contract crate's under loom.
    Loom,
    /// Two whole daemons: minutes to build.
    World,
    /// The daemon's own.
    Daemon,
}

pub const STAGES: [Stage; 6] = [
    Stage::Lane,
    Stage::Random,
    Stage::Engine,
    Stage::Loom,
    Stage::World,
    Stage::Daemon,
];

impl Stage {
    /// The package whose tests are run.
    pub fn package(self) -> &'static str {
        match self {
            Stage::Lane | Stage::Random | Stage::Loom => "underpass-lane",
            Stage::Engine => "underpass-rdma",
            Stage::World => "underpass-world",
            Stage::Daemon => "underpassd",
        }
    }

    /// Is a file among what the stage's programs are built of?
    pub fn has(self, key: &Key) -> bool {
        let dirs: &[&str] = match self {
            Stage::Lane | Stage::Random | Stage::Loom => &["lane/"],
            Stage::Engine => &["lane/", "daemon/rdma/"],
            Stage::World | Stage::Daemon => &[""],
        };
        dirs.iter().any(|d| key.file.starts_with(d))
    }

    /// How cargo is told to build them.
    pub fn targets(self) -> Vec<&'static str> {
        let same = |r: &&Run| r.stage.package() == self.package();
        let targets: BTreeSet<&str> = PROGRAMS.iter().filter(same).map(|r| r.target).collect();
        let mut all = vec!["-p", self.package()];
        for t in targets {
            match t {
                "lib" => all.push("--lib"),
                _ if self == Stage::Loom => {}
                t => all.extend(["--test", t]),
            }
        }
        all
    }
}

const fn run(stage: Stage, target: &'static str) -> Run {
    let (args, env): (&[&str], &[(&str, &str)]) = (&[], &[]);
    Run {
        stage,
        target,
        args,
        env,
    }
}

/// Of each stage the quick ones first.
pub static PROGRAMS: [Run; 16] = [
    run(Stage::Lane, "lane_alone"),
    run(Stage::Lane, "lane_cases"),
    run(Stage::Lane, "takeover_cases"),
    run(Stage::Lane, "lib"),
    Run {
        env: &[SAME_CASES, NO_SHRINKING],
        ..run(Stage::Lane, "takeover_hostile")
    },
    Run {
        env: &[("PROPTEST_CASES", "2000"), SAME_CASES, NO_SHRINKING],
        ..run(Stage::Random, "lane_random")
    },
    Run {
        env: &[SAME_CASES, NO_SHRINKING],
        ..run(Stage::Random, "lane_hostile")
    },
    run(Stage::Engine, "engine_alone"),
    run(Stage::Engine, "lib"),
    run(Stage::Engine, "hostile"),
    Run {
        env: &[("SEEDS", "300")],
        ..run(Stage::Engine, "seeds")
    },
    run(Stage::Loom, "lib"),
    Run {
        args: &["stories"],
        ..run(Stage::World, "two_daemons")
    },
    run(Stage::Daemon, "lib"),
    run(Stage::Daemon, "takeover"),
    Run {
        args: &["--skip", "stories"],
        env: &[("SEEDS", "400")],
        ..run(Stage::World, "two_daemons")
    },
];

/// Random operations are the same in each run.
const SAME_CASES: (&str, &str) = ("PROPTEST_RNG_SEED", "1");
/// Whether one fails is all that counts.
const NO_SHRINKING: (&str, &str) = ("PROPTEST_MAX_SHRINK_ITERS", "0");

/// A test program that runs so many times longer than without a mutant hangs.
const SLOWER: u32 = 20;

/// What was seen of a change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// All is well.
    Passes,
    /// A test fails: its name, if the program has said it.
    Fails(Option<String>),
    /// It takes too long.
    Hangs,
}

impl Run {
    pub fn name(&self) -> String {
        let loom = match self.stage {
            Stage::Loom => " under loom",
            _ => "",
        };
        [&[self.stage.package(), self.target], self.args]
            .concat()
            .join(" ")
            + loom
    }

    /// Is that what cargo has built it from: a target of the package in this folder?
    pub fn is(&self, target: &str, manifest: &str) -> bool {
        let (name, at) = match self.stage.package() {
            "underpass-lane" => ("lane", "lane/Cargo.toml"),
            "underpass-rdma" => ("underpass_rdma", "daemon/rdma/Cargo.toml"),
            package => (package, "daemon/Cargo.toml"),
        };
        let name = if self.target == "lib" {
            name
        } else {
            self.target
        };
        name == target && manifest.ends_with(&format!("/{at}"))
    }
}

/// A program that is built.
pub struct Program {
    pub name: String,
    pub run: &'static Run,
    path: PathBuf,
    limit: Duration,
}

impl Program {
    pub fn new(run: &'static Run, path: PathBuf) -> Program {
        Program {
            name: run.name(),
            run,
            path,
            limit: Duration::from_secs(600),
        }
    }

    /// Runs it without a change; from then on it hangs when it takes much longer.
    pub fn measure(&mut self, to: &Path) -> Result<Seen> {
        let begin = Instant::now();
        let seen = self.see(None, None, true, to)?;
        let took = begin.elapsed();
        println!("{}: {:.1} s", self.name, took.as_secs_f64());
        self.limit = Duration::from_secs(5) + took * SLOWER;
        Ok(seen)
    }

    /// Runs it with a change, all of it or one test. What it says goes to a file below `to`, unless it is to be heard.
    pub fn see(
        &self,
        mutant: Option<usize>,
        test: Option<&str>,
        loud: bool,
        to: &Path,
    ) -> Result<Seen> {
        static SAID: AtomicU32 = AtomicU32::new(0);
        let mut c = Command::new(&self.path);
        match test {
            Some(t) => c.args(["--exact", t]),
            None => c.args(self.run.args),
        };
        c.envs(self.run.env.iter().copied());
        c.env("RUST_BACKTRACE", "0").stdin(Stdio::null());
        // A mutant's failures are none of the tree's.
        c.env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1");
        if let Some(n) = mutant {
            c.env("MUTANT", n.to_string());
        }
        let said = to.join(format!("said-{}", SAID.fetch_add(1, Relaxed)));
        if !loud {
            c.stdout(std::fs::File::create(&said)?)
                .stderr(Stdio::null());
        }
        let mut child = c.spawn().with_context(|| self.name.clone())?;
        let end = Instant::now() + self.limit;
        let failed = || {
            failed(&String::from_utf8_lossy(
                &std::fs::read(&said).unwrap_or_default(),
            ))
        };
        let seen = loop {
            if let Some(status) = child.try_wait()? {
                // (Somebody stops the run: that is no catch.)
                let stopped = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGKILL];
                ensure!(
                    !status.signal().is_some_and(|s| stopped.contains(&s)),
                    "{} was stopped",
                    self.name
                );
                break match status.success() {
                    true => Seen::Passes,
                    false => Seen::Fails(failed()),
                };
            }
            // One failed test is enough.
            let first = failed();
            if first.is_some() || Instant::now() > end {
                child.kill()?;
                child.wait()?;
                break first.map_or(Seen::Hangs, |t| Seen::Fails(Some(t)));
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        if !loud {
            std::fs::remove_file(&said)?;
        }
        Ok(seen)
    }
}

/// The first test that has failed, by what the program printed.
fn failed(said: &str) -> Option<String> {
    said.lines()
        .filter_map(|l| l.strip_prefix("test ")?.strip_suffix(" ... FAILED"))
        .map(str::to_string)
        .next()
}
