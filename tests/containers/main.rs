//! Containers of a real runtime (containerd, asked as the kubelet asks it), with the daemon that gives them the shim
//! (`make containers`). Needs root. All tests run with containerd 1.7 and with 2.x. The runtime and the daemon are started once
//! for each; one test runs after the other.

mod cri;
mod node;

use anyhow::{ensure, Context, Result};
use libtest_mimic::{Arguments, Failed, Trial};
use node::{Node, Pod, Wish};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use underpass_admin::{PodRow, Row};
use underpass_tests::harness::containerd::Version;
use underpass_tests::harness::{failed, until};

/// Longest wait for what should happen soon.
const SOON: Duration = Duration::from_secs(10);
const YES: (&str, &str) = ("underpass.io/enabled", "true");
/// Annotations that mean nothing.
const ALIKE: [&str; 3] = ["a", "b", "c"];
/// What a container is started with, so that its connections are promoted at once.
const EAGER: (&str, &str) = ("UNDERPASS", "eager");
/// Bytes that a test sends through Redis and back.
const BYTES: u64 = 8 << 20;

type Test = fn(&mut Node) -> Result<()>;

const TESTS: [(&str, Test); 14] = [
    ("annotated_pods_have_lanes", annotated_pods_have_lanes),
    ("a_pod_that_did_not_ask", a_pod_that_did_not_ask),
    ("what_the_pod_preloads_stays", what_the_pod_preloads_stays),
    ("restricted_and_read_only", restricted_and_read_only),
    ("the_nodes_own_network", the_nodes_own_network),
    ("a_volume_at_run", a_volume_at_run),
    ("musl_and_static_programs", musl_and_static_programs),
    (
        "a_pod_sees_its_own_connections",
        a_pod_sees_its_own_connections,
    ),
    ("a_pod_measures", a_pod_measures),
    ("who_asks_and_does_not_get_it", who_asks_and_does_not_get_it),
    ("the_runtime_is_restarted", the_runtime_is_restarted),
    ("the_daemon_is_restarted", the_daemon_is_restarted),
    ("more_than_one_message_says", more_than_one_message_says),
    ("the_plugin_of_the_runtime", the_plugin_of_the_runtime),
];

/// The runtimes, in the order in which they are started.
const VERSIONS: [(&str, Version); 2] =
    [("containerd1", Version::One), ("containerd2", Version::Two)];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads = Some(1);
    let node = Arc::new(Mutex::new(None));
    let mut all = Vec::new();
    let mut add = |at: &str, version, (name, test): (&str, Test)| {
        let node = node.clone();
        all.push(Trial::test(format!("{at}::{name}"), move || {
            // (After a test that failed, the next one still has the node.)
            let mut node = node.lock().unwrap_or_else(|e| e.into_inner());
            run(&mut node, version, test).map_err(|e| Failed::from(failed(e)))
        }));
    };
    for (at, version) in VERSIONS {
        TESTS.iter().for_each(|t| add(at, version, *t));
        if version == Version::One {
            // (It leaves the other version behind, which nothing else is tested on.)
            add(
                at,
                version,
                ("the_runtime_is_upgraded", the_runtime_is_upgraded),
            );
        }
    }
    let done = libtest_mimic::run(&args, all);
    drop(node.lock().unwrap_or_else(|e| e.into_inner()).take());
    done.exit_code()
}

/// The node, and the version of containerd that it was started with.
type Started = Option<(Version, Node)>;

fn run(started: &mut Started, version: Version, test: Test) -> Result<()> {
    if started.as_ref().is_some_and(|(v, _)| *v != version) {
        drop(started.take()); // (before the next one: they have the same network)
    }
    if started.is_none() {
        *started = Some((version, Node::start(version)?));
    }
    let (_, node) = started.as_mut().context("the node")?;
    let done = test(node).with_context(|| node.picture());
    let removed = node.remove_all().with_context(|| node.picture());
    done.and(removed)
}

/// A Redis server that keeps nothing.
fn server(name: &'static str) -> Wish {
    let line =
        "redis-server --bind 0.0.0.0 --protected-mode no --save '' --appendonly no --dir /tmp";
    Wish {
        name,
        env: vec![EAGER],
        command: vec!["sh".into(), "-c".into(), format!("exec {line}")],
        ..Wish::default()
    }
}

