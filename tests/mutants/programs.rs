//! The test programs, and how they are run.

use crate::rewrite::Key;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A test program.
pub struct Run {
    pub stage: Stage,
    package: &'static str,
    target: &'static str,
    /// What it is told.
    args: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
}

/// The programs are built in three steps, each only when a change has survived those before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// The contract crate's own tests, which take seconds to build.
    Lane,
    /// Those of the engine and of the daemon, with all that they need.
    Daemon,
    /// The contract crate's tests under loom.
    Loom,
}

pub const STAGES: [Stage; 3] = [Stage::Lane, Stage::Daemon, Stage::Loom];

const fn run(stage: Stage, package: &'static str, target: &'static str) -> Run {
    let (args, env): (&[&str], &[(&str, &str)]) = (&[], &[]);
    Run {
        stage,
        package,
        target,
        args,
        env,
    }
}

const fn lane(target: &'static str) -> Run {
    run(Stage::Lane, "underpass-lane", target)
}

const fn engine(target: &'static str) -> Run {
    run(Stage::Daemon, "underpass-rdma", target)
}

const fn daemon(target: &'static str) -> Run {
    run(Stage::Daemon, "underpassd", target)
}

/// Of each stage the quick ones first.
pub static PROGRAMS: [Run; 16] = [
    lane("lib"),
    lane("lane_alone"),
    lane("lane_cases"),
    lane("takeover_cases"),
    Run {
        env: &[("PROPTEST_CASES", "2000"), SAME_CASES],
        ..lane("lane_random")
    },
    Run {
        env: &[SAME_CASES],
        ..lane("lane_hostile")
    },
    Run {
        env: &[SAME_CASES],
        ..lane("takeover_hostile")
    },
    engine("engine_alone"),
    Run {
        args: &["stories"],
        ..daemon("two_daemons")
    },
    daemon("lib"),
    daemon("takeover"),
    engine("lib"),
    engine("hostile"),
    Run {
        env: &[("SEEDS", "300")],
        ..engine("seeds")
    },
    Run {
        args: &["--skip", "stories"],
        env: &[("SEEDS", "400")],
        ..daemon("two_daemons")
    },
    run(Stage::Loom, "underpass-lane", "lib"),
];

/// Random operations are the same in each run.
const SAME_CASES: (&str, &str) = ("PROPTEST_RNG_SEED", "1");

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
        [&[self.package, self.target], self.args].concat().join(" ") + loom
    }

    /// Is a file among what the program is built of?
    pub fn has(&self, key: &Key) -> bool {
        let dirs: &[&str] = match self.package {
            "underpass-lane" => &["lane/"],
            "underpass-rdma" => &["lane/", "daemon/rdma/"],
            _ => &[""],
        };
        dirs.iter().any(|d| key.file.starts_with(d))
    }

    /// Is that what cargo has built it from?
    pub fn is(&self, target: &str) -> bool {
        let name = match (self.target, self.package) {
            ("lib", "underpass-lane") => "lane",
            ("lib", package) => package,
            (target, _) => target,
        };
        name.replace('-', "_") == target.replace('-', "_")
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
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            if Instant::now() > end {
                child.kill()?;
                child.wait()?;
                break None;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let text = std::fs::read(&said).unwrap_or_default();
        if !loud {
            std::fs::remove_file(&said)?;
        }
        Ok(match status {
            None => Seen::Hangs,
            Some(s) if s.success() => Seen::Passes,
            Some(_) => Seen::Fails(failed(&String::from_utf8_lossy(&text))),
        })
    }
}

/// The first test that has failed, by what the program printed.
fn failed(said: &str) -> Option<String> {
    said.lines()
        .filter_map(|l| l.strip_prefix("test ")?.strip_suffix(" ... FAILED"))
        .map(str::to_string)
        .next()
}

/// How the programs of a stage are chosen: arguments for cargo.
pub fn targets(stage: Stage) -> Vec<&'static str> {
    let mut all = vec!["--lib"];
    for (n, r) in PROGRAMS.iter().enumerate() {
        let before =
            |same: &dyn Fn(&Run) -> bool| PROGRAMS[..n].iter().any(|o| o.stage == stage && same(o));
        if r.stage != stage {
            continue;
        }
        if !before(&|o| o.package == r.package) {
            all.extend(["-p", r.package]);
        }
        if r.target != "lib" && !before(&|o| o.target == r.target) {
            all.extend(["--test", r.target]);
        }
    }
    all
}
