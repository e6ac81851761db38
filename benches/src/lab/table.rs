//! What `make bench-lab` prints: medians, ratios, and where Underpass is ahead or behind.

use super::Way;
use crate::load::client::{Case, Figures};
use crate::report::{median, short};
use serde::Serialize;
use std::fmt::Write;

/// One column.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    pub name: &'static str,
    /// Above the column, in two lines.
    head: [&'static str; 2],
    pub case: Case,
    /// Less is better.
    less: bool,
    of: fn(&Figures) -> Option<f64>,
}

pub const METRICS: [Metric; 6] = [
    Metric {
        name: "round trip of 64 B, median (us)",
        head: ["round trip", "us"],
        case: Case::RoundTrip,
        less: true,
        of: |f| f.median_us,
    },
    Metric {
        name: "round trip of 64 B, 99 % (us)",
        head: ["99 %", "us"],
        case: Case::RoundTrip,
        less: true,
        of: |f| f.p99_us,
    },
    Metric {
        name: "bulk, one way (MB/s)",
        head: ["bulk", "MB/s"],
        case: Case::Bulk,
        less: false,
        of: |f| per(f.bytes as f64 / 1e6, f.seconds),
    },
    Metric {
        name: "64 B on 32 connections (messages/s)",
        head: ["messages", "1/s"],
        case: Case::Many,
        less: false,
        of: |f| per(f.messages as f64, f.seconds),
    },
    Metric {
        name: "processor time of bulk (ns/B)",
        head: ["processor", "ns/B"],
        case: Case::Bulk,
        less: true,
        of: |f| per(busy_ns(f), f.bytes as f64),
    },
    Metric {
        name: "processor time of messages (us)",
        head: ["processor", "us/message"],
        case: Case::Many,
        less: true,
        of: |f| per(busy_ns(f) / 1e3, f.messages as f64),
    },
];

/// Of both machines.
fn busy_ns(f: &Figures) -> f64 {
    (f.client_busy_ns + f.server_busy_ns) as f64
}

fn per(a: f64, b: f64) -> Option<f64> {
    Some(a / b).filter(|x| x.is_finite())
}

/// All runs of one way.
#[derive(Debug, Serialize)]
pub struct Line {
    pub way: Way,
    pub runs: Vec<(String, Figures)>,
    /// Why there are no figures, or not of all runs.
    pub not: Vec<String>,
    /// Other things to know, each once.
    pub notes: Vec<String>,
}

impl Line {
    pub fn new(way: Way) -> Self {
        Line {
            way,
            runs: Vec::new(),
            not: Vec::new(),
            notes: Vec::new(),
        }
    }

    pub fn value(&self, m: &Metric) -> Option<f64> {
        let case = super::word(m.case);
        let of_case = self.runs.iter().filter(|(c, _)| *c == case);
        median(of_case.filter_map(|(_, f)| (m.of)(f)).collect())
    }

    fn cells(&self, cell: impl Fn(&Metric) -> String) -> String {
        let mut text = format!("{:<19}", self.way.name());
        for m in &METRICS {
            let _ = write!(text, "{:>12}", cell(m));
        }
        text
    }
}

/// Above 1 `ours` is better, whether the unit is a rate or a time.
fn ratio(m: &Metric, ours: Option<f64>, other: Option<f64>) -> Option<f64> {
    let (a, b) = if m.less {
        (other?, ours?)
    } else {
        (ours?, other?)
    };
    per(a, b)
}

fn times(x: Option<f64>) -> String {
    x.map_or("-".into(), |x| format!("{x:.2}x"))
}

