//! Two whole daemons, many seeds, each another course of events: see [`mod@world`].

#[path = "two_daemons/mod.rs"]
mod world;

use underpass_rdma::sim::{Faults, Rng};
use world::seen::Counts;
use world::{How, World};

/// What a test lets happen.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Nothing.
    Quiet,
    /// Processes sleep, and connections leave their lanes.
    Leaving,
    /// Processes sleep, fork, execute other programs and are killed.
    Forking,
    /// Everything.
    Rough,
}

fn one(seed: u64, kind: Kind) -> Counts {
    let mut rng = Rng(seed);
    let rough = kind == Kind::Rough;
    let quiet = kind == Kind::Quiet;
    let mut pick = |when, from: &[u64]| match when {
        true => from[rng.below(from.len() as u64) as usize],
        false => 0,
    };
    let faults = Faults {
        delay_ns: pick(true, &[500, 1_000, 2_000, 4_000, 8_000, 16_000]),
        slow_in: pick(true, &[0, 200]),
        error_in: pick(rough, &[0, 2_000]),
        ..Faults::default()
    };
    let mut how = How {
        wires: rough,
        naps: !quiet,
        forks: pick(rough, &[0, 1]) > 0 || kind == Kind::Forking,
        kills: pick(rough || kind == Kind::Forking, &[0, 1]) > 0,
        // (Who leaves while TCP has no room must wait for it.)
        full: pick(!quiet && kind != Kind::Leaving, &[0, 1, 1]) > 0,
        leaves: pick(rough, &[0, 1, 1]) > 0 || kind == Kind::Leaving,
        chaos_in: pick(!quiet, &[15, 50, 200]),
        between_in: pick(true, &[0, 10, 50]),
        drops_in: pick(true, &[0, 2, 10]),
        ..How::default()
    };
    how.restarts = rough && how.kills;
    let faults = Faults {
        late_ns: 1 << (10 + rng.below(13)),
        ..faults
    };
    let ticks = 200 + rng.below(2_000);
    let w = World::new(seed, faults, how, 1 + rng.below(2) as usize);
    (0..1 + rng.below(4)).for_each(|_| w.open_any());
    w.run(ticks);
    w.end()
}

/// The sum over many seeds, and whether these are all of them.
struct Sum {
    counts: Counts,
    all: bool,
}

impl Sum {
    /// Fails if any of these has never happened; of `rare`, if all seeds were run.
    fn insist(&self, often: &[&str], rare: &[&[&str]]) {
        self.counts.insist(often);
        if self.all {
            rare.iter().for_each(|r| self.counts.insist(r));
        }
    }

    fn of(&self, what: &str) -> u64 {
        self.counts.of(what)
    }
}

/// `SEED=n` runs one, to look at it (`WHY=1`: and tells what happens); `SEEDS=n` so many.
fn seeds(name: &str, from: u64, kind: Kind) -> Option<Sum> {
    let number = |v| {
        std::env::var(v)
            .ok()
            .and_then(|s: String| s.parse::<u64>().ok())
    };
    let (only, some) = (number("SEED"), number("SEEDS"));
    let (first, n) = match only {
        Some(seed) => (seed, 1),
        None => (from, some.unwrap_or(MANY)),
    };
    if std::env::var_os("WHY").is_some() {
        tracing_subscriber::fmt()
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .init();
    }
    let mut counts = Counts::default();
    for seed in first..first + n {
        match std::panic::catch_unwind(|| one(seed, kind)) {
            Ok(c) => counts.add(&c),
            Err(e) => {
                eprintln!(
                    "SEED={seed} cargo test -p underpass-world --test two_daemons {name} -- --exact"
                );
                std::panic::resume_unwind(e);
            }
        }
    }
    eprintln!("{name}:{counts}");
    let all = some.is_none();
    only.is_none().then_some(Sum { counts, all })
}

/// Of each kind.
const MANY: u64 = 2_500;

