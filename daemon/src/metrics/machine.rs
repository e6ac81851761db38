//! What the kernel says: of this process, and of the ports of RDMA devices.

use super::text::{float, Metric, Value};
use crate::config::RailRules;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;
use underpass_admin::{proc, RailStats};
use underpass_rdma::devices::{PortCounters, Tree, NAMED};

/// Numbers of a process in `/proc/PID/stat`, from the field after the name: user and system time, threads, start.
const STAT: [usize; 4] = [11, 12, 17, 19];

fn number(of: &Path, field: usize) -> u64 {
    let n = proc::stat(of, field).and_then(|s| s.parse().ok());
    n.unwrap_or(0)
}

fn seconds(ticks: u64) -> f64 {
    float(ticks) / float(rustix::param::clock_ticks_per_second())
}

/// Under the names that Prometheus' own libraries give them.
pub(super) fn process() -> Vec<Metric> {
    let own = Path::new("/proc/self");
    let [user, system, threads, start] = STAT.map(|n| number(own, n));
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = |n| {
        let n = statm.split(' ').nth(n).and_then(|s| s.parse().ok());
        float(n.unwrap_or(0)) * float(rustix::param::page_size() as u64)
    };
    let files = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let gauge = |name, help, n| Metric::new(name, help).with(&[], Value::Gauge(n));
    vec![
        Metric::new("process_cpu_seconds", "Processor time of the daemon")
            .with(&[], Value::Seconds(seconds(user + system))),
        threads_cpu(),
        gauge(
            "process_resident_memory_bytes",
            "Memory of the daemon",
            pages(1),
        ),
        gauge(
            "process_virtual_memory_bytes",
            "Address space of the daemon",
            pages(0),
        ),
        gauge(
            "process_threads",
            "Threads of the daemon, helpers included",
            float(threads),
        ),
        gauge(
            "process_open_fds",
            "Descriptors of the daemon",
            float(files as u64),
        ),
        gauge(
            "process_max_fds",
            "Descriptors that the daemon may have",
            most.map_or(f64::INFINITY, float),
        ),
        gauge(
            "process_start_time_seconds",
            "When the daemon was started, in seconds since 1970",
            boot() + seconds(start),
        ),
    ]
}

/// When the machine was started, in seconds since 1970.
fn boot() -> f64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = stat.lines().find_map(|l| l.strip_prefix("btime "));
    line.and_then(|l| l.trim().parse().ok()).unwrap_or(0.0)
}

/// The threads that last: helpers come and go.
fn threads_cpu() -> Metric {
    let mut m = Metric::new(
        "underpass_thread_cpu_seconds",
        "Processor time of the daemon's threads: core decides, dataplane moves the bytes of lanes to other nodes",
    );
    let core = std::process::id();
    let all = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let mut times = BTreeMap::new();
    for id in all.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok()) {
        let at = Path::new("/proc/self/task").join(id.to_string());
        let name = match id == core {
            true => "core".to_owned(),
            false => fs::read_to_string(at.join("comm")).unwrap_or_default(),
        };
        let name = name.trim().trim_start_matches("underpass-").to_owned();
        if ["core", "dataplane", "nri", "metrics"].contains(&name.as_str()) {
            times.insert(name, seconds(number(&at, STAT[0]) + number(&at, STAT[1])));
        }
    }
    for (name, time) in times {
        m = m.with(&[("thread", &name)], Value::Seconds(time));
    }
    m
}

/// The ports of RDMA devices.
pub(super) struct Ports {
    /// A file of theirs may take long to read: not on a thread that others wait for.
    pub tree: Tree,
    /// Those that were active once since the daemon began.
    active: HashSet<(String, u8)>,
}

/// What a port in use shows as its state.
const ACTIVE: u32 = 4;

impl Ports {
    pub(super) fn new() -> Ports {
        Ports {
            tree: Tree::system(),
            active: HashSet::new(),
        }
    }

    /// The counters of all ports. `rails`: those that are, or were, rails.
    pub(super) fn metrics(&mut self, rails: &[RailStats], config: &RailRules) -> Vec<Metric> {
        let ports = self.tree.counters();
        let mut all = of_ports(&ports);
        all.push(self.used(&ports, rails, config));
        all
    }

    pub(super) fn used(
        &mut self,
        ports: &[PortCounters],
        rails: &[RailStats],
        config: &RailRules,
    ) -> Metric {
        let mut used = Metric::new(
            "underpass_port_used",
            "1: somebody uses this port, or means to: a rail, the configuration, or it was active once",
        );
        for p in ports {
            let name = (p.device.clone(), p.port);
            if p.state == Some(ACTIVE) {
                self.active.insert(name.clone());
            }
            let rail = |r: &RailStats| r.device == p.device && r.port == p.port;
            let is = match config.of(&p.device, p.port) {
                Some(c) => !c.off,
                None => self.active.contains(&name) || rails.iter().any(rail),
            };
            let value = Value::Gauge(float(is.into()));
            used = used.with(&at(p, &p.port.to_string()), value);
        }
        used
    }
}

