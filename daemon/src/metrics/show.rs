//! The series that a snapshot makes. docs/metrics.md lists them.

use super::gather::{Containers, Snapshot};
use super::pods::{Label, Pods};
use super::text::{float, Highest, Metric, Value};
use super::{machine, text};
use crate::clients::view::Entry;
use crate::config::MetricsConfig;
use crate::core::counters::{Counters, LIMITS_US};
use lane::num;
use lane::proto::reason::Reason;
use std::collections::BTreeMap;
use std::time::Instant;
use underpass_admin::{NodeState, PeerState, RailStats};

/// What has to be remembered from one time to the next.
pub(super) struct Show {
    pods: Pods,
    highest: Highest,
}

fn gauge(name: &str, help: &'static str, n: u64) -> Metric {
    Metric::new(name, help).with(&[], Value::Gauge(float(n)))
}

fn count(name: &str, help: &'static str, n: u64) -> Metric {
    Metric::new(name, help).with(&[], Value::Count(n))
}

/// A counter of two directions, or two of something else.
fn two(name: &str, help: &'static str, label: &'static str, values: [(&str, u64); 2]) -> Metric {
    let mut m = Metric::new(name, help);
    for (is, n) in values {
        m = m.with(&[(label, is)], Value::Count(n));
    }
    m
}

/// Only names of reasons that there are: a shim may write any code.
fn reason(code: u32) -> &'static str {
    Reason::from_code(code).map_or("unknown", |r| r.info().name)
}

fn by_reason(name: &str, help: &'static str, all: &BTreeMap<u32, u64>) -> Metric {
    let mut m = Metric::new(name, help);
    for (code, n) in all {
        m = m.with(&[("reason", reason(*code))], Value::Count(*n));
    }
    m
}

impl Show {
    pub(super) fn new(config: &MetricsConfig) -> Show {
        Show {
            pods: Pods::new(config),
            highest: Highest::default(),
        }
    }

    pub(super) fn all(&mut self, s: &Snapshot) -> Vec<Metric> {
        let now = Instant::now();
        self.pods.add(&s.by_pod, now);
        let mut all = vec![Metric::new("underpass_build_info", "Version of the daemon")
            .with(&[("version", env!("CARGO_PKG_VERSION"))], Value::Gauge(1.0))];
        all.extend(node(s));
        all.extend(counted(&s.counters));
        all.extend(self.connections(&s.rows, now));
        all.extend(self.of_pods());
        if let Some(c) = &s.containers {
            all.extend(self.containers(c, now));
        }
        if let Some((node, peers)) = &s.nodes {
            all.extend(nodes(node, peers));
        }
        all.extend(rails(&s.rails));
        all.extend(machine::process());
        all.extend(machine::ports());
        self.highest.keep(&mut all);
        all
    }

    /// Connections now, as `underpass ss` has them: one for each end on this node.
    fn connections(&mut self, rows: &[Entry], now: Instant) -> Vec<Metric> {
        #[derive(Default)]
        struct Sum {
            ends: u64,
            /// Over TCP and on the lane, each sent and received.
            bytes: [u64; 4],
        }
        let mut sums: BTreeMap<(&str, &str), Sum> = BTreeMap::new();
        let mut pods: BTreeMap<(Label, &str), u64> = BTreeMap::new();
        let mut listening = 0;
        for e in rows {
            let r = &e.row;
            match r.state.as_str() {
                "ACTIVE" => {}
                "LISTEN" => {
                    listening += 1;
                    continue;
                }
                _ => continue,
            }
            let (mode, why) = match r.mode.as_str() {
                "SMCD" => ("SMCD", "none"),
                "SMCR" => ("SMCR", "none"),
                _ => ("TCP", reason(r.reason)),
            };
            let s = sums.entry((mode, why)).or_default();
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
            if let Some(label) = self.pods.place(namespace, pod, now) {
                *pods.entry((label, mode)).or_default() += 1;
            }
        }
        let mut ends = Metric::new(
            "underpass_connections",
            "Connection ends of programs with the shim, by mode, and on TCP by the reason",
        );
        let mut bytes = Metric::new(
            "underpass_connections_bytes",
            "What the connections that are there now have carried since they were made, over TCP and on their lanes",
        );
        for ((mode, why), s) in &sums {
            let at = [("mode", *mode), ("reason", *why)];
            ends = ends.with(&at, Value::Gauge(float(s.ends)));
            let over = [
                ("tcp", "sent"),
                ("tcp", "received"),
                ("lane", "sent"),
                ("lane", "received"),
            ];
            for ((over, direction), n) in over.into_iter().zip(s.bytes) {
                let at = [at[0], at[1], ("over", over), ("direction", direction)];
                bytes = bytes.with(&at, Value::Gauge(float(n)));
            }
        }
        let mut of_pods = Metric::new("underpass_pod_connections", "The same by pod and mode");
        for (((namespace, pod), mode), n) in &pods {
            let at = [
                ("namespace", namespace.as_str()),
                ("pod", pod),
                ("mode", mode),
            ];
            of_pods = of_pods.with(&at, Value::Gauge(float(*n)));
        }
        let listening = gauge(
            "underpass_listening_sockets",
            "Listening sockets of programs with the shim",
            listening,
        );
        vec![ends, bytes, listening, of_pods]
    }