/// Asks the server at `address` again and again, on one connection.
fn client(name: &'static str, address: &str) -> Wish {
    let line = format!("exec redis-cli -h {address} -r 1000000 -i 0.01 incr n");
    Wish {
        name,
        env: vec![EAGER],
        command: vec!["sh".into(), "-c".into(), line],
        ..Wish::default()
    }
}

fn asking(mut w: Wish) -> Wish {
    w.annotations.push(YES);
    w
}

/// Until the server answers its own container.
fn serves(node: &Node, pod: &Pod) -> Result<()> {
    let pings = || node.exec(&pod.container, &["redis-cli", "ping"]);
    let pong = || pings().is_ok_and(|s| s.stdout.starts_with(b"PONG"));
    until("redis serves", SOON, pong)
}

fn of_pod<'a>(rows: &'a [Row], pod: &'a str) -> impl Iterator<Item = &'a Row> {
    let is = move |r: &&Row| r.at.as_ref().is_some_and(|w| w.pod == pod) && r.state == "ACTIVE";
    rows.iter().filter(is)
}

/// Until every connection of the pod, of which there is one at least, is in this mode.
fn await_mode(node: &Node, pod: &str, mode: &str) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let is = until(&format!("{pod} is on {mode}"), SOON, || {
        rows = node.daemon.ss().unwrap_or_default();
        let mut all = of_pod(&rows, pod).peekable();
        all.peek().is_some() && all.all(|r| r.mode.starts_with(mode))
    });
    is.map(|()| rows)
}

fn only(rows: Vec<PodRow>) -> Result<PodRow> {
    ensure!(rows.len() == 1, "{rows:?}");
    rows.into_iter().next().context("a row")
}

/// Bytes go through the server, and come back as they were.
fn bytes_are_whole(node: &Node, container: &str, address: &str) -> Result<()> {
    let line = format!(
        "head -c {BYTES} /dev/urandom >/tmp/a && redis-cli -h {address} -x set k </tmp/a && \
         redis-cli -h {address} --raw get k | head -c {BYTES} >/tmp/b && cat /tmp/a | sha256sum && \
         cat /tmp/b | sha256sum"
    );
    let said = node.says(container, &["sh", "-c", &line])?;
    let lines: Vec<&str> = said.lines().collect();
    ensure!(lines.len() == 3 && lines[1] == lines[2], "{said}");
    Ok(())
}

fn annotated_pods_have_lanes(node: &mut Node) -> Result<()> {
    let before = node.daemon.stats()?;
    let redis = node.pod(&asking(server("redis-0")))?;
    serves(node, &redis)?;
    let load = node.pod(&asking(client("load-0", &redis.address)))?;
    let rows = await_mode(node, "load-0", "SMCD")?;
    let row = of_pod(&rows, "load-0").next().context("a row")?;
    let at = row.at.clone().unwrap_or_default();
    ensure!(
        (at.namespace.as_str(), at.container.as_str()) == ("shop", "main")
            && at.id == load.container,
        "{at:?}"
    );
    await_mode(node, "redis-0", "SMCD")?;
    bytes_are_whole(node, &load.container, &redis.address)?;
    let after = node.daemon.stats()?;
    // (A connection that lasts, and one of the two short ones at least: their first bytes go by TCP.)
    ensure!(after.promoted >= before.promoted + 4, "{after:?}");
    ensure!(
        after.lane_tx_bytes >= before.lane_tx_bytes + BYTES / 2,
        "{after:?}"
    );
    ensure!(after.resets == 0, "{after:?}");
    for pod in ["redis-0", "load-0"] {
        let row = only(node.rows(pod)?)?;
        ensure!(
            row.wanted && row.injected && row.smcd > 0 && row.tcp == 0,
            "{row:?}"
        );
    }
    // Nothing that steers the daemon, and nothing that can be written to.
    let files = node.says(&load.container, &["ls", "/run/underpass"])?;
    let expected = [
        "admin.sock",
        "control.sock",
        "libunderpass.so",
        "smcss",
        "underpass",
    ];
    ensure!(files.lines().collect::<Vec<_>>() == expected, "{files}");
    let touched = node.exec(&load.container, &["touch", "/run/underpass/x"])?;
    ensure!(touched.status != 0, "the directory can be written to");
    Ok(())
}

