//! `underpass check --measure` over a lane between nodes: what is printed as the lane's figure went over RDMA, by the
//! kernel's and the devices' counters, and what is printed as TCP's did not. Nothing here depends on how fast it is.

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use underpass_admin::RailStats;
use underpass_tests::harness::paths::{self, Build};
use underpass_tests::harness::until;
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::streams::{CLIENT, SERVER};
use underpass_tests::lab::{quoted, Lab, Running, PATIENCE};

/// Measurements of which one is to stay on its lane: the emulated processors are few, and a slow reader sends a lane to
/// TCP. The tool says so then, and has no figures.
const TRIES: u32 = 4;
const SHORT: &str = "--rounds 2 -t 0.3 --wait 30";

/// The tool at a node, as it is installed: it finds the library by itself, and is not under it.
fn tool(lab: &Lab, c: &Cluster, n: usize, line: &str) -> Result<Running> {
    let tool = quoted(&paths::bin("underpass").to_string_lossy());
    let mut env = c.shim()[n].clone();
    env.retain(|(name, _)| name != "LD_PRELOAD");
    let library = Build::This.shim().to_string_lossy().into_owned();
    let job = lab.node(n).sh(format!("exec {tool} {line}"))?;
    job.envs(env).env("UNDERPASS_LIB", library).spawn()
}

fn number(v: &Value) -> u64 {
    v.as_u64().unwrap_or(0)
}

/// All figures of one way.
fn positive(figures: &Value) -> bool {
    let all = [
        &figures["round_trip_us"]["median"],
        &figures["round_trip_us"]["p99"],
        &figures["to_server"]["gbit_s"],
        &figures["from_server"]["gbit_s"],
    ];
    all.iter().all(|v| v.as_f64().is_some_and(|v| v > 0.0))
}

/// What rails of all nodes have carried.
fn over_rails(c: &Cluster) -> Result<u64> {
    let mut sum = 0;
    for n in [SERVER, CLIENT] {
        let rails = c.daemon(n)?.stats()?.rails;
        sum += rails.iter().map(|r| r.bytes).sum::<u64>();
    }
    Ok(sum)
}

/// Each node asks over its links when nothing is heard, and counts what the answers take.
fn answers_are_timed(c: &Cluster) -> Result<()> {
    let mut seen = Vec::new();
    for n in [SERVER, CLIENT] {
        let timed = until("answers are timed on all rails", PATIENCE, || {
            let rails = c.daemon(n).and_then(|d| d.stats());
            seen = rails.map(|s| s.rails).unwrap_or_default();
            let of = |r: &RailStats| r.round_trips.iter().sum::<u64>() > 2;
            seen.len() == 2 && seen.iter().all(of)
        });
        timed.with_context(|| format!("{seen:?}"))?;
        for r in &seen {
            let mean = r.round_trips_ns / r.round_trips.iter().sum::<u64>();
            ensure!(mean > 1_000 && mean < 1_000_000_000, "{r:?}");
        }
    }
    Ok(())
}

