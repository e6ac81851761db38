//! What a node pays for Underpass (`make cluster ARGS=measure`): figures are printed, and only that was asserted without which
//! they would mean nothing. CI does not run it: on a machine that does other things as well, they say little.

use crate::cluster::{Cluster, FIRST};
use crate::kinds::{self, PLAIN};
use crate::node::{files, Place, COMMAND};
use crate::things::Workload;
use crate::{prepare, ENABLED, REDIS_AT, SOON};
use anyhow::{ensure, Context, Result};
use serde_json::{json, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use underpass_tests::harness::program::Running;
use underpass_tests::harness::until;

/// Pods that are started with the annotation, and as many without.
const STARTS: usize = 20;
/// For how long a node that does nothing is watched.
const IDLE: Duration = Duration::from_secs(600);
/// Annotated pods, each with a connection on a lane, while the daemon's memory is looked at.
const MANY: [usize; 2] = [110, 500];
/// The longest that so many take to start.
const ALL_START: Duration = Duration::from_secs(1500);
/// What memory settles in.
const SETTLED: Duration = Duration::from_secs(20);

const AUDIT: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [ResponseStarted, ResponseComplete, Panic]
rules: [{level: Metadata}]
";

type Part = fn(&Cluster) -> Result<()>;

pub fn all() -> Result<()> {
    let mut c = Cluster::start()?;
    let done = measured(&mut c);
    done.map_err(|e| e.context(c.picture()))
}

fn measured(c: &mut Cluster) -> Result<()> {
    make_room(c)?;
    prepare(c, |c| c.install())?;
    kinds::prepared(c)?;
    let parts: [(&str, Part); 3] = [("starts", pod_starts), ("idle", idle), ("memory", memory)];
    let wanted = std::env::var("UNDERPASS_MEASURE").unwrap_or_default();
    let wanted = |part: &str| wanted.is_empty() || wanted.split(',').any(|w| w == part);
    let mut parts = parts.into_iter().filter(|(name, _)| wanted(name));
    parts.try_for_each(|(_, measure)| measure(c))
}

/// How many pods at most.
fn most() -> usize {
    let said = std::env::var("UNDERPASS_MEASURE_PODS").ok();
    said.and_then(|n| n.parse().ok()).unwrap_or(usize::MAX)
}

/// A kubelet that takes more pods than its default of 110, addresses for them, and an API server that notes who asks.
fn make_room(c: &mut Cluster) -> Result<()> {
    let at = Place {
        pods: "10.244.16.0/20",
        ..FIRST
    };
    for (path, mut text) in files(&at) {
        if path.ends_with("kubelet.yaml") {
            text += "maxPods: 520\nkubeAPIQPS: 50\nkubeAPIBurst: 100\neventRecordQPS: 50\n";
        }
        c.node(FIRST.name).machine.write(path, &text)?;
    }
    // (Both read their files when they start.)
    c.stop_kubelet(0);
    c.kill("containerd");
    c.start_containerd()?;
    c.start_kubelet(0)?;
    let policy = "/etc/kubernetes/audit.yaml";
    c.node(FIRST.name).machine.write(policy, AUDIT)?;
    c.kill("api server");
    c.start_server_with(&format!(
        "--audit-policy-file={policy} --audit-log-path=/var/lib/audit.log"
    ))
}

/// Times at which a watcher saw the pods of a namespace come and be ready.
struct Watch {
    running: Running,
}

impl Watch {
    fn start(c: &Cluster) -> Result<Watch> {
        let path = r#"{.type} {.object.metadata.name} {.object.status.conditions[?(@.type=="Ready")].status}{"\n"}"#;
        let line = format!(
            "kubectl get pods -n {PLAIN} --watch --output-watch-events -o 'jsonpath={path}' | \
             while read -r l; do echo \"$EPOCHREALTIME $l\"; done"
        );
        let shell = c.node(FIRST.name).machine.program("bash");
        let running = c.as_admin(shell.args(["-c", &line])).spawn()?;
        Ok(Watch { running })
    }

    /// When it first saw this of a pod.
    fn when(&self, says: impl Fn(&[&str]) -> bool) -> Option<f64> {
        let text = self.running.stdout();
        let mut lines = text.lines().map(|l| l.split(' ').collect::<Vec<_>>());
        let words = lines.find(|w| w.len() >= 3 && says(&w[1..]))?;
        words[0].parse().ok()
    }

    /// From a pod's creation to its being ready.
    fn took(&self, pod: &str) -> Result<f64> {
        let mut took = None;
        until("the pod is ready", SOON, || {
            let added = self.when(|w| w[0] == "ADDED" && w[1] == pod);
            let ready = self.when(|w| w[1] == pod && w.get(2) == Some(&"True"));
            took = added.zip(ready).map(|(a, b)| b - a);
            took.is_some()
        })
        .with_context(|| self.running.stdout() + &self.running.stderr())?;
        took.context("a time")
    }
}

/// The pod that a workload is made of, alone.
fn pod(w: &Workload, name: &str) -> Result<String> {
    let whole: Value = serde_json::from_str(&w.text())?;
    let of = &whole["spec"]["template"];
    Ok(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": w.namespace, "annotations": of["metadata"]["annotations"],
        },
        "spec": of["spec"],
    })
    .to_string())
}

