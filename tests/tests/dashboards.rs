//! Dashboards and alert rules (`deploy/grafana`, `deploy/prometheus`): a real Prometheus scrapes a live node, and every query
//! must return data.
//!
//! Two targets: the live node, with Redis and its load on lanes, a peer that is configured and not there, and a container
//! runtime that is not there either; and a file (`tests/data/rdma.prom`), for this machine has neither RDMA devices nor
//! containers. The daemon's own code makes that file of invented numbers, and a unit test of it sees to it that names,
//! labels and types are those that the daemon shows. The second target answers only after all queries have been made for
//! the first time: whatever has no data then must name one of [`FROM_FILE`].

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::time::Duration;
use underpass_tests::harness::peers::Echo;
use underpass_tests::harness::redis::{Load, Redis};
use underpass_tests::harness::web::http;
use underpass_tests::harness::{
    free_port, paths, until, Daemon, Place, Program, Running, PATIENCE,
};

const LIMIT: Duration = Duration::from_secs(60);

/// Series that only the file has.
const FROM_FILE: [&str; 6] = [
    "underpass_rail_",
    "underpass_peer_links",
    "underpass_port_used",
    "underpass_rdma_",
    "underpass_containers",
    "node_infiniband_",
];

/// Shows a file as metrics, when it is told to.
fn serve_file(open: Arc<AtomicBool>) -> Result<u16> {
    let text = std::fs::read_to_string(paths::root().join("tests/data/rdma.prom"))?;
    let l = TcpListener::bind("127.0.0.1:0")?;
    let port = l.local_addr()?.port();
    std::thread::spawn(move || {
        for s in l.incoming().flatten() {
            let _ = answer(s, open.load(Relaxed).then_some(&text));
        }
    });
    Ok(port)
}

fn answer(mut s: TcpStream, text: Option<&String>) -> std::io::Result<()> {
    s.set_read_timeout(Some(PATIENCE))?;
    let mut head = Vec::new();
    let mut part = [0; 1024];
    while !head.ends_with(b"\r\n\r\n") {
        match s.read(&mut part)? {
            0 => break,
            n => head.extend_from_slice(&part[..n]),
        }
    }
    match text {
        None => s.write_all(b"HTTP/1.0 503 later\r\n\r\n"),
        Some(t) => {
            let head = "HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n\r\n";
            s.write_all(head.as_bytes())?;
            s.write_all(t.as_bytes())
        }
    }
}

fn program(name: &str) -> Program {
    Program::new(
        paths::target().join("prometheus/usr/bin").join(name),
        &Place::bare(),
    )
}

struct Prometheus {
    port: u16,
    _running: Running,
    _dir: tempfile::TempDir,
}

