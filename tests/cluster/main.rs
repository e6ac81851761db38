//! Pods of a real Kubernetes cluster, asked for through its API only (`make cluster`). Needs root. The cluster is started
//! once; one test runs after the other.

mod chart;
mod cluster;
mod flow;
mod images;
mod keys;
mod kinds;
mod lab;
mod measure;
mod node;
mod nodes;
mod previous;
mod profile;
mod things;
mod ways;

use anyhow::{ensure, Context, Result};
use cluster::{Cluster, FIRST};
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::Value;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use things::{are_on, counts, rows_of, service, Workload, REDIS};
use underpass_tests::harness::{failed, until};

/// Longest wait for what should happen soon.
const SOON: Duration = Duration::from_secs(60);
/// How long the API is away for watches to be tried again only after some seconds.
const AWAY: Duration = Duration::from_secs(5);
/// The chart's namespace.
const SYSTEM: &str = "underpass-system";
const ENABLED: &str = "underpass.io/enabled";
/// The address that clients use: a service's.
const REDIS_AT: &str = "10.96.7.7";
/// Bytes that a test sends through Redis and back.
const BYTES: u64 = 8 << 20;

/// With one of these words as its argument the program runs what has a cluster of its own: the test in virtual machines, that of
/// the previous version, or what is measured. Otherwise all others.
const ALONE: [(&str, &str, Alone); 3] = [
    ("lab", "lab::pods_of_two_nodes", || {
        lab::pods_of_two_nodes(AGENT)
    }),
    ("previous", "previous::upgraded", previous::upgraded),
    ("measure", "measure::all", measure::all),
];
/// The lab's agent that cargo built for this test.
const AGENT: &str = env!("CARGO_BIN_EXE_lab-agent");

type Test = fn(&mut Cluster) -> Result<()>;
/// The same that makes its cluster itself.
type Alone = fn() -> Result<()>;

const TESTS: [(&str, Test); 34] = [
    ("the_users_way", the_users_way),
    ("chart::chart", chart::chart),
    ("chart::least_privilege", chart::least_privilege),
    ("whose_word_counts", whose_word_counts),
    ("who_does_not_get_it_is_told", who_does_not_get_it_is_told),
    ("the_nodes_own_network", the_nodes_own_network),
    ("kinds::web_servers", kinds::web_servers),
    ("kinds::a_job_of_several_pods", kinds::a_job_of_several_pods),
    ("kinds::images_of_other_kinds", kinds::images_of_other_kinds),
    ("the_daemon_is_deleted", the_daemon_is_deleted),
    (
        "runtime_and_kubelet_are_restarted",
        runtime_and_kubelet_are_restarted,
    ),
    ("daemon_and_api_are_away", daemon_and_api_are_away),
    ("a_new_word_counts_at_once", a_new_word_counts_at_once),
    ("a_node_comes", nodes::a_node_comes),
    ("the_api_is_away", nodes::the_api_is_away),
    (
        "nobody_else_gets_a_certificate",
        nodes::nobody_else_gets_a_certificate,
    ),
    ("the_ca_is_replaced", nodes::the_ca_is_replaced),
    ("a_certificate_ends", nodes::a_certificate_ends),
    ("a_node_goes", nodes::a_node_goes),
    ("namespaces_of_the_chart", ways::namespaces_of_the_chart),
    ("devices", ways::devices),
    ("without_nri", ways::without_nri),
    ("without_nri::the_users_way", the_users_way),
    ("without_nri::whose_word_counts", whose_word_counts),
    (
        "without_nri::who_asks_in_vain_is_warned",
        ways::who_asks_in_vain_is_warned,
    ),
    ("without_nri::the_nodes_own_network", the_nodes_own_network),
    ("without_nri::web_servers", kinds::web_servers),
    (
        "without_nri::a_job_of_several_pods",
        kinds::a_job_of_several_pods,
    ),
    (
        "without_nri::images_of_other_kinds",
        kinds::images_of_other_kinds,
    ),
    ("without_nri::the_daemon_is_deleted", the_daemon_is_deleted),
    (
        "without_nri::runtime_and_kubelet_are_restarted",
        runtime_and_kubelet_are_restarted,
    ),
    (
        "without_nri::daemon_and_api_are_away",
        daemon_and_api_are_away,
    ),
    (
        "without_nri::a_new_word_counts_at_once",
        a_new_word_counts_at_once,
    ),
    ("nothing_is_left", nothing_is_left),
];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads = Some(1);
    let word = args.filter.as_deref();
    if let Some((_, name, test)) = ALONE.into_iter().find(|a| word == Some(a.0)) {
        let test = move || test().map_err(|e| Failed::from(failed(e)));
        return libtest_mimic::run(&args, vec![Trial::test(name, test)]).exit_code();
    }
    let cluster = Arc::new(Mutex::new(None));
    let all = TESTS.map(|(name, test)| {
        let cluster = cluster.clone();
        Trial::test(name, move || {
            // (After a test that failed, the next one still has the cluster.)
            let mut cluster = cluster.lock().unwrap_or_else(|e| e.into_inner());
            run(&mut cluster, test).map_err(|e| Failed::from(failed(e)))
        })
    });
    let done = libtest_mimic::run(&args, all.into());
    drop(cluster.lock().unwrap_or_else(|e| e.into_inner()).take());
    done.exit_code()
}