/// The value that is not less than this part of all.
fn quantile(all: &mut [f64], part: usize) -> f64 {
    all.sort_by(f64::total_cmp);
    all[(all.len() * part / 100).min(all.len() - 1)]
}

fn pod_starts(c: &Cluster) -> Result<()> {
    let watch = Watch::start(c)?;
    let plain = Workload::new("plain", "exec sleep 1000000").within(PLAIN);
    let asks = Workload::new("asks", "exec sleep 1000000").within(PLAIN);
    let asks = asks.annotated(ENABLED, "true");
    let mut took = [Vec::new(), Vec::new()];
    let before = Scrape::make(c)?;
    for n in 0..STARTS {
        // (Either is the first of a pair as often as the other.)
        for i in [n % 2, 1 - n % 2] {
            let name = format!("{}-{n}", ["plain", "asks"][i]);
            c.apply(&pod([&plain, &asks][i], &name)?)?;
            took[i].push(watch.took(&name)?);
            let env = c.kubectl(&["exec", "-n", PLAIN, &name, "--", "env"])?;
            ensure!(env.contains("LD_PRELOAD") == (i == 1), "{name}: {env}");
            c.kubectl(&["delete", "pod", "-n", PLAIN, &name, "--now"])?;
        }
    }
    let after = Scrape::make(c)?;
    println!("\nfrom the creation of a pod in the API to its being ready, s (each {STARTS} times, alternating):");
    for (name, all) in ["without the annotation", "with it"].iter().zip(&mut took) {
        let [low, half, high] = [25, 50, 75].map(|q| quantile(all, q));
        println!("    {name}: median {half:.2}, quartiles {low:.2} and {high:.2}");
    }
    before.print_answers(&after)
}

/// What the daemon's metrics say now.
pub fn metrics(c: &Cluster) -> Result<String> {
    let curl = c.node(FIRST.name).machine.program("curl");
    let curl = curl.args(["-sf", "http://127.0.0.1:7479/metrics"]);
    curl.check(COMMAND)
}

/// The same at one time.
struct Scrape(String);

impl Scrape {
    fn make(c: &Cluster) -> Result<Scrape> {
        Ok(Scrape(metrics(c)?))
    }

    fn value(&self, series: &str) -> Result<f64> {
        let mut all = self.0.lines().filter_map(|l| l.rsplit_once(' '));
        let of = all.find(|(name, _)| *name == series);
        let (_, value) = of.with_context(|| format!("no {series}"))?;
        Ok(value.parse()?)
    }

    /// How long the runtime has waited for the daemon between two times.
    fn print_answers(&self, later: &Scrape) -> Result<()> {
        let grown =
            |series: &str| Ok::<f64, anyhow::Error>(later.value(series)? - self.value(series)?);
        let name = "underpass_injection_seconds";
        let (n, sum) = (
            grown(&format!("{name}_count"))?,
            grown(&format!("{name}_sum"))?,
        );
        ensure!(n > 0.0, "the daemon was not asked");
        println!(
            "the daemon's answers about {n} containers: {:.0} µs on average",
            sum / n * 1e6
        );
        for le in [
            "0.0001", "0.00025", "0.0005", "0.001", "0.0025", "0.005", "0.01", "0.1",
        ] {
            let below = grown(&format!("{name}_bucket{{le=\"{le}\"}}"))?;
            println!("    within {le} s: {below}");
        }
        let cpu = grown("underpass_thread_cpu_seconds_total{thread=\"nri\"}")?;
        println!(
            "    processor time of its thread: {:.2} ms for each container",
            cpu / n * 1e3
        );
        Ok(())
    }
}

/// Requests of Underpass' accounts to the API, by what they are, since the beginning.
fn requests(c: &Cluster) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let log = c.node(FIRST.name).machine.path("/var/lib/audit.log");
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in std::fs::read_to_string(log)?.lines() {
        // (The last line may be written just now.)
        let Ok(e) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let user = text(&e["user"]["username"]);
        let Some(account) = user.strip_prefix("system:serviceaccount:underpass-system:") else {
            continue;
        };
        let what = format!(
            "{account}: {} {}",
            text(&e["verb"]),
            text(&e["objectRef"]["resource"])
        );
        all.entry(what).or_default().insert(text(&e["auditID"]));
    }
    Ok(all)
}

