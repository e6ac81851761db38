//! Redis, iperf3, sockperf and PostgreSQL's pgbench, unmodified, the server on one node and the
//! client on the other, promoted by the usual rules.

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::streams::{CLIENT, SERVER};
use underpass_tests::lab::{quoted, Family, Lab, Running, PATIENCE};

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// A server on the first node, under the shim; returns when something listens on its port.
fn serve(lab: &Lab, c: &Cluster, port: u16, command: &str) -> Result<Running> {
    let node = lab.node(0);
    let server = node.sh(format!("exec {command}"))?;
    let server = server.envs(c.shim()[SERVER].clone()).spawn()?;
    server.until(&format!("{command} listens"), PATIENCE, || {
        let sockets = node.check(format!("ss -Hltn 'sport = :{port}'"));
        sockets.is_ok_and(|s| !s.is_empty())
    })?;
    Ok(server)
}

/// A client on the second node, under the shim.
fn client(lab: &Lab, c: &Cluster, command: String) -> Result<Running> {
    let job = lab.node(1).sh(command)?;
    job.envs(c.shim()[CLIENT].clone()).spawn()
}

pub fn redis_between_nodes(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let [v4, v6] = FAMILIES.map(|f| lab.node(0).address(0, f));
    let command = format!(
        "redis-server --port 6379 --bind {v4} {v6} --protected-mode no --appendonly no --save '' \
         --dir /run"
    );
    let _server = serve(lab, &c, 6379, &command)?;
    for host in [v4, v6] {
        let to = format!("-h {host} -p 6379");
        let before = c.carried()?;
        let endless = format!("exec redis-benchmark {to} -l -q -c 8 -t set,get -d 1000 -r 100");
        let load = client(lab, &c, endless)?;
        c.await_smcr(6379, 8)?;
        drop(load);
        let text = client(
            lab,
            &c,
            format!("exec redis-benchmark {to} --csv -n 4000 -c 8 -P 4 -t set,get -d 1000 -r 100"),
        )?;
        let text = text.wait()?.ok()?;
        for test in ["SET", "GET"] {
            let rate = text.lines().find_map(|l| {
                let mut fields = l.split(',').map(|f| f.trim_matches('"'));
                (fields.next()? == test).then(|| fields.next()?.parse::<f64>().ok())?
            });
            ensure!(rate.is_some_and(|r| r > 0.0), "{test}: {text}");
        }
        // Two tests of two thousand values on the way.
        c.has_carried(before, 2_000_000)?;
        // A value that takes many segments comes back as it was.
        let compare = format!(
            "head -c 300000 /dev/urandom | base64 -w0 >/run/value
             redis-cli {to} -x set k </run/value
             printf '%s' \"$(redis-cli {to} get k)\" | cmp - /run/value && echo same"
        );
        let said = client(lab, &c, compare)?.wait()?.ok()?;
        ensure!(said.trim().ends_with("same"), "{said}");
    }
    c.no_resets()
}

pub fn iperf3_between_nodes(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    for (family, extra, streams) in [
        (Family::V4, "", 1),
        (Family::V6, "-R -P 2", 2),
        (Family::V6, "--bidir", 2),
    ] {
        let host = lab.node(0).address(0, family);
        let before = c.carried()?;
        let server = serve(lab, &c, 5201, &format!("iperf3 -s -1 -p 5201 -B {host}"))?;
        let run = format!("exec iperf3 -c {host} -p 5201 -J -t 8 {extra}");
        let run = client(lab, &c, run)?;
        c.saw_smcr(5201, streams)?;
        let text = run.wait()?.ok()?;
        let v: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
        let bits = v["end"]["sum_received"]["bits_per_second"].as_f64();
        ensure!(bits.is_some_and(|b| b > 0.0), "{extra}: {text}");
        server.wait()?.ok()?;
        // Most of it, if the machine has a processor for it: a sender that goes down at once has a tenth.
        let bytes = v["end"]["sum_received"]["bytes"].as_u64();
        c.has_carried(before, bytes.context(text)? / 3)?;
    }
    c.no_resets()
}

