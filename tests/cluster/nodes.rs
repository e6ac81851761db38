//! Two nodes: they find each other through the API, trust each other by certificates of the chart's signer, and know whose
//! addresses are whose.

use crate::cluster::{Cluster, FIRST, SECOND};
use crate::things::{are_on, counts, rows_of, Workload};
use crate::{await_number, counted, deploy, remove, still_counts, Count, REDIS_AT, SOON, SYSTEM};
use anyhow::{ensure, Context, Result};
use base64::engine::general_purpose::STANDARD;
use base64::Engine as _;
use serde_json::Value;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use underpass_tests::harness::until;

/// The directory is looked at twice a second, certificates every second, and the signer looks after its CA when it starts.
const SOMETIME: Duration = Duration::from_secs(90);

/// For how long the API is away: longer than the nodes' leases (40 s).
const AWAY: Duration = Duration::from_secs(60);
/// For how long a certificate is valid that is to end: it is there before that.
const LIFE: Duration = Duration::from_secs(45);
/// Where a node has its certificate and key.
const TLS: &str = "/var/lib/underpass/tls";

/// The request of somebody who is no daemon.
const STRANGER: &str = "stranger";

/// What a node's daemon says of the others.
fn peers(c: &Cluster, node: &str) -> Result<Value> {
    let said = c.underpass(&["--node", node, "peers", "-j"])?;
    serde_json::from_str(&said).with_context(|| said)
}

/// When the certificate of a node's peer ends, if there is a channel.
fn trusted(c: &Cluster, node: &str, peer: &str) -> Result<i64> {
    let all = peers(c, node)?;
    let all = all["peers"].as_array().context("peers")?;
    let p = all.iter().find(|p| p["name"] == peer);
    let p = p.filter(|p| p["state"] == "up").context("no channel")?;
    p["expires"].as_i64().context("a certificate")
}

fn await_channel(c: &Cluster) -> Result<()> {
    let both = [(FIRST.name, SECOND.name), (SECOND.name, FIRST.name)];
    let up = || both.iter().all(|(a, b)| trusted(c, a, b).is_ok());
    until("the nodes have a channel", SOMETIME, up)
}

/// Rows of a workload's connections on a node.
fn rows(c: &Cluster, node: &str, workload: &str) -> Result<Vec<Value>> {
    let said = c.underpass(&["--node", node, "ss", "-n", "shop", "-ej"])?;
    rows_of(&said, workload)
}

/// Until both ends are found: the reason of both is then that there is no device.
fn await_paired(rows: impl Fn() -> Result<Vec<Value>>) -> Result<()> {
    let mut last = Value::Null;
    let paired = || {
        last = Value::from(rows().unwrap_or_default());
        let rows = last.as_array().map(Vec::as_slice).unwrap_or_default();
        let code = |r: &Value, of: &str| r[of]["name"] == "no-rdma-device";
        let both = |r: &Value| code(r, "reason") && code(r, "peer_reason");
        !rows.is_empty() && rows.iter().all(both)
    };
    until("the other end is found on the other node", SOON, paired)
        .with_context(|| last.to_string())
}

/// A second node comes. Its pods' connections to the first one's are paired by both daemons: the reason is that neither has
/// a device for lanes between nodes (tests in the lab have).
pub fn a_node_comes(c: &mut Cluster) -> Result<()> {
    c.add_node()?;
    c.rolled_out_daemons()?;
    await_channel(c)?;
    let mut remote = Workload::new("far", counts(REDIS_AT));
    remote.node = Some(SECOND.name);
    deploy(c, &remote)?;
    await_paired(|| rows(c, SECOND.name, "far"))?;
    // On one node they are on lanes.
    let mut local = Workload::new("near", crate::things::REDIS);
    local.node = Some(SECOND.name);
    deploy(c, &local)?;
    let at = c.address_of("shop", "near")?;
    let mut beside = Workload::new("beside", counts(&at));
    beside.node = Some(SECOND.name);
    deploy(c, &beside)?;
    await_mode_on(c, SECOND.name, "beside")?;
    for w in [&remote, &local, &beside] {
        remove(c, w)?;
    }
    Ok(())
}