impl Prometheus {
    /// Debian's, unpacked by `tools/install-deps.sh`, with the rules of `deploy`.
    fn start(targets: [u16; 2]) -> Result<Prometheus> {
        let dir = tempfile::tempdir()?;
        let port = free_port()?;
        let config = dir.path().join("prometheus.yml");
        let rules = paths::root().join("deploy/prometheus/underpass.rules.yml");
        let [live, file] = targets;
        std::fs::write(
            &config,
            format!(
                "global:\n  scrape_interval: 1s\n  evaluation_interval: 1s\nrule_files: ['{}']\nscrape_configs:\n\
                 - job_name: underpass\n  static_configs:\n  - targets: ['127.0.0.1:{live}', '127.0.0.1:{file}']\n",
                rules.display()
            ),
        )?;
        let mut running = program("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                dir.path().join("data").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .spawn()?;
        until("Prometheus is ready", PATIENCE, || {
            running.has_ended() || http(port, "GET", "/-/ready", "").is_ok()
        })
        .with_context(|| running.stderr())?;
        ensure!(!running.has_ended(), "{}", running.stderr());
        Ok(Prometheus {
            port,
            _running: running,
            _dir: dir,
        })
    }

    /// The series of an expression; an error if it is none.
    fn query(&self, expr: &str) -> Result<Vec<Value>> {
        let hex = |b: u8| format!("%{b:02X}");
        let body: String = expr.bytes().map(hex).collect();
        let said = http(self.port, "POST", "/api/v1/query", &format!("query={body}"))?;
        let said: Value = serde_json::from_str(&said)?;
        ensure!(said["status"] == "success", "{expr}: {said}");
        let all = said["data"]["result"].as_array().context("no result")?;
        Ok(all.clone())
    }

    fn await_data(&self, expr: &str) -> Result<()> {
        until(expr, PATIENCE, || {
            self.query(expr).is_ok_and(|r| !r.is_empty())
        })
    }

    /// Names and expressions of the alert rules.
    fn rules(&self) -> Result<Vec<(String, String, String)>> {
        let said: Value = serde_json::from_str(&http(self.port, "GET", "/api/v1/rules", "")?)?;
        let groups = said["data"]["groups"].as_array().context("no groups")?;
        let all = groups
            .iter()
            .flat_map(|g| g["rules"].as_array().into_iter().flatten());
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let rule = |r: &Value| {
            let runbook = text(&r["annotations"]["runbook_url"]);
            (text(&r["name"]), text(&r["query"]), runbook)
        };
        Ok(all.map(rule).collect())
    }
}

/// The expressions of all dashboards, as Grafana asks them with everything chosen; and those of the lists to choose from.
fn dashboards() -> Result<Vec<(String, String)>> {
    let mut all = Vec::new();
    for f in std::fs::read_dir(paths::root().join("deploy/grafana"))? {
        let path = f?.path();
        let d: Value = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
        let name = path
            .file_name()
            .context("name")?
            .to_string_lossy()
            .into_owned();
        let mut add = |title: &str, expr: &str| {
            let mut e = expr.replace("$__rate_interval", "30s");
            for v in ["job", "instance", "namespace", "pod", "device"] {
                e = e.replace(&format!("=~\"${v}\""), "=~\".*\"");
            }
            // (`$1` belongs to label_replace.)
            ensure!(
                !e.replace("\"$1\"", "").contains('$'),
                "{name}: unknown variable in {expr}"
            );
            all.push((format!("{name}: {title}"), e));
            Ok(())
        };
        for p in d["panels"].as_array().context("panels")? {
            let title = p["title"].as_str().context("title")?;
            for t in p["targets"].as_array().context("targets")? {
                add(title, t["expr"].as_str().context("expr")?)?;
            }
        }
        for v in d["templating"]["list"].as_array().context("variables")? {
            let Some(q) = v["query"]["query"].as_str() else {
                continue;
            };
            let inner = q
                .strip_prefix("label_values(")
                .and_then(|q| q.strip_suffix(')'));
            let (series, _) = inner
                .and_then(|q| q.rsplit_once(','))
                .context("label_values")?;
            add("variable", series)?;
        }
    }
    Ok(all)
}

/// What an alert compares: data must be there also where all is well. (That each fires is promtool's part.)
fn compared(expr: &str) -> Result<&str> {
    let mut at = None;
    for op in [" == ", " < ", " > "] {
        at = at.max(expr.rfind(op));
    }
    Ok(expr[..at.context("an alert without comparison")?].trim())
}

/// A live node: its daemon shows metrics, Redis and its clients are on lanes.
fn node(dir: &Path) -> Result<(Daemon, u16)> {
    for args in ["ca --name t --out .", "node a.example --ca . --out ."] {
        Program::new(paths::bin("underpass"), &Place::bare())
            .arg("certs")
            .words(args)
            .dir(dir)
            .check(LIMIT)?;
    }
    let (port, peers) = (free_port()?, free_port()?);
    let config = dir.join("underpassd.toml");
    let at = dir.display();
    std::fs::write(
        &config,
        format!(
            "[metrics]\nlisten = '127.0.0.1:{port}'\nper_pod = 'pod'\n\
             [node]\nname = 'a.example'\ncontrol = '127.0.0.1:{peers}'\naddresses = ['192.0.2.1']\n\
             [[peer]]\nname = 'b.example'\ncontrol = '127.0.0.1:1'\naddresses = ['192.0.2.2']\n\
             [tls]\nca = '{at}/ca.crt'\ncert = '{at}/a.example.crt'\nkey = '{at}/a.example.key'\n\
             [pods]\nnri = '{at}/nri.sock'\ndir = '{at}/pods'\n"
        ),
    )?;
    let config = config.to_str().context("path")?;
    Ok((Daemon::with(&["--no-bpf", "--config", config])?, port))
}

#[test]
fn every_query_returns_data() -> Result<()> {
    let tmp = tempfile::tempdir()?;
    let (d, live) = node(tmp.path())?;
    let open = Arc::new(AtomicBool::new(false));
    let file = serve_file(open.clone())?;
    let p = Prometheus::start([live, file])?;
    let redis = Redis::start(&d.place())?;
    // Scraped before, during and after the load.
    p.await_data("underpass_promotions_total == 0")?;
    let load = Load {
        test: "get",
        clients: 20,
        pipeline: 1,
        requests: 1_000_000,
        reconnect: false,
    };
    redis.benchmark(&d.place(), load)?;
    d.assert_promoted(40, 1_000_000)?;
    p.await_data("underpass_promotions_total >= 40")?;
    p.await_data("rate(underpass_lane_bytes_total[30s]) > 0")?;
    // Connections that are there while the queries are made.
    let stop = tmp.path().join("stop");
    let echo = Echo::serve("threads", "127.0.0.1", &d.place())?;
    let client = echo.client(&d.eager(), 3, 1, Some(&stop))?;
    let other = echo.client(&Place::bare(), 1, 1, Some(&stop))?;
    p.await_data("underpass_pod_connections{mode=\"SMCD\"} >= 6")?;
    p.await_data("underpass_connections{mode=\"TCP\"} > 0")?;
    let mut all = dashboards()?;
    let rules = p.rules()?;
    for (name, expr, _) in &rules {
        all.push((format!("rule {name}"), compared(expr)?.to_owned()));
    }
    let mut without = Vec::new();
    for (at, expr) in &all {
        if p.query(expr)?.is_empty() {
            let from_file = FROM_FILE.iter().any(|s| expr.contains(s));
            ensure!(from_file, "{at}: no data from a live node for {expr}");
            without.push((at, expr));
        }
    }
    println!(
        "{} queries, {} of them answered from the file",
        all.len(),
        without.len()
    );
    open.store(true, Relaxed);
    p.await_data("rate(underpass_rail_writes_total[30s])")?;
    for (at, expr) in without {
        ensure!(!p.query(expr)?.is_empty(), "{at}: no data for {expr}");
    }
    std::fs::write(&stop, b"")?;
    client.finish(LIMIT)?;
    other.finish(LIMIT)?;
    // What is wrong with the live node: nobody at the other end, and no container runtime.
    for name in ["UnderpassPeerDown", "UnderpassRuntimeLost"] {
        p.await_data(&format!("ALERTS{{alertname=\"{name}\"}}"))?;
    }
    Ok(())
}

/// The causes of switches, as real shims count them.
#[test]
fn causes_of_switches() -> Result<()> {
    let tmp = tempfile::tempdir()?;
    let (d, live) = node(tmp.path())?;
    let stop = tmp.path().join("stop");
    let echo = Echo::serve("threads", "127.0.0.1", &d.place())?;
    let client = echo.client(&d.eager(), 3, 1, Some(&stop))?;
    d.await_promoted(6)?;
    let shown = |cause: &str| -> Option<u64> {
        let all = http(live, "GET", "/metrics", "").ok()?;
        let series = format!("underpass_switches_to_tcp_total{{cause=\"{cause}\"}} ");
        let line = all.lines().find_map(|l| l.strip_prefix(&series))?;
        line.parse().ok()
    };
    ensure!(shown("operator") == Some(0));
    d.down(underpass_admin::Target::All)?;
    until("switches of an operator", PATIENCE, || {
        shown("operator") >= Some(3)
    })?;
    std::fs::write(&stop, b"")?;
    client.finish(LIMIT)?;
    let s = d.stats()?;
    until("as many as there were", PATIENCE, || {
        let all = ["peer", "operator", "left"].map(|c| shown(c).unwrap_or(0));
        all.iter().sum::<u64>() == s.downs
    })
}

#[test]
fn rules_are_valid_and_have_runbooks() -> Result<()> {
    let dir = paths::root().join("deploy/prometheus");
    let rules = dir.join("underpass.rules.yml");
    program("promtool")
        .args(["check", "rules"])
        .arg(&rules)
        .check(LIMIT)?;
    let test = dir.join("underpass.rules.test.yml");
    program("promtool")
        .args(["test", "rules"])
        .arg(test)
        .check(LIMIT)?;
    let p = Prometheus::start([1, 1])?;
    let page = std::fs::read_to_string(paths::root().join("docs/alerts.md"))?;
    let titles: Vec<&str> = page.lines().filter_map(|l| l.strip_prefix("## ")).collect();
    let all = p.rules()?;
    for (name, _, runbook) in &all {
        ensure!(
            titles.contains(&name.as_str()),
            "{name} has no section in docs/alerts.md"
        );
        let end = format!("docs/alerts.md#{}", name.to_lowercase());
        ensure!(runbook.ends_with(&end), "{name}: {runbook}");
    }
    ensure!(
        all.len() == titles.len(),
        "sections without a rule: {titles:?}"
    );
    Ok(())
}

/// Nothing that docs/metrics.md lists is missing, and nothing is shown that it does not list.
#[test]
fn the_page_lists_what_is_shown() -> Result<()> {
    let tmp = tempfile::tempdir()?;
    let (_d, live) = node(tmp.path())?;
    let shown = http(live, "GET", "/metrics", "")?;
    let file = std::fs::read_to_string(paths::root().join("tests/data/rdma.prom"))?;
    let page = std::fs::read_to_string(paths::root().join("docs/metrics.md"))?;
    let of = |text: &str| -> Vec<String> {
        let types = text.lines().filter_map(|l| l.strip_prefix("# TYPE "));
        let names = types.filter_map(|l| l.split(' ').next().map(str::to_owned));
        names.filter(|n| n.starts_with("underpass_")).collect()
    };
    let mut names = of(&shown);
    names.extend(of(&file));
    for n in &names {
        ensure!(
            page.contains(&format!("`{n}`")),
            "docs/metrics.md does not list {n}"
        );
    }
    for row in page.lines().filter(|l| l.starts_with("| `underpass_")) {
        let cell = row.split('|').nth(1).context("cell")?;
        for n in cell.split('`').filter(|n| n.starts_with("underpass_")) {
            // (These have no series before there is a connection.)
            let later = n.starts_with("underpass_connections") || n.starts_with("underpass_pod_");
            ensure!(later || names.iter().any(|m| m == n), "nothing shows {n}");
        }
    }
    Ok(())
}
