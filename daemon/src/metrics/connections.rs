//! The connections that are there now: the rows of `underpass ss`, one for each end on this node, added up.

use super::pods::Label;
use super::text::{float, Metric, Value};
use crate::clients::view::Entry;
use lane::proto::reason::Reason;
use std::collections::BTreeMap;
use underpass_admin::Row;

/// As `ss` names them.
const MODES: [&str; 3] = ["SMCD", "SMCR", "TCP"];

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

/// Sums over the ends.
pub(super) struct Ends {
    /// By place in [`MODES`] and reason.
    sums: BTreeMap<(usize, &'static str), Sum>,
    pods: BTreeMap<Label, [u64; MODES.len()]>,
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
            _ => (2, reason(r.reason)),
        };
        let s = self.sums.entry((mode, why)).or_default();
        s.ends += 1;
        let bytes = [
            r.tcp_tx_bytes,
            r.tcp_rx_bytes,
            r.lane_tx_bytes,
            r.lane_rx_bytes,
        ];
        for (sum, n) in s.bytes.iter_mut().zip(bytes) {
            *sum = sum.saturating_add(n);
        }
        let (namespace, pod) = r.at.as_ref().map_or(("", ""), |w| (&w.namespace, &w.pod));
        if let Some(label) = place(namespace, pod) {
            self.pods.entry(label).or_default()[mode] += 1;
        }
    }

    pub(super) fn metrics(&self) -> Vec<Metric> {
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
        for ((namespace, pod), modes) in &self.pods {
            for (mode, n) in MODES.into_iter().zip(modes) {
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
        vec![ends, bytes, listening, of_pods]
    }
}
