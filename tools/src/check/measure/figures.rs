//! The figures of a measurement, and the text and JSON for them.

use crate::check::report::Finding;
use serde_json::{json, Value};
use std::time::Duration;

/// What one connection has shown.
#[derive(Default)]
pub struct Figures {
    /// Of each round: median, 99th percentile, minimum, in ns.
    pub round_trips: Vec<[u64; 3]>,
    /// Of each round: bytes and ns, to the server and from it.
    pub up: Vec<(u64, u64)>,
    pub down: Vec<(u64, u64)>,
    /// Bytes in all, and how many of them the kernel's TCP carried.
    pub bytes: u64,
    pub kernel_bytes: u64,
    /// In one test or more, bytes went another way than they should.
    pub astray: bool,
}

/// Of all rounds.
#[derive(Clone, Copy)]
struct Sum {
    /// In µs.
    median: f64,
    p99: f64,
    minimum: f64,
    /// In 10^9 bytes per second.
    up: f64,
    down: f64,
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a few digits are shown of the 15 that a float has"
)]
fn float(n: u64) -> f64 {
    n as f64
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    match all.len() {
        0 => 0.0,
        n if n % 2 == 1 => all[n / 2],
        n => f64::midpoint(all[n / 2 - 1], all[n / 2]),
    }
}

impl Figures {
    fn sum(&self) -> Sum {
        let us = |k: usize| self.round_trips.iter().map(move |r| float(r[k]) / 1000.0);
        let rate = |all: &[(u64, u64)]| {
            let rates = all.iter().map(|(bytes, ns)| float(*bytes) / float(*ns));
            median(rates.collect()) // (bytes per ns are 10^9 bytes per second)
        };
        Sum {
            median: median(us(0).collect()),
            p99: median(us(1).collect()),
            minimum: us(2).reduce(f64::min).unwrap_or(0.0),
            up: rate(&self.up),
            down: rate(&self.down),
        }
    }

    fn json(&self) -> Value {
        let s = self.sum();
        let rate =
            |gbyte: f64| json!({ "gbyte_s": rounded(gbyte), "gbit_s": rounded(gbyte * 8.0) });
        json!({
            "round_trip_us": {
                "median": rounded(s.median),
                "p99": rounded(s.p99),
                "minimum": rounded(s.minimum),
            },
            "to_server": rate(s.up),
            "from_server": rate(s.down),
            "bytes": self.bytes,
            "kernel_bytes": self.kernel_bytes,
        })
    }
}

fn rounded(v: f64) -> f64 {
    (v * 1000.0).round() / 1000.0
}

pub struct Report {
    pub host: String,
    pub port: u16,
    pub rounds: u32,
    /// Of each test.
    pub time: Duration,
    /// Addresses of the connection that stayed on TCP.
    pub tcp_ends: [String; 2],
    pub tcp: Figures,
    /// `None`: the other connection was not promoted.
    pub lane: Option<Figures>,
    /// What the daemon says of the other connection.
    pub found: Finding,
}

impl Report {
    /// The lane's figures, if they are the lane's.
    fn proven(&self) -> Option<&Figures> {
        self.lane.as_ref().filter(|_| self.why_not().is_none())
    }

    pub fn reached(&self) -> bool {
        self.proven().is_some()
    }

    /// Why a connection that was promoted has no figures all the same.
    fn why_not(&self) -> Option<String> {
        let f = self.lane.as_ref()?;
        if f.astray {
            return Some(format!(
                "of {} bytes, {} went by TCP although the connection was promoted",
                f.bytes, f.kernel_bytes
            ));
        }
        let ended = !self.found.promoted();
        ended.then(|| "the connection did not stay on the lane until the end".into())
    }

    pub fn text(&self) -> String {
        let [local, peer] = &self.tcp_ends;
        let (time, rounds) = (self.time.as_secs_f64(), self.rounds);
        let mut t = format!(
            "measured   {rounds} rounds, TCP and lane in turn; each test {time} s\n\
             TCP        {local} -> {peer}, without the shim\n"
        );
        let lane = self.proven().map(Figures::sum);
        match lane {
            Some(_) => {
                let f = &self.found;
                t += &format!("lane       {} -> {}, {}\n", f.local, f.peer, f.now());
            }
            None => {
                t += "lane       none\n";
                t += &self.found.text();
            }
        }
        if let Some(why) = self.why_not() {
            t += &format!("note       {why}\n");
        }
        t += &format!("\n{:28}{:>12}{:>14}{:>9}\n", "", "TCP", "lane", "ratio");
        let tcp = self.tcp.sum();
        let mut line = |name: &str, unit: &str, of: fn(&Sum) -> f64, less: bool| {
            let a = of(&tcp);
            let (b, ratio) = match lane.as_ref().map(of) {
                Some(b) => (number(b, unit), number(ratio(a, b, less), "x")),
                None => ("-".into(), "-".into()),
            };
            t += &format!("{name:28}{:>12}{b:>14}{ratio:>9}\n", number(a, unit));
        };
        line("round trip, median", "us", |s| s.median, true);
        line("round trip, 99 %", "us", |s| s.p99, true);
        line("round trip, minimum", "us", |s| s.minimum, true);
        line("to the server", "GB/s", |s| s.up, false);
        line("", "Gbit/s", |s| s.up * 8.0, false);
        line("from the server", "GB/s", |s| s.down, false);
        line("", "Gbit/s", |s| s.down * 8.0, false);
        t
    }

