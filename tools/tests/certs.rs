//! `underpass certs` and `underpass peers`.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;
use support::{text, tool, FakeDaemon};
use underpass_admin::{NodeState, PeerState, RefusedState, Response};
use underpassd::config::TlsConfig;
use underpassd::tasks::channels::tls;

fn certs(dir: &Path, args: &str) -> Output {
    let mut c = tool(&["certs"]);
    c.args(args.split(' ')).current_dir(dir).output().unwrap()
}

fn ok(dir: &Path, args: &str) -> String {
    let out = certs(dir, args);
    assert!(out.status.success(), "{args}: {}", text(&out.stderr));
    text(&out.stdout)
}

fn wrong(dir: &Path, args: &str, part: &str) {
    let out = certs(dir, args);
    let said = text(&out.stderr);
    assert!(
        !out.status.success() && said.contains(part),
        "{args}: {said}"
    );
}

fn files(dir: &Path, name: &str) -> TlsConfig {
    TlsConfig {
        ca: dir.join("ca.crt"),
        cert: dir.join(format!("{name}.crt")),
        key: dir.join(format!("{name}.key")),
    }
}

#[test]
fn a_ca_and_nodes_that_the_daemon_can_use() {
    let t = tempfile::tempdir().unwrap();
    let d = t.path();
    ok(d, "ca");
    ok(d, "node n1.example --also alias");
    let id = tls::load(&files(d, "n1.example"), "n1.example").unwrap();
    assert_eq!(id.own.names, ["n1.example", "alias"]);
    let year = id.own.not_after - underpassd::nodes::peers::now();
    assert!((364 * 86_400..=365 * 86_400).contains(&year));
    assert!(tls::load(&files(d, "n1.example"), "n2")
        .err()
        .unwrap()
        .to_string()
        .contains("names [n1.example, alias], not this node, `n2`"));
    for key in ["ca.key", "n1.example.key"] {
        let mode = std::fs::metadata(d.join(key)).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600, "{key}");
    }
    assert!(!tls::exposed(&files(d, "n1.example")));
    let left: Vec<_> = std::fs::read_dir(d)
        .unwrap()
        .flatten()
        .map(|e| e.file_name())
        .collect();
    assert_eq!(left.len(), 4, "{left:?}");
    let shown = ok(d, "show ca.crt n1.example.crt");
    assert!(
        shown.contains("kind     CA") && shown.contains("names    n1.example, alias"),
        "{shown}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&ok(d, "show -j ca.crt n1.example.crt")).unwrap();
    assert_eq!(json[1]["names"][1], "alias");
    assert_eq!(json[0]["kind"], "CA");
}

#[test]
fn nothing_is_overwritten_without_force() {
    let t = tempfile::tempdir().unwrap();
    let d = t.path();
    ok(d, "ca");
    ok(d, "node n1");
    let read = |f: &str| std::fs::read(d.join(f)).unwrap();
    let before = [
        read("ca.key"),
        read("ca.crt"),
        read("n1.key"),
        read("n1.crt"),
    ];
    wrong(d, "ca", "ca.key exists already; --force replaces it");
    wrong(d, "node n1", "n1.key exists already");
    std::fs::remove_file(d.join("n1.key")).unwrap();
    wrong(d, "node n1", "n1.crt exists already");
    assert!(!d.join("n1.key").exists(), "half of a pair");
    assert_eq!(before[..2], [read("ca.key"), read("ca.crt")]);
    ok(d, "node n1 --force");
    assert_ne!(before[3], read("n1.crt"));
    tls::load(&files(d, "n1"), "n1").unwrap();
}

#[test]
fn mistakes_are_said() {
    let t = tempfile::tempdir().unwrap();
    let d = t.path();
    wrong(d, "node n1", "`underpass certs ca` makes a CA");
    ok(d, "ca --days 30");
    wrong(d, "node N1", "no node name");
    wrong(d, "node 10.0.0.1", "no node name");
    wrong(d, "node n1 --days 0", "0 is not in");
    wrong(d, "show ca.key", "no certificate in it");
    wrong(d, "show nothing", "No such file");
    let out = certs(d, "node n1 --days 90");
    assert!(out.status.success() && text(&out.stderr).contains("only as long as its CA"));
    // A CA certificate and the key of another, a node's certificate in place of a CA's, noise.
    ok(d, "ca --out other");
    std::fs::copy(d.join("other/ca.key"), d.join("ca.key")).unwrap();
    wrong(d, "node n2", "not the certificate of ./ca.key");
    std::fs::copy(d.join("n1.crt"), d.join("ca.crt")).unwrap();
    wrong(d, "node n2", "not the certificate of a CA");
    std::fs::write(d.join("ca.key"), "noise").unwrap();
    wrong(d, "node n2", "no usable key");
    assert!(!d.join("n2.key").exists());
}

#[test]
fn peers_as_table_and_json() {
    let d = FakeDaemon::new(|_| Response::Peers {
        node: NodeState {
            name: "n1".into(),
            listens: "[::]:7471".into(),
            expires: Some(1_800_000_000),
            life_s: Some(86_400),
            trouble: String::new(),
            waiting: 3,
        },
        peers: vec![PeerState {
            name: "n2".into(),
            address: "10.0.0.2:7471".into(),
            state: "down".into(),
            since: 1_790_000_000,
            reason: "cannot\u{7} connect".into(),
            false_claims: 2,
            ..PeerState::default()
        }],
        refused: vec![RefusedState {
            address: "10.0.0.9".into(),
            reason: "noise".into(),
            times: 4,
            at: 1_790_000_000,
        }],
    });
    let t = text(&d.run(&["peers"]).stdout);
    for part in [
        "node n1, listens at [::]:7471, certificate until 2027-01-15 08:00 UTC, 3 ends wait",
        "n2                   10.0.0.2:7471            down  2026-09-21 14:13 UTC",
        "    cannot\\u{7} connect\n    spoke for an address of another node 2 times",
        "10.0.0.9 (4 times, last 2026-09-21 14:13 UTC): noise",
    ] {
        assert!(t.contains(part), "{part:?} in\n{t}");
    }
    let j: serde_json::Value = serde_json::from_slice(&d.run(&["peers", "-j"]).stdout).unwrap();
    assert_eq!(j["peers"][0]["name"], "n2");
    assert_eq!(j["refused"][0]["times"], 4);
    let none = FakeDaemon::new(|_| Response::Peers {
        node: NodeState::default(),
        peers: vec![],
        refused: vec![],
    });
    assert!(text(&none.run(&["peers"]).stdout).contains("has no peers"));
}
