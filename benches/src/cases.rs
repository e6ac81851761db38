//! What is measured: each case runs one pair of unmodified programs over a given wire.

use crate::limit::What;
use anyhow::{bail, Result};
use underpass_tests::harness::redis::{Load, Redis};
use underpass_tests::harness::tools::{iperf3, sockperf, Sockperf};
use underpass_tests::harness::web::Nginx;
use underpass_tests::harness::{Daemon, Place};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Wire {
    Tcp,
    Unix,
    Underpass,
}

/// How the programs are started for one wire.
pub struct Places {
    pub server: Place,
    pub client: Place,
}

#[derive(Clone, Copy)]
pub enum Kind {
    Sockperf(Sockperf),
    Redis {
        test: &'static str,
        clients: u32,
        pipeline: u32,
        reconnect: bool,
    },
    Web {
        /// The server keeps the served files open.
        open_files: bool,
    },
    Bulk,
}

#[derive(Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    pub unit: &'static str,
    pub kind: Kind,
    /// Only the server is under the shim: nothing may be promoted, and nothing lost by it.
    pub lonely: bool,
    /// Ends that must be promoted in each run over Underpass. 0: connections too short for it.
    pub ends: u64,
    pub limit: Option<What>,
}

impl Case {
    /// A time: less is better.
    pub fn is_time(&self) -> bool {
        matches!(self.kind, Kind::Sockperf(Sockperf::PingPong))
    }

    /// Has the program a Unix socket?
    pub fn has_unix(&self) -> bool {
        matches!(self.kind, Kind::Redis { .. }) && !self.lonely
    }

    /// One run of about `seconds`. `guess` is the rate of an earlier run of the same kind, if any:
    /// some programs are told a number of requests, not a time.
    pub fn run(&self, wire: Wire, p: &Places, seconds: f64, guess: Option<f64>) -> Result<f64> {
        let whole = (seconds.ceil() as u32).max(1);
        match self.kind {
            // sockperf stops above the rate it was told, because it numbers its messages in advance.
            Kind::Sockperf(what @ Sockperf::PingPong) => {
                sockperf(&p.server, &p.client, what, whole, Some(PING_MPS))
            }
            Kind::Sockperf(what) => sockperf(&p.server, &p.client, what, whole, Some(MESSAGE_MPS)),
            Kind::Web { open_files } => {
                let nginx = if open_files {
                    Nginx::with_open_files(&p.server)?
                } else {
                    Nginx::start(&p.server)?
                };
                nginx.wrk(&p.client, 32, whole)
            }
            Kind::Bulk => iperf3(&p.server, &p.client, "127.0.0.1", whole, ""),
            Kind::Redis {
                test,
                clients,
                pipeline,
                reconnect,
            } => {
                let redis = Redis::start(&p.server)?;
                let run = |requests: u64| {
                    let load = Load {
                        test,
                        clients,
                        pipeline,
                        requests,
                        reconnect,
                    };
                    match wire {
                        Wire::Unix => redis.benchmark_unix(&p.client, load),
                        _ => redis.benchmark(&p.client, load),
                    }
                };
                let rate = match guess {
                    Some(r) => r,
                    None => run(20_000)?,
                };
                run(((rate * seconds) as u64).max(10_000))
            }
        }
    }
}

const PING_MPS: u32 = 4_000_000;
const MESSAGE_MPS: u32 = 20_000_000;

const fn redis(name: &'static str, test: &'static str, clients: u32, pipeline: u32) -> Case {
    let kind = Kind::Redis {
        test,
        clients,
        pipeline,
        reconnect: false,
    };
    Case {
        name,
        unit: "req/s",
        kind,
        lonely: false,
        ends: 2 * clients as u64,
        limit: None,
    }
}

const fn sock(name: &'static str, unit: &'static str, what: Sockperf, limit: What) -> Case {
    Case {
        name,
        unit,
        kind: Kind::Sockperf(what),
        lonely: false,
        ends: 2,
        limit: Some(limit),
    }
}

/// Every case, in the order of the table.
pub const ALL: &[Case] = &[
    sock(
        "sockperf ping-pong 64 B",
        "us",
        Sockperf::PingPong,
        What::PingPong,
    ),
    sock(
        "sockperf messages 64 B",
        "msg/s",
        Sockperf::Throughput,
        What::Messages,
    ),
    redis("redis GET, 1 client", "get", 1, 1),
    redis("redis SET, 1 client", "set", 1, 1),
    redis("redis GET, 50 clients", "get", 50, 1),
    redis("redis SET, 50 clients", "set", 50, 1),
    redis("redis GET, 50 clients, pipeline 16", "get", 50, 16),
    redis("redis SET, 50 clients, pipeline 16", "set", 50, 16),
    Case {
        name: "nginx, wrk 32 connections",
        unit: "req/s",
        kind: Kind::Web { open_files: true },
        lonely: false,
        ends: 64,
        limit: None,
    },
    Case {
        name: "nginx that opens the file each time",
        unit: "req/s",
        kind: Kind::Web { open_files: false },
        lonely: false,
        ends: 64,
        limit: None,
    },
    Case {
        name: "iperf3",
        unit: "Gbit/s",
        kind: Kind::Bulk,
        lonely: false,
        ends: 2,
        limit: Some(What::Bulk),
    },
    Case {
        name: "redis GET, 50, peer without shim",
        unit: "req/s",
        kind: Kind::Redis {
            test: "get",
            clients: 50,
            pipeline: 1,
            reconnect: false,
        },
        lonely: true,
        ends: 0,
        limit: None,
    },
    Case {
        name: "redis connect, GET, close",
        unit: "req/s",
        kind: Kind::Redis {
            test: "get",
            clients: 50,
            pipeline: 1,
            reconnect: true,
        },
        lonely: false,
        ends: 0,
        limit: None,
    },
];

/// What the demo shows.
pub const DEMO: &[&str] = &[
    "redis GET, 1 client",
    "redis GET, 50 clients",
    "nginx, wrk 32 connections",
    "iperf3",
];

/// The places of a wire. With Underpass the daemon is there, and connections are promoted by the
/// usual rules.
pub fn places(case: &Case, wire: Wire, d: &Daemon) -> Places {
    let shim = wire == Wire::Underpass;
    let server = if shim { d.place() } else { Place::bare() };
    let client = if shim && !case.lonely {
        d.place()
    } else {
        Place::bare()
    };
    Places { server, client }
}

/// One run over Underpass, and the proof that it was one: what the daemon counted meanwhile.
pub fn measured(
    case: &Case,
    wire: Wire,
    d: &Daemon,
    seconds: f64,
    guess: Option<f64>,
) -> Result<f64> {
    let before = d.stats()?;
    let result = case.run(wire, &places(case, wire, d), seconds, guess)?;
    if wire == Wire::Underpass {
        let after = d.stats()?;
        let ends = after.promoted - before.promoted;
        let lane = after.lane_tx_bytes - before.lane_tx_bytes;
        if ends < case.ends || (case.ends > 0 && lane == 0) {
            bail!(
                "NOT PROMOTED: {ends} of {} ends, {lane} bytes on lanes",
                case.ends
            );
        }
        if case.lonely && ends > 0 {
            bail!("promoted without a peer: {ends} ends");
        }
        if after.resets != before.resets {
            bail!(
                "{} connections were reset by the shim",
                after.resets - before.resets
            );
        }
    }
    Ok(result)
}
