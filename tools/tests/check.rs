//! `underpass check` against a real TCP service and a daemon that says what each test wants. The
//! library is a stand-in without hooks: what is under test is the test itself.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use support::{harmless_library, text, tool, FakeDaemon};
use underpass_admin::{Across, RailRow, Request, Response, Row};

/// A service that says `greeting`, then reads until the end; returns what it was sent.
fn service(greeting: &'static [u8], close: bool) -> (u16, JoinHandle<Vec<u8>>) {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = l.local_addr().unwrap().port();
    let t = std::thread::spawn(move || {
        let (mut s, _) = l.accept().unwrap();
        s.write_all(greeting).unwrap();
        if close {
            s.shutdown(Shutdown::Write).unwrap();
        }
        let mut got = Vec::new();
        s.read_to_end(&mut got).expect("closed in order, not reset");
        got
    });
    (port, t)
}

fn row(mode: &str, reason: u32, comm: &str) -> Option<Row> {
    Some(Row {
        state: "ACTIVE".into(),
        mode: mode.into(),
        reason,
        comm: comm.into(),
        pid: 5,
        ..Row::default()
    })
}

fn answering(local: Option<Row>, peer: Option<Row>) -> FakeDaemon {
    FakeDaemon::new(move |r| match r {
        Request::Check { .. } => Response::Check {
            local: local.clone(),
            peer: peer.clone(),
            verdict: String::new(),
            across: None,
        },
        r => Response::Error {
            message: format!("unexpected {r:?}"),
        },
    })
}

fn check(d: &FakeDaemon, port: u16, more: &[&str]) -> Output {
    let port = port.to_string();
    let wait = if more.contains(&"--wait") {
        &[]
    } else {
        &["--wait", "1"] as &[&str]
    };
    d.tool(&[&["check", "127.0.0.1", &port], wait, more].concat())
        .env("UNDERPASS_LIB", harmless_library())
        .output()
        .unwrap()
}

#[test]
fn a_promoted_connection() {
    let d = answering(row("SMCD", 0, "underpass"), row("SMCD", 0, "redis-server"));
    let (port, service) = service(b"220 hello\r\n", false);
    let out = check(&d, port, &[]);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{said}{}", text(&out.stderr));
    assert!(said.contains("mode       SMCD (promoted)"), "{said}");
    assert!(
        said.contains("peer  promoted\n          program: redis-server (pid 5)"),
        "{said}"
    );
    assert_eq!(
        service.join().unwrap(),
        b"",
        "nothing was sent to the service"
    );
    // The daemon was asked about the connection that was there.
    let q: serde_json::Value = serde_json::from_str(&d.requests()[0]).unwrap();
    assert_eq!(q["peer"], format!("127.0.0.1:{port}"));
    assert!(said.contains(&format!(
        "connection {} -> {}",
        q["local"].as_str().unwrap(),
        q["peer"].as_str().unwrap()
    )));
}

#[test]
fn a_connection_that_would_be_promoted() {
    let d = answering(
        row("TCP 0x0a000003", 0x0a00_0003, "underpass"),
        row("TCP 0x0a000001", 0x0a00_0001, "nginx"),
    );
    let (port, service) = service(b"", false);
    let out = check(&d, port, &["-j"]);
    assert_eq!(out.status.code(), Some(0));
    let v: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(
        (&v["promoted"], &v["promotable"]),
        (&false.into(), &true.into())
    );
    assert_eq!(v["there"]["reason"]["name"], "young");
    assert_eq!(service.join().unwrap(), b"");
}

#[test]
fn a_connection_that_stays_on_tcp() {
    let d = answering(
        row("TCP 0x05000000/0x0a000005", 0x0500_0000, "underpass"),
        row("", 0x0a00_0005, "go"),
    );
    let (port, service) = service(b"", false);
    let out = check(&d, port, &["--wait", "60"]);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(
        said.contains("mode       TCP 0x05000000/0x0a000005 (stays on TCP)"),
        "{said}"
    );
    assert!(said.contains("here  0x05000000 peer-declined: "), "{said}");
    assert!(said.contains("peer  0x0a000005 bypassed: "), "{said}");
    // It did not wait: a reason that lasts is final after five equal answers.
    assert_eq!(d.requests().len(), 5);
    service.join().unwrap();
}

/// A daemon whose connection leads to another node.
fn remote(local: Option<Row>, across: Across) -> FakeDaemon {
    FakeDaemon::new(move |_| Response::Check {
        local: local.clone(),
        peer: None,
        verdict: String::new(),
        across: Some(across.clone()),
    })
}

fn between() -> Across {
    Across {
        own: "n1".into(),
        node: "n2".into(),
        listed: true,
        channel: "up".into(),
        links: 4,
        ..Across::default()
    }
}

