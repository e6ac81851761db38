//! CPython's own network tests.

use super::{Floors, Results, Suite};
use anyhow::{Context, Result};
use std::path::Path;
use std::time::Duration;
use underpass_tests::harness::{paths, Place, Program};

/// One test file; CPython's own limit is a bit shorter, and says where it hangs.
const LIMIT: Duration = Duration::from_secs(1000);
const LIMIT_OWN: &str = "900";

/// Where connections carry nothing, there is nothing to promote.
const NONE: Floors = Floors::new(0, 0, 0, 0);

/// File, is it run by `make suites`, tests and promoted ends at least.
const FILES: &[(&str, bool, usize, Floors)] = &[
    ("test_socket", true, 600, Floors::new(0, 5, 5, 5)),
    // Readiness tests use socket pairs: made TCP connections here, in all modes.
    ("test_selectors", true, 60, Floors::new(0, 2, 2, 2)),
    ("test_epoll", true, 10, Floors::new(0, 2, 2, 2)),
    ("test_httplib", true, 80, Floors::new(0, 2, 2, 2)),
    ("test_ftplib", true, 80, Floors::new(0, 10, 10, 10)),
    ("test_asyncore", true, 90, Floors::new(0, 2, 2, 2)),
    ("test_asynchat", true, 20, Floors::new(4, 4, 4, 4)),
    ("test_poplib", true, 60, Floors::new(0, 10, 10, 10)),
    ("test_smtplib", true, 70, Floors::new(4, 10, 10, 10)),
    ("test_telnetlib", true, 15, NONE),
    ("test_urllib2_localnet", true, 20, Floors::new(0, 2, 2, 2)),
    ("test_socketserver", true, 10, Floors::new(0, 2, 2, 2)),
    ("test_imaplib", false, 90, Floors::new(0, 20, 20, 20)),
    ("test_ssl", false, 150, Floors::new(10, 50, 50, 50)),
    ("test_xmlrpc", false, 80, Floors::new(0, 10, 10, 10)),
    ("test_asyncio", false, 1500, Floors::new(0, 20, 20, 20)),
    ("test_httpservers", false, 60, Floors::new(0, 2, 2, 2)),
    ("test_docxmlrpc", false, 3, Floors::new(0, 2, 2, 2)),
    ("test_nntplib", false, 60, Floors::new(0, 2, 2, 2)),
    ("test_logging", false, 150, Floors::new(0, 2, 2, 2)),
    ("test_os", false, 250, Floors::new(0, 2, 2, 2)),
    (
        "test_multiprocessing_fork",
        false,
        300,
        Floors::new(0, 2, 2, 2),
    ),
    (
        "test_multiprocessing_spawn",
        false,
        300,
        Floors::new(0, 2, 2, 2),
    ),
    (
        "test_multiprocessing_forkserver",
        false,
        300,
        Floors::new(0, 2, 2, 2),
    ),
    ("test_multiprocessing_main_handling", false, 30, NONE),
];

pub fn suites() -> Vec<Suite> {
    let suite = |(name, bounded, tests, ends): &(&'static str, bool, usize, Floors)| {
        let (name, ends) = (*name, *ends);
        Suite {
            name,
            bounded: *bounded,
            tests: *tests,
            ends,
            version,
            run: Box::new(move |place, dir| run(name, place, dir)),
        }
    };
    FILES.iter().map(suite).collect()
}

fn version() -> Result<String> {
    let v = Program::new(paths::PYTHON, &Place::bare())
        .arg("--version")
        .check(LIMIT)?;
    Ok(v.trim().replace("Python", "CPython"))
}

fn run(name: &str, place: &Place, dir: &Path) -> Result<Results> {
    let report = dir.join("report.xml");
    let mut p = Program::new(paths::PYTHON, place)
        .args(["-m", "test", "-i", "*VSOCK*", "-u", "network"])
        .args(["--timeout", LIMIT_OWN, "--junit-xml"])
        .arg(&report)
        .arg(name)
        .dir(dir);
    if name == "test_selectors" {
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
