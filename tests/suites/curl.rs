//! curl's own tests of HTTP and FTP, with proxies, and of mail: curl against the servers that come with them.

use super::debian::{self, plain};
use super::{Floors, Results, Suite};
use anyhow::{ensure, Context, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;
use underpass_tests::harness::{Place, Program};

/// All tests of one part.
const LIMIT: Duration = Duration::from_secs(1500);

/// Without what needs another machine, or a certificate.
const OPTIONS: &str = "--without-ssl --disable-shared --disable-ldap --disable-manual \
    --without-brotli --without-zstd --without-libidn2 --without-libpsl --without-librtmp \
    --without-libssh2 --without-nghttp2";

/// Name, is it run by `make suites`, servers (of a test, exactly these), numbers of tests, tests at
/// least, promoted ends at least.
type Part = (
    &'static str,
    bool,
    &'static [&'static str],
    (u32, u32),
    usize,
    Floors,
);
const PARTS: &[Part] = &[
    (
        "curl http basics",
        true,
        &["http"],
        (1, 49),
        35,
        Floors::new(0, 6, 6, 6),
    ),
    (
        "curl ftp basics",
        true,
        &["ftp"],
        (100, 129),
        25,
        Floors::new(8, 20, 20, 20),
    ),
    (
        "curl http",
        false,
        &["http"],
        (50, 3000),
        300,
        Floors::new(0, 40, 40, 40),
    ),
    (
        "curl ftp",
        false,
        &["ftp"],
        (130, 3000),
        80,
        Floors::new(20, 60, 60, 60),
    ),
    (
        "curl proxies",
        false,
        &[
            "ftp http-proxy",
            "ftp socks4",
            "ftp socks5",
            "ftp-ipv6",
            "http ftp",
            "http http-proxy",
            "http http-proxy socks5",
            "http socks4",
            "http socks5",
            "http-ipv6",
            "http-proxy",
            "socks4",
            "socks5",
        ],
        (1, 3000),
        40,
        Floors::new(0, 10, 10, 10),
    ),
    (
        "curl mail",
        false,
        &["imap", "pop3", "smtp"],
        (1, 3000),
        120,
        Floors::new(20, 60, 60, 60),
    ),
];

pub fn suites() -> Vec<Suite> {
    let suite = |&(name, bounded, servers, numbers, tests, ends): &Part| Suite {
        name,
        bounded,
        tests,
        ends,
        version,
        run: Box::new(move |place, dir| run(servers, numbers, place, dir)),
    };
    PARTS.iter().map(suite).collect()
}

fn version() -> Result<String> {
    let v = Program::new(source()?.join("src/curl"), &Place::bare())
        .arg("--version")
        .check(LIMIT)?;
    Ok(v.split(' ').take(2).collect::<Vec<_>>().join(" "))
}

fn source() -> Result<PathBuf> {
    debian::source("curl", |dir| {
        let options: Vec<&str> = OPTIONS.split_whitespace().collect();
        debian::run(dir, "./configure", &options)?;
        for (part, goal) in [("lib", "all"), ("src", "curl"), ("tests/server", "all")] {
            debian::run(dir, "make", &["-j4", "-C", part, goal])?;
        }
        // What remains is copied for each run.
        debian::run(dir, "find", &[".", "-name", "*.o", "-delete"])?;
        debian::run(
            dir,
            "rm",
            &["-rf", "docs", "m4", "packages", "projects", "lib/.libs"],
        )
    })
}

/// The tests that need these servers, and no program of libcurl's own.
fn numbers(data: &Path, servers: &[&str], (from, to): (u32, u32)) -> Result<BTreeSet<u32>> {
    let mut all = BTreeSet::new();
    for e in std::fs::read_dir(data)?.flatten() {
        let name = e.file_name();
        let number = name
            .to_str()
            .and_then(|n| n.strip_prefix("test")?.parse().ok());
        let Some(number) = number.filter(|n| (from..=to).contains(n)) else {
            continue;
        };
        let text = String::from_utf8_lossy(&std::fs::read(e.path())?).into_owned();
        let between = |a: &str, b: &str| text.split_once(a)?.1.split_once(b).map(|t| t.0);
        let needs = between("<server>", "</server>").unwrap_or_default();
        let needs: Vec<&str> = needs.split_whitespace().collect();
        if servers.contains(&&*needs.join(" ")) && !text.contains("<tool>") {
            all.insert(number);
        }
    }
    Ok(all)
}

fn run(servers: &[&str], range: (u32, u32), place: &Place, dir: &Path) -> Result<Results> {
    // A copy, for the tests write into their directory.
    let tree = dir.join("curl");
    let (from, to) = (source()?, tree.to_string_lossy().into_owned());
    debian::run(dir, "cp", &["-a", &from.to_string_lossy(), &to])?;
    let numbers = numbers(&tree.join("tests/data"), servers, range)?;
    // Each test's result on a line; go on after a failure; no valgrind.
    let out = Program::new("perl", place)
        .args(["runtests.pl", "-am", "-a", "-n"])
        .args(numbers.iter().map(u32::to_string))
        .dir(&tree.join("tests"))
        .run(LIMIT)
        .with_context(|| format!("in {place:?}"))?;
    let mut all = Results::new();
    // `PASS: 1 - HTTP GET`
    for line in plain(&out.stdout).lines() {
        let Some((kind, rest)) = line.split_once(": ") else {
            continue;
        };
        let number = rest.split(' ').next().unwrap_or_default();
        if ["PASS", "FAIL", "SKIP", "IGNORED"].contains(&kind) && number.parse::<u32>().is_ok() {
            all.insert(number.to_owned(), kind.to_owned());
        }
        if kind == "FAIL" {
            println!("curl: {line}");
        }
    }
    ensure!(!all.is_empty(), "{}\n{}", out.stdout, out.stderr);
    Ok(all)
}
