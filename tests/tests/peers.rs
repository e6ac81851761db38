//! Daemons of several nodes: channels between them, and the two ends of connections across nodes finding each other. There
//! are no lanes across nodes, so every connection here stays on TCP; what is tested is that both ends know why. Needs root.

use anyhow::{ensure, Context, Result};
use std::path::PathBuf;
use std::time::Duration;
use underpass_tests::harness::node::{pair, Lan, Node, Setup};
use underpass_tests::harness::peers::{Echo, EchoClient};
use underpass_tests::harness::{until, Program, Running, SOON};
use underpassd::peers::msg::{MIN_VERSION, VERSION};

const LIMIT: Duration = Duration::from_secs(60);

/// Connections that last until they are told to end.
struct Talk {
    client: EchoClient,
    _server: Echo,
    stop: PathBuf,
    _dir: tempfile::TempDir,
}

impl Talk {
    fn between(a: &Node, b: &Node, n: u32) -> Result<Talk> {
        Talk::to(a, b, n, |_| Ok((b.addr(), None)))
    }

    /// Through the address (and port, if it is another one) that `way` says for the server's port.
    fn to(
        a: &Node,
        b: &Node,
        n: u32,
        way: impl FnOnce(u16) -> Result<(String, Option<u16>)>,
    ) -> Result<Talk> {
        let server = Echo::serve("epoll", &b.addr(), &b.place())?;
        let dir = tempfile::tempdir()?;
        let stop = dir.path().join("stop");
        let (host, port) = way(server.port()?)?;
        let port = port.unwrap_or(server.port()?);
        let client = server.client_to(&host, port, &a.place(), n, 0, Some(&stop))?;
        Ok(Talk {
            client,
            _server: server,
            stop,
            _dir: dir,
        })
    }

    /// Every byte must have come back.
    fn end(self) -> Result<()> {
        std::fs::write(&self.stop, b"")?;
        self.client.finish(LIMIT)?;
        Ok(())
    }
}

const NO_LANES: &str = "no-rdma-device";

/// Both ends of `n` connections are found, and both say that there is no device.
fn found(a: &Node, b: &Node, n: usize) -> Result<()> {
    a.await_reasons(n, NO_LANES, NO_LANES)
        .with_context(|| b.picture())?;
    b.await_reasons(n, NO_LANES, NO_LANES)
        .with_context(|| a.picture())
}

fn check_pair(a: &Node, b: &Node) -> Result<()> {
    let before = (a.paired()?, b.paired()?);
    let t = Talk::between(a, b, 2)?;
    found(a, b, 2)?;
    t.end()?;
    ensure!(a.paired()? >= before.0 + 2 && b.paired()? >= before.1 + 2);
    Ok(())
}

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
    // No shim at the other end: it waits.
    let server = Echo::serve("epoll", &b.addr(), &b.bare())?;
    let dir = tempfile::tempdir()?;
    let stop = dir.path().join("stop");
    let client = server.client(&a.place(), 1, 0, Some(&stop))?;
    a.await_reasons(1, "waiting", "-")?;
    std::fs::write(&stop, b"")?;
    client.finish(LIMIT)?;
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
    ensure!(a.peer("n2")?["lies"].as_u64() > Some(0), "{}", a.picture());
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

