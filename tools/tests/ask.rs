//! The subcommands that ask one question, and how the tool ends when something is wrong.

mod support;

use std::fs::OpenOptions;
use std::io::Read;
use std::process::Stdio;
use support::{golden, rows, text, tool, FakeDaemon};
use underpass_admin::{RailLinks, RailStats, Request, Response, Row, Stats};

fn answering(r: Response) -> FakeDaemon {
    FakeDaemon::new(move |_| r.clone())
}

fn links(node: &str, up: u64, lanes: u64) -> RailLinks {
    RailLinks {
        node: node.into(),
        up,
        lanes,
    }
}

#[test]
fn stats_as_table_and_json() {
    let stats = Stats {
        version: "0.1.0".into(),
        pid: 77,
        uptime_s: 4000,
        clients: 2,
        links: 1,
        lanes: 50,
        memory_bytes: 3 << 20,
        registered: 100,
        datagrams: 814,
        paired_across: 12,
        taken_over: 3,
        lane_tx_bytes: 123_456_789,
        rails: vec![
            RailStats {
                device: "mlx5_0".into(),
                port: 1,
                links: vec![
                    links("node2.example", 4, 12),
                    links("node3.\u{1b}[2Jexample", 1, 0),
                ],
                writes: 1000,
                bytes: 5 << 20,
                messages_sent: 2000,
                messages_received: 1999,
                links_failed: 3,
                ..RailStats::default()
            },
            RailStats {
                device: "mlx5_1".into(),
                port: 2,
                ..RailStats::default()
            },
            RailStats {
                device: "rxe0".into(),
                port: 1,
                links: vec![links("", 2, 1)],
                ..RailStats::default()
            },
        ],
        ..Stats::default()
    };
    let d = answering(Response::Stats {
        stats: Box::new(stats.clone()),
    });
    golden("stats.txt", &text(&d.run(&["stats"]).stdout));
    let back: Stats = serde_json::from_slice(&d.run(&["stats", "-j"]).stdout).unwrap();
    assert_eq!(back, stats);
    assert_eq!(d.requests()[0], "{\"op\":\"stats\"}");
}

#[test]
fn reasons_lists_the_whole_table_without_a_daemon() {
    let table = text(
        &tool(&["reasons", "--dir", "/nonexistent"])
            .output()
            .unwrap()
            .stdout,
    );
    let json = tool(&["reasons", "-j"]).output().unwrap().stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(
        json.as_array().unwrap().len(),
        lane::proto::reason::TABLE.len()
    );
    for (i, o) in lane::proto::reason::TABLE
        .iter()
        .zip(json.as_array().unwrap())
    {
        let code = format!("0x{:08x}", i.reason.code());
        assert!(
            table.contains(&format!("{code} {:<20} {}\n", i.name, i.text)),
            "{code}"
        );
        assert!(table.contains(i.advice));
        assert_eq!(
            (o["code"].as_str(), o["name"].as_str()),
            (Some(&*code), Some(i.name))
        );
    }
}

#[test]
fn log_lines_are_printed_clean_and_in_order() {
    let d = answering(Response::Log {
        lines: vec!["first".into(), "sec\u{7}ond".into()],
    });
    assert_eq!(text(&d.run(&["log"]).stdout), "first\nsec\\u{7}ond\n");
    assert_eq!(
        text(&d.run(&["log", "-j"]).stdout),
        "[\n  \"first\",\n  \"sec\\u0007ond\"\n]\n"
    );
}

#[test]
fn down_and_up_say_what_was_meant() {
    let d = answering(Response::Told { ends: 2, later: 0 });
    for (args, request) in [
        (
            &["down", "--all"] as &[&str],
            r#"{"op":"down","target":"all"}"#,
        ),
        (
            &["down", "--pid", "9"],
            r#"{"op":"down","target":{"pid":9}}"#,
        ),
        (
            &["up", "--inode", "81"],
            r#"{"op":"up","target":{"inode":81}}"#,
        ),
        (
            &["up", "::1:80", "[::1]:5000"],
            r#"{"op":"up","target":{"pair":{"local":"[::1]:80","peer":"[::1]:5000"}}}"#,
        ),
    ] {
        let out = d.run(args);
        assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
        assert!(
            text(&out.stdout).starts_with("2 connection ends told"),
            "{}",
            text(&out.stdout)
        );
        assert_eq!(d.requests().last().unwrap(), request);
    }
    let asleep = answering(Response::Told { ends: 0, later: 1 });
    let out = asleep.run(&["down", "--pid", "9"]);
    assert_eq!(
        (text(&out.stdout).trim(), out.status.code()),
        (
            "0 connection ends told to go down to TCP; 1 will be when their programs next use a socket",
            Some(0)
        )
    );
    let none = answering(Response::Told { ends: 0, later: 0 });
    assert_eq!(
        none.run(&["down", "--pid", "9"]).status.code(),
        Some(1),
        "nothing matched"
    );
    assert_eq!(
        none.run(&["down", "--all"]).status.code(),
        Some(0),
        "nothing to do"
    );
}

