//! Daemons of several nodes: channels between them, and the two ends of connections across nodes finding each other. There
//! are no lanes across nodes, so every connection here stays on TCP; what is tested is that both ends know why. Needs root.

use anyhow::{ensure, Context, Result};
use std::path::Path;
use std::time::Duration;
use underpass_tests::harness::node::{pair, Lan, Node, Setup};
use underpass_tests::harness::peers::Echo;
use underpass_tests::harness::talk::{check_pair, found, Talk};
use underpass_tests::harness::{until, Place, Pods, PATIENCE};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn root_paired_in_both_directions() -> Result<()> {
    let lan = Lan::new()?;
    let (a, b) = pair(&lan)?;
    check_pair(&a, &b)?;
    check_pair(&b, &a)
}

#[test]
fn root_paired_through_translation() -> Result<()> {
    let lan = Lan::new()?;
    let (a, b) = pair(&lan)?;
    b.sh("ip route add 10.99.0.0/16 dev eth0")?;
    let nat = "iptables -w -t nat";
    // The destination; the source, to the node's own address and to one that nobody lists; both.
    for (dnat, snat) in [
        (true, None),
        (false, Some("10.88.0.1")),
        (false, Some("10.99.0.7")),
        (true, Some("10.88.0.1")),
        (true, Some("10.99.0.7")),
    ] {
        a.sh(&format!("{nat} -F"))?;
        if let Some(s) = snat {
            if s.starts_with("10.99") {
                let _ = a.sh(&format!("ip addr add {s}/32 dev eth0")); // a second time: it is there
            }
            a.sh(&format!(
                "{nat} -A POSTROUTING -p tcp -d {} ! --dport 7471 -j SNAT --to-source {s}",
                b.addr()
            ))?;
        }
        let t = Talk::to(&a, &b, 3, |port| {
            if !dnat {
                return Ok((b.addr(), None));
            }
            a.sh(&format!(
                "{nat} -A OUTPUT -d 10.96.0.9 -p tcp --dport 80 -j DNAT --to-destination {}:{port}",
                b.addr()
            ))?;
            Ok(("10.96.0.9".into(), Some(80)))
        })?;
        found(&a, &b, 3).with_context(|| format!("DNAT {dnat}, SNAT {snat:?}"))?;
        // The addresses are what this is about.
        let rows = b.tool("ss -j")?;
        let from = snat.unwrap_or("10.88.");
        let peers = rows
            .as_array()
            .context("rows")?
            .iter()
            .filter(|r| r["state"] == "ACTIVE");
        for r in peers {
            let peer = r["peer"].as_str().unwrap_or_default();
            ensure!(peer.starts_with(from), "{peer} is not translated to {from}");
        }
        t.end()?;
    }
    Ok(())
}

/// The server's program registers long after the client's, and the other way round.
#[test]
fn root_either_end_first() -> Result<()> {
    let lan = Lan::new()?;
    let (mut a, mut b) = pair(&lan)?;
    for late_is_server in [true, false] {
        let late = if late_is_server { &mut b } else { &mut a };
        let name = late.name.clone();
        late.kill();
        let t = Talk::between(&a, &b, 1)?;
        let early = if late_is_server { &a } else { &b };
        early.await_reasons(1, "peer-daemon", "-")?;
        let late = if late_is_server { &mut b } else { &mut a };
        late.start()?;
        let early = if late_is_server { &a } else { &b };
        early.await_up(&name)?;
        found(&a, &b, 1)?;
        t.end()?;
    }
    Ok(())
}

#[test]
fn root_reasons_of_those_who_wait() -> Result<()> {
    let lan = Lan::new()?;
    let (a, mut b) = pair(&lan)?;
    // Nobody lists the third node, and its daemon knows nobody.
    let mut c = Node::new(&lan, 3, Setup::default())?;
    c.start()?;
    let t = Talk::between(&a, &c, 2)?;
    a.await_reasons(2, "unknown-node", "-")?;
    c.await_reasons(2, "waiting", "peer-elsewhere")?;
    t.end()?;
    let none = c.tool("peers -j")?;
    ensure!(none["peers"] == serde_json::json!([]) && none["node"]["listens"] == "");
    // No records on one node: its end cannot be proven, and the other hears of it.
    b.reconfigure(|s| s.args = vec!["--no-bpf".into()]);
    b.start()?;
    a.await_up("n2")?;
    let t = Talk::between(&a, &b, 2)?;
    b.await_reasons(2, "unproven", "-")?;
    a.await_reasons(2, "waiting", "unproven")?;
    t.end()?;
    Ok(())
}

