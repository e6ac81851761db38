//! Two network namespaces, as two pods of one node have: addresses prove nothing there, so these
//! connections are promoted by the BPF proof or not at all. All of it needs root.

use anyhow::{ensure, Context, Result};
use lane::proto::reason::Reason;
use std::time::Duration;
use underpass_admin::{Request, Response, Row};
use underpass_tests::harness::peers::Echo;
use underpass_tests::harness::redis::{Load, Redis};
use underpass_tests::harness::web::Nginx;
use underpass_tests::harness::{until, Daemon, Place, Pods, PATIENCE};

const LIMIT: Duration = Duration::from_secs(60);

fn daemon_with_proof() -> Result<Daemon> {
    let d = Daemon::start()?;
    ensure!(
        d.stats()?.proof,
        "the BPF proof is not active: {}",
        d.said()
    );
    Ok(d)
}

#[test]
fn root_pod_to_pod() -> Result<()> {
    let d = daemon_with_proof()?;
    let pods = Pods::new()?;
    let (a, b) = (d.eager().netns(pods.a()), d.eager().netns(pods.b()));
    for mode in ["threads", "epoll"] {
        let before = d.stats()?.promoted;
        let e = Echo::serve(mode, Pods::B, &b)?;
        let (bytes, _) = e.client(&a, 4, 600, None)?.finish(LIMIT)?;
        d.assert_promoted(before + 8, bytes)?;
    }
    Ok(())
}

#[test]
fn root_through_dnat() -> Result<()> {
    let d = daemon_with_proof()?;
    let pods = Pods::new()?;
    let (a, b) = (d.eager().netns(pods.a()), d.eager().netns(pods.b()));
    let e = Echo::serve("threads", Pods::B, &b)?;
    pods.dnat(80, e.port()?)?;
    let stop = tempfile::tempdir()?;
    let file = stop.path().join("stop");
    let client = e.client_to(Pods::SERVICE, 80, &a, 3, 0, Some(&file))?;
    d.await_promoted(6)?;
    // Each end shows the addresses that its own socket has.
    let rows = d.ss()?;
    let service = format!("{}:80", Pods::SERVICE);
    ensure!(
        rows.iter()
            .filter(|r| r.peer == service && r.mode == "SMCD")
            .count()
            == 3,
        "{}",
        d.picture()
    );
    ensure!(!rows.iter().any(|r| r.local == service), "{}", d.picture());
    // How much went by TCP before depends on the machine: what counts comes after.
    let before = d.lane_bytes_now();
    until("bytes on lanes", LIMIT, || {
        d.lane_bytes_now() >= before + 5_000_000
    })?;
    std::fs::write(&file, b"")?;
    client.finish(LIMIT)?;
    d.assert_promoted(6, before + 5_000_000)?;
    Ok(())
}

/// The other end is a pod that has no shim: who asks is told so, by the address of the pod and by a service's, whichever end it
/// is that has the shim.
#[test]
fn root_a_pod_without_the_shim() -> Result<()> {
    let d = daemon_with_proof()?;
    let pods = Pods::new()?;
    let stop = tempfile::tempdir()?;
    for (n, with) in [pods.a(), pods.b()].into_iter().enumerate() {
        let place = |pod| match pod == with {
            true => d.eager().netns(pod),
            false => Place::bare().netns(pod),
        };
        let e = Echo::serve("threads", Pods::B, &place(pods.b()))?;
        let port = 90 + n as u16;
        pods.dnat(port, e.port()?)?;
        let file = stop.path().join(format!("stop{n}"));
        let direct = e.client(&place(pods.a()), 1, 0, Some(&file))?;
        let translated = e.client_to(Pods::SERVICE, port, &place(pods.a()), 1, 0, Some(&file))?;
        let mut rows = Vec::new();
        let told = until("both ends that have the shim say why not", LIMIT, || {
            rows = d.ss().unwrap_or_default();
            rows.retain(|r| r.state == "ACTIVE");
            let told = |r: &Row| r.peer_reason == Reason::PeerNoShim.code() && r.peer_pid != 0;
            rows.len() == 2 && rows.iter().all(told)
        });
        told.with_context(|| format!("{rows:#?}"))?;
        std::fs::write(&file, b"")?;
        direct.finish(LIMIT)?;
        translated.finish(LIMIT)?;
    }
    ensure!(d.stats()?.promoted == 0);
    Ok(())
}