pub fn check_measures_both_ways(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let host = lab.node(SERVER).host();
    let mut said = String::new();
    for _ in 0..TRIES {
        let before = over_rails(&c)?;
        let server = tool(lab, &c, SERVER, &format!("check --serve {host}:0 --once"))?;
        let at = server.line("listening on ")?;
        let port = at.rsplit(':').next().context("a port")?.to_owned();
        let line = format!("check -j --measure {host} {port} {SHORT}");
        let out = tool(lab, &c, CLIENT, &line)?.wait()?;
        let v: Value = serde_json::from_str(&out.stdout).with_context(|| format!("{out:?}"))?;
        // Whatever became of the lane, TCP's figures are TCP's.
        let tcp = &v["tcp"]["figures"];
        let (moved, by_kernel) = (number(&tcp["bytes"]), number(&tcp["kernel_bytes"]));
        ensure!(
            positive(tcp) && moved > 0 && by_kernel >= moved / 100 * 98,
            "{v:#}"
        );
        said = format!("{v:#}\n{}", server.stderr());
        if v["reached"] != true {
            ensure!(
                v["lane"]["figures"].is_null() && v["ratio"].is_null(),
                "{v:#}"
            );
            println!("on TCP: {}", v["why_not"]);
            continue;
        }
        let lane = &v["lane"]["figures"];
        ensure!(v["lane"]["mode"] == "SMCR" && positive(lane), "{v:#}");
        let (moved, by_kernel) = (number(&lane["bytes"]), number(&lane["kernel_bytes"]));
        ensure!(moved > 0 && by_kernel <= moved / 50, "{v:#}");
        let carried = over_rails(&c)? - before;
        ensure!(carried >= moved / 100 * 98, "{carried} over rails: {v:#}");
        println!("{}", v["ratio"]);
        server.wait()?.ok()?;
        answers_are_timed(&c)?;
        return c.no_resets();
    }
    anyhow::bail!("no lane in {TRIES} measurements: {said}\n{}", c.picture())
}

const SMC_SERVER: &str = "
import socket, threading
smc = socket.socket(43, socket.SOCK_STREAM, 0)
s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, smc.detach())  # (Python knows no such addresses)
s.bind(('0.0.0.0', 0))
s.listen()
print('port', s.getsockname()[1], flush=True)
def echo(c):
    while data := c.recv(65536):
        c.sendall(data)
    c.close()
while True:
    threading.Thread(target=echo, args=(s.accept()[0],), daemon=True).start()
";

const ECHO_CLIENT: &str = "
import os, socket, sys
c = socket.create_connection((sys.argv[1], int(sys.argv[2])))
for n in range(100):
    data, back = os.urandom(1 + n * 211 % 9000), b''
    c.sendall(data)
    while len(back) < len(data):
        back += c.recv(65536) or sys.exit('end of file')
    assert back == data, n
c.shutdown(socket.SHUT_WR)
assert c.recv(1) == b''
print('ok')
";

/// A server whose listener is one of the kernel's SMC. Neither `check` nor the client of bytes speaks SMC, so the kernel
/// puts the TCP socket into the accepted file, for good: under the shim it is a connection like any other, without it
/// one whose other end nobody knows.
pub fn check_of_the_kernels_smc(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let node = lab.node(SERVER);
    node.check("modprobe smc; modprobe smc_diag")?;
    let host = node.host();
    for (with_shim, wait_s, env) in [
        (true, 20, c.eager()[SERVER].clone()),
        (false, 4, Vec::new()),
    ] {
        let python = |script: &str| format!("exec {} -u -c {}", paths::PYTHON, quoted(script));
        let server = node.sh(python(SMC_SERVER))?.envs(env).spawn()?;
        let port = server.line("port ")?;
        let before = over_rails(&c)?;
        let client = format!("{} {host} {port}", python(ECHO_CLIENT));
        let client = lab.node(CLIENT).sh(client)?.envs(c.eager()[CLIENT].clone());
        ensure!(client.check()?.trim() == "ok");
        let carried = over_rails(&c)? - before;
        ensure!(
            (carried > 0) == with_shim,
            "{carried} bytes over rails, shim: {with_shim}\n{}",
            c.picture()
        );
        let out = tool(
            lab,
            &c,
            CLIENT,
            &format!("check -j --wait {wait_s} {host} {port}"),
        )?
        .wait()?;
        let v: Value = serde_json::from_str(&out.stdout).with_context(|| format!("{out:?}"))?;
        let on_tcp = v["mode"].as_str().is_some_and(|m| m.starts_with("TCP 0x"));
        let as_expected = match with_shim {
            true => v["mode"] == "SMCR" && v["promotable"] == true,
            false => on_tcp && v["promotable"] == false && v["there"]["known"] == false,
        };
        ensure!(as_expected, "shim: {with_shim}: {v:#}\n{}", c.picture());
        drop(server);
    }
    node.check("sleep 1; modprobe -r smc_diag smc")?;
    c.no_resets()
}