/// The program at the other end has no shim: its node says so, also of a pod in which no program has one, and of ends that nobody
/// is in a hurry about.
#[test]
fn root_programs_without_a_shim() -> Result<()> {
    let lan = Lan::new()?;
    let (a, b) = pair(&lan)?;
    let pod = b.pod(&lan)?;
    for (addr, bare) in [(b.addr(), b.bare()), (pod.addr.clone(), pod.bare())] {
        for place in [a.place(), a.quiet()] {
            let server = Echo::serve("epoll", &addr, &bare)?;
            let dir = tempfile::tempdir()?;
            let stop = dir.path().join("stop");
            let client = server.client(&place, 1, 0, Some(&stop))?;
            a.await_reasons(1, "waiting", "peer-no-shim")?;
            std::fs::write(&stop, b"")?;
            client.finish(LIMIT)?;
        }
    }
    Ok(())
}

/// The two directories contradict each other.
#[test]
fn root_a_node_that_lies_about_addresses() -> Result<()> {
    let lan = Lan::new()?;
    let (mut a, mut b) = pair(&lan)?;
    // For n1, the addresses of n2's programs belong to n3.
    a.reconfigure(|s| {
        s.peers = vec![];
        s.more = "[[peer]]\nname = 'n2'\ncontrol = '10.88.0.2'\naddresses = ['10.88.0.2']\n\
                  [[peer]]\nname = 'n3'\ncontrol = '10.88.0.3'\naddresses = ['10.88.2.0/24']\n"
            .into()
    });
    a.start()?;
    a.await_up("n2")?;
    let t = Talk::between(&a, &b, 1)?;
    b.await_reasons(1, "wrong-node", "wrong-node")?;
    a.await_reasons(1, "peer-daemon", "-")?; // it looks at n3, which is not there
    ensure!(
        a.peer("n2")?["false_claims"].as_u64() > Some(0),
        "{}",
        a.picture()
    );
    ensure!(a.paired()? == 0 && b.paired()? == 0);
    t.end()?;
    // Corrected, all is well.
    a.reconfigure(|s| {
        s.peers = vec![2];
        s.more.clear();
    });
    a.start()?;
    b.start()?;
    a.await_up("n2")?;
    check_pair(&a, &b)
}

fn expired(lan: &Lan, name: &str) -> Result<()> {
    use rcgen::{CertificateParams, Issuer, KeyPair};
    let read = |f: &str| std::fs::read_to_string(lan.file(f));
    let issuer = Issuer::from_ca_cert_pem(&read("ca.crt")?, KeyPair::from_pem(&read("ca.key")?)?)?;
    let mut p = CertificateParams::new(vec![name.to_owned()])?;
    p.not_before = rcgen::date_time_ymd(2020, 1, 1);
    p.not_after = rcgen::date_time_ymd(2021, 1, 1);
    let key = KeyPair::generate()?;
    let cert = p.signed_by(&key, &issuer)?;
    std::fs::write(lan.file("expired.crt"), cert.pem())?;
    std::fs::write(lan.file("expired.key"), key.serialize_pem())?;
    Ok(())
}

/// Puts the CA's certificate, and n2's key and certificate, from this directory in place at `b`.
fn install_all(b: &Node, dir: &Path) -> Result<()> {
    for (from, to) in [
        ("ca.crt", "ca.crt"),
        ("n2.key", "node.key"),
        ("n2.crt", "node.crt"),
    ] {
        b.install(&dir.join(from), to)?;
    }
    Ok(())
}

/// Signed by a CA that only n2 knows: one with the name of ours, then one with its own.
fn foreign_cas(lan: &Lan, a: &Node, b: &Node) -> Result<()> {
    install_all(b, &lan.file("namesake"))?;
    let namesake = "the peer's certificate is not signed by our CA, although it says so";
    a.await_down("n2", namesake)?;
    b.await_down("n1", namesake)?;
    install_all(b, &lan.file("foreign"))?;
    a.await_down(
        "n2",
        "the peer's certificate is signed by a CA that we do not know",
    )?;
    b.await_down(
        "n1",
        "the peer's certificate is signed by a CA that we do not know",
    )?;
    let refused = "refused our certificate: signed by a CA that it does not know";
    a.await_refused("10.88.0.2", refused)?;
    b.await_refused("10.88.0.1", refused)?;
    let t = Talk::between(a, b, 1)?;
    a.await_reasons(1, "peer-daemon", "-")?;
    b.await_reasons(1, "peer-daemon", "-")?;
    install_all(b, &lan.file(""))?;
    a.await_up("n2")?;
    found(a, b, 1)?; // the very connection that had to wait
    t.end()
}