/// Daemons that start while the API is away know each other, and whose addresses are whose.
pub fn the_api_is_away(c: &mut Cluster) -> Result<()> {
    let mut remote = Workload::new("far", counts(REDIS_AT));
    remote.node = Some(SECOND.name);
    deploy(c, &remote)?;
    await_paired(|| rows(c, SECOND.name, "far"))?;
    let before = counted(c)?;
    let all = [FIRST.name, SECOND.name];
    let kept = |node: &str| -> Result<Value> {
        let file = c.node(node).machine.path("/var/lib/underpass/nodes.json");
        Ok(serde_json::from_str(&std::fs::read_to_string(file)?)?)
    };
    let other = |node: &str| all.into_iter().find(|n| *n != node).unwrap_or_default();
    until("both keep what they know", SOMETIME, || {
        all.iter().all(|n| {
            let places = kept(n).map(|k| k["places"].clone()).unwrap_or_default();
            let mut places = places.as_object().into_iter().flatten();
            places.any(|(_, place)| place["node"] == other(n))
        })
    })?;
    let since = Instant::now();
    c.kill("api server");
    let found = all
        .iter()
        .try_for_each(|n| c.kill_daemon(n))
        .and_then(|()| found_again(c, all));
    std::thread::sleep(AWAY.saturating_sub(since.elapsed()));
    c.start_server()?; // (whatever became of it: other tests come)
    found?;
    still_counts(c, &before)?;
    remove(c, &remote)
}

/// Until both daemons, of which the API cannot be asked, have a channel, and the ends of `far` on either node are found.
fn found_again(c: &Cluster, all: [&str; 2]) -> Result<()> {
    let ask = |node: &str, args: &[&str]| {
        let daemon = c.daemon_container(node)?;
        let line = [&["underpass"], args].concat();
        c.node(node).exec_in_container(&daemon, &line)
    };
    let up = |node: &str, other: &str| -> Result<bool> {
        let said: Value = serde_json::from_str(&ask(node, &["peers", "-j"])?)?;
        let p = &said["peers"][0];
        Ok(p["name"] == other && p["state"] == "up")
    };
    let [a, b] = all;
    until("the daemons have a channel again", SOMETIME, || {
        up(a, b).unwrap_or(false) && up(b, a).unwrap_or(false)
    })?;
    await_paired(|| rows_of(&ask(SECOND.name, &["ss", "-n", "shop", "-ej"])?, "far"))
}

/// Who is not a daemon of that node gets no certificate of it, whatever else he may.
pub fn nobody_else_gets_a_certificate(c: &mut Cluster) -> Result<()> {
    let made = underpass_certificates::Request::make(FIRST.name)?;
    c.apply(&crate::things::certificate_request(STRANGER, &made.0))?;
    // (Looked at when others have been answered: by the next test.)
    Ok(())
}

/// The CA is made anew: all nodes get certificates of the new one, and only that is trusted. Connections go on meanwhile.
pub fn the_ca_is_replaced(c: &mut Cluster) -> Result<()> {
    let before = counted(c)?;
    let file = |node: &str, name: &str| {
        let path = c.node(node).machine.path(TLS).join(name);
        std::fs::read_to_string(path).unwrap_or_default()
    };
    let all = [FIRST.name, SECOND.name];
    let was = all.map(|n| (file(n, "ca.crt"), file(n, "node.crt")));
    ensure!(was
        .iter()
        .all(|(ca, cert)| !ca.is_empty() && !cert.is_empty()));
    let gone = r#"[{"op": "remove", "path": "/data"}]"#;
    let patch = [
        "patch",
        "secret",
        "underpass-ca",
        "-n",
        SYSTEM,
        "--type=json",
        "-p",
        gone,
    ];
    c.kubectl(&patch)?;
    let signer = "app.kubernetes.io/component=signer";
    c.kubectl(&["delete", "pod", "-n", SYSTEM, "-l", signer])?;
    until("new certificates", SOMETIME, || {
        let now = all.map(|n| (file(n, "ca.crt"), file(n, "node.crt")));
        let new = |((a, b), (c, d)): (&(String, String), &(String, String))| a != c && b != d;
        now.iter().zip(&was).all(new)
    })?;
    await_channel(c)?;
    let status = ["get", "csr", STRANGER, "-o", "jsonpath={.status}"];
    let status = c.kubectl(&status)?;
    ensure!(status == "{}", "{status}");
    still_counts(c, &before)
}

fn scale_signer(c: &Cluster, replicas: u32) -> Result<()> {
    let of = ["deployment/underpass-signer", "-n", SYSTEM];
    let n = format!("--replicas={replicas}");
    c.kubectl(&[&["scale", &n][..], &of].concat())?;
    c.kubectl(&[&["rollout", "status", "--timeout=60s"][..], &of].concat())?;
    if replicas == 0 {
        let label = "app.kubernetes.io/component=signer";
        c.kubectl(&[
            "delete", "pod", "-n", SYSTEM, "-l", label, "--wait", "--now",
        ])?;
    }
    Ok(())
}