/// What the daemon and the signer ask the API while nothing happens.
fn idle(c: &Cluster) -> Result<()> {
    std::thread::sleep(SETTLED);
    let before = requests(c)?;
    ensure!(!before.is_empty(), "nobody has asked the API anything");
    std::thread::sleep(IDLE);
    let after = requests(c)?;
    println!(
        "requests to the API of a node on which nothing happens, in {} s:",
        IDLE.as_secs()
    );
    let mut sum = 0;
    for (what, all) in &after {
        let n = all.len() - before.get(what).map_or(0, BTreeSet::len);
        sum += n;
        println!("    {what}: {n}");
    }
    let hour = sum as u64 * 3600 / IDLE.as_secs();
    println!("    together {sum}: {hour} in an hour, if it goes on so");
    Ok(())
}

/// The daemon's memory: all, and what is no file's, in MiB.
fn resident(c: &Cluster) -> Result<[f64; 2]> {
    let id = c.daemon_container(FIRST.name)?;
    let pid = c.node(FIRST.name).pid_of(&id)?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| -> Result<f64> {
        let line = status.lines().find_map(|l| l.strip_prefix(name));
        let kib = line
            .and_then(|l| l.split_whitespace().next())
            .context("a field")?;
        Ok(kib.parse::<f64>()? / 1024.0)
    };
    Ok([field("VmRSS:")?, field("RssAnon:")?])
}

fn memory(c: &Cluster) -> Result<()> {
    c.kubectl(&["-n", "shop", "scale", "deployment/load", "--replicas=0"])?;
    let mut many = Workload::new("many", "").of(crate::images::MUSL);
    many.program = ["asks-musl", REDIS_AT, "6379", "1000"]
        .map(String::from)
        .into();
    println!("memory of the daemon, MiB:");
    report(c, 0)?;
    let text: Value = serde_json::from_str(&many.text())?;
    for n in MANY.into_iter().filter(|n| *n <= most()) {
        let mut text = text.clone();
        text["spec"]["replicas"] = json!(n);
        let began = Instant::now();
        c.apply(&text.to_string())?;
        let ready = "jsonpath={.status.readyReplicas}";
        let all = || {
            let said = c.kubectl(&["get", "deployment/many", "-n", "shop", "-o", ready]);
            said.is_ok_and(|s| s == n.to_string())
        };
        until("all pods are ready", ALL_START, all)?;
        println!("    ({n} pods after {} s)", began.elapsed().as_secs());
        report(c, n)?;
    }
    c.kubectl(&["-n", "shop", "scale", "deployment/many", "--replicas=0"])?;
    let gone = || {
        let left = c.kubectl(&["get", "pods", "-n", "shop", "-l", "app=many", "-o", "name"]);
        left.is_ok_and(|s| s.is_empty())
    };
    until("all pods are gone", ALL_START, gone)?;
    // (The API forgets pods before the runtime has ended all of them.)
    let ended = || {
        let processes = Scrape::make(c).and_then(|s| s.value("underpass_processes"));
        processes.is_ok_and(|n| n <= 1.0)
    };
    until("their programs have ended", ALL_START, ended)?;
    report(c, 0)
}

fn report(c: &Cluster, pods: usize) -> Result<()> {
    std::thread::sleep(SETTLED);
    let [all, own] = resident(c)?;
    let s = Scrape::make(c)?;
    let (lanes, processes) = (s.value("underpass_lanes")?, s.value("underpass_processes")?);
    let rings = s.value("underpass_ring_memory_bytes")? / f64::from(1 << 20);
    println!(
        "    {pods} pods with a connection each: {all:.1}, of this {own:.1} of its own; {processes} processes, {lanes} lanes, \
         {rings:.1} in the pods' rings"
    );
    print_modes(c)
}

/// How many of the connections' ends are in which mode, and why not on a lane.
fn print_modes(c: &Cluster) -> Result<()> {
    let said = c.underpass(&["ss", "-n", "shop", "-ej"])?;
    let rows: Vec<Value> = serde_json::from_str(&said).with_context(|| said.clone())?;
    let mut all: BTreeMap<String, usize> = BTreeMap::new();
    for r in &rows {
        let pod = r["at"]["pod"].as_str().unwrap_or("?");
        let workload = pod.split('-').next().unwrap_or(pod);
        let of = ["state", "mode", "reason", "peer_reason"].map(|f| r[f].to_string());
        *all.entry(format!("{workload}: {}", of.join(" ")))
            .or_default() += 1;
    }
    for (what, n) in &all {
        println!("        {n} of {what}");
    }
    Ok(())
}
