//! Seeded chaos: pairs of programs whose every byte is compared, while their daemon is killed each second,
//! operators send lanes down and up, programs are killed, start children of every kind, close
//! connections in signal handlers, and reach their limits.
//!
//! The seed decides what happens to whom and in which order; when exactly it happens the machine does.

use crate::harness::{until, Daemon, Place, Program, Running, PATIENCE};
use crate::lab::stream::pattern::mix;
use crate::lab::stream::{
    Disturbed, End, Last, Outcome, Progress, Report, Role, Sending, Spec, Style,
};
use crate::lab::streams::{all_or_reset, report, whole};
use anyhow::{bail, ensure, Context, Result};
use lane::proto::reason::Reason;
use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use underpass_admin::Target;

/// Pairs of programs at a time.
const SLOTS: u64 = 3;
/// Longest that a pair may take that has nothing to wait for: only against hangs.
const LIMIT: Duration = Duration::from_secs(120);
/// Largest stream, log2 of bytes.
const BYTES_LOG2: u64 = 25;
/// Descriptors of a program that is to reach its limit: its streams need up to 24 of them.
const FEW_DESCRIPTORS: u64 = 40;
/// Ends with a lane that the daemon allows: fewer than there are most of the time. Both ends of each lane
/// count here.
const ENDS: u32 = 10;

/// What happened.
#[derive(Debug, Default)]
pub struct Tally {
    pub pairs: u64,
    /// Pairs of which one program was killed, or ended without closing.
    pub killed: u64,
    /// Connections whose peer was told a reset (only where its program was killed).
    pub cut: u64,
    pub bytes: u64,
    pub lane_bytes: u64,
    pub daemons_killed: u64,
    pub commands: u64,
    pub disturbed: Disturbed,
    /// Ends that were seen on a lane in both directions.
    pub promoted: u64,
    /// Ends that were refused a lane, because there were enough.
    pub refused: u64,
    /// Most lanes that a daemon had.
    pub lanes: u64,
    /// Switches up and down, as far as the daemons' counters told them.
    pub ups: u64,
    pub downs: u64,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(f, "pairs of programs        {}", self.pairs)?;
        writeln!(f, "programs killed          {}", self.killed)?;
        writeln!(f, "connections reset by that {}", self.cut)?;
        writeln!(f, "bytes compared           {}", self.bytes)?;
        writeln!(f, "bytes seen on lanes      {}", self.lane_bytes)?;
        writeln!(f, "ends seen promoted       {}", self.promoted)?;
        writeln!(f, "switches up, down        {}, {}", self.ups, self.downs)?;
        writeln!(f, "daemons killed           {}", self.daemons_killed)?;
        writeln!(f, "operators' down and up   {}", self.commands)?;
        let d = &self.disturbed;
        writeln!(
            f,
            "spawn, system, fork      {}, {}, {}",
            d.spawns, d.systems, d.forks
        )?;
        writeln!(f, "inherited by exec        {}", d.inherited)?;
        writeln!(
            f,
            "lanes at most, refused   {}, {}",
            self.lanes, self.refused
        )?;
        write!(f, "closed by handlers       {}", d.handler_closes)
    }
}

/// Numbers of one actor.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// What the actors share.
struct Stage {
    daemon: Mutex<Daemon>,
    tally: Mutex<Tally>,
    seen: Mutex<HashSet<(u32, u64)>>,
    refused: Mutex<HashSet<(u32, u64)>>,
    end: Instant,
    failed: AtomicBool,
    next: AtomicU64,
    dir: PathBuf,
    program: PathBuf,
    seed: u64,
}

fn held<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // An actor that panicked has failed the run already.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// Runs it for so long. The first thing that goes wrong ends it.
/// `program`: the built `lab-stream`.
pub fn run(program: &Path, seed: u64, length: Duration) -> Result<Tally> {
    let dir = tempfile::Builder::new().prefix("upsoak-").tempdir()?;
    let config = dir.path().join("underpassd.toml");
    std::fs::write(&config, format!("[limits]\nlanes = {ENDS}\n"))?;
    let daemon = Daemon::with(&["--config", &config.to_string_lossy()])?;
    let stage = Arc::new(Stage {
        daemon: Mutex::new(daemon),
        tally: Mutex::default(),
        seen: Mutex::default(),
        refused: Mutex::default(),
        end: Instant::now() + length,
        failed: AtomicBool::new(false),
        next: AtomicU64::new(0),
        dir: dir.path().into(),
        program: program.into(),
        seed,
    });
    type Actor = fn(&Stage, Random) -> Result<()>;
    let actors = std::iter::repeat_n(pairs as Actor, SLOTS as usize).chain([operator as Actor]);
    let threads: Vec<_> = (1..)
        .zip(actors)
        .map(|(number, actor)| {
            let stage = Arc::clone(&stage);
            std::thread::spawn(move || {
                let done = actor(&stage, Random(mix(seed ^ mix(number))));
                if done.is_err() {
                    stage.failed.store(true, SeqCst);
                }
                done
            })
        })
        .collect();
    let mut results = vec![];
    for t in threads {
        results.push(t.join().unwrap_or_else(|_| bail!("an actor has panicked")));
    }
    let picture = held(&stage.daemon).picture();
    for r in results {
        r.with_context(|| format!("seed {seed}\n{picture}"))?;
    }
    let mut tally = std::mem::take(&mut *held(&stage.tally));
    tally.promoted = held(&stage.seen).len() as u64;
    tally.refused = held(&stage.refused).len() as u64;
    Ok(tally)
}