fn a_pod_that_did_not_ask(node: &mut Node) -> Result<()> {
    let redis = node.pod(&asking(server("redis-0")))?;
    serves(node, &redis)?;
    let plain = node.pod(&client("plain-0", &redis.address))?;
    let mut no = client("no-0", &redis.address);
    no.annotations = vec![
        ("underpass.io/enabled", "false"),
        ("network.alibabacloud.com/erdma-smcr", "true"),
    ];
    node.pod(&no)?;
    let env = node.says(&plain.container, &["env"])?;
    ensure!(
        !env.contains("LD_PRELOAD") && !env.contains("UNDERPASS_DIR"),
        "{env}"
    );
    let there = node.exec(&plain.container, &["ls", "/run/underpass"])?;
    ensure!(there.status != 0, "the directory is there");
    // Its connection works, and the server's end stays on TCP with a reason.
    let rows = await_mode(node, "redis-0", "TCP")?;
    ensure!(of_pod(&rows, "redis-0").all(|r| r.reason != 0), "{rows:?}");
    ensure!(of_pod(&rows, "plain-0").next().is_none(), "{rows:?}");
    for pod in ["plain-0", "no-0"] {
        let row = only(node.rows(pod)?)?;
        ensure!(
            !row.wanted && !row.injected && row.why_not.is_empty(),
            "{row:?}"
        );
    }
    // Other annotations that mean the same.
    let mut other = asking(client("other-0", &redis.address));
    other.annotations = vec![("network.alibabacloud.com/erdma-smcr", "true")];
    node.pod(&other)?;
    await_mode(node, "other-0", "SMCD")?;
    Ok(())
}

fn what_the_pod_preloads_stays(node: &mut Node) -> Result<()> {
    let mut w = asking(server("redis-0"));
    // (Any library will do.)
    let library = "/lib/x86_64-linux-gnu/libm.so.6";
    w.env.push(("LD_PRELOAD", library));
    let redis = node.pod(&w)?;
    serves(node, &redis)?;
    let env = node.says(&redis.container, &["env"])?;
    let merged = format!("LD_PRELOAD={library}:/run/underpass/libunderpass.so");
    ensure!(env.lines().any(|l| l == merged), "{env}");
    ensure!(
        env.lines().filter(|l| l.starts_with("LD_PRELOAD")).count() == 1,
        "{env}"
    );
    node.pod(&asking(client("load-0", &redis.address)))?;
    await_mode(node, "redis-0", "SMCD")?;
    Ok(())
}

fn restricted_and_read_only(node: &mut Node) -> Result<()> {
    let tmp = node.dir().join("logs");
    let restricted = |mut w: Wish| {
        w.restricted = true;
        w
    };
    std::fs::set_permissions(&tmp, std::os::unix::fs::PermissionsExt::from_mode(0o777))?;
    let mut w = asking(restricted(server("redis-0")));
    w.mounts.push(("/tmp", tmp));
    let redis = node.pod(&w)?;
    serves(node, &redis)?;
    let load = node.pod(&asking(restricted(client("load-0", &redis.address))))?;
    let touched = node.exec(&load.container, &["touch", "/x"])?;
    ensure!(
        touched.status != 0,
        "the root file system can be written to"
    );
    let rows = await_mode(node, "load-0", "SMCD")?;
    ensure!(of_pod(&rows, "load-0").all(|r| r.uid == 10_001), "{rows:?}");
    Ok(())
}

fn the_nodes_own_network(node: &mut Node) -> Result<()> {
    let redis = node.pod(&asking(server("redis-0")))?;
    serves(node, &redis)?;
    let mut w = asking(client("host-0", &redis.address));
    w.host_network = true;
    let host = node.pod(&w)?;
    await_mode(node, "host-0", "SMCD")?;
    // It is root in the node's network, and still sees only its own pod's connections.
    let said = node.says(&host.container, &["/run/underpass/smcss", "-j"])?;
    let rows: serde_json::Value = serde_json::from_str(&said)?;
    let rows = rows.as_array().context("rows")?;
    ensure!(rows.len() == 1 && rows[0]["mode"] == "SMCD", "{said}");
    Ok(())
}

