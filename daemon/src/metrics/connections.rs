//! The connections that are there now: the rows of `underpass ss`, one for each end on this node, added up.

use super::pods::Label;
use super::text::{float, Metric, Value};
use crate::clients::view::Entry;
use lane::proto::reason::Reason;
use std::collections::BTreeMap;
use underpass_admin::Row;

/// As `ss` names them.
const MODES: [&str; 3] = ["SMCD", "SMCR", "TCP"];
const TCP: usize = 2;

/// Over what, and in which direction, bytes are counted.
const WAYS: [(&str, &str); 4] = [
    ("tcp", "sent"),
    ("tcp", "received"),
    ("lane", "sent"),
    ("lane", "received"),
];

/// Only names of reasons that there are: a shim may write any code.
pub(super) fn reason(code: u32) -> &'static str {
    Reason::from_code(code).map_or("unknown", |r| r.info().name)
}

#[derive(Default)]
struct Sum {
    ends: u64,
    /// In the order of [`WAYS`].
    bytes: [u64; WAYS.len()],
}

/// Those of a pod.
#[derive(Default)]
struct OfPod {
    /// In the order of [`MODES`].
    modes: [u64; MODES.len()],
    /// On TCP, by reason: how many, and the bytes that they have sent and received there.
    reasons: BTreeMap<&'static str, (u64, [u64; 2])>,
}

impl OfPod {
    fn add(&mut self, mode: usize, why: &'static str, tcp: [u64; 2]) {
        self.modes[mode] += 1;
        if mode == TCP {
            let (ends, bytes) = self.reasons.entry(why).or_default();
            *ends += 1;
            add(bytes, tcp);
        }
    }

    /// The reasons that have series of their own, which most ends have, and the sum of all others.
    fn shown(&self, most: usize) -> Vec<(&'static str, u64, [u64; 2])> {
        let all = self.reasons.iter();
        let mut all: Vec<_> = all.map(|(why, (n, bytes))| (*why, *n, *bytes)).collect();
        if all.len() > most {
            // (Of the same number, in the order of their names: the sort is stable.)
            all.sort_by_key(|(_, n, _)| std::cmp::Reverse(*n));
            let mut other = ("other", 0, [0; 2]);
            for (_, n, bytes) in all.drain(most..) {
                other.1 += n;
                add(&mut other.2, bytes);
            }
            all.push(other);
        }
        all
    }
}

fn add<const N: usize>(sums: &mut [u64; N], more: [u64; N]) {
    for (sum, n) in sums.iter_mut().zip(more) {
        *sum = sum.saturating_add(n);
    }
}

/// Sums over the ends.
pub(super) struct Ends {
    /// By place in [`MODES`] and reason.
    sums: BTreeMap<(usize, &'static str), Sum>,
    pods: BTreeMap<Label, OfPod>,
    listening: u64,
}

impl Ends {
    /// `place`: the label under which a pod is shown, if it is.
    pub(super) fn count(
        rows: &[Entry],
        mut place: impl FnMut(&str, &str) -> Option<Label>,
    ) -> Ends {
        let mut all = Ends {
            // So that there is a share of them where there are none.
            sums: [0, 1].map(|m| ((m, "none"), Sum::default())).into(),
            pods: BTreeMap::new(),
            listening: 0,
        };
        for r in rows.iter().map(|e| &e.row) {
            match r.state.as_str() {
                "ACTIVE" => all.add(r, &mut place),
                "LISTEN" => all.listening += 1,
                _ => {}
            }
        }
        all
    }

    fn add(&mut self, r: &Row, place: &mut impl FnMut(&str, &str) -> Option<Label>) {
        let (mode, why) = match r.mode.as_str() {
            "SMCD" => (0, "none"),
            "SMCR" => (1, "none"),
            _ => (TCP, reason(r.reason)),
        };
        let s = self.sums.entry((mode, why)).or_default();
        s.ends += 1;
        let bytes = [
            r.tcp_tx_bytes,
            r.tcp_rx_bytes,
            r.lane_tx_bytes,
            r.lane_rx_bytes,
        ];
        add(&mut s.bytes, bytes);
        let (namespace, pod) = r.at.as_ref().map_or(("", ""), |w| (&w.namespace, &w.pod));
        if let Some(label) = place(namespace, pod) {
            let of = self.pods.entry(label).or_default();
            of.add(mode, why, [r.tcp_tx_bytes, r.tcp_rx_bytes]);
        }
    }

