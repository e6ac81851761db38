//! Redis's own tests in TCL, against Debian's binaries.

use super::debian::{self, plain};
use super::{Floors, Results, Suite};
use anyhow::{ensure, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;
use underpass_tests::harness::{Place, Program};

/// The tests' own limit is shorter, and says where they hang.
const LIMIT: Duration = Duration::from_secs(900);
const LIMIT_OWN: &str = "600";

/// Some of their tests run again and again, as often as the lot or the time has it, bare, too.
const UNCOUNTED: &[&str] = &["integration/psync2", "integration/psync2-reg"];

/// Name, is it run by `make suites`, files, tests and promoted ends at least.
type Part = (&'static str, bool, &'static [&'static str], usize, Floors);
const PARTS: &[Part] = &[
    (
        "redis basics",
        true,
        &[
            "unit/protocol",
            "unit/pubsub",
            "unit/networking",
            "unit/querybuf",
            "unit/type/incr",
            "unit/type/hash",
        ],
        100,
        Floors::new(10, 20, 20, 20),
    ),
    (
        "redis types",
        false,
        &[
            "unit/type/string",
            "unit/type/list",
            "unit/type/list-2",
            "unit/type/set",
            "unit/type/zset",
            "unit/type/stream",
            "unit/type/stream-cgroups",
        ],
        300,
        Floors::new(10, 20, 20, 20),
    ),
    (
        "redis unit",
        false,
        &[
            "unit/keyspace",
            "unit/scan",
            "unit/info",
            "unit/auth",
            "unit/acl",
            "unit/dump",
            "unit/expire",
            "unit/multi",
            "unit/quit",
            "unit/sort",
            "unit/other",
            "unit/scripting",
            "unit/introspection",
            "unit/introspection-2",
            "unit/limits",
            "unit/obuf-limits",
            "unit/bitops",
            "unit/tracking",
            "unit/pause",
            "unit/replybufsize",
            "unit/client-eviction",
            "unit/shutdown",
        ],
        350,
        Floors::new(25, 50, 50, 50),
    ),
    (
        "redis replication",
        false,
        &[
            "integration/replication",
            "integration/replication-2",
            "integration/replication-3",
            "integration/replication-4",
            "integration/replication-buffer",
            "integration/block-repl",
            "integration/shutdown",
            "unit/wait",
        ],
        80,
        Floors::new(25, 50, 50, 50),
    ),
    (
        "redis psync",
        false,
        &[
            "integration/replication-psync",
            "integration/psync2",
            "integration/psync2-reg",
            "integration/psync2-pingoff",
            "integration/psync2-master-restart",
            "integration/failover",
        ],
        60,
        Floors::new(25, 50, 50, 50),
    ),
    (
        "redis tools",
        false,
        &["integration/redis-cli", "integration/redis-benchmark"],
        30,
        Floors::new(0, 10, 10, 10),
    ),
    (
        "redis persistence",
        false,
        &[
            "integration/aof",
            "integration/aof-multi-part",
            "integration/aof-race",
            "integration/rdb",
            "integration/convert-zipmap-hash-on-load",
            "integration/convert-ziplist-hash-on-load",
            "integration/convert-ziplist-zset-on-load",
            "integration/corrupt-dump",
            "integration/dismiss-mem",
            "integration/logging",
            "unit/aofrw",
        ],
        100,
        Floors::new(10, 20, 20, 20),
    ),
    (
        "redis unit 2",
        false,
        &[
            "unit/acl-v2",
            "unit/bitfield",
            "unit/functions",
            "unit/geo",
            "unit/hyperloglog",
            "unit/info-command",
            "unit/latency-monitor",
            "unit/lazyfree",
            "unit/maxmemory",
            "unit/memefficiency",
            "unit/oom-score-adj",
            "unit/pendingquerybuf",
            "unit/pubsubshard",
            "unit/slowlog",
            "unit/type/list-3",
        ],
        200,
        Floors::new(15, 30, 30, 30),
    ),
    (
        "redis cluster",
        false,
        &[
            "unit/cluster",
            "unit/cluster-scripting",
            "unit/cluster/announced-endpoints",
            "unit/cluster/links",
            "unit/cluster/misc",
            "unit/cluster/packet",
        ],
        15,
        Floors::new(10, 20, 20, 20),
    ),
    (
        "redis modules",
        false,
        &[
            "unit/moduleapi/aclcheck",
            "unit/moduleapi/auth",
            "unit/moduleapi/basics",
            "unit/moduleapi/blockedclient",
            "unit/moduleapi/blockonbackground",
            "unit/moduleapi/blockonkeys",
            "unit/moduleapi/cluster",
            "unit/moduleapi/cmdintrospection",
            "unit/moduleapi/commandfilter",
            "unit/moduleapi/datatype",
            "unit/moduleapi/datatype2",
            "unit/moduleapi/eventloop",
            "unit/moduleapi/fork",
            "unit/moduleapi/getkeys",
            "unit/moduleapi/hash",
            "unit/moduleapi/hooks",
            "unit/moduleapi/infotest",
            "unit/moduleapi/infra",
            "unit/moduleapi/keyspace_events",
            "unit/moduleapi/keyspecs",
            "unit/moduleapi/list",
            "unit/moduleapi/misc",
            "unit/moduleapi/moduleconfigs",
            "unit/moduleapi/propagate",
            "unit/moduleapi/publish",
            "unit/moduleapi/reply",
            "unit/moduleapi/scan",
            "unit/moduleapi/stream",
            "unit/moduleapi/subcommands",
            "unit/moduleapi/test_lazyfree",
            "unit/moduleapi/testrdb",
            "unit/moduleapi/timer",
            "unit/moduleapi/usercall",
            "unit/moduleapi/zset",
        ],
        200,
        Floors::new(20, 40, 40, 40),
    ),
];

pub fn suites() -> Vec<Suite> {
    let suite = |(name, bounded, files, tests, ends): &Part| {
        let (files, ends) = (*files, *ends);
        Suite {
            name,
            bounded: *bounded,
            tests: *tests,
            ends,
            version,
            run: Box::new(move |place, dir| run(files, place, dir)),
        }
    };
    PARTS.iter().map(suite).collect()
}

fn version() -> Result<String> {
    let v = Program::new("redis-server", &Place::bare())
        .arg("--version")
        .check(LIMIT)?;
    let v = v.split_whitespace().find_map(|w| w.strip_prefix("v="));
    Ok(format!("Redis {}", v.unwrap_or("?")))
}

/// The tests start what lies in `src`.
fn source() -> Result<PathBuf> {
    debian::source("redis", |dir| {
        for b in [
            "redis-server",
            "redis-cli",
            "redis-benchmark",
            "redis-check-aof",
            "redis-check-rdb",
        ] {
            std::os::unix::fs::symlink(format!("/usr/bin/{b}"), dir.join("src").join(b))?;
        }
        std::os::unix::fs::symlink("/usr/bin/redis-server", dir.join("src/redis-sentinel"))?;
        Ok(())
    })
}

/// The same with the modules built that the tests of modules load.
fn modules() -> Result<PathBuf> {
    debian::once("redis-modules", |new| {
        let tree = new.join("redis");
        copy(&source()?, &tree)?;
        debian::run(&tree, "make", &["-j4", "-C", "tests/modules"])?;
        Ok(tree)
    })
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let (from, to) = (from.to_string_lossy(), to.to_string_lossy());
    debian::run(Path::new("/"), "cp", &["-a", &from, &to])
}

fn run(files: &[&str], place: &Place, dir: &Path) -> Result<Results> {
    // A copy, for the tests write into their directory.
    let tree = dir.join("redis");
    let modular = files.iter().any(|f| f.starts_with("unit/moduleapi/"));
    let from = if modular { modules()? } else { source()? };
    copy(&from, &tree)?;
    let mut all = Results::new();
    for file in files {
        let out = Program::new("tclsh", place)
            .arg("tests/test_helper.tcl")
            .args(["--single", file, "--clients", "1", "--timeout", LIMIT_OWN])
            .dir(&tree)
            .run(LIMIT)?;
        let said = plain(&out.stdout);
        let results = results(file, &said);
        ensure!(!results.is_empty(), "{file}: {said}\n{}", out.stderr);
        let bad = said.lines().filter(|l| l.starts_with("[err]"));
        bad.for_each(|l| println!("{file}: {l}"));
        all.insert(format!("{file} (all)"), out.status.to_string());
        all.extend(results);
    }
    Ok(all)
}

/// `[ok]: name (12 ms)`, `[err]: name in file`, `[ignore]: name`, `[skip]: …`
fn results(file: &str, said: &str) -> Results {
    let mut all = Results::new();
    for line in said.lines() {
        let Some((kind, name)) = line.strip_prefix('[').and_then(|l| l.split_once("]: ")) else {
            continue;
        };
        if !["ok", "err", "ignore", "skip", "exception"].contains(&kind) {
            continue;
        }
        let name = match name.rsplit_once(" (") {
            Some((n, end)) if end.ends_with(" ms)") => n,
            _ => name.rsplit_once(" in tests/").map_or(name, |n| n.0),
        };
        // Numbers in names are measured, or drawn by lot.
        let words = name
            .split(|c: char| c.is_ascii_digit())
            .filter(|w| !w.is_empty());
        let name = words.collect::<Vec<_>>().join("0");
        let mut n = 1;
        while !UNCOUNTED.contains(&file) && all.contains_key(&format!("{file}: {name} #{n}")) {
            n += 1;
        }
        let result = all.entry(format!("{file}: {name} #{n}")).or_default();
        if result.is_empty() || result == "ok" {
            *result = kind.to_owned();
        }
    }
    all
}