/// Half of a change is no change: the channel stays, the files are complained about.
fn half_of_a_change(lan: &Lan, a: &Node, b: &Node) -> Result<()> {
    lan.make("node n2 --force --days 100")?;
    b.install(&lan.file("n2.crt"), "node.crt")?;
    until("the files do not fit", PATIENCE, || {
        let v = b.tool("peers -j").unwrap_or_default();
        v["node"]["trouble"]
            .as_str()
            .is_some_and(|t| t.contains("node.key"))
    })
    .with_context(|| b.picture())?;
    ensure!(a.peer("n2")?["state"] == "up");
    let old = a.peer("n2")?["expires"].as_i64();
    b.install(&lan.file("n2.key"), "node.key")?;
    until("the new certificate is shown", PATIENCE, || {
        a.peer("n2")
            .is_ok_and(|p| p["state"] == "up" && p["expires"].as_i64() < old)
    })
    .with_context(|| a.picture())?;
    check_pair(a, b)
}

/// Each bad certificate is refused with a reason that both ends show; a good one in its place is taken without a restart.
#[test]
fn root_certificates() -> Result<()> {
    let lan = Lan::new()?;
    let (a, b) = pair(&lan)?;
    let pid = b.running()?.pid();
    for (dir, name) in [("namesake", "underpass"), ("foreign", "another")] {
        lan.make(&format!("ca --out {dir} --name {name}"))?;
        lan.make(&format!("node n2 --ca {dir} --out {dir}"))?;
    }
    expired(&lan, "n2")?;
    foreign_cas(&lan, &a, &b)?;
    b.install(&lan.file("expired.key"), "node.key")?;
    b.install(&lan.file("expired.crt"), "node.crt")?;
    a.await_down("n2", "the peer's certificate is expired")?;
    b.await_down("n1", "the peer refused our certificate: expired")?;
    install_all(&b, &lan.file(""))?;
    a.await_up("n2")?;
    half_of_a_change(&lan, &a, &b)?;
    // The signal has them read even if nothing changed.
    let read = |b: &Node| b.running().map(|r| r.stderr().matches("read anew").count());
    let before = read(&b)?;
    b.running()?.signal(nix::sys::signal::Signal::SIGHUP)?;
    until("read anew", PATIENCE, || read(&b).is_ok_and(|n| n > before))
        .with_context(|| b.picture())?;
    a.await_up("n2")?;
    check_pair(&a, &b)?;
    ensure!(b.running()?.pid() == pid, "without a restart");
    Ok(())
}

/// A daemon at n2's address whose certificate is another node's, of the right CA.
#[test]
fn root_the_certificate_of_another_node() -> Result<()> {
    let lan = Lan::new()?;
    let (a, mut b) = pair(&lan)?;
    b.kill();
    lan.make("node n9")?;
    // Files that do not name this node are not even used.
    b.install(&lan.file("n9.crt"), "node.crt")?;
    b.install(&lan.file("n9.key"), "node.key")?;
    b.start()?;
    b.await_down("n1", "our own certificate cannot be used")?;
    let v = b.tool("peers -j")?;
    ensure!(
        v["node"]["trouble"]
            .as_str()
            .is_some_and(|t| t.contains("names [n9], not this node, `n2`")),
        "{v}"
    );
    // Same-node work goes on without.
    let e = Echo::serve("epoll", &b.addr(), &b.place())?;
    e.client(&b.place(), 2, 600, None)?.finish(LIMIT)?;
    ensure!(
        b.tool("stats -j")?["promoted"].as_u64() >= Some(4),
        "{}",
        b.picture()
    );
    // A daemon that calls itself n9.
    b.name = "n9".into();
    b.start()?;
    a.await_down("n2", "the peer's certificate is of another node")?;
    a.await_refused(
        "10.88.0.2",
        "its certificate names [n9], which is no peer of node `n1`",
    )?;
    b.await_down(
        "n1",
        "the peer says: its certificate names [n9], which is no peer of node `n1`",
    )?;
    Ok(())
}

