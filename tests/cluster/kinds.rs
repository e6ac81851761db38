//! Kinds of pods: servers, a job of several pods, images with libraries of their own, or without any; each where its pods ask for
//! the shim and where they do not.

use crate::cluster::{Cluster, FIRST};
use crate::images::{self, FILE_BYTES, MUSL, PRELOADS, PYTHON, STATIC, WEB, WRAPS};
use crate::things::{are_on, service, Workload};
use crate::{await_mode, has_shim, remove, rows, REDIS_AT, SOON};
use anyhow::{ensure, Context, Result};
use serde_json::Value;
use sha2::{Digest, Sha256};
use underpass_tests::harness::until;
use underpass_tests::harness::web::hex;

/// A namespace that did not ask. (`shop` did.)
pub const PLAIN: &str = "plain";
/// Services of the web servers and of the jobs' heads, by namespace.
const WEB_AT: [(&str, &str); 2] = [("shop", "10.96.7.8"), (PLAIN, "10.96.7.9")];
const HEAD_AT: [(&str, &str); 2] = [("shop", "10.96.7.10"), (PLAIN, "10.96.7.11")];
const WORKERS: [&str; 2] = ["worker-a", "worker-b"];

/// As `tests/programs/job.py` has them.
mod job {
    pub const WORKERS: usize = 2;
    pub const OBJECTS: usize = 2;
    pub const SIZE: usize = 4 << 20;
    pub const ROUNDS: usize = 16;
}

/// Files that are downloaded one after the other to be timed.
const DOWNLOADS: usize = 30;

/// What one of them said: a rate, and of what.
struct Ratio {
    shim: f64,
    plain: f64,
}

impl Ratio {
    fn print(&self, of: &str, unit: &str) {
        let Ratio { shim, plain } = self;
        println!(
            "    {of}: {shim:.0} {unit} with the annotation, {plain:.0} without: {:.2}",
            shim / plain
        );
    }
}

/// Makes all of them, and waits until they run.
fn deploy_all(c: &Cluster, all: &[Workload]) -> Result<()> {
    let texts: Vec<String> = all.iter().map(Workload::text).collect();
    let items = texts.join(",");
    c.apply(&format!(
        r#"{{"apiVersion": "v1", "kind": "List", "items": [{items}]}}"#
    ))?;
    all.iter()
        .try_for_each(|w| c.rolled_out(w.namespace, w.name))
}