/// What happens in each kind.
const ALWAYS: &[&str] = &[
    "a connection",
    "registered",
    "a lane taken",
    "a sender goes up",
    "bytes on rings",
    "somebody comes between",
    "counts that drops have changed",
    "a look for something to read",
    "unread bytes counted",
    "a peek",
    "bytes thrown away",
    "counted, peeked and received",
    "a direction taken back",
    "a shutdown left to the daemon",
    "a capture",
    "bytes shown by captures",
];
const TAKEOVERS: &[&str] = &[
    "a daemon says where a stream ends",
    "a daemon puts a ring back on TCP",
    "a daemon sends bytes of a ring, or the rest of a frame",
    "a call on a direction that a daemon has",
    "a direction that a daemon gives back",
];
const NAPS: &[&str] = &["a process sleeps", "helpers are late"];
const LEAVES: &[&str] = &[
    "a connection leaves",
    "both ends leave at once",
    "a lane given back",
];
const FULL: &[&str] = &[
    "a way of TCP is disturbed",
    "TCP is full",
    "a look before it arrives",
];
const FORKS: &[&str] = &[
    "fork",
    "a parent ends, and its child goes on",
    "the owner of a lane is killed, or one who shares it",
    "one who shares a connection is killed",
    "a second process uses a lane",
    "a lane is used by one who inherited it",
    "a lane given back by one who inherited it",
    "one who inherited a lane closes it",
    "a close that is not the last",
    "a lane yielded to those who hold the connection, too",
    "the last of those who held a connection is gone",
    "a lane refused because there is another holder",
    "another program goes on",
    "a program ends that holds nothing",
    "a look for holders finds one",
    "a look for holders finds none",
];
const KILLS: &[&str] = &[
    "a process is killed",
    "killed within a call",
    "a last message that nobody reads",
];
/// Twelve times in 2,500 seeds. (A sender's lock once: that is `lane_alone`'s `died`.)
const INHERITED_LOCKS: &[&str] = &["a receiver's lock taken from the dead"];
const RESTARTS: &[&str] = &[
    "a daemon is killed",
    "a daemon is killed that had connections to finish",
    "a daemon killed within a helper's call",
    "a link group whose daemon has died",
    "reclaimed in the middle",
    "a switch that nobody answers",
    "a receiver finds out what became of a switch",
];
const WIRES: &[&str] = &[
    "a wire is cut",
    "a wire is mended",
    "the channel is cut",
    "the channel comes up",
    "a link group given up",
    "declined",
];

#[test]
fn undisturbed() {
    if let Some(s) = seeds("undisturbed", 0, Kind::Quiet) {
        s.insist(
            &["a sender goes up", "bytes on rings"],
            &[ALWAYS, TAKEOVERS],
        );
    }
}

#[test]
fn leaving() {
    if let Some(s) = seeds("leaving", 20_000, Kind::Leaving) {
        let often = [
            "a sender goes up",
            "a connection leaves",
            "a process sleeps",
        ];
        s.insist(&often, &[ALWAYS, TAKEOVERS, NAPS, LEAVES]);
        // Whatever the program at the other end does.
        assert_eq!(s.of("a leave that takes too long"), 0);
        assert_eq!(s.of("a leave that stalls"), 0);
        let framed = s.of("a leave that meets a frame behind bytes of TCP"); // docs/limits.md
        assert!(framed * 10 < s.of("a connection leaves"));
    }
}

#[test]
fn forking() {
    if let Some(s) = seeds("forking", 30_000, Kind::Forking) {
        s.insist(
            &["a sender goes up", "fork"],
            &[ALWAYS, TAKEOVERS, NAPS, FULL, FORKS, KILLS, INHERITED_LOCKS],
        );
    }
}

#[test]
fn disturbed() {
    if let Some(s) = seeds("disturbed", 10_000, Kind::Rough) {
        let rare = [
            ALWAYS, TAKEOVERS, NAPS, LEAVES, FULL, FORKS, KILLS, RESTARTS, WIRES,
        ];
        s.insist(&["a sender goes up", "bytes on rings"], &rare);
    }
}