    pub fn json(&self) -> Value {
        let lane = self.proven();
        let ratios = lane.map(|f| {
            let (a, b) = (self.tcp.sum(), f.sum());
            json!({
                "median": rounded(ratio(a.median, b.median, true)),
                "p99": rounded(ratio(a.p99, b.p99, true)),
                "to_server": rounded(ratio(a.up, b.up, false)),
                "from_server": rounded(ratio(a.down, b.down, false)),
            })
        });
        let [local, peer] = &self.tcp_ends;
        json!({
            "host": self.host,
            "port": self.port,
            "rounds": self.rounds,
            "time_s": self.time.as_secs_f64(),
            "reached": self.reached(),
            "why_not": self.why_not(),
            "tcp": { "local": local, "peer": peer, "mode": "TCP", "figures": self.tcp.json() },
            "lane": {
                "local": self.found.local,
                "peer": self.found.peer,
                "mode": self.found.now(),
                "figures": lane.map(Figures::json),
            },
            "ratio": ratios,
            "check": self.found.json(),
        })
    }
}

fn number(v: f64, unit: &str) -> String {
    let digits = match v {
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    let space = if unit == "x" { "" } else { " " };
    format!("{v:.digits$}{space}{unit}")
}

/// How many times better the lane is.
fn ratio(tcp: f64, lane: f64, less_is_better: bool) -> f64 {
    let (better, worse) = if less_is_better {
        (tcp, lane)
    } else {
        (lane, tcp)
    };
    if worse > 0.0 {
        better / worse
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(scale: u64) -> Figures {
        Figures {
            round_trips: vec![
                [10_000 * scale, 30_000, 9000],
                [12_000 * scale, 20_000, 7000],
            ],
            up: vec![(3000, 1000), (1000, 1000), (2000, 1000)],
            down: vec![(500, 1000)],
            bytes: 7,
            ..Figures::default()
        }
    }

    fn report(lane: Option<Figures>) -> Report {
        Report {
            host: "h".into(),
            port: 1,
            rounds: 2,
            time: Duration::from_millis(500),
            tcp_ends: ["a".into(), "b".into()],
            tcp: figures(2),
            lane,
            found: Finding::default(),
        }
    }

    #[test]
    fn medians_of_rounds() {
        let s = figures(1).sum();
        assert_eq!((s.median, s.p99, s.minimum), (11.0, 25.0, 7.0));
        assert_eq!((s.up, s.down), (2.0, 0.5));
        let v = figures(1).json();
        assert_eq!(v["to_server"]["gbit_s"], 16.0);
        assert_eq!(ratio(22.0, 11.0, true), 2.0);
        assert_eq!(ratio(1.0, 2.0, false), 2.0);
        assert_eq!(ratio(1.0, 0.0, true), 0.0);
    }

    #[test]
    fn no_figure_of_a_lane_that_was_none() {
        let tcp_only = |f: Option<Figures>, why: Option<&str>| {
            let r = report(f);
            let v = r.json();
            assert!(!r.reached() && v["lane"]["figures"].is_null() && v["ratio"].is_null());
            assert_eq!(v["tcp"]["figures"]["round_trip_us"]["median"], 22.0);
            assert!(r.text().contains("lane       none\n"), "{}", r.text());
            assert!(
                r.text().contains("22.0 us             -        -"),
                "{}",
                r.text()
            );
            assert!(why.is_none_or(|w| r.text().contains(w)), "{}", r.text());
        };
        tcp_only(None, None);
        // It is not promoted at the end.
        tcp_only(Some(figures(1)), Some("did not stay on the lane"));
        let mut astray = figures(1);
        astray.astray = true;
        tcp_only(Some(astray), Some("went by TCP"));
    }
}
