//! `underpass check --measure` and `--serve`: what is printed as a lane's figure was on a lane, and what is printed as
//! TCP's was not. Nothing here depends on how fast anything is.

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;
use underpass_admin::Target;
use underpass_tests::harness::program::{Output, Running};
use underpass_tests::harness::{paths, until, Daemon, Place, Pods, Program};

const LIMIT: Duration = Duration::from_secs(60);
/// Measurements of which one is to stay on its lane.
const TRIES: u32 = 5;
const SHORT: &str = "--rounds 2 -t 0.05";

/// The tool (which of them, and how it runs), a daemon, and the library that it finds.
struct Tool<'a> {
    bin: &'static str,
    place: Place,
    daemon: &'a Path,
    library: PathBuf,
}

impl<'a> Tool<'a> {
    fn new(d: &'a Daemon) -> Self {
        Tool {
            bin: "underpass",
            place: Place::bare(),
            daemon: d.dir(),
            library: paths::shim(),
        }
    }

    fn program(&self, line: &str) -> Program {
        Program::new(paths::bin(self.bin), &self.place)
            .words(line)
            .arg("--dir")
            .arg(self.daemon)
            .env("UNDERPASS_LIB", &self.library)
    }

    /// Its port is free, and it ends after one measurement.
    fn serve(&self, host: &str) -> Result<(Running, String)> {
        let mut running = self
            .program(&format!("check --serve {host}:0 --once"))
            .spawn()?;
        let at = running.line("listening on ", LIMIT)?;
        let port = at.rsplit(':').next().context("a port")?.to_owned();
        Ok((running, port))
    }

    fn measure(&self, host: &str, port: &str, more: &str) -> Result<(Output, Value)> {
        let line = format!("check -j --measure {host} {port} {more}");
        let out = self.program(&line).run(LIMIT)?;
        let v = serde_json::from_str(&out.stdout).with_context(|| format!("{out:?}"))?;
        Ok((out, v))
    }
}

fn positive(figures: &Value) -> bool {
    let all = [
        &figures["round_trip_us"]["median"],
        &figures["round_trip_us"]["p99"],
        &figures["round_trip_us"]["minimum"],
        &figures["to_server"]["gbyte_s"],
        &figures["to_server"]["gbit_s"],
        &figures["from_server"]["gbyte_s"],
        &figures["from_server"]["gbit_s"],
    ];
    all.iter().all(|v| v.as_f64().is_some_and(|v| v > 0.0))
}

/// Bytes that moved, and how many of them the kernel's TCP has carried.
fn bytes(figures: &Value) -> (u64, u64) {
    let of = |name: &str| figures[name].as_u64().unwrap_or(0);
    (of("bytes"), of("kernel_bytes"))
}

/// Both connections have figures, and the kernel and the daemon agree about which way the bytes went.
fn measured(d: &Daemon, v: &Value, before: u64) -> Result<()> {
    let (tcp, lane) = (&v["tcp"]["figures"], &v["lane"]["figures"]);
    ensure!(
        v["reached"] == true && v["why_not"].is_null() && v["lane"]["mode"] == "SMCD",
        "{v:#}\n{}",
        d.picture()
    );
    ensure!(positive(tcp) && positive(lane), "{v:#}");
    let ratio = |name: &str| v["ratio"][name].as_f64().is_some_and(|r| r > 0.0);
    ensure!(
        ["median", "p99", "to_server", "from_server"]
            .into_iter()
            .all(ratio),
        "{v:#}"
    );
    ensure!(v["check"]["promoted"] == true, "{v:#}");
    let ((moved, by_tcp), (on_lane, beside)) = (bytes(tcp), bytes(lane));
    ensure!(
        by_tcp >= moved / 100 * 98 && beside <= on_lane / 50,
        "{v:#}"
    );
    let s = d.stats()?;
    ensure!(
        s.lane_tx_bytes - before >= on_lane / 100 * 98 && s.resets == 0,
        "{s:?} {v:#}"
    );
    // (Beside it there are only the first bytes, before the first round.)
    ensure!(v["tcp"]["local"] != v["lane"]["local"], "{v:#}");
    Ok(())
}

