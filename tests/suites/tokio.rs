//! tokio's own network tests: of the version that this workspace's lock file names, from its crate.

use super::{debian, Floors, Results, Suite};
use anyhow::{Context, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use underpass_tests::harness::{paths, Place, Program};

/// One file of tests.
const LIMIT: Duration = Duration::from_secs(300);

/// Files in which there are TCP connections: what `make suites` runs, and the rest; and those of other
/// descriptors, processes and signals, which the shim hooks as well.
const TCP: &[&str] = &[
    "buffered",
    "io_async_fd",
    "io_copy_bidirectional",
    "io_driver",
    "io_driver_drop",
    "net_bind_resource",
    "net_panic",
    "net_quickack",
    "tcp_accept",
    "tcp_accept_ready",
    "tcp_connect",
    "tcp_echo",
    "tcp_into_split",
    "tcp_into_std",
    "tcp_peek",
    "tcp_shutdown",
    "tcp_socket",
    "tcp_split",
    "tcp_stream",
];
const RUNTIME: &[&str] = &[
    "no_rt",
    "rt_busy_tick",
    "rt_common",
    "rt_handle_block_on",
    "rt_shutdown_err",
    "rt_threaded",
];
const OTHER: &[&str] = &[
    "coop_budget",
    "io_panic",
    "io_split",
    "net_lookup_host",
    "net_unix_pipe",
    "process_arg0",
    "process_change_of_runtime",
    "process_issue_2174",
    "process_issue_42",
    "process_issue_7144",
    "process_issue_8042",
    "process_kill_after_wait",
    "process_kill_on_drop",
    "process_smoke",
    "signal_ctrl_c",
    "signal_drop_recv",
    "signal_drop_rt",
    "signal_drop_signal",
    "signal_info",
    "signal_multi_rt",
    "signal_no_rt",
    "signal_notify_both",
    "signal_panic",
    "signal_realtime",
    "signal_twice",
    "signal_usr1",
    "udp",
    "uds_cred",
    "uds_datagram",
    "uds_socket",
    "uds_split",
    "uds_stream",
    "unix_shutdown",
];

/// What the tests need besides.
const MANIFEST: &str = r#"
[package]
name = "tokio-suite"
version = "0.0.0"
edition = "2021"
[workspace]
[features]
default = ["full"]
full = []
[dev-dependencies]
futures = "0.3"
libc = "0.2"
nix = { version = "0.31", default-features = false, features = ["fs", "socket"] }
socket2 = "0.6"
tempfile = "3"
tokio-stream = "0.1"
tokio-test = "0.4"
tokio = { features = ["full", "test-util"], version = "="#;

pub fn suites() -> Vec<Suite> {
    let suite = |name, bounded, files: &'static [&'static str], tests, ends| Suite {
        name,
        bounded,
        tests,
        ends,
        version: || Ok(format!("tokio {}", crate_of_tokio()?.0)),
        run: Box::new(move |place, dir| run(name, files, place, dir)),
    };
    vec![
        suite("tokio tcp", true, TCP, 80, Floors::new(2, 4, 4, 4)),
        suite(
            "tokio runtime",
            false,
            RUNTIME,
            100,
            Floors::new(0, 4, 4, 4),
        ),
        suite("tokio other", false, OTHER, 100, Floors::new(0, 0, 0, 0)),
    ]
}

/// Version and directory of the crate.
fn crate_of_tokio() -> Result<(String, PathBuf)> {
    let out = Command::new("cargo")
        .args(["metadata", "--format-version", "1"])
        .current_dir(paths::root())
        .stderr(Stdio::inherit())
        .output()?;
    let v: Value = serde_json::from_slice(&out.stdout).context("cargo metadata")?;
    let packages = v["packages"].as_array().context("packages")?;
    let tokio = packages.iter().find(|p| p["name"] == "tokio");
    let of = |key: &str| tokio.and_then(|t| t[key].as_str()).context("no tokio");
    let manifest = PathBuf::from(of("manifest_path")?);
    let dir = manifest.parent().context("its directory")?;
    Ok((of("version")?.to_owned(), dir.to_owned()))
}

/// The built files of a suite's tests.
fn source(suite: &str, wanted: &[&str]) -> Result<PathBuf> {
    let (version, from) = crate_of_tokio()?;
    let name = format!("{}-{version}", suite.replace(' ', "-"));
    debian::once(&name, |new| {
        let dir = &new.join("suite");
        std::fs::create_dir_all(dir.join("src"))?;
        std::fs::create_dir_all(dir.join("bin"))?;
        std::fs::write(dir.join("src/lib.rs"), "")?;
        let manifest = format!("{}{version}\" }}\n", MANIFEST);
        std::fs::write(dir.join("Cargo.toml"), manifest)?;
        std::fs::create_dir_all(dir.join("tests"))?;
        let tests = from.join("tests");
        let files = wanted.iter().map(|f| format!("{f}.rs"));
        for f in files.chain(["support".to_owned()]) {
            let (from, to) = (tests.join(&f), dir.join("tests").join(&f));
            debian::run(
                dir,
                "cp",
                &["-r", &from.to_string_lossy(), &to.to_string_lossy()],
            )?;
        }
        let out = Command::new("cargo")
            .args(["test", "--no-run", "--message-format=json"])
            .env("CARGO_TARGET_DIR", dir.join("target"))
            .env("CARGO_PROFILE_TEST_DEBUG", "0")
            .current_dir(dir)
            .stderr(Stdio::inherit())
            .output()?;
        let said = String::from_utf8_lossy(&out.stdout);
        for v in said
            .lines()
            .filter_map(|l| serde_json::from_str::<Value>(l).ok())
        {
            let (name, built) = (&v["target"]["name"], &v["executable"]);
            if let (Some(name), Some(built)) = (name.as_str(), built.as_str()) {
                std::fs::copy(built, dir.join("bin").join(name))?;
            }
        }
        for f in wanted {
            let built = dir.join("bin").join(f).exists();
            anyhow::ensure!(built, "{f} was not built: {}", out.status);
        }
        std::fs::remove_dir_all(dir.join("target"))?;
        Ok(dir.to_path_buf())
    })
}

fn run(suite: &str, files: &[&str], place: &Place, dir: &Path) -> Result<Results> {
    let tree = source(suite, files)?;
    // Some tests read the crate's file where they run.
    let manifest = crate_of_tokio()?.1.join("Cargo.toml");
    std::fs::copy(manifest, dir.join("Cargo.toml"))?;
    let mut all = Results::new();
    for file in files {
        let out = Program::new(tree.join("bin").join(file), place)
            .args(["--test-threads", "1"])
            .dir(dir)
            .run(LIMIT)
            .with_context(|| format!("{file} in {place:?}"))?;
        all.insert(format!("{file} (all)"), out.status.to_string());
        // `test name ... ok`
        let lines = out.stdout.lines().filter_map(|l| l.strip_prefix("test "));
        for (name, result) in lines.filter_map(|l| l.split_once(" ... ")) {
            all.insert(format!("{file}: {name}"), result.to_owned());
        }
        if !out.status.success() {
            println!("{file}: {}", out.stdout);
        }
    }
    Ok(all)
}