#[test]
fn failures_go_to_standard_error_with_a_status() {
    let refusing = answering(Response::Error {
        message: "no such thing".into(),
    });
    let confused = answering(Response::Told { ends: 1, later: 0 });
    let stale = tempfile::tempdir().unwrap();
    drop(std::os::unix::net::UnixListener::bind(stale.path().join("admin.sock")).unwrap());
    let dir = |d: &std::path::Path| d.to_str().unwrap().to_owned();
    for (dir, part) in [
        (dir(refusing.dir.path()), "underpassd says: no such thing"),
        (dir(confused.dir.path()), "underpassd answered with `told`"),
        (dir(stale.path()), "no underpassd is running"),
        ("/nonexistent".into(), "no underpassd is running"),
    ] {
        for command in ["ss", "stats", "log"] {
            let out = tool(&[command, "--dir", &dir]).output().unwrap();
            assert_eq!(out.status.code(), Some(1), "{command}");
            assert_eq!(text(&out.stdout), "", "{command}");
            assert!(
                text(&out.stderr).contains(part),
                "{command}: {}",
                text(&out.stderr)
            );
        }
    }
    for args in [
        &["ss", "-la"] as &[&str],
        &["nonsense"],
        &[],
        &["down"],
        &["man", "nonsense"],
    ] {
        let out = tool(args).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        assert_eq!(text(&out.stdout), "", "{args:?}");
    }
}

/// A reader that goes away is no failure; nothing is said, nothing panics.
#[test]
fn a_closed_pipe_is_no_error() {
    let many: Vec<Row> = rows().into_iter().cycle().take(20_000).collect(); // more than a pipe holds
    let d = answering(Response::Ss { rows: many });
    for args in [&["ss"] as &[&str], &["ss", "-j"], &["ss", "-ae"]] {
        let mut child = d
            .tool(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut one = [0];
        child.stdout.take().unwrap().read_exact(&mut one).unwrap(); // and closed
        let out = child.wait_with_output().unwrap();
        assert_eq!(
            (out.status.code(), text(&out.stderr)),
            (Some(0), String::new()),
            "{args:?}"
        );
    }
}

#[test]
fn a_full_disk_is_an_error() {
    let d = answering(Response::Ss { rows: rows() });
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let out = d.tool(&["ss"]).stdout(full).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("cannot write to standard output"));
}

#[test]
fn help_version_completions_and_manual() {
    for args in [
        &["--help"] as &[&str],
        &["-h"],
        &["ss", "-h"],
        &["help", "check"],
        &["--version"],
        &["ss", "-v"],
    ] {
        let out = tool(args).output().unwrap();
        assert_eq!(
            (out.status.code(), text(&out.stderr)),
            (Some(0), String::new()),
            "{args:?}"
        );
        assert!(!out.stdout.is_empty());
        assert!(
            !text(&out.stdout).contains("__"),
            "{args:?}: hidden commands stay hidden"
        );
    }
    assert!(
        text(&tool(&["--version"]).output().unwrap().stdout).contains(env!("CARGO_PKG_VERSION"))
    );
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let out = tool(&["completions", shell]).output().unwrap();
        assert!(
            out.status.success() && text(&out.stdout).contains("underpass"),
            "{shell}"
        );
    }
    assert!(text(&tool(&["man", "ss"]).output().unwrap().stdout).contains(".TH underpass-ss 1"));
    let t = tempfile::tempdir().unwrap();
    assert!(tool(&["man", "--out", t.path().to_str().unwrap()])
        .status()
        .unwrap()
        .success());
    assert!(t.path().join("underpass.1").is_file() && t.path().join("underpass-run.1").is_file());
}

#[test]
fn the_option_beats_the_environment() {
    let named = answering(Response::Log {
        lines: vec!["named".into()],
    });
    let other = answering(Response::Log {
        lines: vec!["other".into()],
    });
    let dir = named.dir.path().to_str().unwrap();
    assert_eq!(text(&other.run(&["log", "--dir", dir]).stdout), "named\n");
    assert_eq!(text(&other.run(&["--dir", dir, "log"]).stdout), "named\n");
    assert_eq!(text(&other.run(&["log"]).stdout), "other\n");
}

#[test]
fn requests_are_what_the_daemon_reads() {
    // The two sides share the types; this pins the words, which other clients may use.
    for (request, words) in [
        (Request::Ss, r#"{"op":"ss"}"#),
        (
            Request::Check {
                local: "a".into(),
                peer: "b".into(),
            },
            r#"{"op":"check","local":"a","peer":"b"}"#,
        ),
        (Request::Ping, r#"{"op":"ping"}"#),
    ] {
        assert_eq!(serde_json::to_string(&request).unwrap(), words);
    }
}
