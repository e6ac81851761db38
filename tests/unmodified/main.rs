//! `make programs`: unmodified programs, as packaged, both ends under the shim as `underpass run` starts
//! them, and beside it over plain TCP; each in a network namespace of its own, so that the kernel's
//! counters say what travelled over TCP, whoever sent it. Writes the table in docs/compatibility.md.
//! (`make programs ARGS=name` runs those whose names contain it.) As root.

use anyhow::{ensure, Context, Result};
use libtest_mimic::{Arguments, Failed, Trial};
use nix::unistd::geteuid;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::Mutex;
use std::thread::sleep;
use std::time::Duration;
use underpass_admin::Row;
use underpass_tests::harness::node::sh;
use underpass_tests::harness::packaged::{Known, Packaged, LIMIT, PROGRAMS};
use underpass_tests::harness::{paths, Daemon, Place, Program, Running};
use underpass_tests::page::{self, Line, Table};

const TABLE: Table = Table {
    name: "programs",
    by: "make programs",
    text: "\
## Programs

Unmodified programs with their users, root directories and process models, under traffic, both ends as
`underpass run` starts them. *Connections*: ends by mode at the moment when most were seen, with the reason of each end of
those that are on TCP then. *On lanes*: share of the bytes after the first second; the rest is what the
loopback device counted, headers and all. *Contents*: are hashes of what arrived those of what was sent?
*To TCP*: what the load did per second, to the same without the shim in the same run.",
    columns: &[
        "program",
        "version",
        "connections",
        "on lanes",
        "contents",
        "to TCP",
    ],
};

/// What does not count, and what does.
const FIRST: Duration = Duration::from_secs(1);
const WINDOW: Duration = Duration::from_secs(4);
/// Some connections last for a moment only.
const LOOKS: u32 = 16;
/// Of the bytes, in percent.
const LEAST: f64 = 95.0;

struct Namespace(String);

impl Namespace {
    fn new() -> Result<Namespace> {
        static N: AtomicU32 = AtomicU32::new(0);
        let n = N.fetch_add(1, Relaxed);
        let ns = Namespace(format!("uprog{}-{n}", std::process::id()));
        sh(&format!("ip netns add {}", ns.0))?;
        sh(&format!("ip -n {} link set lo up", ns.0))?;
        Ok(ns)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = sh(&format!("ip netns del {}", self.0));
    }
}

/// Bytes so far.
#[derive(Clone, Copy)]
struct Bytes {
    lanes: u64,
    loopback: u64,
}

impl Bytes {
    fn now(d: &Daemon, server: &Running) -> Result<Bytes> {
        let text = std::fs::read_to_string(format!("/proc/{}/net/dev", server.pid()))?;
        let lo = text.lines().find_map(|l| l.trim().strip_prefix("lo:"));
        let received = lo.and_then(|l| l.split_whitespace().next());
        Ok(Bytes {
            lanes: d.stats()?.lane_tx_bytes,
            loopback: received.context("no lo")?.parse()?,
        })
    }

    /// Percent of those since then that went over lanes.
    fn share(self, then: Bytes) -> f64 {
        let (lanes, tcp) = (
            (self.lanes - then.lanes) as f64,
            (self.loopback - then.loopback) as f64,
        );
        match lanes + tcp {
            0.0 => 0.0,
            all => 100.0 * lanes / all,
        }
    }
}

/// What was seen of a program under the shim.
struct Seen {
    share: f64,
    rows: Vec<Row>,
    /// Causes by which processes of the server or the load are without the library.
    bars: BTreeMap<String, String>,
    rate: f64,
    unit: String,
}

fn over_tcp(known: &Known) -> Result<(f64, String)> {
    let ns = Namespace::new()?;
    let place = Place::bare().netns(&ns.0);
    let p = Packaged::new(known.name, &place)?;
    let server = p.serve()?;
    let load = p.load()?;
    sleep(FIRST + WINDOW);
    p.finish(load, server)
}

/// What was seen, and whether it is as it should be.
fn under_the_shim(known: &Known) -> Result<(Seen, Result<()>)> {
    let ns = Namespace::new()?;
    let d = Daemon::start()?;
    let place = d.place().netns(&ns.0);
    let p = Packaged::new(known.name, &place)?;
    let server = p.serve()?;
    let load = p.load()?;
    sleep(FIRST);
    let first = Bytes::now(&d, &server)?;
    let mut rows = Vec::new();
    for _ in 0..LOOKS {
        sleep(WINDOW / LOOKS);
        let mut now = d.ss()?;
        now.retain(|r| r.state == "ACTIVE");
        // (Some of the program's connections last for a moment, and have a reason only at the end of it.)
        if rank(known, &now) >= rank(known, &rows) {
            rows = now;
        }
    }
    let last = Bytes::now(&d, &server)?;
    let mut bars = BTreeMap::new();
    for pid in [server.pid(), load.pid()] {
        bars.append(&mut bars_of(&d, pid)?);
    }
    let picture = d.picture();
    let finished = p.finish(load, server);
    let (rate, unit) = finished.with_context(|| picture.clone())?;
    let seen = Seen {
        share: last.share(first),
        rows,
        bars,
        rate,
        unit,
    };
    let judged = seen.judge(known).and_then(|()| {
        ensure!(d.stats()?.resets == 0, "connections were reset");
        Ok(())
    });
    Ok((seen, judged.with_context(|| picture)))
}