#[test]
fn a_lane_on_one_node() -> Result<()> {
    let d = Daemon::start()?;
    let plain = || Tool::new(&d);
    let linked_statically = || Tool {
        bin: "underpass-static",
        ..plain()
    };
    // What starts the probes is under the shim itself, as a shell in a container is.
    let under_it = || Tool {
        place: d.place(),
        ..plain()
    };
    for (what, tool) in [
        ("plain", plain()),
        ("static", linked_statically()),
        ("under the shim", under_it()),
    ] {
        let (mut before, mut server, mut port) = (0, None, String::new());
        let mut last = None;
        // Where processors are scarce, a slow reader sends a lane to TCP: the tool says so, and has no figures then.
        for _ in 0..TRIES {
            before = d.stats()?.lane_tx_bytes;
            drop(server.take());
            let (running, at) = tool.serve("127.0.0.1").context(what)?;
            (server, port) = (Some(running), at);
            last = Some(tool.measure("127.0.0.1", &port, SHORT).context(what)?);
            if last.as_ref().is_some_and(|(_, v)| v["why_not"].is_null()) {
                break;
            }
        }
        let (server, (out, v)) = server.zip(last).context(port)?;
        measured(&d, &v, before).context(what)?;
        ensure!(out.status.code() == Some(0), "{what}: {out:?}");
        let said = server.wait(LIMIT).context(what)?;
        ensure!(said.status.code() == Some(0), "{what}: {said:?}");
        for path in [" tcp\n", " lane\n"] {
            ensure!(said.stdout.matches(path).count() == 1, "{what}: {said:?}");
        }
    }
    Ok(())
}

#[test]
fn a_server_without_the_shim_has_no_lane_to_measure() -> Result<()> {
    let d = Daemon::start()?;
    let bare = Tool {
        library: "/no/library".into(),
        ..Tool::new(&d)
    };
    let (server, port) = bare.serve("127.0.0.1")?;
    let (out, v) = Tool::new(&d).measure("127.0.0.1", &port, SHORT)?;
    ensure!(out.status.code() == Some(1), "{out:?}");
    ensure!(
        v["reached"] == false
            && v["lane"]["figures"].is_null()
            && v["ratio"].is_null()
            && v["check"]["there"]["reason"]["name"] == "peer-no-shim"
            && positive(&v["tcp"]["figures"]),
        "{v:#}"
    );
    let said = server.wait(LIMIT)?;
    ensure!(said.stderr.contains("TCP only"), "{said:?}");
    Ok(())
}

#[test]
fn without_a_daemon_there_is_none_either() -> Result<()> {
    let d = Daemon::absent()?;
    let tool = Tool::new(&d);
    let (_server, port) = tool.serve("127.0.0.1")?;
    let (out, v) = tool.measure("127.0.0.1", &port, SHORT)?;
    ensure!(
        out.status.code() == Some(1)
            && v["check"]["here"]["reason"]["name"] == "no-daemon"
            && v["lane"]["figures"].is_null(),
        "{v:#}"
    );
    Ok(())
}

/// The connection was promoted, and then an operator has it on TCP: what was timed is no figure of a lane's.
#[test]
fn a_lane_that_is_left_meanwhile() -> Result<()> {
    let d = Daemon::start()?;
    let tool = Tool::new(&d);
    let (_server, port) = tool.serve("127.0.0.1")?;
    let line = format!("check -j --measure 127.0.0.1 {port} --rounds 4 -t 0.3");
    let running = tool.program(&line).spawn()?;
    // The first round is on its way.
    until("much is on the lane", LIMIT, || {
        d.stats().is_ok_and(|s| s.lane_tx_bytes > 64 << 20)
    })?;
    d.down(Target::All)?;
    let out = running.wait(LIMIT)?;
    let v: Value = serde_json::from_str(&out.stdout).with_context(|| format!("{out:?}"))?;
    ensure!(
        out.status.code() == Some(1)
            && v["reached"] == false
            && v["lane"]["figures"].is_null()
            && v["why_not"].is_string(),
        "{v:#}"
    );
    Ok(())
}

/// The shell's way: two network namespaces, as two pods have.
#[test]
fn root_from_pod_to_pod() -> Result<()> {
    let d = Daemon::start()?;
    let pods = Pods::new()?;
    let at = |netns: &str| Tool {
        bin: "underpass-static",
        place: Place::bare().netns(netns),
        ..Tool::new(&d)
    };
    let (server, port) = at(pods.b()).serve(Pods::B)?;
    let (_, v) = at(pods.a()).measure(Pods::B, &port, SHORT)?;
    measured(&d, &v, 0)?;
    server.wait(LIMIT)?.ok()?;
    Ok(())
}
