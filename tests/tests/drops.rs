//! Where the sender's own node drops segments (a full queue, a packet filter), the kernel counts bytes that it
//! has not sent. Positions stay exact all the same: connections are promoted, and every byte arrives. Needs root.

use anyhow::{bail, Context, Result};
use std::process::Command;
use std::time::Duration;
use underpass_tests::harness::peers::Transfer;
use underpass_tests::harness::{until, Daemon, Pods, PATIENCE};

const LIMIT: Duration = Duration::from_secs(60);
/// Bytes before the connections are promoted: among them are enough drops.
const BEFORE: u64 = 20_000_000;

fn run(line: &str) -> Result<String> {
    let mut words = line.split_whitespace();
    let out = Command::new(words.next().context("a command")?)
        .args(words)
        .output()?;
    if !out.status.success() {
        bail!("{line}: {}", String::from_utf8_lossy(&out.stderr));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// A transfer in both directions on one node whose loopback drops by `rule`, until it is promoted and further.
/// `dropped` tells that there were drops.
fn promoted_under(rule: &str, dropped: impl Fn(&str) -> Result<bool>) -> Result<()> {
    let mut d = Daemon::absent()?;
    let pods = Pods::new()?;
    let within = format!("ip netns exec {}", pods.a());
    run(&format!("{within} {rule}"))?;
    let place = d.place().netns(pods.a());
    let mut t = Transfer::start(&place, &place, "127.0.0.1")?;
    t.await_sent(BEFORE)?;
    until("segments are dropped", PATIENCE, || {
        dropped(&within).unwrap_or(false)
    })?;
    d.restart()?;
    d.await_ups(2)?;
    // On and off the lane, in both directions, with drops below.
    for _ in 0..5 {
        t.await_sent(5_000_000)?;
        d.down(underpass_admin::Target::All)?;
        t.await_sent(5_000_000)?;
        d.up(underpass_admin::Target::All)?;
    }
    d.await_ups(4)?;
    if !t.alive() {
        bail!("{}{}", t.server.stderr(), t.client.stderr());
    }
    let moved = t.finish(LIMIT).with_context(|| d.picture())?;
    d.assert_promoted(2, 1_000_000)
        .with_context(|| format!("{moved:?}"))?;
    let rows = d.log()?.join("\n");
    if rows.contains("bypassed") {
        bail!("{rows}");
    }
    Ok(())
}

#[test]
fn root_filtered_on_the_way_out() -> Result<()> {
    promoted_under(
        "iptables -w -A OUTPUT -o lo -p tcp -m statistic --mode random --probability 0.03 -j DROP",
        |within| {
            let out = run(&format!("{within} iptables -w -v -x -n -L OUTPUT"))?;
            let drops = out
                .lines()
                .find(|l| l.contains("DROP") && l.contains("statistic"));
            let n = drops.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
            Ok(n.unwrap_or(0) > 10)
        },
    )
}

#[test]
fn root_full_queue() -> Result<()> {
    promoted_under(
        "tc qdisc add dev lo root tbf rate 800mbit burst 128kb limit 128kb",
        |within| {
            let out = run(&format!("{within} tc -s qdisc show dev lo"))?;
            let n = out.split("dropped ").nth(1).and_then(|r| {
                r.split(|c: char| !c.is_ascii_digit())
                    .next()?
                    .parse::<u64>()
                    .ok()
            });
            Ok(n.unwrap_or(0) > 10)
        },
    )
}