/// In each of these namespaces the service `name`, at its address, and these workloads.
fn deploy_in(
    c: &Cluster,
    (name, port): (&str, u16),
    places: [(&'static str, &'static str); 2],
    of: impl Fn(&'static str, &str) -> Vec<Workload>,
) -> Result<Vec<Workload>> {
    prepared(c)?;
    let mut all = Vec::new();
    for (namespace, at) in places {
        c.apply(&service(namespace, name, at, port))?;
        all.extend(of(namespace, at));
    }
    deploy_all(c, &all)?;
    Ok(all)
}

fn remove_all(c: &Cluster, all: &[Workload]) -> Result<()> {
    all.iter().try_for_each(|w| remove(c, w))
}

/// A pod that did not ask has nothing of it, in its files, variables and processes, and is in no row.
fn is_untouched(c: &Cluster, workload: &str) -> Result<()> {
    let look = "cat /proc/1/environ /proc/1/maps; ls /run";
    let said = c.exec(PLAIN, workload, &["sh", "-c", look])?;
    for word in ["LD_PRELOAD", "UNDERPASS_DIR", "libunderpass", "underpass\n"] {
        ensure!(!said.contains(word), "{workload} has {word}: {said}");
    }
    ensure!(said.contains("libc.so"), "{said}"); // (it was looked at)
    ensure!(rows(c, PLAIN, workload)?.is_empty(), "{workload} has rows");
    Ok(())
}

/// The images and the other namespace, once.
pub fn prepared(c: &Cluster) -> Result<()> {
    if c.kubectl(&["get", "namespace", PLAIN]).is_ok() {
        return Ok(());
    }
    let all = images::make(c.work.path())?;
    c.node(FIRST.name).import(&all)?;
    c.kubectl(&["create", "namespace", PLAIN]).map(drop)
}

/// nginx (and, for its rate alone, Redis), and who asks them. A connection that lasts asks at the service's address.
fn web_and_client(namespace: &'static str, at: &str) -> Vec<Workload> {
    let serve =
        "redis-server --bind 0.0.0.0 --protected-mode no --save '' --appendonly no --dir /tmp & \
                 exec /usr/sbin/nginx -p /tmp -e stderr -c /etc/nginx.conf";
    let fetch =
        format!("exec curl -s -o /dev/null --rate 20/s 'http://{at}:8080/small?[1-1000000]'");
    [("web", serve.into()), ("fetch", fetch)]
        .map(|(name, line)| Workload::new(name, line).of(WEB).within(namespace))
        .into()
}

pub fn web_servers(c: &mut Cluster) -> Result<()> {
    let all = deploy_in(c, ("web", 8080), WEB_AT, web_and_client)?;
    for w in ["web", "fetch"] {
        await_mode(c, "shop", w, "SMCD")?;
        is_untouched(c, w)?;
    }
    let web = c.address_of("shop", "web")?;
    same_file(c, "shop", &format!("http://{web}:8080/file"))?;
    over_ipv6(c)?;
    asks_a_plain_pod(c)?;
    let rates = |namespace| -> Result<[f64; 2]> {
        let at = c.address_of(namespace, "web")?;
        Ok([downloads(c, namespace, &at)?, benchmark(c, namespace, &at)?])
    };
    let ([a, b], [x, y]) = (rates("shop")?, rates(PLAIN)?);
    Ratio { shim: a, plain: x }.print("nginx, a file of 8 MiB", "MB/s");
    Ratio { shim: b, plain: y }.print("redis-benchmark, GET", "requests/s");
    remove_all(c, &all)
}

/// The client gets the file as it is.
fn same_file(c: &Cluster, namespace: &str, url: &str) -> Result<()> {
    let line = format!("curl -s '{url}' | sha256sum");
    let said = c.exec(namespace, "fetch", &["sh", "-c", &line])?;
    let hash = hex(&Sha256::digest(images::file()));
    ensure!(said.starts_with(&hash), "{url}: {said}");
    Ok(())
}

/// MB/s.
fn downloads(c: &Cluster, namespace: &str, at: &str) -> Result<f64> {
    let url = format!("http://{at}:8080/file?[1-{DOWNLOADS}]");
    let line = [
        "curl",
        "-s",
        "-o",
        "/dev/null",
        "-w",
        "%{size_download} %{time_total}\n",
        &url,
    ];
    let said = c.exec(namespace, "fetch", &line)?;
    let one = |l: &str| -> Option<(usize, f64)> {
        let (bytes, took) = l.split_once(' ')?;
        Some((bytes.parse().ok()?, took.parse().ok()?))
    };
    let all: Option<Vec<(usize, f64)>> = said.lines().map(one).collect();
    let all = all.with_context(|| said.clone())?;
    let whole = all.iter().filter(|d| d.0 == FILE_BYTES).count();
    ensure!(whole == DOWNLOADS, "{said}");
    let took: f64 = all.iter().map(|d| d.1).sum();
    #[allow(clippy::cast_precision_loss)]
    let bytes = (DOWNLOADS * FILE_BYTES) as f64;
    Ok(bytes / took / 1e6)
}

/// Requests per second.
fn benchmark(c: &Cluster, namespace: &str, at: &str) -> Result<f64> {
    let line = [
        "redis-benchmark",
        "-h",
        at,
        "-t",
        "get",
        "-n",
        "20000",
        "-c",
        "8",
        "--csv",
    ];
    let said = c.exec(namespace, "fetch", &line)?;
    let row = said.lines().find(|l| l.starts_with("\"GET\""));
    let rate = row.and_then(|r| r.split(',').nth(1)?.trim_matches('"').parse().ok());
    rate.with_context(|| said.clone())
}

/// Starts a client in the pod beside its own, on one connection that lasts, and says which rows of the pod are that one's.
fn beside(c: &Cluster, host: &str) -> Result<Vec<Value>> {
    let line = format!(
        "curl -s -o /dev/null --rate 20/s 'http://{host}:8080/small?[1-1000000]' >/dev/null 2>&1 &"
    );
    c.exec("shop", "fetch", &["sh", "-c", &line])?;
    let peer = format!("{host}:8080");
    let mut found = Vec::new();
    until("the other client's connection is shown", SOON, || {
        found = rows(c, "shop", "fetch").unwrap_or_default();
        found.retain(|r| r["peer"] == peer.as_str());
        // (`young`: not looked at yet.)
        !found.is_empty() && found.iter().all(|r| r["reason"]["name"] != "young")
    })?;
    Ok(found)
}

fn over_ipv6(c: &Cluster) -> Result<()> {
    let web = format!("[{}]", c.address6_of("shop", "web")?);
    beside(c, &web)?;
    let of = |workload: &str, end: &str| {
        let mut all = rows(c, "shop", workload).unwrap_or_default();
        let at = format!("{web}:8080");
        all.retain(|r| r[end] == at.as_str());
        all
    };
    until("both ends over IPv6 are on a lane", SOON, || {
        are_on(&of("fetch", "peer"), "SMCD") && are_on(&of("web", "local"), "SMCD")
    })?;
    same_file(c, "shop", &format!("http://{web}:8080/file"))
}

/// The end that asked stays on TCP and says why; the other one is left alone.
fn asks_a_plain_pod(c: &Cluster) -> Result<()> {
    let plain = c.address_of(PLAIN, "web")?;
    let found = beside(c, &plain)?;
    let right = |r: &Value| {
        let mode = r["mode"].as_str().unwrap_or_default();
        mode.starts_with("TCP") && r["peer_reason"]["name"] == "peer-no-shim"
    };
    ensure!(found.iter().all(right), "{found:?}");
    same_file(c, "shop", &format!("http://{plain}:8080/file"))?;
    is_untouched(c, "web")
}

/// A head and its workers, in the namespace's pods.
fn job_in(namespace: &'static str, at: &str) -> Vec<Workload> {
    let python = |name, line: String| {
        let line = format!("exec python3.11 -B /srv/job.py {line}");
        Workload::new(name, line).of(PYTHON).within(namespace)
    };
    let mut all = vec![python("head", "head 7001".into())];
    all.extend(WORKERS.map(|name| python(name, format!("worker {at} 7001"))));
    all
}

/// What the head is handed, hashed: each worker hands it the other one's objects.
fn hash_of_job() -> String {
    let object = |number: usize| -> Vec<u8> {
        let part = |i| Sha256::digest(format!("{number}:{i}"));
        (0..job::SIZE / 32).flat_map(part).collect()
    };
    let objects: Vec<Vec<u8>> = (0..job::WORKERS * job::OBJECTS).map(object).collect();
    let mut whole = Sha256::new();
    for _ in 0..job::ROUNDS {
        for n in (0..job::WORKERS).map(|w| (w + 1) % job::WORKERS) {
            let of = &objects[n * job::OBJECTS..(n + 1) * job::OBJECTS];
            of.iter().for_each(|o| whole.update(o));
        }
    }
    hex(&whole.finalize())
}

/// The head has written its result, which is right: MB/s.
fn result_of_job(c: &Cluster, namespace: &str, hash: &str) -> Result<f64> {
    let mut said = String::new();
    until("the job has a result", SOON, || {
        said = c
            .exec(namespace, "head", &["cat", "/tmp/result"])
            .unwrap_or_default();
        !said.is_empty()
    })?;
    let words: Vec<&str> = said.split_whitespace().collect();
    let [is, bytes, took] = words[..] else {
        anyhow::bail!("{said}");
    };
    let went = 2 * job::WORKERS * job::OBJECTS * job::SIZE * job::ROUNDS;
    ensure!(
        is == hash && bytes.parse() == Ok(went),
        "{said}, not {hash}"
    );
    Ok(bytes.parse::<f64>()? / took.parse::<f64>()? / 1e6)
}

pub fn a_job_of_several_pods(c: &mut Cluster) -> Result<()> {
    let all = deploy_in(c, ("head", 7001), HEAD_AT, job_in)?;
    let hash = hash_of_job();
    let shim = result_of_job(c, "shop", &hash)?;
    let plain = result_of_job(c, PLAIN, &hash)?;
    // Each worker has a connection with the head, one to the other worker, and one from it.
    let of = |name: &str| rows(c, "shop", name).unwrap_or_default();
    until("the job's connections are on lanes", SOON, || {
        are_on(&of("head"), "SMCD")
            && of("head").len() == job::WORKERS
            && WORKERS
                .iter()
                .all(|w| are_on(&of(w), "SMCD") && of(w).len() == 3)
    })?;
    // (An object that a connection begins with goes by TCP.)
    let mut sent = 0;
    for name in WORKERS {
        sent += of(name)
            .iter()
            .filter_map(|r| r["lane_tx_bytes"].as_u64())
            .sum::<u64>();
    }
    let went = (2 * job::WORKERS * job::OBJECTS * job::SIZE * job::ROUNDS) as u64;
    ensure!(sent >= went / 4 * 3, "{sent} of {went} bytes went by lanes");
    for name in ["head"].into_iter().chain(WORKERS) {
        is_untouched(c, name)?;
    }
    Ratio { shim, plain }.print("a job's objects, by way of two pods", "MB/s");
    remove_all(c, &all)
}

/// Images with libraries of their own: both are loaded, the image's first. An image whose only C library is musl, and one
/// without any.
pub fn images_of_other_kinds(c: &mut Cluster) -> Result<()> {
    prepared(c)?;
    let asks = |name, image, program: &str| {
        let mut w = Workload::new(name, "").of(image);
        w.program = [program, REDIS_AT, "6379"].map(String::from).into();
        w
    };
    let wraps = format!("exec redis-cli -h {REDIS_AT} -r 10000000 -i 0.01 incr wraps");
    let all = [
        Workload::new("wraps", wraps).of(PRELOADS),
        asks("musl", MUSL, "asks-musl"),
        asks("static", STATIC, "asks-static"),
    ];
    deploy_all(c, &all)?;
    for name in ["wraps", "musl"] {
        await_mode(c, "shop", name, "SMCD")?;
    }
    ensure!(has_shim(c, "shop", "wraps")?);
    both_are_loaded(c)?;
    let said = c.exec("shop", "musl", &["/run/underpass/smcss"])?;
    ensure!(said.lines().count() == 2 && said.contains("SMCD"), "{said}");
    without_libraries(c)?;
    remove_all(c, &all)
}

/// The image's library and the shim, in this order. (Who adds variables when a pod is made cannot know those of its image, and
/// replaces them.)
fn both_are_loaded(c: &Cluster) -> Result<()> {
    if c.by_volume {
        let said = c.exec("shop", "wraps", &["sh", "-c", "echo $LD_PRELOAD"])?;
        ensure!(said.trim() == "/run/underpass/libunderpass.so", "{said}");
        return Ok(());
    }
    let said = c.exec(
        "shop",
        "wraps",
        &["sh", "-c", "echo $LD_PRELOAD; cat /tmp/next"],
    )?;
    let mut lines = said.lines();
    let first = lines
        .next()
        .is_some_and(|l| l.starts_with(&format!("{WRAPS}:")));
    // (What the image's library calls is the shim's function, not the C library's.)
    ensure!(
        first && lines.all(|l| l.ends_with("/libunderpass.so")),
        "{said}"
    );
    Ok(())
}

/// A program without libraries works as if nothing were there. Who asks is told: the other end that nobody is at this one, and
/// about the process that it is linked statically.
fn without_libraries(c: &Cluster) -> Result<()> {
    let address = c.address_of("shop", "static")?;
    let mut last = Vec::new();
    let said = until(
        "the server's end says who is at the other one",
        SOON,
        || {
            last = rows(c, "shop", "redis").unwrap_or_default();
            let of = |p: &str| p.starts_with(&format!("{address}:"));
            last.retain(|r| r["peer"].as_str().is_some_and(of));
            are_on(&last, "TCP")
                && last
                    .iter()
                    .all(|r| r["peer_reason"]["name"] == "peer-no-shim")
        },
    );
    said.with_context(|| format!("{last:?}"))?;
    let container = c.container_of("static")?;
    let pid = c.node(FIRST.name).pid_of(&container)?.to_string();
    let said = c.underpass(&["check", "--pid", &pid]);
    let text = said.unwrap_or_else(|e| format!("{e:#}"));
    ensure!(text.contains("static"), "{text}");
    ensure!(c.restarts("shop", "static")? == 0, "it has ended");
    if c.by_volume {
        return Ok(()); // (`underpass pods` has what a runtime told.)
    }
    let said = c.underpass(&["pods", "-n", "shop"])?;
    let line = said.lines().position(|l| l.contains(" static-"));
    let below = line.and_then(|n| said.lines().nth(n + 1));
    ensure!(
        below.is_some_and(|l| l.contains("linked statically"))
            && said.matches("linked statically").count() == 1,
        "{said}"
    );
    Ok(())
}
