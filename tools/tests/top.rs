//! `underpass top` on a terminal, and without one.

mod support;

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use support::pty::{Pty, Running};
use support::{rows, serve, text, FakeDaemon};
use underpass_admin::{Request, Response, Row, Stats, Where, ADMIN_SOCK};

fn answer(r: &Request, rows: Vec<Row>) -> Response {
    match r {
        Request::Ss => Response::Ss { rows },
        Request::Stats => Response::Stats {
            stats: Box::new(Stats {
                version: "0.1.0".into(),
                ..Stats::default()
            }),
        },
        _ => Response::Error {
            message: "for root on the node only".into(),
        },
    }
}

/// Its first connection sends a MiB between two looks.
fn daemon() -> FakeDaemon {
    let looks = AtomicU64::new(0);
    FakeDaemon::new(move |r| {
        let mut rows = rows();
        if let Request::Ss = r {
            rows[2].lane_tx_bytes += looks.fetch_add(1, Relaxed) << 20;
            rows[2].at = Some(Where {
                namespace: "shop".into(),
                pod: "redis-0".into(),
                container: "redis".into(),
                ..Where::default()
            });
        }
        answer(r, rows)
    })
}

const SHOWN: &str = "SMCD";
/// What leaves the alternate screen, and what shows the cursor.
const LEFT: &str = "\x1b[?1049l";
const CURSOR: &str = "\x1b[?25h";

/// On a terminal, with a table.
fn shown(d: &FakeDaemon, delay: &str) -> (Pty, Running) {
    let pty = Pty::new();
    assert!(pty.is_cooked());
    let child = pty.start(&d.tool(&["top", "-d", delay]));
    pty.wait_for(0, SHOWN);
    assert!(!pty.is_cooked());
    (pty, child)
}

fn is_given_back(pty: &Pty) {
    pty.wait_for(0, LEFT);
    assert!(pty.said().contains(CURSOR), "the cursor is there again");
    assert!(pty.is_cooked());
}