    /// What the programs of pods have done.
    fn of_pods(&self) -> Vec<Metric> {
        let mut promoted = Metric::new(
            "underpass_pod_promotions",
            "Connection ends that reached a lane",
        );
        let mut bytes = Metric::new("underpass_pod_lane_bytes", "Bytes on lanes");
        let mut switches = Metric::new(
            "underpass_pod_switches",
            "Sending directions that went up to a lane or down to TCP",
        );
        let mut resets = Metric::new(
            "underpass_pod_resets",
            "Connections that the shim has reset",
        );
        for ((namespace, pod), t) in self.pods.sums() {
            let at = [("namespace", namespace.as_str()), ("pod", pod.as_str())];
            let to = |label, is| [at[0], at[1], (label, is)];
            promoted = promoted.with(&at, Value::Count(t.promoted));
            resets = resets.with(&at, Value::Count(t.resets));
            for (direction, n) in [("sent", t.lane_tx), ("received", t.lane_rx)] {
                bytes = bytes.with(&to("direction", direction), Value::Count(n));
            }
            for (is, n) in [("lane", t.ups), ("tcp", t.downs)] {
                switches = switches.with(&to("to", is), Value::Count(n));
            }
        }
        let shown = gauge(
            "underpass_pods_shown",
            "Pods (or namespaces) with series of their own; the others are in `other`",
            self.pods.len() as u64,
        );
        vec![promoted, bytes, switches, resets, shown]
    }

    fn containers(&mut self, c: &Containers, now: Instant) -> Vec<Metric> {
        let mut sums: BTreeMap<(Label, &str), u64> = BTreeMap::new();
        for r in &c.rows {
            let what = match (r.wanted, r.injected) {
                (_, true) => "injected",
                (true, false) => "refused",
                (false, false) => continue,
            };
            let label = self.pods.place(&r.at.namespace, &r.at.pod, now);
            *sums.entry((label.unwrap_or_default(), what)).or_default() += 1;
        }
        let mut containers = Metric::new(
            "underpass_containers",
            "Containers that are there now and have the shim, or asked for it and do not have it",
        );
        for (((namespace, pod), what), n) in &sums {
            let at = [
                ("namespace", namespace.as_str()),
                ("pod", pod),
                ("shim", what),
            ];
            containers = containers.with(&at, Value::Gauge(float(*n)));
        }
        vec![
            containers,
            two(
                "underpass_injections",
                "Containers that were given the shim when they were made, and those that had asked and were not",
                "result",
                [("injected", c.counts[0]), ("refused", c.counts[1])],
            ),
            gauge(
                "underpass_runtime_registered",
                "1: the container runtime asks the daemon about new containers",
                c.registered.into(),
            ),
        ]
    }
}

/// The node as a whole.
fn node(s: &Snapshot) -> Vec<Metric> {
    let t = &s.totals;
    vec![
        gauge(
            "underpass_proof_ready",
            "1: the BPF proof works, or the configuration does without it",
            s.ready.proof.into(),
        ),
        gauge(
            "underpass_processes",
            "Processes that are connected",
            s.processes as u64,
        ),
        gauge(
            "underpass_link_groups",
            "Pairs of processes with memory in common",
            s.link_groups as u64,
        ),
        gauge("underpass_lanes", "Connections that have a lane", s.lanes),
        gauge(
            "underpass_ring_memory_bytes",
            "Memory of link groups that somebody has written to",
            s.ring_bytes,
        ),
        count(
            "underpass_control_datagrams",
            "Datagrams between shims and daemon",
            s.datagrams,
        ),
        count(
            "underpass_promotions",
            "Connection ends that reached a lane",
            t.promoted,
        ),
        two(
            "underpass_switches",
            "Sending directions that went up to a lane or down to TCP",
            "to",
            [("lane", t.ups), ("tcp", t.downs)],
        ),
        two(
            "underpass_lane_bytes",
            "Bytes on lanes",
            "direction",
            [("sent", t.lane_tx), ("received", t.lane_rx)],
        ),
        count(
            "underpass_wakeups",
            "Doorbells rung for a sleeping peer",
            t.rings,
        ),
        count(
            "underpass_sleeps",
            "Sleeps from which a lane could wake",
            t.sleeps,
        ),
        count(
            "underpass_resets",
            "Connections that the shim has reset",
            t.resets,
        ),
    ]
}