/// Its release in Debian 12 knows no IPv6.
pub fn sockperf_between_nodes(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let host = lab.node(0).host();
    let server = format!("sockperf server --tcp -i {host} -p 11111");
    let _server = serve(lab, &c, 11_111, &server)?;
    for (what, limit, result) in [
        ("ping-pong", "max", "avg-latency="),
        ("throughput", "2000", "Message Rate is "),
    ] {
        let run = format!("exec sockperf {what} --tcp -i {host} -p 11111 -m 64 -t 4 --mps={limit}");
        let run = client(lab, &c, run)?;
        c.await_smcr_one_way(11_111, 1)?;
        let text = run.wait()?.ok()?;
        let number = text.split(result).nth(1).and_then(|r| {
            let digits = r.split([' ', '(']).next()?;
            digits.trim().parse::<f64>().ok()
        });
        ensure!(number.is_some_and(|n| n > 0.0), "{what}: {text}");
    }
    c.no_resets()
}

/// Where Debian has PostgreSQL's programs.
fn postgres(program: &str) -> Result<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .context("no PostgreSQL (`make lab` installs it)")?
        .filter_map(|e| Some(e.ok()?.path().join("bin").join(program)))
        .filter(|p| p.exists())
        .collect();
    all.sort();
    all.pop().with_context(|| format!("no {program}"))
}

/// An empty data directory, made on the host, where it takes a second and not a minute.
fn database(dir: &Path) -> Result<()> {
    let mut init = Command::new(postgres("initdb")?);
    init.args(["-D", "data", "-U", "postgres", "-A", "trust", "--no-sync"])
        .args(["--wal-segsize=1", "--locale=C"])
        .current_dir(dir);
    if nix::unistd::geteuid().is_root() {
        // It refuses to run as root.
        let user = nix::unistd::User::from_name("postgres")?.context("no user postgres")?;
        std::os::unix::fs::chown(dir, Some(user.uid.as_raw()), Some(user.gid.as_raw()))?;
        use std::os::unix::process::CommandExt;
        init.uid(user.uid.as_raw()).gid(user.gid.as_raw());
    }
    let done = init.output()?;
    if !done.status.success() {
        bail!("initdb: {}", String::from_utf8_lossy(&done.stderr));
    }
    Ok(())
}

pub fn pgbench_between_nodes(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let dir = tempfile::Builder::new().prefix("uppg-").tempdir()?;
    database(dir.path())?;
    let [v4, v6] = FAMILIES.map(|f| lab.node(0).address(0, f));
    let from = quoted(&dir.path().join("data").to_string_lossy());
    lab.node(0).check(format!(
        "cp -r {from} /run/postgres
         chown -R postgres: /run/postgres
         chmod 700 /run/postgres
         printf 'host all all %s trust\\n' 10.9.0.0/16 fd09::/16 >>/run/postgres/pg_hba.conf"
    ))?;
    let program = quoted(&postgres("postgres")?.to_string_lossy());
    let server = format!(
        "setpriv --reuid postgres --regid postgres --clear-groups {program} -D /run/postgres \
         -h {v4},{v6} -k '' -c fsync=off -c shared_buffers=16MB -c autovacuum=off"
    );
    let _server = serve(lab, &c, 5432, &server)?;
    // Answers of many sizes.
    let script = r"\set n random(1, 20000)
SELECT repeat('x', :n), sum(i) FROM generate_series(1, 10) i;
";
    let job = lab.node(1).sh("cat >/run/pgbench.sql")?;
    job.stdin(script.as_bytes()).check()?;
    let pgbench = quoted(&postgres("pgbench")?.to_string_lossy());
    for host in [v4, v6] {
        let before = c.carried()?;
        let run = format!(
            "exec {pgbench} -h {host} -U postgres -n -f /run/pgbench.sql -c 4 -j 2 -T 6 postgres"
        );
        let run = client(lab, &c, run)?;
        c.await_smcr(5432, 4)?;
        let text = run.wait()?.ok()?;
        let number = |mark: &str| -> Option<f64> {
            let rest = text.split(mark).nth(1)?;
            rest.split_whitespace().next()?.parse().ok()
        };
        let done = number("number of transactions actually processed: ");
        ensure!(done.is_some_and(|n| n > 0.0), "{text}");
        ensure!(
            number("number of failed transactions: ") == Some(0.0),
            "{text}"
        );
        c.has_carried(before, 100_000)?;
    }
    c.no_resets()
}