fn run(cluster: &mut Option<Cluster>, test: Test) -> Result<()> {
    if cluster.is_none() {
        let c = cluster.insert(Cluster::start()?);
        prepare(c, |c| c.install()).with_context(|| c.picture())?;
        flow::start(c).with_context(|| c.picture())?;
    }
    let cluster = cluster.as_mut().context("the cluster")?;
    test(cluster).with_context(|| cluster.picture())
}

/// What the cluster's owner has before: policies, a shop with a server and a client, and the chart, installed in this way.
fn prepare(c: &mut Cluster, install: impl FnOnce(&Cluster) -> Result<()>) -> Result<()> {
    c.apply(things::POLICIES)?;
    for n in ["shop", "machines"] {
        c.kubectl(&["create", "namespace", n])?;
    }
    c.apply(&service("shop", "redis", REDIS_AT, 6379))?;
    c.apply(&Workload::new("redis", REDIS).text())?;
    c.apply(&Workload::new("load", counts(REDIS_AT)).text())?;
    for w in ["redis", "load"] {
        c.rolled_out("shop", w)?;
    }
    // Pods that run are left alone when Underpass comes.
    install(c)?;
    let env = c.exec("shop", "load", &["env"])?;
    ensure!(!env.contains("LD_PRELOAD"), "{env}");
    c.kubectl(&["annotate", "namespace", "shop", "underpass.io/enabled=true"])?;
    c.kubectl(&["-n", "shop", "rollout", "restart", "deployment"])?;
    for w in ["redis", "load"] {
        c.rolled_out("shop", w)?;
    }
    Ok(())
}

/// Rows of a workload's connections.
fn rows(c: &Cluster, namespace: &str, workload: &str) -> Result<Vec<Value>> {
    rows_of(&c.underpass(&["ss", "-n", namespace, "-ej"])?, workload)
}

/// Until every connection of the workload, of which there is one at least, is in this mode.
fn await_mode(c: &Cluster, namespace: &str, workload: &str, mode: &str) -> Result<()> {
    until(&format!("{workload} is on {mode}"), SOON, || {
        are_on(&rows(c, namespace, workload).unwrap_or_default(), mode)
    })
}

/// How far the client has counted, and how often it was started again (at first the server may not be there yet).
struct Count {
    n: u64,
    restarts: u32,
    /// The stream beside it.
    flow: Option<flow::Flow>,
}

/// How far a client of the shop's has counted. (There is no file before it begins, and nothing in it while it writes.)
fn number(c: &Cluster, workload: &str) -> Option<u64> {
    let said = c.exec("shop", workload, &["cat", "/tmp/counted"]);
    said.ok().and_then(|s| s.trim().parse().ok())
}

/// The same, once it can be read.
fn await_number(c: &Cluster, workload: &str) -> Result<u64> {
    let mut n = None;
    until("the client counts", SOON, || {
        n = number(c, workload);
        n.is_some()
    })?;
    n.context("a number")
}

fn counted(c: &Cluster) -> Result<Count> {
    Ok(Count {
        n: await_number(c, "load")?,
        restarts: c.restarts("shop", "load")?,
        flow: flow::count(c)?,
    })
}

/// The client still counts, in the process that was there before; and so does the stream go on, on a lane.
fn still_counts(c: &Cluster, before: &Count) -> Result<()> {
    until("the client counts on", SOON, || {
        number(c, "load").is_some_and(|n| n > before.n + 20)
    })?;
    let now = c.restarts("shop", "load")?;
    ensure!(now == before.restarts, "the client has ended");
    flow::goes_on(c, before.flow.as_ref())
}

/// The container's variables: has it the shim?
fn has_shim(c: &Cluster, namespace: &str, workload: &str) -> Result<bool> {
    let env = c.exec(namespace, workload, &["env"])?;
    Ok(env
        .lines()
        .any(|l| l.starts_with("LD_PRELOAD=") && l.ends_with("/libunderpass.so")))
}

/// Deploys it and waits until it runs.
fn deploy(c: &Cluster, w: &Workload) -> Result<()> {
    c.apply(&w.text())?;
    c.rolled_out(w.namespace, w.name)
}