    /// `reasons_max`: most reasons of a pod that have series of their own; 0: there are none by pod and reason.
    pub(super) fn metrics(&self, reasons_max: usize) -> Vec<Metric> {
        let mut ends = Metric::new(
            "underpass_connections",
            "Connection ends of programs with the shim, by mode, and on TCP by the reason",
        );
        let mut bytes = Metric::new(
            "underpass_connections_bytes",
            "What the connections that are there now have carried since they were made, over TCP and on their lanes",
        );
        for ((mode, why), s) in &self.sums {
            let at = [("mode", MODES[*mode]), ("reason", *why)];
            ends = ends.with(&at, Value::Gauge(float(s.ends)));
            for ((over, direction), n) in WAYS.into_iter().zip(s.bytes) {
                let at = [at[0], at[1], ("over", over), ("direction", direction)];
                bytes = bytes.with(&at, Value::Gauge(float(n)));
            }
        }
        let mut of_pods = Metric::new("underpass_pod_connections", "The same by pod and mode");
        for ((namespace, pod), of) in &self.pods {
            for (mode, n) in MODES.into_iter().zip(&of.modes) {
                let at = [
                    ("namespace", namespace.as_str()),
                    ("pod", pod),
                    ("mode", mode),
                ];
                of_pods = of_pods.with(&at, Value::Gauge(float(*n)));
            }
        }
        let listening = Metric::new(
            "underpass_listening_sockets",
            "Listening sockets of programs with the shim",
        );
        let listening = listening.with(&[], Value::Gauge(float(self.listening)));
        let mut all = vec![ends, bytes, listening, of_pods];
        if reasons_max != 0 {
            all.extend(self.by_reason(reasons_max));
        }
        all
    }

    /// By pod and reason.
    fn by_reason(&self, most: usize) -> [Metric; 2] {
        let mut ends = Metric::new(
            "underpass_pod_tcp_connections",
            "Connection ends on TCP by pod and reason",
        );
        let mut bytes = Metric::new(
            "underpass_pod_tcp_connections_bytes",
            "What these have carried over TCP since they were made",
        );
        for ((namespace, pod), of) in &self.pods {
            for (why, n, carried) in of.shown(most) {
                let at = [
                    ("namespace", namespace.as_str()),
                    ("pod", pod),
                    ("reason", why),
                ];
                ends = ends.with(&at, Value::Gauge(float(n)));
                for (direction, n) in ["sent", "received"].into_iter().zip(carried) {
                    let at = [at[0], at[1], at[2], ("direction", direction)];
                    bytes = bytes.with(&at, Value::Gauge(float(n)));
                }
            }
        }
        [ends, bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use underpass_admin::Where;

    /// A pod whose program makes reasons up: as many series as there may be, and everything is in one of them.
    #[test]
    fn as_many_reasons_as_there_may_be() {
        let mut ends = Ends::count(&[], |_, _| None);
        let mut place = |n: &str, p: &str| Some((n.to_owned(), p.to_owned()));
        let mut row = |pod: &str, mode: &str, reason: u32| {
            let row = Row {
                at: Some(Where {
                    namespace: "shop".into(),
                    pod: pod.into(),
                    ..Where::default()
                }),
                mode: mode.into(),
                reason,
                tcp_tx_bytes: 10,
                tcp_rx_bytes: 1,
                ..Row::default()
            };
            ends.add(&row, &mut place);
        };
        let all = lane::proto::reason::TABLE.iter();
        let codes = all.filter(|i| i.reason != Reason::None);
        let codes: Vec<u32> = codes.map(|i| i.reason.code()).collect();
        for code in codes.iter().chain([&7_000_000, &8_000_000]) {
            row("liar", "TCP", *code);
        }
        for _ in 0..3 {
            row("liar", "TCP", codes[5]);
        }
        row("liar", "SMCD", codes[5]);
        row("web", "TCP", codes[1]);
        let of = |m: &Metric, pod: &str| -> Vec<(String, f64)> {
            let of = m.series.iter().filter(|(l, _)| l[1].1 == pod);
            of.map(|(l, v)| match v {
                Value::Gauge(n) => (l[2].1.clone(), *n),
                _ => panic!(),
            })
            .collect()
        };
        let [tcp, bytes] = ends.by_reason(3);
        let total = codes.len() as f64 + 5.0;
        let found = of(&tcp, "liar");
        assert_eq!(found.len(), 4, "{found:?}");
        assert_eq!(found[0], (reason(codes[5]).to_owned(), 4.0));
        // (Both codes that there are not.)
        assert_eq!(found[1], ("unknown".to_owned(), 2.0));
        assert_eq!(found[3], ("other".to_owned(), total - 4.0 - 2.0 - 1.0));
        assert_eq!(of(&tcp, "web"), [(reason(codes[1]).to_owned(), 1.0)]);
        let sum: f64 = of(&bytes, "liar").iter().map(|(_, n)| n).sum();
        assert_eq!(sum, total * 11.0);
        assert_eq!(ends.metrics(0).len() + 2, ends.metrics(1).len());
    }
}