impl Stage {
    fn goes_on(&self) -> bool {
        Instant::now() < self.end && !self.failed.load(SeqCst)
    }
}

/// Kills the daemon each second, and gives orders and counts in between.
fn operator(stage: &Stage, mut random: Random) -> Result<()> {
    while stage.goes_on() {
        let mut before = held(&stage.daemon).stats()?;
        let next = Instant::now() + Duration::from_secs(1);
        while Instant::now() < next {
            std::thread::sleep(Duration::from_millis(20 + random.below(150)));
            let daemon = held(&stage.daemon);
            if random.one_in(3) {
                daemon.down(Target::All)?;
                std::thread::sleep(Duration::from_millis(random.below(30)));
                daemon.up(Target::All)?;
                held(&stage.tally).commands += 2;
            }
            let rows = daemon.ss()?;
            let now = daemon.stats()?;
            let mut tally = held(&stage.tally);
            // Counters of processes that have ended since are missed: the figures are lower bounds.
            tally.ups += now.ups.saturating_sub(before.ups);
            tally.downs += now.downs.saturating_sub(before.downs);
            tally.lane_bytes += now.lane_rx_bytes.saturating_sub(before.lane_rx_bytes);
            ensure!(now.lanes <= (ENDS / 2).into(), "{} lanes", now.lanes);
            tally.lanes = tally.lanes.max(now.lanes);
            before = now;
            let limited = rows.iter().filter(|r| r.reason == Reason::Limit.code());
            held(&stage.refused).extend(limited.map(|r| (r.pid, r.inode)));
            let up = rows.iter().filter(|r| r.mode == "SMCD" && r.up == "both");
            held(&stage.seen).extend(up.map(|r| (r.pid, r.inode)));
        }
        let mut daemon = held(&stage.daemon);
        ensure!(
            !daemon.has_died(),
            "the daemon died by itself\n{}",
            daemon.said()
        );
        daemon.kill();
        std::thread::sleep(Duration::from_millis(random.below(100)));
        daemon.restart()?;
        held(&stage.tally).daemons_killed += 1;
    }
    Ok(())
}

/// One pair of programs after the other.
fn pairs(stage: &Stage, mut random: Random) -> Result<()> {
    while stage.goes_on() {
        let number = stage.next.fetch_add(1, SeqCst);
        let pair = Pair::draw(stage, number, &mut random);
        pair.play(stage, &mut random)
            .with_context(|| format!("pair {number}: {:?}, {:?}", pair.fate, pair.specs))?;
    }
    Ok(())
}

/// What becomes of a pair.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    /// Both send all and shut down.
    Whole,
    /// This end is killed in the middle.
    Killed(usize),
}

struct Pair {
    fate: Fate,
    /// The server, the client.
    specs: [Spec; 2],
    places: [Place; 2],
}

impl Pair {
    fn draw(stage: &Stage, number: u64, random: &mut Random) -> Self {
        let fate = match random.below(4) {
            n @ 0..=1 if random.one_in(2) => Fate::Killed(n as usize),
            _ => Fate::Whole,
        };
        let style = [Style::Threads, Style::Epoll][random.below(2) as usize];
        let connections = 1 + random.below(8) as u32;
        let log2 = 10 + random.below(BYTES_LOG2 - 9);
        let end = |role: Role, name: &str, random: &mut Random| Spec {
            role,
            style,
            connections,
            seed: mix(stage.seed ^ number),
            send: Some(Sending {
                bytes: 1 + random.below(1 << log2),
                rate: if random.one_in(3) { 4 << 20 } else { 0 },
                gate: None,
            }),
            receive: true,
            receive_gate: None,
            last: Last::Shutdown,
            disturb: random.one_in(2).then(|| random.below(u64::MAX)),
            descriptors: random.one_in(4).then_some(FEW_DESCRIPTORS),
            stop: stage.dir.join("never"),
            progress: stage.dir.join(format!("{number}.{name}")),
        };
        let place = |random: &mut Random| {
            let shim = Place::shim(held(&stage.daemon).dir());
            match random.below(8) {
                0 => Place::bare(),
                1..=3 => shim.eager(),
                _ => shim,
            }
        };
        let any = ([127, 0, 0, 1], 0).into();
        Pair {
            fate,
            specs: [
                end(Role::Serve(any), "server", random),
                end(Role::Connect(any), "client", random),
            ],
            places: [place(random), place(random)],
        }
    }