/// What the core has counted.
fn counted(c: &Counters) -> Vec<Metric> {
    let limits = LIMITS_US.iter().map(|us| float(*us) / 1e6);
    let parts = limits
        .chain([f64::INFINITY])
        .zip(c.promotion.counts)
        .collect();
    let time = Value::Histogram(c.promotion.sum.as_secs_f64(), parts);
    vec![
        count("underpass_registrations", "Registrations of connection ends", c.registered),
        two(
            "underpass_pairings",
            "Connections whose ends were found to belong together, on this node, and ends here of those across nodes",
            "where",
            [("node", c.paired), ("peer", c.paired_across)],
        ),
        by_reason(
            "underpass_declines",
            "Times that an end was told to stay on TCP for now, or for good",
            &c.declined_for,
        ),
        count(
            "underpass_takeovers",
            "Directions within the node that the daemon has brought to TCP because their ends did not",
            c.taken_over,
        ),
        by_reason(
            "underpass_reset_reports",
            "Resets that shims have told the daemon of",
            &c.reset_for,
        ),
        count("underpass_fuses", "Programs that stay on TCP after a reset (fuse)", c.fuses),
        Metric::new(
            "underpass_promotion_seconds",
            "From the registration of an end to the offer of its lane: waits for the other end are in it",
        )
        .with(&[], time),
    ]
}

fn nodes(node: &NodeState, peers: &[PeerState]) -> Vec<Metric> {
    let mut up = Metric::new(
        "underpass_peer_up",
        "1: there is a channel to this node's daemon",
    );
    let mut expiry = Metric::new(
        "underpass_certificate_expiry_timestamp_seconds",
        "When a certificate ends, in seconds since 1970: this node's, and those that the others have shown",
    );
    let mut lies = Metric::new(
        "underpass_peer_lies",
        "Times that a node spoke for an address that is not its own",
    );
    let time = |t| Value::Gauge(float(num::natural(t)));
    if let Some(t) = node.expires {
        expiry = expiry.with(&[("node", &node.name), ("whose", "own")], time(t));
    }
    for p in peers {
        let at = [("node", p.name.as_str())];
        up = up.with(&at, Value::Gauge(float((p.state == "up").into())));
        lies = lies.with(&at, Value::Count(p.lies));
        if let Some(t) = p.expires {
            expiry = expiry.with(&[at[0], ("whose", "peer")], time(t));
        }
    }
    let trouble = gauge(
        "underpass_certificate_trouble",
        "1: this node's certificate files cannot be used",
        (!node.trouble.is_empty()).into(),
    );
    let waiting = gauge(
        "underpass_waiting_ends",
        "Ends that wait for one of another node",
        node.waiting,
    );
    vec![up, expiry, lies, trouble, waiting]
}

fn rails(all: &[RailStats]) -> Vec<Metric> {
    let new = Metric::new;
    let mut links = new("underpass_rail_links", "Links that work now, by peer node");
    let mut lanes = new("underpass_rail_lanes", "Lanes that use them");
    let mut bytes = new(
        "underpass_rail_sent_bytes",
        "Bytes of lanes that the other node has acknowledged",
    );
    let mut writes = new(
        "underpass_rail_writes",
        "RDMA writes that were acknowledged",
    );
    let mut messages = new(
        "underpass_rail_messages",
        "Messages between the nodes' engines",
    );
    let mut failed = new(
        "underpass_rail_link_failures",
        "Links that failed, those that never worked among them",
    );
    for r in all {
        let port = r.port.to_string();
        let at = [("device", r.device.as_str()), ("port", port.as_str())];
        bytes = bytes.with(&at, Value::Count(r.bytes));
        writes = writes.with(&at, Value::Count(r.writes));
        failed = failed.with(&at, Value::Count(r.links_failed));
        for (direction, n) in [("sent", r.messages_sent), ("received", r.messages_received)] {
            messages = messages.with(&[at[0], at[1], ("direction", direction)], Value::Count(n));
        }
        for l in &r.links {
            let at = [at[0], at[1], ("node", l.node.as_str())];
            links = links.with(&at, Value::Gauge(float(l.up)));
            lanes = lanes.with(&at, Value::Gauge(float(l.lanes)));
        }
    }
    vec![links, lanes, bytes, writes, messages, failed]
}

/// As text.
pub(super) fn write(all: Vec<Metric>, form: text::Form) -> Result<String, std::fmt::Error> {
    text::write(all, form)
}
