//! `underpass ss --watch`.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};
use support::{rows, serve, text, FakeDaemon};
use underpass_admin::{Response, ADMIN_SOCK};

fn daemon() -> FakeDaemon {
    FakeDaemon::new(|_| Response::Ss { rows: rows() })
}

fn start(d: &FakeDaemon, args: &[&str]) -> (Child, BufReader<ChildStdout>) {
    let mut child = d
        .tool(&[&["ss"], args].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    (child, out)
}

fn line(out: &mut impl BufRead) -> String {
    let mut l = String::new();
    out.read_line(&mut l).unwrap();
    l
}

/// The reader goes; it ends at once, and that is no failure.
fn hang_up(child: Child, out: BufReader<ChildStdout>) {
    drop(out);
    let since = Instant::now();
    let out = child.wait_with_output().unwrap();
    assert!(since.elapsed() < Duration::from_secs(20));
    assert_eq!((out.status.code(), text(&out.stderr)), (Some(0), "".into()));
}

#[test]
fn tables_in_a_pipe_have_a_time_and_an_empty_line_between_them() {
    let d = daemon();
    let once = text(&d.run(&["ss", "-a"]).stdout);
    let (child, mut out) = start(&d, &["-a", "--watch", "0.1"]);
    for n in 0..3 {
        if n != 0 {
            assert_eq!(line(&mut out), "\n");
        }
        let time = line(&mut out);
        assert!(time.starts_with('2') && time.ends_with(" UTC\n"), "{time}");
        let mut table = vec![0; once.len()];
        out.read_exact(&mut table).unwrap();
        assert_eq!(text(&table), once);
    }
    hang_up(child, out);
}

#[test]
fn json_is_an_array_on_a_line() {
    let d = daemon();
    let once: serde_json::Value = serde_json::from_slice(&d.run(&["ss", "-ej"]).stdout).unwrap();
    let (child, mut out) = start(&d, &["-ej", "--watch=0.1"]);
    for _ in 0..3 {
        let l = line(&mut out);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&l).unwrap(), once);
    }
    hang_up(child, out);
}

/// Not only when the next table is due.
#[test]
fn a_reader_that_goes_away_is_noticed_between_two_tables() {
    let d = daemon();
    let (child, mut out) = start(&d, &["--watch", "86400"]);
    line(&mut out);
    hang_up(child, out);
}

#[test]
fn a_daemon_that_goes_away_is_asked_again() {
    let d = daemon();
    let (mut child, mut out) = start(&d, &["-j", "--watch", "0.1"]);
    line(&mut out);
    std::fs::remove_file(d.dir.path().join(ADMIN_SOCK)).unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    assert!(line(&mut said).contains("no underpassd is running"));
    serve(d.dir.path(), Default::default(), |_| Response::Ss {
        rows: Vec::new(),
    });
    loop {
        let l = line(&mut out);
        assert!(!l.is_empty(), "it has ended");
        if l == "[]\n" {
            break;
        }
    }
    hang_up(child, out);
}

#[test]
fn without_a_daemon_it_fails_at_once() {
    let out = support::tool(&["ss", "--watch", "--dir", "/nonexistent"])
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("no underpassd is running"));
}