#[test]
fn once_prints_a_table_with_rates_without_a_terminal() {
    let d = daemon();
    let out = d.run(&["top", "--once", "-d", "0.2"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let t = text(&out.stdout);
    let lines: Vec<&str> = t.lines().collect();
    assert!(lines[0].starts_with("underpassd 0.1.0, up 0 s; ends: 2 SMCD, 2 SMCR, 2 TCP; out "));
    let words: Vec<&str> = lines[2].split_whitespace().collect();
    assert_eq!(words[..2], ["SMCD", "both"], "the one that sends is first");
    assert_eq!(words[3], "MiB/s", "{t}");
    assert!(lines[2].contains("redis-server") && lines[2].ends_with("shop/redis-0/redis"));
    assert!(!t.contains('\u{1b}') && !t.contains("LISTEN"));

    let of = |args: &[&str]| {
        let all = [&["top", "--once", "-d", "0.1"], args].concat();
        text(&d.run(&all).stdout)
    };
    assert_eq!(of(&["-n", "shop"]).lines().count(), 3);
    assert!(of(&["--view", "pods"]).contains("underpassd says: for root on the node only"));
    assert!(of(&["--view", "rails"]).contains("Links"));
}

#[test]
fn it_needs_a_terminal_and_a_daemon() {
    let d = daemon();
    let out = d.run(&["top"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("`underpass top --once`"));
    let pty = Pty::new();
    let _running = pty.start(&support::tool(&["top", "--dir", "/nonexistent"]));
    assert_eq!(pty.status(), 1);
    pty.wait_for(0, "no underpassd is running");
    assert!(
        !pty.said().contains('\u{1b}'),
        "before it took the terminal"
    );
}

/// For its size; what it says instead names what it has.
#[test]
fn the_command_for_containers_has_none() {
    let d = daemon();
    let mut c = Command::new(env!("CARGO_BIN_EXE_underpass-static"));
    c.args(["top", "--once"]).env("UNDERPASS_DIR", d.dir.path());
    let out = c.output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("`ss --watch`"));
    assert!(d.requests().is_empty());
}

#[test]
fn keys_choose_views_and_leave() {
    let d = daemon();
    for leave in ["q", "\x03"] {
        let (pty, _running) = shown(&d, "0.1");
        let n = pty.wait_for(0, "redis-server");
        pty.press("2");
        let n = pty.wait_for(n, "root on the node");
        pty.press("?");
        pty.wait_for(n, "Help");
        pty.press(&format!("x{leave}"));
        assert_eq!(pty.status(), 0);
        is_given_back(&pty);
    }
}

#[test]
fn a_pause_asks_nothing() {
    let d = daemon();
    let (pty, _running) = shown(&d, "0.1");
    pty.press(" ");
    let n = pty.wait_for(0, "paused");
    std::thread::sleep(Duration::from_millis(500)); // for what was asked before
    let asked = d.received().len();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(d.received().len(), asked);
    pty.press(" ");
    pty.wait_for(n, "MiB/s");
    assert!(d.received().len() > asked);
}

#[test]
fn signals_end_it_and_give_the_terminal_back() {
    let d = daemon();
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: no handler is replaced. Whoever runs the tests in the background may have it ignored, and what is ignored is
        // inherited.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        let (pty, running) = shown(&d, "0.1");
        running.kill(signal);
        let as_shells_have_it = 128 + u32::try_from(signal).unwrap();
        assert_eq!(pty.status(), as_shells_have_it);
        is_given_back(&pty);
    }
}

/// A window is closed, or a connection to the machine is: nothing goes on without a terminal.
#[test]
fn a_terminal_that_goes_takes_it_along() {
    let d = daemon();
    let (mut ours, mut theirs) = (-1, -1);
    let null = std::ptr::null_mut::<libc::c_char>();
    let size = libc::winsize {
        ws_row: 40,
        ws_col: 160,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: what is not null is there to be written to, or to be read.
    let r = unsafe { libc::openpty(&mut ours, &mut theirs, null, null.cast(), &size) };
    assert_eq!(r, 0);
    // SAFETY: they were just opened, and nobody else has them.
    let (mut ours, theirs) = unsafe { (File::from_raw_fd(ours), File::from_raw_fd(theirs)) };
    // SAFETY: a flag of a descriptor that is open.
    unsafe { libc::fcntl(ours.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
    let end = || theirs.try_clone().unwrap();
    let mut c = d.tool(&["top", "-d", "0.1"]);
    c.stdin(end()).stdout(end()).stderr(end());
    // SAFETY: calls that may be made between fork and exec.
    unsafe {
        c.pre_exec(|| {
            libc::signal(libc::SIGHUP, libc::SIG_DFL);
            libc::setsid();
            libc::ioctl(0, libc::TIOCSCTTY, 0);
            Ok(())
        });
    }
    let mut child = c.spawn().unwrap();
    drop((c, theirs));
    let (mut said, mut some) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&said).contains(SHOWN) {
        let n = ours.read(&mut some).unwrap();
        said.extend_from_slice(&some[..n]);
    }
    drop(ours);
    let until = Instant::now() + Duration::from_secs(60);
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "it goes on without a terminal");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_daemon_that_goes_away_is_said_and_asked_again() {
    let d = daemon();
    let (pty, _running) = shown(&d, "0.1");
    let n = pty.said().len();
    std::fs::remove_file(d.dir.path().join(ADMIN_SOCK)).unwrap();
    let n = pty.wait_for(n, "no underpassd is running");
    serve(d.dir.path(), Default::default(), |r| answer(r, Vec::new()));
    pty.wait_for(n, "no connections of programs");
    pty.press("q");
    assert_eq!(pty.status(), 0);
}

#[test]
fn it_follows_the_size_of_the_terminal() {
    let d = daemon();
    let (pty, _running) = shown(&d, "3600");
    let n = pty.said().len();
    pty.resize(60, 12);
    pty.wait_for(n, "\x1b[12;"); // the last line is drawn where it is now
    for (columns, rows) in [(1, 1), (3, 2), (500, 100)] {
        pty.resize(columns, rows);
        std::thread::sleep(Duration::from_millis(150));
    }
    pty.press("q");
    assert_eq!(pty.status(), 0);
    is_given_back(&pty);
}

#[test]
fn ss_clears_a_terminal_before_each_table() {
    let d = daemon();
    let pty = Pty::new();
    let _running = pty.start(&d.tool(&["ss", "--watch", "0.1"]));
    let n = pty.wait_for(0, "\x1b[H\x1b[2J");
    pty.wait_for(n, "\x1b[H\x1b[2J");
}
