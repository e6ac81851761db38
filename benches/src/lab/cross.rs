//! Is our measuring program right about rsockets? `rstream` of rdmacm-utils is rsockets' own.

use super::Bench;
use anyhow::{Context, Result};
use std::time::Duration;
use underpass_tests::lab::Family;

const LIMIT: Duration = Duration::from_secs(60);

/// Round trip of 64 bytes in microseconds, and bulk in MB/s.
pub fn rstream(bench: &Bench) -> Result<(f64, f64)> {
    // Microseconds are those of one way.
    let (_, us) = pair(bench, 7001, "-S 64 -C 1 -I 1000")?;
    let (gbits, _) = pair(bench, 7002, "-S 65536 -C 40 -I 2")?;
    Ok((2.0 * us, gbits * 1000.0 / 8.0))
}

/// The rate and the time that the client says. Both ends wait in blocking calls, as ours do: by
/// itself it asks again and again, and takes the only processor from soft-RoCE.
fn pair(bench: &Bench, port: u16, what: &str) -> Result<(f64, f64)> {
    let (a, b) = (bench.lab.node(0), bench.lab.node(1));
    let command = format!("rstream -T b -p {port} {what}");
    let server = a.sh(format!("exec {command}"))?.limit(LIMIT).spawn()?;
    let to = a.address(1, Family::V4);
    // Nothing shows that it listens.
    let said = b
        .sh(format!(
            "for i in 1 2 3 4 5 6; do {command} -s {to} && exit 0; sleep 0.5; done; exit 1"
        ))?
        .limit(LIMIT)
        .check()?;
    server.wait()?.ok()?;
    let words = |l: &str| -> Option<(f64, f64)> {
        let mut w = l.split_whitespace().rev();
        let us = w.next()?.parse().ok()?;
        Some((w.next()?.parse().ok()?, us))
    };
    said.lines()
        .rev()
        .find_map(words)
        .with_context(|| format!("rstream said {said:?}"))
}
