//! What the machine as a whole did: soft-RoCE and TCP work in interrupts that no process is billed
//! for, and Underpass in a daemon.

use anyhow::{Context, Result};
use nix::time::{clock_gettime, ClockId};
use std::path::Path;

/// Nanoseconds in a tick of `/proc/stat`.
const TICK_NS: u64 = 10_000_000;

/// Processor time that this machine has used since it booted: all that was not idle. The kernel
/// measures idle time exactly and only guesses at the rest, by looking what runs when the timer
/// ticks. The machines of the lab have one processor.
pub fn busy_ns() -> Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)?;
    let now = now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64;
    let stat = std::fs::read_to_string("/proc/stat")?;
    // cpu user nice system idle iowait …
    let idle: u64 = stat
        .lines()
        .next()
        .into_iter()
        .flat_map(|l| l.split_whitespace().skip(4).take(2))
        .map(|w| w.parse::<u64>().context("/proc/stat"))
        .sum::<Result<u64>>()?;
    Ok(now.saturating_sub(idle * TICK_NS))
}

/// Packets that the RDMA devices of this machine have sent.
pub fn rdma_packets() -> Result<u64> {
    let class = Path::new("/sys/class/infiniband");
    let mut sum = 0;
    for device in std::fs::read_dir(class).into_iter().flatten() {
        let counter = device?.path().join("ports/1/hw_counters/sent_pkts");
        let text = std::fs::read_to_string(&counter)
            .with_context(|| format!("{} is only there for soft-RoCE", counter.display()))?;
        sum += text.trim().parse::<u64>()?;
    }
    Ok(sum)
}
