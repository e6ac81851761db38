//! Other people's test suites, each in several modes: every test must have the result that it has
//! without the shim (`make suites`, with names `make suites ARGS=name`; `make suites-full` runs all of
//! them in all modes and writes the table in docs/compatibility.md; `UNDERPASS_SUITES_MODES=eager,off`
//! runs these modes alone).
//!
//! A test whose result differs is run once more in both modes, for some fail bare, too, now and then.
//! What differs again fails; what does not is counted in the table as unsteady.

mod cpython;
mod curl;
mod debian;
mod memcached;
mod redis;
mod table;
mod tokio;

use anyhow::{ensure, Context, Result};
use libtest_mimic::{Arguments, Failed, Trial};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use underpass_tests::harness::{Daemon, Place};
use underpass_tests::page::Line;

/// A suite that takes less is quick.
const QUICK: Duration = Duration::from_secs(4);
/// A suite of short connections runs so often at most until enough of them have been promoted.
const REPEATS: u32 = 12;

/// Names of the modes that are to be run alone, with commas between them.
const MODES: &str = "UNDERPASS_SUITES_MODES";

/// Each test's name and what became of it.
pub type Results = BTreeMap<String, String>;

/// How a suite runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Without the shim.
    Bare,
    /// With the shim loaded and switched off.
    Off,
    /// As `underpass run` starts programs.
    Default,
    /// Every connection promoted at its first call.
    Eager,
    /// The same, in rings of one page.
    Page,
    /// The same, while all connections are sent down and up at random.
    Chaos,
}

impl Mode {
    const ALL: &'static [Mode] = &[
        Mode::Off,
        Mode::Default,
        Mode::Eager,
        Mode::Page,
        Mode::Chaos,
    ];
    /// What is run where time is short, and what besides with suites that are quick.
    const FEW: &'static [Mode] = &[Mode::Page];
    const QUICK: &'static [Mode] = &[Mode::Page, Mode::Chaos];

    const fn name(self) -> &'static str {
        match self {
            Mode::Bare => "bare",
            Mode::Off => "off",
            Mode::Default => "default",
            Mode::Eager => "eager",
            Mode::Page => "one page",
            Mode::Chaos => "down and up",
        }
    }
}

/// How many ends a suite leaves promoted at least, in the modes where connections can be.
#[derive(Clone, Copy)]
pub struct Floors {
    pub default: u64,
    pub eager: u64,
    pub page: u64,
    pub chaos: u64,
}

impl Floors {
    pub const fn new(default: u64, eager: u64, page: u64, chaos: u64) -> Self {
        Floors {
            default,
            eager,
            page,
            chaos,
        }
    }

    fn of(self, mode: Mode) -> u64 {
        match mode {
            Mode::Bare | Mode::Off => 0,
            Mode::Default => self.default,
            Mode::Eager => self.eager,
            Mode::Page => self.page,
            Mode::Chaos => self.chaos,
        }
    }
}

type Run = Box<dyn Fn(&Place, &Path) -> Result<Results> + Send + Sync>;

/// A suite, or a part of one that is run by itself.
pub struct Suite {
    pub name: &'static str,
    /// Is it run by `make suites`, too?
    pub bounded: bool,
    /// How many tests it has at least.
    pub tests: usize,
    pub ends: Floors,
    pub version: fn() -> Result<String>,
    /// Runs it in an empty directory.
    pub run: Run,
}

fn suites() -> Vec<Suite> {
    let mut all = cpython::suites();
    all.extend(redis::suites());
    all.extend(memcached::suites());
    all.extend(curl::suites());
    all.extend(tokio::suites());
    all
}

/// What one mode brought.
pub struct Outcome {
    pub mode: Mode,
    pub tests: usize,
    pub promoted: u64,
    pub unsteady: usize,
    pub differs: Vec<String>,
}

fn differences(bare: &Results, shim: &Results) -> Vec<String> {
    let ids: BTreeSet<_> = bare.keys().chain(shim.keys()).collect();
    ids.into_iter()
        .filter(|id| bare.get(*id) != shim.get(*id))
        .map(|id| format!("{id}: bare {:?}, now {:?}", bare.get(id), shim.get(id)))
        .collect()
}

impl Suite {
    fn once(&self, place: &Place) -> Result<Results> {
        let dir = tempfile::Builder::new().prefix("upsuite-").tempdir()?;
        (self.run)(place, dir.path())
    }