/// Nothing can be made in it, or nothing below it is seen; and nothing is left in it.
fn a_volume_at_run(node: &mut Node) -> Result<()> {
    let redis = node.pod(&asking(server("redis-0")))?;
    serves(node, &redis)?;
    for (name, at) in [("one-0", "/run"), ("two-0", "/var/run")] {
        let volume = node.dir().join(name);
        std::fs::create_dir(&volume)?;
        let mut w = asking(client(name, &redis.address));
        w.mounts.push((at, volume.clone()));
        let pod = node.pod(&w)?;
        await_mode(node, name, "SMCD")?;
        let said = node.says(&pod.container, &["/.underpass/smcss"])?;
        ensure!(said.contains("SMCD"), "{said}");
        ensure!(
            std::fs::read_dir(&volume)?.next().is_none(),
            "left in {name}'s volume"
        );
    }
    Ok(())
}

fn musl_and_static_programs(node: &mut Node) -> Result<()> {
    let redis = node.pod(&asking(server("redis-0")))?;
    serves(node, &redis)?;
    let asks = |name, program: &str| Wish {
        command: vec![program.into(), redis.address.clone(), "6379".into()],
        ..asking(client(name, &redis.address))
    };
    node.pod(&asks("musl-0", "asks-musl"))?;
    await_mode(node, "musl-0", "SMCD")?;
    let rows = await_mode(node, "redis-0", "SMCD")?;
    ensure!(of_pod(&rows, "redis-0").count() == 1, "{rows:?}");
    // A program without libraries goes on as if nothing were there.
    let alone = node.pod(&asks("static-0", "asks-static"))?;
    until("both ask", SOON, || {
        let rows = node.daemon.ss().unwrap_or_default();
        let tcp = of_pod(&rows, "redis-0").filter(|r| r.mode.starts_with("TCP") && r.reason != 0);
        tcp.count() == 1 && of_pod(&rows, "redis-0").count() == 2
    })?;
    node.says(&alone.container, &["true"])?;
    Ok(())
}

fn a_pod_sees_its_own_connections(node: &mut Node) -> Result<()> {
    let redis = node.pod(&asking(server("redis-0")))?;
    serves(node, &redis)?;
    let one = node.pod(&asking(client("one-0", &redis.address)))?;
    node.pod(&asking(client("two-0", &redis.address)))?;
    await_mode(node, "one-0", "SMCD")?;
    await_mode(node, "two-0", "SMCD")?;
    let said = node.says(&one.container, &["/run/underpass/smcss"])?;
    let lines: Vec<&str> = said.lines().collect();
    ensure!(lines.len() == 2 && lines[0].starts_with("State"), "{said}");
    ensure!(
        lines[1].contains("SMCD") && lines[1].contains(&redis.address),
        "{said}"
    );
    // Two connections of the server's, with nothing about who is at the other ends.
    let said = node.says(&redis.container, &["/run/underpass/underpass", "ss", "-ej"])?;
    let rows: serde_json::Value = serde_json::from_str(&said)?;
    let rows = rows.as_array().context("rows")?;
    ensure!(rows.len() == 2, "{said}");
    ensure!(
        rows.iter()
            .all(|r| r["peer_pid"] == 0 && r["peer_comm"] == ""),
        "{said}"
    );
    for refused in ["down --all", "pods", "stats", "log", "peers"] {
        let words: Vec<&str> = refused.split(' ').collect();
        let all = [&["/run/underpass/underpass"], &words[..]].concat();
        let said = node.exec(&one.container, &all)?;
        let text = String::from_utf8_lossy(&said.stderr).into_owned();
        ensure!(
            said.status != 0 && text.contains("only connections"),
            "{refused}: {text}"
        );
    }
    Ok(())
}