    fn start(&self, program: &Path) -> Result<[Running; 2]> {
        let spawn = |spec: &Spec, place: &Place| {
            Program::new(program, place)
                .arg(serde_json::to_string(spec)?)
                .spawn()
        };
        let mut server = spawn(&self.specs[0], &self.places[0])?;
        let port: u16 = server.line("port ", PATIENCE)?.parse()?;
        let mut spec = self.specs[1].clone();
        spec.role = Role::Connect(([127, 0, 0, 1], port).into());
        let client = spawn(&spec, &self.places[1])?;
        Ok([server, client])
    }

    fn play(&self, stage: &Stage, random: &mut Random) -> Result<()> {
        let mut ends = self.start(&stage.program)?;
        let told = match self.fate {
            Fate::Whole => {
                let [server, client] = ends.map(|e| e.wait(LIMIT).and_then(|o| o.ok()));
                let reports = [report(&server?)?, report(&client?)?];
                self.compare(&reports)?;
                let mut tally = held(&stage.tally);
                tally.bytes += reports.iter().map(received).sum::<u64>();
                reports
            }
            Fate::Killed(which) => {
                std::thread::sleep(Duration::from_micros(random.below(400_000)));
                ends[which].kill();
                let taken = match std::fs::read(&self.specs[which].progress) {
                    // Killed before it has begun.
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
                    read => Progress::parse(&read?),
                };
                let other = &mut ends[1 - which];
                until("the other program ends", LIMIT, || other.has_ended())
                    .with_context(|| other.stderr())?;
                let told = report(&other.stdout());
                // It may have been killed before all connections were made.
                let told = match told {
                    Err(_) if taken.is_empty() || taken.iter().any(|t| t[1] == 0) => {
                        Report::default()
                    }
                    told => told.with_context(|| other.stderr())?,
                };
                let mut cut = 0;
                for (end, taken) in told.ends.iter().zip(&taken) {
                    cut += u64::from(!self.may_be(end, taken[0])?);
                }
                let mut tally = held(&stage.tally);
                tally.killed += 1;
                tally.cut += cut;
                tally.bytes += received(&told);
                [told, Report::default()]
            }
        };
        let mut tally = held(&stage.tally);
        tally.pairs += 1;
        for d in told.iter().map(|r| &r.disturbed) {
            tally.disturbed.spawns += d.spawns;
            tally.disturbed.systems += d.systems;
            tally.disturbed.forks += d.forks;
            tally.disturbed.handler_closes += d.handler_closes;
            tally.disturbed.inherited += d.inherited;
        }
        for s in &self.specs {
            remove(&s.progress);
        }
        Ok(())
    }

    /// Every byte that one end has sent the other must have received, the end of file right after it.
    fn compare(&self, reports: &[Report; 2]) -> Result<()> {
        let n = self.specs[0].connections as usize;
        ensure!(reports.iter().all(|r| r.ends.len() == n), "{reports:?}");
        for (from, to) in [(0, 1), (1, 0)] {
            for (a, b) in reports[from].ends.iter().zip(&reports[to].ends) {
                whole(&a.sent, &b.received)?;
            }
        }
        Ok(())
    }

    /// What the survivor of a killed program may have seen: see [`all_or_reset`]. Or it was told by its
    /// own send, which the kernel then does not repeat to the receiver.
    fn may_be(&self, end: &End, taken: u64) -> Result<bool> {
        let told =
            |o: &Outcome| matches!(o, Outcome::Error(_, e) if e == "EPIPE" || e == "ECONNRESET");
        if end.received.outcome == Outcome::Done && told(&end.sent.outcome) {
            return Ok(false);
        }
        all_or_reset(end, taken)
    }
}

fn received(r: &Report) -> u64 {
    r.ends.iter().map(|e| e.received.bytes).sum()
}

fn remove(path: &Path) {
    let _ = std::fs::remove_file(path);
}