/// Each bad certificate is refused with a reason that both ends show; a good one in its place is taken without a restart.
#[test]
#[expect(clippy::too_many_lines)]
fn root_certificates() -> Result<()> {
    let lan = Lan::new()?;
    let (a, b) = pair(&lan)?;
    let pid = b.running()?.pid();
    for (dir, name) in [("namesake", "underpass"), ("foreign", "another")] {
        lan.make(&format!("ca --out {dir} --name {name}"))?;
        lan.make(&format!("node n2 --ca {dir} --out {dir}"))?;
    }
    expired(&lan, "n2")?;
    let good = |b: &Node| -> Result<()> {
        for (from, to) in [
            ("ca.crt", "ca.crt"),
            ("n2.key", "node.key"),
            ("n2.crt", "node.crt"),
        ] {
            b.install(&lan.file(from), to)?;
        }
        Ok(())
    };
    // Signed by a CA that only n2 knows: one with the name of ours, then one with its own.
    let foreign = |dir: &str| -> Result<()> {
        for (f, to) in [
            ("ca.crt", "ca.crt"),
            ("n2.key", "node.key"),
            ("n2.crt", "node.crt"),
        ] {
            b.install(&lan.file(dir).join(f), to)?;
        }
        Ok(())
    };
    foreign("namesake")?;
    a.await_down(
        "n2",
        "the peer's certificate is not signed by our CA, although it says so",
    )?;
    b.await_down(
        "n1",
        "the peer's certificate is not signed by our CA, although it says so",
    )?;
    foreign("foreign")?;
    a.await_down(
        "n2",
        "the peer's certificate is signed by a CA that we do not know",
    )?;
    b.await_down(
        "n1",
        "the peer's certificate is signed by a CA that we do not know",
    )?;
    a.await_refused(
        "10.88.0.2",
        "refused our certificate: signed by a CA that it does not know",
    )?;
    b.await_refused(
        "10.88.0.1",
        "refused our certificate: signed by a CA that it does not know",
    )?;
    let t = Talk::between(&a, &b, 1)?;
    a.await_reasons(1, "peer-daemon", "-")?;
    b.await_reasons(1, "peer-daemon", "-")?;
    good(&b)?;
    a.await_up("n2")?;
    found(&a, &b, 1)?; // the very connection that had to wait
    t.end()?;
    // Expired.
    b.install(&lan.file("expired.key"), "node.key")?;
    b.install(&lan.file("expired.crt"), "node.crt")?;
    a.await_down("n2", "the peer's certificate is expired")?;
    b.await_down("n1", "the peer refused our certificate: expired")?;
    good(&b)?;
    a.await_up("n2")?;
    // Half of a change is no change: the channel stays, the files are complained about.
    lan.make("node n2 --force --days 100")?;
    b.install(&lan.file("n2.crt"), "node.crt")?;
    until("the files do not fit", SOON, || {
        let v = b.tool("peers -j").unwrap_or_default();
        v["node"]["trouble"]
            .as_str()
            .is_some_and(|t| t.contains("node.key"))
    })
    .with_context(|| b.picture())?;
    ensure!(a.peer("n2")?["state"] == "up");
    let old = a.peer("n2")?["expires"].as_i64();
    b.install(&lan.file("n2.key"), "node.key")?;
    until("the new certificate is shown", SOON, || {
        a.peer("n2")
            .is_ok_and(|p| p["state"] == "up" && p["expires"].as_i64() < old)
    })
    .with_context(|| a.picture())?;
    check_pair(&a, &b)?;
    // The signal has them read even if nothing changed.
    let read = |b: &Node| b.running().map(|r| r.stderr().matches("read anew").count());
    let before = read(&b)?;
    b.running()?.signal(nix::sys::signal::Signal::SIGHUP)?;
    until("read anew", SOON, || read(&b).is_ok_and(|n| n > before)).with_context(|| b.picture())?;
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

/// `peer.py` as node n3, which n1 knows.
struct Fake<'a> {
    lan: &'a Lan,
    node: Node,
}

/// What the third node says first, with these versions.
fn hello(version: u32, min: u32) -> String {
    format!(
        r#"{{"kind":"hello","version":{version},"min_version":{min},"node":"n3","incarnation":7,"release":"fake","seeks":100}}"#
    )
}

impl Fake<'_> {
    fn program(&self, args: &[&str], messages: &[&str]) -> Result<Running> {
        let file = |f: &str| self.lan.file(f);
        Program::python("peer.py", &self.node.bare())
            .args(args)
            .arg(file("ca.crt"))
            .arg(file("n3.crt"))
            .arg(file("n3.key"))
            .args(messages)
            .spawn()
    }

    fn dial(&self, to: &Node, messages: &[&str]) -> Result<Running> {
        let mut p = self.program(&["dial", &to.control(), &to.name], messages)?;
        p.line("connected", SOON)?;
        Ok(p)
    }

    /// Dials, and waits for the end; what was said to it.
    fn refused(&self, to: &Node, messages: &[&str], part: &str) -> Result<()> {
        let mut p = self.dial(to, messages)?;
        p.line("end", SOON)?;
        let said = p.stdout();
        ensure!(
            said.contains(r#""kind":"close""#) && said.contains(part),
            "no {part:?} in {said}"
        );
        Ok(())
    }
}

