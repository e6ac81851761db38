//! memcached's own tests in Perl, against the debugging build that they need, over TCP.

use super::debian;
use super::{Floors, Results, Suite};
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::time::Duration;
use underpass_tests::harness::{Place, Program};

/// One file.
const LIMIT: Duration = Duration::from_secs(300);

const BASICS: &[&str] = &[
    "64bit",
    "bogus-commands",
    "cas",
    "flags",
    "flush-all",
    "getset",
    "incrdecr",
    "issue_22",
    "issue_42",
    "line-lengths",
    "metaget",
    "multiversioning",
    "noreply",
    "quit",
    "touch",
    "whitespace",
];
const REST: &[&str] = &[
    "00-startup",
    "ascii-auth",
    "binary",
    "binary-get",
    "chunked-items",
    "conn-limits",
    "daemonize",
    "dash-M",
    "dyn-maxbytes",
    "evictions",
    "expirations",
    "getandtouch",
    "idle-timeout",
    "issue_104",
    "issue_108",
    "issue_14",
    "issue_140",
    "issue_152",
    "issue_163",
    "issue_183",
    "issue_192",
    "issue_260",
    "issue_29",
    "issue_3",
    "issue_41",
    "issue_50",
    "issue_61",
    "issue_67",
    "issue_68",
    "issue_70",
    "item_size_max",
    "lru-crawler",
    "lru-maintainer",
    "lru",
    "malicious-commands",
    "maxconns",
    "misbehave",
    "refhang",
    "restart",
    "shutdown",
    "slabhang",
    "slabs_reassign",
    "slabs-reassign-chunked",
    "slabs-reassign2",
    "stats-conns",
    "stats-detail",
    "stats",
    "strtol-testing",
    "udp",
    "watcher",
    "watcher_connid",
];

/// Items that lie in a file.
const STORE: &[&str] = &[
    "chunked-extstore",
    "error-extstore",
    "extstore",
    "extstore-buckets",
    "extstore-jbod",
];

/// Its number of tests is how often it saw a counter change, another one each time, bare, too. (More
/// connections are refused where hidden descriptors have numbers below the limit that memcached lowers:
/// limit 24 in docs/limits.md.)
const UNCOUNTED: &str = "maxconns";

pub fn suites() -> Vec<Suite> {
    let suite = |name, bounded, files: &'static [&'static str], tests, ends| Suite {
        name,
        bounded,
        tests,
        ends,
        version,
        run: Box::new(move |place, dir| run(files, place, dir)),
    };
    vec![
        suite(
            "memcached basics",
            true,
            BASICS,
            300,
            Floors::new(10, 20, 20, 20),
        ),
        suite("memcached", false, REST, 5000, Floors::new(30, 60, 60, 60)),
        suite(
            "memcached extstore",
            false,
            STORE,
            300,
            Floors::new(4, 6, 6, 6),
        ),
    ]
}

fn version() -> Result<String> {
    let v = Program::new(source()?.join("memcached-debug"), &Place::bare())
        .arg("-V")
        .check(LIMIT)?;
    Ok(v.trim().to_owned())
}

fn source() -> Result<PathBuf> {
    debian::source("memcached", |dir| {
        let options = [
            "--disable-unix-socket",
            "--disable-docs",
            "--disable-coverage",
        ];
        debian::run(dir, "./configure", &options)?;
        debian::run(dir, "make", &["memcached-debug", "timedrun", "sizes"])
    })
}

fn run(files: &[&str], place: &Place, _: &Path) -> Result<Results> {
    let tree = source()?;
    let mut all = Results::new();
    for file in files {
        let out = Program::new("perl", place)
            .args(["-I", "t/lib"])
            .arg(format!("t/{file}.t"))
            .dir(&tree)
            .run(LIMIT)?;
        all.insert(format!("{file} (all)"), out.status.to_string());
        // `ok 1 - name`, `not ok 2 - name`
        for line in out.stdout.lines() {
            let (kind, rest) = match line.strip_prefix("not ok ") {
                Some(r) => ("not ok", r),
                None => match line.strip_prefix("ok ") {
                    Some(r) => ("ok", r),
                    None => continue,
                },
            };
            let number = match *file {
                UNCOUNTED => kind,
                _ => rest.split_whitespace().next().unwrap_or_default(),
            };
            all.insert(format!("{file}: {number}"), kind.to_owned());
            if kind == "not ok" {
                println!("{file}: {line}");
            }
        }
    }
    Ok(all)
}