/// What a look is worth: rows, and of as many those that show why they are on TCP.
fn rank(known: &Known, rows: &[Row]) -> (usize, bool) {
    let shows = |sign| rows.iter().any(|r| name(r.reason) == sign);
    (
        rows.len(),
        known.tcp.as_ref().is_some_and(|b| shows(b.sign)),
    )
}

fn name(code: u32) -> &'static str {
    lane::proto::reason::Reason::from_code(code).map_or("?", |r| r.info().name)
}

/// Name of each cause, and a program that has it.
fn bars_of(d: &Daemon, pid: u32) -> Result<BTreeMap<String, String>> {
    let out = Program::new(paths::bin("underpass"), &Place::bare())
        .arg("--dir")
        .arg(d.dir())
        .words(&format!("check --json --pid {pid}"))
        .env("UNDERPASS_LIB", paths::shim())
        .run(LIMIT)?;
    let all: Vec<serde_json::Value> = serde_json::from_str(&out.stdout).unwrap_or_default();
    let cause = |p: &serde_json::Value| {
        let name = p["cause"]["name"].as_str()?.to_owned();
        Some((name, p["comm"].as_str()?.to_owned()))
    };
    Ok(all.iter().filter_map(cause).collect())
}

impl Seen {
    /// Ends by mode, the most frequent first.
    fn modes(&self) -> String {
        let mut all: BTreeMap<String, usize> = BTreeMap::new();
        for r in &self.rows {
            let mode = match &*r.mode {
                m @ ("SMCD" | "SMCR") if r.up == "both" => m.to_owned(),
                m => {
                    let lane = m == "SMCD" || m == "SMCR";
                    let m = if lane { "SMCD in one direction" } else { "TCP" };
                    format!("{m} {}/{}", name(r.reason), name(r.peer_reason))
                }
            };
            *all.entry(mode).or_default() += 1;
        }
        let mut all: Vec<_> = all.into_iter().collect();
        all.sort_by_key(|(mode, n)| (std::cmp::Reverse(*n), mode.clone()));
        let mut t = String::new();
        for (mode, n) in &all {
            let _ = write!(t, "{}{n} {mode}", if t.is_empty() { "" } else { ", " });
        }
        for (cause, comm) in &self.bars {
            let _ = write!(t, "; {comm}: {cause}");
        }
        t
    }

    fn judge(&self, known: &Known) -> Result<()> {
        if let Some(on_tcp) = &known.tcp {
            let seen = self.modes();
            ensure!(seen.contains(on_tcp.sign), "no {:?} in {seen}", on_tcp.sign);
            return Ok(());
        }
        let smcd = self.rows.iter().filter(|r| r.mode == "SMCD").count();
        ensure!(
            self.share >= LEAST && smcd >= known.ends,
            "{:.1} % of the bytes on lanes; {}",
            self.share,
            self.modes()
        );
        Ok(())
    }
}

fn number(n: f64) -> String {
    match n {
        n if n >= 10_000.0 => format!("{:.0} k", n / 1000.0),
        n if n >= 100.0 => format!("{n:.0}"),
        n => format!("{n:.1}"),
    }
}

fn run(known: &Known, lines: &Mutex<Vec<Line>>) -> Result<()> {
    let version = Packaged::version(known.name)?;
    let (bare, _) = over_tcp(known).context("without the shim")?;
    let (seen, judged) = under_the_shim(known).context("under the shim")?;
    let cells = [
        known.name.to_owned(),
        version,
        match &known.tcp {
            Some(on_tcp) => format!("{} ({})", seen.modes(), on_tcp.why),
            None => seen.modes(),
        },
        format!("{:.1} %", seen.share),
        "equal".to_owned(),
        format!(
            "{:.2} × ({} to {} {})",
            seen.rate / bare,
            number(seen.rate),
            number(bare),
            seen.unit
        ),
    ];
    let line = page::line(&cells);
    println!("{}", line.1);
    lines.lock().unwrap_or_else(|e| e.into_inner()).push(line);
    judged
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads = Some(1);
    let lines: &'static Mutex<Vec<Line>> = Box::leak(Box::default());
    let trial = |known: &'static Known| {
        let run = move || run(known, lines).map_err(|e| Failed::from(format!("{e:#}")));
        Trial::test(known.name, run).with_ignored_flag(!geteuid().is_root())
    };
    let conclusion = libtest_mimic::run(&args, PROGRAMS.iter().map(trial).collect());
    let lines = lines.lock().unwrap_or_else(|e| e.into_inner());
    print!("\n{}", TABLE.show(&lines));
    if !lines.is_empty() {
        if let Err(e) = TABLE.write(&lines) {
            eprintln!("{e:#}");
            return ExitCode::FAILURE;
        }
    }
    match conclusion.has_failed() {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    }
}