fn remove(c: &Cluster, w: &Workload) -> Result<()> {
    let words = ["delete", "deployment", w.name, "-n", w.namespace];
    c.kubectl(&words).map(|_| ())
}

fn the_users_way(c: &mut Cluster) -> Result<()> {
    await_mode(c, "shop", "load", "SMCD")?;
    await_mode(c, "shop", "redis", "SMCD")?;
    // As a person sees it.
    let said = c.underpass(&["ss", "-n", "shop"])?;
    let row = said.lines().find(|l| l.contains("shop/load-"));
    ensure!(
        row.is_some_and(|r| r.contains("SMCD") && r.ends_with("/main")),
        "{said}"
    );
    let said = c.exec("shop", "load", &["/run/underpass/smcss"])?;
    let lines: Vec<&str> = said.lines().collect();
    ensure!(lines.len() == 2 && lines[1].contains("SMCD"), "{said}");
    // (Of a volume the kubelet asks, which does not tell of containers.)
    let said = c.underpass(&["pods", "-n", "shop"])?;
    ensure!(
        c.by_volume || said.lines().count() == 3 && !said.contains(" no "),
        "{said}"
    );
    let pods = c.kubectl(&["get", "pods", "-n", "shop", "-o", "json"])?;
    profile::all_are_restricted(&serde_json::from_str(&pods)?)?;
    let line = format!(
        "head -c {BYTES} /dev/urandom >/tmp/a && redis-cli -h {REDIS_AT} -x set k </tmp/a && \
         redis-cli -h {REDIS_AT} --raw get k | head -c {BYTES} >/tmp/b && sha256sum </tmp/a && sha256sum </tmp/b"
    );
    let said = c.exec("shop", "load", &["sh", "-c", &line])?;
    let lines: Vec<&str> = said.lines().collect();
    ensure!(lines.len() == 3 && lines[1] == lines[2], "{said}");
    still_counts(c, &counted(c)?)
}

/// The pod's word before the namespace's; init containers only by name.
fn whose_word_counts(c: &mut Cluster) -> Result<()> {
    let no = Workload::new("no", counts(REDIS_AT)).annotated(ENABLED, "false");
    deploy(c, &no)?;
    ensure!(!has_shim(c, "shop", "no")?, "it said no");
    remove(c, &no)?;
    let mut init = Workload::new("init", "cat /tmp/env; exec sleep 1000000");
    init.before = Some("env >/tmp/env");
    deploy(c, &init)?;
    let before = c.exec("shop", "init", &["cat", "/tmp/env"])?;
    ensure!(!before.contains("LD_PRELOAD"), "{before}");
    ensure!(has_shim(c, "shop", "init")?, "the others have it");
    remove(c, &init)?;
    let mut named = Workload::new("named", "exec sleep 1000000");
    named.before = Some("env >/tmp/env");
    let named = named.annotated("underpass.io/containers", "before");
    deploy(c, &named)?;
    let before = c.exec("shop", "named", &["cat", "/tmp/env"])?;
    ensure!(before.contains("LD_PRELOAD"), "{before}");
    ensure!(!has_shim(c, "shop", "named")?, "it is not named");
    remove(c, &named)
}

fn who_does_not_get_it_is_told(c: &mut Cluster) -> Result<()> {
    let mut taken = Workload::new("taken", "exec sleep 1000000");
    taken.volume = Some("/run/underpass");
    deploy(c, &taken)?;
    ensure!(!has_shim(c, "shop", "taken")?);
    let path = "{.items[*].message}";
    let told = || {
        let said = c.kubectl(&[
            "get",
            "events",
            "-n",
            "shop",
            "--field-selector",
            "reason=UnderpassNotInjected",
            "-o",
            &format!("jsonpath={path}"),
        ]);
        said.is_ok_and(|s| s.contains("container main") && s.contains("mounted at /run/underpass"))
    };
    until("an event", SOON, told)?;
    let said = c.underpass(&["pods", "-n", "shop"])?;
    ensure!(said.contains("mounted at /run/underpass"), "{said}");
    let refused = |all: &str| {
        let of = r#"underpass_containers{namespace="shop",pod="",shim="refused"} "#;
        let n = all.lines().find_map(|l| l.strip_prefix(of)?.parse().ok());
        n == Some(1.0)
    };
    until("the metrics count it", SOON, || {
        measure::metrics(c).is_ok_and(|all| refused(&all))
    })
    .with_context(|| measure::metrics(c).unwrap_or_default())?;
    remove(c, &taken)
}

fn the_nodes_own_network(c: &mut Cluster) -> Result<()> {
    let mut w = Workload::new("host", counts(REDIS_AT)).annotated(ENABLED, "true");
    w.namespace = "machines";
    w.host_network = true;
    deploy(c, &w)?;
    await_mode(c, "machines", "host", "SMCD")?;
    remove(c, &w)
}