/// From a pod with glibc and from one with musl, to one with glibc: the tool has no libraries, what it starts has the
/// pod's own.
fn a_pod_measures(node: &mut Node) -> Result<()> {
    let tool = "/run/underpass/underpass";
    let line = format!("exec {tool} check --serve 5300");
    let served = node.pod(&asking(Wish {
        name: "serve-0",
        command: vec!["sh".into(), "-c".into(), line],
        ..Wish::default()
    }))?;
    let redis = node.pod(&asking(server("redis-0")))?;
    serves(node, &redis)?;
    let musl = Wish {
        name: "musl-0",
        command: vec!["asks-musl".into(), redis.address.clone(), "6379".into()],
        ..Wish::default()
    };
    let mut restricted = asking(Wish {
        name: "glibc-0",
        command: vec!["sleep".into(), "1000".into()],
        ..Wish::default()
    });
    restricted.restricted = true;
    for wish in [asking(musl), restricted] {
        let name = wish.name;
        let pod = node.pod(&wish)?;
        let says = |line: &str| -> Result<serde_json::Value> {
            let line = format!("{tool} check -j {line}");
            let command: Vec<&str> = line.split(' ').collect();
            let text = node.says(&pod.container, &command);
            let text = text.with_context(|| format!("{name}: {line}"))?;
            Ok(serde_json::from_str(&text)?)
        };
        let v = says(&format!(
            "--measure {} 5300 --rounds 2 -t 0.1",
            served.address
        ))?;
        ensure!(
            v["reached"] == true && v["lane"]["mode"] == "SMCD",
            "{name}: {v:#}"
        );
        for way in ["tcp", "lane"] {
            let median = &v[way]["figures"]["round_trip_us"]["median"];
            ensure!(median.as_f64() > Some(0.0), "{name}: {v:#}");
        }
        // Without `--measure` it is the same program that connects.
        let v = says(&format!("-w 10 {} 6379", redis.address))?;
        ensure!(
            v["promotable"] == true && v["mode"] == "SMCD",
            "{name}: {v:#}"
        );
    }
    Ok(())
}

fn who_asks_and_does_not_get_it(node: &mut Node) -> Result<()> {
    let sleeper = |name| Wish {
        name,
        command: vec!["sleep".into(), "1000".into()],
        ..Wish::default()
    };
    let mut named = asking(sleeper("named-0"));
    named
        .annotations
        .push(("underpass.io/containers", "side, other"));
    let pod = node.pod(&named)?;
    node.container(&pod.id, &named, "side")?;
    let rows = node.rows("named-0")?;
    let told: Vec<_> = rows
        .iter()
        .map(|r| (r.at.container.as_str(), r.injected))
        .collect();
    ensure!(told == [("main", false), ("side", true)], "{rows:?}");
    ensure!(
        rows[0].why_not.contains("underpass.io/containers"),
        "{rows:?}"
    );

    let mut wrong = sleeper("wrong-0");
    wrong.annotations.push(("underpass.io/enabled", "on"));
    node.pod(&wrong)?;
    let row = only(node.rows("wrong-0")?)?;
    ensure!(
        row.wanted && !row.injected && row.why_not.contains("neither"),
        "{row:?}"
    );

    let mut taken = asking(sleeper("taken-0"));
    taken
        .mounts
        .push(("/run/underpass", node.dir().join("logs")));
    let pod = node.pod(&taken)?;
    let env = node.says(&pod.container, &["env"])?;
    ensure!(!env.contains("LD_PRELOAD"), "{env}");
    let row = only(node.rows("taken-0")?)?;
    ensure!(
        row.wanted && !row.injected && row.why_not.contains("mounted"),
        "{row:?}"
    );
    node.remove(&pod.id)?;
    ensure!(
        node.rows("taken-0")?.is_empty(),
        "a pod that is gone is shown"
    );
    Ok(())
}

fn the_runtime_is_restarted(node: &mut Node) -> Result<()> {
    while_pods_talk(node, Node::restart_containerd)
}

/// containerd 2.x takes over what 1.7 has left, with the configuration of 1.7.
fn the_runtime_is_upgraded(node: &mut Node) -> Result<()> {
    while_pods_talk(node, |node| node.upgrade_containerd(Version::Two))
}

