//! Whatever comes to the port between nodes costs its own channel and nothing else. Needs root.

use anyhow::{ensure, Context, Result};
use underpass_tests::harness::node::{Lan, Node, Setup};
use underpass_tests::harness::talk::{check_pair, Talk};
use underpass_tests::harness::{until, Program, Running, PATIENCE};
use underpassd::nodes::peers::msg::{MIN_VERSION, VERSION};

/// `peer.py` as node n3, which n1 knows.
struct Fake<'a> {
    lan: &'a Lan,
    node: Node,
}

/// What the third node says first, with these versions.
fn hello(version: u32, min: u32) -> String {
    format!(
        r#"{{"kind":"hello","version":{version},"min_version":{min},"node":"n3","incarnation":7,"release":"fake","lookups":100}}"#
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
        p.line("connected", PATIENCE)?;
        Ok(p)
    }

    /// Dials, and waits for the end; what was said to it.
    fn refused(&self, to: &Node, messages: &[&str], part: &str) -> Result<()> {
        let mut p = self.dial(to, messages)?;
        p.line("end", PATIENCE)?;
        let said = p.stdout();
        ensure!(
            said.contains(r#""kind":"close""#) && said.contains(part),
            "no {part:?} in {said}"
        );
        Ok(())
    }
}

/// Not TLS, and the beginning of a handshake with nothing after it.
fn no_tls(fake: &Fake, a: &Node) -> Result<()> {
    let (ip, host) = (fake.node.control(), a.control());
    for (bytes, part) in [
        ("474554202f20485454502f312e310d0a0d0a", "TLS"),
        ("1603010200", ""),
    ] {
        let mut p = Program::python("peer.py", &fake.node.bare())
            .args(["plain", &host, bytes])
            .spawn()?;
        p.line("end", PATIENCE)?;
        if !part.is_empty() {
            a.await_refused(&ip, part)?;
        }
    }
    a.await_refused(&ip, "did not say who it is in time")
}

/// No common version, in both directions of dialing.
fn newer_versions(fake: &Fake, a: &Node) -> Result<()> {
    let (min, max) = (VERSION + 1, VERSION + 2);
    let newer = hello(max, min);
    let words = format!("no common version: it speaks {min} to {max}");
    let ours = format!("{words}, we {MIN_VERSION} to {VERSION}");
    fake.refused(a, &[&newer], &ours)?;
    let mut server = fake.program(&["serve", &fake.node.control()], &[&newer])?;
    server.line("listening", PATIENCE)?;
    server.line("got", PATIENCE)?;
    until("it is told why", PATIENCE, || {
        server.stdout().contains("no common version")
    })?;
    a.await_down("n3", &words)?;
    let t = Talk::between(a, &fake.node, 1)?;
    a.await_reasons(1, "version", "-")?;
    t.end()
}

fn bad_messages(fake: &Fake, a: &Node) -> Result<()> {
    let hello = &hello(VERSION, MIN_VERSION)[..];
    let other = hello.replace("n3", "n2");
    fake.refused(a, &[&other], "its certificate names [n3]")?;
    fake.refused(a, &["{\"kind\":\"ping\",\"n\":1}"], "is no hello")?;
    fake.refused(a, &["noise"], "cannot be read")?;
    fake.refused(a, &[hello, "{\"kind\":\"lookup\"}"], "cannot be read")?;
    fake.refused(a, &[hello, "raw:00010001"], "more than 65536 bytes")?;
    fake.refused(a, &[hello, hello], "a second hello")?;
    fake.refused(
        a,
        &[hello, "{\"kind\":\"hint\",\"lookup\":1,\"reason\":1}"],
        "an initiator's message",
    )
}

/// What is unknown is ignored; an address that is not its own is remarked upon. Returns the peer, which goes on.
fn unknown_and_lies(fake: &Fake, a: &Node) -> Result<Running> {
    let proof = "ab".repeat(32);
    let claim = |local: &str| {
        format!(
            r#"{{"kind":"lookup","id":{},"claim":{{"proof":"{proof}","local":"{local}","peer":"10.88.1.1:80","age_ms":1,"active":true,"sent":0,"acked":0,"received":0}}}}"#,
            local.len()
        )
    };
    let (theirs, lie) = (claim("10.88.3.1:5"), claim("10.88.2.1:55"));
    let hello = &hello(VERSION, MIN_VERSION)[..];
    let mut p = fake.dial(a, &[hello, "{\"kind\":\"dance\"}", &theirs, &lie])?;
    p.line("got", PATIENCE)?;
    a.await_up("n3")?;
    until("the lie is noticed", PATIENCE, || {
        let said = p.stdout();
        said.contains(&format!(
            r#"{{"kind":"hint","lookup":{},"reason":{}}}"#,
            "10.88.2.1:55".len(),
            0x0a00_0016
        ))
    })
    .with_context(|| p.stdout())?;
    ensure!(a.peer("n3")?["false_claims"] == 1, "{}", a.picture());
    ensure!(
        !p.stdout().contains(r#""lookup":11"#),
        "its own address is not"
    );
    Ok(p)
}

/// Somebody at a node's own address (behind its translation, say) keeps more connections than there is room for, and says
/// nothing: that node gets its channel.
fn silence(fake: &Fake, a: &Node) -> Result<()> {
    let mut silent = Program::python("peer.py", &fake.node.bare())
        .args(["silent", &a.control(), "300"])
        .spawn()?;
    silent.line("full", PATIENCE)?;
    let hello = hello(VERSION, MIN_VERSION);
    let mut p = fake.dial(a, &[&hello])?;
    p.line("got", PATIENCE)?;
    a.await_up("n3")?;
    drop((p, silent));
    a.await_down("n3", "")
}

/// Whatever comes to the port costs its own channel and nothing else.
#[test]
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
    no_tls(&fake, &a)?;
    newer_versions(&fake, &a)?;
    bad_messages(&fake, &a)?;
    silence(&fake, &a)?;
    let p = unknown_and_lies(&fake, &a)?;
    // Meanwhile the others were not disturbed.
    ensure!(a.peer("n2")?["state"] == "up");
    check_pair(&a, &b)?;
    ensure!(p.signal(nix::sys::signal::Signal::SIGKILL).is_ok());
    a.await_down("n3", "")
}