#[test]
fn root_redis_and_nginx_in_pods() -> Result<()> {
    let d = daemon_with_proof()?;
    let pods = Pods::new()?;
    let (a, b) = (d.place().netns(pods.a()), d.place().netns(pods.b()));
    let redis = Redis::at(&b, Pods::B, 6379)?;
    let load = Load {
        test: "get",
        clients: 50,
        pipeline: 1,
        requests: 50_000,
        reconnect: false,
    };
    redis.benchmark(&a, load)?;
    d.assert_promoted(100, 1_000_000)?;
    let web = Nginx::at(&b, Pods::B, 80)?;
    web.wrk(&a, 32, 1)?;
    d.assert_promoted(164, 2_000_000)?;
    Ok(())
}

/// The same addresses in two namespaces are two different connections: nothing is mixed up.
#[test]
fn root_same_addresses_twice() -> Result<()> {
    let d = daemon_with_proof()?;
    let sets = [Pods::new()?, Pods::new()?];
    let mut clients = Vec::new();
    let mut servers = Vec::new();
    let stop = tempfile::tempdir()?;
    let file = stop.path().join("stop");
    for pods in &sets {
        let e = Echo::serve("epoll", Pods::B, &d.eager().netns(pods.b()))?;
        clients.push(e.client(&d.eager().netns(pods.a()), 4, 0, Some(&file))?);
        servers.push(e);
    }
    d.await_promoted(16)?;
    std::fs::write(&file, b"")?;
    for c in clients {
        c.finish(LIMIT)?;
    }
    d.assert_promoted(16, 1_000_000)?;
    Ok(())
}

/// A forged mirror: namespaces whose connections have the very addresses of the victim's, but are
/// other connections. Whoever waits for a partner does not get the wrong one.
#[test]
fn root_mirrored_addresses_are_not_paired() -> Result<()> {
    let d = daemon_with_proof()?;
    // Only the client of the first set and only the server of the second are under the shim.
    let sets = [Pods::new()?, Pods::new()?];
    let stop = tempfile::tempdir()?;
    let file = stop.path().join("stop");
    let bind = "40001";
    let mut kept = Vec::new();
    for (i, pods) in sets.iter().enumerate() {
        let shim = |me: bool, ns: &str| {
            if me {
                d.eager().netns(ns)
            } else {
                Place::bare().netns(ns)
            }
        };
        let mut server =
            underpass_tests::harness::Program::python("mirror.py", &shim(i == 1, pods.b()))
                .args(["serve", Pods::B, "9000"])
                .spawn()?;
        server.line("listening", PATIENCE)?;
        let client =
            underpass_tests::harness::Program::python("mirror.py", &shim(i == 0, pods.a()))
                .args(["connect", Pods::B, "9000", Pods::A, bind])
                .arg(&file)
                .spawn()?;
        kept.push((server, client));
    }
    let waiting = || {
        let rows = d.ss().unwrap_or_default();
        rows.iter()
            .filter(|r| r.state == "ACTIVE" && r.reason != 0)
            .count()
            == 2
    };
    until("both ends registered and wait", PATIENCE, waiting).with_context(|| d.picture())?;
    std::fs::write(&file, b"")?;
    for (server, client) in kept {
        client.wait(LIMIT)?.ok()?;
        server.wait(LIMIT)?.ok()?;
    }
    let s = d.stats()?;
    ensure!(
        s.promoted == 0 && s.paired == 0,
        "paired with a stranger: {s:?}"
    );
    Ok(())
}