/// Both daemons die and come back, in turn and together.
#[test]
fn root_daemons_restart() -> Result<()> {
    let lan = Lan::new()?;
    let (mut a, mut b) = pair(&lan)?;
    for round in 0..3 {
        b.kill();
        a.await_down("n2", "")?;
        if round == 1 {
            a.kill();
            a.start()?;
        }
        b.start()?;
        a.await_up("n2")?;
        b.await_up("n1")?;
        check_pair(&a, &b).with_context(|| format!("round {round}"))?;
    }
    // Told to stop, it says farewell.
    a.running()?.signal(nix::sys::signal::Signal::SIGTERM)?;
    until("the farewell, then that nobody is there", PATIENCE, || {
        b.peer("n1").is_ok_and(|p| p["state"] == "down")
            && b.running()
                .is_ok_and(|r| r.stderr().contains("the daemon was told to stop"))
    })
    .with_context(|| b.picture())?;
    b.await_down("n1", "cannot connect")
}

/// The wire is cut without a word: the peer is found dead, and back when it is back.
#[test]
fn root_a_silent_peer_is_dead() -> Result<()> {
    let lan = Lan::new()?;
    let (a, b) = pair(&lan)?;
    b.sh("ip link set eth0 down")?;
    let gone = Duration::from_secs(60);
    until("the peer is dead", gone, || {
        a.peer("n2").is_ok_and(|p| p["state"] == "down")
    })
    .with_context(|| a.picture())?;
    b.sh("ip link set eth0 up")?;
    b.sh("ip route replace 10.96.0.0/16 dev eth0")?;
    until("it is back", gone, || {
        a.peer("n2").is_ok_and(|p| p["state"] == "up")
    })
    .with_context(|| a.picture())?;
    check_pair(&a, &b)
}

/// Three nodes: an end behind translation is looked for at both others, and found at one.
#[test]
fn root_three_nodes() -> Result<()> {
    let lan = Lan::new()?;
    let mut all = Vec::new();
    for n in 1..=3 {
        let peers = (1..=3).filter(|m| *m != n).collect();
        let mut node = Node::new(
            &lan,
            n,
            Setup {
                peers,
                ..Setup::default()
            },
        )?;
        node.start()?;
        all.push(node);
    }
    for (i, x) in all.iter().enumerate() {
        for (j, y) in all.iter().enumerate() {
            if i != j {
                x.await_up(&y.name)?;
            }
        }
    }
    for (i, j) in [(0, 1), (1, 2), (2, 0)] {
        let (a, b) = (&all[i], &all[j]);
        let before = [all[0].paired()?, all[1].paired()?, all[2].paired()?];
        let t = Talk::to(a, b, 2, |port| {
            a.sh(&format!(
                "iptables -w -t nat -A OUTPUT -d 10.96.0.9 -p tcp --dport 80 -j DNAT --to-destination {}:{port}",
                b.addr()
            ))?;
            Ok(("10.96.0.9".into(), Some(80)))
        })?;
        found(a, b, 2)?;
        t.end()?;
        let third = 3 - i - j;
        ensure!(
            all[third].paired()? == before[third],
            "the third has nothing to do with it"
        );
    }
    Ok(())
}

/// A service's address belongs to no node. The pod behind it is on this one: that address is not why the connection waits.
#[test]
fn root_a_pod_of_this_node_behind_a_service() -> Result<()> {
    let lan = Lan::new()?;
    let (a, _b) = pair(&lan)?;
    let pods = Pods::new()?;
    let stop = tempfile::tempdir()?;
    let server = Echo::serve("threads", Pods::B, &Place::bare().netns(pods.b()))?;
    pods.dnat(80, server.port()?)?;
    let file = stop.path().join("stop");
    let client = a.place().netns(pods.a());
    let client = server.client_to(Pods::SERVICE, 80, &client, 2, 0, Some(&file))?;
    a.await_reasons(2, "waiting", "peer-no-shim")?;
    std::fs::write(&file, b"")?;
    client.finish(LIMIT)?;
    Ok(())
}

/// Daemons of one kernel: with one place for the pins they share one program, with two each has
/// its own, and both record.
#[test]
fn root_pins() -> Result<()> {
    let lan = Lan::new()?;
    let (a, mut b) = pair(&lan)?;
    let pin = format!("/sys/fs/bpf/underpass-test-{}", std::process::id());
    b.reconfigure(|s| s.more = format!("[proof]\npin = '{pin}'\n"));
    b.start()?;
    a.await_up("n2")?;
    let done = check_pair(&a, &b).and_then(|()| check_pair(&b, &a));
    b.kill();
    std::fs::remove_dir_all(&pin)?;
    done
}