pub(super) fn of_ports(ports: &[PortCounters]) -> Vec<Metric> {
    let mut all = Vec::new();
    type Take = fn(&PortCounters) -> Option<f64>;
    let gauges: [(&str, &str, Take); 3] = [
        (
            "state_id",
            "State of the port (1: down, 2: init, 3: armed, 4: active)",
            |p| p.state.map(f64::from),
        ),
        (
            "physical_state_id",
            "Physical state of the port (2: polling, 3: disabled, 5: up)",
            |p| p.physical_state.map(f64::from),
        ),
        ("rate_bytes_per_second", "Rate of the port's wire", |p| {
            p.rate
        }),
    ];
    for (name, help, take) in gauges {
        let mut m = Metric::new(&format!("node_infiniband_{name}"), help);
        for (p, n) in ports.iter().filter_map(|p| Some((p, take(p)?))) {
            m = m.with(&at(p, &p.port.to_string()), Value::Gauge(n));
        }
        all.push(m);
    }
    for (_, _, name, _, help) in NAMED {
        let mut m = Metric::new(&format!("node_infiniband_{name}"), help);
        for p in ports {
            if let Some((_, n)) = p.named.iter().find(|n| n.0 == *name) {
                m = m.with(&at(p, &p.port.to_string()), Value::Foreign(*n));
            }
        }
        all.push(m);
    }
    let mut own = Metric::new(
        "underpass_rdma_hw_counter",
        "Counters of the device's driver that have no other name",
    );
    for p in ports {
        for (file, n) in &p.own {
            let port = p.port.to_string();
            let [device, port] = at(p, &port);
            own = own.with(&[device, port, ("counter", file)], Value::Foreign(*n));
        }
    }
    all.push(own);
    all
}

fn at<'a>(p: &'a PortCounters, port: &'a str) -> [(&'static str, &'a str); 2] {
    [("device", &p.device), ("port", port)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RailConfig;

    #[test]
    fn of_this_process() {
        let of = |name: &str| {
            let m = process().into_iter().find(|m| m.name == name).unwrap();
            match m.series[0].1 {
                Value::Gauge(n) | Value::Seconds(n) => n,
                ref v => panic!("{v:?}"),
            }
        };
        assert!(of("process_resident_memory_bytes") > 1e6);
        assert!(of("process_threads") >= 2.0 && of("process_open_fds") >= 3.0);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let age = now.unwrap().as_secs_f64() - of("process_start_time_seconds");
        assert!((-2.0..3600.0).contains(&age), "{age}");
    }

    /// A port that nobody has plugged in is no trouble.
    #[test]
    fn ports_that_are_used() {
        let port = |device: &str, state| PortCounters {
            device: device.into(),
            port: 1,
            state: Some(state),
            physical_state: None,
            rate: None,
            named: Vec::new(),
            own: Vec::new(),
        };
        let configured = |device: &str, off| RailConfig {
            device: device.into(),
            port: None,
            fabric: None,
            off,
            encrypted: false,
        };
        let config = RailRules {
            ports: vec![configured("c", false), configured("d", true)],
            ..RailRules::default()
        };
        let rail = RailStats {
            device: "e".into(),
            port: 1,
            ..RailStats::default()
        };
        let mut all = Ports::new();
        let mut used = |ports: &[PortCounters]| -> Vec<bool> {
            let m = all.used(ports, std::slice::from_ref(&rail), &config);
            let is = |v: &Value| matches!(v, Value::Gauge(n) if *n == 1.0);
            m.series.iter().map(|s| is(&s.1)).collect()
        };
        let names = ["a", "b", "c", "d", "e"];
        let before = names.map(|n| port(n, if n == "a" { 1 } else { 4 }));
        let after = names.map(|n| port(n, 1));
        assert_eq!(used(&after), [false, false, true, false, true]);
        assert_eq!(used(&before), [false, true, true, false, true]);
        assert_eq!(used(&after), [false, true, true, false, true]);
    }

    #[test]
    fn of_ports_by_name() {
        let p = PortCounters {
            device: "mlx5_0".into(),
            port: 1,
            state: Some(4),
            physical_state: None,
            rate: Some(1e9),
            named: vec![("port_data_received_bytes", 8)],
            own: vec![("sent_pkts".into(), 7)],
        };
        let all = super::super::text::write(of_ports(&[p]), super::super::text::Form::Prometheus);
        let all = all.unwrap();
        let has = |line: &str| assert!(all.lines().any(|l| l == line), "{line}\n{all}");
        has("node_infiniband_port_data_received_bytes_total{device=\"mlx5_0\",port=\"1\"} 8");
        has("node_infiniband_state_id{device=\"mlx5_0\",port=\"1\"} 4.0");
        has(
            "underpass_rdma_hw_counter_total{device=\"mlx5_0\",port=\"1\",counter=\"sent_pkts\"} 7",
        );
        assert!(!all.contains("physical_state"));
    }
}