/// A certificate of this node that the cluster's CA has signed, for a short time from now on, its key, and when it ends.
fn short(c: &Cluster, node: &str) -> Result<([String; 2], i64)> {
    use rcgen::{CertificateParams, Issuer, KeyPair};
    let part = |name: &str| -> Result<String> {
        let path = format!("jsonpath={{.data.tls\\.{name}}}");
        let words = ["get", "secret", "underpass-ca", "-n", SYSTEM, "-o", &path];
        Ok(String::from_utf8(STANDARD.decode(c.kubectl(&words)?)?)?)
    };
    let issuer = Issuer::from_ca_cert_pem(&part("crt")?, KeyPair::from_pem(&part("key")?)?)?;
    let mut p = CertificateParams::new(vec![node.to_owned()])?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let at = |s: u64| rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(s);
    // (One that is older than the node is not taken at all.)
    (p.not_before, p.not_after) = (at(now), at(now + LIFE.as_secs()));
    let key = KeyPair::generate()?;
    let cert = p.signed_by(&key, &issuer)?;
    let ends = i64::try_from(now + LIFE.as_secs())?;
    Ok(([cert.pem(), key.serialize_pem()], ends))
}

/// A node's certificate ends while nobody signs another one: the channel ends with it, and both daemons say why; connections go
/// on and pods are made. When there is a signer again, there is a channel again.
pub fn a_certificate_ends(c: &mut Cluster) -> Result<()> {
    let mut remote = Workload::new("far", counts(REDIS_AT));
    remote.node = Some(SECOND.name);
    deploy(c, &remote)?;
    await_paired(|| rows(c, SECOND.name, "far"))?;
    let before = counted(c)?;
    scale_signer(c, 0)?;
    let ended = without_signer(c, &before);
    scale_signer(c, 1)?; // (whatever became of it: other tests come)
    ended?;
    // (A daemon that starts asks at once; otherwise it looks once a minute.)
    c.kill_daemon(SECOND.name)?;
    c.rolled_out_daemons()?;
    await_channel(c)?;
    still_counts(c, &before)?;
    remove(c, &remote)
}

fn without_signer(c: &Cluster, before: &Count) -> Result<()> {
    let remote =
        || -> Result<(u64, u32)> { Ok((await_number(c, "far")?, c.restarts("shop", "far")?)) };
    let was = remote()?;
    let ([cert, key], ends) = short(c, SECOND.name)?;
    for (name, text) in [("node.key", key), ("node.crt", cert)] {
        let to = c.node(SECOND.name).machine.path(TLS).join(name);
        std::fs::write(to, text)?;
    }
    let mut said = Value::Null;
    let taken = || trusted(c, FIRST.name, SECOND.name).is_ok_and(|e| e == ends);
    until("it is taken", LIFE, taken)?;
    let both = [(FIRST.name, SECOND.name), (SECOND.name, FIRST.name)];
    let refused = || {
        both.iter().all(|(a, b)| {
            said = peers(c, a).unwrap_or_default();
            let all = said["peers"].as_array().into_iter().flatten();
            let mut of = all.filter(|p| p["name"] == *b);
            of.any(|p| p["state"] == "down" && p["reason"].to_string().contains("expired"))
        })
    };
    until("both say that it has ended", SOMETIME, refused).with_context(|| said.to_string())?;
    still_counts(c, before)?;
    let now = remote()?;
    ensure!(now.0 > was.0 && now.1 == was.1, "{now:?} after {was:?}");
    let mut later = Workload::new("later", counts(REDIS_AT));
    later.node = Some(FIRST.name);
    deploy(c, &later)?;
    await_mode_on(c, FIRST.name, "later")?;
    remove(c, &later)
}

fn await_mode_on(c: &Cluster, node: &str, workload: &str) -> Result<()> {
    until("lanes on the node", SOON, || {
        are_on(&rows(c, node, workload).unwrap_or_default(), "SMCD")
    })
}

/// A node is removed from the cluster: nobody speaks with it any more, until it is there again.
pub fn a_node_goes(c: &mut Cluster) -> Result<()> {
    c.node(SECOND.name).ctr(&["version"])?; // (it still runs)
    c.stop_kubelet(1);
    c.kubectl(&["delete", "node", SECOND.name])?;
    until("its peer forgets it", SOON, || {
        let all = peers(c, FIRST.name);
        all.is_ok_and(|p| p["peers"].as_array().is_some_and(Vec::is_empty))
    })?;
    // (Of the node that is there: the API has the other one's daemon for up to 80 s more, and nobody answers for it.)
    await_mode_on(c, FIRST.name, "load")?;
    // It comes back, as another node of the same name.
    c.start_kubelet(1)?;
    c.rolled_out_daemons()?;
    await_channel(c)?;
    c.stop_kubelet(1);
    c.kubectl(&["delete", "node", SECOND.name]).map(drop)
}
