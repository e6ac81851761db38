//! Redis, nginx, iperf3 and their clients, unmodified, promoted by the usual rules.

use anyhow::{ensure, Context, Result};
use sha2::{Digest, Sha256};
use std::time::Duration;
use underpass_tests::harness::redis::{Load, Redis};
use underpass_tests::harness::web::{hex, noise, Nginx};
use underpass_tests::harness::{tools, Daemon, Place, Program};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn redis_benchmark() -> Result<()> {
    let d = Daemon::start()?;
    let redis = Redis::start(&d.place())?;
    for (clients, pipeline) in [(1, 1), (50, 1), (50, 16)] {
        let before = d.stats()?;
        for test in ["set", "get"] {
            let load = Load {
                test,
                clients,
                pipeline,
                requests: if clients == 1 { 50_000 } else { 300_000 },
                reconnect: false,
            };
            let rate = redis.benchmark(&d.place(), load)?;
            ensure!(rate > 0.0);
        }
        let after = d.stats()?;
        let ends = after.promoted - before.promoted;
        // Two runs; with fifty clients each of them makes six thousand requests.
        ensure!(
            ends >= 4 * u64::from(clients),
            "{clients} clients: {ends} promoted ends\n{}",
            d.picture()
        );
        ensure!(after.lane_tx_bytes > before.lane_tx_bytes + 1_000_000);
    }
    d.assert_promoted(404, 3_000_000)?;
    Ok(())
}

/// Values of many sizes, written and read back over one promoted connection.
#[test]
fn redis_keeps_values() -> Result<()> {
    let d = Daemon::start()?;
    let redis = Redis::start(&d.place())?;
    let mut sums = Vec::new();
    let mut wire = Vec::new();
    for i in 0..400usize {
        let value = noise(1 + i * i * 3);
        sums.push(hex(&Sha256::digest(&value)));
        wire.extend_from_slice(
            format!("*3\r\n$3\r\nSET\r\n$4\r\nk{i:03}\r\n${}\r\n", value.len()).as_bytes(),
        );
        wire.extend_from_slice(&value);
        wire.extend_from_slice(b"\r\n");
    }
    let said = Program::new("redis-cli", &d.place())
        .words(&format!("-p {} --pipe", redis.port))
        .stdin(&wire)
        .check(LIMIT)?;
    ensure!(said.contains("errors: 0, replies: 400"), "{said}");
    // Another program reads them back and hashes them.
    let out = Program::python("redis_values.py", &d.place())
        .arg(redis.port.to_string())
        .arg("400")
        .check(LIMIT)?;
    let got: Vec<&str> = out.lines().collect();
    ensure!(
        got.len() == sums.len() && got.iter().zip(&sums).all(|(a, b)| a == b),
        "values differ:\n{out}"
    );
    d.assert_promoted(4, wire.len() as u64)?;
    Ok(())
}

#[test]
fn nginx_and_curl() -> Result<()> {
    let d = Daemon::start()?;
    let web = Nginx::start(&d.place())?;
    // The same connection for all of them (keep-alive), big bodies by sendfile.
    let out = tempfile::tempdir()?;
    let mut curl = Program::new("curl", &d.place())
        .words("-sS --fail -v")
        .dir(out.path());
    for i in 0..6 {
        curl = curl.arg("-o").arg(format!("big{i}")).arg(web.url("big"));
        curl = curl
            .arg("-o")
            .arg(format!("small{i}"))
            .arg(web.url("small"));
    }
    let done = curl.run(LIMIT)?;
    ensure!(done.status.success(), "{}", done.stderr);
    let connects = done.stderr.matches("* Connected to").count();
    ensure!(connects == 1, "curl connected {connects} times");
    for i in 0..6 {
        let body = std::fs::read(out.path().join(format!("big{i}")))?;
        ensure!(
            hex(&Sha256::digest(&body)) == web.big_hash,
            "body {i} differs"
        );
        ensure!(std::fs::read(out.path().join(format!("small{i}")))?.len() == 612);
    }
    d.assert_promoted(2, 2_000_000)?;
    Ok(())
}

#[test]
fn nginx_and_wrk() -> Result<()> {
    let d = Daemon::start()?;
    let web = Nginx::start(&d.place())?;
    web.wrk(&d.place(), 32, 2)?;
    d.assert_promoted(64, 1_000_000)?;
    Ok(())
}

#[test]
fn iperf3_both_directions() -> Result<()> {
    let d = Daemon::start()?;
    for (i, extra) in ["", "-R", "--bidir", "-P 4"].into_iter().enumerate() {
        let before = d.stats()?;
        let rate = tools::iperf3(&d.place(), &d.place(), "127.0.0.1", 1, extra)
            .with_context(|| format!("{extra}\n{}", d.picture()))?;
        let moved = d.stats()?.lane_tx_bytes - before.lane_tx_bytes;
        ensure!(
            rate > 0.0 && moved > 50_000_000,
            "iperf3 {extra}: {moved} bytes on lanes\n{}",
            d.picture()
        );
        ensure!(d.stats()?.promoted >= before.promoted + 2, "round {i}");
    }
    d.assert_promoted(8, 0)?;
    Ok(())
}

/// A client that is not under the shim talks to a server that is, beside one that is promoted.
#[test]
fn peer_without_a_shim() -> Result<()> {
    let d = Daemon::start()?;
    let redis = Redis::start(&d.place())?;
    let load = Load {
        test: "get",
        clients: 20,
        pipeline: 1,
        requests: 40_000,
        reconnect: false,
    };
    redis.benchmark(&Place::bare(), load)?;
    let s = d.stats()?;
    ensure!(
        s.promoted == 0 && s.lane_tx_bytes == 0,
        "promoted without a peer: {s:?}"
    );
    redis.benchmark(&d.place(), load)?;
    d.assert_promoted(40, 100_000)?;
    Ok(())
}
