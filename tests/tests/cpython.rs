//! CPython's own network tests: bare, and with every connection promoted at once in rings of one
//! page. Each test must have the same result.

use anyhow::{ensure, Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use underpass_tests::harness::{paths, Daemon, Place, Program};

const LIMIT: Duration = Duration::from_secs(240);

/// Tests that fail bare, too, about once in two hundred runs: the server of `test_ftplib` decodes
/// what each `recv` returns by itself, and fails when a character lies across two of them. One that
/// differs must be the same in a second run.
const FRAGILE: &[&str] = &["test_storlines"];

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
    let (said, outcomes): (Vec<_>, Vec<_>) = text.lines().partition(|l| l.starts_with('!'));
    said.iter().for_each(|l| println!("{name}: {l}"));
    Ok(outcomes
        .into_iter()
        .filter_map(|l| l.rsplit_once(' '))
        .map(|(a, b)| (a.to_string(), b.to_string()))
        .collect())
}

fn differences(bare: &BTreeMap<String, String>, shim: &BTreeMap<String, String>) -> Vec<String> {
    let ids: BTreeSet<_> = bare.keys().chain(shim.keys()).collect();
    ids.into_iter()
        .filter(|id| bare.get(*id) != shim.get(*id))
        .map(|id| format!("{id}: bare {:?}, promoted {:?}", bare.get(id), shim.get(id)))
        .collect()
}

/// `tests`: how many the suite has at least; `ends`: how many promoted ends it must leave behind.
fn same(name: &str, tcp_pairs: bool, tests: usize, ends: u64) -> Result<()> {
    let bare = suite(name, &Place::bare(), tcp_pairs)?;
    ensure!(bare.len() >= tests, "{name} ran {} tests only", bare.len());
    let d = Daemon::with(&["--ring-log2", "12", "--ring-max-log2", "12"])?;
    let mut differ = differences(&bare, &suite(name, &d.eager(), tcp_pairs)?);
    let fragile = |d: &String| FRAGILE.iter().any(|f| d.contains(f));
    if !differ.is_empty() && differ.iter().all(fragile) {
        println!("{name}: once more, because of {}", differ.join(", "));
        let bare = suite(name, &Place::bare(), tcp_pairs)?;
        differ = differences(&bare, &suite(name, &d.eager(), tcp_pairs)?);
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