    /// Runs it in a mode: results, and how many ends were promoted.
    fn under(&self, mode: Mode) -> Result<(Results, u64)> {
        if mode == Mode::Bare {
            return Ok((self.once(&Place::bare())?, 0));
        }
        let small: &[&str] = &["--ring-log2", "12", "--ring-max-log2", "12"];
        let d = Daemon::with(match mode {
            Mode::Page | Mode::Chaos => small,
            _ => &[],
        })?;
        let results = match mode {
            Mode::Off => self.once(&d.place().off())?,
            Mode::Default => self.once(&d.place())?,
            Mode::Chaos => d.down_and_up(|| self.once(&d.eager()))?,
            _ => self.once(&d.eager())?,
        };
        let s = d.stats()?;
        ensure!(
            mode != Mode::Off || s.promoted == 0,
            "promoted although it is off"
        );
        println!(
            "{}, {}: {} tests, {} promoted ends, {} bytes on lanes, {} ups, {} downs, {} resets",
            self.name,
            mode.name(),
            results.len(),
            s.promoted,
            s.lane_tx_bytes,
            s.ups,
            s.downs,
            s.resets
        );
        Ok((results, s.promoted))
    }

    /// Runs it in a mode, and again until enough has been promoted: most of these connections are so
    /// short that it is luck which of them live to see their lane.
    fn compare(&self, bare: &Results, mode: Mode) -> Result<Outcome> {
        let floor = self.ends.of(mode);
        let mut all = Outcome {
            mode,
            tests: 0,
            promoted: 0,
            unsteady: 0,
            differs: Vec::new(),
        };
        for _ in 0..REPEATS {
            self.compare_once(bare, &mut all)?;
            if all.promoted >= floor || !all.differs.is_empty() {
                break;
            }
        }
        if all.promoted < floor {
            let promoted = all.promoted;
            let text = format!("{promoted} ends were promoted, expected {floor}");
            all.differs.push(text);
        }
        Ok(all)
    }

    fn compare_once(&self, bare: &Results, all: &mut Outcome) -> Result<()> {
        let (results, promoted) = self.under(all.mode)?;
        all.tests = results.len();
        all.promoted += promoted;
        let first = differences(bare, &results);
        if first.is_empty() {
            return Ok(());
        }
        println!(
            "{}, {}: once more, because of\n{}",
            self.name,
            all.mode.name(),
            first.join("\n")
        );
        let (bare, _) = self.under(Mode::Bare)?;
        let (results, promoted) = self.under(all.mode)?;
        all.promoted += promoted;
        let again = differences(&bare, &results);
        if again.is_empty() {
            all.unsteady += first.len();
        }
        all.differs.extend(again);
        Ok(())
    }

    fn all(&self, full: bool) -> Result<Vec<Outcome>> {
        let begin = Instant::now();
        let (bare, _) = self.under(Mode::Bare)?;
        let asked = std::env::var(MODES).ok();
        let asked = |m: &&Mode| {
            asked
                .as_ref()
                .is_none_or(|a| a.split(',').any(|n| n == m.name()))
        };
        let modes = match full {
            true => Mode::ALL,
            false if begin.elapsed() < QUICK => Mode::QUICK,
            false => Mode::FEW,
        };
        ensure!(
            bare.len() >= self.tests,
            "{} ran {} tests only",
            self.name,
            bare.len()
        );
        let modes = modes.iter().filter(asked);
        modes.map(|m| self.compare(&bare, *m)).collect()
    }
}

fn main() -> ExitCode {
    let full = std::env::var_os("UNDERPASS_SUITES").is_some_and(|v| v == "full");
    let rows: &'static Mutex<Vec<Line>> = Box::leak(Box::default());
    let trial = |s: Suite| {
        Trial::test(s.name, move || {
            let run = || -> Result<()> {
                let outcomes = s.all(full)?;
                let wrong: Vec<String> = outcomes
                    .iter()
                    .flat_map(|o| o.differs.iter().map(|d| format!("{}: {d}", o.mode.name())))
                    .collect();
                let line = table::line(s.name, &(s.version)()?, &outcomes);
                rows.lock().unwrap_or_else(|e| e.into_inner()).push(line);
                ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
                Ok(())
            };
            run()
                .with_context(|| s.name)
                .map_err(|e| Failed::from(format!("{e:#}")))
        })
    };
    let mut args = Arguments::from_args();
    args.test_threads = Some(1); // results that depend on time should not depend on each other
    let trials = suites()
        .into_iter()
        .filter(|s| full || s.bounded || args.filter.is_some())
        .map(trial)
        .collect();
    let conclusion = libtest_mimic::run(&args, trials);
    let rows = rows.lock().unwrap_or_else(|e| e.into_inner());
    print!("\n{}", table::TABLE.show(&rows));
    if full {
        if let Err(e) = table::TABLE.write(&rows) {
            eprintln!("{e:#}");
            return ExitCode::FAILURE;
        }
    }
    match conclusion.has_failed() {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    }
}
