//! Arguments and help of `check`.

use clap::Args;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

pub const CHECK_LONG: &str = "\
Open a real TCP connection to HOST:PORT under the shim, ask for its promotion at once, and say which \
mode it gets, or would get after some use, with the reasons of both ends in words. No byte is sent \
to the service; what it sends by itself is read and thrown away. The connection is closed afterwards.

The daemon asks the shim of an idle service to take part. It cannot hear that while every thread \
sleeps in a blocking call; such a service counts as promotable. Where the service is on another node, \
the daemon there does the same and says what it found. No daemon is started: without one, the answer is TCP.

For a service of another node the answer also has: the two nodes, the channel between their daemons \
(see `underpass peers`), and RDMA: the device in use, or how many links to that node work, or why this \
node has none (see `underpass devices`). Names of nodes are shown to root on the node only. Through an \
address that is translated on the way (a service address of a cluster) the other node is not known \
before the two ends have found each other.

With --measure, `underpass check --serve PORT` has to run at HOST: in the other pod, or on the other \
node. Two connections are made to it, one that stays on TCP, between programs without the shim, and one \
under the shim. Round trips of 64 bytes, and blocks of 128 KiB each way, are timed on both in turn, after \
the second one has been promoted. A figure counts as the lane's only if the kernel's TCP has not carried \
the bytes; if the connection is not promoted, there is none, but the reasons of both ends.

With --pid nothing is opened: the process and its descendants are looked at, and for each it is said \
whether it carries the library, whether it reaches a daemon, and why not.";

pub const CHECK_AFTER: &str = "\
Examples:
  underpass check 127.0.0.1 6379
  underpass check -j redis.example 6379 | jq -r .mode
  underpass check --serve 5300                          in one pod
  /run/underpass/underpass check --measure web-0 5300   in another: round trip and throughput
  underpass check --pid 4711

With -j: mode (what such a connection gets), now (what this one had), promoted, promotable, daemon \
and closed (true or false), local and peer (addresses), and for each end, here and there: known (to \
the daemon), mode, up, reason (null, or code, name, text, advice), pid, comm, note; and across (null: \
one node), with own and node (names), listed (does a [[peer]] list the address?), channel (up, down) \
and trouble (why), refusal (null, or why this node has no RDMA), links, rail (null, or as in `ss -e -j`).

Exit status: 0 if the connection is promoted or could be, 1 if it stays on TCP, 2 if the test failed
(connection refused, unknown host, no library).

With --measure: medians over the rounds (minimum: the smallest of all), and how many times better the lane \
is. GB is 10^9 bytes. -j prints an object: host, port, rounds, time_s, reached (did the lane carry it?), \
why_not (null, or what else the kernel's count shows), tcp and lane, each with local, peer, mode, figures (null, or round_trip_us with median, \
p99 and minimum; to_server and from_server with gbyte_s and gbit_s; bytes, and kernel_bytes of them by \
TCP), ratio (null, or median, p99, to_server, from_server), and check (as -j without --measure). \
Exit status: 0 if the lane was measured, 1 if the connection stayed on TCP, 2 if the test failed.

With --serve: it ends by ^C, and takes 16 connections at a time, 8 of one address, each for two hours at most. It asks nobody who he is: whoever
reaches the port can have it send and receive. Exit status: 0 with --once, 2 if it cannot serve.

With --pid: why a process has no library (cause): static (linked statically), secure (set-user-id, \
set-group-id or file capabilities), no-preload (cleaned environment), preload-overwritten, \
library-absent (no such file in its root directory and mount namespace), architecture, loader, off \
(UNDERPASS=off), kernel-thread, starting (or ending), hidden (ask as root). Its daemon: connected, reachable (the library has had no reason to \
speak to it yet), absent, silent, forbidden (permissions), seccomp. -j prints an array of objects with \
pid, comm, program, library (path or null), cause (null, or name and text), daemon, note, fine. \
Exit status: 0 if all carry the library and reach a daemon, 1 if one does not, 2 if there is no such \
process, or it has ended (a zombie).";

#[derive(Debug, Args)]
pub struct Check {
    #[arg(required_unless_present_any = ["pid", "serve"])]
    pub host: Option<String>,
    #[arg(required_unless_present_any = ["pid", "serve"])]
    pub port: Option<u16>,
    /// Measure round trip and throughput over TCP and over the lane
    #[arg(short, long, requires = "port")]
    pub measure: bool,
    /// With --measure: how often each test is done, on TCP and on the lane in turn
    #[arg(long, value_name = "N", default_value_t = 5, requires = "measure", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// With --measure: seconds that each of the three tests of a round takes
    #[arg(short, long, value_name = "SECONDS", default_value = "0.5", requires = "measure", value_parser = time)]
    pub time: Duration,
    /// Be the other end of --measure, at this port of all addresses, or of one
    #[arg(long, value_name = "[ADDRESS:]PORT", conflicts_with_all = ["host", "port", "wait", "pid", "measure", "json"], value_parser = serve)]
    pub serve: Option<Serve>,
    /// With --serve: end after one measurement
    #[arg(long, requires = "serve", conflicts_with = "host")]
    pub once: bool,
    /// Look at this process and its descendants instead
    #[arg(long, value_name = "PID", conflicts_with_all = ["host", "port", "wait", "measure"])]
    pub pid: Option<u32>,
    /// Seconds to wait for the promotion [default: 2; with --measure: 10]
    #[arg(short, long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=600))]
    pub wait: Option<u64>,
    /// Print JSON
    #[arg(short, long)]
    pub json: bool,
}

/// Where to listen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Serve {
    /// `None`: at all addresses.
    pub ip: Option<IpAddr>,
    pub port: u16,
}

fn serve(s: &str) -> Result<Serve, String> {
    if let Ok(port) = s.parse() {
        return Ok(Serve { ip: None, port });
    }
    let a: SocketAddr = s
        .parse()
        .map_err(|_| "a port, or an IP address and a port: 192.0.2.1:5300, [2001:db8::1]:5300")?;
    Ok(Serve {
        ip: Some(a.ip()),
        port: a.port(),
    })
}

fn time(s: &str) -> Result<Duration, String> {
    let bounds = 0.01..=10.0;
    match s.parse::<f64>() {
        Ok(v) if bounds.contains(&v) => Ok(Duration::from_secs_f64(v)),
        _ => Err("seconds, from 0.01 to 10".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;

    #[test]
    fn what_goes_together() {
        let parse = |line: &str| Cli::try_parse_from(line.split_whitespace());
        for good in [
            "host 1",
            "--measure host 1",
            "-m host 1 --rounds 2 -t 0.1 -j -w 5",
            "--serve 5300",
            "--serve 127.0.0.1:5300 --once",
            "--pid 1 -j",
        ] {
            assert!(parse(&format!("underpass check {good}")).is_ok(), "{good}");
        }
        for bad in [
            "",
            "host",
            "--measure",
            "--measure --pid 1",
            "host 1 --rounds 2",
            "host 1 -t 1",
            "-m host 1 -t 11",
            "-m host 1 -t nan",
            "-m host 1 --rounds 0",
            "--serve host",
            "--serve 70000",
            "--serve 5300 host 1",
            "--serve 5300 -m",
            "host 1 --once",
        ] {
            assert!(parse(&format!("underpass check {bad}")).is_err(), "{bad}");
        }
        let at = serve("[::1]:5300").unwrap();
        assert_eq!(
            (at.ip, at.port),
            (Some(IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1])), 5300)
        );
        assert_eq!(serve("5300").unwrap().ip, None);
    }
}