/// Connections go on whatever `becomes` of the runtime, and new pods get the shim.
fn while_pods_talk(node: &mut Node, becomes: fn(&mut Node) -> Result<()>) -> Result<()> {
    let redis = node.pod(&asking(server("redis-0")))?;
    serves(node, &redis)?;
    let load = node.pod(&asking(client("load-0", &redis.address)))?;
    let before = await_mode(node, "load-0", "SMCD")?;
    becomes(node)?;
    let after = await_mode(node, "load-0", "SMCD")?;
    let which = |rows: &[Row]| of_pod(rows, "load-0").map(|r| r.inode).collect::<Vec<_>>();
    ensure!(which(&before) == which(&after), "{before:?}\n{after:?}");
    for pod in ["redis-0", "load-0"] {
        let row = only(node.rows(pod)?)?;
        ensure!(row.wanted && row.injected, "{row:?}");
    }
    bytes_are_whole(node, &load.container, &redis.address)?;
    node.pod(&asking(client("late-0", &redis.address)))?;
    await_mode(node, "late-0", "SMCD")?;
    Ok(())
}

fn the_daemon_is_restarted(node: &mut Node) -> Result<()> {
    let redis = node.pod(&asking(server("redis-0")))?;
    serves(node, &redis)?;
    node.pod(&asking(client("load-0", &redis.address)))?;
    await_mode(node, "load-0", "SMCD")?;
    node.daemon.kill();
    // A pod that starts meanwhile is not held up, and works without the shim.
    let late = node.pod(&asking(client("late-0", &redis.address)))?;
    let env = node.says(&late.container, &["env"])?;
    ensure!(!env.contains("LD_PRELOAD"), "{env}");
    node.daemon.restart()?;
    until("containerd asks the daemon", SOON, || {
        node.registrations() > 0
    })?;
    await_mode(node, "load-0", "SMCD")?;
    let row = only(node.rows("late-0")?)?;
    ensure!(
        row.wanted && !row.injected && row.why_not.contains("made anew"),
        "{row:?}"
    );
    node.remove(&late.id)?;
    node.pod(&asking(client("late-0", &redis.address)))?;
    await_mode(node, "late-0", "SMCD")?;
    Ok(())
}

/// More pods than fit into a message of the length that the protocol has: 2.x sends several, 1.7 a longer one.
fn more_than_one_message_says(node: &mut Node) -> Result<()> {
    // (In place of many pods.)
    let long: &str = "x".repeat(320 << 10).leak();
    const NAMES: [&str; 5] = ["much-0", "much-1", "much-2", "much-3", "much-4"];
    for name in NAMES {
        let mut w = asking(Wish {
            name,
            command: vec!["sleep".into(), "1000".into()],
            ..Wish::default()
        });
        w.annotations.extend(ALIKE.map(|a| (a, long)));
        node.pod(&w)?;
    }
    node.daemon.kill();
    node.daemon.restart()?;
    until("the daemon knows of every pod", SOON, || {
        let known = |name| node.rows(name).is_ok_and(|r| r.len() == 1 && r[0].injected);
        NAMES.into_iter().all(known)
    })
}

/// The runtime starts the plugin itself, and pods get the shim while there is no daemon.
fn the_plugin_of_the_runtime(node: &mut Node) -> Result<()> {
    let plugin = node.put_plugin()?;
    node.daemon.kill();
    node.replace_containerd()?;
    let redis = node.pod(&asking(server("redis-0")))?;
    serves(node, &redis)?;
    let env = node.says(&redis.container, &["env"])?;
    ensure!(env.contains("LD_PRELOAD=/run/underpass/"), "{env}");
    node.daemon.restart()?;
    until("the daemon knows of it", SOON, || {
        node.rows("redis-0")
            .is_ok_and(|r| r.len() == 1 && r[0].injected)
    })?;
    // Both are asked now.
    let load = node.pod(&asking(client("load-0", &redis.address)))?;
    await_mode(node, "load-0", "SMCD")?;
    bytes_are_whole(node, &load.container, &redis.address)?;
    std::fs::remove_file(plugin)?;
    Ok(())
}