/// What a tool asks from inside a namespace is answered for that namespace only.
#[test]
fn root_each_namespace_sees_its_own() -> Result<()> {
    let d = daemon_with_proof()?;
    let pods = Pods::new()?;
    let e = Echo::serve("epoll", Pods::B, &d.eager().netns(pods.b()))?;
    let stop = tempfile::tempdir()?;
    let file = stop.path().join("stop");
    let client = e.client(&d.eager().netns(pods.a()), 3, 0, Some(&file))?;
    d.await_promoted(6)?;
    let ss = |place: &Place| -> Result<usize> {
        let text = underpass_tests::harness::Program::new(
            underpass_tests::harness::paths::bin("underpass"),
            place,
        )
        .args(["ss", "-j"])
        .env("UNDERPASS_DIR", d.dir())
        .check(LIMIT)?;
        let rows: serde_json::Value = serde_json::from_str(&text)?;
        Ok(rows
            .as_array()
            .context("not an array")?
            .iter()
            .filter(|r| r["mode"] == "SMCD")
            .count())
    };
    ensure!(ss(&Place::bare())? == 6, "root on the node sees all");
    ensure!(ss(&Place::bare().netns(pods.a()))? == 3, "pod a");
    ensure!(ss(&Place::bare().netns(pods.b()))? == 3, "pod b");
    ensure!(matches!(
        d.ask(&Request::Ping)?,
        Response::Pong { proof: true, .. }
    ));
    std::fs::write(&file, b"")?;
    client.finish(LIMIT)?;
    Ok(())
}

/// `check` from a pod's namespace says what became of the connection, but not who is at its other end in another pod.
#[test]
fn root_check_across_namespaces() -> Result<()> {
    let d = daemon_with_proof()?;
    let pods = Pods::new()?;
    let e = Echo::serve("epoll", Pods::B, &d.eager().netns(pods.b()))?;
    let stop = tempfile::tempdir()?;
    let file = stop.path().join("stop");
    let client = e.client(&d.eager().netns(pods.a()), 1, 0, Some(&file))?;
    d.await_promoted(2)?;
    let row = d.ss()?.into_iter().find(|r| r.role == "client");
    let row = row.context("no client")?;
    let check = |place: &Place| -> Result<(Option<Row>, Option<Row>, String)> {
        let script = "import socket,sys\n\
            s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n\
            s.sendall(sys.argv[2].encode()+b'\\n'); print(s.makefile().readline())\n";
        let (local, peer) = (row.local.clone(), row.peer.clone());
        let request = serde_json::to_string(&Request::Check { local, peer })?;
        let at = d.dir().join("admin.sock");
        let text = underpass_tests::harness::Program::new("python3", place)
            .args(["-c", script])
            .arg(at)
            .arg(request)
            .check(LIMIT)?;
        match serde_json::from_str(&text)? {
            Response::Check {
                local,
                peer,
                verdict,
                ..
            } => Ok((local, peer, verdict)),
            other => anyhow::bail!("{other:?}"),
        }
    };
    let (local, peer, _) = check(&Place::bare())?;
    let (local, peer) = (local.context("no end")?, peer.context("no other end")?);
    ensure!(local.peer_pid == peer.pid && peer.lane_rx_bytes > 0);
    let (local, peer, verdict) = check(&Place::bare().netns(pods.a()))?;
    let local = local.context("not its own")?;
    ensure!(peer.is_none(), "{peer:#?}");
    ensure!((local.peer_pid, local.peer_comm.as_str()) == (0, ""));
    ensure!(verdict.contains("shared memory"), "{verdict}");
    let (local, peer, _) = check(&Place::bare().netns(pods.b()))?;
    ensure!(local.is_none() && peer.is_none(), "the client's end is a's");
    std::fs::write(&file, b"")?;
    client.finish(LIMIT)?;
    Ok(())
}
