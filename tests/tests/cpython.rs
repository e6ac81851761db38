//! CPython's own network tests: bare, and with every connection promoted at once in rings of one
//! page. Each test must have the same result.

use anyhow::{ensure, Context, Result};
use std::collections::BTreeMap;
use std::time::Duration;
use underpass_tests::harness::{paths, Daemon, Place, Program};

const LIMIT: Duration = Duration::from_secs(240);

/// Name of each test and its outcome.
fn suite(name: &str, place: &Place, tcp_pairs: bool) -> Result<BTreeMap<String, String>> {
    let dir = tempfile::tempdir()?;
    let report = dir.path().join("report.xml");
    let mut p = Program::new(paths::PYTHON, place)
        .args([
            "-m",
            "test",
            "-i",
            "*VSOCK*",
            // Ten thousand connections at once: right, but with every one of them promoted at once
            // far beyond the limit of time.
            "-i",
            "test_above_fd_setsize",
            "--timeout",
            "100",
            "--junit-xml",
        ])
        .arg(&report)
        .arg(name)
        .dir(dir.path());
    if tcp_pairs {
        p = p.env("PYTHONPATH", paths::script("tcp_socketpair"));
    }
    let out = p
        .run(LIMIT)
        .with_context(|| format!("{name} in {place:?}"))?;
    let text = Program::python("junit.py", &Place::bare())
        .arg(&report)
        .check(LIMIT)
        .with_context(|| {
            format!(
                "{name} left no report: {}\n{}\n{}",
                out.status, out.stdout, out.stderr
            )
        })?;
    Ok(text
        .lines()
        .filter_map(|l| l.rsplit_once(' '))
        .map(|(a, b)| (a.to_string(), b.to_string()))
        .collect())
}

/// `tests`: how many the suite has at least; `ends`: how many promoted ends it must leave behind.
fn same(name: &str, tcp_pairs: bool, tests: usize, ends: u64) -> Result<()> {
    let bare = suite(name, &Place::bare(), tcp_pairs)?;
    ensure!(bare.len() >= tests, "{name} ran {} tests only", bare.len());
    let d = Daemon::with(&["--ring-log2", "12", "--ring-max-log2", "12"])?;
    let shim = suite(name, &d.eager(), tcp_pairs)?;
    let mut differ = Vec::new();
    for id in bare
        .keys()
        .chain(shim.keys())
        .collect::<std::collections::BTreeSet<_>>()
    {
        let (b, s) = (bare.get(id), shim.get(id));
        if b != s {
            differ.push(format!("{id}: bare {b:?}, promoted {s:?}"));
        }
    }
    let s = d.stats()?;
    println!(
        "{name}: {} tests, {} promoted ends, {} bytes on lanes",
        bare.len(),
        s.promoted,
        s.lane_tx_bytes
    );
    ensure!(
        differ.is_empty(),
        "{name}: {} differ\n{}\n{s:?}",
        differ.len(),
        differ.join("\n")
    );
    ensure!(
        s.promoted >= ends,
        "{name}: {} ends promoted, expected {ends}\n{s:?}",
        s.promoted
    );
    ensure!(s.lane_tx_bytes > 0);
    Ok(())
}

#[test]
fn test_socket() -> Result<()> {
    same("test_socket", false, 600, 200)
}

/// Readiness tests use socket pairs: made TCP connections here, in both runs.
#[test]
fn test_selectors() -> Result<()> {
    same("test_selectors", true, 60, 40)
}

#[test]
fn test_epoll() -> Result<()> {
    same("test_epoll", false, 10, 2)
}

#[test]
fn test_httplib() -> Result<()> {
    same("test_httplib", false, 80, 4)
}

#[test]
fn test_ftplib() -> Result<()> {
    same("test_ftplib", false, 80, 100)
}
