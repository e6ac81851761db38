//! The series that a snapshot makes. docs/metrics.md lists them.

use super::connections::{reason, Ends};
use super::gather::{Containers, Peer, Snapshot};
use super::machine::Ports;
use super::pods::{Label, Pods};
use super::text::{float, Highest, Metric, Value};
use super::{machine, text};
use crate::clients::family::Totals;
use crate::clients::limits::Limit;
use crate::config::MetricsConfig;
use crate::core::counters::{Counters, UNKNOWN};
use crate::histogram::{Histogram, LIMITS_US};
use crate::os::panics::Part;
use lane::family::Cause;
use lane::num;
use lane::proto::reason::{Reason, TABLE};
use std::collections::BTreeMap;
use std::time::Instant;
use underpass_admin::{NodeState, RailStats};
use underpass_rdma::engine::ROUND_TRIPS_US;

/// What has to be remembered from one time to the next.
pub(super) struct Show {
    pods: Pods,
    reasons_max: usize,
    highest: Highest,
    pub(super) ports: Ports,
}

const IMPLAUSIBLE: &str =
    "Times that a program's counters were not taken in, because they said what cannot be true";

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

/// All reasons, also those of which there is none yet: a series that begins with 1 has not visibly grown.
fn by_reason(name: &str, help: &'static str, all: &BTreeMap<u32, u64>) -> Metric {
    let known = TABLE.iter().filter(|i| i.reason != Reason::None);
    let known = known.map(|i| (i.reason.code(), i.name));
    let mut m = Metric::new(name, help);
    for (code, is) in known.chain([(UNKNOWN, reason(UNKNOWN))]) {
        let n = all.get(&code).copied().unwrap_or(0);
        m = m.with(&[("reason", is)], Value::Count(n));
    }
    m
}

impl Show {
    pub(super) fn new(config: &MetricsConfig) -> Show {
        Show {
            pods: Pods::new(config),
            reasons_max: config.reasons_max,
            highest: Highest::default(),
            ports: Ports::new(),
        }
    }

    pub(super) fn all(&mut self, s: &Snapshot) -> Vec<Metric> {
        let now = Instant::now();
        self.pods.add(&s.by_pod, now);
        let mut all = vec![Metric::new("underpass_build_info", "Version of the daemon")
            .with(&[("version", env!("CARGO_PKG_VERSION"))], Value::Gauge(1.0))];
        all.extend(node(s));
        all.extend(counted(&s.counters));
        all.push(refused(&s.refused));
        all.push(panics(&s.panics));
        let place = |namespace: &str, pod: &str| self.pods.place(namespace, pod, now);
        all.extend(Ends::count(&s.rows, place).metrics(self.reasons_max));
        all.extend(self.of_pods());
        if let Some(c) = &s.containers {
            all.extend(self.containers(c, now));
        }
        if let Some((node, peers)) = &s.nodes {
            all.extend(nodes(node, peers));
            let wanted = s.rail_rules.ports.iter().any(|r| !r.off);
            all.push(links(peers, &s.rails, wanted));
        }
        all.extend(rails(&s.rails));
        all.extend(machine::process());
        all.extend(self.ports.metrics(&s.rails, &s.rail_rules));
        self.highest.keep(&mut all);
        all
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
        let mut implausible = Metric::new("underpass_pod_implausible_reports", IMPLAUSIBLE);
        for ((namespace, pod), t) in self.pods.sums() {
            let at = [("namespace", namespace.as_str()), ("pod", pod.as_str())];
            let to = |label, is| [at[0], at[1], (label, is)];
            promoted = promoted.with(&at, Value::Count(t.promoted));
            resets = resets.with(&at, Value::Count(t.resets));
            implausible = implausible.with(&at, Value::Count(t.implausible));
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
        vec![promoted, bytes, switches, resets, implausible, shown]
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
            Metric::new(
                "underpass_injection_seconds",
                "How long the container runtime has waited for the daemon's word about a container that it was to make",
            )
            .with(&[], times(&c.answers)),
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
        switches_to_tcp(t),
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
        count(
            "underpass_deaths",
            "Connections that ended as after a reset because the process at the other end died with bytes unread",
            t.deaths,
        ),
        count("underpass_implausible_reports", IMPLAUSIBLE, t.implausible),
    ]
}

fn switches_to_tcp(t: &Totals) -> Metric {
    let mut m = Metric::new(
        "underpass_switches_to_tcp",
        "Sending directions that went down to TCP, by cause",
    );
    for ((_, cause), n) in Cause::ALL.into_iter().zip(t.downs_by) {
        m = m.with(&[("cause", cause)], Value::Count(n));
    }
    m
}

fn times(h: &Histogram) -> Value {
    let limits = LIMITS_US.iter().map(|us| float(*us) / 1e6);
    let parts = limits.chain([f64::INFINITY]).zip(h.counts).collect();
    Value::Histogram(h.sum.as_secs_f64(), parts)
}

/// What the core has counted.
fn counted(c: &Counters) -> Vec<Metric> {
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
        by_reason(
            "underpass_refused_programs",
            "Connections of programs to the daemon that it refused at their hello, or cut because they broke the rules",
            &c.refused_for,
        ),
        count("underpass_fuses", "Programs that stay on TCP after a reset (fuse)", c.fuses),
        Metric::new(
            "underpass_promotion_seconds",
            "From the registration of an end to the offer of its lane: waits for the other end are in it",
        )
        .with(&[], times(&c.promotion)),
    ]
}