/// Connections go on, and pods that come later get it from the next daemon.
fn the_daemon_is_deleted(c: &mut Cluster) -> Result<()> {
    await_mode(c, "shop", "load", "SMCD")?;
    let before = counted(c)?;
    let daemon = [
        "delete",
        "pod",
        "-n",
        SYSTEM,
        "-l",
        "app.kubernetes.io/component=node",
    ];
    c.kubectl(&daemon)?;
    c.rolled_out_daemons()?;
    still_counts(c, &before)?;
    await_mode(c, "shop", "load", "SMCD")?;
    let later = Workload::new("later", counts(REDIS_AT));
    deploy(c, &later)?;
    await_mode(c, "shop", "later", "SMCD")?;
    remove(c, &later)
}

/// What was learnt still counts: a container that is started again has the shim, from the plugin that the runtime has
/// started. (It was put there before the runtime was restarted.)
fn daemon_and_api_are_away(c: &mut Cluster) -> Result<()> {
    let line = format!("{} & sleep 1000000 & wait $!", counts(REDIS_AT));
    let mortal = Workload::new("mortal", line);
    deploy(c, &mortal)?;
    await_mode(c, "shop", "mortal", "SMCD")?;
    let before = counted(c)?;
    let container = c.container_of("mortal")?;
    c.kill("api server");
    c.kill_daemon(FIRST.name)?;
    c.node(FIRST.name).stop_container(&container)?;
    let another = || c.container_of("mortal").is_ok_and(|now| now != container);
    until("the kubelet starts it again", SOON, another)?;
    let env = c
        .node(FIRST.name)
        .exec_in_container(&c.container_of("mortal")?, &["env"])?;
    ensure!(env.contains("LD_PRELOAD"), "{env}");
    c.start_server()?;
    still_counts(c, &before)?;
    await_mode(c, "shop", "mortal", "SMCD")?;
    remove(c, &mortal)
}

/// The API server was away, so all watches are cut off; what the namespace says as soon as it is back counts for pods that are
/// made then.
fn a_new_word_counts_at_once(c: &mut Cluster) -> Result<()> {
    let done = ["false", "true"].into_iter().try_for_each(|word| {
        c.kill("api server");
        std::thread::sleep(AWAY);
        c.start_server()?;
        say(c, word)?;
        let late = Workload::new("late", "exec sleep 1000000");
        deploy(c, &late)?;
        let has = has_shim(c, "shop", "late")?;
        ensure!(has == (word == "true"), "{word}, and has it: {has}");
        remove(c, &late)
    });
    say(c, "true")?; // (whatever became of it: other tests come)
    done
}

/// What the shop's namespace says.
fn say(c: &Cluster, word: &str) -> Result<()> {
    let word = format!("{ENABLED}={word}");
    let words = ["annotate", "--overwrite", "namespace", "shop", &word];
    c.kubectl(&words).map(drop)
}

fn runtime_and_kubelet_are_restarted(c: &mut Cluster) -> Result<()> {
    let before = counted(c)?;
    for name in ["containerd", "kubelet"] {
        c.kill(name);
    }
    c.start_containerd()?;
    c.start_kubelet(0)?;
    still_counts(c, &before)?;
    await_mode(c, "shop", "load", "SMCD")?;
    let later = Workload::new("later", counts(REDIS_AT));
    deploy(c, &later)?;
    await_mode(c, "shop", "later", "SMCD")?;
    remove(c, &later)
}

fn nothing_is_left(c: &mut Cluster) -> Result<()> {
    flow::stop(c)?;
    c.kubectl(&["annotate", "namespace", "shop", "underpass.io/enabled-"])?;
    c.kubectl(&["-n", "shop", "rollout", "restart", "deployment"])?;
    for w in ["redis", "load"] {
        c.rolled_out("shop", w)?;
        ensure!(!has_shim(c, "shop", w)?, "{w} still has the shim");
        let there = c.exec("shop", w, &["ls", "/run"])?;
        ensure!(!there.contains("underpass"), "{there}");
    }
    // (The API forgets a pod that is given no time to end before its processes have ended.)
    until("the old pods' connections are gone", SOON, || {
        rows(c, "shop", "load").is_ok_and(|r| r.is_empty())
    })?;
    c.helm(&["uninstall", "underpass", "-n", SYSTEM])?;
    let left = "all,clusterrole,clusterrolebinding,configmap,networkpolicy,role,rolebinding,secret";
    until("nothing of the chart is left", SOON, || {
        let all = c.kubectl(&["get", left, "-A", "-o", "name"]);
        all.is_ok_and(|a| !a.contains("underpass"))
    })
}