#[test]
fn a_promoted_connection_to_another_node() {
    let mut here = row("SMCR", 0, "underpass");
    let rail = RailRow {
        role: "client".into(),
        device: "mlx5_0".into(),
        port: 1,
        link: 7,
        ..RailRow::default()
    };
    here.iter_mut().for_each(|r| r.rail = Some(rail.clone()));
    let d = remote(here, between());
    for json in [false, true] {
        let (port, service) = service(b"", false);
        let out = check(&d, port, if json { &["-j"] } else { &[] });
        let said = text(&out.stdout);
        assert_eq!(out.status.code(), Some(0), "{said}");
        if json {
            let v: serde_json::Value = serde_json::from_str(&said).unwrap();
            assert_eq!(v["mode"], "SMCR");
            let a = &v["across"];
            assert_eq!((&a["node"], &a["links"]), (&"n2".into(), &4.into()));
            assert_eq!(
                (&a["rail"]["device"], &a["refusal"]),
                (&"mlx5_0".into(), &().into())
            );
        } else {
            let want = "mode       SMCR (promoted)\nnodes      n1 -> n2\nchannel    up\n\
                        RDMA       mlx5_0 port 1, link 7; 4 links work\n    here  promoted\n";
            assert!(said.contains(want), "{said}");
            assert!(
                said.ends_with("    peer  promoted, on another node\n"),
                "{said}"
            );
        }
        service.join().unwrap();
    }
}

/// What is between the nodes, what each node says, and that nothing on this node is taken for the
/// other end: it would be this test's own socket.
#[test]
fn a_connection_to_another_node_that_stays_on_tcp() {
    let waiting = |there| {
        let mut r = row("TCP 0x0a000003", 0x0a00_0003, "underpass");
        r.iter_mut().for_each(|r| r.peer_reason = there);
        r
    };
    let no_device = 0x0303_0002;
    let cases = [
        // The other node has looked: no shim there.
        (waiting(0x0301_0000), between(), "peer  0x03010000 peer-no-shim", 1),
        // It has found the program, which has not used the connection yet.
        (waiting(0x0a00_0001), between(), "mode       SMCR (after some use; now TCP 0x0a000003)", 0),
        // Nothing was heard.
        (waiting(0), between(), "peer  on another node, from where nothing was received about it", 1),
        // This node could not carry it anyway.
        (
            waiting(0x0a00_0001),
            Across { refusal: no_device, ..between() },
            "RDMA       none: the peer is on another node, and this node has no usable RDMA device (no-rdma-device)",
            1,
        ),
        (
            row("TCP 0x0a000015", 0x0a00_0015, "underpass"),
            Across { channel: "down".into(), trouble: "connection \u{1b}refused".into(), ..between() },
            "channel    down: connection \\u{1b}refused\n",
            1,
        ),
        (
            row("TCP 0x0a000014", 0x0a00_0014, "underpass"),
            Across { own: "n1".into(), ..Across::default() },
            "nodes      n1 -> an address that no [[peer]] lists (outside, or translated on the way)\n",
            1,
        ),
        // In a container: no names.
        (
            waiting(0),
            Across { own: String::new(), node: String::new(), ..between() },
            "nodes      this one -> another node\nchannel    up\nRDMA       usable here; 4 links work\n",
            1,
        ),
    ];
    for (here, across, part, code) in cases {
        let d = remote(here, across);
        let (port, service) = service(b"", false);
        let out = check(&d, port, &[]);
        let said = text(&out.stdout);
        assert!(said.contains(part), "{part}: {said}");
        assert_eq!(out.status.code(), Some(code), "{said}");
        let own = format!("pid {}", std::process::id());
        assert!(!said.contains(&own), "{said}");
        service.join().unwrap();
    }
}

#[test]
fn a_peer_that_the_daemon_does_not_know_is_looked_at() {
    let d = answering(row("TCP 0x0a000003", 0x0a00_0003, "underpass"), None);
    let (port, service) = service(b"", false);
    let out = check(&d, port, &[]);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(1), "{said}");
    // It is this test, which runs without a shim.
    assert!(said.contains("peer  0x03010000 peer-no-shim"), "{said}");
    assert!(
        said.contains(&format!("(pid {})", std::process::id())),
        "{said}"
    );
    service.join().unwrap();
}

/// Not a test of its own: a service in a process of its own, for the next test.
#[test]
fn service_process() {
    if std::env::var_os("SERVICE").is_none() {
        return;
    }
    let (port, service) = service(b"", false);
    println!("port {port}");
    assert_eq!(service.join().unwrap(), b"");
}