/// Whatever comes to the port costs its own channel and nothing else.
#[test]
#[expect(clippy::too_many_lines)]
fn root_bad_peers() -> Result<()> {
    let lan = Lan::new()?;
    let node = |n, peers| {
        Node::new(
            &lan,
            n,
            Setup {
                peers,
                ..Setup::default()
            },
        )
    };
    let (mut a, mut b) = (node(1, vec![2, 3])?, node(2, vec![1])?);
    a.start()?;
    b.start()?;
    a.await_up("n2")?;
    let fake = Fake {
        lan: &lan,
        node: node(3, vec![])?,
    };
    let ip = fake.node.control();
    let host = a.control();
    // Not TLS, and the beginning of a handshake with nothing after it.
    for (bytes, part) in [
        ("474554202f20485454502f312e310d0a0d0a", "TLS"),
        ("1603010200", ""),
    ] {
        let mut p = Program::python("peer.py", &fake.node.bare())
            .args(["plain", &host, bytes])
            .spawn()?;
        p.line("end", SOON)?;
        if !part.is_empty() {
            a.await_refused(&ip, part)?;
        }
    }
    a.await_refused(&ip, "did not say who it is in time")?;
    // Versions, in both directions of dialing.
    let (min, max) = (VERSION + 1, VERSION + 2);
    let newer = hello(max, min);
    let words = format!("no common version: it speaks {min} to {max}");
    let ours = format!("{words}, we {MIN_VERSION} to {VERSION}");
    fake.refused(&a, &[&newer], &ours)?;
    let mut server = fake.program(&["serve", &ip], &[&newer])?;
    server.line("listening", SOON)?;
    server.line("got", SOON)?;
    until("it is told why", SOON, || {
        server.stdout().contains("no common version")
    })?;
    a.await_down("n3", &words)?;
    let t = Talk::between(&a, &fake.node, 1)?;
    a.await_reasons(1, "version", "-")?;
    t.end()?;
    drop(server);
    // Messages.
    let hello = &hello(VERSION, MIN_VERSION)[..];
    let other = hello.replace("n3", "n2");
    fake.refused(&a, &[&other], "its certificate names [n3]")?;
    fake.refused(&a, &["{\"kind\":\"ping\",\"n\":1}"], "is no hello")?;
    fake.refused(&a, &["noise"], "cannot be read")?;
    fake.refused(&a, &[hello, "{\"kind\":\"seek\"}"], "cannot be read")?;
    fake.refused(&a, &[hello, "raw:00010001"], "more than 65536 bytes")?;
    fake.refused(&a, &[hello, hello], "a second hello")?;
    fake.refused(
        &a,
        &[hello, "{\"kind\":\"hint\",\"seek\":1,\"reason\":1}"],
        "an initiator's message",
    )?;
    // What is unknown is ignored; an address that is not its own is remarked upon.
    let proof = "ab".repeat(32);
    let claim = |local: &str| {
        format!(
            r#"{{"kind":"seek","id":{},"claim":{{"proof":"{proof}","local":"{local}","peer":"10.88.1.1:80","age_ms":1,"active":true,"sent":0,"acked":0,"received":0}}}}"#,
            local.len()
        )
    };
    let (theirs, lie) = (claim("10.88.3.1:5"), claim("10.88.2.1:55"));
    let mut p = fake.dial(&a, &[hello, "{\"kind\":\"dance\"}", &theirs, &lie])?;
    p.line("got", SOON)?;
    a.await_up("n3")?;
    until("the lie is noticed", SOON, || {
        let said = p.stdout();
        said.contains(&format!(
            r#"{{"kind":"hint","seek":{},"reason":{}}}"#,
            "10.88.2.1:55".len(),
            0x0a00_0016
        ))
    })
    .with_context(|| p.stdout())?;
    ensure!(a.peer("n3")?["lies"] == 1, "{}", a.picture());
    ensure!(
        !p.stdout().contains(r#""seek":11"#),
        "its own address is not"
    );
    // Meanwhile the others were not disturbed.
    ensure!(a.peer("n2")?["state"] == "up");
    check_pair(&a, &b)?;
    ensure!(p.signal(nix::sys::signal::Signal::SIGKILL).is_ok());
    a.await_down("n3", "")
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
    until("the farewell, then that nobody is there", SOON, || {
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