/// The whole report.
pub fn text(lines: &[Line]) -> String {
    let mut t = String::new();
    for i in 0..2 {
        let _ = write!(t, "{:<19}", "");
        for m in &METRICS {
            let _ = write!(t, "{:>12}", m.head[i]);
        }
        t.push('\n');
    }
    for l in lines {
        if l.runs.is_empty() {
            for not in &l.not {
                let _ = writeln!(t, "{:<19}  {not}", l.way.name());
            }
        } else {
            let _ = writeln!(t, "{}", l.cells(|m| short(l.value(m))));
        }
    }
    let of = |way| lines.iter().find(|l| l.way == way);
    if let Some(tcp) = of(Way::Tcp) {
        t += "\nto kernel TCP (above 1 is better)\n";
        for l in lines
            .iter()
            .filter(|l| l.way != Way::Tcp && !l.runs.is_empty())
        {
            let cell = |m: &Metric| times(ratio(m, l.value(m), tcp.value(m)));
            let _ = writeln!(t, "{}", l.cells(cell));
        }
    }
    if let Some(ours) = of(Way::Underpass) {
        t += "\n";
        t += &verdict(ours, of(Way::Rsockets), of(Way::Smc));
    }
    for l in lines {
        for n in &l.notes {
            let _ = writeln!(t, "{}: {n}", l.way.name());
        }
    }
    t
}

/// Underpass and the better of the two others that use RDMA.
fn verdict(ours: &Line, rsockets: Option<&Line>, smc: Option<&Line>) -> String {
    if ours.runs.is_empty() {
        return format!(
            "Underpass cannot be compared with rsockets and SMC-R: {}\n",
            ours.not.join("; ")
        );
    }
    let mut t = String::from("Underpass to the better of rsockets and SMC-R (above 1 is better)\n");
    for m in &METRICS {
        let better = [rsockets, smc]
            .into_iter()
            .flatten()
            .filter_map(|l| Some((ratio(m, ours.value(m), l.value(m))?, l.way)))
            .min_by(|a, b| a.0.total_cmp(&b.0));
        let _ = match better {
            Some((r, way)) => writeln!(
                t,
                "  {:<38}{:>8}  {} {}",
                m.name,
                times(Some(r)),
                if r > 1.0 { "ahead of" } else { "BEHIND" },
                way.name()
            ),
            None => writeln!(t, "  {:<38}       -", m.name),
        };
    }
    t
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(us: f64, bytes: u64, messages: u64) -> Figures {
        Figures {
            seconds: 2.0,
            median_us: Some(us),
            p99_us: Some(us),
            bytes,
            messages,
            client_busy_ns: 1_000_000_000,
            server_busy_ns: 3_000_000_000,
            rdma_packets: 0,
        }
    }

    fn line(way: Way, us: f64, bytes: u64, messages: u64) -> Line {
        let mut l = Line::new(way);
        for case in crate::lab::CASES {
            l.runs
                .push((crate::lab::word(case), figures(us, bytes, messages)));
        }
        l
    }

    #[test]
    fn values() {
        let l = line(Way::Tcp, 500.0, 40_000_000, 1000);
        let v: Vec<_> = METRICS.iter().map(|m| l.value(m)).collect();
        let wanted = [500.0, 500.0, 20.0, 500.0, 100.0, 4000.0];
        assert_eq!(v, wanted.map(Some));
    }

    #[test]
    fn says_where_it_is_behind() {
        let rs = line(Way::Rsockets, 1000.0, 20_000_000, 1000);
        let smc = line(Way::Smc, 2000.0, 40_000_000, 500);
        let ours = line(Way::Underpass, 500.0, 30_000_000, 1000);
        let t = verdict(&ours, Some(&rs), Some(&smc));
        let of = |name: &str| t.lines().find(|l| l.contains(name)).unwrap().to_string();
        assert!(of("median").contains("2.00x  ahead of rsockets"), "{t}");
        assert!(of("one way").contains("0.75x  BEHIND kernel SMC-R"), "{t}");
        assert!(of("messages/s").contains("1.00x  BEHIND rsockets"), "{t}");
    }

    #[test]
    fn no_figure_without_a_run() {
        let mut ours = Line::new(Way::Underpass);
        ours.not.push("not promoted: TCP".into());
        let t = text(&[line(Way::Tcp, 1.0, 1, 1), ours]);
        let l = t.lines().find(|l| l.starts_with("Underpass ")).unwrap();
        assert!(l.ends_with("  not promoted: TCP"), "{t}");
        assert!(t.contains("cannot be compared"), "{t}");
    }
}