/// A server that has only listened so far: its shim has not spoken to the daemon.
#[test]
fn a_peer_with_a_shim_that_the_daemon_has_not_met() {
    let t = tempfile::tempdir().unwrap();
    let lib = t.path().join("libunderpass.so");
    std::fs::copy(harmless_library(), &lib).unwrap();
    for (underpass, code, part) in [
        (
            "",
            0,
            "mode       SMCD (after some use; now TCP 0x0a000003)",
        ),
        ("off", 1, "peer  0x03000000 config: "),
    ] {
        let mut service = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "service_process", "--nocapture"])
            .envs([("SERVICE", "1".as_ref()), ("LD_PRELOAD", lib.as_os_str())])
            .env("UNDERPASS", underpass)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(service.stdout.take().unwrap()).lines();
        let port = lines
            .find_map(|l| l.unwrap().split_once("port ")?.1.parse().ok())
            .unwrap();
        let d = answering(row("TCP 0x0a000003", 0x0a00_0003, "underpass"), None);
        let out = check(&d, port, &[]);
        let said = text(&out.stdout);
        assert!(said.contains(part), "{said}");
        assert_eq!(out.status.code(), Some(code), "{said}");
        lines.for_each(drop);
        assert!(service.wait().unwrap().success());
    }
}

#[test]
fn a_peer_that_is_known_to_have_no_shim() {
    let mut here = row("TCP 0x0a000003/0x03010000", 0x0a00_0003, "underpass");
    here.iter_mut().for_each(|r| r.peer_reason = 0x0301_0000);
    let d = answering(here, None);
    let (port, service) = service(b"", false);
    let out = check(&d, port, &[]);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(1));
    assert!(said.contains("peer  0x03010000 peer-no-shim"), "{said}");
    service.join().unwrap();
}

#[test]
fn it_waits_for_the_peer_to_accept() {
    let asked = AtomicU32::new(0);
    let d = FakeDaemon::new(move |_| {
        let late = asked.fetch_add(1, Ordering::Relaxed) < 3;
        let peer = if late { None } else { row("SMCD", 0, "slow") };
        Response::Check {
            local: row(if late { "TCP" } else { "SMCD" }, 0, "u"),
            peer,
            verdict: String::new(),
            across: None,
        }
    });
    let (port, service) = service(b"", false);
    assert_eq!(check(&d, port, &[]).status.code(), Some(0));
    assert!(d.requests().len() > 3);
    service.join().unwrap();
}

#[test]
fn a_service_that_hangs_up() {
    let d = answering(row("TCP 0x0a00000d", 0x0a00_000d, "underpass"), None);
    let (port, service) = service(b"go away", true);
    let out = check(&d, port, &[]);
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text(&out.stdout).contains("the service closed the connection"),
        "{}",
        text(&out.stdout)
    );
    service.join().unwrap();
}

/// It talks without end and stops when the other side says that it is done.
#[test]
fn a_service_that_talks_all_the_time_sees_an_orderly_end() {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = l.local_addr().unwrap().port();
    let service = std::thread::spawn(move || {
        let (mut s, _) = l.accept().unwrap();
        let mut reader = s.try_clone().unwrap();
        let done = std::thread::spawn(move || reader.read(&mut [0; 16]).unwrap());
        while !done.is_finished() {
            s.write_all(&[b'.'; 1000]).expect("not reset");
        }
        assert_eq!(
            done.join().unwrap(),
            0,
            "end of file, and nothing before it"
        );
    });
    let d = answering(row("SMCD", 0, "underpass"), row("SMCD", 0, "chatty"));
    assert_eq!(check(&d, port, &[]).status.code(), Some(0));
    service.join().unwrap();
}

#[test]
fn without_a_daemon_it_is_tcp() {
    let (port, service) = service(b"", false);
    let empty = tempfile::tempdir().unwrap();
    let out = tool(&[
        "check",
        "127.0.0.1",
        &port.to_string(),
        "--dir",
        empty.path().to_str().unwrap(),
    ])
    .env("UNDERPASS_LIB", harmless_library())
    .output()
    .unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text(&out.stdout).contains("here  0x0a000002 no-daemon: "),
        "{}",
        text(&out.stdout)
    );
    service.join().unwrap();
}

#[test]
fn a_test_that_fails_is_2() {
    let d = answering(None, None);
    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let out = check(&d, closed, &[]);
    assert_eq!(
        (out.status.code(), text(&out.stdout)),
        (Some(2), String::new())
    );
    assert!(
        text(&out.stderr).contains("refused"),
        "{}",
        text(&out.stderr)
    );
    let no_lib = d
        .tool(&["check", "127.0.0.1", "1"])
        .env("UNDERPASS_LIB", "/no/lib")
        .output()
        .unwrap();
    assert_eq!(no_lib.status.code(), Some(2));
    assert_eq!(
        d.tool(&["check", "127.0.0.1", "70000"])
            .output()
            .unwrap()
            .status
            .code(),
        Some(2)
    );
}