fn refused(all: &[u64]) -> Metric {
    let m = Metric::new(
        "underpass_limit_refusals",
        "Times that a limit has refused something, by the limit",
    );
    labelled(m, "limit", Limit::ALL.map(|(_, name)| name), all)
}

fn panics(all: &[u64]) -> Metric {
    let m = Metric::new(
        "underpass_panics",
        "Defects of the daemon that have ended no more than one part of its work, by the part",
    );
    labelled(m, "part", Part::ALL.map(|(_, name)| name), all)
}

/// A count for each of these values of a label.
fn labelled<const N: usize>(
    m: Metric,
    label: &'static str,
    values: [&'static str; N],
    all: &[u64],
) -> Metric {
    let series = values.into_iter().zip(all);
    series.fold(m, |m, (value, n)| {
        m.with(&[(label, value)], Value::Count(*n))
    })
}

/// Links to the peers to which there should be some: both nodes are up, and one of them has rails, or had. (Without any rail
/// there is no series of one, which could be 0.)
fn links(peers: &[Peer], rails: &[RailStats], wanted: bool) -> Metric {
    let mut m = Metric::new(
        "underpass_peer_links",
        "Links that work now to a node whose daemon is there, if one of the two nodes has rails",
    );
    let wanted = |p: &&Peer| p.has_rails || wanted || !rails.is_empty();
    for p in peers
        .iter()
        .filter(|p| p.state.state == "up")
        .filter(wanted)
    {
        let name = p.state.name.as_str();
        let all = rails.iter().flat_map(|r| &r.links);
        let up = all.filter(|l| l.node == name).map(|l| l.up).sum();
        m = m.with(&[("node", name)], Value::Gauge(float(up)));
    }
    m
}

fn nodes(node: &NodeState, peers: &[Peer]) -> Vec<Metric> {
    let mut up = Metric::new(
        "underpass_peer_up",
        "1: there is a channel to this node's daemon",
    );
    let mut expiry = Metric::new(
        "underpass_certificate_expiry_timestamp_seconds",
        "When a certificate ends, in seconds since 1970: this node's, and those that the others have shown",
    );
    let mut life = Metric::new(
        "underpass_certificate_lifetime_seconds",
        "For how long it is valid from the beginning",
    );
    let mut false_claims = Metric::new(
        "underpass_peer_false_claims",
        "Times that a node spoke for an address that is not its own",
    );
    let time = |t| Value::Gauge(float(num::natural(t)));
    let own = [("node", node.name.as_str()), ("whose", "own")];
    if let (Some(t), Some(s)) = (node.expires, node.life_s) {
        expiry = expiry.with(&own, time(t));
        life = life.with(&own, time(s));
    }
    for p in peers.iter().map(|p| &p.state) {
        let at = [("node", p.name.as_str())];
        up = up.with(&at, Value::Gauge(float((p.state == "up").into())));
        false_claims = false_claims.with(&at, Value::Count(p.false_claims));
        if let (Some(t), Some(s)) = (p.expires, p.life_s) {
            let at = [at[0], ("whose", "peer")];
            expiry = expiry.with(&at, time(t));
            life = life.with(&at, time(s));
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
    vec![up, expiry, life, false_claims, trouble, waiting]
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
    let mut trips = new(
        "underpass_rail_round_trip_seconds",
        "How long the other node's daemon took to answer over a link on which nothing else was said for a second",
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
        trips = trips.with(&at, round_trips(r));
        for l in &r.links {
            let at = [at[0], at[1], ("node", l.node.as_str())];
            links = links.with(&at, Value::Gauge(float(l.up)));
            lanes = lanes.with(&at, Value::Gauge(float(l.lanes)));
        }
    }
    vec![links, lanes, bytes, writes, messages, failed, trips]
}

fn round_trips(r: &RailStats) -> Value {
    let limits = ROUND_TRIPS_US.iter().map(|us| float(*us) / 1e6);
    let limits = limits.chain([f64::INFINITY]);
    let counts = r.round_trips.iter().copied().chain(std::iter::repeat(0));
    Value::Histogram(float(r.round_trips_ns) / 1e9, limits.zip(counts).collect())
}

/// As text.
pub(super) fn write(all: Vec<Metric>, form: text::Form) -> Result<String, std::fmt::Error> {
    text::write(all, form)
}

#[cfg(test)]
mod tests {
    use super::super::gather::Containers;
    use super::*;
    use crate::config::RailRules;
    use underpass_admin::{PeerState, PodRow, RailLinks, Where};
    use underpass_rdma::devices::{PortCounters, NAMED};

    fn peer(name: &str, state: &str, has_rails: bool) -> Peer {
        let state = PeerState {
            name: name.into(),
            state: state.into(),
            ..PeerState::default()
        };
        Peer { state, has_rails }
    }

    /// What a node with two RDMA devices and a container shows besides: invented numbers, real names, labels and types.
    fn example() -> Vec<Metric> {
        let rail = |device: &str, n| RailStats {
            device: device.into(),
            port: 1,
            links: vec![RailLinks {
                node: "b.example".into(),
                up: 2,
                lanes: n,
            }],
            writes: 1000 * n,
            bytes: 1_000_000 * n,
            messages_sent: 100 * n,
            messages_received: 90 * n,
            links_failed: 1,
            round_trips: vec![0, 3 * n, 5 * n, n],
            round_trips_ns: 140_000 * n,
        };
        // The second one carries no lanes: it is shared with containers.
        let port = |device: &str, n: u64| PortCounters {
            device: device.into(),
            port: 1,
            state: Some(4),
            physical_state: Some(5),
            rate: Some(12.5e9),
            named: (1..).zip(NAMED).map(|(i, c)| (c.2, n * i)).collect(),
            own: vec![("sent_pkts".into(), n)],
        };
        let container = |name: &str, injected| PodRow {
            at: Where {
                namespace: "shop".into(),
                pod: "web-7d9f8b6c5d-x2x4z".into(),
                container: name.into(),
                ..Where::default()
            },
            wanted: true,
            injected,
            ..PodRow::default()
        };
        let containers = Containers {
            rows: vec![container("web", true), container("log", false)],
            counts: [1, 1],
            answers: Histogram::default(),
            registered: true,
        };
        let mut show = Show::new(&MetricsConfig {
            per_pod: crate::config::PerPod::Pod,
            ..MetricsConfig::default()
        });
        let (own, ports) = ([rail("mlx5_0", 3)], [port("mlx5_0", 7), port("mlx5_1", 9)]);
        let mut all = rails(&own);
        all.extend(machine::of_ports(&ports));
        all.push(show.ports.used(&ports, &own, &RailRules::default()));
        all.push(links(&[peer("b.example", "up", false)], &own, false));
        all.extend(show.containers(&containers, Instant::now()));
        all
    }

    /// There should be links where one of two nodes can have them, also if none of them has a rail now.
    #[test]
    fn links_that_should_be() {
        let all = [
            peer("able", "up", true),
            peer("other", "up", false),
            peer("gone", "down", true),
        ];
        let shown = |rails: &[RailStats], wanted| -> Vec<String> {
            let m = links(&all, rails, wanted).series;
            m.iter()
                .map(|(l, v)| {
                    assert!(matches!(v, Value::Gauge(n) if *n == 0.0));
                    l[0].1.clone()
                })
                .collect()
        };
        assert_eq!(shown(&[], false), ["able"]);
        assert_eq!(shown(&[], true), ["able", "other"]);
        assert_eq!(shown(&[RailStats::default()], false), ["able", "other"]);
    }

    /// The tests of dashboards and rules, which have neither devices nor a container runtime, show Prometheus this file.
    #[test]
    fn what_the_tests_of_dashboards_read() {
        let made = write(example(), text::Form::Prometheus).unwrap();
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/rdma.prom");
        if std::env::var_os("UNDERPASS_WRITE_DATA").is_some() {
            std::fs::write(file, &made).unwrap();
        }
        let kept = std::fs::read_to_string(file).unwrap();
        assert!(
            kept == made,
            "UNDERPASS_WRITE_DATA=1 writes {file} anew:\n{made}"
        );
    }
}
