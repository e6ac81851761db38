//! iperf3 and sockperf, unmodified.

use super::{free_port, listening, until, Place, Program, PATIENCE};
use anyhow::{bail, Context, Result};
use std::time::Duration;

/// Bulk throughput in gigabits per second as the receiver counts it. `extra`: arguments of the
/// client.
pub fn iperf3(
    server: &Place,
    client: &Place,
    host: &str,
    seconds: u32,
    extra: &str,
) -> Result<f64> {
    let port = free_port()?;
    let mut s = Program::new("iperf3", server)
        .words(&format!("-s -1 -p {port} -B {host}"))
        .spawn()?;
    until("iperf3 listens", PATIENCE, || {
        s.has_ended() || listening(port)
    })?;
    let text = Program::new("iperf3", client)
        .words(&format!("-c {host} -p {port} -J -t {seconds} {extra}"))
        .run(Duration::from_secs(u64::from(seconds) + 60))?;
    let v: serde_json::Value =
        serde_json::from_str(&text.stdout).with_context(|| format!("iperf3: {text:?}"))?;
    if let Some(e) = v["error"].as_str() {
        bail!("iperf3: {e}");
    }
    s.wait(PATIENCE)?.ok()?;
    let bits = v["end"]["sum_received"]["bits_per_second"]
        .as_f64()
        .context("iperf3 without a result")?;
    Ok(bits / 1e9)
}

/// What sockperf measures.
#[derive(Clone, Copy, PartialEq)]
pub enum Sockperf {
    /// Average round trip in microseconds.
    PingPong,
    /// Messages per second, one direction.
    Throughput,
}

pub fn sockperf(
    server: &Place,
    client: &Place,
    what: Sockperf,
    seconds: u32,
    mps: Option<u32>,
) -> Result<f64> {
    let port = free_port()?;
    let mut s = Program::new("sockperf", server)
        .words(&format!("server --tcp -i 127.0.0.1 -p {port}"))
        .spawn()?;
    until("sockperf serves", PATIENCE, || {
        s.has_ended() || listening(port)
    })
    .with_context(|| s.stdout())?;
    let (sub, result) = match what {
        // Half a round trip, as sockperf reports it.
        Sockperf::PingPong => ("ping-pong", "avg-latency="),
        Sockperf::Throughput => ("throughput", "Message Rate is "),
    };
    let mps = mps.map_or_else(|| "max".to_string(), |n| n.to_string());
    let text = Program::new("sockperf", client)
        .words(&format!(
            "{sub} --tcp -i 127.0.0.1 -p {port} -m 64 -t {seconds} --mps={mps}"
        ))
        .check(Duration::from_secs(u64::from(seconds) + 60))?;
    let n: f64 = text
        .split(result)
        .nth(1)
        .and_then(|r| r.split([' ', '(']).next()?.trim().parse().ok())
        .with_context(|| format!("sockperf printed {text}"))?;
    Ok(if what == Sockperf::PingPong {
        n * 2.0
    } else {
        n
    })
}
